//! The recorder's books: what was taken, what is durable, what was lost, when and why.
//!
//! The account closes at every moment: `taken = durable + buffered + lost_disk + lost_unknown`. Each part
//! is counted by itself, `buffered` in the chunks that are under way ([`Status::unexplained`]). Losses in the ring come on top: those packets were never taken. With triggers, what waited in memory
//! and was not asked for is the fifth part (`passed_over`).
//!
//! The **durable mark** is a prefix: every packet up to this number, in the order in which they were
//! taken, is on the disk. It moves when a first fdatasync(2) succeeds and in no other way, and stops for the
//! rest of the run before the first packet that the disk did not take, or did not confirm. What was lost on
//! the way to the recorder was never taken, and does not count.
//!
//! The **settled mark** goes on: every packet up to it is on the disk, or counted as lost. Without losses
//! after the ring both are one.
//!
//! The **mark's time** is a watermark over stamps: of the packets that were taken so far, none with an
//! earlier stamp waits for the disk. It is the earliest stamp of the packets that do wait, in chunks that
//! are written or filled at the moment, and just after the latest stamp if none does. A packet that
//! comes with an earlier stamp (of another source, or after the clock was set back) takes it back with it,
//! until that packet is durable; how far that was at most is counted (`late_ns`). The durable mark's time
//! stops before the earliest packet that the recorder lost.

mod status;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::chunk::Tally;
use super::dedup::DedupStatus;
use crate::archive::ArchiveStatus;
use crate::name::LAST_SEQUENCE;

pub use status::{Earlier, LaneStatus, Loss, Run, Status, TriggerStatus};

/// The books, shared by the threads of a recorder.
#[derive(Debug)]
pub struct Ledger {
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    status: Status,
    /// Chunks from the mark on, by their serial numbers. Settled ones that follow each other are one.
    open: BTreeMap<u64, Open>,
    /// The earliest stamp and the serial number of each that is not settled.
    waits: BTreeSet<(u64, u64)>,
    /// The earliest stamp of the chunk that is being filled.
    filling_ns: Option<u64>,
    /// The latest stamp that was taken.
    latest_ns: Option<u64>,
    /// As far as the mark's time has been.
    farthest_ns: u64,
    /// The first packet that was taken and lost: its place, and the earliest stamp of those.
    broken: Option<(u64, u64)>,
    /// Losses that no file tells yet.
    untold: Vec<Loss>,
    /// Of each interface: duplicates that no file tells yet.
    duplicates: Vec<u64>,
}

#[derive(Debug)]
struct Open {
    /// Packets taken before it.
    from: u64,
    /// Packets taken up to its end.
    until: u64,
    /// Packets of it that are neither durable nor lost, nor passed over.
    packets: u64,
    first_ns: u64,
    last_ns: u64,
    settled: bool,
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
            run: Run {
                number: 1,
                ..Run::default()
            },
            lanes: directories.iter().map(lane).collect(),
            ..Status::default()
        };
        let books = Books {
            status,
            ..Books::default()
        };
        Self {
            books: Mutex::new(books),
        }
    }

    /// Goes on after what the last state of the run before says, and after the segments that are
    /// there: `sequence` is the number of the next one.
    pub fn go_on(&self, before: Option<&Status>, sequence: u64, now_ns: u64) {
        let mut books = self.books();
        let status = &mut books.status;
        if let Some(before) = before {
            status.run.number = before.run.number + 1;
            status.earlier = Earlier::with(before);
            status.losses.clone_from(&before.losses);
        }
        let next = before.map_or(0, |before| before.next_sequence);
        status.next_sequence = sequence.max(next);
        (status.run.started_ns, status.run.first_sequence) = (now_ns, status.next_sequence);
    }

    /// Every ring is open: packets are recorded from now on.
    pub fn since(&self, now_ns: u64) {
        self.books().status.run.since_ns = now_ns;
    }

    /// The recorder is at work, whether packets come or not.
    pub fn beat(&self, now_ns: u64) {
        let last = self.lock().status.heartbeat_ns;
        if now_ns.abs_diff(last) >= BEAT_NS {
            self.books().status.heartbeat_ns = now_ns;
        }
    }

    /// A copy.
    pub fn status(&self) -> Status {
        let books = self.lock();
        Status {
            buffered: books.open.values().map(|open| open.packets).sum(),
            ..books.status.clone()
        }
    }

    /// A number that grows with every change.
    pub fn revision(&self) -> u64 {
        self.lock().status.revision
    }

    /// A number for a segment; `None`: there is none left.
    pub fn sequence(&self) -> Option<u64> {
        let status = &mut self.books().status;
        let next = status.next_sequence;
        (next <= LAST_SEQUENCE).then(|| {
            status.next_sequence += 1;
            next
        })
    }

    /// No segment has got this number. False if a later one was given away.
    pub fn give_back(&self, sequence: u64) -> bool {
        let status = &mut self.books().status;
        let is_last = status.next_sequence == sequence + 1;
        status.next_sequence -= u64::from(is_last);
        is_last
    }

    /// The chunk that is being filled has a packet of this stamp, and none before it.
    pub fn filling(&self, first_ns: u64) {
        let mut books = self.books();
        books.filling_ns = Some(first_ns);
        let late_ns = books.farthest_ns.saturating_sub(first_ns);
        books.status.late_ns = books.status.late_ns.max(late_ns);
        books.set_time();
    }

    /// A chunk was filled, or more of it.
    pub fn taken(&self, serial: u64, tally: &Tally) {
        let mut books = self.books();
        let from = books.status.taken;
        books.status.taken += tally.packets;
        books.status.taken_bytes += tally.bytes;
        let until = books.status.taken;
        let open = books.open.entry(serial).or_insert(Open {
            from,
            until,
            packets: 0,
            first_ns: tally.first_ns,
            last_ns: tally.last_ns,
            settled: false,
        });
        let before = open.first_ns;
        (open.until, open.settled) = (until, false);
        open.packets += tally.packets;
        open.first_ns = open.first_ns.min(tally.first_ns);
        open.last_ns = open.last_ns.max(tally.last_ns);
        let first_ns = open.first_ns;
        books.waits.remove(&(before, serial));
        books.waits.insert((first_ns, serial));
        books.filling_ns = None;
        books.latest_ns = books.latest_ns.max(Some(tally.last_ns));
        books.set_time();
    }

    /// Packets of a chunk waited in memory and are not recorded; `early`: memory was short.
    pub fn passed_over(&self, serial: u64, packets: u64, early: bool) {
        let mut books = self.books();
        let status = books.status.trigger.get_or_insert_default();
        status.passed_over += packets;
        status.early += if early { packets } else { 0 };
        if books.take_out(serial, packets) == Some(0) {
            books.settle(serial);
        }
        books.set_time();
    }

    /// Changes what is known of triggers.
    pub fn trigger(&self, change: impl FnOnce(&mut TriggerStatus)) {
        change(self.books().status.trigger.get_or_insert_default());
    }

    /// Packets came a second time and were left out.
    /// `each` interface has this many, which a segment's statistics will tell.
    pub fn duplicates(&self, news: DedupStatus, each: &[u64]) {
        let mut books = self.lock();
        let count = books.duplicates.len().max(each.len());
        books.duplicates.resize(count, 0);
        for (mine, more) in books.duplicates.iter_mut().zip(each) {
            *mine += more;
        }
        let is_new = books.status.duplicates.is_none() || news != DedupStatus::default();
        let status = books.status.duplicates.get_or_insert_default();
        status.packets += news.packets;
        status.bytes += news.bytes;
        status.forgotten += news.forgotten;
        books.status.revision += u64::from(is_new);
    }

    /// Takes the duplicates of each interface that no file tells yet; the caller writes them to
    /// one.
    pub fn take_duplicates(&self) -> Vec<u64> {
        std::mem::take(&mut self.lock().duplicates)
    }

    /// Changes what is known of packed segments.
    pub fn archive(&self, change: impl FnOnce(&mut ArchiveStatus)) {
        let mut books = self.lock();
        let mut status = books.status.archive.clone().unwrap_or_default();
        change(&mut status);
        if books.status.archive.as_ref() != Some(&status) {
            books.status.archive = Some(status);
            books.status.revision += 1;
        }
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
            books.take_out(*serial, tally.packets);
            books.settle(*serial);
        }
        books.set_time();
    }

    /// A chunk is lost. It may be there nevertheless if it was `written` to a segment.
    pub fn lost(&self, serial: u64, tally: &Tally, written: Option<&str>, reason: &str) {
        let mut books = self.books();
        let kind = match written {
            Some(_) => {
                books.status.lost_unknown += tally.packets;
                "unknown"
            }
            None => {
                books.status.lost_disk += tally.packets;
                "disk"
            }
        };
        let loss = Loss {
            from_ns: tally.first_ns,
            to_ns: tally.last_ns,
            packets: tally.packets,
            kind: kind.to_owned(),
            segment: written.unwrap_or_default().to_owned(),
            reason: reason.to_owned(),
            ..Loss::default()
        };
        // What the ring lost before its packets was told in it.
        let told = tally.interfaces.iter().map(|(_, lost)| lost).sum();
        if told > 0 {
            books.tell(Loss {
                packets: told,
                kind: "ring".to_owned(),
                reason: super::RING_FULL.to_owned(),
                ..loss.clone()
            });
        }
        books.tell(loss.clone());
        books.lose(loss);
        let from = books.open.get(&serial).map(|open| open.from);
        books.stop(from, tally.first_ns);
        books.take_out(serial, tally.packets);
        books.settle(serial);
        books.set_time();
    }

    /// A writer is gone: chunks that are neither durable nor lost are written, or not.
    pub fn give_up(&self, reason: &str) {
        let mut books = self.books();
        let open = std::mem::take(&mut books.open);
        books.waits.clear();
        for chunk in open.values() {
            books.status.settled = chunk.until;
            if chunk.settled {
                continue;
            }
            books.stop(Some(chunk.from), chunk.first_ns);
            books.status.lost_unknown += chunk.packets;
            let loss = Loss {
                from_ns: chunk.first_ns,
                to_ns: chunk.last_ns,
                packets: chunk.packets,
                kind: "unknown".to_owned(),
                reason: reason.to_owned(),
                ..Loss::default()
            };
            books.tell(loss.clone());
            books.lose(loss);
        }
        books.set_time();
    }

    /// Packets were lost in the ring, or on the way from it, between two stamps. `told`: a file says so
    /// at the place.
    pub fn lost_in_ring(&self, from_ns: u64, to_ns: u64, packets: u64, reason: &str, told: bool) {
        let mut books = self.books();
        books.status.lost_ring += packets;
        let loss = Loss {
            from_ns,
            to_ns,
            packets,
            kind: "ring".to_owned(),
            reason: reason.to_owned(),
            ..Loss::default()
        };
        if !told {
            books.tell(loss.clone());
        }
        books.lose(loss);
    }

    /// An unknown number of packets is missing between two stamps. `told`: a file says so at the place.
    pub fn gap(&self, from_ns: u64, to_ns: u64, told: bool) {
        let mut books = self.books();
        books.status.gaps += 1;
        let loss = Loss {
            from_ns,
            to_ns,
            kind: status::GAP.to_owned(),
            reason: super::RESTART.to_owned(),
            ..Loss::default()
        };
        if !told {
            books.tell(loss.clone());
        }
        books.lose(loss);
    }

    /// This many more were lost before the daemon.
    pub fn lost_at_source(&self, from_ns: u64, to_ns: u64, more: u64) {
        if more == 0 {
            return;
        }
        let mut books = self.books();
        books.status.lost_source += more;
        let loss = Loss {
            from_ns,
            to_ns,
            packets: more,
            kind: "source".to_owned(),
            reason: "lost by the kernel or the NIC".to_owned(),
            ..Loss::default()
        };
        books.tell(loss.clone());
        books.lose(loss);
    }

    /// Takes the losses that no file tells yet; the caller writes them to one.
    pub fn take_untold(&self) -> Vec<Loss> {
        std::mem::take(&mut self.lock().untold)
    }

    /// Whether there are some.
    pub fn has_untold(&self) -> bool {
        !self.lock().untold.is_empty()
    }

    /// Gives them back: the file does not have them.
    pub fn untell(&self, losses: Vec<Loss>) {
        let mut books = self.lock();
        for loss in losses {
            books.tell(loss);
        }
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

    /// The run is over.
    pub fn end(&self) {
        self.books().status.run.ended = true;
        let unexplained = self.status().unexplained();
        if unexplained != 0 {
            log::error!(
                "the account does not close by {unexplained} packets: please report it, with the state file"
            );
        }
    }

    /// To change them.
    fn books(&self) -> MutexGuard<'_, Books> {
        let mut books = self.lock();
        books.status.revision += 1;
        books
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    /// What became of packets of a chunk is known. How many it has left.
    fn take_out(&mut self, serial: u64, packets: u64) -> Option<u64> {
        let open = self.open.get_mut(&serial)?;
        open.packets = open.packets.saturating_sub(packets);
        Some(open.packets)
    }

    fn settle(&mut self, serial: u64) {
        let Some(open) = self.open.get_mut(&serial).filter(|open| !open.settled) else {
            return;
        };
        open.settled = true;
        let mut until = open.until;
        self.waits.remove(&(open.first_ns, serial));
        // Of those that are settled and follow each other only the end counts: one that is stuck for ever
        // costs nothing after it.
        let next = self.open.range(serial + 1..).next();
        if let Some((&next, open)) = next.filter(|(_, open)| open.settled) {
            until = open.until;
            self.open.remove(&next);
        }
        match self.open.range_mut(..serial).next_back() {
            None => {
                self.open.remove(&serial);
                self.status.settled = until;
            }
            Some((_, before)) if before.settled => {
                before.until = until;
                self.open.remove(&serial);
            }
            Some(_) => {
                if let Some(open) = self.open.get_mut(&serial) {
                    open.until = until;
                }
            }
        }
    }

    fn set_time(&mut self) {
        let first = self.waits.first().map(|&(first_ns, _)| first_ns);
        let waits = first.into_iter().chain(self.filling_ns).min();
        let behind = || self.latest_ns.map(|ns| ns.saturating_add(1));
        let status = &mut self.status;
        status.settled_ns = waits.or_else(behind).unwrap_or(0);
        self.farthest_ns = self.farthest_ns.max(status.settled_ns);
        let (place, ns) = self.broken.unwrap_or((u64::MAX, u64::MAX));
        (status.mark, status.mark_ns) = (status.settled.min(place), status.settled_ns.min(ns));
    }

    /// A packet was lost that had been taken: the durable mark does not pass it.
    fn stop(&mut self, place: Option<u64>, ns: u64) {
        let place = place.unwrap_or(self.status.mark);
        let (before, before_ns) = self.broken.unwrap_or((u64::MAX, u64::MAX));
        self.broken = Some((before.min(place), before_ns.min(ns)));
    }

    fn lose(&mut self, loss: Loss) {
        let gone = add(&mut self.status.losses, loss, self.status.run.number);
        if let Some(gone) = gone.filter(|gone| gone.run == self.status.run.number) {
            self.status.older_losses += gone.packets;
        }
    }

    fn tell(&mut self, loss: Loss) {
        // Without a file that can tell them, or with one that never does, the latest are kept.
        let _ = add(&mut self.untold, loss, self.status.run.number);
    }
}

/// Adds a loss to a list; a loss soon after another of its kind is the same. What must leave the list.
fn add(losses: &mut Vec<Loss>, mut loss: Loss, run: u64) -> Option<Loss> {
    loss.run = run;
    let mut latest = losses.iter_mut().rev().take(4);
    if let Some(same) = latest.find(|last| last.is_with(&loss)) {
        same.join(&loss);
        return None;
    }
    let gone = (losses.len() == MOST_LOSSES).then(|| losses.remove(0));
    losses.push(loss);
    gone
}

const BEAT_NS: u64 = 500_000_000;
const MOST_LOSSES: usize = 256;
