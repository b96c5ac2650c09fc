//! The directories of a recorder: which of them gets the next chunk, and the thread that writes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::queue::Queue;
use super::writer::Writer;
use super::{Filling, LAST_TRY, Recorder, SHORT, Settings};

/// What the reader knows of a directory.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) queue: Arc<Queue>,
    /// The next chunk begins a segment whatever the last one holds.
    pub(super) begins: bool,
    /// Of the segment as it is meant to be.
    pub(super) bytes: u64,
    pub(super) packets: u64,
    pub(super) start_ns: u64,
}

impl Recorder {
    /// The directory that is least behind; of several, the next in turn. One whose disk takes nothing
    /// comes last.
    pub(super) fn least_behind(&self) -> usize {
        let now = Instant::now();
        let behind = |&lane: &usize| {
            let queue = &self.lanes[lane].queue;
            (queue.is_stuck(now), queue.load())
        };
        let turn = self.serial as usize % self.lanes.len();
        let order = (turn..self.lanes.len()).chain(0..turn);
        order.min_by_key(behind).unwrap_or(0)
    }

    /// Gives what waits for disks that take nothing to those that do. Segments end where they must all
    /// the same: writers see to that.
    pub(super) fn share(&mut self, now: Instant) {
        let stuck: Vec<bool> = self
            .lanes
            .iter()
            .map(|lane| lane.queue.is_stuck(now))
            .collect();
        if !stuck.contains(&true) || !stuck.contains(&false) {
            return;
        }
        let mut chunks = Vec::new();
        for (lane, _) in self
            .lanes
            .iter_mut()
            .zip(&stuck)
            .filter(|(_, stuck)| **stuck)
        {
            let back = lane.queue.take_back();
            lane.begins |= !back.is_empty();
            chunks.extend(back);
        }
        if chunks.is_empty() {
            return;
        }
        log::info!("{} chunks go to other directories", chunks.len());
        chunks.sort_unstable_by_key(|chunk| chunk.serial);
        let takers: Vec<&Lane> = self
            .lanes
            .iter()
            .zip(&stuck)
            .filter(|(_, stuck)| !**stuck)
            .map(|(lane, _)| lane)
            .collect();
        let each = chunks.len().div_ceil(takers.len());
        for taker in takers {
            let rest = chunks.split_off(each.min(chunks.len()));
            taker.queue.insert(chunks);
            chunks = rest;
        }
    }

    /// Until everything is written, or no disk has taken anything for some time.
    pub(super) fn wait_for_writers(&mut self) {
        let (mut least, mut since) = (usize::MAX, Instant::now());
        while self.lanes.len() > 1 {
            let now = Instant::now();
            self.share(now);
            let waiting: usize = self.lanes.iter().map(|lane| lane.queue.load()).sum();
            if waiting < least {
                (least, since) = (waiting, now);
            }
            if waiting == 0 || now.saturating_duration_since(since) >= LAST_TRY {
                return;
            }
            std::thread::sleep(SHORT);
        }
    }

    /// Waits for the ends of the writers, as long as anything goes on.
    pub(super) fn writers(&mut self, patience: Duration) -> Vec<Writer> {
        let (mut seen, mut since) = (self.ledger.revision(), Instant::now());
        let (mut writers, mut gone) = (Vec::new(), None);
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && since.elapsed() < patience {
                std::thread::sleep(SHORT);
                if self.ledger.revision() != seen {
                    (seen, since) = (self.ledger.revision(), Instant::now());
                }
            }
            let ended = thread.is_finished().then(|| thread.join());
            match ended {
                Some(Ok(writer)) => writers.push(writer),
                Some(Err(_)) => gone = Some("the writer of its directory panicked"),
                None => gone = Some("the disk stood still when the recorder ended"),
            }
        }
        if let Some(why) = gone {
            log::error!("what is on its way to a disk is given up: {why}");
            self.ledger.give_up(why);
        }
        writers
    }
}

impl Lane {
    /// Whether the next chunk begins a segment.
    pub(super) fn is_full(&self, settings: &Settings, fill: usize, ts_ns: u64) -> bool {
        let bytes = settings.rotate_bytes > 0 && self.bytes + fill as u64 > settings.rotate_bytes;
        let packets = settings.rotate_packets > 0 && self.packets >= settings.rotate_packets;
        self.begins || bytes || packets || self.is_late(settings, self.start_ns, ts_ns)
    }

    /// Whether the chunk ends before a packet of this stamp, since its segment does.
    pub(super) fn is_over(&self, settings: &Settings, filling: &Filling, ts_ns: u64) -> bool {
        let (before, start) = match filling.begins_segment {
            true => (0, filling.tally.first_ns),
            false => (self.packets, self.start_ns),
        };
        let packets = before + filling.tally.packets;
        settings.rotate_packets > 0 && packets >= settings.rotate_packets
            || self.is_late(settings, start, ts_ns)
    }

    fn is_late(&self, settings: &Settings, start_ns: u64, ts_ns: u64) -> bool {
        let limit = settings.rotate_time.as_nanos() as u64;
        // Also when the clock was set back: else the segment would last until it catches up.
        limit > 0 && ts_ns.abs_diff(start_ns) >= limit
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// A writer's thread: until the recorder has no more for it.
pub(super) fn drive(writer: &mut Writer, queue: &Queue) {
    let mut limit = None;
    loop {
        let now = Instant::now();
        let due = writer.due_at().unwrap_or(now + IDLE);
        let taken = queue.take(writer.room(), due);
        let none = taken.chunks.is_empty() && writer.held() == 0;
        for chunk in taken.chunks {
            writer.push(chunk);
        }
        if taken.ends {
            writer.end_segment();
        }
        writer.step(Instant::now());
        let pauses_until = writer.pauses_until();
        let back = match pauses_until {
            Some(_) => writer.take_back(),
            None => Vec::new(),
        };
        queue.rest(writer.held(), back, pauses_until);
        if taken.closed {
            let limit = *limit.get_or_insert(now + LAST_TRY);
            if none && taken.empty || pauses_until.is_some() && now >= limit {
                break;
            }
            if pauses_until.is_some() {
                std::thread::sleep(SHORT);
            }
        }
    }
    for chunk in queue.take_back() {
        writer.push(chunk);
    }
    writer.end(Instant::now());
}

const IDLE: Duration = Duration::from_millis(200);
