//! Names are resolved by us: asking for one is an act like others, and what was answered is what rules for names
//! rest on.
//!
//! ```text
//!  program ── question ──> proxy ── may it? ──> gate
//!                            │ yes
//!                            └── a question of our own ──> upstream
//!  program <── the answer without addresses of the floor <── filter ──> learned
//! ```
//!
//! What is forwarded is made anew from the name and the type: no other bit of the program's message goes out. Of an answer
//! the program gets the records that lead from its name to what it asked for, and nothing else. `HTTPS` and `SVCB`
//! records are answered as if there were none: they hold addresses and keys that would make the rest invisible.

pub mod message;
pub mod proxy;
pub mod upstream;

#[cfg(test)]
mod tests;

pub use proxy::Proxy;
pub use upstream::Upstream;

use std::net::{IpAddr, SocketAddr};

/// The name servers of a resolv.conf.
pub fn nameservers(resolv_conf: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        let word = words
            .next()
            .filter(|&word| word == "nameserver")
            .and_then(|_| words.next())?;
        // A scope (fe80::1%eth0) has no number here.
        word.parse::<IpAddr>()
            .ok()
            .map(|address| SocketAddr::new(address, 53))
    };
    // As many as the C library takes.
    resolv_conf.lines().filter_map(address).take(3).collect()
}
