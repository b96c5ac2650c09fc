//! Programs written for PF_RING, compiled against our header, run on the host and in a guest.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod guest;
mod host;
mod send;
mod support;
mod symbols;
mod threads;
