//! A switch between programs.

mod ring;

pub(crate) use ring::against_memif as rings;
