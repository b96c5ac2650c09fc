//! The library and the agent against a small server under the test's control.

#[cfg(test)]
mod agent;
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
