//! The types of `pfring.h` and `linux/pf_ring.h` as Rust sees them. `tests.rs` compares every
//! size and offset with the C compiler's.

pub(crate) mod packet;
pub(crate) mod ring;
pub(crate) mod rule;

#[cfg(test)]
mod tests;
