//! The library and the agent against a small server under the test's control, and what is built on them.

#[cfg(test)]
mod agent;
#[cfg(test)]
mod back_ends;
#[cfg(test)]
mod c;
#[cfg(test)]
mod channel;
#[cfg(test)]
mod guests;
#[cfg(test)]
mod port;
#[cfg(test)]
mod support;
