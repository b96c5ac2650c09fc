//! What vNPlug asks of Linux: one family of system calls per module, each with a safe interface,
//! and most of the host's unsafe code.
//!
//! - Memory that others reach: [`memory`], [`packet_file`], [`umem`], [`sigbus`], [`mappings`].
//! - Sockets that receive a wire: [`packet`], [`xdp`], and the kernel programs below them, [`bpf`].
//! - Peers: [`socket`], [`placed`] (files where somebody else may put others), [`access`] (who else may open a file), [`closer`] (closes what a peer can make slow to close), [`noise`] (how
//!   much a peer can make us log).
//! - The process: [`privileges`], [`namespace`], [`signals`], [`service`] (what a service manager is told), [`kept`] (what it keeps), [`event`],
//!   [`interface`], [`links`], [`statistics`] and [`netlink`] (what interfaces there are), [`prefetch`], and memory for machine code ([`executable`]).

pub mod access;
pub mod bpf;
pub mod closer;
pub mod datagrams;
pub mod event;
pub mod executable;
pub mod fair;
pub mod interface;
pub mod kept;
pub mod links;
pub mod mappings;
pub mod memory;
pub mod namespace;
pub mod netlink;
pub mod noise;
pub mod packet;
pub mod packet_file;
pub mod placed;
pub mod prefetch;
pub mod privileges;
pub mod service;
pub mod sigbus;
pub mod signals;
pub mod socket;
pub mod statistics;
pub mod umem;
pub mod xdp;

#[doc(hidden)]
pub use log;
