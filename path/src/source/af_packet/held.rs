//! What came while no daemon was there is held until its readers may be back, and then handed out as fast as they read.

use std::time::{Duration, Instant};

use crate::source::early::Loaded;

/// What another process received, until its readers may be back or it becomes too much.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// From when on it is asked for.
    until: Option<Instant>,
    /// What the kernel is to pass afterwards.
    pub(super) filter: Option<Box<Loaded>>,
}

impl Held {
    /// Whether it is to be handed out now.
    pub(super) fn is_over(&mut self, is_half_full: impl FnOnce() -> bool) -> bool {
        self.until.get_or_insert_with(|| Instant::now() + HOLD);
        let left = self.left();
        // What is full already waits for a reader, too: it would be lost without one.
        left.is_zero() || HOLD - left >= LEAST_HOLD && is_half_full()
    }

    /// How long to sleep before it is asked for again.
    pub(super) fn pause(&self) -> Duration {
        self.left().clamp(MIN_LOOK, LOOK)
    }

    fn left(&self) -> Duration {
        let now = Instant::now();
        self.until
            .map_or(HOLD, |until| until.saturating_duration_since(now))
    }
}

/// What was held, while it is handed out: some at a time, when every reader has room. All at once would be more than the rings
/// of its readers hold.
#[derive(Debug)]
pub(super) struct Behind {
    /// A reader that does not read holds the others up no longer.
    until: Instant,
    pub(super) is_crowded: bool,
}

impl Behind {
    pub(super) fn now() -> Self {
        Self {
            until: Instant::now() + PATIENCE,
            is_crowded: false,
        }
    }

    /// Whether it is to be handed out without regard to readers: it waited for long enough, or it becomes too much.
    pub(super) fn is_over(&self, is_half_full: impl FnOnce() -> bool) -> bool {
        Instant::now() >= self.until || is_half_full()
    }

    /// Whether some reader is waited for, and how long to sleep before it is looked at again.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.is_crowded.then_some(MIN_LOOK)
    }
}

/// Frames that are handed out at a time: little beside half of a ring.
pub(super) const STEP: usize = 32;
/// Readers come back within half a second (`guest/src/port/phase.rs`).
const HOLD: Duration = Duration::from_secs(1);
/// Those of a daemon that was there a moment ago come sooner.
const LEAST_HOLD: Duration = Duration::from_millis(200);
/// For how long what is handed out waits for its readers.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked whether the rings are half full meanwhile.
const LOOK: Duration = Duration::from_millis(10);
const MIN_LOOK: Duration = Duration::from_millis(1);
