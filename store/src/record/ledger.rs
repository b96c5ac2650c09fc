//! The recorder's books: what was taken, what is durable, what was lost, when and why.
//!
//! The account closes at every moment: `taken = durable + buffered + lost_disk + lost_unknown`.
//! Losses in the ring come on top: those packets were never taken.
//!
//! The **durable mark** is a prefix: every packet up to this number, in the order in which they were
//! taken, is on the disk, but for those that are counted as lost. It moves when a first fdatasync(2)
//! succeeds and in no other way.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::chunk::Tally;
use crate::name;

/// The books, shared by the threads of a recorder.
#[derive(Debug)]
pub struct Ledger {
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    status: Status,
    /// Chunks from the mark on, by their serial numbers.
    open: BTreeMap<u64, Open>,
    /// Grows with every change.
    revision: u64,
}

#[derive(Debug)]
struct Open {
    /// Packets taken up to its end.
    until: u64,
    packets: u64,
    first_ns: u64,
    last_ns: u64,
    settled: bool,
}

/// A copy of the books.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The recording's name.
    pub recording: String,
    /// Packets read from the ring.
    pub taken: u64,
    /// Their captured bytes.
    pub taken_bytes: u64,
    /// Packets that are on the disk for certain.
    pub durable: u64,
    /// The durable mark: all packets up to this number are on the disk or counted as lost.
    pub mark: u64,
    /// The latest stamp of those, nanoseconds since 1970.
    pub mark_ns: u64,
    /// Lost because the ring was full: the disk was too slow, or had none.
    pub lost_ring: u64,
    /// Lost before the daemon, by the kernel or the NIC, as the daemon knows.
    pub lost_source: u64,
    /// Taken, and not written: the disk refused.
    pub lost_disk: u64,
    /// Written, and the disk failed to say that it is durable: readable or not.
    pub lost_unknown: u64,
    /// The directories.
    pub lanes: Vec<LaneStatus>,
    /// The latest losses, oldest first.
    pub losses: Vec<Loss>,
    /// Losses that are no longer in that list.
    pub older_losses: u64,
}

/// What is known of one directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LaneStatus {
    /// The directory.
    pub directory: String,
    /// The segment that is being written, or was last.
    pub segment: String,
    /// Its bytes that are durable.
    pub offset: u64,
    /// Its packets that are durable.
    pub packets: u64,
    /// The latest stamp of those.
    pub last_ns: u64,
    /// Segments that were recycled.
    pub recycled: u64,
    /// Why nothing is written now; empty = it is.
    pub paused: String,
    /// Segments that were given up because of an error.
    pub poisoned: u64,
}

/// Packets that are missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Between this stamp, nanoseconds since 1970,
    pub from_ns: u64,
    /// and this one.
    pub to_ns: u64,
    /// How many.
    pub packets: u64,
    /// `ring`, `disk`, `unknown`, `source`.
    pub kind: &'static str,
    /// Why, in words.
    pub reason: String,
}

impl Ledger {
    /// New books for these directories.
    pub fn new(recording: &str, directories: &[String]) -> Self {
        let lane = |directory: &String| LaneStatus {
            directory: directory.clone(),
            ..LaneStatus::default()
        };
        let status = Status {
            recording: recording.to_owned(),
            lanes: directories.iter().map(lane).collect(),
            ..Status::default()
        };
        let books = Books {
            status,
            open: BTreeMap::new(),
            revision: 0,
        };
        Self {
            books: Mutex::new(books),
        }
    }

    /// A copy.
    pub fn status(&self) -> Status {
        self.lock().status.clone()
    }

    /// A number that grows with every change.
    pub fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// A chunk was filled.
    pub fn taken(&self, serial: u64, tally: &Tally) {
        let mut books = self.books();
        books.status.taken += tally.packets;
        books.status.taken_bytes += tally.bytes;
        let open = Open {
            until: books.status.taken,
            packets: tally.packets,
            first_ns: tally.first_ns,
            last_ns: tally.last_ns,
            settled: false,
        };
        books.open.insert(serial, open);
    }

    /// These chunks are durable.
    pub fn durable(&self, lane: usize, offset: u64, chunks: &[(u64, Tally)]) {
        let mut books = self.books();
        for (serial, tally) in chunks {
            books.status.durable += tally.packets;
            let lane = &mut books.status.lanes[lane];
            lane.offset = offset;
            lane.packets += tally.packets;
            lane.last_ns = lane.last_ns.max(tally.last_ns);
            books.settle(*serial);
        }
    }

    /// A chunk is lost; `written`: it may be on the disk nevertheless.
    pub fn lost(&self, serial: u64, tally: &Tally, written: bool, reason: &str) {
        let mut books = self.books();
        let kind = if written {
            books.status.lost_unknown += tally.packets;
            "unknown"
        } else {
            books.status.lost_disk += tally.packets;
            "disk"
        };
        books.lose(Loss {
            from_ns: tally.first_ns,
            to_ns: tally.last_ns,
            packets: tally.packets,
            kind,
            reason: reason.to_owned(),
        });
        books.settle(serial);
    }

    /// A writer is gone: chunks that are neither durable nor lost are written, or not.
    pub fn give_up(&self, reason: &str) {
        let mut books = self.books();
        let open = std::mem::take(&mut books.open);
        for chunk in open.values() {
            books.status.mark = chunk.until;
            books.status.mark_ns = books.status.mark_ns.max(chunk.last_ns);
            if chunk.settled {
                continue;
            }
            books.status.lost_unknown += chunk.packets;
            books.lose(Loss {
                from_ns: chunk.first_ns,
                to_ns: chunk.last_ns,
                packets: chunk.packets,
                kind: "unknown",
                reason: reason.to_owned(),
            });
        }
    }

    /// Packets were lost in the ring, or on the way from it, between two stamps.
    pub fn lost_in_ring(&self, from_ns: u64, to_ns: u64, packets: u64, reason: &str) {
        let mut books = self.books();
        books.status.lost_ring += packets;
        books.lose(Loss {
            from_ns,
            to_ns,
            packets,
            kind: "ring",
            reason: reason.to_owned(),
        });
    }

    /// So many more were lost before the daemon.
    pub fn lost_at_source(&self, from_ns: u64, to_ns: u64, more: u64) {
        if more == 0 {
            return;
        }
        let mut books = self.books();
        books.status.lost_source += more;
        books.lose(Loss {
            from_ns,
            to_ns,
            packets: more,
            kind: "source",
            reason: "lost by the kernel or the NIC".into(),
        });
    }

    /// Changes what is known of a directory.
    pub fn lane(&self, lane: usize, change: impl FnOnce(&mut LaneStatus)) {
        if let Some(lane) = self.books().status.lanes.get_mut(lane) {
            change(lane);
        }
    }

    /// Says why nothing is written to a directory; empty = it is. True if it was before.
    pub fn paused(&self, lane: usize, why: &str) -> bool {
        let was = |books: &Books| Some(books.status.lanes.get(lane)?.paused.clone());
        let before = was(&self.lock()).unwrap_or_default();
        if before != why {
            self.lane(lane, |lane| why.clone_into(&mut lane.paused));
        }
        before.is_empty()
    }

    /// To change them.
    fn books(&self) -> MutexGuard<'_, Books> {
        let mut books = self.lock();
        books.revision += 1;
        books
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    fn settle(&mut self, serial: u64) {
        if let Some(open) = self.open.get_mut(&serial) {
            open.settled = true;
        }
        while let Some(first) = self.open.first_entry() {
            if !first.get().settled {
                break;
            }
            let open = first.remove();
            self.status.mark = open.until;
            self.status.mark_ns = self.status.mark_ns.max(open.last_ns);
        }
    }

    /// A loss soon after another of its kind is the same.
    fn lose(&mut self, loss: Loss) {
        let losses = &mut self.status.losses;
        let same = losses.iter_mut().rev().take(4).find(|last| {
            last.kind == loss.kind
                && last.reason == loss.reason
                && loss.from_ns <= last.to_ns.saturating_add(SAME_NS)
                && last.from_ns <= loss.to_ns.saturating_add(SAME_NS)
        });
        if let Some(last) = same {
            last.packets += loss.packets;
            last.from_ns = last.from_ns.min(loss.from_ns);
            last.to_ns = last.to_ns.max(loss.to_ns);
            return;
        }
        if losses.len() == MOST_LOSSES {
            let first = losses.remove(0);
            self.status.older_losses += first.packets;
        }
        losses.push(loss);
    }
}

impl Status {
    /// Packets that are taken and not yet settled.
    pub fn buffered(&self) -> u64 {
        self.taken - self.durable - self.lost_disk - self.lost_unknown
    }

    /// All that is known to be missing.
    pub fn lost(&self) -> u64 {
        self.lost_ring + self.lost_source + self.lost_disk + self.lost_unknown
    }

    /// The state file's text; `now_ns` is when it is written.
    pub fn to_json(&self, now_ns: u64) -> String {
        let loss = |loss: &Loss| {
            serde_json::json!({
                "from": name::time(loss.from_ns), "to": name::time(loss.to_ns),
                "packets": loss.packets, "kind": loss.kind, "reason": loss.reason,
            })
        };
        let lane = |lane: &LaneStatus| {
            serde_json::json!({
                "directory": lane.directory, "segment": lane.segment, "offset": lane.offset,
                "packets": lane.packets, "last_ns": lane.last_ns, "recycled": lane.recycled,
                "poisoned": lane.poisoned, "paused": lane.paused,
            })
        };
        let value = serde_json::json!({
            "version": 1,
            "recording": self.recording,
            "written_ns": now_ns,
            "durable_mark": { "packets": self.mark, "time_ns": self.mark_ns, "time": name::time(self.mark_ns) },
            "taken": self.taken,
            "taken_bytes": self.taken_bytes,
            "durable": self.durable,
            "buffered": self.buffered(),
            "lost": {
                "ring": self.lost_ring, "source": self.lost_source,
                "disk": self.lost_disk, "unknown": self.lost_unknown,
            },
            "disks": self.lanes.iter().map(lane).collect::<Vec<_>>(),
            "losses": self.losses.iter().map(loss).collect::<Vec<_>>(),
            "older_losses": self.older_losses,
        });
        format!("{value:#}\n")
    }
}

/// Losses of one kind within a second are one.
const SAME_NS: u64 = 1_000_000_000;
const MOST_LOSSES: usize = 256;
