//! The threads that serve the calls, and what they share.

use std::cell::Cell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread;

use super::address::Kind;
use super::call::Call;
use super::execute::{self, Run};
use super::files::Made;
use super::prepare::{self, Around, Prepared, Proposal};
use super::task::{self, Pending, SendMany, Task, Turn, Wait};
use super::unix::{Own, Place};
use crate::act::Act;
use crate::gate::Verdict;
use crate::judging::Judging;
use crate::name::Name;
use crate::sys::identity::Identity;
use crate::sys::memory::Memory;
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
    writable: Option<Vec<PathBuf>>,
    pub(super) runnable: Vec<PathBuf>,
    /// Process id of the program until it runs: what the user has named is no question.
    not_run: Mutex<Option<u32>>,
    /// To the threads that follow what is run.
    runs: Mutex<Option<Sender<Run>>>,
    /// Slots of the table that are free.
    free: Mutex<Vec<usize>>,
    /// Calls that wait for a verdict.
    pub(super) asked: Mutex<HashMap<u64, Asked>>,
    /// For the thread that holds what waits.
    queue: Mutex<VecDeque<Job>>,
    /// Rings when there is something in `queue`, or somebody was asked.
    pub(super) bell: OwnedFd,
    own: Own,
    /// Sockets whose address was judged when they were bound.
    bound: Mutex<HashSet<u64>>,
    known: Known,
    threads: Threads,
    lookups: Mutex<Sender<(Pending, Proposal)>>,
    /// Process id of the supervisor.
    root: u32,
}

/// A call that waits for a verdict, and how it was proposed.
pub(super) struct Asked {
    pub(super) pending: Pending,
    /// The act and the names of its address, if somebody must know of it when it is allowed.
    act: Option<(Act, Vec<Name>)>,
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
    static DOES: Cell<bool> = const { Cell::new(false) };
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
    start(
        "who",
        Box::new(move || {
            for (pending, proposal) in to_look_up {
                looker.look_up(pending, proposal);
            }
        }),
    )?;
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

    /// Has an act judged.
    pub(super) fn propose(self: &Arc<Self>, pending: Pending, proposal: Proposal) {
        let who = self.known.seen(pending.process);
        let Some(who) = who else {
            // Nobody takes it only if this process ends.
            let _ = lock(&self.lookups).send((pending, proposal));
            return;
        };
        if !self.listener.waits(pending.id) {
            return self.release(pending.slot);
        }
        self.ask(pending, &proposal.act(who));
    }

    fn look_up(self: &Arc<Self>, pending: Pending, proposal: Proposal) {
        let waits = || self.listener.waits(pending.id);
        let known = &self.known;
        let mut looked = known.look(pending.process, self.root, waits);
        if looked.is_err() && pending.process != pending.thread {
            // The first thread of its process has ended, and shows neither file nor command line any more.
            looked = known.look(pending.thread, self.root, waits);
        }
        if !self.listener.waits(pending.id) {
            for number in [pending.process, pending.thread] {
                self.known.forget(number);
            }
            return self.release(pending.slot);
        }
        match looked {
            Ok(who) => self.ask(pending, &proposal.act(who)),
            Err(error) => {
                log::debug!("thread {} cannot be looked at: {error}", pending.thread);
                self.answer(pending.id, pending.slot, Answer::Error(libc::EPERM));
            }
        }
    }

    fn ask(self: &Arc<Self>, mut pending: Pending, act: &Act) {
        if let Some(to) = self.judging.detour_of(act) {
            match pending.task.go_to(to) {
                Ok(()) => {
                    pending.detoured = Some((Arc::clone(&act.who), act.transport));
                    return self.carry_on(pending);
                }
                Err(number) => return self.answer(pending.id, pending.slot, Answer::Error(number)),
            }
        }
        let id = pending.id;
        // A name can die before the question is answered.
        let names = || self.judging.gate.names_of(act);
        let kept = self
            .judging
            .permit
            .is_some()
            .then(|| (act.clone(), names()));
        lock(&self.asked).insert(id, Asked { pending, act: kept });
        let server = Arc::clone(self);
        self.judging
            .gate
            .judge(act, move |verdict| server.judged(id, verdict));
        if lock(&self.asked).contains_key(&id) {
            // Whoever holds what waits looks whether it still does.
            self.ring();
        }
    }

    fn judged(self: &Arc<Self>, id: u64, verdict: Verdict) {
        if DOES.get() {
            self.decided(id, verdict);
        } else {
            self.hand_over(Job::Judged(id, verdict));
        }
    }

    /// Does what was allowed, and refuses what was not.
    pub(super) fn decided(self: &Arc<Self>, id: u64, verdict: Verdict) {
        // Whoever is gone was taken out.
        let Some(Asked { mut pending, act }) = lock(&self.asked).remove(&id) else {
            return;
        };
        if let (Verdict::Allow, Some((act, names)), Some(permit)) =
            (verdict, act, &self.judging.permit)
        {
            pending.begins = permit(&act, &names);
        }
        match (verdict, &mut pending.task) {
            (Verdict::Allow, Task::Change(looked)) => {
                match prepare::writing(looked, self.writable.as_deref()) {
                    // A change of two names has two questions.
                    Some(next) => self.propose(pending, next),
                    None => self.carry_on(pending),
                }
            }
            (Verdict::Allow, _) => self.carry_on(pending),
            (Verdict::Deny, Task::Accepted { .. }) => self.turn_away(pending),
            (Verdict::Deny, _) => {
                self.answer(id, pending.slot, Answer::Error(libc::EACCES));
            }
        }
    }

    /// Closes a connection that was refused, and waits for the next.
    fn turn_away(self: &Arc<Self>, mut pending: Pending) {
        let Task::Accepted {
            call, connection, ..
        } = pending.task
        else {
            return self.answer(pending.id, pending.slot, Answer::Error(libc::EACCES));
        };
        // The peer sees a reset, as from a port where nobody listens.
        let _ =
            rustix::net::sockopt::set_socket_linger(&connection, Some(std::time::Duration::ZERO));
        drop(connection);
        pending.task = Task::Accept(call);
        // Not from here: the next one may be refused too, and so on.
        self.hand_over(Job::Again(Box::new(pending)));
    }

    /// Does a task as far as it goes without waiting.
    pub(super) fn carry_on(self: &Arc<Self>, mut pending: Pending) {
        if let Task::Execute(program) = &mut pending.task {
            // A script has an interpreter, which is a question of its own.
            return match program.next(&self.runnable) {
                Some(next) => self.propose(pending, next),
                None => self.run(pending),
            };
        }
        self.tell_of_detour(&mut pending);
        let identity = pending.identity.as_ref();
        let turn = match &mut pending.task {
            Task::Create => Turn::Answer(Answer::Continue), // CONTINUE: socket(2) is judged by its registers
            Task::Connect(connect) => connect.turn(identity),
            Task::Bind {
                socket,
                to,
                is_judged,
            } => {
                let result = crate::sys::socket::bind(socket.as_fd(), to);
                // If it fails, the socket may get an address that nobody has judged.
                if *is_judged && result.is_ok() {
                    self.was_bound(socket.as_fd());
                }
                Turn::of(result)
            }
            Task::BindPath { socket, path } => {
                self.own_file(task::bind_path(pending.thread, socket.as_fd(), path))
            }
            Task::BindSpot { socket, spot } => {
                self.own_file(task::bind_spot(pending.thread, socket.as_fd(), spot))
            }
            Task::Listen { socket, backlog } => {
                let listen = || rustix::net::listen(&*socket, *backlog);
                Turn::of(Identity::act(identity, listen).map_err(Into::into))
            }
            Task::Accept(call) => match call.turn() {
                Ok((connection, peer)) => return self.accepted(pending, connection, peer),
                Err(turn) => turn,
            },
            Task::Accepted { .. } => return self.give(pending),
            Task::Change(looked) => match looked.make() {
                Ok(Made::File {
                    file,
                    closes_on_exec,
                }) => {
                    return self.answer_with(pending.id, pending.slot, &file, closes_on_exec);
                }
                Ok(Made::Later) => Turn::Wait(Wait::A_TICK),
                Ok(Made::Done) => Turn::of(Ok(())),
                Err(error) => Turn::of(Err(error)),
            },
            // Done above.
            Task::Execute(_) => Turn::error(libc::ENOSYS),
            Task::Send(send) => send.turn(pending.thread, pending.thread_fd.as_fd(), identity),
            Task::SendMany(_) => self.send_many(&mut pending),
        };
        self.tell_of_detour(&mut pending);
        tell_of_connection(&mut pending, &turn);
        match turn {
            Turn::Answer(answer) => {
                let (id, slot) = (pending.id, pending.slot);
                // Our copy of the socket first: what the program closes then is closed, and its port free.
                drop(pending);
                self.answer(id, slot, answer);
            }
            Turn::Wait(wait) => self.hand_over(Job::Hold(Box::new(pending), wait)),
        }
    }

    /// A program of the sandbox made the file of a Unix socket, if that is known.
    fn own_file(&self, bound: io::Result<Option<Place>>) -> Turn {
        Turn::of(bound.map(|place| {
            if let Some(place) = place {
                self.own.add(place);
            }
        }))
    }

    /// Has a program run by a thread that follows it.
    fn run(&self, pending: Pending) {
        let who = self.known.seen(pending.process);
        let runs = lock(&self.runs);
        if let (Some(runs), Some(run)) = (&*runs, Run::of(pending, who)) {
            // Nobody takes it only if this process ends.
            let _ = runs.send(run);
        }
    }

    fn was_bound(&self, socket: BorrowedFd<'_>) {
        if let Ok(cookie) = crate::sys::socket::cookie(socket) {
            let mut bound = lock(&self.bound);
            if bound.len() >= MOST_BOUND {
                bound.clear();
            }
            bound.insert(cookie);
        }
    }

    /// Says which socket takes a detour, as soon as it has an address: before the program can send anything.
    fn tell_of_detour(&self, pending: &mut Pending) {
        let Some((who, transport)) = &pending.detoured else {
            return;
        };
        let own = pending.task.socket().and_then(own_of);
        if let (Some(own), Some(tell)) = (own, &self.judging.detoured) {
            tell(who, *transport, own);
            pending.detoured = None;
        }
    }

    fn accepted(
        self: &Arc<Self>,
        mut pending: Pending,
        connection: OwnedFd,
        peer: crate::sys::socket::Address,
    ) {
        let Task::Accept(call) = pending.task else {
            return self.answer(pending.id, pending.slot, Answer::Error(libc::EINVAL));
        };
        let proposal = Kind::of(connection.as_fd()).map(|kind| prepare::incoming(kind, &peer));
        pending.task = Task::Accepted {
            call,
            connection,
            peer,
        };
        match proposal {
            Ok(None) => self.carry_on(pending),
            Ok(Some(proposal)) => self.propose(pending, proposal),
            Err(_) => self.turn_away(pending),
        }
    }

    /// Gives the program a connection that was allowed.
    fn give(&self, pending: Pending) {
        let (id, slot) = (pending.id, pending.slot);
        let Task::Accepted {
            call,
            connection,
            peer,
        } = pending.task
        else {
            return self.answer(id, slot, Answer::Error(libc::EINVAL));
        };
        let memory = Memory::open(pending.thread);
        if !self.listener.waits(id) {
            return self.release(slot);
        }
        let told = match memory {
            Ok(memory) => call.tell(&memory, pending.thread, &peer),
            Err(_) => Err(libc::EFAULT),
        };
        if let Err(number) = told {
            return self.answer(id, slot, Answer::Error(number));
        }
        let closes = call.flags & libc::SOCK_CLOEXEC != 0;
        self.answer_with(id, slot, &connection, closes);
    }

    fn answer_with(&self, id: u64, slot: usize, file: &OwnedFd, closes_on_exec: bool) {
        match self.listener.answer_with(id, file.as_fd(), closes_on_exec) {
            Ok(()) => self.release(slot),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => self.release(slot),
            Err(error) => {
                let number = error.raw_os_error().unwrap_or(libc::EMFILE);
                self.answer(id, slot, Answer::Error(number));
            }
        }
    }

    /// Sends several messages: the first as any other, the next ones as long as nothing is in their way.
    fn send_many(&self, pending: &mut Pending) -> Turn {
        let (thread, thread_fd) = (pending.thread, pending.thread_fd.as_fd());
        let identity = pending.identity.as_ref();
        let Task::SendMany(many) = &mut pending.task else {
            return Turn::error(libc::EINVAL);
        };
        let sent = match many.first.turn(thread, thread_fd, identity) {
            Turn::Answer(Answer::Done(sent)) => sent,
            other => return other,
        };
        let memory = Memory::open(thread);
        if !self.listener.waits(pending.id) {
            return Turn::error(libc::EINTR);
        }
        let Ok(memory) = memory else {
            return Turn::error(libc::EFAULT);
        };
        let tell = |many: &SendMany, index: u32, sent: i64| {
            let at = prepare::sent_at(many.messages, index);
            memory.write(at, &(sent as u32).to_ne_bytes()).is_ok()
        };
        if !tell(many, 0, sent) {
            return Turn::error(libc::EFAULT);
        }
        let mut done = 1;
        while done < many.count.min(MOST_AT_ONCE) {
            let next = prepare::further(many, done, thread, thread_fd);
            let Ok(mut send) = next else { break };
            match send.turn(thread, thread_fd, identity) {
                Turn::Answer(Answer::Done(sent)) if tell(many, done, sent) => done += 1,
                _ => break,
            }
        }
        Turn::Answer(Answer::Done(i64::from(done)))
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

    /// Forgets a call that nobody waits for.
    pub(super) fn release(&self, slot: usize) {
        self.table.clear(slot);
        lock(&self.free).push(slot);
    }

    fn hand_over(&self, job: Job) {
        lock(&self.queue).push_back(job);
        self.ring();
    }

    fn ring(&self) {
        // It can only fail when it has rung already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// The jobs so far for the thread that holds what waits. For those that come meanwhile the bell rings again.
    pub(super) fn jobs(&self) -> VecDeque<Job> {
        std::mem::take(&mut *lock(&self.queue))
    }
}

/// Says which connection a call has made, before the program can send anything by it.
fn tell_of_connection(pending: &mut Pending, turn: &Turn) {
    let Some(begins) = pending.begins.take() else {
        return;
    };
    // That is one of another call.
    let is_old = matches!(
        turn,
        Turn::Answer(Answer::Error(libc::EISCONN | libc::EALREADY))
    );
    let own = pending.task.socket().filter(|_| !is_old);
    begins.tell(own.and_then(own_of));
}

/// The address and port that a socket has of its own.
fn own_of(socket: BorrowedFd<'_>) -> Option<SocketAddr> {
    let own = crate::sys::socket::own_address(socket).ok()?;
    super::address::decode(&own).filter(|own| own.port() != 0)
}

/// When fewer slots than this are free, nobody is asked any more.
const RESERVE: usize = 64;
/// So many messages of sendmmsg are sent in one go; the program is told how many were, and goes on.
const MOST_AT_ONCE: u32 = 64;
/// Sockets whose judged address is remembered; others are judged again when they listen.
const MOST_BOUND: usize = 65_536;
