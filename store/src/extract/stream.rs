//! The packets of one segment, in the order of time.
//!
//! What is matched in a chunk becomes a **run**: a sorted list. The earliest packet of all runs is given
//! away when nothing that was not read yet can be earlier: no chunk that waits (the index has its lowest
//! time), no block of the index that was not read (taken to be no earlier than the one before it), and
//! nothing in the part without an index (no earlier than its last [`SCAN_WINDOW`] chunks).

use std::collections::VecDeque;

use super::segments::Found;
use super::{ExtractError, Losses, Query, Tally};
use crate::index::{Block, Sidecar};
use crate::read::{Cause, Interface, ReadError, Reader};

/// One segment.
#[derive(Debug)]
pub(super) struct Stream {
    reader: Reader,
    /// Reads single packets, to see whether the index fits.
    probe: Reader,
    sidecar: Sidecar,
    /// What the segment's length was when the query began.
    len_bytes: u64,
    /// Chunks of blocks that were read, which may have packets.
    waiting: VecDeque<Job>,
    /// No block that was not read has anything earlier; `u64::MAX`: there is none.
    unread_ns: u64,
    scan: Scan,
    runs: Vec<Run>,
    /// Runs that were given away whole; their memory is used again.
    spare: Vec<Run>,
}

/// A part of the segment that is to be read.
#[derive(Debug, Clone, Copy)]
struct Job {
    start: u64,
    end: u64,
    low_ns: u64,
    /// As the index says; `u64::MAX` if it does not.
    packets: u64,
}

/// The part of a segment that has no index.
#[derive(Debug)]
enum Scan {
    /// The index comes first.
    Later,
    /// From this offset on; the lowest times of the last chunks.
    At(u64, VecDeque<u64>),
    Done,
}

/// Packets of a chunk that match, sorted.
#[derive(Debug, Default)]
struct Run {
    bytes: Vec<u8>,
    packets: Vec<Meta>,
    next: usize,
}

/// A packet in a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Meta {
    pub(super) ts_ns: u64,
    pub(super) wire_len: u32,
    pub(super) flags: u32,
    pub(super) lost: u64,
    start: usize,
    len: usize,
    /// Of its comments, which stand behind it.
    comment: usize,
    interface: usize,
}

impl Stream {
    /// Of a file that was found; `None` if it is known to have nothing in the query's time.
    pub(super) fn open(found: Found, query: &Query) -> Result<Option<Self>, ReadError> {
        let Found {
            path, len_bytes, ..
        } = found;
        let low_ns = match found.trailer.or(found.longer) {
            Some(trailer) if trailer.low_ns >= query.to_ns || trailer.high_ns < query.from_ns => {
                return Ok(None);
            }
            Some(trailer) => Some(trailer.low_ns),
            None => found.start_ns.map(|start| start.saturating_sub(SLACK_NS)),
        };
        let open = || {
            let file = found.file?;
            Ok((file.try_clone()?, file))
        };
        let (file, other) = open().map_err(|error| ReadError::io(&path, 0, error))?;
        let mut probe = Reader::of_with(other, path.clone(), &found.keys);
        let low_ns = match low_ns {
            Some(low_ns) => low_ns,
            None => match probe.read()? {
                Some(packet) => packet.ts_ns.saturating_sub(SLACK_NS),
                None => return Ok(None),
            },
        };
        let mut reader = Reader::of_with(file, path.clone(), &found.keys);
        // From now on it keeps them.
        reader.notes();
        Ok(Some(Self {
            sidecar: Sidecar::open_with(&path, &found.keys),
            reader,
            probe,
            len_bytes,
            waiting: VecDeque::new(),
            unread_ns: low_ns,
            scan: Scan::Later,
            runs: Vec::new(),
            spare: Vec::new(),
        }))
    }

    /// Nothing that it will give is earlier; `u64::MAX` if it has ended.
    pub(super) fn bound(&self) -> u64 {
        self.head()
            .map_or(u64::MAX, |(_, ts_ns)| ts_ns)
            .min(self.unread())
    }

    /// Nothing that was not read is earlier.
    fn unread(&self) -> u64 {
        let waiting = self.waiting.iter().map(|job| job.low_ns).min();
        let scan = match &self.scan {
            Scan::Later | Scan::Done => u64::MAX,
            Scan::At(_, lows) => lows.iter().copied().min().unwrap_or(0),
        };
        self.unread_ns.min(scan).min(waiting.unwrap_or(u64::MAX))
    }

    /// The earliest packet that was read, and its run.
    fn head(&self) -> Option<(usize, u64)> {
        let heads = self.runs.iter().enumerate();
        heads
            .filter_map(|(n, run)| Some((n, run.packets.get(run.next)?.ts_ns)))
            .min_by_key(|&(_, ts_ns)| ts_ns)
    }

    /// The next packet, if it is known to be the next. Its bytes stay until the next call.
    pub(super) fn take(&mut self) -> Option<(usize, Meta)> {
        let mut at = 0;
        while at < self.runs.len() {
            if self.runs[at].next == self.runs[at].packets.len() {
                let run = self.runs.remove(at);
                self.spare.push(run);
            } else {
                at += 1;
            }
        }
        let (number, ts_ns) = self.head()?;
        let held: usize = self.runs.iter().map(|run| run.bytes.len()).sum();
        if ts_ns > self.unread() && held < MAX_HELD_BYTES {
            return None;
        }
        let run = &mut self.runs[number];
        run.next += 1;
        Some((number, run.packets[run.next - 1]))
    }

    pub(super) fn bytes(&self, run: usize, meta: Meta) -> &[u8] {
        &self.runs[run].bytes[meta.start..meta.start + meta.len]
    }

    pub(super) fn comment(&self, run: usize, meta: Meta) -> &str {
        let from = meta.start + meta.len;
        let bytes = &self.runs[run].bytes[from..from + meta.comment];
        std::str::from_utf8(bytes).unwrap_or_default()
    }

    pub(super) fn interface(&self, meta: Meta) -> &Interface {
        &self.reader.interfaces()[meta.interface]
    }

    /// Reads on: a block of the index, or a chunk.
    pub(super) fn advance(
        &mut self,
        query: &mut Query,
        tally: &mut Tally,
        losses: &mut Losses,
        problems: &mut Vec<ReadError>,
    ) -> Result<(), ExtractError> {
        let waits = self.waiting.iter().map(|job| job.low_ns).min();
        if self.unread_ns < u64::MAX && waits.is_none_or(|low_ns| self.unread_ns <= low_ns) {
            match self.sidecar.read(&mut self.probe) {
                Some(block) => self.add(&block, query, tally, losses),
                None => self.end_index(),
            }
            return Ok(());
        }
        if let Some(job) = self.waiting.pop_front() {
            self.read(job, query, tally, losses, problems)?;
            return Ok(());
        }
        let Scan::At(at, mut lows) = std::mem::replace(&mut self.scan, Scan::Done) else {
            return Ok(());
        };
        let job = Job {
            start: at,
            end: self.len_bytes.min(at + SCAN_BYTES),
            low_ns: 0,
            packets: u64::MAX,
        };
        let Some(low_ns) = self.read(job, query, tally, losses, problems)? else {
            return Ok(());
        };
        if low_ns < u64::MAX {
            lows.push_back(low_ns);
        }
        if lows.len() > SCAN_WINDOW {
            lows.pop_front();
        }
        if (at + 1..self.len_bytes).contains(&self.reader.offset()) {
            self.scan = Scan::At(self.reader.offset(), lows);
        }
        Ok(())
    }

    /// The index has ended; what it does not cover is read.
    fn end_index(&mut self) {
        let (covered, low_ns) = (self.sidecar.covered(), self.unread_ns);
        self.unread_ns = u64::MAX;
        self.scan = match covered < self.len_bytes {
            true => Scan::At(covered, VecDeque::from([low_ns])),
            false => Scan::Done,
        };
    }

    /// Notes the chunks of a block that may have something.
    fn add(&mut self, block: &Block, query: &Query, tally: &mut Tally, losses: &mut Losses) {
        let set = query.filter.plan().ask(block);
        let mut block_low = u64::MAX;
        for (n, chunk) in block.chunks().iter().enumerate() {
            if chunk.start >= self.len_bytes {
                break; // written since the query began
            }
            block_low = block_low.min(chunk.low_ns);
            let in_time = chunk.low_ns < query.to_ns && chunk.high_ns >= query.from_ns;
            let is_wanted = set >> n & 1 == 1;
            let is_inside = chunk.low_ns >= query.from_ns
                && chunk.high_ns < query.to_ns
                && chunk.end <= self.len_bytes;
            // One that lost something is read if only a part of it is in the time.
            if !in_time || !is_wanted && (is_inside || chunk.lost == 0) {
                if in_time {
                    losses.chunk(chunk);
                }
                tally.chunks_skipped += 1;
                continue;
            }
            self.waiting.push_back(Job {
                start: chunk.start,
                end: chunk.end.min(self.len_bytes),
                low_ns: chunk.low_ns.max(query.from_ns),
                packets: match chunk.end <= self.len_bytes {
                    true => chunk.packets,
                    false => u64::MAX,
                },
            });
        }
        self.unread_ns = block_low;
        if block.range().end >= self.len_bytes {
            self.end_index();
        }
    }

    /// Makes a run of what matches in a part of the segment. The lowest time in it, or `u64::MAX`; `None`
    /// if it is damaged.
    fn read(
        &mut self,
        job: Job,
        query: &mut Query,
        tally: &mut Tally,
        losses: &mut Losses,
        problems: &mut Vec<ReadError>,
    ) -> Result<Option<u64>, ExtractError> {
        let mut run = self.spare.pop().unwrap_or_default();
        run.bytes.clear();
        run.packets.clear();
        run.next = 0;
        let mut low_ns = u64::MAX;
        let mut count = 0;
        let mut failed = None;
        if self.reader.offset() != job.start || job.start == 0 {
            failed = self
                .reader
                .seek(job.start, self.sidecar.definitions())
                .err();
        }
        while failed.is_none() {
            let packet = match self.reader.read_until(job.end) {
                Ok(Some(packet)) => packet,
                Ok(None) => break,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            count += 1;
            low_ns = low_ns.min(packet.ts_ns);
            if !(query.from_ns..query.to_ns).contains(&packet.ts_ns) {
                continue;
            }
            let filter = &mut query.filter;
            let is_wanted = filter.matches(packet.link_type, packet.bytes, packet.wire_len)?;
            losses.packet(&packet, !is_wanted);
            if !is_wanted {
                continue;
            }
            run.packets.push(Meta {
                ts_ns: packet.ts_ns,
                wire_len: packet.wire_len,
                flags: packet.flags,
                lost: packet.lost,
                comment: packet.comment.len(),
                start: run.bytes.len(),
                len: packet.bytes.len(),
                interface: packet.interface,
            });
            run.bytes.extend_from_slice(packet.bytes);
            run.bytes.extend_from_slice(packet.comment.as_bytes());
        }
        for note in self.reader.notes() {
            losses.note(note, self.reader.path(), query.from_ns, query.to_ns);
        }
        tally.bytes_read += self.reader.offset().saturating_sub(job.start);
        // What was read ahead is whole; what is missing after it was there when the query began.
        if self.reader.offset() < job.end.min(self.len_bytes)
            && self
                .reader
                .len_bytes()
                .is_some_and(|len| len < self.len_bytes)
        {
            failed = Some(ReadError {
                path: self.reader.path().to_owned(),
                offset: self.reader.offset(),
                cause: Cause::Taken,
            });
        }
        if failed.is_none() && job.packets != u64::MAX && job.packets != count {
            let what = "the index does not fit: remove it (.vnx); it is then made again";
            failed = Some(ReadError::bad(self.reader.path(), job.start, what));
        }
        let damaged = failed.is_some();
        problems.extend(failed);
        // Nearly sorted as a rule, which this takes little time for.
        run.packets.sort_by_key(|meta| meta.ts_ns);
        if run.packets.is_empty() {
            self.spare.push(run);
        } else {
            self.runs.push(run);
        }
        Ok((!damaged).then_some(low_ns))
    }
}

/// Parts of a segment without an index are read in steps of this many bytes.
const SCAN_BYTES: u64 = 256 << 10;
/// How many steps behind its place a packet may be there.
const SCAN_WINDOW: usize = 4;
/// How much earlier than the first packet of a segment others may be.
const SLACK_NS: u64 = 1_000_000_000;
/// With more in its runs a stream gives packets away though earlier ones may come.
const MAX_HELD_BYTES: usize = 64 << 20;
