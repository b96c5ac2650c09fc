//! The entrance for virtual machines: vhost-user, of which this is the back-end, ours whole.
//!
//! A guest's virtio network card is two rings in the guest's memory. A front-end (QEMU, User-mode Linux,
//! Cloud Hypervisor, DPDK's virtio-user) connects to a socket of ours, hands over that memory, and says
//! where the rings are. From then on frames go between guest and switch without a system call each.
//!
//! ```text
//! messages → session → setup → the thread that forwards: link → ring → memory
//! ```
//!
//! | file | what it has |
//! |---|---|
//! | `door.rs` | the socket, the thread that hears all front-ends, their ports |
//! | `card.rs` | the card that it is offered |
//! | `session.rs` | one front-end: what it says, and the setup that this makes |
//! | `message.rs`, `payload.rs` | messages with their descriptors, and what they carry |
//! | `link/` | one guest's rings, as the threads that forward use them |
//! | `frames.rs` | frames out of rings and into them, with their headers |
//! | `acks.rs` | ACKs that stand for several |
//! | `tail.rs` | the rest of a long frame, copied from guest to guest |
//! | `ring.rs` | a split virtqueue |
//! | `control.rs` | the control queue |
//! | `memory.rs` | the one door to the guest's memory |
//! | `call.rs` | interrupts |
//! | `remind.rs` | those that a guest has not read, made again |
//! | `spec.rs` | numbers of the standards |
//!
//! The thread of the door hears and answers; it never waits for a front-end. The threads that forward
//! wait for each other at most, and for no guest. The front-end is a stranger, and so is the guest behind it: see `memory.rs` and
//! `ring.rs` for what they can try.

mod acks;
mod call;
mod card;
mod control;
pub(crate) mod door;
mod frames;
mod link;
mod memory;
mod message;
mod payload;
mod remind;
mod ring;
mod session;
mod spec;
pub(crate) mod tail;

pub(crate) use link::{Guest, Passage};
