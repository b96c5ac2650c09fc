//! libvnplug: reads the rings of vnplugd, on the host, in containers and in virtual machines.
//!
//! ```text
//!   application ── Port ──┬── rings, mapped: packets are read where they lie
//!                         ├── wake-up pipe: rung when the application sleeps
//!                         └── Unix socket ── vnplugd            (on the host)
//!                                        └── agent ── channel ── vnplugd   (in a guest)
//! ```
//!
//! A [`Port`] is one attached reader. [`Port::next`] has three outcomes: a packet, nothing yet,
//! ended; an error is a fourth. There is no system call per packet. [`Port::fd`] is a descriptor for
//! poll, select and epoll. A port survives a restart of the daemon and says so: the first packet
//! afterwards has [`flags::GAP`].
//!
//! ```no_run
//! use vnplug::{Next, PortOptions};
//!
//! fn main() -> Result<(), vnplug::Error> {
//!     let mut port = PortOptions::new("host:eth1").filter("udp").open()?;
//!     loop {
//!         match port.next()? {
//!             Next::Packet(packet) => println!("{} bytes", packet.meta.wire_len),
//!             Next::Nothing => {
//!                 port.wait(None)?;
//!             }
//!             Next::Ended => return Ok(()),
//!         }
//!     }
//! }
//! ```
//!
//! [`Client`] asks for devices and counters, and makes virtual machines known. The same in C:
//! `include/vnplug.h`.
//!
//! This library does not compile filters, does not capture by itself, and starts no thread.

mod error;

mod connection;
mod map;

mod backend;
mod client;
mod options;
mod peer;
mod port;

pub mod agent;

mod ffi;

pub use backend::{BackEnd, BackEndOptions, Channel, ChannelOptions, Heard, SharedMemory, Told};
pub use client::Client;
pub use error::Error;
pub use map::{map as map_memory, map_apart};
pub use options::{PortOptions, split_group};
pub use peer::{Peer, peer_of};
pub use port::{
    Asker, Batch, Bundle, Counts, Next, NextView, Outbox, Patience, Port, PortStats, Ready,
    RuleStats, View, Waiting,
};

pub use vnplug_ring::Packet;
pub use vnplug_ring::control::backend::{BackendInfo, MAX_EVENTS, MAX_SAID};
pub use vnplug_ring::control::{
    Balance, Counted, DEFAULT_SOCKET, Device, Direction, ExactRule, FilterSpec, Flow, Grant,
    GrantAction, GrantKind, MAX_EXACT_RULES, MAX_WILDCARD_RULES, NO_VLAN, Network, Pattern,
    ProgramChange, ProgramInfo, ProgramMap, Revoke, Rule, RuleAction, RuleKey, RuleKind, Segments,
    SourceRequest, Tuning, VmKind, VmReady, VmSpec, Whose, WildcardRule, code,
};
pub use vnplug_ring::layout::{Meta, flags};
pub use vnplug_ring::offload::{self, Offload};

#[cfg(doctest)]
#[doc = include_str!("../../docs/library.md")]
mod library_md {}
