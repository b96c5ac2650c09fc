//! The drop-in: its symbols, a C program that tries its calls, unmodified tcpdump. Needs root.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod programs;
mod support;
mod symbols;
mod tcpdump;
mod threads;
