//! A connection: a port of the switch as a program of libvdeplug knows it.
//!
//! Such a program waits for the data descriptor together with others and then takes one frame with
//! [`Plug::receive`], or it takes frames and lets the call wait. So the descriptor tells after each
//! frame whether there is another ([`Port::settle`]), and a call that finds none waits, unless the
//! program made the descriptor non-blocking, as with the socket of a `vde_switch`.
//!
//! The descriptor is also readable where there is no frame but work for the port: the daemon ended,
//! or it is time to look for the next one. Nobody else has a thread for that. Then a frame comes
//! that is none, [`NO_FRAME`].
//!
//! | | a program finds |
//! |---|---|
//! | no daemon | silence; what it sends is dropped. The port comes back by itself |
//! | the switch is gone for good | the end of the control descriptor, as with a `vde_switch` |
//!
//! Two threads may receive and send at once: nobody waits with the lock.

use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use vnplug::{Error, Next, Patience, Port, PortOptions, code};

use crate::address::Address;
use crate::ffi;

/// See the module's comment.
pub(crate) struct Plug {
    inner: Mutex<Inner>,
    data: RawFd,
    control: UnixStream,
}

struct Inner {
    port: Port,
    /// The other end of the control descriptor, until the port is over.
    alive: Option<UnixStream>,
    /// The ring had no room until a frame's time was over: the next ones do not wait.
    is_stuck: bool,
    reopened: u64,
}

/// What sending came to.
enum Pushed {
    Done,
    Full,
}

impl Plug {
    /// Joins the switch; `label` is what its operator sees.
    pub(crate) fn open(address: &Address, label: &str) -> Result<Self, Error> {
        let mut options = PortOptions::new(&address.device)
            .label(label)
            .ring_bytes(address.ring_bytes)
            .transmit(address.ring_bytes)
            .join();
        if address.direct {
            options = options.direct();
        }
        if let Some(socket) = &address.socket {
            options = options.socket(socket);
        }
        let mut port = options.open()?;
        let (control, alive) = UnixStream::pair().map_err(|error| Error::System {
            what: "cannot make the control descriptor",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        })?;
        port.settle()?;
        Ok(Self {
            data: port.fd().as_raw_fd(),
            control,
            inner: Mutex::new(Inner {
                port,
                alive: Some(alive),
                is_stuck: false,
                reopened: 0,
            }),
        })
    }

    /// Readable while there is a frame.
    pub(crate) fn data_fd(&self) -> RawFd {
        self.data
    }

    /// At its end when the switch is gone for good.
    pub(crate) fn control_fd(&self) -> RawFd {
        self.control.as_raw_fd()
    }

    /// Takes a frame, as much of it as there is room for: its bytes. Waits for one, if `waits` and the
    /// program did not make the descriptor non-blocking.
    pub(crate) fn receive(
        &self,
        into: &mut [MaybeUninit<u8>],
        waits: bool,
    ) -> Result<usize, Errno> {
        let mut has_waited = false;
        loop {
            let mut inner = self.lock();
            if let Some(len) = inner.take_published(into)? {
                return Ok(len);
            }
            let is_news = inner.is_readable()?;
            if let Some(len) = inner.take(into)? {
                return Ok(len);
            }
            if !waits || inner.is_nonblocking() {
                return Err(Errno::AGAIN);
            }
            drop(inner);
            if is_news && !has_waited {
                return Ok(no_frame(into));
            }
            has_waited = true;
            self.wait()?;
        }
    }

    /// Sends a frame. One that the ring has no room for waits, if `waits` and the program did not make
    /// the descriptor non-blocking; not for ever.
    pub(crate) fn send(&self, frame: &[u8], waits: bool) -> Result<usize, Errno> {
        let mut patience = None;
        loop {
            let mut inner = self.lock();
            match inner.push(frame, &mut patience)? {
                Pushed::Done => return Ok(frame.len()),
                Pushed::Full if !waits || inner.is_nonblocking() => return Err(Errno::AGAIN),
                Pushed::Full if inner.is_stuck => return Err(Errno::NOBUFS),
                Pushed::Full => {}
            }
            let Some(pause) = patience.as_mut().and_then(Patience::pause) else {
                inner.is_stuck = true;
                return Err(Errno::NOBUFS);
            };
            drop(inner);
            thread::sleep(pause);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the descriptor, without the lock.
    fn wait(&self) -> Result<(), Errno> {
        // A copy: the number may stand for something else when the port is over.
        let data = self.lock().port.fd().try_clone_to_owned();
        let data = data.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        poll(&mut [PollFd::new(&data, PollFlags::IN)], None).map(drop)
    }
}

impl Inner {
    /// The next frame that lies in the ring, if there is one. No system call while there are more.
    #[inline]
    fn take_published(&mut self, into: &mut [MaybeUninit<u8>]) -> Result<Option<usize>, Errno> {
        self.check()?;
        let taken = match self.port.batch(1).next() {
            None => return Ok(None),
            Some(packet) => packet.map(|packet| copy(packet.bytes, into)),
        };
        self.settled(taken).map(Some)
    }

    /// As `take_published`, but does what the port has to do where there is none.
    fn take(&mut self, into: &mut [MaybeUninit<u8>]) -> Result<Option<usize>, Errno> {
        let taken = match self.port.next() {
            Ok(Next::Packet(packet)) => Ok(Some(copy(packet.bytes, into))),
            Ok(Next::Nothing) => Ok(None),
            Ok(Next::Ended) => Err(Error::Gone("the switch ended".into())),
            Err(error) => Err(error),
        };
        self.settled(taken)
    }

    /// `patience` is that of a frame that waits. It begins here, and one that has waited is pushed only when there is room
    /// as [`Outbox::has_room_for`](vnplug::Outbox::has_room_for) has it.
    fn push(&mut self, frame: &[u8], patience: &mut Option<Patience>) -> Result<Pushed, Errno> {
        self.check()?;
        let pushed = match self.port.outbox() {
            Ok(outbox) if frame.len() > outbox.max_frame() => return Err(Errno::MSGSIZE),
            Ok(outbox) => {
                let has_room = match patience {
                    Some(patience) => outbox.has_room_for(frame.len(), patience),
                    None => Ok(true),
                };
                let pushed = has_room.and_then(|has_room| Ok(has_room && outbox.push(frame)?));
                outbox.flush();
                if matches!(pushed, Ok(false)) {
                    patience.get_or_insert_with(|| outbox.patience(LONGEST_WAIT));
                }
                pushed
            }
            Err(error) => Err(error),
        };
        match pushed {
            // Nobody is there to hear it.
            Err(Error::Disconnected) => self.settled(Ok(Pushed::Done)),
            Ok(true) => {
                self.is_stuck = false;
                // A port that came back with this frame has another ring to be told of.
                if self.reopened != self.port.counts().reopened {
                    self.reopened = self.port.counts().reopened;
                    return self.settled(Ok(Pushed::Done));
                }
                Ok(Pushed::Done)
            }
            Ok(false) => Ok(Pushed::Full),
            Err(error) => Err(self.over(&error)),
        }
    }

    /// Makes the descriptor tell of the next frame.
    #[inline]
    fn settled<T>(&mut self, taken: Result<T, Error>) -> Result<T, Errno> {
        let settled = taken.and_then(|taken| self.port.settle().map(|_| taken));
        settled.map_err(|error| self.over(&error))
    }

    /// The port is over: programs see it at the control descriptor, and the other one is silent.
    #[cold]
    fn over(&mut self, error: &Error) -> Errno {
        if self.alive.take().is_some() {
            tell(&format!("{}: {error}", self.port.device()));
            if let Err(errno) = ffi::silence(self.port.fd()) {
                tell(&format!("cannot silence a descriptor: {errno}"));
            }
        }
        Errno::NOTCONN
    }

    fn check(&self) -> Result<(), Errno> {
        match self.alive {
            Some(_) => Ok(()),
            None => Err(Errno::NOTCONN),
        }
    }

    fn is_readable(&self) -> Result<bool, Errno> {
        let mut fds = [PollFd::from_borrowed_fd(self.port.fd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).map(|ready| ready > 0)
    }

    fn is_nonblocking(&self) -> bool {
        fcntl_getfl(self.port.fd()).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }
}

/// As much of the frame as there is room for, as recv(2) does it.
#[inline]
fn copy(frame: &[u8], into: &mut [MaybeUninit<u8>]) -> usize {
    let len = frame.len().min(into.len());
    into[..len].write_copy_of_slice(&frame[..len]);
    len
}

/// What a call says that has no frame and must not wait: a frame of one byte, which programs of
/// libvdeplug drop (modules of its own say it, too). 0 and -1 would end some of them. A virtual
/// machine looks at the header, so it is zero: for no station.
fn no_frame(into: &mut [MaybeUninit<u8>]) -> usize {
    let len = into.len().min(ETHERNET_HEADER);
    into[..len].fill(MaybeUninit::new(0));
    NO_FRAME.min(len)
}

/// The errno for a port that cannot be opened.
pub(crate) fn errno_of(error: &Error) -> Errno {
    match error {
        Error::Unreachable { errno, .. } | Error::System { errno, .. } => *errno,
        Error::Permission { .. } => Errno::ACCESS,
        Error::TimedOut => Errno::TIMEDOUT,
        Error::Disconnected => Errno::CONNRESET,
        Error::Invalid(_) => Errno::INVAL,
        Error::Refused { code, .. } => match *code {
            code::NOT_FOUND => Errno::NODEV,
            code::DENIED => Errno::ACCESS,
            code::INVALID => Errno::INVAL,
            code::NO_MEMORY => Errno::NOMEM,
            code::LIMIT => Errno::USERS,
            code::UNAVAILABLE => Errno::AGAIN,
            _ => Errno::PROTO,
        },
        _ => Errno::PROTO,
    }
}

/// Writes a line for the program's user, unless `VNPLUG_QUIET` says that nobody wants any.
pub(crate) fn tell(text: &str) {
    if std::env::var_os("VNPLUG_QUIET").is_none_or(|value| value.is_empty()) {
        // Without a place for it there is no remedy.
        let _ = writeln!(std::io::stderr(), "vnplug: {text}");
    }
}

/// Bytes of the frame that is none.
const NO_FRAME: usize = 1;
const ETHERNET_HEADER: usize = 14;
/// How long a frame waits for room.
const LONGEST_WAIT: Duration = Duration::from_millis(100);
