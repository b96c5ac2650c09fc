//! What was allowed is done.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::address::Kind;
use super::execute::Run;
use super::files::Made;
use super::prepare;
use super::serve::{Job, Server};
use super::task::{self, Pending, SendMany, Task, Turn, Wait};
use super::unix::Place;
use crate::sys::identity::Identity;
use crate::sys::lock;
use crate::sys::memory::Memory;
use crate::sys::seccomp::Answer;

impl Server {
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

    /// Closes a connection that was refused, and waits for the next.
    pub(super) fn turn_away(self: &Arc<Self>, mut pending: Pending) {
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

/// The most messages of sendmmsg that are sent in one go; the program is told how many were, and goes on.
const MOST_AT_ONCE: u32 = 64;
/// Sockets whose judged address is remembered; others are judged again when they listen.
const MOST_BOUND: usize = 65_536;
