//! vnplug-store: packets to disk at the disk's speed, found again, never lost after a promise.
//!
//! ```text
//!   Port ── record ── segment files, one directory per disk ── extract, replay
//!              │          └── NAME-SEQ-START.pcapng beside its index, .vnx
//!              ├── NAME.state: what is durable
//!              └── NAME.manifest: what was closed, and its hashes
//! ```
//!
//! The recorder is an ordinary reader of a port. What it writes are real capture files; everything
//! else about a recording follows from their names ([`name`]) and can be made again from them.
//! [`disk`] is the door to the file system: a small trait with a real implementation and one for
//! tests that fails or cuts where it is told.

pub mod archive;
pub mod disk;
pub mod extract;
pub mod filter;
pub mod index;
pub mod manifest;
pub mod name;
pub mod read;
pub mod record;
pub mod replay;

#[cfg(test)]
pub(crate) mod testing;
