//! Many ports of one reader: one connection, one doorbell, one place to wait.
//!
//! A port by itself has a connection, a pipe, a timer and an epoll instance: four descriptors here and
//! two in the daemon. Ports of a bundle have none of their own, only their mapped memory; but one that
//! sends has a socket for its kicks on each side, and in a guest whose doorbell has vectors each has
//! the eventfd of its vector.
//!
//! ```text
//!  port ── rings      port ── rings      port ── rings
//!    \                  |                  /
//!     `------- Common: Line (socket), wake (pipe), epoll
//! ```
//!
//! Who is woken does not know for which port, and looks at all of them: a bundle is for readers that
//! take from all their ports in turns. A connection that is over is left by every port when it looks;
//! the first that comes back makes the next one.

use std::borrow::BorrowMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags};
use rustix::io::read;

use super::link::{Line, lock};
use super::phase::{Phase, Standing};
use super::watch::{self, CONTROL, Seen, WAKE, Watch};
use super::{Port, Ready};
use crate::connection::Connection;
use crate::error::Error;
use crate::options::PortOptions;

/// Ports that share a connection and are waited for together: ten thousand of them that do not send
/// take three descriptors, on the host and in guests without doorbell vectors.
///
/// ```no_run
/// # fn main() -> Result<(), vnplug::Error> {
/// use vnplug::Next;
///
/// let mut bundle = vnplug::Bundle::new()?;
/// for target in ["10.0.0.1", "10.0.0.2"] {
///     bundle.open(vnplug::PortOptions::new("eth1").filter(&format!("host {target}")))?;
/// }
/// while !bundle.ports().is_empty() {
///     bundle.wait(None)?;
///     // From the end: the last takes the place of one that is closed.
///     for at in (0..bundle.ports().len()).rev() {
///         let over = loop {
///             match bundle.ports()[at].next() {
///                 Ok(Next::Packet(packet)) => println!("{} bytes", packet.bytes.len()),
///                 Ok(Next::Nothing) => break false,
///                 Ok(Next::Ended) | Err(_) => break true,
///             }
///         };
///         if over {
///             bundle.close(at);
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Bundle {
    // Dropped first: they say good-bye through what they have in common.
    ports: Vec<Port>,
    common: Arc<Common>,
    /// Some ports are kept elsewhere.
    apart: bool,
}

impl Bundle {
    /// A bundle without ports.
    ///
    /// # Errors
    /// [`Error::System`]: descriptors are short.
    pub fn new() -> Result<Self, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(Error::system("cannot make an epoll instance"))?;
        Ok(Self {
            ports: Vec::new(),
            common: Arc::new(Common {
                epoll,
                state: Mutex::default(),
                over: AtomicBool::new(false),
            }),
            apart: false,
        })
    }

    /// Opens one more port; the last of [`ports`](Self::ports). All ports of a bundle are of one daemon
    /// or agent, the first one's.
    ///
    /// # Errors
    /// As [`PortOptions::open`].
    pub fn open(&mut self, options: PortOptions) -> Result<&mut Port, Error> {
        let port = self.open_one(options)?;
        self.ports.push(port);
        let last = self.ports.len() - 1;
        Ok(&mut self.ports[last])
    }

    /// Opens one more port, for the caller to keep: what gives ports of a bundle to another language
    /// needs each in a place of its own. Wait with [`wait_for`](Self::wait_for); one that is dropped is
    /// closed.
    ///
    /// # Errors
    /// As [`PortOptions::open`].
    pub fn open_apart(&mut self, options: PortOptions) -> Result<Port, Error> {
        self.apart = true;
        self.open_one(options)
    }

    fn open_one(&self, options: PortOptions) -> Result<Port, Error> {
        Port::open_with(options, Watch::common(Arc::clone(&self.common)))
    }

    /// The ports, in the order of their opening if none was closed.
    pub fn ports(&mut self) -> &mut [Port] {
        &mut self.ports
    }

    /// Closes a port by its place in [`ports`](Self::ports); the last one takes its place.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn close(&mut self, at: usize) {
        drop(self.ports.swap_remove(at));
    }

    /// As [`Port::wait`], until any port has what it would wait for. A port that is over makes it return
    /// at once: close it.
    ///
    /// Ports that come back after a restart of the daemon are reopened here, as many as 10 ms allow, or
    /// the timeout if that is shorter, but at least one; then what the others have is told. The daemon
    /// may let a reopening wait for 2 s, which the timeout does not shorten.
    ///
    /// # Errors
    /// Only of the system.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Ready, Error> {
        self.common.wait(&mut self.ports, timeout)
    }

    /// As [`wait`](Self::wait), for ports that are kept elsewhere.
    ///
    /// # Errors
    /// [`Error::Invalid`] if one of them is no port of this bundle; else only of the system.
    pub fn wait_for(
        &mut self,
        ports: &mut [&mut Port],
        timeout: Option<Duration>,
    ) -> Result<Ready, Error> {
        let ours = |port: &&mut Port| {
            let shared = port.watch.shared();
            shared.is_some_and(|common| Arc::ptr_eq(common, &self.common))
        };
        if !ports.iter().all(ours) {
            return Err(Error::Invalid("a port of another bundle, or of none"));
        }
        self.common.wait(ports, timeout)
    }

    /// Drops the bundle when the ports kept elsewhere go, too: they do not say good-bye one by one,
    /// for the end of the connection closes them all.
    pub fn end(mut self) {
        self.apart = false;
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // The connection's end closes all ports at once. Relaxed: read by this thread, when its ports
        // go, or by those that got the ports kept elsewhere from it.
        self.common.over.store(!self.apart, Ordering::Relaxed);
    }
}

impl Common {
    /// See [`Bundle::wait`].
    fn wait(
        &self,
        ports: &mut [impl BorrowMut<Port>],
        timeout: Option<Duration>,
    ) -> Result<Ready, Error> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut rang = self.look(Some(Duration::ZERO))?.wake;
        loop {
            let news = self.has_news();
            let (mut unread, mut ready, mut cap) = (false, false, None);
            let until = Instant::now() + REOPENING;
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            let mut reopened = false;
            for port in ports.iter_mut().map(BorrowMut::borrow_mut) {
                if news {
                    port.hear();
                }
                let armed = port.arm_all();
                if port.has_unread() {
                    unread = true;
                    ready |= armed.ready || !matches!(port.phase, Phase::Live);
                    cap = earlier(cap, armed.at_most);
                } else {
                    // To reopen takes the daemon's time. The first one may: with no time at all
                    // none would ever be back.
                    let is_away = matches!(port.phase, Phase::Away { .. });
                    if !(is_away && reopened && Instant::now() >= until) {
                        reopened |= is_away && port.watch.due() == Some(Duration::ZERO);
                        ready |= !matches!(port.advance(), Ok(Standing::Quiet));
                    }
                    cap = earlier(cap, port.watch.due());
                }
            }
            if news {
                self.forget_news();
            }
            if ready || unread && rang {
                return Ok(Ready::Now);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let seen = self.look(earlier(left, cap))?;
            if seen.interrupted {
                return Ok(Ready::Interrupted);
            }
            if seen.nothing() {
                let waited_enough = cap.is_some_and(|cap| left.is_none_or(|left| cap <= left));
                match waited_enough {
                    true if unread => return Ok(Ready::Now),
                    // A port tries to come back.
                    true if left.is_none_or(|left| !left.is_zero()) => {}
                    true => return Ok(Ready::TimedOut),
                    false => return Ok(Ready::TimedOut),
                }
            }
            rang = seen.wake;
        }
    }
}

fn earlier(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    [one, other].into_iter().flatten().min()
}

/// What the ports of a bundle have in common.
#[derive(Debug)]
pub(crate) struct Common {
    epoll: OwnedFd,
    state: Mutex<BundleState>,
    /// The whole bundle goes.
    over: AtomicBool,
}

#[derive(Debug, Default)]
struct BundleState {
    line: Option<Arc<Mutex<Connection>>>,
    /// One; several behind an agent. With the numbers by which they are known.
    wakes: Vec<(u64, OwnedFd)>,
    next_wake: u64,
    /// When a connection was tried in vain, and why.
    failed: Option<(Instant, Error)>,
}

impl Common {
    /// The connection, a new one if need be.
    pub(super) fn line(self: &Arc<Self>, path: &Path, limit: Duration) -> Result<Line, Error> {
        let mut state = self.state();
        if let Some(line) = &state.line
            && lock(line).is_alive()
        {
            return Ok(Line::Common(Arc::clone(line), Arc::clone(self)));
        }
        self.retire(&mut state);
        if let Some((at, why)) = &state.failed
            && at.elapsed() < PAUSE
        {
            return Err(why.clone());
        }
        match Connection::open(path, limit) {
            Ok(connection) => {
                watch::add(&self.epoll, connection.as_fd(), CONTROL)?;
                let line = Arc::new(Mutex::new(connection));
                state.line = Some(Arc::clone(&line));
                Ok(Line::Common(line, Arc::clone(self)))
            }
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Takes a doorbell into use; the number is for [`remove_wake`](Self::remove_wake).
    pub(super) fn add_wake(&self, wake: OwnedFd) -> Result<u64, Error> {
        watch::add(&self.epoll, wake.as_fd(), WAKE)?;
        let mut state = self.state();
        state.next_wake += 1;
        let number = state.next_wake;
        state.wakes.push((number, wake));
        Ok(number)
    }

    /// Closes the doorbell of a port that is gone.
    pub(super) fn remove_wake(&self, number: u64) {
        let mut state = self.state();
        // It may have gone with an earlier connection.
        if let Some(at) = state.wakes.iter().position(|(it, _)| *it == number) {
            let (_, wake) = state.wakes.swap_remove(at);
            let _ = epoll::delete(&self.epoll, &wake);
        }
    }

    /// Waits for the doorbell and the connection, and empties both.
    pub(super) fn look(&self, timeout: Option<Duration>) -> Result<Seen, Error> {
        let seen = Seen::wait(&self.epoll, timeout)?;
        let mut state = self.state();
        if seen.wake {
            // Each port rang once: one look takes as much as a pipe holds, or the next ones find the
            // rest, and each of them goes through all ports.
            let mut bytes = [0; 1 << 16];
            // NB: a pipe whose other end is closed is readable for ever. With the last port that rings
            // it the daemon closes the connection too, which tells the reason.
            let epoll = &self.epoll;
            state.wakes.retain(|(_, wake)| {
                let is_over = matches!(read(wake, &mut bytes), Ok(0));
                if is_over {
                    let _ = epoll::delete(epoll, wake);
                }
                !is_over
            });
        }
        if seen.control
            && let Some(line) = &state.line
            && lock(line).gather().is_err()
        {
            self.retire(&mut state);
        }
        Ok(seen)
    }

    /// Lets go of a connection that is over; ports that still have it will leave it.
    fn retire(&self, state: &mut BundleState) {
        if let Some(line) = state.line.take() {
            let _ = epoll::delete(&self.epoll, lock(&line).as_fd());
        }
        for (_, wake) in state.wakes.drain(..) {
            let _ = epoll::delete(&self.epoll, &wake);
        }
    }

    fn has_news(&self) -> bool {
        let state = self.state();
        let line = state.line.as_ref();
        line.is_none_or(|line| lock(line).has_unasked())
    }

    /// What is left is about ports that were closed.
    fn forget_news(&self) {
        if let Some(line) = &self.state().line {
            lock(line).forget_unasked();
        }
    }

    /// Whether the whole bundle goes.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// What it guards is whole after every statement.
    fn state(&self) -> MutexGuard<'_, BundleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Common {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// How soon after a failure another port may try to connect.
const PAUSE: Duration = Duration::from_millis(10);
/// How long ports are reopened before the others are looked at.
const REOPENING: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::pipe::{PipeFlags, pipe_with};

    #[test]
    fn one_look_hears_all_ports_that_rang() {
        let bundle = Bundle::new().unwrap();
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        bundle.common.add_wake(read).unwrap();
        for _ in 0..10_000 {
            rustix::io::write(&write, &[1]).unwrap();
        }
        let look = || bundle.common.look(Some(Duration::ZERO)).unwrap();
        assert!(look().wake);
        assert!(
            look().nothing(),
            "the next look goes through all ports again"
        );
    }

    #[test]
    fn a_vector_goes_with_its_port() {
        let bundle = Bundle::new().unwrap();
        let (read, _write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        bundle.common.add_wake(read).unwrap();
        for _ in 0..3 {
            // The host keeps the other end of a vector: it never ends.
            let vector = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            let number = bundle.common.add_wake(vector).unwrap();
            assert_eq!(bundle.common.state().wakes.len(), 2);
            bundle.common.remove_wake(number);
            assert_eq!(bundle.common.state().wakes.len(), 1);
        }
        assert!(bundle.common.look(Some(Duration::ZERO)).unwrap().nothing());
    }
}
