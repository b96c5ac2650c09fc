//! What two address spaces agree on.
//!
//! ```text
//!   host (vnplugd)                     shared memory                     reader (libvnplug)
//!   ┌──────────┐  reserve→fill→publish ┌─────────────────┐  next→release ┌──────────┐
//!   │ Producer │ ────────────────────▶ │ header  │ lines │ ────────────▶ │ Consumer │
//!   └──────────┘ ◀──── tail only ───── │ records ……      │ ◀──── tail ── └──────────┘
//!                                      └─────────────────┘
//! ```
//!
//! One ring has one producer (the daemon) and one consumer (an application on the host, in a
//! container or in a virtual machine). [`layout`] is the specification; `docs/ring-format.md` says
//! the same in prose for readers in other languages. [`control`] is the one client protocol, spoken
//! over a Unix socket on host and in guests and over a VM's control channel.
//!
//! One layout, one set of indices, one way to sleep. The kinds differ in what a record is, and in who
//! may lie:
//!
//! | kind | written by | a record is | why not the first kind |
//! |---|---|---|---|
//! | packets: [`Producer`] → [`Consumer`] | host | header and frame | |
//! | descriptors: [`Producer`] → [`Consumer`], with an [`ArenaReader`] | host | 16 bytes: which record of an [`arena`] | several readers share one copy, or read the NIC's own memory |
//! | frames to send: [`Producer`] → [`Intake`] | application | header and frame | its writer is not trusted: the host copies, then looks |
//! | packets, [`direct`]: [`Producer`] → [`Consumer`] | application | header and frame | each side writes memory of its own only |
//!
//! An [`arena`] is not a ring: nobody gives room back, and readers find out what they were too slow for.
//! Its records are placed in turn ([`Arena`]), or lie in whole buffers that a kernel fills ([`Buffers`]).
//!
//! [`wake`] is how either side sleeps and is woken. [`news`] says which of many rings have something, to whoever reads or
//! serves all of them.
//!
//! [`units`] is how people write sizes and times, to whichever program; [`text`] how foreign text is shown.
//!
//! This crate is not an allocator, makes no system call and maps no memory: callers hand it a
//! [`Region`]. It has no dependencies.
//!
//! Trust is asymmetric. The reader trusts the host. The host trusts nothing the reader can write:
//! it keeps its own indices, froze the geometry when it created the ring, and takes one word from
//! the reader, `tail`, as a distance that must not exceed the capacity ([`PeerLied`]). From a ring
//! that transmits ([`Intake`]) it copies each frame once before anything looks at it; the frame may lie, in part, where the
//! same reader received it ([`posted`]).

pub mod arena;
pub mod direct;
pub mod layout;
pub mod news;
pub mod offload;
pub mod posted;
pub mod wake;

mod region;

mod consumer;
mod header;
mod intake;
mod producer;

pub mod control;
pub mod counters;
pub mod pmem;
pub mod pool;
pub mod text;
pub mod units;

pub use arena::{Arena, ArenaGeometry, ArenaReader, BufferGeometry, Buffers, Placed};
pub use consumer::{AttachError, Batch, Consumer, Corrupt, Look, Packet, Wait};
pub use intake::{Intake, SenderLied, Sent};
pub use posted::{Outlet, Posts};
pub use producer::{Bell, CreateError, Ground, PeerLied, Producer, Slot};
pub use region::Region;

#[cfg(test)]
mod tests;
