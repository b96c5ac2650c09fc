//! The module with libvdeplug as Debian has it, and with programs that nobody here wrote. Needs root.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod calls;
mod guests;
mod programs;
mod support;
