//! A segment's life: made, synced, closed, or given up.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use vnplug_frame::capfile::write::{pcap, pcapng};

use super::{SPARE, Writer};
use crate::disk::{BLOCK, Buffer, Disk, Write};
use crate::name::{Format, PART, SegmentName};
use crate::record::DedupStatus;
use crate::record::chunk::{Chunk, Tally};
use crate::record::ledger::Loss;
use crate::record::{ALL_NUMBERS, Settings};

/// The file that is being written.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) name: SegmentName,
    /// Bytes that are written.
    pub(super) len: u64,
    /// Where the next chunk goes: after what is on its way.
    pub(super) next: u64,
    pub(super) allocated: u64,
    /// With what is on its way.
    pub(super) fill: Fill,
    pub(super) tally: Tally,
    pub(super) unsynced: Vec<(u64, Tally)>,
    /// Losses that it tells, and that are not synced.
    pub(super) told: Vec<Loss>,
    /// It is counted as given up.
    pub(super) poisoned: bool,
    /// Classic pcap: the bytes after the last whole block of the disk.
    pub(super) tail: Vec<u8>,
}

impl Writer {
    /// Makes a segment whose first packet has this stamp; `note` is what it says about itself.
    pub(super) fn open(&mut self, start_ns: u64, note: Option<Arc<str>>) -> io::Result<()> {
        self.hold()?;
        if !std::mem::take(&mut self.has_room) {
            self.enforce_quota();
        }
        let sequence = self.number.take().or_else(|| self.ledger.sequence());
        let sequence = sequence.ok_or_else(|| io::Error::other(ALL_NUMBERS))?;
        let name = SegmentName {
            recording: self.settings.recording.clone(),
            sequence,
            start_ns,
            format: self.settings.format,
        };
        let path = self.dir.join(name.to_string());
        let mut made = self.dir.join(format!("{name}{PART}"));
        if let Err(error) = self.create(&made) {
            self.number = Some(sequence);
            return Err(error);
        }
        let mut segment = Segment {
            name,
            len: 0,
            next: 0,
            allocated: 0,
            fill: Fill {
                note,
                ..Fill::default()
            },
            tally: Tally::default(),
            unsynced: Vec::new(),
            told: Vec::new(),
            poisoned: false,
            tail: Vec::new(),
        };
        let step = self.settings.reserve();
        reserve(self.disk.as_mut(), &self.dir, &mut segment, 0, step);
        self.quota_due = true;
        if self.settings.index {
            self.index.begin(&path, self.settings.format);
        }
        // It has its name when it has its header: a kill before that leaves no empty capture file.
        let begun = self.write_header(&mut segment);
        let begun = begun.and_then(|()| self.disk.publish(&made, &path));
        let begun = begun.and_then(|()| {
            made.clone_from(&path);
            match self.doubt {
                true => self.disk.sync(),
                false => Ok(()),
            }
        });
        let begun = begun.and_then(|()| self.disk.sync_dir(&self.dir));
        if let Err(error) = begun {
            // Should it not go, it keeps no room at least.
            let _ = self.disk.truncate(segment.len);
            self.disk.close();
            self.index.abandon();
            self.ledger.untell(segment.told);
            match error.kind() {
                // A file has the name: the next try takes another number.
                io::ErrorKind::AlreadyExists if made != path => {
                    let _ = self.disk.remove(&made);
                }
                _ => self.discard(&made, sequence),
            }
            return Err(error);
        }
        let file = segment.name.to_string();
        self.ledger.lane(self.lane, |lane| {
            (lane.segment, lane.offset, lane.packets) = (file, 0, 0);
            lane.open = true;
        });
        self.segment = Some(segment);
        Ok(())
    }

    /// Makes the file that becomes a segment. One that could not be removed is in the way of the next try.
    fn create(&mut self, path: &Path) -> io::Result<()> {
        let made = self.disk.create(path);
        match &made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.disk.remove(path)?;
                self.disk.create(path)
            }
            _ => made,
        }
    }

    fn write_header(&mut self, segment: &mut Segment) -> io::Result<()> {
        let comment = self.settings.comment(segment.fill.note.as_deref());
        let mut bytes = match self.settings.format {
            Format::Pcap => pcap::header(&self.settings.interfaces),
            Format::Pcapng => pcapng::header(&self.settings.interfaces, &comment),
        };
        self.tell(segment, &mut bytes);
        self.write_small(segment, &bytes)
    }

    /// Adds the losses that no file tells yet, if the format has words for them.
    fn tell(&mut self, segment: &mut Segment, bytes: &mut Vec<u8>) {
        if self.settings.format != Format::Pcapng {
            return;
        }
        let losses = self.ledger.take_untold();
        for loss in &losses {
            let statistics = pcapng::Statistics {
                at_ns: loss.to_ns,
                range_ns: Some((loss.from_ns, loss.to_ns)),
                comment: &loss.words(),
                ..Default::default()
            };
            pcapng::statistics(bytes, &statistics);
        }
        segment.told.extend(losses);
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
        segment.next = segment.len;
        Ok(())
    }

    /// Removes a segment without packets, whose number the next one has. If it cannot be removed, it is a
    /// capture file without any; one that never got its name is in nobody's way.
    fn discard(&mut self, path: &Path, sequence: u64) {
        let is_gone = self.disk.remove(path).is_ok_and(|gone| gone);
        if is_gone || path.to_string_lossy().ends_with(PART) {
            self.number = Some(sequence);
        }
    }

    /// Ends a segment that is whole.
    pub(super) fn close(&mut self, now: Instant) {
        self.catch_up();
        let Some(mut segment) = self.segment.take() else {
            return;
        };
        if segment.tally.packets > 0 && self.settings.format == Format::Pcapng {
            let (len, told) = (segment.len, segment.told.len());
            let mut end = Vec::new();
            self.tell(&mut segment, &mut end);
            let duplicates = self.ledger.take_duplicates();
            end.extend(totals(&segment.tally, &duplicates));
            if let Err(error) = self.write_small(&mut segment, &end) {
                log::warn!("{}: no statistics at its end: {error}", segment.name);
                segment.len = len;
                self.ledger.untell(segment.told.split_off(told));
                self.ledger.duplicates(DedupStatus::default(), &duplicates);
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
        self.disk.close();
        self.index.finish(self.disk.as_mut(), len);
        self.put_down();
    }

    /// The segment is no longer written, and neither is its index: it may be packed from now on.
    fn put_down(&mut self) {
        self.segment = None;
        self.disk.close();
        self.ledger.lane(self.lane, |lane| lane.open = false);
    }

    /// Ends a segment that met an error: cut after what was written, synced once, closed. Whether
    /// there were packets in it.
    pub(super) fn poison(&mut self, error: &io::Error, now: Instant) -> bool {
        self.catch_up();
        let Some(mut segment) = self.segment.take() else {
            return false;
        };
        segment.poisoned = true;
        // Of a disk that is tried again and again the log has the first attempt; `pause` says the rest.
        let level = match self.failures {
            0 => log::Level::Warn,
            _ => log::Level::Debug,
        };
        log::log!(level, "{}: the segment ends here: {error}", segment.name);
        if segment.tally.packets > 0 {
            self.ledger.lane(self.lane, |lane| lane.poisoned += 1);
        }
        self.cut(&segment, &error.to_string());
        let (empty, len) = (segment.tally.packets == 0, segment.len);
        if empty {
            // What it tells goes with it.
            self.ledger.untell(std::mem::take(&mut segment.told));
        }
        let path = self.dir.join(segment.name.to_string());
        let sequence = segment.name.sequence;
        self.segment = Some(segment);
        // Also where no packet waits for it: what was cut would come back after a loss of power, and its
        // packets are in the next segment, too.
        self.make_sure(now);
        self.disk.close();
        // A full disk is tried again and again, and would fill with headers. A failure leaves one.
        if empty {
            self.index.abandon();
            self.discard(&path, sequence);
        } else {
            self.index.finish(self.disk.as_mut(), len);
        }
        self.put_down();
        !empty
    }

    /// Cuts a segment that met an error after what was written. If it cannot be cut, what was written of
    /// the chunks that failed stays in the file; in a second file it would be there twice.
    fn cut(&mut self, segment: &Segment, reason: &str) {
        let failed = std::mem::take(&mut self.failed);
        let Err(error) = self.disk.truncate(segment.len) else {
            return;
        };
        log::warn!("{}: cannot be cut: {error}", segment.name);
        let name = segment.name.to_string();
        for chunk in self.backlog.drain(..failed).collect::<Vec<_>>() {
            self.lose(chunk, Some(&name), reason);
        }
    }

    /// Moves the durable mark, if the disk says so at the first attempt.
    pub(super) fn sync(&mut self, now: Instant) {
        self.synced_at = Instant::now();
        let waits = |segment: &Segment| !segment.unsynced.is_empty() || !segment.told.is_empty();
        if self.segment.as_ref().is_some_and(waits) {
            self.make_sure(now);
        }
    }

    fn make_sure(&mut self, now: Instant) {
        let Some(segment) = &mut self.segment else {
            return;
        };
        let chunks = std::mem::take(&mut segment.unsynced);
        let told = std::mem::take(&mut segment.told);
        match self.disk.sync() {
            Ok(()) => {
                self.ledger.durable(self.lane, segment.len, &chunks);
                if segment.tally.packets == 0 {
                    // It may still be removed.
                    segment.told = told;
                }
                if !chunks.is_empty() {
                    self.doubt = false;
                    self.state_due = true;
                    self.goes_on();
                }
            }
            Err(error) => {
                let reason = format!("fdatasync: {error}");
                let name = segment.name.to_string();
                let counted = segment.poisoned;
                // Nothing is cut of what was written; what was reserved beyond it is given back.
                if let Some(segment) = self.segment.take() {
                    self.recall(None);
                    self.cut(&segment, &reason);
                }
                self.put_down();
                self.drop_index();
                log::error!("{name}: {reason}; the segment is given up");
                if !counted {
                    self.ledger.lane(self.lane, |lane| lane.poisoned += 1);
                }
                self.doubt = true;
                self.pause(now, &reason);
                for (serial, tally) in chunks {
                    self.ledger.lost(serial, &tally, Some(&name), &reason);
                }
                self.ledger.untell(told);
            }
        }
    }
}

/// What a segment holds, or will when what is on its way is written.
#[derive(Debug, Clone, Default)]
pub(super) struct Fill {
    bytes: u64,
    packets: u64,
    start_ns: u64,
    /// The last chunk's number.
    serial: u64,
    /// What the segment says about itself: another event has another segment.
    note: Option<Arc<str>>,
}

impl Fill {
    /// Whether a chunk belongs to the same segment. The recorder means it so unless it says otherwise;
    /// but it may have meant another directory, whose disk failed.
    pub(super) fn admits(&self, settings: &Settings, chunk: &Chunk) -> bool {
        let (bytes, packets) = (
            self.bytes + chunk.len as u64,
            self.packets + chunk.tally.packets,
        );
        let limit_ns = settings.rotate_time.as_nanos() as u64;
        let is_full = (settings.rotate_bytes > 0 && bytes > settings.rotate_bytes)
            || (settings.rotate_packets > 0 && packets > settings.rotate_packets)
            || (limit_ns > 0 && chunk.tally.first_ns.abs_diff(self.start_ns) >= limit_ns);
        // A segment's packets are in the order of their stamps, as far as the ports have them so.
        let is_earlier = chunk.serial < self.serial;
        let is_other = chunk.note != self.note;
        !is_other && (self.packets == 0 || !(chunk.begins_segment || is_full || is_earlier))
    }

    pub(super) fn add(&mut self, len: usize, serial: u64, tally: &Tally) {
        if self.packets == 0 {
            self.start_ns = tally.first_ns;
        }
        self.bytes += len as u64;
        self.packets += tally.packets;
        self.serial = serial;
    }
}

/// Classic pcap: a write that begins at the disk's block in which the file ends. After its end are
/// ones until the file is cut there: a reader takes zeros for empty packets, and these for damage.
pub(super) fn with_tail(mut buffer: Buffer, len: usize, segment: &Segment) -> Write {
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

/// Reserves room up to `end` and a step beyond, as far as the disk has some to spare. One that refuses
/// says so at the write.
pub(super) fn reserve(disk: &mut dyn Disk, dir: &Path, segment: &mut Segment, end: u64, step: u64) {
    let step = match step {
        0 => 0,
        step => step.min(to_spare(disk, dir)),
    };
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

/// What may be reserved of a disk: the state, the index and others need room as well.
fn to_spare(disk: &mut dyn Disk, dir: &Path) -> u64 {
    let free = disk.space(dir).map_or(0, |space| space.free);
    (free / 8).min(free.saturating_sub(LEFT_FREE))
}

/// The statistics at the end of a segment.
fn totals(tally: &Tally, duplicates: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    let count = tally.interfaces.len().max(duplicates.len());
    for interface in 0..count {
        let (received, dropped) = tally.interfaces.get(interface).copied().unwrap_or_default();
        let duplicates = duplicates.get(interface).copied().unwrap_or_default();
        let mut comments = Vec::new();
        if dropped > 0 {
            comments.push(format!(
                "{dropped} packets were lost because the ring was full"
            ));
        }
        if duplicates > 0 {
            comments.push(format!("{duplicates} duplicates were left out"));
        }
        let statistics = pcapng::Statistics {
            interface: interface as u32,
            at_ns: tally.last_ns,
            range_ns: Some((tally.first_ns, tally.last_ns)),
            received: Some(received),
            dropped: Some(dropped),
            accepted: None,
            comment: &comments.join("; "),
        };
        pcapng::statistics(&mut out, &statistics);
    }
    out
}

/// Nothing is reserved of the last bytes of a disk.
const LEFT_FREE: u64 = 64 << 20;
