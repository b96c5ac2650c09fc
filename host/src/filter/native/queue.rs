//! Programs that wait to be translated: owners take turns, one program each.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::Slot;
use crate::filter::program::Instruction;

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

    /// The next program that somebody wants.
    pub(super) fn next(&mut self) -> Option<Wanted> {
        while let Some((owner, mut jobs)) = self.turns.pop_front() {
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

    /// How many wait, those among them that nobody wants any more.
    pub(super) fn len(&self) -> usize {
        self.turns.iter().map(|(_, jobs)| jobs.len()).sum()
    }
}

/// Programs of one owner that may wait; the next one is interpreted for good.
pub(super) const MAX_WAITING: usize = 16_384;

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
        let order: Vec<String> = std::iter::from_fn(|| queue.next())
            .map(|wanted| wanted.owner)
            .collect();
        assert_eq!(order, ["a", "b", "c", "a", "a"]);
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
