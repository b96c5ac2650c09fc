//! A switch between programs, and between virtual machines.

mod guests;
mod ring;

pub(crate) use guests::against_testpmd as guests;
pub(crate) use ring::against_memif as rings;
