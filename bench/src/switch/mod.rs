//! A switch between programs and guests.

mod aggregate;
mod arm;
mod calls;
mod card;
mod client;
mod curve;
mod cutter;
mod direct;
mod frames;
mod guests;
mod hlvi;
mod httpd;
mod instructions;
mod lans;
mod loss;
mod many;
mod mixed;
mod ovs;
mod pairs;
mod plugs;
mod qemu;
mod relay;
mod ring;
mod short;
mod slow_start;
mod stages;
mod talk;
mod through;
mod twin;
mod twin_peers;
mod twin_web;
mod vde;
mod vhost;

pub(crate) use aggregate::{
    aggregate, asleep, loss as aggregate_loss, requests, senders as aggregate_senders,
};
pub(crate) use calls::Calls;
pub(crate) use curve::curve;
pub(crate) use cutter::cutter;
pub(crate) use direct::against_memif as direct;
pub(crate) use hlvi::{hlvi, xdp as hlvi_xdp};
pub(crate) use httpd::httpd;
pub(crate) use instructions::instructions;
pub(crate) use loss::loss;
pub(crate) use many::{IDLE, idle, many};
pub(crate) use mixed::mixed;
pub(crate) use pairs::pairs;
pub(crate) use plugs::programs;
pub(crate) use qemu::calls as qemu_calls;
pub(crate) use ring::against_memif as rings;
pub(crate) use short::{acks_only, flood};
pub(crate) use slow_start::{senders as acks_senders, slow_start};
pub(crate) use stages::{
    CONTEXT_CHILD, context_child, contexts, crowd as contexts_of_guests, parts as twin_parts,
    stages,
};
pub(crate) use talk::{CHILD, child};
pub(crate) use twin::{containers as twin_containers, upcalls as twin_upcalls};
pub(crate) use twin_peers::{guest as twin_guest, peers as twin_peers};
pub(crate) use twin_web::web as twin_web;
pub(crate) use vde::against_vde_switch;
pub(crate) use vhost::against_others as vhost;
