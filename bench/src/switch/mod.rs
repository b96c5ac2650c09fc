//! A switch between programs and guests.

mod aggregate;
mod arm;
mod calls;
mod client;
mod curve;
mod direct;
mod guests;
mod hlvi;
mod lans;
mod loss;
mod many;
mod mixed;
mod ovs;
mod pairs;
mod plugs;
mod relay;
mod ring;
mod stages;
mod talk;
mod vde;
mod vhost;

pub(crate) use aggregate::{aggregate, requests};
pub(crate) use curve::curve;
pub(crate) use direct::against_memif as direct;
pub(crate) use hlvi::hlvi;
pub(crate) use loss::loss;
pub(crate) use many::{IDLE, idle, many};
pub(crate) use mixed::mixed;
pub(crate) use pairs::pairs;
pub(crate) use plugs::programs;
pub(crate) use ring::against_memif as rings;
pub(crate) use stages::stages;
pub(crate) use talk::{CHILD, child};
pub(crate) use vde::against_vde_switch;
pub(crate) use vhost::against_others as vhost;
