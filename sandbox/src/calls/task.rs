//! What is done for the program: each task is on its own copies, and never waits in the kernel.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::address::{Kind, encode_like};
use super::control::{Control, number_of};
use super::execute::Program;
use super::files::Looked;
use super::unix::{Home, Place, Spot};
use crate::act::{Transport, Who};
use crate::judging::Begins;
use crate::sys::identity::Identity;
use crate::sys::seccomp::Answer;
use crate::sys::socket::{self, Address};
use crate::sys::{diag, lock, memory, process};

/// A call whose arguments were copied and judged.
#[derive(Debug)]
pub(super) struct Pending {
    /// Names the call to the kernel.
    pub(super) id: u64,
    /// Where it stands in the table.
    pub(super) slot: usize,
    /// The thread that made it.
    pub(super) thread: u32,
    /// Names the thread for good.
    pub(super) thread_fd: Arc<OwnedFd>,
    /// Its process; on kernels that do not say it, the thread again.
    pub(super) process: u32,
    /// As whom it is done, if not as we are.
    pub(super) identity: Option<Identity>,
    /// What is to be done.
    pub(super) task: Task,
    /// It goes somewhere else than the program wrote; whose it is and by which protocol, until that is told.
    pub(super) detoured: Option<(Arc<Who>, Transport)>,
    /// Who is to be told of the connection that it makes, until that is told.
    pub(super) begins: Option<Begins>,
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Task {
    /// The program makes the socket itself: its kind stood in registers.
    Create,
    Connect(Connect),
    /// bind to an address without a file.
    Bind {
        socket: OwnedFd,
        to: Address,
        /// The address is judged before, so that it need not be when the socket listens.
        is_judged: bool,
    },
    /// bind to a path.
    BindPath {
        socket: OwnedFd,
        path: Vec<u8>,
    },
    /// bind to a path whose file is judged like every change of files.
    BindSpot {
        socket: OwnedFd,
        spot: Spot,
    },
    Listen {
        socket: OwnedFd,
        backlog: i32,
    },
    Accept(Accept),
    /// A connection that was taken and may be given to the program.
    Accepted {
        call: Accept,
        connection: OwnedFd,
        peer: Address,
    },
    /// A change of files; what of its paths is still to be judged stands in it.
    Change(Looked),
    /// A program is run; what of its files is still to be judged stands in it.
    Execute(Program),
    Send(Send),
    SendMany(SendMany),
}

#[derive(Debug)]
pub(super) struct Connect {
    pub(super) socket: OwnedFd,
    pub(super) to: Address,
    /// Holds the file that `to` names.
    #[expect(
        dead_code,
        reason = "it keeps a number of ours from naming another file"
    )]
    pub(super) place: Option<Place>,
    /// The program waits until it is connected.
    pub(super) blocks: bool,
    /// Until when, by `SO_SNDTIMEO`.
    pub(super) until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Accept {
    pub(super) socket: OwnedFd,
    /// Where the program wants the address, and the address of its length; 0: nowhere.
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) flags: i32,
    pub(super) blocks: bool,
    pub(super) until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Send {
    pub(super) socket: OwnedFd,
    pub(super) is_stream: bool,
    /// To whom; `None`: to whom the socket is connected.
    pub(super) to: Option<Address>,
    /// Holds the file that `to` names.
    pub(super) place: Option<Place>,
    /// First connects (`MSG_FASTOPEN`).
    pub(super) connect: Option<Connect>,
    /// Where the data lies in the program's memory: address and length. Nothing is decided by data.
    pub(super) data: Vec<(u64, u64)>,
    pub(super) control: Control,
    pub(super) flags: i32,
    /// How much is sent already.
    pub(super) sent: u64,
    pub(super) blocks: bool,
    pub(super) until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct SendMany {
    pub(super) first: Send,
    pub(super) kind: Kind,
    pub(super) messages: u64,
    pub(super) count: u32,
    pub(super) flags: i32,
    /// To whom the first message goes, as it was written.
    pub(super) named: Vec<u8>,
}

/// How far a task came.
#[derive(Debug)]
pub(super) enum Turn {
    /// The call is answered so.
    Answer(Answer),
    /// It goes on when this has happened.
    Wait(Wait),
}

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    /// The socket can be read.
    pub(super) readable: bool,
    /// The socket can be written.
    pub(super) writable: bool,
    /// Until then; afterwards the call fails with this error.
    pub(super) until: Option<(Instant, i32)>,
}

impl Wait {
    /// To be tried again soon: nothing tells when.
    pub(super) const A_TICK: Self = Self {
        readable: false,
        writable: false,
        until: None,
    };
}

/// Sockets are asked and then accepted from by one thread at a time, so that nobody waits in accept for a
/// connection that another one took.
static ACCEPTS: Mutex<()> = Mutex::new(());

/// A socket is made not to wait by one thread at a time, so that none takes the other's flag for the program's.
static CONNECTS: Mutex<()> = Mutex::new(());

/// The most of a stream that is copied at once.
const CHUNK_BYTES: u64 = 256 * 1024;
/// Longest datagram that is copied; no protocol has longer ones without larger send buffers than usual.
const LONGEST_BYTES: u64 = 16 << 20;

impl Task {
    /// The socket that a waiting task waits for.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        Some(match self {
            Self::Create | Self::Change(_) | Self::Execute(_) => return None,
            Self::Connect(Connect { socket, .. })
            | Self::Bind { socket, .. }
            | Self::BindPath { socket, .. }
            | Self::BindSpot { socket, .. }
            | Self::Listen { socket, .. }
            | Self::Accept(Accept { socket, .. })
            | Self::Accepted {
                call: Accept { socket, .. },
                ..
            }
            | Self::Send(Send { socket, .. })
            | Self::SendMany(SendMany {
                first: Send { socket, .. },
                ..
            }) => socket.as_fd(),
        })
    }

    /// Has it go to another address. A socket that sends has an address of its own afterwards, by which it is known.
    ///
    /// # Errors
    /// The number of an error, also if the task goes nowhere.
    pub(super) fn go_to(&mut self, to: SocketAddr) -> Result<(), i32> {
        let send = match self {
            Self::Connect(connect) => {
                connect.to = encode_like(&connect.to, to);
                return Ok(());
            }
            Self::Send(send) | Self::SendMany(SendMany { first: send, .. }) => send,
            _ => return Err(libc::EACCES),
        };
        if let Some(connect) = &mut send.connect {
            connect.to = encode_like(&connect.to, to);
            return Ok(());
        }
        let Some(given) = &mut send.to else {
            return Err(libc::EACCES);
        };
        *given = encode_like(given, to);
        let socket = send.socket.as_fd();
        let own = socket::own_address(socket).map_err(number_of)?;
        let is_bound = super::address::decode(&own).is_some_and(|own| own.port() != 0);
        if is_bound {
            return Ok(());
        }
        let any = match own.bytes().first() {
            Some(family) if i32::from(*family) == libc::AF_INET6 => "[::]:0",
            _ => "0.0.0.0:0",
        };
        let any = any.parse().expect("it is an address");
        socket::bind(socket, &super::address::encode(any)).map_err(number_of)
    }

    /// Whether a signal may end it with nothing done: not if a connection would be lost with it.
    pub(super) fn is_interruptible(&self) -> bool {
        !matches!(self, Self::Accepted { .. })
    }

    /// What was done before a signal came, if that is an answer.
    pub(super) fn done_so_far(&self) -> Option<Answer> {
        match self {
            Self::Send(send) if send.sent > 0 => Some(Answer::Done(send.sent as i64)),
            _ => None,
        }
    }
}

impl Connect {
    /// One try. Every further try asks the kernel how far the first has come, as a restarted connect does.
    pub(super) fn turn(&self, identity: Option<&Identity>) -> Turn {
        let socket = self.socket.as_fd();
        let connect = || {
            let first = socket::connect(socket, &self.to);
            let goes_on = first.as_ref().err().and_then(io::Error::raw_os_error);
            // A peer on this machine has answered by now, and nobody needs to be woken for it.
            if goes_on == Some(libc::EINPROGRESS) && self.blocks && is_ready(socket, PollFlags::OUT)
            {
                return socket::connect(socket, &self.to);
            }
            first
        };
        let result = without_waiting(socket, self.blocks, || Identity::act(identity, connect));
        match result.map_err(number_of) {
            Ok(()) => Turn::Answer(Answer::Done(0)),
            Err(libc::EINPROGRESS | libc::EALREADY) if self.blocks => {
                Turn::wait(false, true, self.until, libc::EINPROGRESS)
            }
            // A Unix socket whose listener's queue is full: nothing tells when it is not.
            Err(libc::EAGAIN) if self.blocks => Turn::wait(false, false, self.until, libc::EAGAIN),
            Err(number) => Turn::Answer(Answer::Error(number)),
        }
    }
}

impl Accept {
    /// One try.
    ///
    /// # Errors
    /// What to do instead of giving the connection.
    pub(super) fn turn(&self) -> Result<(OwnedFd, Address), Turn> {
        let socket = self.socket.as_fd();
        let flags = self.flags & (libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
        if flags != self.flags {
            return Err(Turn::error(libc::EINVAL));
        }
        let _one = lock(&ACCEPTS);
        // What does not listen fails at once.
        let listens = socket::option(socket, libc::SO_ACCEPTCONN).is_ok_and(|value| value != 0);
        if listens && !is_ready(socket, PollFlags::IN) {
            return Err(if self.blocks {
                Turn::wait(true, false, self.until, libc::EAGAIN)
            } else {
                Turn::error(libc::EAGAIN)
            });
        }
        socket::accept(socket, flags | libc::SOCK_CLOEXEC)
            .map_err(|error| Turn::error(number_of(error)))
    }

    /// Writes the peer's address where the program wants it.
    ///
    /// # Errors
    /// `EFAULT`, `EINVAL`.
    pub(super) fn tell(
        &self,
        memory: &memory::Memory,
        thread: u32,
        peer: &Address,
    ) -> Result<(), i32> {
        if self.address == 0 {
            return Ok(());
        }
        let mut room = [0; 4];
        memory::read(thread, self.length, &mut room).map_err(number_of)?;
        let room = i32::from_ne_bytes(room);
        let room = usize::try_from(room).map_err(|_| libc::EINVAL)?;
        let bytes = peer.bytes();
        let part = &bytes[..bytes.len().min(room)];
        let length = (bytes.len() as u32).to_ne_bytes();
        let written = memory.write(self.address, part);
        written
            .and_then(|()| memory.write(self.length, &length))
            .map_err(|_| libc::EFAULT)
    }
}

impl Send {
    /// One try: what fits, at most [`CHUNK_BYTES`] of a stream.
    pub(super) fn turn(
        &mut self,
        thread: u32,
        thread_fd: BorrowedFd<'_>,
        identity: Option<&Identity>,
    ) -> Turn {
        if let Some(connect) = &self.connect {
            match connect.turn(identity) {
                Turn::Answer(Answer::Done(_)) => self.connect = None,
                // MSG_FASTOPEN on a socket that has a connection sends.
                Turn::Answer(Answer::Error(libc::EISCONN)) => self.connect = None,
                other => return other,
            }
        }
        let total: u64 = self.data.iter().map(|(_, length)| length).sum();
        let left = total - self.sent;
        if !self.is_stream && left > LONGEST_BYTES {
            return Turn::error(libc::EMSGSIZE);
        }
        let chunk = match self.copy(
            thread,
            left.min(if self.is_stream { CHUNK_BYTES } else { left }),
        ) {
            Ok(chunk) => chunk,
            Err(number) => return self.ended(number),
        };
        let control: &[u8] = if self.sent == 0 {
            &self.control.bytes
        } else {
            &[]
        };
        let flags = self.flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let send = || {
            socket::send(
                self.socket.as_fd(),
                self.to.as_ref(),
                &chunk,
                control,
                flags,
            )
        };
        match Identity::act(identity, send).map_err(number_of) {
            Ok(length) => {
                self.sent += length as u64;
                if !self.is_stream || self.sent >= total {
                    Turn::Answer(Answer::Done(self.sent as i64))
                } else if self.blocks || length == chunk.len() {
                    Turn::wait(false, true, self.until, libc::EAGAIN)
                } else {
                    Turn::Answer(Answer::Done(self.sent as i64))
                }
            }
            Err(libc::EAGAIN) if self.blocks => {
                // Of datagrams to an address nothing tells when the receiver has room.
                let tells = self.to.is_none();
                Turn::wait(false, tells, self.until, libc::EAGAIN)
            }
            Err(number) => {
                let tells = self.flags & libc::MSG_NOSIGNAL == 0;
                if number == libc::EPIPE && tells && self.is_stream && self.sent == 0 {
                    process::signal(thread_fd, libc::SIGPIPE);
                }
                self.ended(number)
            }
        }
    }

    fn ended(&self, number: i32) -> Turn {
        Turn::Answer(match self.sent {
            0 => Answer::Error(number),
            sent => Answer::Done(sent as i64),
        })
    }

    /// Copies the next `length` bytes. Data that changes meanwhile is sent in either form, as by the kernel itself.
    fn copy(&self, thread: u32, length: u64) -> Result<Vec<u8>, i32> {
        let mut chunk = vec![0; length as usize];
        let (mut skip, mut filled) = (self.sent, 0);
        for (at, part) in &self.data {
            if skip >= *part {
                skip -= part;
                continue;
            }
            let room = chunk.len() - filled;
            let take = usize::try_from(part - skip).unwrap_or(usize::MAX).min(room);
            let into = &mut chunk[filled..filled + take];
            let read = memory::read_some(thread, at.wrapping_add(skip), into).unwrap_or(0);
            filled += read;
            if read < take {
                // As the kernel: a stream sends what could be read.
                if self.is_stream && filled > 0 {
                    break;
                }
                return Err(libc::EFAULT);
            }
            skip = 0;
            if filled == chunk.len() {
                break;
            }
        }
        chunk.truncate(filled);
        Ok(chunk)
    }
}

impl Turn {
    fn wait(readable: bool, writable: bool, until: Option<Instant>, number: i32) -> Self {
        Self::Wait(Wait {
            readable,
            writable,
            until: until.map(|until| (until, number)),
        })
    }

    pub(super) fn error(number: i32) -> Self {
        Self::Answer(Answer::Error(number))
    }

    pub(super) fn of(result: io::Result<()>) -> Self {
        Self::Answer(match result {
            Ok(()) => Answer::Done(0),
            Err(error) => Answer::Error(number_of(error)),
        })
    }
}

/// bind to a path, as seen from where the program is. Returns the file that was made, if it is sure to be that one.
pub(super) fn bind_path(
    thread: u32,
    socket: BorrowedFd<'_>,
    path: &[u8],
) -> io::Result<Option<Place>> {
    let home = Home::of(thread)?;
    bound(
        socket,
        || home.inside(path, |name| bind_name(socket, name)),
        || Place::of(thread, path),
    )
}

/// Binds a Unix socket in a directory that was looked up before. What the program sees as its address is the name alone.
pub(super) fn bind_spot(
    thread: u32,
    socket: BorrowedFd<'_>,
    spot: &Spot,
) -> io::Result<Option<Place>> {
    let home = Home::of(thread)?;
    let name = spot.name.as_bytes();
    bound(
        socket,
        || home.standing_in(&spot.directory, || bind_name(socket, name)),
        || Place::there(spot),
    )
}

fn bind_name(socket: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    let address = super::address::unix_address(name);
    let address = address.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    socket::bind(socket, &address)
}

/// What lies at the path by now can be another file than the one that was made: the socket is asked which is its own.
fn bound(
    socket: BorrowedFd<'_>,
    bind: impl FnOnce() -> io::Result<()>,
    look: impl FnOnce() -> io::Result<Place>,
) -> io::Result<Option<Place>> {
    let before = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    bind()?;
    Ok(look().ok().filter(|place| {
        let file = diag::file_of(socket).ok();
        let number = place.number().ok();
        number.is_some() && file == number && place.is_made_since(before)
    }))
}

/// Until when a call may wait by a socket's option; `None`: for ever.
pub(super) fn until(socket: BorrowedFd<'_>, option: i32) -> Option<Instant> {
    let patience: Option<Duration> = socket::patience(socket, option);
    patience.and_then(|patience| Instant::now().checked_add(patience))
}

/// Whether calls on the file do not wait.
pub(super) fn is_nonblocking(file: BorrowedFd<'_>) -> bool {
    fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Does something with the file not waiting meanwhile. There is no flag for connect that does it.
fn without_waiting<T>(file: BorrowedFd<'_>, changes: bool, act: impl FnOnce() -> T) -> T {
    if !changes {
        return act();
    }
    let _one = lock(&CONNECTS);
    let before = fcntl_getfl(file).ok();
    let before = before.filter(|flags| !flags.contains(OFlags::NONBLOCK));
    if let Some(flags) = before {
        let _ = fcntl_setfl(file, flags | OFlags::NONBLOCK);
    }
    let result = act();
    if let Some(flags) = before {
        let _ = fcntl_setfl(file, flags);
    }
    result
}

fn is_ready(file: BorrowedFd<'_>, events: PollFlags) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(file, events)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
