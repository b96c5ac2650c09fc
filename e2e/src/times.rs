//! How long something took, each time that a test did it.

use std::time::Duration;

/// Each time.
#[derive(Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Once more.
    pub fn push(&mut self, took: Duration) {
        self.0.push(took);
    }

    /// All of them, the shortest first.
    pub fn all(&mut self) -> &[Duration] {
        self.0.sort_unstable();
        &self.0
    }

    /// Prints all of them. Half of them have to be within `limit`: the others may have had no processor.
    ///
    /// # Panics
    /// If they are not.
    pub fn are_within(&mut self, limit: Duration, what: &str) {
        eprintln!("{what} took {:?}", self.all());
        let median = self.at(50);
        assert!(median < limit, "{what}: {median:?} in the median");
    }

    /// The time that this number of a hundred took at most.
    ///
    /// # Panics
    /// If it was never done.
    pub fn at(&mut self, percent: usize) -> Duration {
        let all = self.all();
        all[(all.len() - 1) * percent / 100]
    }
}
