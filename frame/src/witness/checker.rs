//! Judging received witness frames.

use std::ops::Range;

use super::set::{Gaps, Inserted, SeqSet};
use super::{Parsed, Witness, parse};

/// What a receiver is meant to get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Every frame: a gap is a loss.
    Whole,
    /// Some of the frames (a filter, a member of a cluster): gaps mean nothing by themselves, but
    /// duplicates, disorder and corruption do. [`SeqSet::merge`] the members' sets to prove that
    /// together they got everything.
    Part,
}

/// Judges frames in the order they were received.
///
/// Exact whatever the disorder, as long as [`SeqSet`]'s memory suffices (268 million sequences
/// between the oldest gap and the newest frame); what it cannot judge any more it counts as
/// `unjudged` and never guesses.
#[derive(Debug)]
pub struct Checker {
    view: View,
    runs: Vec<Run>,
    corrupt: u64,
    foreign: u64,
}

#[derive(Debug)]
struct Run {
    run: u32,
    received: u64,
    duplicates: u64,
    reordered: u64,
    unjudged: u64,
    first: u64,
    last: u64,
    expected: Option<Range<u64>>,
    set: SeqSet,
}

/// What is known about one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Which run.
    pub run: u32,
    /// Undamaged frames, duplicates included.
    pub received: u64,
    /// Frames received again after their first time.
    pub duplicates: u64,
    /// Frames received after one with a higher sequence (duplicates not counted).
    pub reordered: u64,
    /// Frames too late to be told new from duplicate, and duplicates of forgotten ones.
    pub unjudged: u64,
    /// Frames that are not within the range given to [`Checker::expect`].
    pub unexpected: u64,
    /// The lowest sequence received.
    pub first: u64,
    /// The highest sequence received.
    pub last: u64,
    /// Frames that did not come: of the expected range, else between `first` and `last`. Empty for
    /// [`View::Part`].
    pub missing: Gaps,
}

impl Report {
    /// Whether every frame came once, in order.
    pub fn is_perfect(&self) -> bool {
        let Self {
            duplicates,
            reordered,
            unjudged,
            unexpected,
            missing,
            ..
        } = self;
        *duplicates == 0
            && *reordered == 0
            && *unjudged == 0
            && *unexpected == 0
            && missing.count == 0
    }
}

impl Checker {
    /// A checker that has seen nothing.
    pub fn new(view: View) -> Self {
        Self {
            view,
            runs: Vec::new(),
            corrupt: 0,
            foreign: 0,
        }
    }

    /// Takes the next frame and says what it is.
    pub fn feed(&mut self, frame: &[u8]) -> Parsed {
        let parsed = parse(frame);
        match parsed {
            Parsed::Witness(witness) => self.count(witness),
            Parsed::Corrupt => self.corrupt += 1,
            Parsed::Foreign => self.foreign += 1,
        }
        parsed
    }

    /// Tells which sequences of `run` were sent, so that loss before the first and after the last
    /// received frame is seen too.
    pub fn expect(&mut self, run: u32, sent: Range<u64>) {
        if let Some(known) = self.run_mut(run) {
            known.expected = Some(sent);
        }
    }

    /// Witness frames that arrived damaged; which run they were of is not known.
    pub fn corrupt(&self) -> u64 {
        self.corrupt
    }

    /// Frames that are not a generator's, and those of runs beyond the first [`MAX_RUNS`].
    pub fn foreign(&self) -> u64 {
        self.foreign
    }

    /// The runs seen or expected, in the order they appeared.
    pub fn runs(&self) -> impl Iterator<Item = u32> {
        self.runs.iter().map(|run| run.run)
    }

    /// What is known about `run`; `None` if nothing of it came and none was expected.
    pub fn report(&self, run: u32) -> Option<Report> {
        self.runs
            .iter()
            .find(|known| known.run == run)
            .map(|known| known.report(self.view))
    }

    /// The sequences of `run` received, to merge with other receivers' sets.
    pub fn set(&self, run: u32) -> Option<&SeqSet> {
        self.runs
            .iter()
            .find(|known| known.run == run)
            .map(|known| &known.set)
    }

    /// Whether anything came or was expected, and all of it once, in order and undamaged. Foreign
    /// frames do not count.
    pub fn is_perfect(&self) -> bool {
        self.corrupt == 0
            && !self.runs.is_empty()
            && self
                .runs
                .iter()
                .all(|run| run.report(self.view).is_perfect())
    }

    fn count(&mut self, Witness { run, seq }: Witness) {
        match self.run_mut(run) {
            Some(known) => known.count(seq),
            None => self.foreign += 1,
        }
    }

    fn run_mut(&mut self, run: u32) -> Option<&mut Run> {
        let at = match self.runs.iter().position(|known| known.run == run) {
            Some(at) => at,
            None if self.runs.len() < MAX_RUNS => {
                self.runs.push(Run::new(run));
                self.runs.len() - 1
            }
            None => return None,
        };
        self.runs.get_mut(at)
    }
}

impl Run {
    fn new(run: u32) -> Self {
        Self {
            run,
            received: 0,
            duplicates: 0,
            reordered: 0,
            unjudged: 0,
            first: u64::MAX,
            last: 0,
            expected: None,
            set: SeqSet::new(),
        }
    }

    fn count(&mut self, seq: u64) {
        let late = self.received > 0 && seq < self.last;
        self.received += 1;
        match self.set.insert(seq) {
            Inserted::New => self.reordered += u64::from(late),
            Inserted::Known => self.duplicates += 1,
            Inserted::Forgotten => self.unjudged += 1,
        }
        self.first = self.first.min(seq);
        self.last = self.last.max(seq);
    }

    fn report(&self, view: View) -> Report {
        let seen = if self.received == 0 {
            0..0
        } else {
            self.first..self.last.saturating_add(1)
        };
        let range = self.expected.clone().unwrap_or_else(|| seen.clone());
        let missing = match view {
            View::Whole => self.missing(range.clone()),
            View::Part => Gaps::default(),
        };
        let unexpected =
            if seen.is_empty() || (range.contains(&seen.start) && seen.end <= range.end) {
                0
            } else {
                let inside: u64 = self
                    .set
                    .ranges()
                    .iter()
                    .map(|r| {
                        r.end
                            .min(range.end)
                            .saturating_sub(r.start.max(range.start))
                    })
                    .sum();
                self.set.known().saturating_sub(inside)
            };
        Report {
            run: self.run,
            received: self.received,
            duplicates: self.duplicates,
            reordered: self.reordered,
            unjudged: self.unjudged,
            unexpected,
            first: seen.start,
            last: self.last,
            missing,
        }
    }

    /// Below the set's floor only the number received is known, not which.
    fn missing(&self, range: Range<u64>) -> Gaps {
        let mut gaps = self.set.gaps(range.clone());
        let below = self.set.floor().min(range.end).saturating_sub(range.start);
        gaps.count += below.saturating_sub(self.set.len() - self.set.known());
        gaps
    }
}

/// Runs a checker tells apart; a hostile sender cannot make it keep more (each up to 33 MiB).
pub const MAX_RUNS: usize = 16;
