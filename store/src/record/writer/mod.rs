//! Writes the segments of one directory.
//!
//! | state | what happens | leaves when |
//! |---|---|---|
//! | no segment | nothing is open | a chunk comes: a segment is made |
//! | writing | chunks are appended in order | rotation, end: closed. An error: poisoned |
//! | paused | chunks wait in memory, then in the ring, where losses are counted | tried again in a new segment: after a quarter of a second, then twice as long each time, up to [`RETRY_MOST`] |
//!
//! An error of a write poisons the segment: it is cut after the last write that succeeded, synced
//! once, closed and never written again. The chunks that were not written go to the next one. After
//! an error of fdatasync nothing is known of what was written since the last success: those packets
//! are counted as `unknown`, whatever a second fdatasync would say (it would say that all is well).
//! The disk is then **in doubt** until packets are synced again: a new segment's header is synced
//! before a packet is written to it, and nothing is recycled, since what would take the place of a
//! durable segment may not be durable.
//!
//! While chunks are on their way to the disk, others are started that follow at once, and the disk has some
//! also while a sync, the state file or the quota take their time. The index is made of what is written,
//! while more is on its way; a chunk's buffer is free only then.

mod append;
mod books;
mod segment;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use self::segment::Segment;
use super::Settings;
use super::chunk::Chunk;
use super::ledger::Ledger;
use super::now_ns;
use super::room::{self, Room};
use crate::disk::{self, Buffer, Disk};
use crate::index::Live;
use crate::manifest::Manifest;

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
    /// On their way to the disk, which has their buffers.
    flying: VecDeque<Chunk>,
    /// How many that may be.
    most: usize,
    /// Written, and not yet in the index: where, and what.
    behind: Vec<(u64, Chunk)>,
    /// For headers and ends of segments.
    spare: Option<Buffer>,
    retry_at: Option<Instant>,
    /// Attempts that failed since the last success.
    failures: u32,
    /// Chunks of the backlog that may be in the segment's file, after its end.
    failed: usize,
    /// More was reserved: the quota is to be looked at.
    quota_due: bool,
    /// It was, and there is room for a segment's first bytes.
    has_room: bool,
    /// Bytes that were removed since a packet was written, and when.
    removed: u64,
    removed_at: Option<Instant>,
    /// When the ages of segments were looked at.
    aged_at: Option<Instant>,
    /// The last write failed: chunks are written one by one.
    careful: bool,
    /// fdatasync failed, and has not succeeded with packets since.
    doubt: bool,
    synced_at: Instant,
    /// The books as they were when the state file was written.
    saved: u64,
    saved_at: Instant,
    /// It is to be written again.
    state_due: bool,
    state_fails: bool,
    index: Live,
    /// The segment is closed when all was written.
    ends: bool,
    manifest: Option<Arc<Manifest>>,
    /// A number that was taken for a segment that could not be begun: the next one has it.
    number: Option<u64>,
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
        // Others are left to be filled; what a disk has that stands still no other one gets.
        let buffers = usize::from(settings.buffers);
        let most = match ledger.status().lanes.len() {
            0 | 1 => buffers * 3 / 4,
            lanes => buffers / 2 / lanes,
        };
        let most = most.clamp(2, MOST);
        Self {
            disk,
            dir,
            lane,
            settings,
            ledger,
            pool,
            segment: None,
            backlog: VecDeque::new(),
            flying: VecDeque::new(),
            most,
            behind: Vec::new(),
            spare: Some(Buffer::new(SPARE, u16::MAX)),
            retry_at: None,
            failures: 0,
            failed: 0,
            quota_due: false,
            has_room: false,
            removed: 0,
            removed_at: None,
            aged_at: None,
            careful: false,
            doubt: false,
            synced_at: Instant::now(),
            saved: 0,
            saved_at: Instant::now(),
            state_due: false,
            state_fails: false,
            index: Live::default(),
            ends: false,
            manifest: None,
            number: None,
        }
    }

    /// What is removed is noted there before.
    pub fn keep_manifest(&mut self, manifest: Option<Arc<Manifest>>) {
        self.manifest = manifest;
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

    /// Chunks that it may be given.
    pub fn room(&self) -> usize {
        self.most.saturating_sub(self.held())
    }

    /// Chunks that wait, or are on their way to the disk.
    pub fn held(&self) -> usize {
        self.backlog.len() + self.flying.len()
    }

    /// Whether [`step`](Self::step) has something to do at once.
    pub fn is_busy(&self) -> bool {
        !self.flying.is_empty() || !self.behind.is_empty() || self.state_due
    }

    /// Does all of [`step`](Self::step)s that can be done now.
    pub fn work(&mut self, now: Instant) {
        loop {
            self.step(now);
            let waits = self.backlog.is_empty() || self.retry_at.is_some_and(|at| now < at);
            if waits && !self.is_busy() {
                break;
            }
        }
    }

    /// Gives the disk what waits, as far as it lets us, waits for one of its writes, and syncs when it is
    /// time.
    pub fn step(&mut self, now: Instant) {
        if !self.backlog.is_empty() && self.retry_at.is_none_or(|at| now >= at) {
            let before = self.held();
            self.retry_at = None;
            if let Err(error) = self.start_some(now) {
                self.trouble(&error, before, now);
            }
        }
        // The disk has something to do meanwhile.
        self.disk.submit();
        self.catch_up();
        if std::mem::take(&mut self.quota_due) {
            self.has_room = self.enforce_quota();
        }
        self.remove_aged();
        if self.state_due {
            self.save_state();
        }
        if !self.flying.is_empty() {
            let before = self.held();
            match self.finish_one() {
                Ok(()) if self.retry_at.is_none() && !self.doubt => self.goes_on(),
                Ok(()) => {}
                Err(error) => self.trouble(&error, before, now),
            }
        }
        if self.due(self.synced_at) {
            self.sync(now);
        }
        if self.ends && self.held() == 0 {
            self.ends = false;
            self.close(now);
        }
        // What other directories and the reader did is told here, too.
        let old = self.saved_at.elapsed() >= self.settings.sync_every.min(STATE_AT_LEAST);
        self.state_due |= old && self.ledger.revision() != self.saved;
        if self.state_due && self.flying.is_empty() && (self.backlog.is_empty() || self.pauses()) {
            self.save_state();
        }
    }

    /// Whether it is long ago.
    fn due(&self, since: Instant) -> bool {
        since.elapsed() >= self.settings.sync_every
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

    /// When [`step`](Self::step) has something to do even if no chunk comes.
    pub fn due_at(&self) -> Option<Instant> {
        if self.is_busy() {
            return Some(self.synced_at);
        }
        if !self.backlog.is_empty() {
            return Some(self.retry_at.unwrap_or(self.synced_at));
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
        if let Some(number) = self.number.take()
            && !self.ledger.give_back(number)
            && let Some(manifest) = &self.manifest
            && let Err(error) = manifest.unused(number)
        {
            log::warn!("{}: the manifest: {error}", self.dir.display());
        }
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

    /// Removes the oldest segment, since the disk is full.
    fn recycle(&mut self) -> bool {
        if !self.may_recycle() {
            return false;
        }
        let keep = self.segment.as_ref().map(|segment| segment.name.sequence);
        let recording = &self.settings.recording;
        let removing = &mut |file: &str| note_removal(self.manifest.as_deref(), file, "quota");
        let made = room::make_room(self.disk.as_mut(), &self.dir, recording, keep, removing);
        self.recycled(made).is_some_and(|room| room.bytes > 0)
    }

    /// Removing is of use: what was removed since the last packet was written is less than the next chunk needs, or
    /// long ago. Else it gives no room back (a snapshot, somebody has it open), or others take it.
    fn may_recycle(&mut self) -> bool {
        if self.removed_at.is_some_and(|at| at.elapsed() >= PATIENCE) {
            self.removed = 0;
        }
        let first = self.backlog.front().map_or(0, |chunk| chunk.len);
        self.removed <= 2 * first as u64
    }

    /// Counts what was removed.
    fn recycled(&mut self, made: io::Result<Room>) -> Option<Room> {
        let room = made
            .inspect_err(|error| log::warn!("{}: the quota: {error}", self.dir.display()))
            .ok()?;
        if room.segments > 0 {
            self.removed += room.bytes;
            self.removed_at = Some(Instant::now());
        }
        self.count(room);
        Some(room)
    }

    /// Removes what is older than it may be, now and then.
    fn remove_aged(&mut self) {
        let Some(max_age) = self.settings.max_age else {
            return;
        };
        // What takes the place of a durable segment may not be durable.
        if self.doubt || self.aged_at.is_some_and(|at| at.elapsed() < AGE_EVERY) {
            return;
        }
        self.aged_at = Some(Instant::now());
        let age_ns = u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX);
        let keep = self.segment.as_ref().map(|segment| segment.name.sequence);
        let recording = &self.settings.recording;
        let removing = &mut |file: &str| note_removal(self.manifest.as_deref(), file, "age");
        let removed = room::remove_aged(
            self.disk.as_mut(),
            &self.dir,
            recording,
            keep,
            now_ns().saturating_sub(age_ns),
            removing,
        );
        match removed {
            Ok(room) => self.count(room),
            Err(error) => log::warn!("{}: what is too old: {error}", self.dir.display()),
        }
    }

    /// Tells what was removed.
    fn count(&self, room: Room) {
        if room.read > 0 {
            log::warn!(
                "{}: {} of the oldest segments were removed while somebody reads them: he keeps them open as long as \
                 there is room",
                self.dir.display(),
                room.read,
            );
        }
        if room.cut > 0 {
            log::warn!(
                "{}: {} removed segments were taken from a reader: their room was needed",
                self.dir.display(),
                room.cut,
            );
        }
        if room.segments + room.cut > 0 {
            self.ledger.lane(self.lane, |lane| {
                lane.recycled += room.segments;
                lane.recycled_read += room.read;
                lane.readers_cut += room.cut;
            });
        }
    }

    /// Makes room for what is reserved next. True if there is.
    fn enforce_quota(&mut self) -> bool {
        let Some(quota) = self.settings.quota else {
            return true;
        };
        if self.doubt || self.failures > 0 && !self.may_recycle() {
            return false;
        }
        let keep = self.segment.as_ref().map(|segment| segment.name.sequence);
        let more = self.settings.reserve();
        let recording = &self.settings.recording;
        let removing = &mut |file: &str| note_removal(self.manifest.as_deref(), file, "quota");
        let made = quota.enforce(
            self.disk.as_mut(),
            &self.dir,
            recording,
            keep,
            more,
            removing,
        );
        self.recycled(made).is_some_and(|room| room.enough)
    }
}

/// Before the file goes: a kill in between must not make a hole of it.
fn note_removal(manifest: Option<&Manifest>, file: &str, why: &str) {
    let noted = manifest.map_or(Ok(()), |manifest| manifest.removing(file, why));
    if let Err(error) = noted {
        log::warn!("{file}: its removal is not in the manifest: {error}");
    }
}

/// How often the state is written while anything changes, the heartbeat included.
const STATE_AT_LEAST: Duration = Duration::from_millis(600);
/// How long a full disk to which removed segments give nothing back is left alone.
const PATIENCE: Duration = Duration::from_secs(60);
/// Chunks of a directory that are under way.
const MOST: usize = 12;
const SPARE: usize = 64 << 10;
/// How often the ages of segments are looked at.
const AGE_EVERY: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MOST: Duration = Duration::from_secs(1);
