//! Durations counted by size: quantiles in constant memory.

use hdrhistogram::Histogram;

/// Counts durations to two digits, of any length.
#[derive(Debug, Clone)]
pub struct Spread(Histogram<u64>);

impl Spread {
    /// Nothing was counted.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts one.
    pub fn add(&mut self, ns: u64) {
        // It grows with what comes; a counter that is full would be the only error.
        let _ = self.0.record(ns);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The longest.
    pub fn max_ns(&self) -> u64 {
        self.0.max()
    }

    /// As many of a thousand were not longer than this, rounded up to two digits; 0 if none was counted.
    pub fn permille_ns(&self, permille: u64) -> u64 {
        let found = self.0.value_at_quantile(permille as f64 / 1000.0);
        found.min(self.max_ns())
    }
}

impl Default for Spread {
    fn default() -> Self {
        // From 1 ns to an hour at first, and it grows.
        let mut counts = Histogram::new_with_bounds(1, 3_600_000_000_000, 2).expect("true bounds");
        counts.auto(true);
        Self(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_true_to_two_digits() {
        let mut spread = Spread::new();
        assert_eq!((spread.permille_ns(990), spread.max_ns()), (0, 0));
        for ns in 1..=1000 {
            spread.add(ns * 1000);
        }
        for (permille, exact) in [(500, 500_000), (990, 990_000), (1000, 1_000_000)] {
            let found = spread.permille_ns(permille);
            assert!(
                (exact..=exact + exact / 100).contains(&found),
                "{permille}: {found}"
            );
        }
        assert_eq!(spread.count(), 1000);
        assert!((1_000_000..1_010_000).contains(&spread.max_ns()));
    }

    #[test]
    fn the_longest_duration_counts() {
        let mut spread = Spread::new();
        spread.add(u64::MAX);
        spread.add(0);
        assert_eq!((spread.count(), spread.max_ns()), (2, u64::MAX));
        assert_eq!(spread.permille_ns(500), 0);
    }
}
