//! The generator: witness frames at a chosen rate, or as fast as a core can.
//!
//! Frames are prepared once, in an arena per queue; a batch only gets new sequences and CRCs
//! ([`vnplug_ring::witness`]), so a 9000-byte frame costs what a 60-byte frame does. Sequences count
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

use std::hash::{BuildHasher, RandomState};
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vnplug_ring::layout::flags;
use vnplug_ring::witness::{Protocol, Shape, Stamp};

use super::echo::Echo;
use super::{
    Flushed, Frame, Latency, MAX_BATCH, Queue, QueueCounters, Received, SourceError, Transmit,
    sleep::sleep,
};

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

/// Frame lengths in bytes as captured: Ethernet header and VLAN tag included, FCS excluded. What
/// other tools call 64 bytes "on the wire" is 60 here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// All the same, [`MIN_SIZE`] to [`MAX_SIZE`].
    Fixed(usize),
    /// From the first to the last, both included: each of them, or 64 spread evenly, in a mixed
    /// order.
    Range(usize, usize),
    /// The simple Internet mix: 7 of 60, 4 of 590, 1 of 1514 bytes; a protocol that needs more
    /// than 60 gets its shortest instead.
    Imix,
}

impl FromStr for Sizes {
    type Err = SourceError;

    /// `imix`, `FIRST-LAST` or a number.
    fn from_str(text: &str) -> Result<Self, SourceError> {
        let number = |text: &str| {
            text.parse().map_err(|_| {
                SourceError::new("a size is a number of bytes, FIRST-LAST or imix".to_owned())
            })
        };
        match text.split_once('-') {
            _ if text == "imix" => Ok(Self::Imix),
            Some((first, last)) => Ok(Self::Range(number(first)?, number(last)?)),
            None => Ok(Self::Fixed(number(text)?)),
        }
    }
}

impl Sizes {
    /// One round of lengths.
    fn round(self) -> Result<Vec<usize>, SourceError> {
        let (first, last) = match self {
            Self::Imix => return Ok(IMIX.to_vec()),
            Self::Fixed(size) => (size, size),
            Self::Range(first, last) => (first, last),
        };
        if first < MIN_SIZE || last > MAX_SIZE || first > last {
            return Err(SourceError::new(format!(
                "frame sizes are {MIN_SIZE} to {MAX_SIZE} bytes without FCS, not {first} to {last}"
            )));
        }
        let steps = (last - first).min(RANGE_STEPS - 1);
        // 37 has no factor in common with 64; for shorter rounds the order does not matter.
        let mixed = |n: usize| {
            if steps == RANGE_STEPS - 1 {
                n * 37 % RANGE_STEPS
            } else {
                n
            }
        };
        let at = |n: usize| first + ((last - first) * mixed(n)).checked_div(steps).unwrap_or(0);
        Ok((0..=steps).map(at).collect())
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
    slots: Vec<Slot>,
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
struct Slot {
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
            slots.push(Slot { at, len, stamp });
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

    fn wait(&mut self, waker: BorrowedFd<'_>, timeout: Option<Duration>) {
        let ended = self.next_seq >= self.end_seq;
        let until_due = match (self.pps, self.start.get()) {
            _ if ended => None,
            (Some(pps), Some(start)) => Some(self.next_due(pps).saturating_sub(start.elapsed())),
            _ => Some(Duration::ZERO),
        };
        let limit = [until_due, timeout].into_iter().flatten().min();
        if limit != Some(Duration::ZERO) {
            sleep(waker, None, limit);
        }
    }

    fn counters(&mut self) -> QueueCounters {
        QueueCounters {
            seen: self.generated,
            ..QueueCounters::default()
        }
    }

    fn state(&self) -> &'static str {
        match self {
            _ if self.next_seq >= self.end_seq => "ended",
            _ if self.behind => "behind",
            _ => "up",
        }
    }

    fn transmits(&self) -> bool {
        true
    }

    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        self.echo.came_back(bytes);
        self.taken += 1;
        Transmit::Taken
    }

    fn flush(&mut self) -> Flushed {
        Flushed {
            sent: std::mem::take(&mut self.taken),
            ..Flushed::default()
        }
    }

    fn listen(&mut self) {
        self.echo.begin();
    }

    fn latency(&self) -> Option<Latency> {
        self.echo.latency()
    }
}

/// The frames a queue goes through in turn: as many as it takes for flows and sizes to repeat, and
/// at least a batch, for the frames of a batch must not share memory.
fn shapes(config: &GenConfig, queue: usize) -> Result<Vec<Shape>, SourceError> {
    let sizes = config.sizes.round()?;
    let (flows, queues) = (config.flows as usize, config.queues);
    let flow_round = flows / gcd(flows, queues);
    let round = flow_round / gcd(flow_round, sizes.len()) * sizes.len();
    let count = round * MAX_BATCH.div_ceil(round);
    let mean = sizes.iter().map(|size| stride(*size)).sum::<usize>() / sizes.len();
    let needed = count.saturating_mul(mean).saturating_mul(queues);
    if needed > MAX_ARENA {
        return Err(SourceError::new(format!(
            "{flows} flows of {} sizes on {queues} queues need {} MiB of prepared frames, the limit \
             is {} MiB; take fewer flows or one size",
            sizes.len(),
            needed >> 20,
            MAX_ARENA >> 20
        )));
    }
    let shape = |n: usize| {
        let flow = (queue + n * queues) % flows;
        let protocol = config.protocols[flow % config.protocols.len()];
        let mut shape = Shape {
            len_bytes: sizes[n % sizes.len()],
            flow: flow as u32,
            protocol,
            vlan_tci: config.vlan_tci,
        };
        if config.sizes == Sizes::Imix {
            shape.len_bytes = shape.len_bytes.max(shape.min_bytes());
        }
        shape
    };
    Ok((0..count).map(shape).collect())
}

/// Frames start on cache lines.
fn stride(len_bytes: usize) -> usize {
    len_bytes.next_multiple_of(64)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Nanoseconds since 1970; 0 if the clock is set before that.
fn now_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The shortest frame in bytes, FCS excluded.
pub const MIN_SIZE: usize = 60;
/// The longest frame in bytes, FCS excluded.
pub const MAX_SIZE: usize = 9000;
const MAX_FLOWS: u32 = 1 << 24;
const MAX_QUEUES: usize = 1024;
const MAX_ARENA: usize = 256 << 20;
const RANGE_STEPS: usize = 64;
const IMIX: [usize; 12] = [60, 590, 60, 60, 590, 60, 1514, 60, 590, 60, 590, 60];
/// Later than this is `behind`.
const BEHIND: Duration = Duration::from_millis(10);
const NANOS: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_ring::witness::{Checker, View};

    fn drain(queue: &mut dyn Queue, checker: &mut Checker) -> (u64, u64) {
        let (mut frames, mut bytes) = (0, 0);
        while let Received::Frames(count) = queue
            .receive(&mut |batch| {
                assert!(!batch.is_empty() && batch.len() <= MAX_BATCH);
                for frame in batch {
                    checker.feed(frame.bytes);
                    assert_eq!(frame.wire_len as usize, frame.bytes.len());
                    bytes += frame.bytes.len() as u64;
                }
            })
            .unwrap()
        {
            frames += count as u64;
        }
        assert_eq!(
            queue.receive(&mut |_| unreachable!()).unwrap(),
            Received::End
        );
        assert_eq!((queue.counters().seen, queue.state()), (frames, "ended"));
        (frames, bytes)
    }

    #[test]
    fn counted_run_is_perfect_for_every_mix() {
        for (sizes, flows, protocols, vlan_tci) in [
            (Sizes::Fixed(60), 1, vec![Protocol::Udp4], None),
            (Sizes::Fixed(9000), 3, Protocol::ALL.to_vec(), Some(100)),
            (
                Sizes::Range(108, 1514),
                1000,
                Protocol::ALL.to_vec(),
                Some(1),
            ),
            (Sizes::Range(60, 61), 2, vec![Protocol::Udp4], None),
            (Sizes::Imix, 10_007, Protocol::ALL.to_vec(), None),
        ] {
            let config = GenConfig {
                sizes,
                flows,
                protocols,
                vlan_tci,
                count: Some(70_001),
                ..GenConfig::default()
            };
            let mut checker = Checker::new(View::Whole);
            checker.expect(config.run, 0..70_001);
            let mut queues = Gen::open(&config).unwrap();
            assert_eq!(drain(queues[0].as_mut(), &mut checker).0, 70_001);
            assert!(checker.is_perfect() && checker.foreign() == 0, "{config:?}");
        }
    }

    #[test]
    fn queues_together_carry_every_sequence_once() {
        let config = GenConfig {
            queues: 3,
            flows: 7,
            count: Some(10_000),
            ..GenConfig::default()
        };
        let mut checker = Checker::new(View::Part);
        for mut queue in Gen::open(&config).unwrap() {
            drain(queue.as_mut(), &mut checker);
        }
        assert_eq!(checker.set(config.run).unwrap().gaps(0..10_000).count, 0);
        assert_eq!(checker.report(config.run).unwrap().duplicates, 0);
    }

    #[test]
    fn imix_has_its_shares() {
        let config = GenConfig {
            sizes: Sizes::Imix,
            count: Some(12_000),
            ..GenConfig::default()
        };
        let mut queues = Gen::open(&config).unwrap();
        let (_, bytes) = drain(queues[0].as_mut(), &mut Checker::new(View::Whole));
        assert_eq!(bytes, 1000 * (7 * 60 + 4 * 590 + 1514));
    }

    #[test]
    fn due_follows_the_rate_exactly_on_average() {
        let config = GenConfig {
            pps: Some(3),
            queues: 2,
            ..GenConfig::default()
        };
        let mut queue = GenQueue::new(&config, 1, Arc::default()).unwrap();
        for (millis, due) in [
            (0, 0),
            (333, 0),
            (334, 1),
            (999, 1),
            (1000, 2),
            (1_000_000, 1500),
        ] {
            assert_eq!(queue.due(Duration::from_millis(millis)), due, "{millis} ms");
        }
        assert_eq!(queue.due(Duration::MAX), u64::MAX / 2);
        // What `wait` sleeps for is never too short: a frame is due then.
        for pps in [1, 3, 7, 999_999_937, u64::MAX] {
            queue.pps = Some(pps);
            for seq in [1, 1001, 123_456_789] {
                queue.next_seq = seq;
                assert!(queue.due(queue.next_due(pps)) >= 1, "{pps} {seq}");
            }
        }
    }

    #[test]
    fn a_late_generator_says_so_and_skips_nothing() {
        let config = GenConfig {
            pps: Some(100_000),
            ..GenConfig::default()
        };
        let start = Arc::new(OnceLock::new());
        let second_ago = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        start.set(second_ago).unwrap();
        let mut queue = GenQueue::new(&config, 0, start).unwrap();
        assert_eq!(
            queue.receive(&mut |_| ()).unwrap(),
            Received::Frames(MAX_BATCH)
        );
        assert_eq!(
            (queue.state(), queue.next_seq),
            ("behind", MAX_BATCH as u64)
        );
        queue.next_seq = u64::from(u32::MAX);
        assert_eq!(
            queue.receive(&mut |_| unreachable!()).unwrap(),
            Received::Nothing
        );
        assert_eq!(queue.state(), "up");
    }

    #[test]
    fn impossible_configurations_are_refused_in_words() {
        let base = GenConfig::default();
        for (config, word) in [
            (
                GenConfig {
                    sizes: Sizes::Fixed(59),
                    ..base.clone()
                },
                "60 to 9000",
            ),
            (
                GenConfig {
                    sizes: Sizes::Fixed(9001),
                    ..base.clone()
                },
                "60 to 9000",
            ),
            (
                GenConfig {
                    sizes: Sizes::Range(100, 99),
                    ..base.clone()
                },
                "60 to 9000",
            ),
            (
                GenConfig {
                    protocols: vec![Protocol::Tcp6],
                    ..base.clone()
                },
                "104",
            ),
            (
                GenConfig {
                    vlan_tci: Some(1),
                    ..base.clone()
                },
                "64",
            ),
            (
                GenConfig {
                    flows: 0,
                    ..base.clone()
                },
                "flows",
            ),
            (
                GenConfig {
                    pps: Some(0),
                    ..base.clone()
                },
                "rate",
            ),
            (
                GenConfig {
                    queues: 0,
                    ..base.clone()
                },
                "queues",
            ),
            (
                GenConfig {
                    flows: 1 << 24,
                    sizes: Sizes::Fixed(9000),
                    ..base.clone()
                },
                "MiB",
            ),
        ] {
            let error = Gen::open(&config).err().expect(word);
            assert!(error.what.contains(word), "{error}");
        }
        assert_eq!("imix".parse::<Sizes>().unwrap(), Sizes::Imix);
        assert_eq!("64-1500".parse::<Sizes>().unwrap(), Sizes::Range(64, 1500));
        assert_eq!("60".parse::<Sizes>().unwrap(), Sizes::Fixed(60));
        assert!("big".parse::<Sizes>().is_err());
    }
}
