//! The threads that serve the calls, and what they share: a call comes, and is answered.

use std::cell::Cell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread;

use super::call::Call;
use super::execute::{self, Run};
use super::lookups;
use super::prepare::{self, Around, Prepared, Proposal};
use super::task::{Pending, Task, Wait};
use super::unix::Own;
use crate::act::Act;
use crate::gate::Verdict;
use crate::judging::Judging;
use crate::name::Name;
use crate::sys::seccomp::{Answer, Listener, Notice};
use crate::sys::table::{SLOTS, Table};
use crate::sys::threads::Threads;
use crate::sys::{lock, process};
use crate::who::Known;

/// What serving needs.
pub(crate) struct Serving {
    /// Hands the calls over.
    pub(crate) listener: Listener,
    /// Where they stand while they wait.
    pub(crate) table: Arc<Table>,
    /// Judges acts.
    pub(crate) judging: Judging,
    /// Directories where files may change without a question; `None`: files are no matter.
    pub(crate) writable: Option<Vec<PathBuf>>,
    /// Directories whose programs run without a question.
    pub(crate) runnable: Vec<PathBuf>,
    /// Process id of the program.
    pub(crate) program: u32,
}

/// What the threads share.
pub(super) struct Server {
    pub(super) listener: Listener,
    table: Arc<Table>,
    pub(super) judging: Judging,
    pub(super) writable: Option<Vec<PathBuf>>,
    pub(super) runnable: Vec<PathBuf>,
    /// Process id of the program until it runs: what the user has named is no question.
    not_run: Mutex<Option<u32>>,
    /// To the threads that follow what is run.
    pub(super) runs: Mutex<Option<Sender<Run>>>,
    /// Slots of the table that are free.
    free: Mutex<Vec<usize>>,
    /// Calls that wait for a verdict.
    pub(super) asked: Mutex<HashMap<u64, Asked>>,
    /// For the thread that holds what waits.
    queue: Mutex<VecDeque<Job>>,
    /// Rings when there is something in `queue`, or somebody was asked.
    pub(super) bell: OwnedFd,
    pub(super) own: Own,
    /// Sockets whose address was judged when they were bound.
    pub(super) bound: Mutex<HashSet<u64>>,
    pub(super) known: Known,
    threads: Threads,
    pub(super) lookups: Mutex<Sender<(Pending, Proposal)>>,
    /// Process id of the supervisor.
    pub(super) root: u32,
}

/// A call that waits for a verdict, and how it was proposed.
pub(super) struct Asked {
    pub(super) pending: Pending,
    /// The act and the names of its address, if somebody must know of it when it is allowed.
    pub(super) act: Option<(Act, Vec<Name>)>,
}

/// Work for the thread that holds what waits.
pub(super) enum Job {
    /// This call goes on when that has happened.
    Hold(Box<Pending>, Wait),
    /// This call goes on.
    Again(Box<Pending>),
    /// The call with this id was judged.
    Judged(u64, Verdict),
}

thread_local! {
    /// On a thread that may do what was allowed, and does not have to hand it on.
    pub(super) static DOES: Cell<bool> = const { Cell::new(false) };
}

/// Serves the calls, from now on and as long as this process lives.
///
/// # Errors
/// The system's, if threads or descriptors are short.
pub(crate) fn serve(serving: Serving) -> io::Result<()> {
    let Serving {
        listener,
        table,
        judging,
        writable,
        runnable,
        program,
    } = serving;
    let (lookups, to_look_up) = mpsc::channel();
    let server = Arc::new(Server {
        listener,
        table,
        judging,
        writable,
        runnable,
        not_run: Mutex::new(Some(program)),
        runs: Mutex::default(),
        free: Mutex::new((0..SLOTS).rev().collect()),
        asked: Mutex::default(),
        queue: Mutex::default(),
        bell: rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        )?,
        own: Own::default(),
        bound: Mutex::default(),
        known: Known::default(),
        threads: Threads::default(),
        lookups: Mutex::new(lookups),
        root: std::process::id(),
    });
    let start = |name: &str, run: Box<dyn FnOnce() + Send>| {
        thread::Builder::new().name(name.into()).spawn(move || {
            // A panic must not leave calls waiting: the keeper refuses them when this process is gone.
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            log::error!("the sandbox cannot go on: {ended:?}");
            std::process::abort();
        })
    };
    if server.writable.is_some() {
        let runs = execute::runners(|name, run| {
            let server = Arc::clone(&server);
            start(name, Box::new(move || run(server))).map(drop)
        })?;
        *lock(&server.runs) = Some(runs);
    }
    let (held, looker) = (Arc::clone(&server), Arc::clone(&server));
    start(
        "held",
        Box::new(move || {
            process::own_directory();
            DOES.set(true);
            super::held::run(&held);
        }),
    )?;
    start("who", Box::new(move || lookups::run(&looker, &to_look_up)))?;
    start(
        "calls",
        Box::new(move || {
            process::own_directory();
            DOES.set(true);
            server.receive();
            loop {
                thread::park();
            }
        }),
    )?;
    Ok(())
}

impl Server {
    /// Receives calls as long as there is somebody who can make them.
    fn receive(self: &Arc<Self>) {
        loop {
            let Some(slot) = lock(&self.free).pop() else {
                // Every slot waits; the last that comes goes first.
                thread::sleep(std::time::Duration::from_millis(1));
                continue;
            };
            match self.table.receive(&self.listener, slot) {
                Ok(notice) => self.take(notice, slot),
                Err(error) => {
                    lock(&self.free).push(slot);
                    match error.raw_os_error() {
                        // Its last process has ended; the kernel would say so again and again.
                        Some(libc::ENOENT) if self.listener.is_over() => return,
                        // The caller was killed before.
                        Some(libc::ENOENT | libc::EINTR) => {}
                        _ => {
                            log::debug!("no more calls: {error}");
                            thread::sleep(std::time::Duration::from_millis(10));
                        }
                    }
                }
            }
        }
    }

    fn take(self: &Arc<Self>, notice: Notice, slot: usize) {
        let prepared = match Call::of(&notice) {
            Some(call) => {
                let was_judged = |cookie| lock(&self.bound).contains(&cookie);
                let private = |number| self.judging.gate.private_file(number);
                let around = Around {
                    threads: &self.threads,
                    own: &self.own,
                    private: &private,
                };
                let writable = self.writable.as_deref();
                prepare::prepare(call, notice.thread, around, was_judged, writable)
            }
            None => Err(libc::ENOSYS),
        };
        let Prepared {
            thread_fd,
            process,
            identity,
            mut task,
            mut proposal,
        } = match prepared {
            Ok(prepared) => prepared,
            Err(0) => return self.answer(notice.id, slot, Answer::Done(0)),
            Err(number) => return self.answer(notice.id, slot, Answer::Error(number)),
        };
        // What was read was this thread's if it still waits.
        if !self.listener.waits(notice.id) {
            return self.release(slot);
        }
        if let Task::Execute(program) = &mut task {
            if lock(&self.not_run)
                .take_if(|pid| *pid == notice.thread)
                .is_some()
            {
                program.is_free();
            }
            proposal = program.next(&self.runnable);
        }
        let is_much = lock(&self.free).len() < RESERVE;
        let pending = Pending {
            id: notice.id,
            slot,
            thread: notice.thread,
            thread_fd,
            process,
            identity,
            task,
            detoured: None,
            begins: None,
        };
        match proposal {
            None => self.carry_on(pending),
            Some(_) if is_much => self.answer(notice.id, slot, Answer::Error(libc::EAGAIN)),
            Some(proposal) => self.propose(pending, proposal),
        }
    }

    /// Answers a call and forgets it.
    pub(super) fn answer(&self, id: u64, slot: usize, answer: Answer) {
        match self.listener.answer(id, answer) {
            Ok(()) => {}
            // Killed, or refused by the keeper.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => log::warn!("a call cannot be answered: {error}"),
        }
        self.release(slot);
    }

    /// Answers a call with a file.
    pub(super) fn answer_with(&self, id: u64, slot: usize, file: &OwnedFd, closes_on_exec: bool) {
        match self.listener.answer_with(id, file.as_fd(), closes_on_exec) {
            Ok(()) => self.release(slot),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => self.release(slot),
            Err(error) => {
                let number = error.raw_os_error().unwrap_or(libc::EMFILE);
                self.answer(id, slot, Answer::Error(number));
            }
        }
    }

    /// Forgets a call that nobody waits for, and what was learnt of its thread meanwhile.
    pub(super) fn forget(&self, pending: Pending) {
        for number in [pending.process, pending.thread] {
            self.known.forget(number);
        }
        self.release(pending.slot);
    }

    /// Forgets a call that nobody waits for.
    pub(super) fn release(&self, slot: usize) {
        self.table.clear(slot);
        lock(&self.free).push(slot);
    }

    pub(super) fn hand_over(&self, job: Job) {
        lock(&self.queue).push_back(job);
        self.ring();
    }

    pub(super) fn ring(&self) {
        // It can only fail when it has rung already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// The jobs so far for the thread that holds what waits. For those that come meanwhile the bell rings again.
    pub(super) fn jobs(&self) -> VecDeque<Job> {
        std::mem::take(&mut *lock(&self.queue))
    }
}

/// When fewer slots than this are free, nobody is asked any more.
const RESERVE: usize = 64;
