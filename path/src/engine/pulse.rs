//! Whether a queue's thread still turns, seen from outside without asking it.
//!
//! The thread counts its turns in a word that others read: one store each turn, no system call. While
//! it sleeps on its queue the number is odd. [`watch`](vnplugd::watch) looks at all pulses now and then.
//! A thread that is in the middle of a turn, or has a command waiting, and has not moved for a second is
//! *stalled*: requests that need it are refused, and nobody waits for it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What others see of a queue's thread.
#[derive(Debug)]
pub struct Pulse {
    turns: Turns,
    /// `turns` when somebody waited for an answer in vain, plus one; 0 = never.
    in_vain: AtomicU64,
    /// Stalled; the details are under the lock.
    stalled: AtomicBool,
    shown: Mutex<Shown>,
    /// The source's name, and the queue.
    name: String,
}

/// Written by the thread alone.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Turns(AtomicU64);

#[derive(Debug)]
struct Shown {
    state: &'static str,
    stalled_since: Option<Instant>,
}

impl Pulse {
    /// Of a thread that has not begun, called `NAME@QUEUE`.
    pub fn new(name: &str, state: &'static str) -> Self {
        let shown = Shown {
            state,
            stalled_since: None,
        };
        Self {
            turns: Turns::default(),
            in_vain: AtomicU64::new(0),
            stalled: AtomicBool::new(false),
            shown: Mutex::new(shown),
            name: name.to_owned(),
        }
    }

    /// Which thread it is: `NAME@QUEUE`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The thread begins its `turn`th turn.
    #[inline]
    pub fn beat(&self, turn: u64) {
        // Relaxed, as all of this word: nothing is read by its order.
        self.turns.0.store(turn << 1, Ordering::Relaxed);
    }

    /// The thread goes to sleep in its `turn`th turn.
    #[inline]
    pub fn sleep(&self, turn: u64) {
        self.turns.0.store(turn << 1 | 1, Ordering::Relaxed);
    }

    /// A number that is another one when the thread has moved; odd while it sleeps.
    pub fn turns(&self) -> u64 {
        self.turns.0.load(Ordering::Relaxed)
    }

    /// The thread shows how its queue is, in a word.
    #[cold]
    pub(super) fn show(&self, state: &'static str) {
        self.lock().state = state;
    }

    /// How the queue is, in a word; `stalled` if its thread does not turn.
    pub fn state(&self) -> &'static str {
        match self.stalled() {
            Some(_) => "stalled",
            None => self.lock().state,
        }
    }

    /// For how long the thread has been known to be stalled, if it is.
    pub fn stalled(&self) -> Option<Duration> {
        // Relaxed: the lock orders the rest.
        if !self.stalled.load(Ordering::Relaxed) {
            return None;
        }
        self.lock().stalled_since.map(|since| since.elapsed())
    }

    /// Notes since when the thread has been stalled; `None`: it goes on.
    pub fn note_stall(&self, since: Option<Instant>) {
        self.lock().stalled_since = since;
        self.stalled.store(since.is_some(), Ordering::Relaxed);
    }

    /// What to tell somebody who needs a thread that is stalled.
    pub fn complaint(&self, stalled: Duration) -> String {
        let (source, queue) = self.name.rsplit_once('@').unwrap_or((&self.name, "0"));
        let seconds = stalled.as_secs().max(1);
        format!("source {source:?}'s queue {queue} has not answered for {seconds} s")
    }

    /// Somebody waited for an answer in vain.
    pub fn waited_in_vain(&self) {
        self.in_vain.store(self.turns() + 1, Ordering::Relaxed);
    }

    /// Whether an answer may come if it is waited for: the thread has moved since that was in vain.
    pub fn is_worth_waiting(&self) -> bool {
        self.in_vain.load(Ordering::Relaxed) != self.turns() + 1
    }

    /// What it guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
