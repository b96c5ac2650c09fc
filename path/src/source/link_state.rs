//! Whether a source's interface is up, down, or gone; and when to look again for one that is gone.

use std::time::{Duration, Instant};

/// How the interface was when it was last looked at.
#[derive(Debug, Clone, Copy)]
pub(super) enum LinkState {
    Up,
    Down,
    Gone(Retry),
}

/// When to look for a new interface of the same name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retry {
    at: Instant,
    pause: Duration,
}

impl LinkState {
    /// Of an interface that exists.
    pub(super) fn of(up: bool) -> Self {
        if up { Self::Up } else { Self::Down }
    }

    /// The interface is gone; the first look for another is at `at`.
    pub(super) fn gone(at: Instant) -> Self {
        Self::Gone(Retry::at(at))
    }

    /// In `vnplug list`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Gone(_) => "gone",
        }
    }
}

impl Retry {
    /// The first look is then.
    pub(super) fn at(at: Instant) -> Self {
        Self {
            at,
            pause: MIN_PAUSE,
        }
    }

    /// Whether it is time for a look.
    pub(super) fn is_due(self, now: Instant) -> bool {
        now >= self.at
    }

    /// After a look in vain: each pause is twice the one before.
    pub(super) fn later(self, now: Instant) -> LinkState {
        LinkState::Gone(Self {
            at: now + self.pause,
            pause: (self.pause * 2).min(MAX_PAUSE),
        })
    }

    /// The longest sleep before the next look.
    pub(super) fn patience(self) -> Duration {
        self.at
            .saturating_duration_since(Instant::now())
            .max(MIN_PAUSE)
    }
}

const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_quarter_of_a_second() {
        let mut now = Instant::now();
        let mut link = LinkState::gone(now);
        let mut pauses = Vec::new();
        for _ in 0..7 {
            let LinkState::Gone(retry) = link else {
                panic!("{link:?}");
            };
            assert!(retry.is_due(now));
            link = retry.later(now);
            let LinkState::Gone(next) = link else {
                panic!("{link:?}");
            };
            pauses.push((next.at - now).as_millis());
            assert!(!next.is_due(now));
            now = next.at;
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 250, 250]);
    }
}
