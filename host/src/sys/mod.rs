//! The daemon's unsafe islands: one family of system calls per file, a safe door in front of each.

pub(crate) mod bpf;
pub(crate) mod confine;
pub(crate) mod event;
pub(crate) mod executable;
pub(crate) mod interface;
pub(crate) mod mappings;
pub(crate) mod memory;
pub(crate) mod packet;
pub(crate) mod packet_file;
pub(crate) mod pcap;
pub(crate) mod prefetch;
pub(crate) mod privileges;
pub(crate) mod sigbus;
pub(crate) mod signals;
pub(crate) mod socket;
pub(crate) mod speculation;
pub(crate) mod umem;
pub(crate) mod xdp;
