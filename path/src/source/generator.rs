//! The generator: witness frames at a chosen rate, or as fast as a core can.
//!
//! Frames are prepared once, in an arena per queue; a batch only gets new sequences and CRCs
//! ([`vnplug_frame::witness`]), so a 9000-byte frame costs what a 60-byte frame does. Sequences count
//! per source: queue q of n carries q, q + n, q + 2n and so on, so a receiver that sees every queue
//! sees every sequence, and one that sees one queue must use `View::Part`.
//!
//! **Pace.** Frame `seq` is due `seq / pps` seconds after the first frame of any queue. What is due
//! goes out in batches, so the rate is exact on average however late the thread wakes. When the
//! rate is more than the core can do, or the sink is slow, the generator runs flat out and its
//! state says `behind`; it never skips a sequence.
//!
//! Frames that a port sends end here: those of this generator that come back tell how long they took
//! (`source/echo.rs`), and all count as sent.
//!
//! The timestamp is the time a batch was made, the same for all its frames.

mod frames;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vnplug_frame::witness::{Protocol, Stamp};
use vnplug_ring::layout::flags;

use super::echo::Echo;
use super::{
    Echoes, Flushed, Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter, Wake,
};
pub use frames::{MAX_SIZE, MIN_SIZE, Sizes};
use frames::{shapes, stride};
use vnplug_frame::{Frame, MAX_BATCH};

/// What to generate.
#[derive(Debug, Clone)]
pub struct GenConfig {
    /// Frame lengths.
    pub sizes: Sizes,
    /// Frames per second over all queues; `None`: flat out.
    pub pps: Option<u64>,
    /// Frames in all, over all queues; `None`: no end.
    pub count: Option<u64>,
    /// Flows (address and port pairs), taken in turn: 1 to 2^24.
    pub flows: u32,
    /// Flow f has protocol f modulo the length of this list.
    pub protocols: Vec<Protocol>,
    /// An 802.1Q tag with this TCI in every frame.
    pub vlan_tci: Option<u16>,
    /// Which run the frames say they are of; [`Default`] draws one at random.
    pub run: u32,
    /// Receive queues, one thread each.
    pub queues: usize,
}

impl Default for GenConfig {
    /// 60-byte UDP frames of one flow, flat out, without end, on one queue.
    fn default() -> Self {
        Self {
            sizes: Sizes::Fixed(60),
            pps: None,
            count: None,
            flows: 1,
            protocols: vec![Protocol::Udp4],
            vlan_tci: None,
            run: RandomState::new().hash_one(0) as u32,
            queues: 1,
        }
    }
}

/// The generator as a source.
#[derive(Debug)]
pub struct Gen;

impl Gen {
    /// Prepares the frames of every queue.
    ///
    /// # Errors
    /// [`SourceError`] if a size does not fit a protocol, a number is 0 or out of range, or the
    /// prepared frames (flows times sizes) need more than 256 MiB.
    pub fn open(config: &GenConfig) -> Result<Vec<Box<dyn Queue>>, SourceError> {
        let GenConfig {
            flows,
            pps,
            queues,
            protocols,
            ..
        } = config;
        if *flows == 0 || *flows > MAX_FLOWS {
            return Err(SourceError::new(format!(
                "flows are 1 to {MAX_FLOWS}, not {flows}"
            )));
        }
        if *pps == Some(0) || *queues == 0 || *queues > MAX_QUEUES || protocols.is_empty() {
            return Err(SourceError::new(format!(
                "the generator needs a rate above 0, 1 to {MAX_QUEUES} queues and a protocol"
            )));
        }
        let start = Arc::new(OnceLock::new());
        let mut opened: Vec<Box<dyn Queue>> = Vec::new();
        for queue in 0..*queues {
            opened.push(Box::new(GenQueue::new(config, queue, Arc::clone(&start))?));
        }
        Ok(opened)
    }
}

/// One queue: its prepared frames and where it is in them.
struct GenQueue {
    arena: Vec<u8>,
    slots: Vec<FrameSlot>,
    next_slot: usize,
    next_seq: u64,
    /// Sequences between two frames of this queue.
    stride: u64,
    end_seq: u64,
    pps: Option<u64>,
    /// When the first frame of any queue went out.
    start: Arc<OnceLock<Instant>>,
    flags: u16,
    vlan_tci: u16,
    generated: u64,
    behind: bool,
    echo: Echo,
    /// Frames taken from senders since the last flush.
    taken: u64,
}

/// A prepared frame in the arena.
struct FrameSlot {
    at: usize,
    len: usize,
    stamp: Stamp,
}

impl GenQueue {
    fn new(
        config: &GenConfig,
        queue: usize,
        start: Arc<OnceLock<Instant>>,
    ) -> Result<Self, SourceError> {
        let shapes = shapes(config, queue)?;
        let mut arena = vec![0; shapes.iter().map(|shape| stride(shape.len_bytes)).sum()];
        let mut slots = Vec::with_capacity(shapes.len());
        let mut at = 0;
        for shape in shapes {
            let len = shape.len_bytes;
            let stamp = shape
                .write(config.run, &mut arena[at..at + len])
                .map_err(|bad| {
                    SourceError::new(format!("{:?} cannot be generated: {bad}", shape.protocol))
                })?;
            slots.push(FrameSlot { at, len, stamp });
            at += stride(len);
        }
        Ok(Self {
            arena,
            slots,
            next_slot: 0,
            next_seq: queue as u64,
            stride: config.queues as u64,
            end_seq: config.count.unwrap_or(u64::MAX),
            pps: config.pps,
            start,
            flags: if config.vlan_tci.is_some() {
                flags::VLAN
            } else {
                0
            },
            vlan_tci: config.vlan_tci.unwrap_or(0),
            generated: 0,
            behind: false,
            echo: Echo::new(config.run, config.queues as u64),
            taken: 0,
        })
    }

    /// How many of this queue's frames are due.
    fn due(&self, elapsed: Duration) -> u64 {
        let due_seq = match self.pps {
            None => self.end_seq,
            Some(pps) => {
                let due = elapsed.as_nanos().saturating_mul(u128::from(pps)) / NANOS + 1;
                self.end_seq.min(u64::try_from(due).unwrap_or(u64::MAX))
            }
        };
        due_seq.saturating_sub(self.next_seq).div_ceil(self.stride)
    }

    /// How long after the start the next frame is due.
    fn next_due(&self, pps: u64) -> Duration {
        let nanos = (u128::from(self.next_seq) * NANOS).div_ceil(u128::from(pps));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl Queue for GenQueue {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        if self.next_seq >= self.end_seq {
            return Ok(Received::End);
        }
        let elapsed = match self.pps {
            None => Duration::ZERO,
            Some(_) => self.start.get_or_init(Instant::now).elapsed(),
        };
        let due = self.due(elapsed);
        if due == 0 {
            self.behind = false;
            return Ok(Received::Nothing);
        }
        let pps = self.pps.unwrap_or(u64::MAX);
        self.behind = elapsed.saturating_sub(self.next_due(pps)) > BEHIND && self.pps.is_some();

        let count = due.min(MAX_BATCH as u64) as usize;
        let (first, first_seq) = (self.next_slot, self.next_seq);
        let slots = self.slots[first..].iter().chain(&self.slots).take(count);
        for slot in slots.clone() {
            slot.stamp
                .put(&mut self.arena[slot.at..slot.at + slot.len], self.next_seq);
            self.next_seq = self.next_seq.saturating_add(self.stride);
        }
        let empty = Frame {
            bytes: &[],
            wire_len: 0,
            ts_ns: now_ns(),
            flags: self.flags,
            vlan_tci: self.vlan_tci,
            ..Frame::default()
        };
        let mut frames = [empty; MAX_BATCH];
        for (frame, slot) in frames.iter_mut().zip(slots) {
            frame.bytes = &self.arena[slot.at..slot.at + slot.len];
            frame.wire_len = slot.len as u32;
        }
        self.echo.handed_over(first_seq, count);
        sink(&frames[..count]);
        self.next_slot = (first + count) % self.slots.len();
        self.generated += count as u64;
        Ok(Received::Frames(count))
    }

    fn arm(&mut self) -> Wake<'_> {
        let within = match (self.pps, self.start.get()) {
            _ if self.next_seq >= self.end_seq => None,
            (Some(pps), Some(start)) => Some(self.next_due(pps).saturating_sub(start.elapsed())),
            _ => Some(Duration::ZERO),
        };
        Wake {
            within,
            ..Wake::default()
        }
    }

    fn woke(&mut self, _: Seen) {}

    fn counters(&mut self) -> QueueCounters {
        QueueCounters {
            seen: self.generated,
            ..QueueCounters::default()
        }
    }

    fn is_pressed(&self) -> bool {
        self.behind
    }

    fn state(&self) -> &'static str {
        match self {
            _ if self.next_seq >= self.end_seq => "ended",
            _ if self.behind => "behind",
            _ => "up",
        }
    }

    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        Some(self)
    }

    fn echoes(&mut self) -> Option<&mut dyn Echoes> {
        Some(&mut self.echo)
    }
}

impl Transmitter for GenQueue {
    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        self.echo.came_back(bytes);
        self.taken += 1;
        Transmit::Taken
    }

    fn flush(&mut self, _shown: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        Flushed {
            sent: std::mem::take(&mut self.taken),
            ..Flushed::default()
        }
    }
}

/// Nanoseconds since 1970; 0 if the clock is set before that.
fn now_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

const MAX_FLOWS: u32 = 1 << 24;
const MAX_QUEUES: usize = 1024;
/// Later than this is `behind`.
const BEHIND: Duration = Duration::from_millis(10);
const NANOS: u128 = 1_000_000_000;
