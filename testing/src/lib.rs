//! How tests **wait**: for as long as it takes, and saying what for.
//!
//! A test waits for a condition ([`eventually`]), for a value that has to become right ([`until`]), or it
//! does something of its own until it is done, and gives up at a [`Deadline`]. All have the same
//! [`PATIENCE`]. That something takes *long* says nothing on a machine that is busy with other tests, so
//! nobody measures with these: a test that promises a time keeps its own.

use std::fmt::Debug;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Waits until a condition holds.
///
/// ```
/// # use std::sync::atomic::{AtomicBool, Ordering};
/// # let done = AtomicBool::new(true);
/// vnplug_testing::eventually("the thread is done", || done.load(Ordering::Relaxed));
/// ```
///
/// # Panics
/// With `what`, if it does not hold within [`PATIENCE`].
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Deadline::new(what);
    let mut pause = SHORTEST_PAUSE;
    while !holds() {
        deadline.check();
        longer(&mut pause);
    }
}

/// Waits until what is looked at is right; returns the last look.
///
/// ```
/// # let mut numbers = 1..;
/// let ten = vnplug_testing::until("ten are there", || numbers.next(), |it| *it == Some(10));
/// assert_eq!(ten, Some(10));
/// ```
///
/// # Panics
/// With `what` and the last look, if it is not right within [`PATIENCE`].
#[track_caller]
pub fn until<T: Debug>(
    what: &str,
    mut look: impl FnMut() -> T,
    mut is_right: impl FnMut(&T) -> bool,
) -> T {
    let deadline = Deadline::new(what);
    let mut pause = SHORTEST_PAUSE;
    loop {
        let seen = look();
        if is_right(&seen) {
            return seen;
        }
        deadline.check_seen(&seen);
        longer(&mut pause);
    }
}

/// When a test gives up that does something until it is done.
///
/// ```
/// # let mut packets = 0;
/// let deadline = vnplug_testing::Deadline::new("a hundred packets come");
/// while packets < 100 {
///     deadline.check_seen(&packets);
/// #   packets += 1;
/// }
/// ```
#[derive(Debug)]
pub struct Deadline {
    what: String,
    end: Instant,
}

impl Deadline {
    /// In [`PATIENCE`] from now, for `what`: what holds when all is well.
    #[must_use]
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            end: Instant::now() + PATIENCE,
        }
    }

    /// Goes on if there is time left.
    ///
    /// # Panics
    /// With what was awaited, if there is none.
    #[track_caller]
    pub fn check(&self) {
        assert!(!self.is_over(), "not within {PATIENCE:?}: {}", self.what);
    }

    /// As [`check`](Self::check), and says what was seen last.
    ///
    /// # Panics
    /// With what was awaited and what was seen, if there is no time left.
    #[track_caller]
    pub fn check_seen(&self, seen: &dyn Debug) {
        let what = &self.what;
        assert!(
            !self.is_over(),
            "not within {PATIENCE:?}: {what}; the last seen: {seen:?}"
        );
    }

    /// Whether no time is left, for who has more to do than to panic.
    #[must_use]
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }
}

/// Sleeps, and the next time longer: what comes soon is seen soon, and who waits long disturbs nobody.
fn longer(pause: &mut Duration) {
    sleep(*pause);
    *pause = (*pause * 2).min(LONGEST_PAUSE);
}

/// The longest wait of a test, in a guest or not: only a broken or a starved machine waits so long.
pub const PATIENCE: Duration = Duration::from_secs(240);
/// Between the first two looks.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
/// Between two looks.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_awaited_is_returned_when_it_is_right() {
        let mut looks = 0;
        let look = || {
            looks += 1;
            looks
        };
        assert_eq!(until("three", look, |it| *it == 3), 3);
        eventually("one more", || {
            looks += 1;
            looks == 5
        });
    }

    #[test]
    #[should_panic(expected = "not within 240s: a frame comes; the last seen: 7")]
    fn who_gives_up_says_what_for_and_what_was_seen() {
        let deadline = Deadline {
            end: Instant::now(),
            ..Deadline::new("a frame comes")
        };
        deadline.check_seen(&7);
    }
}
