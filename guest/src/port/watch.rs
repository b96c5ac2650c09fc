//! The one descriptor that says "call next": an epoll instance over the doorbell, the control
//! socket and a timer. Its number stays the same for the port's life.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::bundle::{Common, Seat};
use crate::connection::timespec;
use crate::error::Error;

/// How a port waits.
#[derive(Debug)]
pub(crate) enum Watch {
    /// By descriptors of its own.
    Own(Own),
    /// By those of its bundle, and until this time.
    Common(Seat, Option<Instant>),
}

/// See the module's comment.
#[derive(Debug)]
pub(crate) struct Own {
    epoll: OwnedFd,
    timer: OwnedFd,
}

/// What a look at the descriptors found.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    /// The doorbell was rung.
    pub(crate) wake: bool,
    /// The control socket has news.
    pub(crate) control: bool,
    /// The timer is over.
    pub(crate) timer: bool,
    /// A signal ended the wait.
    pub(crate) interrupted: bool,
}

impl Watch {
    /// For a port by itself.
    pub(crate) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(Error::system("cannot make an epoll instance"))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(Error::system("cannot make a timer"))?;
        let own = Own { epoll, timer };
        own.add(own.timer.as_fd(), TIMER)?;
        Ok(Self::Own(own))
    }

    /// For a port of a bundle.
    pub(super) fn common(seat: Seat) -> Self {
        Self::Common(seat, None)
    }

    /// Its seat in the bundle, if it is a port of one.
    pub(super) fn seat(&self) -> Option<&Seat> {
        match self {
            Self::Own(_) => None,
            Self::Common(seat, _) => Some(seat),
        }
    }

    /// What the ports of the bundle have in common, if it is a port of one.
    pub(super) fn shared(&self) -> Option<&Arc<Common>> {
        self.seat().map(|seat| &seat.common)
    }

    /// How long until the time that was set, in a bundle.
    pub(super) fn due(&self) -> Option<Duration> {
        match self {
            Self::Own(_) => None,
            Self::Common(_, due) => due.map(|due| due.saturating_duration_since(Instant::now())),
        }
    }

    /// Adds the doorbell and the control socket; they leave when they are closed.
    pub(crate) fn attach(
        &self,
        wake: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        if let Self::Own(own) = self {
            own.add(wake, WAKE)?;
            own.add(control, CONTROL)?;
        }
        Ok(())
    }

    /// Adds another doorbell.
    pub(super) fn add_wake(&self, wake: BorrowedFd<'_>) -> Result<(), Error> {
        match self {
            Self::Own(own) => own.add(wake, WAKE),
            Self::Common(..) => Err(Error::Invalid("direct mode is not for ports of a bundle")),
        }
    }

    /// Takes it out.
    pub(super) fn remove_wake(&self, wake: BorrowedFd<'_>) {
        if let Self::Own(own) = self {
            // It is in there, so there is no error.
            let _ = epoll::delete(&own.epoll, wake);
        }
    }

    /// Takes the doorbell and the control socket out, before they are closed: a copy of them in a
    /// forked child would keep them in.
    pub(crate) fn detach(&self, wake: BorrowedFd<'_>, control: BorrowedFd<'_>) {
        if let Self::Own(own) = self {
            for fd in [wake, control] {
                let removed = epoll::delete(&own.epoll, fd);
                debug_assert!(removed.is_ok(), "attached descriptors can be removed");
            }
        }
    }

    /// Makes the descriptor readable after `delay`, and until the next call; `None`: never. In a bundle
    /// it is the bundle that waits no longer.
    pub(crate) fn set_timer(&mut self, delay: Option<Duration>) {
        match self {
            Self::Own(own) => own.set_timer(delay),
            Self::Common(seat, due) => {
                *due = delay.and_then(|delay| Instant::now().checked_add(delay));
                if due.is_some() {
                    // The bundle is to know of the time.
                    seat.stir();
                }
            }
        }
    }

    /// Waits up to `timeout` (`None`: for ever) for any of the descriptors.
    pub(crate) fn look(&self, timeout: Option<Duration>) -> Result<Seen, Error> {
        match self {
            Self::Own(own) => own.look(timeout),
            Self::Common(seat, _) => {
                let due = self.due();
                let seen = seat
                    .common
                    .look([timeout, due].into_iter().flatten().min())?;
                Ok(Seen {
                    timer: seen.nothing()
                        && due.is_some_and(|due| timeout.is_none_or(|it| due < it)),
                    ..seen
                })
            }
        }
    }
}

impl Own {
    fn set_timer(&self, delay: Option<Duration>) {
        let delay = delay.map_or(Duration::ZERO, |delay| delay.max(Duration::from_nanos(1)));
        let once = Itimerspec {
            it_interval: timespec(Duration::ZERO),
            it_value: timespec(delay),
        };
        let set = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
        debug_assert!(set.is_ok(), "a valid time can be set");
    }

    fn look(&self, timeout: Option<Duration>) -> Result<Seen, Error> {
        Seen::wait(&self.epoll, timeout)
    }

    fn add(&self, fd: BorrowedFd<'_>, what: u64) -> Result<(), Error> {
        add(&self.epoll, fd, what)
    }
}

impl Seen {
    /// Waits up to `timeout` (`None`: for ever) for any of the descriptors of an epoll instance.
    fn wait(epoll: &OwnedFd, timeout: Option<Duration>) -> Result<Self, Error> {
        let mut seen = Self::default();
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 8];
        match epoll::wait(epoll, &mut events, timeout.map(timespec).as_ref()) {
            Ok(found) => {
                for event in &events[..found] {
                    match event.data.u64() {
                        WAKE => seen.wake = true,
                        CONTROL => seen.control = true,
                        _ => seen.timer = true,
                    }
                }
            }
            Err(Errno::INTR) => seen.interrupted = true,
            Err(errno) => return Err(Error::system("cannot wait for a port")(errno)),
        }
        Ok(seen)
    }

    /// Nothing happened within the time.
    pub(crate) fn nothing(self) -> bool {
        !(self.wake || self.control || self.timer || self.interrupted)
    }
}

/// Adds a descriptor to an epoll instance.
pub(super) fn add(epoll: &OwnedFd, fd: BorrowedFd<'_>, what: u64) -> Result<(), Error> {
    epoll::add(epoll, fd, EventData::new_u64(what), EventFlags::IN)
        .map_err(Error::system("cannot watch a descriptor"))
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(own) => own.epoll.as_fd(),
            Self::Common(seat, _) => seat.common.as_fd(),
        }
    }
}

const TIMER: u64 = 0;
const WAKE: u64 = 1;
pub(super) const CONTROL: u64 = 2;
