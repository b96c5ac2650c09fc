//! `vnplug-web` and `vnplug-metrics` as clients and a browser see it.

#[cfg(test)]
mod browser;
#[cfg(test)]
mod connections;
#[cfg(test)]
mod files;
#[cfg(test)]
mod http;
#[cfg(test)]
mod live;
#[cfg(test)]
mod losses;
#[cfg(test)]
mod metrics;
#[cfg(test)]
mod page;
#[cfg(test)]
mod picture;
#[cfg(test)]
mod services;
#[cfg(test)]
mod support;
#[cfg(test)]
mod users;
