//! A switch between programs, and between virtual machines.

mod direct;
mod ring;
mod vhost;

pub(crate) use direct::against_memif as direct;
pub(crate) use ring::against_memif as rings;
pub(crate) use vhost::against_testpmd as vhost;
