//! Chunks on their way to the writer of a directory. They can be taken back from a disk that takes
//! nothing.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::chunk::Chunk;
use super::ledger::Ledger;

/// Between the recorder and one writer.
#[derive(Debug, Default)]
pub(super) struct Queue {
    line: Mutex<Line>,
    came: Condvar,
}

#[derive(Debug, Default)]
struct Line {
    chunks: VecDeque<Chunk>,
    /// Chunks that the writer has.
    held: usize,
    /// Since when the writer has been at work.
    busy: Option<Instant>,
    /// The disk failed, and takes nothing before this moment.
    pauses_until: Option<Instant>,
    /// The segment ends: none come for a while.
    ends: bool,
    /// No more chunks come.
    closed: bool,
    /// The writer is gone.
    gone: bool,
}

impl Queue {
    /// Puts a chunk at the end; gives it back if the writer is gone.
    pub(super) fn push(&self, chunk: Chunk) -> Result<(), Box<Chunk>> {
        let mut line = self.line();
        if line.gone {
            return Err(Box::new(chunk));
        }
        // Its segment begins where the one before ends.
        line.ends &= !chunk.begins_segment;
        line.chunks.push_back(chunk);
        self.came.notify_all();
        Ok(())
    }

    /// Puts chunks in at their places.
    pub(super) fn insert(&self, chunks: Vec<Chunk>) {
        let mut line = self.line();
        line.chunks.extend(chunks);
        let all = line.chunks.make_contiguous();
        all.sort_unstable_by_key(|chunk| chunk.serial);
        self.came.notify_all();
    }

    /// Takes everything back that the writer has not begun with.
    pub(super) fn take_back(&self) -> Vec<Chunk> {
        self.line().chunks.drain(..).collect()
    }

    /// Chunks that are here or with the writer.
    pub(super) fn load(&self) -> usize {
        let line = self.line();
        line.chunks.len() + line.held
    }

    /// Whether the disk takes nothing at the moment: it failed, or does not come back.
    pub(super) fn is_stuck(&self, now: Instant) -> bool {
        let line = self.line();
        let stands = |since: Instant| now.saturating_duration_since(since) >= STALL;
        line.gone || line.pauses_until.is_some_and(|at| now < at) || line.busy.is_some_and(stands)
    }

    /// The segment ends when what is here is written: the next chunk comes much later.
    pub(super) fn end_segment(&self) {
        self.line().ends = true;
        self.came.notify_all();
    }

    /// No more chunks come.
    pub(super) fn close(&self) {
        self.line().closed = true;
        self.came.notify_all();
    }

    /// For the writer: waits for chunks, up to `most`, until `due`. It has them until
    /// [`rest`](Self::rest).
    pub(super) fn take(&self, most: usize, due: Instant) -> Taken {
        let mut line = self.line();
        loop {
            let now = Instant::now();
            let pauses = line.pauses_until.is_some_and(|at| now < at);
            let ready = !line.chunks.is_empty() && !pauses && most > 0;
            let ends = line.ends && line.chunks.is_empty();
            if ready || ends || now >= due || line.closed {
                break;
            }
            let until = line.pauses_until.filter(|&at| at > now);
            let wait = until.map_or(due, |at| at.min(due)) - now;
            let woken = self.came.wait_timeout(line, wait);
            line = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = Instant::now();
        let pauses = line.pauses_until.is_some_and(|at| now < at);
        let count = if pauses {
            0
        } else {
            most.min(line.chunks.len())
        };
        let chunks: Vec<Chunk> = line.chunks.drain(..count).collect();
        line.held += chunks.len();
        line.busy = Some(now);
        let empty = line.chunks.is_empty();
        let ends = empty && std::mem::take(&mut line.ends);
        Taken {
            ends,
            closed: line.closed,
            empty,
            chunks,
        }
    }

    /// For the writer: it has this many chunks left, and gives these back, since the disk takes nothing
    /// before `pauses_until`.
    pub(super) fn rest(&self, held: usize, back: Vec<Chunk>, pauses_until: Option<Instant>) {
        let mut line = self.line();
        for chunk in back.into_iter().rev() {
            line.chunks.push_front(chunk);
        }
        (line.held, line.busy, line.pauses_until) = (held, None, pauses_until);
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a writer gets.
#[derive(Debug)]
pub(super) struct Taken {
    /// To be written, in this order.
    pub(super) chunks: Vec<Chunk>,
    /// The segment ends after them.
    pub(super) ends: bool,
    /// No more come.
    pub(super) closed: bool,
    /// None are left here.
    pub(super) empty: bool,
}

/// Says that the writer of a directory is gone when its thread ends, in whatever way.
#[derive(Debug)]
pub(super) struct Gone<'a> {
    pub(super) queue: &'a Queue,
    pub(super) ledger: &'a Ledger,
    pub(super) lane: usize,
}

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.queue.line().gone = true;
        if std::thread::panicking() {
            self.ledger.paused(self.lane, PANICKED);
            log::error!("{PANICKED}: nothing more is written to its directory");
        }
    }
}

/// Why a directory gets nothing more.
pub(super) const PANICKED: &str = "its writer panicked";
/// How long a writer may be at work until its directory counts as one that stands still.
const STALL: Duration = Duration::from_secs(1);
