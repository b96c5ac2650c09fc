//! How tests **wait**: for as long as it takes, and saying what for.
//!
//! A test waits for a condition ([`eventually`]), for a value that has to become right ([`until`]), or it
//! does something of its own until it is done, and gives up at a [`Deadline`]. All have the same
//! [`PATIENCE`]. That something takes *long* says nothing on a machine that is busy with other tests, so
//! nobody measures with these: a test that promises a time keeps its own.
//!
//! And where they write: a [`TestDir`]. Randomized tests throw [`Dice`]. What a command line has, some page
//! says: [`Pages`]. What is to panic does so quietly: [`panic_of`].

mod dice;
mod pages;
mod panic;

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub use dice::Dice;
pub use pages::Pages;
pub use panic::panic_of;

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

/// A directory of its own for one test, removed at the end with all that is in it.
///
/// ```
/// let dir = vnplug_testing::TestDir::new("doc");
/// std::fs::write(dir.path("file"), "text")?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct TestDir(pub PathBuf);

impl TestDir {
    /// An empty one. Its name says `what` for and who made it, and has no links in it.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    #[track_caller]
    #[expect(clippy::expect_used, reason = "a test fails by panicking")]
    pub fn new(what: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vnplug-{what}-{}-{number}", std::process::id());
        let base = std::env::temp_dir().canonicalize();
        let path = base
            .expect("there is a directory for temporary files")
            .join(name);
        // What a killed process left that had the same number: only one with that number lives.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).expect("temporary files can be made");
        Self(path)
    }

    /// The path of a file in it.
    #[must_use]
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
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
    fn a_directory_is_empty_whatever_a_killed_process_left_and_goes_with_all_in_it() {
        let first = TestDir::new("dir");
        let name = first.0.to_str().unwrap();
        let (base, number) = name.rsplit_once('-').unwrap();
        let next = number.parse::<u32>().unwrap() + 1;
        let left = PathBuf::from(format!("{base}-{next}"));
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("old"), "").unwrap();
        let second = TestDir::new("dir");
        assert_eq!(second.0, left);
        assert_eq!(std::fs::read_dir(&left).unwrap().count(), 0);
        std::fs::write(second.path("new"), "").unwrap();
        drop(second);
        assert!(first.0.exists() && !left.exists());
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
