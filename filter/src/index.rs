//! Many programs, judged together: on each frame only those that may accept it.
//!
//! ```text
//! frame ── Ethertype ──► fields that programs compare ──► a table each ──► candidates ──► run
//! ```
//!
//! A program's [`Key`]s put it into one table per field. A frame's Ethertype says which fields to
//! look up, and the frame's values there say which programs are candidates. A candidate whose key
//! is sure accepts; the others are run. So a decision is always the program's own: the keys only
//! avoid running programs that would reject. Equal programs are one; a program without keys is run
//! on every frame.
//!
//! All frames of a batch are looked up field by field, and candidates are run program by program,
//! so that fields, tables and programs are in the processor's caches when they are needed again.
//!
//! Cost: one look per frame and field of its Ethertype, however many programs there are; then the
//! candidates. Adding and removing costs a hash of the program and one entry per key; a full table
//! is rebuilt, twice as large.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use smallvec::SmallVec;

use super::analyse::Analysis;
#[cfg(doc)]
use super::analyse::Key;
use super::frames::FrameSet;
use super::lookup::Lookup;
use super::program::Program;
use vnplug_frame::{Frame, MAX_BATCH};
use vnplug_os::prefetch::prefetch;

/// A program in an [`Index`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JudgeId(u32);

/// Frames, and how many of them were sent by the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// All.
    pub frames: u64,
    /// Those with `flags::OUTBOUND`.
    pub outbound: u64,
}

/// How much is in an index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexSize {
    /// Different programs that are found by keys.
    pub keyed: usize,
    /// Different programs that are run on every frame.
    pub scanned: usize,
    /// Fields that are asked.
    pub fields: usize,
}

/// Programs and the ports that follow their verdicts.
#[derive(Debug, Default)]
pub struct Index {
    judges: Vec<Judge>,
    verdicts: Vec<Verdict>,
    free: Vec<u32>,
    by_program: HashMap<Arc<Program>, u32>,
    lookup: Lookup,
    /// Programs to be run on every frame.
    always: Vec<u32>,
    /// Programs with a candidate in this batch; after judging, those that accepted a frame.
    touched: Vec<u32>,
    /// Programs that panicked.
    broken: Vec<JudgeId>,
}

/// One program.
#[derive(Debug)]
#[repr(align(64))]
struct Judge {
    /// `None`: the place is free.
    program: Option<Arc<Program>>,
    /// How often it was added.
    users: u32,
    /// Its place in `always`, or [`KEYED`].
    always: u32,
    /// What it accepted since it was added.
    totals: Totals,
    /// Up to four lie here, so that they come with the rest.
    followers: SmallVec<[u32; 4]>,
}

const KEYED: u32 = u32::MAX;

/// Of one program on one batch.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Verdict {
    maybe: FrameSet,
    yes: FrameSet,
}

/// How far the judging of a batch has come.
#[derive(Default)]
struct Judged {
    /// Of the programs that have a candidate.
    nth: usize,
    /// How many of them accepted a frame.
    accepting: usize,
    /// What any of them accepted.
    all: FrameSet,
}

impl Index {
    /// Adds a program, or one more user of an equal one.
    pub fn add(&mut self, program: &Arc<Program>) -> JudgeId {
        if let Some(&id) = self.by_program.get(program) {
            self.judges[id as usize].users += 1;
            return JudgeId(id);
        }
        let id = self.free.pop().unwrap_or(self.judges.len() as u32);
        let always = match program.analysis() {
            Analysis::If(keys) if self.lookup.insert(keys, id) => KEYED,
            _ => {
                self.always.push(id);
                self.always.len() as u32 - 1
            }
        };
        let judge = Judge {
            program: Some(Arc::clone(program)),
            users: 1,
            always,
            totals: Totals::default(),
            followers: SmallVec::new(),
        };
        match self.judges.get_mut(id as usize) {
            Some(place) => *place = judge,
            None => {
                self.judges.push(judge);
                self.verdicts.push(Verdict::default());
            }
        }
        self.by_program.insert(Arc::clone(program), id);
        JudgeId(id)
    }

    /// Removes one user of a program; with the last one the program goes.
    pub fn remove(&mut self, id: JudgeId) {
        let judge = &mut self.judges[id.0 as usize];
        judge.users -= 1;
        if judge.users > 0 {
            return;
        }
        judge.followers = SmallVec::new();
        let always = judge.always;
        let Some(program) = judge.program.take() else {
            return;
        };
        self.by_program.remove(&program);
        match program.analysis() {
            Analysis::If(keys) if always == KEYED => self.lookup.remove(keys, id.0),
            _ => {
                self.always.swap_remove(always as usize);
                if let Some(&moved) = self.always.get(always as usize) {
                    self.judges[moved as usize].always = always;
                }
            }
        }
        self.free.push(id.0);
    }

    /// Whether a program is found by its keys and not run on every frame.
    pub fn is_keyed(&self, id: JudgeId) -> bool {
        self.judges[id.0 as usize].always == KEYED
    }

    /// How much is in it.
    pub fn size(&self) -> IndexSize {
        IndexSize {
            keyed: self.by_program.len() - self.always.len(),
            scanned: self.always.len(),
            fields: self.lookup.fields(),
        }
    }

    /// Notes that a port wants what a program accepts.
    pub fn follow(&mut self, id: JudgeId, follower: u32) {
        self.judges[id.0 as usize].followers.push(follower);
    }

    /// Undoes a [`follow`](Self::follow).
    pub fn unfollow(&mut self, id: JudgeId, follower: u32) {
        let followers = &mut self.judges[id.0 as usize].followers;
        if let Some(at) = followers.iter().position(|it| *it == follower) {
            followers.swap_remove(at);
        }
    }

    /// Judges a batch of at most [`MAX_BATCH`] frames, of which the host sent `outbound`; returns
    /// those that any program accepted.
    ///
    /// The verdicts hold until [`forget`](Self::forget), which comes before the next batch.
    pub fn judge(&mut self, frames: &[Frame<'_>], outbound: &FrameSet) -> FrameSet {
        let frames = &frames[..frames.len().min(MAX_BATCH)];
        if self.by_program.is_empty() {
            return FrameSet::default();
        }
        let (verdicts, touched) = (&mut self.verdicts, &mut self.touched);
        self.lookup.ask(frames, |candidate, place| {
            let verdict = &mut verdicts[candidate.judge() as usize];
            if verdict.maybe.is_empty() {
                touched.push(candidate.judge());
            }
            verdict.maybe.insert(place);
            if candidate.is_sure() {
                verdict.yes.insert(place);
            }
        });
        for &id in &self.always {
            self.verdicts[id as usize].maybe = FrameSet::first(frames.len());
        }
        self.touched.extend(&self.always);
        let mut judged = Judged::default();
        // A panic would be a bug of ours that one reader's program triggers: it costs the followers
        // of the program their ports, and nobody else anything (R10).
        while catch_unwind(AssertUnwindSafe(|| self.run(frames, outbound, &mut judged))).is_err() {
            let id = self.touched[judged.nth];
            self.verdicts[id as usize] = Verdict::default();
            self.broken.push(JudgeId(id));
            judged.nth += 1;
        }
        self.touched.truncate(judged.accepting);
        judged.all
    }

    /// Runs the programs that have a candidate, from where it stopped.
    #[inline]
    fn run(&mut self, frames: &[Frame<'_>], outbound: &FrameSet, judged: &mut Judged) {
        while judged.nth < self.touched.len() {
            self.fetch_ahead(judged.nth);
            let id = self.touched[judged.nth];
            let (verdict, judge) = (
                &mut self.verdicts[id as usize],
                &mut self.judges[id as usize],
            );
            if let Some(program) = &judge.program {
                for place in verdict.maybe.without(&verdict.yes).iter() {
                    let frame = &frames[place];
                    if program.run(frame.bytes, frame.wire_len) != 0 {
                        verdict.yes.insert(place);
                    }
                }
            }
            verdict.maybe = FrameSet::default();
            if !verdict.yes.is_empty() {
                judge.totals.frames += verdict.yes.len();
                judge.totals.outbound += verdict.yes.and(outbound).len();
                judged.all = judged.all.or(&verdict.yes);
                self.touched[judged.accepting] = id;
                judged.accepting += 1;
            }
            judged.nth += 1;
        }
    }

    /// A program that panicked: its followers are not served any more.
    #[inline]
    pub fn take_broken(&mut self) -> Option<JudgeId> {
        self.broken.pop()
    }

    /// Fetches what judging by the programs that come next will need, one step of the way to each.
    ///
    /// NB: with 10,000 programs hardly anything of them is in a cache, and each step waits for the one
    /// before.
    #[inline(always)]
    fn fetch_ahead(&self, nth: usize) {
        let ahead = |distance| {
            let id = *self.touched.get(nth + distance)? as usize;
            let verdict = &self.verdicts[id];
            let judge = &self.judges[id];
            (verdict.maybe != verdict.yes).then_some(judge.program.as_deref()?)
        };
        if let Some(&id) = self.touched.get(nth + 16) {
            prefetch(&self.judges[id as usize]);
        }
        if let Some(program) = ahead(12) {
            prefetch(program);
        }
        if let Some(program) = ahead(8) {
            program.prefetch(false);
        }
        if let Some(program) = ahead(4) {
            program.prefetch(true);
        }
    }

    /// Programs that accepted a frame of the batch: as many as this, by numbers from 0.
    pub fn touched(&self) -> usize {
        self.touched.len()
    }

    /// The first follower of a program that accepted a frame, to fetch what it needs.
    #[inline]
    pub fn first_follower(&self, nth: usize) -> Option<u32> {
        let id = *self.touched.get(nth)? as usize;
        self.judges[id].followers.first().copied()
    }

    /// The followers of a program that accepted a frame, and what it accepted.
    #[inline]
    pub fn wanted(&self, nth: usize) -> (&[u32], FrameSet) {
        let id = self.touched[nth] as usize;
        (&self.judges[id].followers, self.verdicts[id].yes)
    }

    /// What a program accepted of the batch.
    #[inline]
    pub fn accepted(&self, id: JudgeId) -> FrameSet {
        self.verdicts[id.0 as usize].yes
    }

    /// What a program accepted since it was added.
    pub fn totals(&self, id: JudgeId) -> Totals {
        self.judges[id.0 as usize].totals
    }

    /// Forgets the verdicts on a batch.
    pub fn forget(&mut self) {
        for id in self.touched.drain(..) {
            self.verdicts[id as usize] = Verdict::default();
        }
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
