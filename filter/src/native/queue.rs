//! Programs that wait to be translated: owners take turns, one program each.
//!
//! Whoever had a costly one translated rests for nine times as long, so that no owner keeps a
//! processor busy by sending hard programs one after the other.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Slot;
use vnplug_bpf::Instruction;

/// A program that somebody may still want.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) owner: String,
    instructions: Weak<[Instruction]>,
    slot: Weak<Slot>,
}

/// A program that somebody wants.
pub(super) struct Wanted {
    pub(super) owner: String,
    pub(super) instructions: Arc<[Instruction]>,
    pub(super) slot: Arc<Slot>,
}

impl Job {
    pub(super) fn new(owner: &str, instructions: &Arc<[Instruction]>, slot: &Arc<Slot>) -> Self {
        Self {
            owner: owner.to_owned(),
            instructions: Arc::downgrade(instructions),
            slot: Arc::downgrade(slot),
        }
    }

    fn is_wanted(&self) -> bool {
        self.slot.strong_count() > 0
    }

    fn wanted(self) -> Option<Wanted> {
        Some(Wanted {
            instructions: self.instructions.upgrade()?,
            slot: self.slot.upgrade()?,
            owner: self.owner,
        })
    }
}

/// Jobs by owner.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Owners with jobs; the first has waited longest for its turn.
    turns: VecDeque<(String, VecDeque<Job>)>,
    /// Until when an owner rests.
    rests: HashMap<String, Instant>,
    /// No more jobs are served.
    pub(super) closed: bool,
}

impl Queue {
    /// False if too many of this owner's wait.
    pub(super) fn add(&mut self, job: Job) -> bool {
        let at = self.turns.iter().position(|(owner, _)| *owner == job.owner);
        let at = at.unwrap_or_else(|| {
            self.turns.push_back((job.owner.clone(), VecDeque::new()));
            self.turns.len() - 1
        });
        let (_, jobs) = &mut self.turns[at];
        if jobs.len() >= MAX_WAITING {
            jobs.retain(Job::is_wanted);
        }
        let fits = jobs.len() < MAX_WAITING;
        if fits {
            jobs.push_back(job);
        }
        fits
    }

    /// The next program that somebody wants, of an owner that does not rest.
    pub(super) fn next(&mut self, now: Instant) -> Option<Wanted> {
        self.rests.retain(|_, until| *until > now);
        for _ in 0..self.turns.len() {
            let (owner, mut jobs) = self.turns.pop_front()?;
            if self.rests.contains_key(&owner) {
                self.turns.push_back((owner, jobs));
                continue;
            }
            let wanted = std::iter::from_fn(|| jobs.pop_front()).find_map(Job::wanted);
            if !jobs.is_empty() {
                self.turns.push_back((owner, jobs));
            }
            if wanted.is_some() {
                return wanted;
            }
        }
        None
    }

    /// Notes the processor time that a program of this owner took.
    pub(super) fn charge(&mut self, owner: String, took: Duration, now: Instant) {
        if took > CHEAP {
            self.rests.insert(owner, now + took * REST);
        }
    }

    /// How many wait, those among them that nobody wants any more.
    pub(super) fn len(&self) -> usize {
        self.turns.iter().map(|(_, jobs)| jobs.len()).sum()
    }
}

/// Programs of one owner that may wait; the next one is interpreted for good.
pub(super) const MAX_WAITING: usize = 16_384;

/// What people write takes less.
const CHEAP: Duration = Duration::from_millis(10);

/// So many times as long as it took.
const REST: u32 = 9;

#[cfg(test)]
mod tests {
    use super::*;

    type Kept = (Arc<[Instruction]>, Arc<Slot>);

    fn add(queue: &mut Queue, owner: &str) -> (Kept, bool) {
        let kept: Kept = (Arc::new([]), Arc::default());
        let added = queue.add(Job::new(owner, &kept.0, &kept.1));
        (kept, added)
    }

    #[test]
    fn owners_take_turns_and_the_unwanted_are_passed_over() {
        let mut queue = Queue::default();
        let mut kept: Vec<Kept> = ["a", "a", "a", "a", "b", "c"]
            .map(|owner| add(&mut queue, owner).0)
            .into();
        kept.remove(1);
        assert_eq!(order(&mut queue, Instant::now()), ["a", "b", "c", "a", "a"]);
    }

    #[test]
    fn whoever_had_a_costly_one_rests_and_is_not_forgotten() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let _kept = ["a", "b", "a"].map(|owner| add(&mut queue, owner).0);
        queue.charge("a".into(), Duration::from_secs(1), now);
        queue.charge("b".into(), CHEAP, now);
        assert_eq!(order(&mut queue, now), ["b"]);
        assert_eq!(queue.len(), 2);
        let later = now + Duration::from_secs(1) * REST;
        assert_eq!(order(&mut queue, later), ["a", "a"]);
        assert!(queue.rests.is_empty() && queue.turns.is_empty());
    }

    /// The owners in the order in which they are served.
    fn order(queue: &mut Queue, now: Instant) -> Vec<String> {
        std::iter::from_fn(|| queue.next(now))
            .map(|wanted| wanted.owner)
            .collect()
    }

    #[test]
    fn an_owner_may_let_so_many_wait_and_the_unwanted_do_not_count() {
        let mut queue = Queue::default();
        for _ in 0..3 * MAX_WAITING {
            assert!(add(&mut queue, "a").1);
        }
        let kept: Vec<Kept> = (0..MAX_WAITING)
            .map_while(|_| {
                let (kept, added) = add(&mut queue, "a");
                added.then_some(kept)
            })
            .collect();
        assert_eq!(kept.len(), MAX_WAITING);
        assert!(!add(&mut queue, "a").1);
        assert!(add(&mut queue, "b").1);
    }
}
