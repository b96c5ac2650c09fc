//! Filters are compiled by a thread of their own, so that a slow one delays only who asked.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vnplug_ring::control::{FilterSpec, code};

use crate::filter::{Compiler, Program, Trust};
use crate::hub::{Programs, Refusal};
use crate::sys::event;

/// What is to be compiled for one request.
pub(crate) struct Job {
    /// Token of the connection that asked.
    pub(crate) session: u64,
    /// Who compiles: a guest's program is checked more strictly.
    pub(crate) trust: Trust,
    /// The operator's obligatory filter; empty = none.
    pub(crate) guard: String,
    /// The reader's filter.
    pub(crate) filter: FilterSpec,
    pub(crate) snaplen: u32,
    pub(crate) link_type: u32,
}

/// A compiled job, with the time it took.
pub(crate) struct Compiled {
    pub(crate) session: u64,
    pub(crate) programs: Result<Programs, Refusal>,
    pub(crate) took: Duration,
}

/// The thread, as the control thread sees it.
pub(crate) struct CompileThread {
    jobs: Sender<Job>,
    done: Arc<Mutex<VecDeque<Compiled>>>,
}

impl CompileThread {
    /// Starts it; `bell`, an eventfd, becomes readable when a job is done.
    pub(crate) fn start(compiler: Compiler, bell: Arc<OwnedFd>) -> std::io::Result<Self> {
        let (jobs, inbox) = channel();
        let done = Arc::new(Mutex::new(VecDeque::new()));
        let out = Arc::clone(&done);
        std::thread::Builder::new()
            .name("vnplug-compile".into())
            .spawn(move || work(&inbox, compiler, &out, &bell))?;
        Ok(Self { jobs, done })
    }

    /// Hands in a job; it comes back by [`next_done`](Self::next_done).
    pub(crate) fn submit(&self, job: Job) {
        if self.jobs.send(job).is_err() {
            log::error!(target: "filter", "the thread that compiles filters is gone");
        }
    }

    /// The next finished job.
    pub(crate) fn next_done(&self) -> Option<Compiled> {
        self.done
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    }
}

fn work(
    inbox: &Receiver<Job>,
    mut compiler: Compiler,
    done: &Mutex<VecDeque<Compiled>>,
    bell: &OwnedFd,
) {
    while let Ok(job) = inbox.recv() {
        let begun = Instant::now();
        let programs = compile(&mut compiler, &job);
        let compiled = Compiled {
            session: job.session,
            programs,
            took: begun.elapsed(),
        };
        done.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(compiled);
        event::ring(bell);
    }
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
            let what = format!("the operator's filter {guard:?} fails: {}", refusal.text);
            Refusal::new(code::INTERNAL, what)
        })?)),
    };
    let (filter, text) = match &job.filter {
        FilterSpec::All => (None, String::new()),
        FilterSpec::Expression(text) if text.trim().is_empty() => (None, String::new()),
        FilterSpec::Expression(text) => {
            let program = expression(text)?;
            let backward = Program::from_bytes(&program.to_bytes(), job.trust);
            let program = backward
                .map_err(|error| Refusal::new(code::FILTER, format!("{text:?}: {error}")))?;
            (Some(Arc::new(program)), text.clone())
        }
        FilterSpec::Program(bytes) => {
            let program = Program::from_bytes(bytes, job.trust)
                .map_err(|error| Refusal::new(code::FILTER, error.to_string()))?;
            let text = format!("(program of {} instructions)", program.instructions().len());
            (Some(Arc::new(program)), text)
        }
    };
    Ok(Programs {
        guard,
        filter,
        text,
    })
}
