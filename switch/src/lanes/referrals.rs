//! For how long a port that was referred is not lent: the longer, the sooner it comes back.

use std::collections::HashMap;

use crate::forward::Number;

/// Ports that were referred.
#[derive(Debug, Default)]
pub(super) struct Referrals {
    all: HashMap<Number, Referral>,
    /// Those that are not to be lent yet.
    kept: Vec<Number>,
}

#[derive(Debug, Clone, Copy)]
struct Referral {
    /// For how long it is kept, or was.
    kept_us: u64,
    /// It is not lent before.
    until_us: u64,
    /// When it was lent again.
    lent_us: u64,
}

impl Referrals {
    /// Another one has this number.
    pub(super) fn forget(&mut self, number: Number) {
        self.all.remove(&number);
        self.kept.retain(|kept| *kept != number);
    }

    /// A port was referred; `is_final`: it is never lent again.
    pub(super) fn refer(&mut self, number: Number, now_us: u64, is_final: bool) {
        let kept_us = match self.all.get(&number) {
            // It was lent, and soon came back.
            Some(it) if now_us < it.lent_us.saturating_add(2 * it.kept_us) => {
                (it.kept_us * 2).min(MOST_US)
            }
            _ => LEAST_US,
        };
        let is_final = is_final || self.all.get(&number).is_some_and(|it| it.until_us == NEVER);
        let until_us = match is_final {
            true => NEVER,
            false => now_us + kept_us,
        };
        let referral = Referral {
            kept_us,
            until_us,
            lent_us: until_us,
        };
        self.all.insert(number, referral);
        if !self.kept.contains(&number) {
            self.kept.push(number);
        }
    }

    /// It is lent again.
    pub(super) fn lent(&mut self, number: Number, now_us: u64) {
        if let Some(referral) = self.all.get_mut(&number) {
            referral.lent_us = now_us;
        }
    }

    /// Whether it is not to be lent yet.
    pub(super) fn keeps(&self, number: Number) -> bool {
        self.kept.contains(&number)
    }

    /// Whether some are.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// The ports that were kept for long enough, each once.
    pub(super) fn rested(&mut self, now_us: u64) -> Vec<Number> {
        let mut rested = Vec::new();
        let all = &self.all;
        self.kept.retain(|number| {
            let is_kept = all.get(number).is_some_and(|it| it.until_us > now_us);
            if !is_kept {
                rested.push(*number);
            }
            is_kept
        });
        rested
    }

    /// When the next one is.
    pub(super) fn next_us(&self) -> Option<u64> {
        let kept = self.kept.iter().filter_map(|number| self.all.get(number));
        kept.map(|it| it.until_us).filter(|it| *it != NEVER).min()
    }
}

/// How long a port that was referred is not lent, at first and at most.
const LEAST_US: u64 = 10_000;
const MOST_US: u64 = 200_000;
const NEVER: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_back_at_once_is_kept_for_longer_and_who_stays_away_is_not() {
        let (mut referrals, mut now, mut waits) = (Referrals::default(), 5_000, Vec::new());
        for _ in 0..7 {
            referrals.refer(3, now, false);
            assert!(referrals.keeps(3) && referrals.rested(now).is_empty());
            let next = referrals.next_us().unwrap();
            waits.push(next - now);
            now = next;
            assert_eq!(referrals.rested(now), [3]);
            assert!(referrals.is_empty() && referrals.rested(now).is_empty());
            referrals.lent(3, now);
            now += 100;
        }
        assert_eq!(
            waits,
            [10_000, 20_000, 40_000, 80_000, 160_000, 200_000, 200_000]
        );
        now += 400_000;
        referrals.refer(3, now, false);
        assert_eq!(referrals.next_us(), Some(now + 10_000));
    }

    #[test]
    fn who_made_a_lane_fail_is_not_lent_again_and_who_has_its_number_next_is() {
        let mut referrals = Referrals::default();
        referrals.refer(3, 0, true);
        referrals.refer(3, 1, false);
        assert!(referrals.rested(u64::MAX - 1).is_empty() && referrals.next_us().is_none());
        referrals.forget(3);
        assert!(!referrals.keeps(3));
        referrals.refer(3, 7, false);
        assert_eq!(referrals.next_us(), Some(10_007));
    }
}
