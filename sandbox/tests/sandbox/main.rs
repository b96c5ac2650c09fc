//! The sandbox as an ordinary user runs it: what is allowed works, what is not is refused, and there is no way around.
//!
//! The program inside is `sandbox-probe` (`tests/probe`). It runs as nobody.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod channels;
mod closed;
mod files;
mod races;
mod runs;
mod support;
mod who;
mod works;
