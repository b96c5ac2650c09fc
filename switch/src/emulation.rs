//! Wires that are slow or bad on purpose: from the switch to a port's far end frames take time, wait for
//! their turn, or get lost, as the port's settings say.
//!
//! What is on its way is kept here, within bounds: a wire that has as much as it may have drops what comes, as
//! a full queue does. Frames keep their order, unless the settings let jitter change it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use vnplug_os::event;
use vnplug_ring::offload::Offload;

use crate::batch::Entered;
use crate::exits::Due;
use crate::forward::Number;
use crate::link::Given;
use crate::settings::Wire;

/// All slow wires of a switch.
#[derive(Default)]
pub(crate) struct Emulation {
    lines: HashMap<Number, Line>,
    /// When each that has frames has the next to give.
    next: BTreeSet<(u64, Number)>,
    /// Bytes on all of them.
    bytes: usize,
    arrived: Vec<Held>,
}

/// A frame on its way.
pub(crate) struct Held {
    bytes: Box<[u8]>,
    offload: Option<Offload>,
    is_valid: bool,
}

impl Held {
    pub(crate) fn entered(&self) -> Entered<'_> {
        Entered {
            from: 0,
            bytes: &self.bytes,
            tail: None,
            offload: self.offload.as_ref(),
            is_valid: self.is_valid,
            fault: None,
        }
    }
}

/// One wire.
struct Line {
    wire: Wire,
    random: u64,
    /// When the last frame has been sent, and when the last one arrives.
    sent_us: f64,
    last_us: u64,
    /// By the time of arrival, and in order of sending.
    held: BTreeMap<(u64, u64), Held>,
    bytes: usize,
    number: u64,
}

impl Emulation {
    /// What a port's wire is like from now on; says whether frames must take it.
    pub(crate) fn set(&mut self, port: Number, wire: &Wire, now_us: u64) -> bool {
        let is_busy = self.is_busy(port);
        if wire.is_plain() && !is_busy {
            self.lines.remove(&port);
            return false;
        }
        let seed = wire.seed.unwrap_or_else(event::random);
        let line = self.lines.entry(port).or_insert_with(|| Line {
            wire: *wire,
            random: seed,
            sent_us: 0.0,
            last_us: 0,
            held: BTreeMap::new(),
            bytes: 0,
            number: 0,
        });
        if line.wire != *wire {
            let before = line.first_us();
            (line.wire, line.random) = (*wire, seed);
            line.start_again(now_us);
            let after = line.first_us();
            self.promise(port, before, after);
        }
        true
    }

    fn is_busy(&self, port: Number) -> bool {
        let line = self.lines.get(&port);
        line.is_some_and(|line| !line.held.is_empty())
    }

    /// Whether frames to a port must take its wire. One that is plain again, and empty, is forgotten.
    pub(crate) fn is_slow(&mut self, port: Number) -> bool {
        let is_over = |line: &Line| line.wire.is_plain() && line.held.is_empty();
        if self.lines.get(&port).is_some_and(is_over) {
            self.lines.remove(&port);
        }
        self.lines.contains_key(&port)
    }

    /// Forgets a port's wire, and what is on it.
    pub(crate) fn remove(&mut self, port: Number) {
        if let Some(line) = self.lines.remove(&port) {
            self.bytes -= line.bytes;
            if let Some(((at_us, _), _)) = line.held.first_key_value() {
                self.next.remove(&(*at_us, port));
            }
        }
    }

    /// Puts frames on a port's wire. What became of them, and how many are lost.
    pub(crate) fn put(&mut self, port: Number, due: Due<'_>, now_us: u64) -> (Given, u64) {
        let (mut given, mut lost) = (Given::default(), 0);
        let Some(line) = self.lines.get_mut(&port) else {
            return (given, lost);
        };
        let first = line.first_us();
        for out in due.iter() {
            let len = out.head.len() + out.body.len();
            if line.loses() {
                lost += 1;
            } else if line.held.len() >= MAX_FRAMES
                || line.bytes + len > MAX_BYTES
                || self.bytes + len > MAX_ALL_BYTES
            {
                given.full += 1;
            } else {
                let held = Held {
                    bytes: [out.head, out.body].concat().into_boxed_slice(),
                    offload: out.offload.copied(),
                    is_valid: out.is_valid,
                };
                line.put(held, now_us);
                self.bytes += len;
                given.enqueued += 1;
                given.bytes += len as u64;
            }
        }
        let now_first = line.first_us();
        self.promise(port, first, now_first);
        (given, lost)
    }

    fn promise(&mut self, port: Number, before: Option<u64>, after: Option<u64>) {
        if before != after {
            before.map(|at_us| self.next.remove(&(at_us, port)));
            after.map(|at_us| self.next.insert((at_us, port)));
        }
    }

    /// When the next frame arrives.
    #[inline]
    pub(crate) fn next_us(&self) -> Option<u64> {
        self.next.first().map(|(at_us, _)| *at_us)
    }

    /// A port at which frames have [arrived](Self::arrived).
    pub(crate) fn take(&mut self, now_us: u64) -> Option<Number> {
        let (at_us, port) = *self.next.first().filter(|(at_us, _)| *at_us <= now_us)?;
        self.arrived.clear();
        let after = self.lines.get_mut(&port).and_then(|line| {
            while self.arrived.len() < MAX_ARRIVED
                && let Some(first) = line.held.first_entry()
                && first.key().0 <= now_us
            {
                let held = first.remove();
                line.bytes -= held.bytes.len();
                self.bytes -= held.bytes.len();
                self.arrived.push(held);
            }
            line.first_us()
        });
        self.promise(port, Some(at_us), after);
        Some(port)
    }

    /// What [`take`](Self::take) found, in order.
    pub(crate) fn arrived(&self) -> &[Held] {
        &self.arrived
    }
}

impl Line {
    fn first_us(&self) -> Option<u64> {
        self.held.first_key_value().map(|((at_us, _), _)| *at_us)
    }

    /// What is on it takes from now on as long as the wire says now, in order.
    fn start_again(&mut self, now_us: u64) {
        (self.sent_us, self.last_us) = (0.0, 0);
        let held = std::mem::take(&mut self.held);
        self.bytes = 0;
        held.into_values().for_each(|held| self.put(held, now_us));
    }

    /// Whether the next frame gets lost.
    fn loses(&mut self) -> bool {
        let loss = self.wire.loss.0;
        loss > 0 && self.below(1_000_000) < u64::from(loss)
    }

    fn put(&mut self, held: Held, now_us: u64) {
        let Wire {
            delay_us,
            jitter_us,
            reorders,
            bits_per_s,
            ..
        } = self.wire;
        let mut at_us = now_us;
        if bits_per_s > 0 {
            let takes_us = held.bytes.len() as f64 * 8e6 / bits_per_s as f64;
            self.sent_us = self.sent_us.max(now_us as f64) + takes_us;
            at_us = self.sent_us as u64;
        }
        at_us += u64::from(delay_us);
        if jitter_us > 0 {
            at_us += self.below(u64::from(jitter_us) + 1);
        }
        if !reorders {
            at_us = at_us.max(self.last_us);
        }
        self.last_us = self.last_us.max(at_us);
        self.bytes += held.bytes.len();
        self.number += 1;
        self.held.insert((at_us, self.number), held);
    }

    /// A random number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        // SplitMix64 (Steele, Lea and Flood 2014).
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut it = self.random;
        it = (it ^ it >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        it = (it ^ it >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        it ^= it >> 31;
        ((u128::from(it) * u128::from(end)) >> 64) as u64
    }
}

/// What one wire has at most: frames, and their bytes.
const MAX_FRAMES: usize = 16_384;
const MAX_BYTES: usize = 8 << 20;
/// Bytes on all of a switch.
const MAX_ALL_BYTES: usize = 128 << 20;
/// Frames that a port is given at once.
const MAX_ARRIVED: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        let mut settings = crate::settings::PortSettings::default();
        settings.apply(text).unwrap();
        let mut emulation = Emulation::default();
        emulation.set(1, &settings.wire, 0);
        emulation.lines.remove(&1).unwrap()
    }

    fn held(number: u8) -> Held {
        Held {
            bytes: [number; 125].into(),
            offload: None,
            is_valid: false,
        }
    }

    /// When each frame arrives, in order of arrival.
    fn arrivals(line: &mut Line, every_us: u64) -> Vec<(u64, u8)> {
        for number in 0..100 {
            line.put(held(number), u64::from(number) * every_us);
        }
        let all = line.held.iter();
        all.map(|((at_us, _), held)| (*at_us, held.bytes[0]))
            .collect()
    }

    #[test]
    fn a_wire_takes_its_time() {
        let delayed = arrivals(&mut line("delay=3ms"), 10);
        assert!(
            (0..100)
                .zip(delayed)
                .all(|(n, it)| it == (3000 + u64::from(n) * 10, n))
        );
        // 1,000 bits each.
        let slow = arrivals(&mut line("rate=1M"), 10);
        assert!(
            (0..100)
                .zip(slow)
                .all(|(n, it)| it == ((u64::from(n) + 1) * 1000, n))
        );
    }

    #[test]
    fn frames_keep_their_order_unless_jitter_may_change_it() {
        let is_sorted = |all: &[(u64, u8)]| all.is_sorted_by_key(|(_, number)| *number);
        let text = "jitter=5ms seed=1";
        let kept = arrivals(&mut line(text), 10);
        assert!(is_sorted(&kept) && kept[99].0 > 4000);
        assert_eq!(kept, arrivals(&mut line(text), 10));
        assert!(!is_sorted(&arrivals(
            &mut line("jitter=5ms reorder=yes"),
            10
        )));
    }

    #[test]
    fn a_wire_that_is_faster_now_is_so_for_what_is_on_it_too() {
        let wire = |text: &str| {
            let mut settings = crate::settings::PortSettings::default();
            settings.apply(text).unwrap();
            settings.wire
        };
        let mut emulation = Emulation::default();
        emulation.set(1, &wire("rate=1K"), 0);
        let line = emulation.lines.get_mut(&1).unwrap();
        arrivals(line, 0);
        let first = line.first_us();
        emulation.promise(1, None, first);
        // A second for each.
        assert_eq!(emulation.next_us(), Some(1_000_000));
        emulation.set(1, &wire("rate=1M"), 10);
        assert_eq!(emulation.next_us(), Some(1_010));
        let line = &emulation.lines[&1];
        let last = line.held.last_key_value().unwrap();
        assert_eq!((last.0.0, last.1.bytes[0]), (100_010, 99));
        assert_eq!((line.held.len(), line.bytes), (100, 12_500));
        assert!(emulation.set(1, &wire(""), 20) && emulation.next_us() == Some(20));
    }

    #[test]
    fn so_many_get_lost() {
        let mut line = line("loss=10% seed=5");
        let lost = (0..100_000).filter(|_| line.loses()).count();
        assert!((9_700..10_300).contains(&lost), "{lost}");
    }
}
