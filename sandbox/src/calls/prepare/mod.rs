//! From registers to a task and the act that is to be judged: everything that is read of the program is read here, once.

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

struct Reader<'a> {
    thread: u32,
    thread_fd: BorrowedFd<'a>,
    around: Option<Around<'a>>,
}

/// What a `struct msghdr` names, copied; data is only listed.
struct Message {
    name: Vec<u8>,
    data: Vec<(u64, u64)>,
    control: Vec<u8>,
}

impl Reader<'_> {
    fn socket(&self, number: i32) -> Result<(OwnedFd, Kind), Number> {
        let socket = process::file_of(self.thread_fd, number).map_err(number_of)?;
        let kind = Kind::of(socket.as_fd()).map_err(number_of)?;
        Ok((socket, kind))
    }

    fn bytes(&self, span: Span) -> Result<Vec<u8>, Number> {
        if span.length > socket::ROOM_BYTES as u64 {
            return Err(libc::EINVAL);
        }
        self.copy(span.at, span.length)
    }

    fn copy(&self, at: u64, length: u64) -> Result<Vec<u8>, Number> {
        let mut bytes = vec![0; length as usize];
        memory::read(self.thread, at, &mut bytes).map_err(|_| libc::EFAULT)?;
        Ok(bytes)
    }

    fn connect(&self, socket: i32, address: Span) -> Result<(Task, Option<Proposal>), Number> {
        let (socket, kind) = self.socket(socket)?;
        let name = Name::of(kind, Purpose::Connect, &self.bytes(address)?)?;
        let (to, place, proposal) = self.target(kind, name)?;
        let connect = self.connecting(socket, kind, to, place);
        Ok((Task::Connect(connect), proposal))
    }

    fn connecting(
        &self,
        socket: OwnedFd,
        kind: Kind,
        to: Option<socket::Address>,
        place: Option<Place>,
    ) -> Connect {
        // Nothing has to come back before a socket of datagrams is connected.
        let blocks = kind.kind != libc::SOCK_DGRAM && !is_nonblocking(socket.as_fd());
        let until = blocks
            .then(|| until(socket.as_fd(), libc::SO_SNDTIMEO))
            .flatten();
        let to = to.unwrap_or_else(|| {
            socket::Address::new(&[0; size_of::<libc::sockaddr>()]).expect("it is short")
        });
        Connect {
            socket,
            to,
            place,
            blocks,
            until,
        }
    }

    fn bind(
        &self,
        socket: i32,
        address: Span,
        writable: Option<&[PathBuf]>,
    ) -> Result<(Task, Option<Proposal>), Number> {
        let (socket, kind) = self.socket(socket)?;
        Ok(
            match Name::of(kind, Purpose::Bind, &self.bytes(address)?)? {
                Name::Internet { judged, given } => {
                    // Port 0: any. Who listens there is judged then; a datagram socket gets one for each answer.
                    let is_judged = judged.port() != 0
                        && matches!(
                            kind.transport(),
                            Transport::Tcp | Transport::Udp | Transport::Other(_)
                        );
                    if !identity::may_bind(self.thread, judged.port()) {
                        return Err(libc::EACCES);
                    }
                    let proposal = kind.act(Doing::Bind, Target::Internet(judged));
                    let task = Task::Bind {
                        socket,
                        to: given,
                        is_judged,
                    };
                    (task, is_judged.then_some(proposal))
                }
                Name::Path(path) => {
                    let Some(writable) = writable else {
                        return Ok((Task::BindPath { socket, path }, None));
                    };
                    let spot = Spot::of_thread(self.thread, &path)?;
                    let place = spot.path()?;
                    let proposal = (!is_free(&place, writable)).then(|| write(place));
                    (Task::BindSpot { socket, spot }, proposal)
                }
                Name::Abstract(name) => {
                    let mut bytes = vec![0];
                    bytes.extend(name);
                    let to = unix_address(&bytes).ok_or(libc::EINVAL)?;
                    (unjudged(socket, to), None)
                }
                Name::Any => {
                    let to = unix_address(&[]).ok_or(libc::EINVAL)?;
                    (unjudged(socket, to), None)
                }
                Name::Vsock { cid, port, given } => {
                    let proposal = kind.act(Doing::Bind, Target::Vsock { cid, port });
                    (unjudged(socket, given), Some(proposal))
                }
                Name::Other(given) => (unjudged(socket, given), kind.made()),
                Name::Nobody => return Err(libc::EAFNOSUPPORT),
            },
        )
    }

    /// How the kernel is told where to, and what is to be judged before.
    #[expect(
        clippy::type_complexity,
        reason = "three things that belong to one destination"
    )]
    fn target(
        &self,
        kind: Kind,
        name: Name,
    ) -> Result<(Option<socket::Address>, Option<Place>, Option<Proposal>), Number> {
        let connect = |target| Some(kind.act(Doing::Connect, target));
        Ok(match name {
            Name::Nobody => (None, None, None),
            Name::Internet { judged, given } => {
                (Some(given), None, connect(Target::Internet(judged)))
            }
            Name::Path(path) => {
                let place = Place::of(self.thread, &path).map_err(number_of)?;
                let number = place.number().map_err(number_of)?;
                let around = self.around.ok_or(libc::EINVAL)?;
                let proposal = match (around.private)(number) {
                    Some(path) => connect(Target::Path(path)),
                    None if around.own.has(number) => None,
                    None => connect(Target::Path(place.path.clone())),
                };
                (Some(place.address()), Some(place), proposal)
            }
            Name::Abstract(name) => {
                let mut bytes = vec![0];
                bytes.extend(&name);
                let to = unix_address(&bytes).ok_or(libc::EINVAL)?;
                (Some(to), None, connect(Target::Abstract(name)))
            }
            Name::Vsock { cid, port, given } => {
                (Some(given), None, connect(Target::Vsock { cid, port }))
            }
            Name::Other(given) => (Some(given), None, kind.made()),
            Name::Any => return Err(libc::EINVAL),
        })
    }

    fn message(&self, at: u64) -> Result<Message, Number> {
        const HEADER_BYTES: u64 = size_of::<libc::msghdr>() as u64;
        let header = self.copy(at, HEADER_BYTES)?;
        let word =
            |at: usize| u64::from_ne_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        use std::mem::offset_of;
        let length = offset_of!(libc::msghdr, msg_namelen);
        let length = header[length..length + 4].try_into().expect("four bytes");
        let length = i32::from_ne_bytes(length);
        // The kernel takes what is too long for an address as long as one, and no negative ones.
        let length = u64::try_from(length).map_err(|_| libc::EINVAL)?;
        let length = length.min(socket::ROOM_BYTES as u64);
        let name = match word(offset_of!(libc::msghdr, msg_name)) {
            0 => Vec::new(),
            at => self.bytes(Span { at, length })?,
        };
        let count = word(offset_of!(libc::msghdr, msg_iovlen));
        if count > libc::UIO_MAXIOV as u64 {
            return Err(libc::EMSGSIZE);
        }
        let parts = self.copy(word(offset_of!(libc::msghdr, msg_iov)), count * 16)?;
        let data = parts.chunks_exact(16).map(|part| {
            let word =
                |at: usize| u64::from_ne_bytes(part[at..at + 8].try_into().expect("eight bytes"));
            (word(0), word(8))
        });
        let data: Vec<(u64, u64)> = data.collect();
        let total = data
            .iter()
            .try_fold(0_u64, |sum, (_, length)| sum.checked_add(*length));
        if total.is_none_or(|total| total > i64::MAX as u64) {
            return Err(libc::EINVAL);
        }
        let control = match word(offset_of!(libc::msghdr, msg_controllen)) {
            0 => Vec::new(),
            length if length > LONGEST_BYTES => return Err(libc::ENOBUFS),
            length => self.copy(word(offset_of!(libc::msghdr, msg_control)), length)?,
        };
        Ok(Message {
            name,
            data,
            control,
        })
    }

    fn whole(
        &self,
        socket: OwnedFd,
        kind: Kind,
        message: &Message,
        flags: i32,
    ) -> Result<(Send, Option<Proposal>), Number> {
        let control = Control::of(kind, self.thread, self.thread_fd, &message.control)?;
        self.send(
            socket,
            kind,
            &message.name,
            message.data.clone(),
            control,
            flags,
        )
    }

    fn send(
        &self,
        socket: OwnedFd,
        kind: Kind,
        named: &[u8],
        data: Vec<(u64, u64)>,
        control: Control,
        flags: i32,
    ) -> Result<(Send, Option<Proposal>), Number> {
        let fast = flags & libc::MSG_FASTOPEN != 0 && kind.transport() == Transport::Tcp;
        let mut proposal = None;
        let (mut to, mut place, mut connect) = (None, None, None);
        if !named.is_empty() && (fast || kind.transport() != Transport::Tcp) {
            let purpose = if fast {
                Purpose::Connect
            } else {
                Purpose::Send
            };
            let name = Name::of(kind, purpose, named)?;
            if kind.domain == libc::AF_UNIX && kind.kind != libc::SOCK_DGRAM {
                return Err(libc::EISCONN);
            }
            let (address, file, asked) = self.target(kind, name)?;
            proposal = asked;
            if fast {
                let socket = socket.try_clone().map_err(number_of)?;
                connect = Some(self.connecting(socket, kind, address, file));
            } else {
                (to, place) = (address, file);
            }
        } else if fast {
            return Err(libc::EINVAL);
        }
        let mut send = self.plain(socket, kind, data, control, flags & !libc::MSG_FASTOPEN);
        (send.to, send.place, send.connect) = (to, place, connect);
        Ok((send, proposal))
    }

    fn plain(
        &self,
        socket: OwnedFd,
        kind: Kind,
        data: Vec<(u64, u64)>,
        control: Control,
        flags: i32,
    ) -> Send {
        let blocks = flags & libc::MSG_DONTWAIT == 0 && !is_nonblocking(socket.as_fd());
        let until = blocks
            .then(|| until(socket.as_fd(), libc::SO_SNDTIMEO))
            .flatten();
        Send {
            socket,
            is_stream: kind.is_stream(),
            to: None,
            place: None,
            connect: None,
            data,
            control,
            flags,
            sent: 0,
            blocks,
            until,
        }
    }
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
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_socket_of_a_family_that_nobody_understands_is_judged_wherever_it_comes_from() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink};
        let address = [libc::AF_NETLINK as u16, 0, 0, 0, 0, 0];
        let address = Span {
            at: address.as_ptr() as u64,
            length: 12,
        };
        for (protocol, is_judged) in [(None, false), (Some(netlink::GENERIC), true)] {
            let flags = SocketFlags::CLOEXEC;
            let socket =
                rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol);
            let socket = socket.unwrap();
            let call = Call::Bind {
                socket: socket.as_raw_fd(),
                address,
            };
            let around = Around {
                threads: &Threads::default(),
                own: &Own::default(),
                private: &|_| None,
            };
            let prepared = prepare(call, std::process::id(), around, |_| false, None).unwrap();
            let doing = prepared.proposal.map(|proposal| proposal.doing);
            assert_eq!(doing, is_judged.then_some(Doing::Create));
        }
    }

    /// Has a bind to a path prepared, has the directory of the path replaced by a link to another, and does it.
    fn bind_while_the_directory_changes(writable: Option<&[PathBuf]>) -> (bool, bool) {
        let dir = vnplug_testing::TestDir::new("sandbox-bind");
        for name in ["judged", "closed"] {
            std::fs::create_dir(dir.path(name)).unwrap();
        }
        let path = dir.path("judged/socket");
        let path = path.as_os_str().as_bytes();
        let mut address = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
        address.extend(path);
        address.push(0);
        let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let call = Call::Bind {
            socket: socket.as_raw_fd(),
            address: Span {
                at: address.as_ptr() as u64,
                length: address.len() as u64,
            },
        };
        let around = Around {
            threads: &Threads::default(),
            own: &Own::default(),
            private: &|_| None,
        };
        let thread = std::process::id();
        let prepared = prepare(call, thread, around, |_| false, writable).unwrap();
        std::fs::rename(dir.path("judged"), dir.path("moved")).unwrap();
        std::os::unix::fs::symlink("closed", dir.path("judged")).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                crate::sys::process::own_directory();
                match &prepared.task {
                    Task::BindPath { socket, path } => {
                        super::super::task::bind_path(thread, socket.as_fd(), path).unwrap()
                    }
                    Task::BindSpot { socket, spot } => {
                        super::super::task::bind_spot(thread, socket.as_fd(), spot).unwrap()
                    }
                    other => panic!("{other:?}"),
                }
            });
        });
        let is_there = |name: &str| dir.path(name).join("socket").exists();
        (is_there("moved"), is_there("closed"))
    }

    #[test]
    fn a_socket_is_bound_in_the_directory_that_was_judged() {
        assert_eq!(bind_while_the_directory_changes(Some(&[])), (true, false));
        // Without `--files` the program could do the same by itself.
        assert_eq!(bind_while_the_directory_changes(None), (false, true));
    }
}
