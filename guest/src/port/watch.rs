//! The one descriptor that says "call next": an epoll instance over the doorbell, the control
//! socket and a timer. Its number stays the same for the port's life.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::connection::timespec;
use crate::error::Error;

/// See the module's comment.
#[derive(Debug)]
pub(crate) struct Watch {
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
    pub(crate) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(Error::system("cannot make an epoll instance"))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(Error::system("cannot make a timer"))?;
        let watch = Self { epoll, timer };
        watch.add(watch.timer.as_fd(), TIMER)?;
        Ok(watch)
    }

    /// Adds the doorbell and the control socket; they leave when they are closed.
    pub(crate) fn attach(
        &self,
        wake: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
    ) -> Result<(), Error> {
        self.add(wake, WAKE)?;
        self.add(control, CONTROL)
    }

    /// Takes the doorbell and the control socket out, before they are closed: a copy of them in a
    /// forked child would keep them in.
    pub(crate) fn detach(&self, wake: BorrowedFd<'_>, control: BorrowedFd<'_>) {
        for fd in [wake, control] {
            let removed = epoll::delete(&self.epoll, fd);
            debug_assert!(removed.is_ok(), "attached descriptors can be removed");
        }
    }

    /// Makes the descriptor readable after `delay`, and until the next call; `None`: never.
    pub(crate) fn set_timer(&self, delay: Option<Duration>) {
        let delay = delay.map_or(Duration::ZERO, |delay| delay.max(Duration::from_nanos(1)));
        let once = Itimerspec {
            it_interval: timespec(Duration::ZERO),
            it_value: timespec(delay),
        };
        let set = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
        debug_assert!(set.is_ok(), "a valid time can be set");
    }

    /// Waits up to `timeout` (`None`: for ever) for any of the descriptors.
    pub(crate) fn look(&self, timeout: Option<Duration>) -> Result<Seen, Error> {
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 3];
        let timeout = timeout.map(timespec);
        let found = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(found) => found,
            Err(Errno::INTR) => {
                return Ok(Seen {
                    interrupted: true,
                    ..Seen::default()
                });
            }
            Err(errno) => return Err(Error::system("cannot wait for the port")(errno)),
        };
        let mut seen = Seen::default();
        for event in &events[..found] {
            match event.data.u64() {
                WAKE => seen.wake = true,
                CONTROL => seen.control = true,
                _ => seen.timer = true,
            }
        }
        Ok(seen)
    }

    fn add(&self, fd: BorrowedFd<'_>, what: u64) -> Result<(), Error> {
        epoll::add(&self.epoll, fd, EventData::new_u64(what), EventFlags::IN)
            .map_err(Error::system("cannot watch a descriptor"))
    }
}

impl Seen {
    /// Nothing happened within the time.
    pub(crate) fn nothing(self) -> bool {
        !(self.wake || self.control || self.timer || self.interrupted)
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

const TIMER: u64 = 0;
const WAKE: u64 = 1;
const CONTROL: u64 = 2;
