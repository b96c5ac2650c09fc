//! Packets of recordings, in the order of time, across segments, disks and queues, also while recording
//! goes on.
//!
//! ```text
//! segment ─ index: which chunks? ─ chunk: which packets? ─ run, sorted ─┐
//! segment ─ …                                                           ├─ the earliest ─ output
//! segment ─ …                                                           ┘
//! ```
//!
//! An [`Extract`] always has a lower bound of what each segment can still give (`stream`). The segment
//! with the lowest one gives its packet, if it is that early for certain, or else looks further: reads a
//! block of its index, or a chunk of packets. So the first packet comes as soon as it is known to be the
//! first, and a segment is not looked into before its time has come.
//!
//! **Order.** Segments may overlap; packets of one stamp come in the order in which they were recorded. Within a segment a packet may stand up to a block of the index (16
//! MiB) behind its place by time, or 1 MiB where there is no index yet; what stands farther behind comes
//! late and is counted, never lost.
//!
//! **Memory.** Less than 4 MiB for each segment whose time has come, or 64 MiB if its packets are far
//! from sorted.
//!
//! **Recycling.** All segments that may have something in the time are opened, with a lease, at the start;
//! the recorder takes one of them away before it was read only if it needs the room, which is told. What is written to a segment after the extract was opened is not part of it.

mod community;
mod flows;
mod losses;
mod output;
mod segments;
mod stream;
mod target;
mod time;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::io;
use std::path::PathBuf;

pub use community::community_id;
pub use flows::{Flow, Flows, Sum};
pub use losses::{Losses, Marks};
pub use output::{Format, Output};
pub use segments::{Capture, Found, Unread, captures, find, find_with, raise_open_files};
pub use target::forbidden;
pub use time::{BadTime, parse_time};

use self::losses::Spans;
use self::stream::{Meta, Stream};
use crate::archive::Keys;
use crate::filter::{Filter, FilterError};
use crate::manifest::{Hole, holes};
use crate::read::{Interface, ReadError};

/// What is looked for.
#[derive(Debug)]
pub struct Query {
    /// Packets from this time on, nanoseconds since 1970 UTC.
    pub from_ns: u64,
    /// Packets before this time.
    pub to_ns: u64,
    /// Packets that it matches.
    pub filter: Filter,
}

/// A packet that was found; `bytes` as long as the next one is not asked for.
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    /// Nanoseconds since 1970 UTC.
    pub ts_ns: u64,
    /// What was captured.
    pub bytes: &'a [u8],
    /// Length on the wire in bytes.
    pub wire_len: u32,
    /// `epb_flags` of pcapng.
    pub flags: u32,
    /// Packets that were lost just before it, as its file says (`epb_dropcount`).
    pub lost: u64,
    /// Its comments, one in a line: that an unknown number is missing before it, for example.
    pub comment: &'a str,
    /// Where it came in.
    pub interface: &'a Interface,
}

/// What was done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Packets handed out.
    pub packets: u64,
    /// Of them, those that came after a later one.
    pub late: u64,
    /// Segments that may have had something.
    pub segments: u64,
    /// Chunks of them that the index left out.
    pub chunks_skipped: u64,
    /// Bytes of segments that were read for packets.
    pub bytes_read: u64,
}

/// Packets that a query finds.
#[derive(Debug)]
pub struct Extract {
    query: Query,
    streams: Vec<Option<Stream>>,
    /// Each stream that has not ended, the next one on top.
    next: BinaryHeap<Reverse<Next>>,
    /// How often a packet was handed out.
    turn: u64,
    tally: Tally,
    losses: Losses,
    last_ns: u64,
    problems: Vec<ReadError>,
}

impl Extract {
    /// Opens the recordings in `places`: directories, of which all capture files are meant, or capture
    /// files.
    ///
    /// # Errors
    /// [`ExtractError`] if a place cannot be read. A capture file that cannot be opened is told by
    /// [`problems`](Self::problems).
    pub fn open(places: &[PathBuf], query: Query) -> Result<Self, ExtractError> {
        Self::open_with(places, query, &Keys::default())
    }

    /// As [`open`](Self::open); what is encrypted is opened with these keys.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(places: &[PathBuf], query: Query, keys: &Keys) -> Result<Self, ExtractError> {
        let mut extract = Self {
            query,
            streams: Vec::new(),
            next: BinaryHeap::new(),
            turn: 0,
            tally: Tally::default(),
            losses: Losses::default(),
            last_ns: 0,
            problems: Vec::new(),
        };
        let range = (extract.query.from_ns, extract.query.to_ns);
        let mut spans = Spans::default();
        for found in find_with(places, keys)?.rev() {
            let problem = found.problem();
            spans.add(&found);
            match Stream::open(found, &extract.query) {
                Ok(Some(stream)) => {
                    extract.streams.push(Some(stream));
                    extract.problems.extend(problem);
                }
                Ok(None) => {}
                Err(problem) => extract.problems.push(problem),
            }
        }
        extract.streams.reverse();
        extract.problems.reverse();
        extract.look_for_holes(places);
        extract.losses = Losses::listed(places, &spans, range);
        extract.tally.segments = extract.streams.len() as u64;
        let bounds = extract.streams.iter().flatten().map(Stream::bound);
        let next = bounds.zip(0..);
        extract.next = next
            .map(|(bound, number)| Reverse((bound, Reverse(0), number)))
            .collect();
        Ok(extract)
    }

    /// Notes what is missing between the segments.
    fn look_for_holes(&mut self, places: &[PathBuf]) {
        let holes = match holes(places) {
            Ok(holes) => holes,
            Err(error) => {
                let place = places.first().cloned().unwrap_or_default();
                self.problems.push(ReadError::io(&place, 0, error));
                return;
            }
        };
        let asked =
            |hole: &Hole| hole.from_ns < self.query.to_ns && hole.to_ns >= self.query.from_ns;
        let told: Vec<ReadError> = holes
            .into_iter()
            .filter(asked)
            .map(ReadError::hole)
            .collect();
        self.problems.extend(told);
    }

    /// The next packet.
    ///
    /// # Errors
    /// [`ExtractError`] if the filter makes no sense for a packet's link type. Damaged files are told by
    /// [`problems`](Self::problems), and what is whole in them is handed out.
    pub fn read(&mut self) -> Result<Option<Packet<'_>>, ExtractError> {
        let place = loop {
            match self.advance()? {
                Advance::Found(place) => break place,
                Advance::Looking => {}
                Advance::End => return Ok(None),
            }
        };
        Ok(self.hand_out(place))
    }

    /// As [`read`](Self::read), in steps of at most a chunk of packets or a block of an index: for
    /// callers that may want to stop while nothing is found.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn step(&mut self) -> Result<Step<'_>, ExtractError> {
        match self.advance()? {
            Advance::Found(place) => Ok(self.hand_out(place).map_or(Step::End, Step::Packet)),
            Advance::Looking => Ok(Step::Looking),
            Advance::End => Ok(Step::End),
        }
    }

    /// Asks the segment that may have the next packet.
    fn advance(&mut self) -> Result<Advance, ExtractError> {
        let Some(&Reverse((bound, mut turn, number))) = self.next.peek() else {
            return Ok(Advance::End);
        };
        let slot = &mut self.streams[number];
        let Some(stream) = slot.as_mut().filter(|_| bound < u64::MAX) else {
            // Closed now: its lease ends.
            *slot = None;
            self.next.pop();
            return Ok(Advance::Looking);
        };
        let taken = stream.take();
        if taken.is_none() {
            stream.advance(
                &mut self.query,
                &mut self.tally,
                &mut self.losses,
                &mut self.problems,
            )?;
        }
        let bound = stream.bound();
        if taken.is_some() {
            self.turn += 1;
            turn = Reverse(self.turn);
        }
        if let Some(mut top) = self.next.peek_mut() {
            *top = Reverse((bound, turn, number));
        }
        Ok(taken.map_or(Advance::Looking, |(run, meta)| {
            Advance::Found(PacketAt { number, run, meta })
        }))
    }

    /// Counts a packet and lends it.
    fn hand_out(&mut self, PacketAt { number, run, meta }: PacketAt) -> Option<Packet<'_>> {
        self.tally.packets += 1;
        if meta.ts_ns < self.last_ns {
            self.tally.late += 1;
        }
        self.last_ns = self.last_ns.max(meta.ts_ns);
        let stream = self.streams[number].as_ref()?;
        Some(Packet {
            ts_ns: meta.ts_ns,
            bytes: stream.bytes(run, meta),
            wire_len: meta.wire_len,
            flags: meta.flags,
            lost: meta.lost,
            comment: stream.comment(run, meta),
            interface: stream.interface(meta),
        })
    }

    /// What was done so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// What the range lost, as far as it was read: all of it once there is no further packet.
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// Files that could not be opened, and damage that was found since the last call.
    pub fn problems(&mut self) -> Vec<ReadError> {
        std::mem::take(&mut self.problems)
    }
}

/// A stream's lower bound, the turn in which it gave its last packet, and its number.
///
/// Of several with the same bound the one that gave the last packet goes on: a recorder that writes to several
/// directories in turn changes between them within packets of one stamp, and what it wrote first comes first.
type Next = (u64, Reverse<u64>, usize);

/// What a [`step`](Extract::step) led to.
#[derive(Debug)]
pub enum Step<'a> {
    /// The next packet.
    Packet(Packet<'a>),
    /// Nothing yet.
    Looking,
    /// There is no further packet.
    End,
}

/// The same, before the packet is lent.
enum Advance {
    Found(PacketAt),
    Looking,
    End,
}

/// Where a packet is.
struct PacketAt {
    number: usize,
    run: usize,
    meta: Meta,
}

/// Nothing can be extracted.
#[derive(Debug)]
pub enum ExtractError {
    /// A directory cannot be read.
    Place(PathBuf, io::Error),
    /// The filter cannot be used.
    Filter(FilterError),
}

impl fmt::Display for ExtractError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Place(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Filter(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for ExtractError {}

impl From<FilterError> for ExtractError {
    fn from(error: FilterError) -> Self {
        Self::Filter(error)
    }
}

#[cfg(test)]
mod tests;
