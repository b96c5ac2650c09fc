//! Closed segments, compressed and encrypted.
//!
//! ```text
//! NAME-SEQ-START.pcapng ── zstd, frames of 1 MiB ── age ──> NAME-SEQ-START.pcapng.zst.age
//!               .vnx ────────────────────────────── age ──> NAME-SEQ-START.vnx.age
//! ```
//!
//! Either step may be left out. The index has the offsets of the segment as it was: a program that reads
//! ([`crate::read`]) asks for those, and gets the frames that they lie in. A compressed segment alone
//! keeps its index as it is; that of an encrypted one would tell who spoke with whom, and is encrypted,
//! too.
//!
//! A thread of the lowest priority does it, one segment after the other, and waits while the recorder is
//! short of buffers. What it needs to know it finds in the directories, so what a recorder left undone,
//! the next one does.
//!
//! **After a crash** there is the segment, or the packed one, or both, and each that has its name is
//! whole: the packed one is written and synced under another name (`.part`), read back from the disk, and
//! compared with what was written; then renamed, its directory synced, and only then the segment is
//! removed, when nobody reads it ([`crate::disk::lease`]). Who finds both reads one of them.
//!
//! It goes through the recorder's door to the disk ([`crate::disk::Disk`]), so that tests fail each of
//! its calls, and take its power after each.

mod job;
mod pack;
mod part;
mod seal;
mod seekable;
mod worker;

pub use seal::{Keys, Recipients};
pub(crate) use seekable::Seekable;
pub use worker::{ArchiveStatus, Worker};

use crate::name::Packing;

/// What is done with closed segments.
#[derive(Debug, Clone, Default)]
pub struct How {
    /// zstd's level; `None` is not compressed.
    pub level: Option<i32>,
    /// For whom it is encrypted; nobody: it is not.
    pub recipients: Recipients,
}

impl How {
    /// What files are called then.
    pub fn packing(&self) -> Packing {
        Packing {
            zstd: self.level.is_some(),
            age: !self.recipients.is_empty(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
