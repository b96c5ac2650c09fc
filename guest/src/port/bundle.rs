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
//! A port that is empty, armed and waits for nothing is **asleep**, and not looked at until it has news: of a daemon
//! the board says which ([`Board`]), of an agent the descriptor that is readable. The others are awake, and every
//! wait looks at them. So ten thousand of which one has packets cost what that one costs.
//!
//! What is said of the whole connection wakes all. A connection that is over is left by every port when it looks;
//! the first that comes back makes the next one. A daemon or agent that is too old for boards has all of them looked
//! at after each wake-up.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::phase::{Phase, Standing};
use super::watch::Watch;
use super::{Port, Ready};
use crate::error::Error;
use crate::options::PortOptions;

pub(super) use common::{Common, Seat};

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
///     while let Some(at) = bundle.next_ready() {
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
    /// Where in `ports` the one with this seat is.
    at: Vec<Option<usize>>,
    /// Seats before this one were asked about since the last wait.
    told: usize,
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
        Ok(Self {
            ports: Vec::new(),
            at: Vec::new(),
            told: 0,
            common: Arc::new(Common::new()?),
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
        let last = self.ports.len();
        self.ports.push(port);
        self.is_at(last, Some(last));
        Ok(&mut self.ports[last])
    }

    /// Opens one more port, for the caller to keep: what gives ports of a bundle to another language
    /// needs each in a place of its own. Wait with [`wait_apart`](Self::wait_apart); one that is dropped is
    /// closed.
    ///
    /// # Errors
    /// As [`PortOptions::open`].
    pub fn open_apart(&mut self, options: PortOptions) -> Result<Port, Error> {
        self.apart = true;
        self.open_one(options)
    }

    /// The number of a port of this bundle, by which it is named while it lives; a later one may have it again.
    pub fn number_of(&self, port: &Port) -> Option<usize> {
        let seat = port.watch.seat()?;
        Arc::ptr_eq(&seat.common, &self.common).then_some(seat.number as usize)
    }

    fn open_one(&self, options: PortOptions) -> Result<Port, Error> {
        Port::open_with(options, Watch::common(Seat::take(&self.common)))
    }

    /// The port that is at a place is found there from now on.
    fn is_at(&mut self, port: usize, place: Option<usize>) {
        if let Some(seat) = self.ports[port].watch.seat() {
            let seat = seat.number as usize;
            if seat >= self.at.len() {
                self.at.resize(seat + 1, None);
            }
            self.at[seat] = place;
        }
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
        self.is_at(at, None);
        drop(self.ports.swap_remove(at));
        if at < self.ports.len() {
            self.is_at(at, Some(at));
        }
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
        self.told = 0;
        let Self {
            ports, at, common, ..
        } = self;
        common.wait(timeout, |seat, look| {
            let at = at.get(seat).copied().flatten();
            if let Some(port) = at.and_then(|at| ports.get_mut(at)) {
                look(port);
            }
            true
        })
    }

    /// The place in [`ports`](Self::ports) of one that may have something to say, each once after a
    /// [`wait`](Self::wait): it has packets, be it fewer than its watermark, or it is not attached, or over. `None`:
    /// the others have nothing. What this and `wait` cost depends on how many those are, and not on how many
    /// ports there are. After [`close`](Self::close) go on asking.
    pub fn next_ready(&mut self) -> Option<usize> {
        loop {
            let seat = self.next_awake()?;
            if let Some(at) = self.at.get(seat).copied().flatten() {
                return Some(at);
            }
        }
    }

    /// As [`next_ready`](Self::next_ready), for ports that are kept elsewhere: a [number](Self::number_of).
    pub fn next_awake(&mut self) -> Option<usize> {
        let seat = self.common.awake_from(self.told)?;
        self.told = seat + 1;
        Some(seat)
    }

    /// As [`wait`](Self::wait), for ports that are kept elsewhere. `visit` is asked for those that may have news, by
    /// their [numbers](Self::number_of): it gives the port of that number to the function that it gets, if there is
    /// still one. If it returns false the wait is over.
    ///
    /// # Errors
    /// Only of the system.
    pub fn wait_apart(
        &mut self,
        timeout: Option<Duration>,
        visit: impl FnMut(usize, &mut dyn FnMut(&mut Port)) -> bool,
    ) -> Result<Ready, Error> {
        self.told = 0;
        self.common.wait(timeout, visit)
    }

    /// Drops the bundle when the ports kept elsewhere go, too: they do not say good-bye one by one,
    /// for the end of the connection closes them all.
    pub fn end(mut self) {
        self.apart = false;
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // The connection's end closes all ports at once.
        self.common.end(!self.apart);
    }
}

impl Common {
    /// See [`Bundle::wait`]; `visit` gives the port of a seat to what looks at it. False: the wait is over.
    fn wait(
        &self,
        timeout: Option<Duration>,
        mut visit: impl FnMut(usize, &mut dyn FnMut(&mut Port)) -> bool,
    ) -> Result<Ready, Error> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut rang = self.look(Some(Duration::ZERO))?.wake;
        loop {
            let news = self.has_news();
            let until = Instant::now() + REOPENING;
            let mut round = Round {
                news,
                until: deadline.map_or(until, |deadline| deadline.min(until)),
                reopened: false,
                unread: false,
                ready: false,
                cap: None,
            };
            if news {
                self.stir_all();
            }
            let mut from = 0;
            while let Some(seat) = self.awake_from(from) {
                from = seat + 1;
                // Before it is armed: what comes after that wakes it again.
                self.rest(seat);
                let mut sleeps = true;
                let goes_on = visit(seat, &mut |port: &mut Port| {
                    sleeps = round.look(port);
                });
                if !goes_on || !sleeps {
                    self.stir(seat);
                }
                if !goes_on {
                    return Ok(Ready::Now);
                }
            }
            let Round {
                unread, ready, cap, ..
            } = round;
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

/// What a look at the ports found.
#[derive(Debug)]
struct Round {
    /// Something was said of the connection.
    news: bool,
    /// Until when ports are reopened.
    until: Instant,
    /// One was.
    reopened: bool,
    /// Packets are unread.
    unread: bool,
    /// A port has what it would wait for.
    ready: bool,
    /// How long may be slept at most.
    cap: Option<Duration>,
}

impl Round {
    /// Looks at a port. True: it may sleep, for it will ring when it has something.
    fn look(&mut self, port: &mut Port) -> bool {
        if self.news {
            port.hear();
        }
        let armed = port.arm_all();
        if port.has_unread() {
            self.unread = true;
            self.ready |= armed.ready || !matches!(port.phase, Phase::Live);
            self.cap = earlier(self.cap, armed.at_most);
            // Without room no more may come that makes it enough.
            let again = port.watch.due().filter(|_| port.look_again.is_some());
            self.cap = earlier(self.cap, again);
            return false;
        }
        // To reopen takes the daemon's time. The first one may: with no time at all
        // none would ever be back.
        let is_away = matches!(port.phase, Phase::Away { .. });
        let mut is_quiet = true;
        if !(is_away && self.reopened && Instant::now() >= self.until) {
            self.reopened |= is_away && port.watch.due() == Some(Duration::ZERO);
            is_quiet = matches!(port.advance(), Ok(Standing::Quiet));
            self.ready |= !is_quiet;
        }
        let due = port.watch.due();
        self.cap = earlier(self.cap, due);
        is_quiet && due.is_none() && matches!(port.phase, Phase::Live)
    }
}

fn earlier(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    [one, other].into_iter().flatten().min()
}

/// How long ports are reopened before the others are looked at.
const REOPENING: Duration = Duration::from_millis(10);
