//! The keeper: the process that the user started. It sees to it that the sandbox fails closed.
//!
//! It has the listener too. While the supervisor is stopped it refuses the calls that wait, those that the
//! supervisor has taken already as well; they stand in the shared table. When the supervisor is gone it
//! refuses what waits and closes the listener: then the kernel refuses every further call (`ENOSYS`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::sys::process::{self, Fate, Signals};
use crate::sys::seccomp::{Answer, Listener};
use crate::sys::table::Table;

/// The signals that the keeper takes one by one.
pub(crate) const SIGNALS: &[i32] = &[
    libc::SIGCHLD,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Keeps the sandbox until the program has ended; returns the exit code.
///
/// # Errors
/// The system's.
pub(crate) fn keep(
    supervisor: u32,
    channel: OwnedFd,
    table: &Table,
    signals: &Signals,
    tell: fn(&str),
) -> io::Result<u8> {
    let mut keeper = Keeper {
        supervisor: Some(supervisor),
        channel: Some(channel),
        listener: None,
        is_stopped: false,
        table,
        tell,
    };
    loop {
        if let Some(code) = keeper.look()? {
            return Ok(code);
        }
        keeper.wait(signals.fd())?;
        while let Some((number, was_sent)) = signals.next() {
            // What the terminal sends has reached the program already.
            if number != libc::SIGCHLD && was_sent {
                keeper.pass_on(number);
            }
        }
    }
}

struct Keeper<'a> {
    /// `None` when it has ended.
    supervisor: Option<u32>,
    /// Brings the listener; `None` when it has.
    channel: Option<OwnedFd>,
    listener: Option<Listener>,
    is_stopped: bool,
    table: &'a Table,
    tell: fn(&str),
}

impl Keeper<'_> {
    /// Looks after the children; returns the exit code when all is over.
    fn look(&mut self) -> io::Result<Option<u8>> {
        loop {
            let (pid, fate) = match process::wait_any(false) {
                Ok(Some(child)) => child,
                Ok(None) => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {
                    return Ok(Some(LOST));
                }
                Err(error) => return Err(error),
            };
            if self.supervisor == Some(pid) {
                match fate {
                    Fate::Stopped => self.stopped(),
                    Fate::Continued => self.is_stopped = false,
                    Fate::Ended(status) => {
                        self.supervisor = None;
                        if let Some(code) = self.alone(status) {
                            return Ok(Some(code));
                        }
                    }
                }
            } else if let Fate::Ended(status) = fate
                && pid == self.program()
            {
                return Ok(Some(process::code_of(status)));
            }
        }
    }

    /// The supervisor is stopped: what waits is refused.
    fn stopped(&mut self) {
        self.is_stopped = true;
        (self.tell)("the supervisor is stopped: network acts of the program are refused");
        if let Some(listener) = &self.listener {
            refuse_waiting(listener, self.table);
        }
    }

    /// The supervisor has ended. If it ended well the exit code is known.
    fn alone(&mut self, status: i32) -> Option<u8> {
        // Acquire: pairs with the supervisor's Release.
        if self.table.head().ended.load(Ordering::Acquire) != 0 {
            return Some(process::code_of(
                self.table.head().status.load(Ordering::Relaxed),
            ));
        }
        if let Some(listener) = self.listener.take() {
            refuse_waiting(&listener, self.table);
        }
        if self.program() == 0 || !libc::WIFSIGNALED(status) {
            return Some(process::code_of(status));
        }
        (self.tell)(&format!(
            "the supervisor was killed by signal {}: the program goes on, and its network acts are refused",
            libc::WTERMSIG(status)
        ));
        None
    }

    /// Waits for a signal, the listener's coming, or a call while the supervisor is stopped.
    fn wait(&mut self, signals: BorrowedFd<'_>) -> io::Result<()> {
        let listener = self.listener.as_ref().filter(|_| self.is_stopped);
        let mut fds = vec![PollFd::from_borrowed_fd(signals, PollFlags::IN)];
        let has_channel = self.channel.is_some();
        if let Some(channel) = &self.channel {
            fds.push(PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN));
        }
        if let Some(listener) = listener {
            fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_called = listener.is_some()
            && fds
                .last()
                .is_some_and(|fd| fd.revents().contains(PollFlags::IN));
        let is_told = has_channel && !fds[1].revents().is_empty();
        if is_called
            && let Some(listener) = listener
            && let Ok(notice) = listener.receive()
        {
            let _ = listener.answer(notice.id, Answer::Error(libc::EPERM));
        }
        if is_told && let Some(channel) = self.channel.take() {
            self.listener = take(&channel);
        }
        Ok(())
    }

    fn pass_on(&self, signal: i32) {
        let program = self.program();
        if program != 0 {
            process::signal_child(program, signal);
        } else if let Some(supervisor) = self.supervisor {
            process::signal_child(supervisor, libc::SIGKILL);
        }
    }

    fn program(&self) -> u32 {
        self.table.head().program.load(Ordering::Acquire) // pairs with the supervisor's Release
    }
}

/// Exit code if nobody can say how the program ended.
const LOST: u8 = 255;

fn refuse_waiting(listener: &Listener, table: &Table) {
    for id in table.waiting() {
        // It may have been answered in this moment.
        let _ = listener.answer(id, Answer::Error(libc::EPERM));
    }
}

fn take(channel: &OwnedFd) -> Option<Listener> {
    let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let mut byte = [0];
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    recvmsg(channel, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next().map(Listener::from_fd),
        _ => None,
    })
}
