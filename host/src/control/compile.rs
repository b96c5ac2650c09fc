//! Filters are compiled by a thread of their own, so that a slow one delays only who asked.
//!
//! Its owners (users and VMs) take turns, one job each; an owner whose filters took long is served
//! after all others until its debt is over, on whatever connection it asks. A job whose connection
//! is gone is not compiled.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vnplug_ring::control::{FilterSpec, code};

use super::request::quoted;
use crate::hub::{Granted, Peer, Programs, Refusal};
use vnplug_filter::{Compiler, Jit, Program, Trust};
use vnplug_os::event;
use vnplug_os::fair::{self, Fair, Meanwhile, Terms};
use vnplug_os::peer_log;

/// Compiling for longer than this costs who asked: others wait for the same thread.
pub(crate) const CHEAP: Duration = Duration::from_millis(20);
/// What an owner may.
const TERMS: Terms = Terms {
    most: 64,
    cheap: CHEAP,
    debt: 5,
    meanwhile: Meanwhile::Last,
};

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
    /// The operator's filter for what is sent; empty = none.
    pub(crate) sends: String,
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
    shared: Arc<CompileQueue>,
    thread: JoinHandle<()>,
}

struct CompileQueue {
    jobs: Fair<Peer, Waiting>,
    done: Mutex<VecDeque<Compiled>>,
}

impl CompileThread {
    /// Starts it; `bell`, an eventfd, becomes readable when a job is done.
    ///
    /// What it compiles is handed on to `jit`.
    pub(crate) fn start(compiler: Compiler, jit: Jit, bell: Arc<OwnedFd>) -> std::io::Result<Self> {
        let shared = Arc::new(CompileQueue {
            jobs: Fair::new(TERMS),
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
        self.shared.add(job)
    }

    /// The next finished job.
    pub(crate) fn next_done(&self) -> Option<Compiled> {
        self.shared.done().pop_front()
    }
}

impl Drop for CompileThread {
    fn drop(&mut self) {
        self.shared.jobs.close();
    }
}

struct Waiting {
    job: Job,
    waits: Waits,
}

impl fair::Job for Waiting {
    fn is_wanted(&self) -> bool {
        self.waits.is_awaited()
    }
}

impl CompileQueue {
    fn add(&self, job: Job) -> Result<Ticket, Refusal> {
        let (ticket, waits) = Ticket::new();
        if self.jobs.add(job.owner.clone(), Waiting { job, waits }) {
            return Ok(ticket);
        }
        let most = TERMS.most;
        let what = format!("{most} filters of yours wait to be compiled: try later");
        Err(Refusal::new(code::LIMIT, what))
    }

    /// What this lock guards is whole after every statement.
    fn done(&self) -> MutexGuard<'_, VecDeque<Compiled>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn work(
    shared: &CompileQueue,
    mut compile: impl FnMut(&Job) -> Result<Programs, Refusal>,
    bell: &OwnedFd,
) {
    while let Some((owner, Waiting { job, .. })) = shared.jobs.next(None) {
        let begun = Instant::now();
        let programs = compile(&job);
        let took = begun.elapsed();
        shared.done().push_back(Compiled {
            session: job.session,
            programs,
            took,
        });
        event::ring(bell);
        shared.jobs.charge(owner, took);
    }
}

/// A panic is the error of one job, and not the end of the thread: its client gets an answer.
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
    let sends = programs.sends.1.iter();
    for program in programs.guard.iter().chain(&programs.filter).chain(sends) {
        jit.submit(&owner, program);
    }
}

fn compile(compiler: &mut Compiler, job: &Job) -> Result<Programs, Refusal> {
    let mut expression = |text: &str| {
        compiler
            .compile(text, job.snaplen, job.link_type)
            .map_err(|error| Refusal::new(code::FILTER, error.to_string()))
    };
    // The text is the operator's business, not the reader's.
    let mut of_operator = |text: &str| match text.trim() {
        "" => Ok(None),
        text => match expression(text) {
            Ok(program) => Ok(Some(Arc::new(program))),
            Err(refusal) => {
                peer_log!(
                    log::Level::Error,
                    "filter",
                    "the filter {text:?} of a grant fails: {}",
                    refusal.text
                );
                let what =
                    "what the operator allows here cannot be compiled; the daemon's log says why";
                Err(Refusal::new(code::INTERNAL, what))
            }
        },
    };
    let guard = of_operator(&job.guard)?;
    let sends = of_operator(&job.sends)?;
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
        grant: None,
        granted: Granted::default(),
        sends: (job.sends.clone(), sends),
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
            sends: String::new(),
            filter: FilterSpec::All,
            snaplen: 1,
            link_type: 1,
        }
    }

    fn shared() -> CompileQueue {
        CompileQueue {
            jobs: Fair::new(TERMS),
            done: Mutex::default(),
        }
    }

    #[test]
    fn an_owner_may_let_so_many_wait_and_the_abandoned_do_not_count() {
        let shared = shared();
        for session in 0..10 * TERMS.most as u64 {
            drop(shared.add(job(session, 7)).ok().unwrap());
        }
        let tickets: Vec<_> = (0..TERMS.most as u64)
            .map(|session| shared.add(job(session, 7)).ok())
            .collect();
        assert!(tickets.iter().all(Option::is_some));
        let refused = shared.add(job(99, 7)).err().unwrap();
        assert_eq!(refused.code, code::LIMIT);
        assert!(shared.add(job(99, 8)).is_ok());
    }

    #[test]
    fn a_job_that_panics_is_answered_and_the_next_one_is_done() {
        let shared = shared();
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let tickets: Vec<_> = [1, 2]
            .map(|session| shared.add(job(session, 7)).ok().unwrap())
            .into();
        let mut compiler = Compiler::new("/nonexistent".into());
        let each = |job: &Job| {
            guarded(&mut compiler, |compiler| match job.session {
                1 => panic!("on purpose"),
                _ => {
                    shared.jobs.close();
                    compile(compiler, job)
                }
            })
        };
        work(&shared, each, &bell);
        drop(tickets);
        let done: Vec<Compiled> = shared.done().drain(..).collect();
        let refusal = done[0].programs.as_ref().err().unwrap();
        assert_eq!((done[0].session, refusal.code), (1, code::INTERNAL));
        assert_eq!((done[1].session, done[1].programs.is_ok()), (2, true));
    }
}
