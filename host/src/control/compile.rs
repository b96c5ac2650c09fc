//! Filters are compiled by a thread of their own, so that a slow one delays only who asked.
//!
//! Its owners (users and VMs) take turns, one job each; an owner whose filters took long is served
//! after all others until its debt is over, on whatever connection it asks. A job whose connection
//! is gone is not compiled.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnplug_ring::control::{FilterSpec, code};

use super::request::quoted;
use crate::hub::{Peer, Programs, Refusal};
use vnplug_filter::{Compiler, Jit, Program, Trust};
use vnplug_os::event;
use vnplug_os::peer_log;

/// Compiling for longer than this costs who asked: others wait for the same thread.
pub(crate) const CHEAP: Duration = Duration::from_millis(20);
/// For so many times as long as a costly compilation took, its owner is served after others.
const DEBT: u32 = 5;
/// Jobs of one owner that may wait.
const MAX_WAITING: usize = 64;

/// What is to be compiled for one request.
pub(crate) struct Job {
    /// Token of the connection that asked.
    pub(crate) session: u64,
    /// Whose connection it is.
    pub(crate) owner: Peer,
    /// Who compiles: a guest's program is checked more strictly.
    pub(crate) trust: Trust,
    /// The operator's obligatory filter; empty = none.
    pub(crate) guard: String,
    /// The reader's filter.
    pub(crate) filter: FilterSpec,
    pub(crate) snaplen: u32,
    pub(crate) link_type: u32,
}

/// Whoever holds it waits for a job; when it is dropped, the job need not be done.
pub(crate) struct Ticket {
    _waits: Arc<()>,
}

/// The other half of a ticket.
pub(crate) struct Waits(Weak<()>);

impl Ticket {
    /// A ticket, and how its job sees whether anybody holds it.
    pub(crate) fn new() -> (Self, Waits) {
        let waits = Arc::new(());
        let half = Waits(Arc::downgrade(&waits));
        (Self { _waits: waits }, half)
    }
}

impl Waits {
    /// Somebody holds the ticket.
    pub(crate) fn is_awaited(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// A compiled job, with the time it took.
pub(crate) struct Compiled {
    pub(crate) session: u64,
    pub(crate) programs: Result<Programs, Refusal>,
    pub(crate) took: Duration,
}

/// The thread, as the control thread sees it.
pub(crate) struct CompileThread {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Something was added to the queue, or it was closed.
    added: Condvar,
    done: Mutex<VecDeque<Compiled>>,
}

impl CompileThread {
    /// Starts it; `bell`, an eventfd, becomes readable when a job is done.
    ///
    /// What it compiles is handed on to `jit`.
    pub(crate) fn start(compiler: Compiler, jit: Jit, bell: Arc<OwnedFd>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::default()),
            added: Condvar::new(),
            done: Mutex::new(VecDeque::new()),
        });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("vnplug-compile".into())
            .spawn(move || {
                let mut compiler = compiler;
                let each = |job: &Job| {
                    let programs = guarded(&mut compiler, |compiler| compile(compiler, job))?;
                    hand_on(&jit, &job.owner, &programs);
                    Ok(programs)
                };
                work(&theirs, each, &bell);
            })?;
        Ok(Self { shared, thread })
    }

    /// Hands in a job; it comes back by [`next_done`](Self::next_done) if the ticket is kept.
    ///
    /// # Errors
    /// `LIMIT` if too many jobs of this owner wait.
    pub(crate) fn submit(&self, job: Job) -> Result<Ticket, Refusal> {
        if self.thread.is_finished() {
            let what = "the thread that compiles filters is gone: restart the daemon";
            return Err(Refusal::new(code::INTERNAL, what));
        }
        let ticket = lock(&self.shared.queue).add(job)?;
        self.shared.added.notify_one();
        Ok(ticket)
    }

    /// The next finished job.
    pub(crate) fn next_done(&self) -> Option<Compiled> {
        lock(&self.shared.done).pop_front()
    }
}

impl Drop for CompileThread {
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.added.notify_one();
    }
}

/// Jobs that wait, by owner.
#[derive(Default)]
struct Queue {
    /// Owners with jobs; the first has waited longest for its turn.
    turns: VecDeque<(Peer, VecDeque<Waiting>)>,
    /// Until when an owner is in debt.
    debts: HashMap<Peer, Instant>,
    closed: bool,
}

struct Waiting {
    job: Job,
    waits: Waits,
}

impl Waiting {
    fn is_awaited(&self) -> bool {
        self.waits.is_awaited()
    }
}

impl Queue {
    fn add(&mut self, job: Job) -> Result<Ticket, Refusal> {
        let at = self.turns.iter().position(|(owner, _)| *owner == job.owner);
        let at = at.unwrap_or_else(|| {
            self.turns.push_back((job.owner.clone(), VecDeque::new()));
            self.turns.len() - 1
        });
        let (_, jobs) = &mut self.turns[at];
        if jobs.len() >= MAX_WAITING {
            jobs.retain(Waiting::is_awaited);
        }
        if jobs.len() >= MAX_WAITING {
            let what = format!("{MAX_WAITING} filters of yours wait to be compiled: try later");
            return Err(Refusal::new(code::LIMIT, what));
        }
        let (ticket, waits) = Ticket::new();
        jobs.push_back(Waiting { job, waits });
        Ok(ticket)
    }

    /// The job whose turn it is: of the owner that waits longest of those with the least debt.
    fn next(&mut self, now: Instant) -> Option<Job> {
        self.turns.retain_mut(|(_, jobs)| {
            jobs.retain(Waiting::is_awaited);
            !jobs.is_empty()
        });
        self.debts.retain(|_, until| *until > now);
        let debt = |owner: &Peer| self.debts.get(owner).copied();
        // The first of equals; no debt comes before any.
        let (at, _) = self
            .turns
            .iter()
            .enumerate()
            .min_by_key(|(_, (owner, _))| debt(owner))?;
        let (owner, mut jobs) = self.turns.remove(at)?;
        let next = jobs.pop_front();
        if !jobs.is_empty() {
            self.turns.push_back((owner, jobs));
        }
        next.map(|waiting| waiting.job)
    }

    /// Notes what a job of an owner took.
    fn charge(&mut self, owner: Peer, took: Duration, now: Instant) {
        if took > CHEAP {
            let until = self.debts.entry(owner).or_insert(now);
            *until = now.max(*until) + took * DEBT;
        }
    }
}

fn work(
    shared: &Shared,
    mut compile: impl FnMut(&Job) -> Result<Programs, Refusal>,
    bell: &OwnedFd,
) {
    let mut queue = lock(&shared.queue);
    while !queue.closed {
        let Some(job) = queue.next(Instant::now()) else {
            let woken = shared.added.wait(queue);
            queue = woken.unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(queue);
        let begun = Instant::now();
        let programs = compile(&job);
        let took = begun.elapsed();
        lock(&shared.done).push_back(Compiled {
            session: job.session,
            programs,
            took,
        });
        event::ring(bell);
        queue = lock(&shared.queue);
        queue.charge(job.owner, took, Instant::now());
    }
}

/// A panic is the error of one job, and not the end of the thread: whoever waits is answered.
fn guarded(
    compiler: &mut Compiler,
    job: impl FnOnce(&mut Compiler) -> Result<Programs, Refusal>,
) -> Result<Programs, Refusal> {
    catch_unwind(AssertUnwindSafe(|| job(compiler))).unwrap_or_else(|_| {
        log::error!(target: "filter", "compiling a filter panicked");
        compiler.reset();
        let what = "compiling this filter failed inside the daemon; its log says why";
        Err(Refusal::new(code::INTERNAL, what))
    })
}

/// Has them made native in their owner's turn.
fn hand_on(jit: &Jit, owner: &Peer, programs: &Programs) {
    let owner = match owner {
        Peer::User(uid) => format!("uid {uid}"),
        Peer::Vm(name) => format!("vm {name}"),
    };
    for program in programs.guard.iter().chain(&programs.filter) {
        jit.submit(&owner, program);
    }
}

/// What these locks guard is whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn compile(compiler: &mut Compiler, job: &Job) -> Result<Programs, Refusal> {
    let mut expression = |text: &str| {
        compiler
            .compile(text, job.snaplen, job.link_type)
            .map_err(|error| Refusal::new(code::FILTER, error.to_string()))
    };
    let guard = match job.guard.trim() {
        "" => None,
        guard => Some(Arc::new(expression(guard).map_err(|refusal| {
            // The text is the operator's business, not the reader's.
            peer_log!(
                log::Level::Error,
                "filter",
                "the filter {guard:?} of a grant fails: {}",
                refusal.text
            );
            let what =
                "what the operator allows here cannot be compiled; the daemon's log says why";
            Refusal::new(code::INTERNAL, what)
        })?)),
    };
    let (filter, text) = match &job.filter {
        FilterSpec::All => (None, String::new()),
        FilterSpec::Expression(text) if text.trim().is_empty() => (None, String::new()),
        FilterSpec::Expression(text) => {
            let program = expression(text)?;
            let backward = Program::from_bytes(&program.to_bytes(), job.trust);
            let program = backward.map_err(|error| {
                Refusal::new(code::FILTER, format!("{}: {error}", quoted(text)))
            })?;
            (Some(Arc::new(program)), text.clone())
        }
        FilterSpec::Program(bytes) => {
            let program = Program::from_bytes(bytes, job.trust)
                .map_err(|error| Refusal::new(code::FILTER, error.to_string()))?;
            let text = format!("(program of {} instructions)", program.instructions().len());
            (Some(Arc::new(program)), text)
        }
    };
    // Here, because the queues' threads have no time for it.
    for program in [&guard, &filter].into_iter().flatten() {
        program.analysis();
    }
    Ok(Programs {
        guard,
        sight: job.guard.clone(),
        filter,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(session: u64, owner: u32) -> Job {
        Job {
            session,
            owner: Peer::User(owner),
            trust: Trust::Guest,
            guard: String::new(),
            filter: FilterSpec::All,
            snaplen: 1,
            link_type: 1,
        }
    }

    /// The sessions in the order in which they are served.
    fn served(queue: &mut Queue, now: Instant) -> Vec<u64> {
        std::iter::from_fn(|| queue.next(now))
            .map(|job| job.session)
            .collect()
    }

    #[test]
    fn a_job_that_panics_is_answered_and_the_next_one_is_done() {
        let shared = Shared {
            queue: Mutex::new(Queue::default()),
            added: Condvar::new(),
            done: Mutex::default(),
        };
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let tickets: Vec<_> = [1, 2]
            .map(|session| lock(&shared.queue).add(job(session, 7)).ok().unwrap())
            .into();
        let mut compiler = Compiler::new("/nonexistent".into());
        let each = |job: &Job| {
            guarded(&mut compiler, |compiler| match job.session {
                1 => panic!("on purpose"),
                _ => {
                    lock(&shared.queue).closed = true;
                    compile(compiler, job)
                }
            })
        };
        work(&shared, each, &bell);
        drop(tickets);
        let done: Vec<Compiled> = lock(&shared.done).drain(..).collect();
        let refusal = done[0].programs.as_ref().err().unwrap();
        assert_eq!((done[0].session, refusal.code), (1, code::INTERNAL));
        assert_eq!((done[1].session, done[1].programs.is_ok()), (2, true));
    }

    #[test]
    fn owners_take_turns_and_a_dropped_ticket_cancels() {
        let mut queue = Queue::default();
        let jobs = [(1, 7), (2, 7), (3, 7), (4, 8), (5, 9), (6, 8)];
        let mut tickets: Vec<Ticket> = jobs
            .iter()
            .filter_map(|&(session, owner)| queue.add(job(session, owner)).ok())
            .collect();
        drop(tickets.remove(1));
        assert_eq!(served(&mut queue, Instant::now()), [1, 4, 5, 3, 6]);
        assert!(queue.turns.is_empty());
    }

    #[test]
    fn an_owner_may_let_so_many_wait_and_the_abandoned_do_not_count() {
        let mut queue = Queue::default();
        for session in 0..10 * MAX_WAITING as u64 {
            assert!(queue.add(job(session, 7)).is_ok());
        }
        assert!(queue.turns[0].1.len() <= MAX_WAITING);
        let tickets: Vec<_> = (0..MAX_WAITING as u64)
            .map(|session| queue.add(job(session, 7)).ok())
            .collect();
        assert!(tickets.iter().all(Option::is_some));
        let refused = queue.add(job(99, 7)).err().unwrap();
        assert_eq!(refused.code, code::LIMIT);
        assert!(queue.add(job(99, 8)).is_ok());
    }

    #[test]
    fn who_is_in_debt_is_served_after_others_for_a_while() {
        let mut queue = Queue::default();
        let now = Instant::now();
        queue.charge(Peer::User(7), Duration::from_secs(1), now);
        queue.charge(Peer::User(8), CHEAP, now);
        let all = [(1, 7), (2, 8), (3, 9), (4, 8)];
        let order = |queue: &mut Queue, at| {
            let add = |&(session, owner)| queue.add(job(session, owner)).ok();
            let tickets: Vec<_> = all.iter().map(add).collect();
            let order = served(queue, at);
            drop(tickets);
            order
        };
        assert_eq!(order(&mut queue, now), [2, 3, 4, 1]);
        let later = now + Duration::from_secs(u64::from(DEBT) + 1);
        assert_eq!(order(&mut queue, later), [1, 2, 3, 4]);
        assert!(queue.debts.is_empty());
    }
}
