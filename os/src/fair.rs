//! Jobs for a thread, of several owners who take turns: one job each.
//!
//! An owner whose jobs took long is in debt: it is served after all others, or not at all until the debt
//! is over. A job that nobody waits for any more is not done.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A job.
pub trait Job {
    /// Whether somebody still waits for it.
    fn is_wanted(&self) -> bool;
}

/// What an owner may.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Jobs of one owner that may wait.
    pub most: usize,
    /// A job that takes longer costs its owner something.
    pub cheap: Duration,
    /// For this many times as long as the job took the owner is in debt.
    pub debt: u32,
    /// What becomes of an owner in debt.
    pub meanwhile: Meanwhile,
}

/// What becomes of an owner in debt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meanwhile {
    /// It is served after all others, the one with the least debt first.
    Last,
    /// It rests.
    Rests,
}

/// Jobs that wait, and the thread that waits for them.
#[derive(Debug)]
pub struct Fair<O, J> {
    waiting: Mutex<Waiting<O, J>>,
    /// A job was added, or there will be no more.
    added: Condvar,
    terms: Terms,
}

#[derive(Debug)]
struct Waiting<O, J> {
    /// Owners with jobs; the first has waited longest for its turn.
    turns: VecDeque<(O, VecDeque<J>)>,
    /// Until when an owner is in debt.
    debts: HashMap<O, Instant>,
    closed: bool,
}

impl<O: Clone + Eq + Hash, J: Job> Fair<O, J> {
    /// Without jobs.
    pub fn new(terms: Terms) -> Self {
        Self {
            waiting: Mutex::new(Waiting {
                turns: VecDeque::new(),
                debts: HashMap::new(),
                closed: false,
            }),
            added: Condvar::new(),
            terms,
        }
    }

    /// Adds a job; false if too many of this owner's wait.
    pub fn add(&self, owner: O, job: J) -> bool {
        let fits = self.lock().add(owner, job, self.terms.most);
        if fits {
            self.added.notify_one();
        }
        fits
    }

    /// Waits for the next job, until `deadline` if there is one; `None` also when there will be no more.
    pub fn next(&self, deadline: Option<Instant>) -> Option<(O, J)> {
        let mut waiting = self.lock();
        loop {
            if waiting.closed {
                return None;
            }
            let now = Instant::now();
            if let Some(next) = waiting.next(now, self.terms.meanwhile) {
                return Some(next);
            }
            if deadline.is_some_and(|deadline| deadline <= now) {
                return None;
            }
            // An owner may rest.
            let rests = (!waiting.turns.is_empty()).then_some(LOOK_AGAIN);
            let longest = deadline.map(|deadline| deadline - now).or(rests);
            waiting = match longest {
                Some(longest) => {
                    let woken = self.added.wait_timeout(waiting, longest);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let woken = self.added.wait(waiting);
                    woken.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    /// Notes what a job of an owner took.
    pub fn charge(&self, owner: O, took: Duration) {
        self.lock().charge(owner, took, Instant::now(), &self.terms);
    }

    /// How many wait, those among them that nobody wants any more.
    pub fn len(&self) -> usize {
        let waiting = self.lock();
        waiting.turns.iter().map(|(_, jobs)| jobs.len()).sum()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// No more jobs are handed out.
    pub fn close(&self) {
        self.lock().closed = true;
        self.added.notify_all();
    }

    /// What the lock guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Waiting<O, J>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<O: Clone + Eq + Hash, J: Job> Waiting<O, J> {
    fn add(&mut self, owner: O, job: J, most: usize) -> bool {
        let at = self.turns.iter().position(|(other, _)| *other == owner);
        let at = at.unwrap_or_else(|| {
            self.turns.push_back((owner, VecDeque::new()));
            self.turns.len() - 1
        });
        let (_, jobs) = &mut self.turns[at];
        if jobs.len() >= most {
            jobs.retain(Job::is_wanted);
        }
        let fits = jobs.len() < most;
        if fits {
            jobs.push_back(job);
        }
        fits
    }

    /// The job whose turn it is: of the owner that waits longest of those with the least debt.
    fn next(&mut self, now: Instant, meanwhile: Meanwhile) -> Option<(O, J)> {
        self.debts.retain(|_, until| *until > now);
        loop {
            let debt = |owner: &O| self.debts.get(owner).copied();
            // The first of equals; no debt comes before any.
            let turns = self.turns.iter().enumerate();
            let (at, (owner, _)) = turns.min_by_key(|(_, (owner, _))| debt(owner))?;
            if meanwhile == Meanwhile::Rests && self.debts.contains_key(owner) {
                return None;
            }
            let (owner, mut jobs) = self.turns.remove(at)?;
            let next = std::iter::from_fn(|| jobs.pop_front()).find(Job::is_wanted);
            if !jobs.is_empty() {
                self.turns.push_back((owner.clone(), jobs));
            }
            if let Some(job) = next {
                return Some((owner, job));
            }
        }
    }

    fn charge(&mut self, owner: O, took: Duration, now: Instant, terms: &Terms) {
        if took > terms.cheap {
            let until = self.debts.entry(owner).or_insert(now);
            *until = now.max(*until) + took * terms.debt;
        }
    }
}

/// How often an owner that rests is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms {
        most: 8,
        cheap: Duration::from_millis(10),
        debt: 5,
        meanwhile: Meanwhile::Last,
    };

    /// A job with its number.
    #[derive(Debug)]
    struct Numbered(u32, bool);

    impl Job for Numbered {
        fn is_wanted(&self) -> bool {
            self.1
        }
    }

    fn fair(terms: Terms, jobs: &[(u32, &'static str)]) -> Fair<&'static str, Numbered> {
        let fair = Fair::new(terms);
        for &(number, owner) in jobs {
            assert!(fair.add(owner, Numbered(number, true)));
        }
        fair
    }

    /// The jobs in the order in which they are served at `now`.
    fn order(fair: &Fair<&'static str, Numbered>, now: Instant) -> Vec<u32> {
        let next = || fair.lock().next(now, fair.terms.meanwhile);
        std::iter::from_fn(next).map(|(_, job)| job.0).collect()
    }

    #[test]
    fn owners_take_turns_and_the_unwanted_are_passed_over() {
        let fair = fair(TERMS, &[(1, "a"), (3, "a"), (4, "b"), (5, "c"), (6, "b")]);
        assert!(fair.add("c", Numbered(7, false)));
        assert_eq!(order(&fair, Instant::now()), [1, 4, 5, 3, 6]);
        assert!(fair.is_empty());
    }

    #[test]
    fn who_is_in_debt_is_served_after_others_or_rests() {
        let jobs = [(1, "a"), (2, "b"), (3, "c"), (4, "b")];
        for meanwhile in [Meanwhile::Last, Meanwhile::Rests] {
            let now = Instant::now();
            let fair = fair(Terms { meanwhile, ..TERMS }, &jobs);
            let terms = fair.terms;
            fair.lock().charge("a", Duration::from_secs(1), now, &terms);
            fair.lock().charge("b", terms.cheap, now, &terms);
            let later = now + Duration::from_secs(u64::from(terms.debt)) + Duration::from_millis(1);
            let (first, then) = (order(&fair, now), order(&fair, later));
            match meanwhile {
                Meanwhile::Last => assert_eq!((first, then), (vec![2, 3, 4, 1], vec![])),
                Meanwhile::Rests => assert_eq!((first, then), (vec![2, 3, 4], vec![1])),
            }
            assert!(fair.lock().debts.is_empty());
        }
    }

    #[test]
    fn an_owner_may_let_so_many_wait_and_the_unwanted_do_not_count() {
        let fair = fair(TERMS, &[]);
        for number in 0..100 {
            assert!(fair.add("a", Numbered(number, false)));
        }
        assert!(fair.len() <= TERMS.most);
        for number in 0..TERMS.most as u32 {
            assert!(fair.add("a", Numbered(number, true)));
        }
        assert!(!fair.add("a", Numbered(99, true)));
        assert!(fair.add("b", Numbered(99, true)));
    }

    #[test]
    fn a_thread_waits_for_a_job_a_deadline_and_the_end() {
        let fair = fair(TERMS, &[]);
        let soon = Instant::now() + Duration::from_millis(20);
        assert!(fair.next(Some(soon)).is_none() && Instant::now() >= soon);
        std::thread::scope(|scope| {
            let got = scope.spawn(|| (fair.next(None), fair.next(None)));
            assert!(fair.add("a", Numbered(1, true)));
            std::thread::sleep(Duration::from_millis(20));
            fair.close();
            let (first, then) = got.join().unwrap();
            assert_eq!(first.unwrap().1.0, 1);
            assert!(then.is_none());
        });
    }
}
