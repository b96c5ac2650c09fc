//! What a daemon did lately: its answers one after the other, as rates and as curves. `vnplug top` and the page draw it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use super::{Growth, STAGES, lost, value};
use crate::control::Counted;

/// Answers that a curve shows.
pub const HISTORY: usize = 60;

/// The kind and name of a thing.
pub type Key = (String, String);

/// Rates of one stage or thing over time.
#[derive(Debug, Clone, Default)]
pub struct Curve(VecDeque<f64>);

impl Curve {
    /// Adds the latest rate, and forgets those before the last [`HISTORY`].
    pub fn push(&mut self, rate: f64) {
        if self.0.len() == HISTORY {
            self.0.pop_front();
        }
        self.0.push_back(rate);
    }

    /// The latest rate; 0 if there is none.
    #[must_use]
    pub fn last(&self) -> f64 {
        self.0.back().copied().unwrap_or(0.0)
    }

    /// The last ones, at most this many, oldest first.
    pub fn rates(&self, most: usize) -> impl Iterator<Item = f64> + Clone + '_ {
        let skipped = self.0.len().saturating_sub(most);
        self.0.iter().skip(skipped).copied()
    }
}

/// A daemon's answers: the last one, and what became of those before.
#[derive(Debug, Default)]
pub struct Course {
    now: Vec<Counted>,
    asked: Option<Instant>,
    growth: Growth,
    /// It did not answer since the last answer.
    was_away: bool,
    restarts: usize,
    curves: BTreeMap<Key, Curve>,
    totals: [Curve; 3],
    stages: [Curve; STAGES.len()],
}

impl Course {
    /// Takes an answer to what was asked at this time.
    pub fn heard(&mut self, at: Instant, now: Vec<Counted>) {
        let before = std::mem::replace(&mut self.now, now);
        let is_new = std::mem::take(&mut self.was_away) && fell(&before, &self.now);
        self.restarts += usize::from(is_new);
        let asked = self.asked.replace(at);
        self.growth = match asked {
            Some(asked) if !is_new => Growth::since(before, at.saturating_duration_since(asked)),
            _ => Growth::default(),
        };
        // One answer alone makes no rate.
        if asked.is_some() {
            self.draw_curves();
        }
        let there: BTreeSet<Key> = self.now.iter().map(key).collect();
        self.curves.retain(|key, _| there.contains(key));
    }

    /// There was no answer: the next one may be another daemon's.
    pub fn missed(&mut self) {
        self.was_away = true;
    }

    /// The last answer.
    #[must_use]
    pub fn now(&self) -> &[Counted] {
        &self.now
    }

    /// When the last answer was asked for.
    #[must_use]
    pub fn asked(&self) -> Option<Instant> {
        self.asked
    }

    /// How often another daemon answered than before.
    #[must_use]
    pub fn restarts(&self) -> usize {
        self.restarts
    }

    /// How much something of a thing of the last answer grew in a second.
    pub fn rate(&self, thing: &Counted, figure: impl Fn(&Counted) -> u64) -> f64 {
        self.growth.of(thing, figure)
    }

    /// What a source saw and a port had delivered, in a second, over time.
    #[must_use]
    pub fn curve(&self, key: &Key) -> Option<&Curve> {
        self.curves.get(key)
    }

    /// Of all sources and ports in a second: frames seen, bits read, frames delivered.
    #[must_use]
    pub fn totals(&self) -> &[Curve; 3] {
        &self.totals
    }

    /// What was lost in a second at each of [`STAGES`].
    #[must_use]
    pub fn stages(&self) -> &[Curve; STAGES.len()] {
        &self.stages
    }

    /// What was lost in all, ports that are gone included: since the daemon began, and at the NIC since the host did.
    #[must_use]
    pub fn lost(&self) -> u64 {
        let departed = |it: &Counted| {
            let of = |name| of(it, "source", name);
            of("departed_accounted").saturating_sub(of("departed_delivered"))
        };
        self.now.iter().map(|it| lost(it) + departed(it)).sum()
    }

    fn draw_curves(&mut self) {
        let sum = |figure: fn(&Counted) -> u64| -> f64 {
            self.now.iter().map(|it| self.growth.of(it, figure)).sum()
        };
        let figures: [fn(&Counted) -> u64; 3] = [
            |it| of(it, "source", "seen"),
            |it| of(it, "source", "bytes").saturating_mul(8),
            |it| of(it, "port", "delivered"),
        ];
        for (curve, rate) in self.totals.iter_mut().zip(figures.map(sum)) {
            curve.push(rate);
        }
        for (curve, stage) in self.stages.iter_mut().zip(STAGES) {
            let lost = |it: &Counted| stage.of(it).unwrap_or(0);
            let rates = self.now.iter().map(|it| self.growth.of(it, lost));
            curve.push(rates.sum());
        }
        for thing in &self.now {
            let pulse = match thing.kind.as_str() {
                "source" => "seen",
                _ => "delivered",
            };
            let figure = |it: &Counted| value(it, pulse).unwrap_or(0);
            let rate = self.growth.of(thing, figure);
            self.curves.entry(key(thing)).or_default().push(rate);
        }
    }
}

/// A thing's key.
#[must_use]
pub fn key(thing: &Counted) -> Key {
    (thing.kind.clone(), thing.name.clone())
}

/// A counter of a thing, if it is of that kind.
fn of(thing: &Counted, kind: &str, name: &str) -> u64 {
    let found = value(thing, name).filter(|_| thing.kind == kind);
    found.unwrap_or(0)
}

/// Whether something that only grows is less than it was: another daemon counts now.
fn fell(before: &[Counted], now: &[Counted]) -> bool {
    let now: BTreeMap<Key, &Counted> = now.iter().map(|it| (key(it), it)).collect();
    let fell = |old: &Counted, new: &Counted| {
        let grows = [("daemon", "ports_opened"), ("source", "seen")];
        grows
            .iter()
            .any(|(kind, name)| of(new, kind, name) < of(old, kind, name))
    };
    before
        .iter()
        .any(|old| now.get(&key(old)).is_some_and(|new| fell(old, new)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn source(name: &str, seen: u64) -> Counted {
        Counted {
            kind: "source".into(),
            name: name.into(),
            labels: Vec::new(),
            values: vec![("seen".into(), seen)],
        }
    }

    #[test]
    fn curves_end_with_their_thing_and_do_not_grow_without_end() {
        let mut course = Course::default();
        let start = Instant::now();
        for n in 0..100 {
            let now = vec![source("a", 10 * n), source(&format!("b{n}"), 0)];
            course.heard(start + Duration::from_secs(n), now);
        }
        let curve = course.curve(&("source".into(), "a".into())).unwrap();
        assert_eq!(curve.rates(usize::MAX).count(), HISTORY);
        assert_eq!((curve.last(), course.totals()[0].last()), (10.0, 10.0));
        assert_eq!(course.curves.len(), 2);
    }

    #[test]
    fn another_daemon_is_known_by_what_only_grows_and_only_after_silence() {
        let mut course = Course::default();
        let start = Instant::now();
        let hear = |course: &mut Course, seconds, seen| {
            course.heard(
                start + Duration::from_secs(seconds),
                vec![source("a", seen)],
            );
            (course.restarts(), course.totals()[0].last())
        };
        assert_eq!(hear(&mut course, 0, 1000), (0, 0.0));
        assert_eq!(hear(&mut course, 1, 900), (0, 0.0));
        course.missed();
        assert_eq!(hear(&mut course, 3, 910), (0, 5.0));
        course.missed();
        assert_eq!(hear(&mut course, 5, 10), (1, 0.0));
        assert_eq!(hear(&mut course, 6, 30), (1, 20.0));
    }
}
