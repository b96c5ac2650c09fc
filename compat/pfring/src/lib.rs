//! libpfring: the PF_RING API over vNPlug's rings, on the host, in containers and in guests.
//!
//! ```text
//!   program ── pfring.h ── ffi ── Handle ── Reader ── vnplug::Port (one per device or queue)
//!                                   │
//!                                   ├── Senders ── vnplug::Port (when something is sent)
//!                                   └── Gate: breakloop, shutdown, descriptors (no lock)
//! ```
//!
//! Sources written for PF_RING's header compile unchanged against `include/pfring.h`. What is asked
//! of a ring (filters, rules, clusters, sampling) is done by the daemon before a packet is copied;
//! packets are lent to the program where they lie. What has no meaning here returns
//! `PF_RING_ERROR_NOT_SUPPORTED`; `docs/pfring.md` has the table.
//!
//! This library needs no kernel module, starts no thread, and prints nothing.

mod abi;

mod device;
mod error;
mod gate;
mod handle;
mod reader;
mod send;
mod sender;
mod settings;

mod parse;
mod print;
mod rules;

mod ffi;
