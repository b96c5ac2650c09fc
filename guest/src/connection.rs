//! One connection to the daemon or agent: requests and their answers, unasked messages queued.
//!
//! The socket never blocks; every exchange has a time limit. An exchange that fails in its middle
//! leaves the stream in an unknown state, so the connection is then closed for good.

mod place;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, send, sendmsg, shutdown,
    sockopt::set_socket_passcred,
};
use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{ArenaHome, Backend, Grow, Message, Opened, Role, VERSION};
use vnplug_ring::direct::SLOTS;

use crate::error::Error;
use crate::peer;
use place::dial;
pub(crate) use place::socket_path;

/// What comes with an Opened.
#[derive(Debug)]
pub(crate) struct PortFds {
    pub(crate) memory: OwnedFd,
    /// Of the rings' records, if they lie apart.
    pub(crate) records: Option<OwnedFd>,
    pub(crate) wake: Option<OwnedFd>,
    /// That says which of the ports that share the wake-up have news.
    pub(crate) board: Option<OwnedFd>,
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) arenas: Option<OwnedFd>,
}

/// A greeted connection.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Arc<OwnedFd>,
    framer: Framer,
    fds: VecDeque<OwnedFd>,
    unasked: VecDeque<Message>,
    /// Of memory that was shared unasked, in the order of the messages about it.
    shared: VecDeque<OwnedFd>,
    last_id: u32,
    /// A question that was given up; its answer may still come.
    late: Option<u32>,
    limit: Duration,
    dead: Option<Error>,
    server: String,
}

impl Connection {
    /// Connects and says Hello; each exchange, this one included, may take up to `limit`.
    pub(crate) fn open(path: &Path, limit: Duration) -> Result<Self, Error> {
        let socket = dial(path, Instant::now() + limit)?;
        let mut connection = Self {
            socket: Arc::new(socket),
            framer: Framer::strict(MAX_PAYLOAD),
            fds: VecDeque::new(),
            unasked: VecDeque::new(),
            shared: VecDeque::new(),
            last_id: 0,
            late: None,
            limit,
            dead: None,
            server: String::new(),
        };
        let hello = Message::Hello {
            min_version: VERSION,
            max_version: VERSION,
            role: Role::Client,
            name: format!("libvnplug {}", env!("CARGO_PKG_VERSION")),
            live: Vec::new(),
            vectors: 0,
            locked_down: false,
        };
        match connection.exchange(&hello, None)? {
            Message::Welcome {
                version, server, ..
            } if version == VERSION => {
                connection.server = server;
                Ok(connection)
            }
            Message::Welcome { version, .. } => Err(Error::Version {
                theirs: version,
                ours: VERSION,
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Name and version of the other side.
    pub(crate) fn server(&self) -> &str {
        &self.server
    }

    /// Sends a request, with a descriptor if given, and returns its answer; an Error message is an
    /// `Err`.
    pub(crate) fn exchange(
        &mut self,
        request: &Message,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Message, Error> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        let answer = self.try_exchange(request, fd);
        if let Err(error) = &answer {
            self.die(error);
        }
        self.judged(answer?)
    }

    /// An answer to a request: an Error message is an `Err`.
    fn judged(&mut self, answer: Message) -> Result<Message, Error> {
        match answer {
            // No other brings descriptors; see `take_fds` and `take_all_fds`. Those that come with a channel
            // are of memory that was shared at once: the messages about it are behind this one, see `keep`.
            answer @ (Message::Opened(_)
            | Message::Backend(Backend::Connected(_))
            | Message::Members(_)
            | Message::Backend(Backend::Mapped(_))) => Ok(answer),
            _ if !self.fds.is_empty() => {
                self.fds.clear();
                let error = Error::Protocol("descriptors nobody asked for".into());
                self.die(&error);
                Err(error)
            }
            Message::Error { code, text } => Err(Error::Refused { code, text }),
            answer => Ok(answer),
        }
    }

    /// As [`exchange`](Self::exchange), with a limit of its own.
    pub(crate) fn exchange_within(
        &mut self,
        limit: Duration,
        request: &Message,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Message, Error> {
        let usual = std::mem::replace(&mut self.limit, limit);
        let answer = self.exchange(request, fd);
        self.limit = usual;
        answer
    }

    /// The user that the other side's process is now.
    ///
    /// NB: not `SO_PEERCRED`, which tells who began to listen: root, before the daemon became another user, or a service manager.
    pub(crate) fn server_user(&mut self) -> Result<u32, Error> {
        let system = Error::system("cannot ask who the daemon is");
        set_socket_passcred(&*self.socket, true).map_err(system)?;
        let deadline = Instant::now() + self.limit;
        // What was said before does not tell.
        self.gather()?;
        self.take_id();
        let asked = self.send(&Message::List.encode(self.last_id, 0), None, deadline);
        let told = asked
            .and_then(|()| await_ready(self.socket.as_fd(), PollFlags::IN, deadline))
            .and_then(|()| {
                let writer = peer::writer_of(&*self.socket);
                writer.map_err(|error| {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                    Error::system("cannot learn who the daemon is")(errno)
                })
            });
        let told = told.and_then(|writer| self.answer(deadline).map(|answer| (writer, answer)));
        if let Err(error) = &told {
            self.die(error);
        }
        let (writer, answer) = told?;
        // Who refuses has said who he is, too.
        match self.judged(answer) {
            Ok(_) | Err(Error::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        set_socket_passcred(&*self.socket, false)
            .map_err(Error::system("cannot ask who the daemon is"))?;
        Ok(writer.uid)
    }

    /// Takes the descriptors that came with an Opened: the memory (or the words' and the
    /// records'), the wake-up unless it is one that
    /// came before (`shares`), its board, for a port that sends the kick, and for a member of a group the arenas'
    /// memory if that is another. All are closed if there are not exactly as many.
    pub(crate) fn take_fds(&mut self, opened: &Opened, shares: bool) -> Result<PortFds, Error> {
        let (apart, board) = (opened.apart, opened.board);
        let sends = opened.transmit.len > 0;
        let arenas = opened.arenas.home == ArenaHome::Apart;
        let others = 1 + [apart, board, sends, arenas]
            .map(usize::from)
            .iter()
            .sum::<usize>();
        let wakes = self.fds.len().checked_sub(others);
        if (wakes == Some(1) || wakes == Some(0) && shares && !board)
            && let Some(memory) = self.fds.pop_front()
        {
            return Ok(PortFds {
                memory,
                records: apart.then(|| self.fds.pop_front()).flatten(),
                wake: (wakes == Some(1)).then(|| self.fds.pop_front()).flatten(),
                board: board.then(|| self.fds.pop_front()).flatten(),
                kick: sends.then(|| self.fds.pop_front()).flatten(),
                arenas: self.fds.pop_front(),
            });
        }
        self.fds.clear();
        let what = "not the descriptors that should come with an opened port";
        let error = Error::Protocol(what.into());
        self.dead = Some(error.clone());
        Err(error)
    }

    /// Keeps what was said unasked, with the descriptor that comes with memory.
    fn keep(&mut self, message: Message) -> Result<(), Error> {
        let brings_memory = matches!(
            message,
            Message::Backend(Backend::Mapped(_)) | Message::Grow(Grow::Plug { .. })
        );
        if brings_memory {
            let fd = self.fds.pop_front();
            let fd = fd.ok_or_else(|| Error::Protocol("memory without a descriptor".into()))?;
            self.shared.push_back(fd);
        }
        self.unasked.push_back(message);
        Ok(())
    }

    /// Takes the descriptor of memory that was shared unasked, in turn.
    pub(crate) fn take_shared(&mut self) -> Option<OwnedFd> {
        self.shared.pop_front()
    }

    /// Says something that has no answer.
    pub(crate) fn tell(&mut self, message: &Message) -> Result<(), Error> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        let told = self.send_reading(&message.encode(0, 0));
        if let Err(error) = &told {
            self.die(error);
        }
        told
    }

    /// Sends, and reads while the other side does not: it may wait for the same.
    fn send_reading(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        let deadline = Instant::now() + self.limit;
        while !bytes.is_empty() {
            match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.gather()?;
                    let either = PollFlags::IN | PollFlags::OUT;
                    await_ready(self.socket.as_fd(), either, deadline)?;
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Error::Disconnected),
                Err(errno) => return Err(Error::system("cannot send a message")(errno)),
            }
        }
        Ok(())
    }

    /// Takes the descriptors that came with a Members.
    pub(crate) fn take_all_fds(&mut self) -> Vec<OwnedFd> {
        self.fds.drain(..).collect()
    }

    /// The next unasked message, without waiting. `Ok(None)`: none now.
    ///
    /// # Errors
    /// The connection is over; every unasked message received before was returned.
    pub(crate) fn unasked(&mut self) -> Result<Option<Message>, Error> {
        loop {
            if let Some(message) = self.unasked.pop_front() {
                return Ok(Some(message));
            }
            if let Some(error) = &self.dead {
                return Err(error.clone());
            }
            let progress = self.receive().and_then(|more| {
                while let Some(frame) = self.framer.next_message()? {
                    if self.is_late(frame.0.id) {
                        continue;
                    }
                    if frame.0.id != 0 {
                        return Err(Error::Protocol("an answer that nothing asked for".into()));
                    }
                    let message = Message::from_frame(&frame)?;
                    self.keep(message)?;
                }
                Ok(more)
            });
            match progress {
                Ok(true) => {}
                Ok(false) if self.unasked.is_empty() => return Ok(None),
                Ok(false) => {}
                Err(error) => self.dead = Some(error),
            }
        }
    }

    /// Reads what came unasked, without waiting.
    ///
    /// # Errors
    /// The connection is over.
    pub(crate) fn gather(&mut self) -> Result<(), Error> {
        let mut before = std::mem::take(&mut self.unasked);
        let next = self.unasked();
        if let Ok(Some(first)) = &next {
            before.push_back(first.clone());
        }
        before.append(&mut self.unasked);
        self.unasked = before;
        match self.dead.clone() {
            Some(error) => Err(error),
            None => next.map(|_| ()),
        }
    }

    /// Why a port was closed, if that was gathered.
    ///
    /// # Errors
    /// The connection is over, and nothing was said of this port.
    pub(crate) fn gone(&mut self, port: u32) -> Result<Option<String>, Error> {
        let about = |said: &Message| matches!(said, Message::Gone { port: it, .. } if *it == port);
        let at = self.unasked.iter().position(about);
        match (at.and_then(|at| self.unasked.remove(at)), &self.dead) {
            (Some(Message::Gone { reason, .. }), _) => Ok(Some(reason)),
            (_, Some(error)) => Err(error.clone()),
            (_, None) => Ok(None),
        }
    }

    /// Whether something was gathered, or it is over.
    pub(crate) fn has_unasked(&self) -> bool {
        !self.unasked.is_empty() || self.dead.is_some()
    }

    /// Forgets what was gathered.
    pub(crate) fn forget_unasked(&mut self) {
        self.unasked.clear();
    }

    /// Whether it can be used.
    pub(crate) fn is_alive(&self) -> bool {
        self.dead.is_none()
    }

    /// Asks without side effects. If no answer comes within `limit`, that is an error, and the
    /// connection lives on: the answer is dropped when it comes, and until then nothing else is
    /// asked in this way.
    ///
    /// # Errors
    /// [`Error::TimedOut`], and those of [`exchange`](Self::exchange).
    pub(crate) fn ask(&mut self, request: &Message, limit: Duration) -> Result<Message, Error> {
        self.ask_with(request, None, limit)
    }

    /// As [`ask`](Self::ask), with a descriptor if given.
    pub(crate) fn ask_with(
        &mut self,
        request: &Message,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Message, Error> {
        let deadline = Instant::now() + limit;
        while self.late.is_some() {
            self.gather()?;
            if self.late.is_some() {
                await_ready(self.socket.as_fd(), PollFlags::IN, deadline)?;
            }
        }
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        self.take_id();
        let sent = self.send(&request.encode(self.last_id, 0), fd, deadline);
        let answer = match sent {
            Ok(()) | Err(Error::Disconnected) => self.answer(deadline),
            Err(error) => {
                self.die(&error);
                return Err(error);
            }
        };
        match answer {
            Err(Error::TimedOut) => {
                self.late = Some(self.last_id);
                Err(Error::TimedOut)
            }
            Err(error) => {
                self.die(&error);
                Err(error)
            }
            Ok(answer) => self.judged(answer),
        }
    }

    /// The socket, for waiting.
    pub(crate) fn socket(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.socket)
    }

    /// Remembers why it is over, and makes the socket readable, so that who waits learns of it.
    fn die(&mut self, error: &Error) {
        self.dead = Some(error.clone());
        // A socket whose other end is gone is readable anyway.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn take_id(&mut self) {
        self.last_id = self.last_id.checked_add(1).unwrap_or(1);
    }

    /// Whether this is the answer to the question that was given up.
    fn is_late(&mut self, id: u32) -> bool {
        let late = self.late == Some(id);
        if late {
            self.late = None;
            // They came with it.
            self.fds.clear();
        }
        late
    }

    fn try_exchange(
        &mut self,
        request: &Message,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Message, Error> {
        let deadline = Instant::now() + self.limit;
        self.take_id();
        match self.send(&request.encode(self.last_id, 0), fd, deadline) {
            // Why it closed the connection may have been said.
            Ok(()) | Err(Error::Disconnected) => {}
            Err(error) => return Err(error),
        }
        self.answer(deadline)
    }

    /// Waits for the answer to the last request.
    fn answer(&mut self, deadline: Instant) -> Result<Message, Error> {
        loop {
            while let Some(frame) = self.framer.next_message()? {
                let message = Message::from_frame(&frame)?;
                match frame.0.id {
                    id if id == self.last_id => return Ok(message),
                    0 => match message {
                        Message::Error { code, text } => return Err(Error::Refused { code, text }),
                        other => self.keep(other)?,
                    },
                    id if self.is_late(id) => {}
                    _ => return Err(Error::Protocol("an answer that nothing asked for".into())),
                }
            }
            if !self.receive()? {
                await_ready(self.socket.as_fd(), PollFlags::IN, deadline)?;
            }
        }
    }

    fn send(
        &mut self,
        mut bytes: &[u8],
        mut fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), Error> {
        while !bytes.is_empty() {
            let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let parts = [IoSlice::new(bytes)];
            match sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    bytes = &bytes[sent..];
                    fd = None;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    await_ready(self.socket.as_fd(), PollFlags::OUT, deadline)?;
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Error::Disconnected),
                Err(errno) => return Err(Error::system("cannot send a request")(errno)),
            }
        }
        Ok(())
    }

    /// Reads once what is there. `Ok(false)`: nothing now.
    fn receive(&mut self) -> Result<bool, Error> {
        let mut bytes = [0; 16 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let received = loop {
            match recvmsg(&self.socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::CONNRESET) => return Err(Error::Disconnected),
                Err(errno) => return Err(Error::system("cannot receive an answer")(errno)),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            self.fds.clear();
            return Err(Error::Protocol("more descriptors than expected".into()));
        }
        if received.bytes == 0 {
            return Err(Error::Disconnected);
        }
        self.framer.push(&bytes[..received.bytes]);
        Ok(true)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The other side's answer does not fit the request.
pub(crate) fn unexpected(message: &Message) -> Error {
    Error::Protocol(format!("an unexpected answer of kind {}", message.kind()))
}

pub(crate) fn await_ready(
    fd: BorrowedFd<'_>,
    flags: PollFlags,
    deadline: Instant,
) -> Result<(), Error> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::TimedOut);
        }
        match poll(
            &mut [PollFd::from_borrowed_fd(fd, flags)],
            Some(&timespec(left)),
        ) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(Error::system("cannot wait for the socket")(errno)),
        }
    }
}

/// `duration` for a system call, at most a day.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    let duration = duration.min(Duration::from_secs(86_400));
    Timespec {
        tv_sec: duration.as_secs() as i64,
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// No message comes with more descriptors than a Members: the table, a bell, and two for each other member.
const MAX_FDS: usize = 2 * SLOTS;
