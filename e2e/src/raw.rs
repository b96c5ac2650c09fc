//! A client that says whatever it likes, for tests of what the daemon bears; and a look at a
//! process from outside.

use std::fs;
use std::io::{IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vnplug_ring::control::backend::Connect;
use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{Backend, Message, Open, Role, VERSION};

/// A connection on which any bytes can be sent.
#[derive(Debug)]
pub struct Raw {
    /// The socket; reading and writing wait at most a minute.
    pub stream: UnixStream,
    framer: Framer,
    fds: Vec<OwnedFd>,
    acknowledges: bool,
}

impl Raw {
    /// Connects to `path` and says nothing.
    ///
    /// # Panics
    /// If nobody serves it.
    #[must_use]
    pub fn connect(path: &Path) -> Self {
        Self::over(UnixStream::connect(path).expect("somebody serves the socket"))
    }

    /// Connects and says Hello.
    ///
    /// # Panics
    /// If there is no Welcome.
    #[must_use]
    pub fn greeted(path: &Path) -> Self {
        let mut raw = Self::connect(path);
        raw.hello(Role::Client);
        raw
    }

    /// Says Hello and connects to a back-end: with the channel's number.
    ///
    /// # Panics
    /// If that is refused.
    #[must_use]
    pub fn program(path: &Path, backend: u32) -> (Self, u32) {
        let mut raw = Self::greeted(path);
        let channel = raw.connect_to(backend, 0);
        (raw, channel)
    }

    /// Connects an application to a back-end: the channel's number.
    ///
    /// # Panics
    /// If that is refused.
    pub fn connect_to(&mut self, backend: u32, app: u32) -> u32 {
        let connect = Message::Backend(Backend::Connect(Connect {
            id: backend,
            name: String::new(),
            version: 0,
            label: String::new(),
        }));
        match self.ask(&connect, app) {
            Message::Backend(Backend::Connected(connected)) => connected.channel,
            other => panic!("not connected but {other:?}"),
        }
    }

    /// Takes a stream that is connected.
    ///
    /// # Panics
    /// If it cannot be set up.
    #[must_use]
    pub fn over(stream: UnixStream) -> Self {
        let limit = Some(Duration::from_secs(60));
        stream.set_read_timeout(limit).expect("a read timeout");
        stream.set_write_timeout(limit).expect("a write timeout");
        Self {
            stream,
            framer: Framer::strict(MAX_PAYLOAD),
            fds: Vec::new(),
            acknowledges: false,
        }
    }

    /// Takes a guest's end of its serial line, and acknowledges what it reads: to an agent that does not the daemon says no
    /// more than [`TTY_WINDOW`](vnplug_ring::control::TTY_WINDOW) bytes.
    ///
    /// # Panics
    /// If it cannot be set up.
    #[must_use]
    pub fn on_a_line(stream: UnixStream) -> Self {
        Self {
            acknowledges: true,
            ..Self::over(stream)
        }
    }

    /// Says Hello and expects Welcome; its pool number.
    ///
    /// # Panics
    /// If something else comes.
    pub fn hello(&mut self, role: Role) -> u64 {
        match self.ask(&hello(role), 0) {
            Message::Welcome { pool_id, .. } => pool_id,
            other => panic!("not welcome but {other:?}"),
        }
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends bytes with descriptors.
    ///
    /// # Errors
    /// The system's.
    pub fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<usize> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(256))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
        let slices = [IoSlice::new(bytes)];
        Ok(sendmsg(
            &self.stream,
            &slices,
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?)
    }

    /// Sends a message and waits for the next one that answers something.
    ///
    /// # Panics
    /// If none comes.
    pub fn ask(&mut self, message: &Message, app: u32) -> Message {
        self.send(&message.encode(7, app))
            .expect("the daemon listens");
        loop {
            let (id, message) = self.next().expect("an answer");
            if id == 7 {
                return message;
            }
        }
    }

    /// The next message and its id; `None` when the connection was closed.
    ///
    /// # Panics
    /// If nothing comes in a minute, or what comes is no message.
    #[expect(
        clippy::should_implement_trait,
        reason = "not an iterator: it may be asked on"
    )]
    pub fn next(&mut self) -> Option<(u32, Message)> {
        loop {
            if let Some(frame) = self.framer.next_message().expect("the daemon's framing") {
                let message = Message::from_frame(&frame).expect("the daemon's message");
                return Some((frame.0.id, message));
            }
            let mut bytes = [0; 1 << 16];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(
                &self.stream,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            );
            let count = match received {
                Ok(received) => received.bytes,
                Err(rustix::io::Errno::CONNRESET) => 0,
                Err(error) => panic!("the daemon says nothing: {error}"),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    self.fds.extend(fds);
                }
            }
            if count == 0 {
                return None;
            }
            self.framer.push(&bytes[..count]);
            if self.acknowledges {
                let bytes = count as u32;
                // If it is closed, the next read says so.
                let _ = self.send(&Message::Ack { bytes }.encode(0, 0));
            }
        }
    }

    /// The descriptors that came so far.
    pub fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A Hello of this version.
#[must_use]
pub fn hello(role: Role) -> Message {
    Message::Hello {
        min_version: VERSION,
        max_version: VERSION,
        role,
        name: "raw".into(),
        live: Vec::new(),
        vectors: 0,
        locked_down: false,
    }
}

/// Asks for everything of a device in a ring of this many bytes.
#[must_use]
pub fn open(device: &str, ring_bytes: u64) -> Open {
    Open {
        ring_bytes,
        label: "raw".into(),
        ..Open::new(device)
    }
}

/// What a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Open descriptors.
    pub fds: usize,
    /// Threads.
    pub threads: usize,
    /// Mappings.
    pub maps: usize,
    /// Resident private memory in KiB (shared memory is the readers').
    pub anon_kib: u64,
}

impl Holdings {
    /// Looks at a process when it has neither opened nor closed anything for half a second.
    ///
    /// # Panics
    /// If it is gone, or never at rest.
    #[must_use]
    pub fn at_rest(pid: u32) -> Self {
        let (mut last, mut same) = (Self::of(pid), 0);
        for _ in 0..1200 {
            thread::sleep(Duration::from_millis(50));
            let now = Self::of(pid);
            let rests = (now.fds, now.threads) == (last.fds, last.threads);
            same = if rests { same + 1 } else { 0 };
            last = now;
            if same == 10 {
                return now;
            }
        }
        panic!("it opens and closes for a minute: {last:?}");
    }

    /// Looks at a process.
    ///
    /// # Panics
    /// If it is gone.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        let count = |what: &str| {
            fs::read_dir(format!("/proc/{pid}/{what}"))
                .expect("the process lives")
                .count()
        };
        Self {
            fds: count("fd"),
            threads: count("task"),
            maps: fs::read_to_string(format!("/proc/{pid}/maps"))
                .expect("the process lives")
                .lines()
                .count(),
            anon_kib: status(pid, "RssAnon")
                .trim_end_matches(" kB")
                .parse()
                .expect("a number of kB"),
        }
    }
}

/// One field of `/proc/PID/status`.
///
/// # Panics
/// If the process is gone or there is no such field.
#[must_use]
pub fn status(pid: u32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process lives");
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .expect("a field of proc(5)")
        .trim()
        .to_owned()
}

/// The processes that a process' first thread has started and that it has not waited for.
#[must_use]
pub fn children(pid: u32) -> Vec<u32> {
    // One that has ended has none.
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = text.split_whitespace();
    children.filter_map(|child| child.parse().ok()).collect()
}
