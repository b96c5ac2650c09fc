//! A switch between programs.

mod direct;
mod ring;

pub(crate) use direct::against_memif as direct;
pub(crate) use ring::against_memif as rings;
