//! A token bucket, for frames or bytes: a rate in each second, and how much may go at once.

/// What may go.
#[derive(Debug, Clone)]
pub struct Bucket {
    per_s: u64,
    /// Millionths that it holds at most.
    most: i64,
    /// Millionths that may go; less than 0: what went too early.
    left: i64,
    filled_us: u64,
}

impl Bucket {
    /// A full one, of `per_s` in a second and at most `at_once`.
    pub fn new(per_s: u64, at_once: u64, now_us: u64) -> Self {
        let most = at_once.min(MOST) as i64 * MILLION;
        Self {
            per_s: per_s.min(MOST),
            most,
            left: most,
            filled_us: now_us,
        }
    }

    /// Whether one more may go, which then has gone.
    #[inline]
    pub fn take(&mut self, now_us: u64) -> bool {
        self.fill(now_us);
        let may = self.left >= MILLION;
        if may {
            self.left -= MILLION;
        }
        may
    }

    /// How many may go now.
    #[inline]
    pub fn room(&mut self, now_us: u64) -> u64 {
        self.fill(now_us);
        (self.left.max(0) / MILLION) as u64
    }

    /// `count` went. They may be more than there was room for: then nothing may go until that is made up for.
    #[inline]
    pub fn spend(&mut self, count: u64) {
        self.left = self
            .left
            .saturating_sub((count.min(MOST) as i64).saturating_mul(MILLION));
    }

    /// When there is room for this many, if nothing goes until then; not before `now_us`.
    pub fn due_us(&self, count: u64, now_us: u64) -> u64 {
        let wanted = (count.min(MOST) as i64 * MILLION).min(self.most);
        let missing = wanted.saturating_sub(self.left).max(0) as u64;
        now_us.max(self.filled_us + missing.div_ceil(self.per_s.max(1)))
    }

    #[inline]
    fn fill(&mut self, now_us: u64) {
        // More than some seconds fill it anyway.
        let passed_us = now_us.saturating_sub(self.filled_us).min(LONGEST_US);
        self.filled_us = self.filled_us.max(now_us);
        let more = (passed_us * self.per_s).min(i64::MAX as u64) as i64;
        self.left = self.left.saturating_add(more).min(self.most);
    }
}

const MILLION: i64 = 1_000_000;
/// A terabit of bytes.
const MOST: u64 = 125_000_000_000;
const LONGEST_US: u64 = 10_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_a_second_go_and_not_more_after_a_pause() {
        let mut bucket = Bucket::new(1000, 100, 0);
        let mut went = 0;
        for us in 0..1_000_000 {
            went += u32::from(bucket.take(us));
        }
        assert!((1000..=1100).contains(&went), "{went}");
        let went = (0..1000).filter(|_| bucket.take(100_000_000)).count();
        assert_eq!(went, 100);
    }

    #[test]
    fn what_goes_too_early_is_made_up_for() {
        let mut bucket = Bucket::new(1_000_000, 1000, 0);
        assert_eq!(bucket.room(0), 1000);
        bucket.spend(1500);
        assert_eq!((bucket.room(0), bucket.room(500)), (0, 0));
        assert_eq!(bucket.due_us(1, 500), 501);
        assert_eq!(bucket.room(600), 100);
        assert_eq!(bucket.due_us(10_000, 600), 600 + 900);
    }

    #[test]
    fn large_numbers_do_not_wrap() {
        let mut bucket = Bucket::new(u64::MAX, u64::MAX, 0);
        bucket.spend(u64::MAX);
        bucket.spend(u64::MAX);
        assert!(bucket.due_us(u64::MAX, u64::MAX / 2) >= u64::MAX / 2);
        assert!(bucket.room(u64::MAX / 2) > 0);
    }
}
