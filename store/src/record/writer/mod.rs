//! Writes the segments of one directory.
//!
//! | state | what happens | leaves when |
//! |---|---|---|
//! | no segment | nothing is open | a chunk comes: a segment is made |
//! | writing | chunks are appended in order | rotation, end: closed. An error: poisoned |
//! | paused | chunks wait in memory, then in the ring, where losses are counted | tried again in a new segment: after a quarter of a second, then twice as long each time, up to [`RETRY_MOST`] |
//!
//! An error of a write poisons the segment: it is cut behind the last write that succeeded, synced
//! once, closed and never written again. The chunks that were not written go to the next one. After
//! an error of fdatasync nothing is known of what was written since the last success: those packets
//! are counted as `unknown`, whatever a second fdatasync would say (it would say that all is well).
//! The disk is then **in doubt** until packets are synced again: a new segment's header is synced
//! before a packet is written to it, and nothing is recycled, since what would take the place of a
//! durable segment may not be durable.
//!
//! While a batch of chunks is on its way to the disk, the index of the one before it is made. Its buffers
//! are free only then.

mod append;
mod books;
mod segment;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

pub(super) use self::append::AT_ONCE;
use self::segment::Segment;
use super::Settings;
use super::chunk::Chunk;
use super::ledger::Ledger;
use super::room;
use crate::disk::{self, Buffer, Disk};
use crate::index::Live;

/// The writer of one directory.
#[derive(Debug)]
pub struct Writer {
    disk: Box<dyn Disk>,
    dir: PathBuf,
    lane: usize,
    settings: Settings,
    ledger: Arc<Ledger>,
    /// Where buffers go back to.
    pool: Sender<Buffer>,
    segment: Option<Segment>,
    backlog: VecDeque<Chunk>,
    /// Written, and not yet in the index: where, and what.
    behind: Vec<(u64, Chunk)>,
    /// For headers and ends of segments.
    spare: Option<Buffer>,
    retry_at: Option<Instant>,
    /// Attempts that failed since the last success.
    failures: u32,
    /// Chunks of the backlog that may be in the segment's file, behind its end.
    failed: usize,
    /// The last write failed: chunks are written one by one.
    careful: bool,
    /// fdatasync failed, and has not succeeded with packets since.
    doubt: bool,
    synced_at: Instant,
    /// The books as they were when the state file was written.
    saved: u64,
    saved_at: Instant,
    state_fails: bool,
    index: Live,
    /// The segment is closed when all was written.
    ends: bool,
}

impl Writer {
    /// A writer of `dir`, which is the `lane`th.
    pub fn new(
        disk: Box<dyn Disk>,
        dir: PathBuf,
        lane: usize,
        settings: Settings,
        ledger: Arc<Ledger>,
        pool: Sender<Buffer>,
    ) -> Self {
        Self {
            disk,
            dir,
            lane,
            settings,
            ledger,
            pool,
            segment: None,
            backlog: VecDeque::new(),
            behind: Vec::new(),
            spare: Some(Buffer::new(SPARE, u16::MAX)),
            retry_at: None,
            failures: 0,
            failed: 0,
            careful: false,
            doubt: false,
            synced_at: Instant::now(),
            saved: 0,
            saved_at: Instant::now(),
            state_fails: false,
            index: Live::default(),
            ends: false,
        }
    }

    /// Takes a chunk.
    pub fn push(&mut self, chunk: Chunk) {
        self.ends = false;
        self.backlog.push_back(chunk);
    }

    /// Closes the segment when what waits is written: the next chunk comes much later.
    pub fn end_segment(&mut self) {
        self.ends = true;
    }

    /// Chunks that wait.
    pub fn waiting(&self) -> usize {
        self.backlog.len()
    }

    /// Writes what waits, as far as the disk lets us, and syncs when it is time.
    pub fn work(&mut self, now: Instant) {
        if self.backlog.is_empty() {
            self.catch_up();
        }
        while !self.backlog.is_empty() && self.retry_at.is_none_or(|at| now >= at) {
            let before = self.backlog.len();
            self.retry_at = None;
            match self.write_some(now) {
                Ok(()) if self.retry_at.is_none() && !self.doubt => self.goes_on(),
                Ok(()) => {}
                Err(error) => self.trouble(&error, before, now),
            }
            if self.synced_at.elapsed() >= self.settings.sync_every {
                self.sync(now);
            }
        }
        if self.synced_at.elapsed() >= self.settings.sync_every {
            self.sync(now);
        }
        if self.ends && self.backlog.is_empty() {
            self.ends = false;
            self.close(now);
        }
        // What other directories and the reader did is told here, too.
        if self.saved_at.elapsed() >= self.settings.sync_every
            && self.ledger.revision() != self.saved
        {
            self.save_state();
        }
    }

    /// Whether the disk takes nothing at the moment.
    pub fn pauses(&self) -> bool {
        self.retry_at.is_some()
    }

    /// Until when the disk takes nothing, if so.
    pub fn pauses_until(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Gives back what waits: another disk may take it.
    pub fn take_back(&mut self) -> Vec<Chunk> {
        self.backlog.drain(..).collect()
    }

    fn goes_on(&mut self) {
        self.failures = 0;
        self.ledger.paused(self.lane, "");
    }

    fn pause(&mut self, now: Instant, why: &str) {
        let wait = RETRY
            .saturating_mul(1 << self.failures.min(8))
            .min(RETRY_MOST);
        self.failures += 1;
        self.retry_at = Some(now + wait);
        if self.ledger.paused(self.lane, why) {
            log::warn!("{}: recording pauses: {why}", self.dir.display());
        }
    }

    /// When [`work`](Self::work) has something to do even if no chunk comes.
    pub fn due(&self) -> Option<Instant> {
        if !self.backlog.is_empty() {
            return Some(self.retry_at.unwrap_or(self.synced_at));
        }
        if !self.behind.is_empty() {
            return Some(self.synced_at);
        }
        let segment = self.segment.as_ref()?;
        (!segment.unsynced.is_empty()).then(|| self.synced_at + self.settings.sync_every)
    }

    /// Closes the segment. What still waits is lost, and counted.
    pub fn end(&mut self, now: Instant) {
        self.retry_at = None;
        self.work(now);
        while let Some(chunk) = self.backlog.pop_front() {
            self.lose(
                chunk,
                None,
                "the disk did not take it before the recorder ended",
            );
        }
        self.close(now);
        self.save_state();
    }

    /// Something went wrong; the segment is poisoned.
    fn trouble(&mut self, error: &io::Error, before: usize, now: Instant) {
        // An error that met a segment with data in it may be that segment's alone.
        let had_packets = self.poison(error, now);
        self.careful = true;
        let recycles = self.settings.quota.is_some() && !self.doubt;
        let made_room = disk::is_full(error) && recycles && self.recycle();
        let progress = had_packets || self.backlog.len() < before;
        if self.retry_at.is_none() && !made_room && !progress {
            self.pause(now, &error.to_string());
        }
    }

    fn recycle(&mut self) -> bool {
        let keep = self.segment.as_ref().map(|segment| segment.name.sequence);
        let recording = &self.settings.recording;
        match room::make_room(self.disk.as_mut(), &self.dir, recording, keep) {
            Ok(removed) => {
                self.ledger
                    .lane(self.lane, |lane| lane.recycled += u64::from(removed));
                removed
            }
            Err(error) => {
                log::warn!("{}: nothing can be recycled: {error}", self.dir.display());
                false
            }
        }
    }

    fn enforce_quota(&mut self) {
        let Some(quota) = self.settings.quota else {
            return;
        };
        if self.doubt {
            return;
        }
        let keep = self.segment.as_ref().map(|segment| segment.name.sequence);
        // What is reserved for the open segment counts already.
        let more = if keep.is_none() {
            self.settings.reserve()
        } else {
            0
        };
        let recording = &self.settings.recording;
        match quota.enforce(self.disk.as_mut(), &self.dir, recording, keep, more) {
            Ok((removed, enough)) => {
                self.ledger.lane(self.lane, |lane| lane.recycled += removed);
                if !enough {
                    log::debug!("{}: nothing more to recycle", self.dir.display());
                }
            }
            Err(error) => log::warn!("{}: the quota: {error}", self.dir.display()),
        }
    }
}

const SPARE: usize = 64 << 10;
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MOST: Duration = Duration::from_secs(4);
