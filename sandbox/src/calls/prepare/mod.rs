//! From registers to a task and the act that is to be judged: everything that is read of the program is read here, once.

mod reader;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::address::{Kind, Name, Purpose, decode, unix_address};
use super::call::{Call, Span};
use super::control::{Control, LONGEST_BYTES, number_of};
use super::files::Looked;
use super::task::{Accept, Connect, Send, SendMany, Task, is_nonblocking, until};
use super::unix::{Own, Place, Spot};
use crate::act::{Act, Doing, Target, Transport, Who};
use crate::sys::identity::{self, Identity};
use crate::sys::threads::Threads;
use crate::sys::{memory, process, socket};

use self::reader::Reader;

/// A call that was read: what to do, and what to ask before.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) thread_fd: Arc<OwnedFd>,
    /// See `Pending`.
    pub(super) process: u32,
    /// As whom it is done, if not as we are.
    pub(super) identity: Option<Identity>,
    pub(super) task: Task,
    /// `None`: nothing is to be judged.
    pub(super) proposal: Option<Proposal>,
}

/// An act without who does it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) doing: Doing,
    pub(super) transport: Transport,
    pub(super) target: Target,
}

impl Proposal {
    /// The act, if `who` does it.
    pub(super) fn act(self, who: Arc<Who>) -> Act {
        Act {
            who,
            doing: self.doing,
            transport: self.transport,
            target: self.target,
        }
    }
}

type Number = i32;

/// What is known of threads, and of files of Unix sockets.
#[derive(Clone, Copy)]
pub(super) struct Around<'a> {
    pub(super) threads: &'a Threads,
    /// Those that programs of the sandbox have bound.
    pub(super) own: &'a Own,
    /// By device and number: those that nobody inside may reach, and how the gate calls them.
    pub(super) private: &'a dyn Fn((u64, u64)) -> Option<PathBuf>,
}

/// Reads what a call is about. `listens` says whether a socket's address was judged when it was bound.
///
/// # Errors
/// The number of the error that the call gets.
pub(super) fn prepare(
    call: Call,
    thread: u32,
    around: Around<'_>,
    was_judged: impl Fn(u64) -> bool,
    writable: Option<&[PathBuf]>,
) -> Result<Prepared, Number> {
    let (thread_fd, told) = around.threads.get(thread).map_err(number_of)?;
    let identity = Identity::of(thread, told).map_err(number_of)?;
    let reader = Reader {
        thread,
        thread_fd: thread_fd.as_fd(),
        around: Some(around),
    };
    let (task, proposal) = match call {
        Call::Socket {
            domain,
            kind,
            protocol,
        } => {
            let kind = Kind {
                domain,
                kind: kind & 0xf,
                protocol,
            };
            let proposal = Proposal {
                doing: Doing::Create,
                transport: kind.transport(),
                target: Target::Nobody,
            };
            (Task::Create, Some(proposal))
        }
        Call::Connect { socket, address } => reader.connect(socket, address)?,
        Call::Bind { socket, address } => reader.bind(socket, address, writable)?,
        Call::Listen { socket, backlog } => {
            let (socket, kind) = reader.socket(socket)?;
            let judged =
                !kind.is_internet() || socket::cookie(socket.as_fd()).is_ok_and(was_judged);
            let address = socket::own_address(socket.as_fd()).map_err(number_of)?;
            let proposal = decode(&address).filter(|_| !judged);
            let proposal = proposal.map(|address| kind.act(Doing::Bind, Target::Internet(address)));
            (Task::Listen { socket, backlog }, proposal)
        }
        Call::Accept {
            socket,
            address,
            length,
            flags,
        } => {
            let (socket, _) = reader.socket(socket)?;
            let blocks = !is_nonblocking(socket.as_fd());
            let until = blocks
                .then(|| until(socket.as_fd(), libc::SO_RCVTIMEO))
                .flatten();
            (
                Task::Accept(Accept {
                    socket,
                    address,
                    length,
                    flags,
                    blocks,
                    until,
                }),
                None,
            )
        }
        Call::SendTo {
            socket,
            data,
            flags,
            address,
        } => {
            let (socket, kind) = reader.socket(socket)?;
            let named = match address.at {
                0 => Vec::new(),
                _ => reader.bytes(address)?,
            };
            let data = vec![(data.at, data.length)];
            let (send, proposal) =
                reader.send(socket, kind, &named, data, Control::default(), flags)?;
            (Task::Send(send), proposal)
        }
        Call::SendMsg {
            socket,
            message,
            flags,
        } => {
            let (socket, kind) = reader.socket(socket)?;
            let message = reader.message(message)?;
            let (send, proposal) = reader.whole(socket, kind, &message, flags)?;
            (Task::Send(send), proposal)
        }
        Call::Change(change) => {
            let mut looked = change.look(thread, thread_fd.as_fd())?;
            let proposal = writing(&mut looked, writable);
            (Task::Change(looked), proposal)
        }
        Call::Execute(execute) => {
            let program = execute.look(thread, thread_fd.as_fd())?;
            (Task::Execute(program), None)
        }
        Call::SendMany {
            socket,
            messages,
            count,
            flags,
        } => {
            let (socket, kind) = reader.socket(socket)?;
            if count == 0 {
                return Err(0);
            }
            let message = reader.message(messages)?;
            let (first, proposal) = reader.whole(socket, kind, &message, flags)?;
            let named = message.name;
            let many = SendMany {
                first,
                kind,
                messages,
                count,
                flags,
                named,
            };
            (Task::SendMany(many), proposal)
        }
    };
    Ok(Prepared {
        process: told.map_or(thread, |told| told.process),
        thread_fd,
        identity,
        task,
        proposal,
    })
}

/// The next path of a change that is to be judged, if one is left.
pub(super) fn writing(looked: &mut Looked, writable: Option<&[PathBuf]>) -> Option<Proposal> {
    loop {
        let path = looked.paths.pop()?;
        if !is_free(&path, writable.unwrap_or_default()) {
            return Some(write(path));
        }
    }
}

fn write(path: PathBuf) -> Proposal {
    Proposal {
        doing: Doing::Write,
        transport: Transport::File,
        target: Target::Path(path),
    }
}

/// Whether a path needs no question: it is in a directory that the user gave, or a device that keeps nothing.
fn is_free(path: &Path, writable: &[PathBuf]) -> bool {
    const DEVICES: &[&str] = &[
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/tty",
        "/dev/ptmx",
        "/dev/pts",
    ];
    let mut devices = DEVICES.iter().map(Path::new);
    devices.any(|device| path.starts_with(device))
        || writable.iter().any(|directory| path.starts_with(directory))
}

/// A further message of sendmmsg: what to send if it goes where the first one went.
///
/// # Errors
/// The error of this message; `None` if it goes somewhere else, which is a question of its own.
pub(super) fn further(
    many: &SendMany,
    index: u32,
    thread: u32,
    thread_fd: BorrowedFd<'_>,
) -> Result<Send, Option<Number>> {
    let reader = Reader {
        thread,
        thread_fd,
        // It goes where the first one goes.
        around: None,
    };
    let at = many.messages.wrapping_add(u64::from(index) * ENTRY_BYTES);
    let message = reader.message(at).map_err(Some)?;
    if message.name != many.named {
        return Err(None);
    }
    let socket = many
        .first
        .socket
        .try_clone()
        .map_err(|error| Some(number_of(error)))?;
    let control = Control::of(many.kind, thread, thread_fd, &message.control).map_err(Some)?;
    let mut send = reader.plain(socket, many.kind, message.data, control, many.flags);
    send.to = many.first.to;
    send.blocks = false;
    Ok(send)
}

/// Length of `struct mmsghdr`.
const ENTRY_BYTES: u64 = size_of::<libc::mmsghdr>() as u64;
/// Where its `msg_len` stands.
pub(super) const SENT_AT: u64 = std::mem::offset_of!(libc::mmsghdr, msg_len) as u64;

/// Where the length of a message's entry stands.
pub(super) fn sent_at(messages: u64, index: u32) -> u64 {
    messages.wrapping_add(u64::from(index) * ENTRY_BYTES + SENT_AT)
}

fn unjudged(socket: OwnedFd, to: socket::Address) -> Task {
    Task::Bind {
        socket,
        to,
        is_judged: false,
    }
}

impl Kind {
    /// Whoever uses a socket of a family whose addresses nobody understands must be allowed to make one: it can have
    /// come from another process. `NETLINK_ROUTE` is made without a question.
    fn made(self) -> Option<Proposal> {
        let is_route = self.domain == libc::AF_NETLINK && self.protocol == 0;
        (!is_route).then(|| self.act(Doing::Create, Target::Nobody))
    }

    pub(super) fn act(self, doing: Doing, target: Target) -> Proposal {
        Proposal {
            doing,
            transport: self.transport(),
            target,
        }
    }
}

/// The peer of a connection that was taken, if it is to be judged.
pub(super) fn incoming(kind: Kind, peer: &socket::Address) -> Option<Proposal> {
    let peer = kind.is_internet().then(|| decode(peer)).flatten()?;
    Some(kind.act(Doing::Accept, Target::Internet(peer)))
}

#[cfg(test)]
mod tests;
