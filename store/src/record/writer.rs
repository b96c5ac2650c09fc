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

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::Settings;
use super::chunk::{Chunk, Tally};
use super::ledger::Ledger;
use super::room;
use crate::disk::{self, BLOCK, Buffer, Disk, Write};
use crate::encode::{pcap, pcapng};
use crate::index::Live;
use crate::name::{Format, SegmentName, state_file};

/// The writer of one directory.
#[derive(Debug)]
pub struct Writer {
    disk: Box<dyn Disk>,
    dir: PathBuf,
    lane: usize,
    settings: Settings,
    ledger: Arc<Ledger>,
    /// The next segment's number, of all directories.
    next: Arc<AtomicU64>,
    /// Where buffers go back to.
    pool: Sender<Buffer>,
    segment: Option<Segment>,
    backlog: VecDeque<Chunk>,
    /// For headers and ends of segments.
    spare: Option<Buffer>,
    /// What the next segment says about losses of this one.
    notes: Vec<String>,
    retry_at: Option<Instant>,
    /// Attempts that failed since the last success.
    failures: u32,
    /// fdatasync failed, and has not succeeded with packets since.
    doubt: bool,
    synced_at: Instant,
    /// The books as they were when the state file was written.
    saved: u64,
    saved_at: Instant,
    state_fails: bool,
    index: Live,
}

#[derive(Debug)]
struct Segment {
    name: SegmentName,
    /// Bytes that are written.
    len: u64,
    allocated: u64,
    tally: Tally,
    unsynced: Vec<(u64, Tally)>,
    /// It is counted as given up.
    poisoned: bool,
    /// Classic pcap: the bytes behind the last whole block of the disk.
    tail: Vec<u8>,
}

impl Writer {
    /// A writer of `dir`, which is the `lane`th.
    pub fn new(
        disk: Box<dyn Disk>,
        dir: PathBuf,
        lane: usize,
        settings: Settings,
        ledger: Arc<Ledger>,
        next: Arc<AtomicU64>,
        pool: Sender<Buffer>,
    ) -> Self {
        Self {
            disk,
            dir,
            lane,
            settings,
            ledger,
            next,
            pool,
            segment: None,
            backlog: VecDeque::new(),
            spare: Some(Buffer::new(SPARE, u16::MAX)),
            notes: Vec::new(),
            retry_at: None,
            failures: 0,
            doubt: false,
            synced_at: Instant::now(),
            saved: 0,
            saved_at: Instant::now(),
            state_fails: false,
            index: Live::default(),
        }
    }

    /// Takes a chunk.
    pub fn push(&mut self, chunk: Chunk) {
        self.backlog.push_back(chunk);
    }

    /// Chunks that wait.
    pub fn waiting(&self) -> usize {
        self.backlog.len()
    }

    /// Writes what waits, as far as the disk lets us, and syncs when it is time.
    pub fn work(&mut self, now: Instant) {
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
                false,
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

    /// Writes up to [`AT_ONCE`] chunks to one segment.
    fn write_some(&mut self, now: Instant) -> io::Result<()> {
        let Some(first) = self.backlog.front() else {
            return Ok(());
        };
        let (start_ns, begins) = (first.tally.first_ns, first.begins_segment);
        if begins
            && self
                .segment
                .as_ref()
                .is_some_and(|segment| segment.tally.packets > 0)
        {
            self.close(now);
            if self.pauses() {
                return Ok(());
            }
        }
        if self.segment.is_none() {
            self.open(start_ns)?;
        }
        let Some(segment) = &mut self.segment else {
            return Ok(());
        };
        let most = match self.settings.format {
            Format::Pcapng => AT_ONCE,
            Format::Pcap => 1,
        };
        let mut count = 1;
        while count < most
            && self
                .backlog
                .get(count)
                .is_some_and(|chunk| !chunk.begins_segment)
        {
            count += 1;
        }
        let len: u64 = self
            .backlog
            .iter()
            .take(count)
            .map(|chunk| chunk.len as u64)
            .sum();
        if segment.len + len > segment.allocated {
            let end = segment.len + len;
            reserve(self.disk.as_mut(), segment, end, self.settings.reserve());
            self.enforce_quota();
        }
        let Some(segment) = &mut self.segment else {
            return Ok(());
        };
        let mut offset = segment.len;
        let mut chunks = VecDeque::with_capacity(count);
        for _ in 0..count {
            let Some(mut chunk) = self.backlog.pop_front() else {
                break;
            };
            let (write, next) = match self.settings.format {
                Format::Pcapng => (
                    Write {
                        len: chunk.len,
                        offset,
                        buffer: chunk.buffer,
                    },
                    offset + chunk.len as u64,
                ),
                Format::Pcap => {
                    chunk.shift(segment.tail.len());
                    let len = segment.tail.len() + chunk.len;
                    let write = with_tail(chunk.buffer, len, segment);
                    (write, offset + chunk.len as u64)
                }
            };
            offset = next;
            chunks.push_back((
                chunk.serial,
                chunk.tally,
                chunk.len,
                chunk.from,
                chunk.begins_segment,
            ));
            self.disk.start(write);
        }
        let mut failed = None;
        let mut left = Vec::new();
        while let Some(written) = self.disk.finish() {
            let Some((serial, tally, len, from, begins_segment)) = chunks.pop_front() else {
                break;
            };
            let buffer = written.write.buffer;
            let mut result = written.result;
            if result.is_ok() && self.settings.format == Format::Pcap && failed.is_none() {
                result = self.disk.truncate(segment.len + len as u64);
            }
            match result {
                Ok(()) if failed.is_none() => {
                    let bytes = &buffer[from..from + len];
                    self.index.written(self.disk.as_mut(), segment.len, bytes);
                    segment.len += len as u64;
                    if self.settings.format == Format::Pcap {
                        let whole = segment.len as usize % BLOCK;
                        let end = from + len;
                        segment.tail = buffer[end - whole.min(end)..end].to_vec();
                    }
                    segment.tally.merge(&tally);
                    segment.unsynced.push((serial, tally));
                    // Nobody wants it when the recorder ends.
                    let _ = self.pool.send(buffer);
                }
                result => {
                    if let Err(error) = result {
                        failed.get_or_insert(error);
                    }
                    left.push(Chunk {
                        buffer,
                        from,
                        len,
                        serial,
                        tally,
                        begins_segment,
                    });
                }
            }
        }
        for chunk in left.into_iter().rev() {
            self.backlog.push_front(chunk);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Makes a segment whose first packet has this stamp.
    fn open(&mut self, start_ns: u64) -> io::Result<()> {
        self.enforce_quota();
        // Relaxed: a number of its own for each is all that is wanted.
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let name = SegmentName {
            recording: self.settings.recording.clone(),
            sequence,
            start_ns,
            format: self.settings.format,
        };
        let path = self.dir.join(name.to_string());
        self.disk.create(&path)?;
        let mut segment = Segment {
            name,
            len: 0,
            allocated: 0,
            tally: Tally::default(),
            unsynced: Vec::new(),
            poisoned: false,
            tail: Vec::new(),
        };
        reserve(self.disk.as_mut(), &mut segment, 0, self.settings.reserve());
        self.index.begin(&path, self.settings.format);
        let begun = self.write_header(&mut segment);
        let begun = begun.and_then(|()| match self.doubt {
            true => self.disk.sync(),
            false => Ok(()),
        });
        let begun = begun.and_then(|()| self.disk.sync_dir(&self.dir));
        if let Err(error) = begun {
            // Should it not go, it keeps no room at least.
            let _ = self.disk.truncate(segment.len);
            self.disk.close();
            self.index.abandon();
            // It holds no packet; if it cannot be removed, it is a capture file without any.
            let _ = self.disk.remove(&path);
            return Err(error);
        }
        self.notes.clear();
        let file = segment.name.to_string();
        self.ledger.lane(self.lane, |lane| {
            (lane.segment, lane.offset, lane.packets) = (file, 0, 0);
        });
        self.segment = Some(segment);
        Ok(())
    }

    fn write_header(&mut self, segment: &mut Segment) -> io::Result<()> {
        let mut bytes = match self.settings.format {
            Format::Pcap => pcap::header(&self.settings.interfaces),
            Format::Pcapng => pcapng::header(&self.settings.interfaces, &self.settings.comment()),
        };
        if self.settings.format == Format::Pcapng {
            for comment in &self.notes {
                let at_ns = segment.name.start_ns;
                let statistics = pcapng::Statistics {
                    at_ns,
                    comment,
                    ..Default::default()
                };
                pcapng::statistics(&mut bytes, &statistics);
            }
        }
        self.write_small(segment, &bytes)
    }

    /// Appends something that is no chunk.
    fn write_small(&mut self, segment: &mut Segment, bytes: &[u8]) -> io::Result<()> {
        let mut buffer = self
            .spare
            .take()
            .unwrap_or_else(|| Buffer::new(SPARE, u16::MAX));
        let tail = segment.tail.len();
        let room = tail + bytes.len() + BLOCK + pcapng::PADDING_ROOM;
        if room > buffer.len() {
            buffer = Buffer::new(room, u16::MAX);
        }
        buffer[tail..tail + bytes.len()].copy_from_slice(bytes);
        let (write, len) = match self.settings.format {
            Format::Pcapng => {
                let len = pcapng::pad(&mut buffer, bytes.len(), BLOCK);
                (
                    Write {
                        buffer,
                        len,
                        offset: segment.len,
                    },
                    len,
                )
            }
            Format::Pcap => (with_tail(buffer, tail + bytes.len(), segment), bytes.len()),
        };
        self.disk.start(write);
        let mut result = Ok(());
        while let Some(written) = self.disk.finish() {
            self.spare = Some(written.write.buffer);
            result = written.result;
        }
        result?;
        if self.settings.format == Format::Pcap {
            self.disk.truncate(segment.len + len as u64)?;
            segment.tail.extend_from_slice(bytes);
            let whole = segment.tail.len() / BLOCK * BLOCK;
            segment.tail.drain(..whole);
        }
        self.index.written(self.disk.as_mut(), segment.len, bytes);
        segment.len += len as u64;
        Ok(())
    }

    /// Ends a segment that is whole.
    fn close(&mut self, now: Instant) {
        let Some(mut segment) = self.segment.take() else {
            return;
        };
        if segment.tally.packets > 0 && self.settings.format == Format::Pcapng {
            let len = segment.len;
            let end = totals(&segment.tally);
            if let Err(error) = self.write_small(&mut segment, &end) {
                log::warn!("{}: no statistics at its end: {error}", segment.name);
                segment.len = len;
            }
        }
        if let Err(error) = self.disk.truncate(segment.len) {
            log::warn!(
                "{}: what was reserved is not given back: {error}",
                segment.name
            );
        }
        let len = segment.len;
        self.segment = Some(segment);
        self.sync(now);
        self.segment = None;
        self.disk.close();
        self.index.finish(self.disk.as_mut(), len);
    }

    /// Ends a segment that met an error: cut behind what was written, synced once, closed. Whether
    /// there were packets in it.
    fn poison(&mut self, error: &io::Error, now: Instant) -> bool {
        let Some(mut segment) = self.segment.take() else {
            return false;
        };
        segment.poisoned = true;
        log::warn!("{}: the segment ends here: {error}", segment.name);
        self.ledger.lane(self.lane, |lane| lane.poisoned += 1);
        if let Err(cut) = self.disk.truncate(segment.len) {
            // What was written of the first chunk stays in the file; in a second file it would be
            // there twice.
            log::warn!("{}: cannot be cut: {cut}", segment.name);
            if let Some(chunk) = self.backlog.pop_front() {
                self.lose(chunk, true, &error.to_string());
            }
        }
        let (empty, len) = (segment.tally.packets == 0, segment.len);
        let path = self.dir.join(segment.name.to_string());
        self.segment = Some(segment);
        self.sync(now);
        self.segment = None;
        self.disk.close();
        // A full disk is tried again and again, and would fill with headers. A failure leaves one.
        if empty {
            self.index.abandon();
            let _ = self.disk.remove(&path);
        } else {
            self.index.finish(self.disk.as_mut(), len);
        }
        !empty
    }

    /// Moves the durable mark, if the disk says so at the first attempt.
    fn sync(&mut self, now: Instant) {
        self.synced_at = Instant::now();
        let Some(segment) = &mut self.segment else {
            return;
        };
        if segment.unsynced.is_empty() {
            return;
        }
        let chunks = std::mem::take(&mut segment.unsynced);
        match self.disk.sync() {
            Ok(()) => {
                self.ledger.durable(self.lane, segment.len, &chunks);
                self.doubt = false;
                self.goes_on();
                self.save_state();
            }
            Err(error) => {
                let reason = format!("fdatasync: {error}");
                let name = segment.name.to_string();
                let counted = segment.poisoned;
                // Nothing is cut of what was written; what was reserved beyond it is given back.
                let _ = self.disk.truncate(segment.len);
                self.segment = None;
                self.disk.close();
                self.index.abandon();
                log::error!("{name}: {reason}; the segment is given up");
                if !counted {
                    self.ledger.lane(self.lane, |lane| lane.poisoned += 1);
                }
                self.doubt = true;
                self.pause(now, &reason);
                for (serial, tally) in chunks {
                    let (packets, from) = (tally.packets, crate::name::time(tally.first_ns));
                    self.notes.push(format!(
                        "{packets} packets from {from} on may be missing in {name}: {reason}"
                    ));
                    self.ledger.lost(serial, &tally, true, &reason);
                }
            }
        }
    }

    fn lose(&mut self, chunk: Chunk, written: bool, reason: &str) {
        let tally = &chunk.tally;
        let (packets, from) = (tally.packets, crate::name::time(tally.first_ns));
        self.notes.push(format!(
            "{packets} packets from {from} on are missing: {reason}"
        ));
        self.ledger.lost(chunk.serial, tally, written, reason);
        let _ = self.pool.send(chunk.buffer);
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

    /// Writes `NAME.state`: each directory has one of the whole recording.
    pub fn save_state(&mut self) {
        self.saved = self.ledger.revision();
        self.saved_at = Instant::now();
        let text = self.ledger.status().to_json(super::now_ns());
        let path = self.dir.join(state_file(&self.settings.recording));
        let new = path.with_extension("state.new");
        let saved = self
            .disk
            .store(&new, text.as_bytes())
            .and_then(|()| self.disk.rename(&new, &path))
            .and_then(|()| self.disk.sync_dir(&self.dir));
        match saved {
            Err(error) if !self.state_fails => {
                log::warn!("{}: {error}", path.display());
                self.state_fails = true;
            }
            Err(_) => {}
            Ok(()) => self.state_fails = false,
        }
    }
}

impl Chunk {
    /// Moves the packets within the buffer, so that they begin at `from`.
    fn shift(&mut self, from: usize) {
        self.buffer
            .copy_within(self.from..self.from + self.len, from);
        self.from = from;
    }
}

/// Classic pcap: a write that begins at the disk's block in which the file ends. Behind its end are
/// ones until the file is cut there: a reader takes zeros for empty packets, and these for damage.
fn with_tail(mut buffer: Buffer, len: usize, segment: &Segment) -> Write {
    let tail = segment.tail.len();
    buffer[..tail].copy_from_slice(&segment.tail);
    let whole = len.next_multiple_of(BLOCK);
    buffer[len..whole].fill(0xff);
    Write {
        buffer,
        len: whole,
        offset: segment.len - tail as u64,
    }
}

/// Reserves room up to `end` and a step beyond. A disk that refuses says so at the write.
fn reserve(disk: &mut dyn Disk, segment: &mut Segment, end: u64, step: u64) {
    let goal = (end + step).max(segment.allocated);
    let more = goal - segment.allocated;
    if more == 0 {
        return;
    }
    if let Err(error) = disk.allocate(segment.allocated, more) {
        log::debug!("{}: nothing reserved: {error}", segment.name);
    }
    segment.allocated = goal;
}

/// The statistics at the end of a segment.
fn totals(tally: &Tally) -> Vec<u8> {
    let mut out = Vec::new();
    for (interface, (received, dropped)) in tally.interfaces.iter().enumerate() {
        let comment = match dropped {
            0 => String::new(),
            _ => format!("{dropped} packets were lost because the ring was full"),
        };
        let statistics = pcapng::Statistics {
            interface: interface as u32,
            at_ns: tally.last_ns,
            range_ns: Some((tally.first_ns, tally.last_ns)),
            received: Some(*received),
            dropped: Some(*dropped),
            comment: &comment,
        };
        pcapng::statistics(&mut out, &statistics);
    }
    out
}

const SPARE: usize = 64 << 10;
const AT_ONCE: usize = 4;
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MOST: Duration = Duration::from_secs(4);
