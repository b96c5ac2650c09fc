//! A bound on how fast one connection is served.

use std::time::{Duration, Instant};

/// A token bucket: `rate` requests per second, `burst` at once.
#[derive(Debug)]
pub(crate) struct Bucket {
    rate: f64,
    burst: f64,
    tokens: f64,
    last: Instant,
}

impl Bucket {
    /// A full bucket.
    pub(crate) fn new(rate: f64, burst: f64, now: Instant) -> Self {
        Self {
            rate,
            burst,
            tokens: burst,
            last: now,
        }
    }

    /// How long until there is a token; `None`: there is one now.
    pub(crate) fn wait(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.last).as_secs_f64();
        self.last = now;
        self.tokens = (self.tokens + passed * self.rate).min(self.burst);
        (self.tokens < 1.0).then(|| Duration::from_secs_f64((1.0 - self.tokens) / self.rate))
    }

    /// Takes tokens, into debt if need be: 1 for a request, more for one that was costly.
    pub(crate) fn charge(&mut self, tokens: f64) {
        self.tokens -= tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10.0, 3.0, start);
        for _ in 0..3 {
            assert_eq!(bucket.wait(start), None);
            bucket.charge(1.0);
        }
        let wait = bucket.wait(start).unwrap();
        assert!(wait <= Duration::from_millis(100));
        let later = start + wait + Duration::from_millis(1);
        assert_eq!(bucket.wait(later), None);
        bucket.charge(11.0);
        assert!(bucket.wait(start + Duration::from_millis(500)).is_some());
        assert_eq!(bucket.wait(start + Duration::from_secs(5)), None);
    }
}
