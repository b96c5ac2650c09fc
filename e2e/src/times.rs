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

    /// So many of a hundred took at most this.
    ///
    /// # Panics
    /// If it was never done.
    pub fn at(&mut self, percent: usize) -> Duration {
        self.0.sort_unstable();
        self.0[(self.0.len() - 1) * percent / 100]
    }
}
