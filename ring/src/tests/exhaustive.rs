//! Every interleaving of arming and ringing, with stores that other cores see late.
//!
//! A model of `Producer::{publish, bell}` and `Consumer::{arm, release}`: each step is one load,
//! store or fence, each side's stores wait in a buffer and leave it in any order that C11 allows (a
//! Release store leaves after everything before it). Clause: no reachable state has a sleeping
//! reader, a producer that is done, and unread records that reach the watermark or that nobody will
//! look at. Each mutant of the protocol must reach such a state.

use std::collections::HashSet;

/// Records the producer publishes, one at a time.
const RECORDS: u8 = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    ProducerWithoutFence,
    ReaderWithoutFence,
    ReaderNeverKeepsTime,
    DoorbellEmptiedAfterArming,
    QuietCountsAsRung,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Word {
    Head,
    Tail,
    WakeAt,
    Seq,
}

#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct Core {
    step: u8,
    /// Stores on their way to memory: word, value, Release.
    buffer: Vec<(Word, u8, bool)>,
    /// The arming that was loaded.
    seen: u8,
}

#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct State {
    memory: [u8; 4],
    producer: Core,
    reader: Core,
    published: u8,
    rung: u8,
    later: bool,
    doorbell: bool,
    read: u8,
    armings: u8,
}

const SLEEP: u8 = 6;
const SLEEP_AT_MOST: u8 = 7;
const EMPTY_DOORBELL: u8 = 8;
const DONE: u8 = 9;

/// Watermarks change from arming to arming, so that a stale one matters.
fn watermark(arming: u8) -> u8 {
    [1, 3][usize::from(arming % 2)]
}

fn load(memory: &[u8; 4], core: &Core, word: Word) -> u8 {
    let own = core.buffer.iter().rev().find(|(to, ..)| *to == word);
    own.map_or(memory[word as usize], |(_, value, _)| *value)
}

impl State {
    fn is_lost(&self) -> bool {
        let unread = self.published - self.read;
        self.producer.step == DONE
            && self.producer.buffer.is_empty()
            && self.reader.step == SLEEP
            && self.reader.buffer.is_empty()
            && !self.doorbell
            && (unread >= watermark(self.armings) || (unread > 0 && !self.later))
    }

    fn successors(&self, mutant: Mutant) -> Vec<State> {
        let mut next = Vec::new();
        for core in 0..2 {
            let buffer = if core == 0 {
                &self.producer.buffer
            } else {
                &self.reader.buffer
            };
            for (at, (word, value, release)) in buffer.iter().enumerate() {
                let earlier = &buffer[..at];
                if at > 0 && (*release || earlier.iter().any(|(to, ..)| to == word)) {
                    continue;
                }
                let mut state = self.clone();
                state.memory[*word as usize] = *value;
                let core = if core == 0 {
                    &mut state.producer
                } else {
                    &mut state.reader
                };
                core.buffer.remove(at);
                next.push(state);
            }
        }
        next.extend(self.producer_step(mutant));
        next.extend(self.reader_step(mutant));
        next
    }

    fn producer_step(&self, mutant: Mutant) -> Option<State> {
        let mut s = self.clone();
        let value = |word| load(&self.memory, &self.producer, word);
        let core = &mut s.producer;
        let next_record = if self.published == RECORDS { DONE } else { 0 };
        core.step = match core.step {
            0 => {
                s.published += 1;
                core.buffer.push((Word::Head, s.published, true));
                1
            }
            1 if core.buffer.is_empty() || mutant == Mutant::ProducerWithoutFence => 2,
            2 => {
                core.seen = value(Word::Seq);
                s.later = false;
                if core.seen == s.rung { next_record } else { 3 }
            }
            3 if value(Word::Tail) == s.published => {
                if mutant == Mutant::QuietCountsAsRung {
                    s.rung = core.seen;
                }
                next_record
            }
            3 => 4,
            4 => {
                if s.published >= value(Word::WakeAt) {
                    (s.rung, s.doorbell) = (core.seen, true);
                } else {
                    s.later = true;
                }
                next_record
            }
            _ => return None,
        };
        Some(s)
    }

    fn reader_step(&self, mutant: Mutant) -> Option<State> {
        let mut s = self.clone();
        let value = |word| load(&self.memory, &self.reader, word);
        let core = &mut s.reader;
        let wake_at = |s: &State| s.read + watermark(s.armings);
        core.step = match core.step {
            0 => {
                s.read = value(Word::Head);
                if s.read == RECORDS { DONE } else { 1 }
            }
            1 => {
                core.buffer.push((Word::Tail, s.read, true));
                s.armings += 1;
                2
            }
            2 => {
                let at = wake_at(self);
                core.buffer.push((Word::WakeAt, at, false));
                3
            }
            3 => {
                core.buffer.push((Word::Seq, s.armings, true));
                4
            }
            4 if core.buffer.is_empty() || mutant == Mutant::ReaderWithoutFence => 5,
            5 => match value(Word::Head) {
                head if head == s.read => match mutant {
                    Mutant::DoorbellEmptiedAfterArming => EMPTY_DOORBELL,
                    _ => SLEEP,
                },
                head if head >= wake_at(self) => 0,
                _ if mutant == Mutant::ReaderNeverKeepsTime => SLEEP,
                _ => SLEEP_AT_MOST,
            },
            SLEEP if s.doorbell => {
                s.doorbell = false;
                0
            }
            EMPTY_DOORBELL => {
                s.doorbell = false;
                SLEEP
            }
            SLEEP_AT_MOST => {
                s.doorbell = false;
                0
            }
            _ => return None,
        };
        Some(s)
    }
}

/// Visits every reachable state; tells how many there are and whether a wake-up can be lost.
fn explore(mutant: Mutant) -> (usize, bool) {
    let mut seen = HashSet::from([State::default()]);
    let mut todo = vec![State::default()];
    let mut lost = false;
    while let Some(state) = todo.pop() {
        lost |= state.is_lost();
        // A reader that wakes again and again by its own timer needs no more armings than these.
        if state.armings > RECORDS + 3 {
            continue;
        }
        for next in state.successors(mutant) {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    (seen.len(), lost)
}

#[test]
fn no_interleaving_loses_a_wake_up() {
    let (states, lost) = explore(Mutant::None);
    assert!(!lost);
    assert!(states > 5_000, "{states} states were visited");
    println!("figure: G-04 exhaustive models = 1");
    println!("figure: G-05 exhaustive models of interleavings = 1");
}

#[test]
fn every_mutant_of_the_protocol_loses_one() {
    for (name, mutant) in [
        ("producer without its fence", Mutant::ProducerWithoutFence),
        ("reader without its fence", Mutant::ReaderWithoutFence),
        ("reader never keeps the time", Mutant::ReaderNeverKeepsTime),
        (
            "doorbell emptied after arming",
            Mutant::DoorbellEmptiedAfterArming,
        ),
        (
            "an arming with nothing unread counts as rung",
            Mutant::QuietCountsAsRung,
        ),
    ] {
        assert!(explore(mutant).1, "not caught: {name}");
    }
}
