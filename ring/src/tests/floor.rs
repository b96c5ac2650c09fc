//! Every interleaving of a host that overwrites a record and a reader that copies it.
//!
//! A model of `Arena::place` and of a reader's copy: a record of two words, one place, two records
//! in turn. The host's stores leave its buffer in any order that C11 allows (those before a Release
//! fence leave before those after it); the reader's loads are done in any order, but none moves over
//! the Acquire fence. Clause: what the reader believes is one record, whole. Each mutant of the
//! protocol must let a torn or a foreign record through.

use std::collections::HashSet;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    HostWithoutFence,
    ReaderWithoutFence,
    FloorAfterTheBytes,
    FloorOneTooLow,
    ReaderAsksFirst,
}

/// The words in memory: two of the record, then the floor.
const FLOOR: usize = 2;
const RECORDS: u8 = 3;

#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct State {
    memory: [u8; 3],
    /// Stores on their way: word, value, how many fences came before.
    buffer: Vec<(usize, u8, u8)>,
    /// Records the host has begun, and the step within this one.
    record: u8,
    step: u8,
    fences: u8,
    /// The newest record whose descriptor was published, which publishes its bytes too.
    published: u8,
    /// The record that the reader has a descriptor of; 0 = none yet.
    wanted: u8,
    loaded: [Option<u8>; 3],
}

impl State {
    /// Some belief of the reader is not the record it wanted.
    fn is_fooled(&self) -> bool {
        let [Some(one), Some(two), Some(floor)] = self.loaded else {
            return false;
        };
        floor <= self.wanted && (one != self.wanted || two != self.wanted)
    }

    fn successors(&self, mutant: Mutant) -> Vec<State> {
        let mut next = Vec::new();
        for (at, &(word, value, fences)) in self.buffer.iter().enumerate() {
            let earlier = &self.buffer[..at];
            if earlier
                .iter()
                .any(|&(to, _, before)| to == word || before < fences)
            {
                continue;
            }
            let mut state = self.clone();
            state.memory[word] = value;
            state.buffer.remove(at);
            next.push(state);
        }
        next.extend(self.host_step(mutant));
        self.reader_steps(mutant, &mut next);
        next
    }

    /// Floor, fence, two words, descriptor.
    fn host_step(&self, mutant: Mutant) -> Option<State> {
        if self.record == RECORDS {
            return None;
        }
        let mut s = self.clone();
        let number = self.record + 1;
        let floor = (FLOOR, number - u8::from(mutant == Mutant::FloorOneTooLow));
        let words = [(0, number), (1, number)];
        let (order, fence_after) = match mutant {
            Mutant::FloorAfterTheBytes => ([words[0], words[1], floor], usize::MAX),
            Mutant::HostWithoutFence => ([floor, words[0], words[1]], usize::MAX),
            _ => ([floor, words[0], words[1]], 0),
        };
        match usize::from(self.step) {
            step @ 0..3 => {
                let (word, value) = order[step];
                s.buffer.push((word, value, s.fences));
                s.fences += u8::from(step == fence_after);
                s.step += 1;
            }
            // Publishing is a Release store, and the reader has acquired it.
            _ if s.buffer.is_empty() => {
                (s.published, s.record, s.step) = (number, number, 0);
            }
            _ => return None,
        }
        Some(s)
    }

    fn reader_steps(&self, mutant: Mutant, next: &mut Vec<State>) {
        if self.wanted == 0 {
            if self.published > 0 {
                next.push(State {
                    wanted: self.published,
                    ..self.clone()
                });
            }
            return;
        }
        let bytes_loaded = self.loaded[0].is_some() && self.loaded[1].is_some();
        for word in 0..3 {
            let may = match (mutant, word) {
                (Mutant::ReaderWithoutFence, _) => true,
                (Mutant::ReaderAsksFirst, FLOOR) => true,
                (Mutant::ReaderAsksFirst, _) => self.loaded[FLOOR].is_some(),
                (_, FLOOR) => bytes_loaded,
                _ => true,
            };
            if may && self.loaded[word].is_none() {
                let mut state = self.clone();
                state.loaded[word] = Some(self.memory[word]);
                next.push(state);
            }
        }
    }
}

/// Visits every reachable state; tells how many there are and whether the reader can be fooled.
fn explore(mutant: Mutant) -> (usize, bool) {
    let mut seen = HashSet::from([State::default()]);
    let mut todo = vec![State::default()];
    let mut fooled = false;
    while let Some(state) = todo.pop() {
        fooled |= state.is_fooled();
        for next in state.successors(mutant) {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    (seen.len(), fooled)
}

#[test]
fn no_interleaving_makes_a_reader_believe_a_torn_packet() {
    let (states, fooled) = explore(Mutant::None);
    assert!(!fooled);
    assert!(states > 200, "{states} states were visited");
    println!("figure: G-04 exhaustive models = 1");
    println!("figure: G-05 exhaustive models of interleavings = 1");
}

#[test]
fn every_mutant_of_the_floor_fools_one() {
    for (name, mutant) in [
        ("host without its fence", Mutant::HostWithoutFence),
        ("reader without its fence", Mutant::ReaderWithoutFence),
        ("floor after the bytes", Mutant::FloorAfterTheBytes),
        ("floor one too low", Mutant::FloorOneTooLow),
        ("reader asks before it reads", Mutant::ReaderAsksFirst),
    ] {
        assert!(explore(mutant).1, "not caught: {name}");
    }
}
