//! A capture file as a source: pcap and pcapng, at the recorded pace, faster, or at top speed.
//!
//! Files are hostile input. Every packet that is whole is handed over; then a damaged file ends
//! with an error that names the byte. Memory stays below 16 MiB whatever the file says
//! ([`reader`]). A file that grows is read to where it ends when that is reached; a deleted one is
//! read on.
//!
//! Timestamps are the recorded ones, in nanoseconds (0 to 2^64 - 1; what a file has outside is
//! clamped). A simple packet of pcapng has none and gets the previous packet's. When a file is
//! repeated, each round's timestamps are shifted so that the round begins after the latest of the
//! round before, by the mean distance of two packets: they stay monotone as far as the file's are.
//!
//! A FIFO plays once. Until a first writer has come it counts as empty, not as ended.

mod link;
mod ng;
mod pace;
pub mod reader;

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{FileType, Mode, OFlags};
use vnplug_ring::layout::flags;

use self::pace::Pace;
use self::reader::{Packet, Peek, Reader};
use super::{Queue, QueueCounters, Received, Seen, SourceError, Wake};
use vnplug_frame::{Frame, MAX_BATCH};

/// Which file to play, and how.
#[derive(Debug, Clone)]
pub struct PcapConfig {
    /// A regular file or a FIFO.
    pub path: PathBuf,
    /// How fast.
    pub pace: Speed,
    /// How often.
    pub repeat: Repeat,
}

/// How fast a file is played.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Speed {
    /// With the recorded gaps, however long they are.
    Recorded,
    /// This many times as fast as recorded; 0.000001 to 1e9.
    Times(f64),
    /// As fast as it can be read.
    Top,
}

/// How often a file is played.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    /// From beginning to end.
    Once,
    /// This many times, at least 1.
    Times(u64),
    /// Until the source is closed; a file without packets ends all the same.
    Forever,
}

/// A capture file as a source.
#[derive(Debug)]
pub struct PcapFile;

impl PcapFile {
    /// Opens the file; its contents are first looked at when it is played.
    ///
    /// # Errors
    /// [`SourceError`] if it cannot be opened, is neither a regular file nor a FIFO, or the
    /// configuration makes no sense.
    pub fn open(config: &PcapConfig) -> Result<Vec<Box<dyn Queue>>, SourceError> {
        let speed = match config.pace {
            Speed::Top => None,
            Speed::Recorded => Some(1.0),
            Speed::Times(times) if (1e-6..=1e9).contains(&times) => Some(times),
            Speed::Times(times) => {
                let what = format!("speed {times} is not between 0.000001 and 1000000000");
                return Err(SourceError::new(what));
            }
        };
        let rounds_left = match config.repeat {
            Repeat::Once => Some(1),
            Repeat::Times(0) => return Err(SourceError::new("a file plays at least once")),
            Repeat::Times(times) => Some(times),
            Repeat::Forever => None,
        };
        let input = Input::open(&config.path)?;
        if input.is_fifo && rounds_left != Some(1) {
            let what = format!("{:?} is a FIFO, which plays only once", config.path);
            return Err(SourceError::new(what));
        }
        Ok(vec![Box::new(PcapQueue {
            path: config.path.clone(),
            reader: Reader::new(input),
            opened: Instant::now(),
            pace: speed.map(Pace::new),
            pending_ns: None,
            rounds_left,
            round: Round::default(),
            shift_ns: 0,
            packets: Vec::with_capacity(MAX_BATCH),
            played: 0,
            status: Status::Ready,
        })])
    }
}

struct PcapQueue {
    path: PathBuf,
    reader: Reader<Input>,
    opened: Instant,
    /// `None`: top speed.
    pace: Option<Pace>,
    /// When the next packet is due, once that is known, in nanoseconds since `opened`.
    pending_ns: Option<u64>,
    /// Rounds still to begin or under way; `None`: no end.
    rounds_left: Option<u64>,
    round: Round,
    /// What this round's timestamps are raised by.
    shift_ns: u64,
    packets: Vec<Packet>,
    played: u64,
    status: Status,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    /// Something may be there at once.
    Ready,
    /// The next packet is not due yet.
    Early,
    /// The FIFO has nothing.
    Starved,
    Ended,
    Failed,
}

/// What one round through the file has seen.
#[derive(Debug, Default)]
struct Round {
    packets: u64,
    oldest_ns: u64,
    newest_ns: u64,
}

impl Round {
    fn count(&mut self, ts_ns: u64) {
        let first = self.packets == 0;
        self.oldest_ns = if first {
            ts_ns
        } else {
            self.oldest_ns.min(ts_ns)
        };
        self.newest_ns = self.newest_ns.max(ts_ns);
        self.packets += 1;
    }

    /// From this round's first moment to the next round's.
    fn length_ns(&self) -> u64 {
        let span = self.newest_ns - self.oldest_ns;
        let gaps = self.packets.saturating_sub(1).max(1);
        span.saturating_add((span / gaps).max(LEAST_GAP_NS))
    }
}

impl PcapQueue {
    /// Finds the packets of a batch; none only if the status says why.
    fn gather(&mut self) -> Result<(), SourceError> {
        self.packets.clear();
        self.status = Status::Ready;
        let mut now_ns = None;
        let mut budget = READ_BUDGET;
        while self.packets.len() < MAX_BATCH {
            match self.reader.peek() {
                Ok(Peek::Packet(mut packet)) => {
                    packet.ts_ns = packet.ts_ns.saturating_add(self.shift_ns);
                    if let Some(pace) = &mut self.pace {
                        let now = *now_ns.get_or_insert_with(|| nanos(self.opened.elapsed()));
                        let due = self
                            .pending_ns
                            .unwrap_or_else(|| pace.due_ns(packet.ts_ns, now));
                        if due > now {
                            self.pending_ns = Some(due);
                            self.status = Status::Early;
                            return Ok(());
                        }
                        self.pending_ns = None;
                    }
                    self.round.count(packet.ts_ns);
                    self.reader.advance();
                    self.packets.push(packet);
                }
                // Going on would move or end the bytes of the packets found: next time.
                _ if !self.packets.is_empty() => return Ok(()),
                Ok(Peek::Starved(needed)) => match self.reader.fill(needed) {
                    Ok(_) if budget == 0 => return Ok(()),
                    Ok(count) => budget = budget.saturating_sub(count),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.status = Status::Starved;
                        return Ok(());
                    }
                    Err(error) => return Err(self.failed("cannot be read", error)),
                },
                Ok(Peek::End) => {
                    if !self.begin_again()? {
                        self.status = Status::Ended;
                        return Ok(());
                    }
                }
                Err(bad) => {
                    self.status = Status::Failed;
                    return Err(SourceError::new(format!("{:?}: {bad}", self.path)));
                }
            }
        }
        Ok(())
    }

    /// Starts the next round if there is one.
    fn begin_again(&mut self) -> Result<bool, SourceError> {
        let rounds_left = self.rounds_left.map(|rounds| rounds.saturating_sub(1));
        if rounds_left == Some(0) || self.round.packets == 0 {
            return Ok(false);
        }
        self.rounds_left = rounds_left;
        if let Err(error) = self.reader.input().file.rewind() {
            return Err(self.failed("cannot be rewound", error));
        }
        self.reader.restart();
        self.shift_ns = self.shift_ns.saturating_add(self.round.length_ns());
        self.round = Round::default();
        Ok(true)
    }

    fn failed(&mut self, what: &str, error: io::Error) -> SourceError {
        self.status = Status::Failed;
        SourceError::io(format!("{:?} {what}", self.path), error)
    }
}

impl Queue for PcapQueue {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        if self.status == Status::Ended {
            return Ok(Received::End);
        }
        self.gather()?;
        let count = self.packets.len();
        if count == 0 {
            return Ok(if self.status == Status::Ended {
                Received::End
            } else {
                Received::Nothing
            });
        }
        let none = Frame {
            bytes: &[],
            wire_len: 0,
            ts_ns: 0,
            flags: 0,
            vlan_tci: 0,
            ..Frame::default()
        };
        let mut frames = [none; MAX_BATCH];
        for (frame, packet) in frames.iter_mut().zip(&self.packets) {
            *frame = frame_of(packet, self.reader.bytes(packet));
        }
        sink(&frames[..count]);
        self.played += count as u64;
        Ok(Received::Frames(count))
    }

    fn arm(&mut self) -> Wake<'_> {
        match self.status {
            Status::Ready => Wake::NOW,
            Status::Ended | Status::Failed => Wake::default(),
            Status::Early => {
                let due = Duration::from_nanos(self.pending_ns.unwrap_or(0));
                Wake {
                    within: Some(due.saturating_sub(self.opened.elapsed())),
                    ..Wake::default()
                }
            }
            Status::Starved => Wake {
                fds: [Some(self.reader.input().file.as_fd()), None],
                within: None,
            },
        }
    }

    fn woke(&mut self, [input, _]: Seen) {
        if self.status == Status::Starved {
            self.reader.input().is_hung_up |= input.contains(PollFlags::HUP);
        }
    }

    fn counters(&mut self) -> QueueCounters {
        QueueCounters {
            seen: self.played,
            ..QueueCounters::default()
        }
    }

    fn state(&self) -> &'static str {
        match self.status {
            Status::Ready | Status::Early => "up",
            Status::Starved => "waiting",
            Status::Ended => "ended",
            Status::Failed => "failed",
        }
    }
}

/// The file, or the FIFO that is not mistaken for an ended file before a writer comes.
#[derive(Debug)]
struct Input {
    file: File,
    is_fifo: bool,
    /// The FIFO has had a writer.
    is_started: bool,
    is_hung_up: bool,
}

impl Input {
    fn open(path: &Path) -> Result<Self, SourceError> {
        let failed =
            |error: rustix::io::Errno| SourceError::io(format!("cannot open {path:?}"), error);
        // Non-blocking: opening a FIFO must not wait for its writer, nor reading for its data.
        let options = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, options, Mode::empty()).map_err(failed)?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file).map_err(failed)?.st_mode);
        let is_fifo = match kind {
            FileType::RegularFile => false,
            FileType::Fifo => true,
            kind => {
                let kind = match kind {
                    FileType::Directory => "a directory",
                    FileType::CharacterDevice | FileType::BlockDevice => "a device",
                    _ => "something else",
                };
                let what = format!("{path:?} is {kind}; only files and FIFOs can be played");
                return Err(SourceError::new(what));
            }
        };
        Ok(Self {
            file: file.into(),
            is_fifo,
            is_started: false,
            is_hung_up: false,
        })
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        if count == 0 && self.is_fifo && !self.is_started && !self.is_hung_up {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.is_started = true;
        Ok(count)
    }
}

fn frame_of<'a>(packet: &Packet, bytes: &'a [u8]) -> Frame<'a> {
    let mut frame = Frame {
        bytes,
        wire_len: packet.wire_len,
        ts_ns: packet.ts_ns,
        flags: if packet.outbound { flags::OUTBOUND } else { 0 },
        vlan_tci: 0,
        ..Frame::default()
    };
    // 802.1Q, 802.1ad, and what was used before the latter.
    if let Some([0x81, 0x00, high, low] | [0x88, 0xa8, high, low] | [0x91, 0x00, high, low]) =
        bytes.get(12..16)
    {
        frame.flags |= flags::VLAN;
        frame.vlan_tci = u16::from_be_bytes([*high, *low]);
    }
    frame
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes read in one call of `receive` that finds no packet (R4).
const READ_BUDGET: usize = 4 << 20;
/// Between two rounds of a file whose packets all have the same time.
const LEAST_GAP_NS: u64 = 1000;
