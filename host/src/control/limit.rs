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

    /// Takes `cost` tokens, or says how long until they are there.
    pub(crate) fn take(&mut self, cost: f64, now: Instant) -> Result<(), Duration> {
        let passed = now.saturating_duration_since(self.last).as_secs_f64();
        self.last = now;
        self.tokens = (self.tokens + passed * self.rate).min(self.burst);
        if self.tokens >= cost {
            self.tokens -= cost;
            return Ok(());
        }
        Err(Duration::from_secs_f64((cost - self.tokens) / self.rate))
    }

    /// Takes several tokens at once, into debt if need be: a request that was costly.
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
        assert!((0..3).all(|_| bucket.take(1.0, start).is_ok()));
        let wait = bucket.take(1.0, start).unwrap_err();
        assert!(wait <= Duration::from_millis(100));
        assert!(
            bucket
                .take(1.0, start + wait + Duration::from_millis(1))
                .is_ok()
        );
        bucket.charge(10.0);
        assert!(
            bucket
                .take(1.0, start + Duration::from_millis(500))
                .is_err()
        );
        assert!(bucket.take(1.0, start + Duration::from_secs(5)).is_ok());
    }
}
