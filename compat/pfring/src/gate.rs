//! What other threads and signal handlers may touch of a ring: breaks, shutdown, counters, and the
//! descriptors that wake sleepers. Nothing here locks.
//!
//! A break is a number that goes up. Every call that waits compares it with the number that was
//! answered last, so a break that comes between two calls ends the next one, and one break ends all
//! calls that wait at that moment.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};

/// See the module's comment.
#[derive(Debug)]
pub(crate) struct Gate {
    breaks: AtomicU32,
    answered: AtomicU32,
    shut: AtomicBool,
    /// Wakes sleepers for a break.
    bell: OwnedFd,
    /// Readable while packets may be had without any port ringing.
    ready: OwnedFd,
    is_ready: AtomicBool,
    /// Every port's descriptor.
    ports: OwnedFd,
    /// `ports` and `ready`: for the program.
    outside: OwnedFd,
    /// Somebody asked for `outside`.
    watched: AtomicBool,
    received: AtomicU64,
    dropped: AtomicU64,
    /// Losses that packets told of.
    told: AtomicU64,
}

/// Why [`Gate::sleep`] came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Woken {
    /// A port has news, or a break was rung.
    Now,
    /// The time is over.
    TimedOut,
    /// A signal was delivered.
    Interrupted,
}

impl Gate {
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let gate = Self {
            breaks: AtomicU32::new(0),
            answered: AtomicU32::new(0),
            shut: AtomicBool::new(false),
            bell: eventfd(0, flags)?,
            ready: eventfd(0, flags)?,
            is_ready: AtomicBool::new(false),
            ports: epoll::create(CreateFlags::CLOEXEC)?,
            outside: epoll::create(CreateFlags::CLOEXEC)?,
            watched: AtomicBool::new(false),
            received: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            told: AtomicU64::new(0),
        };
        watch(&gate.outside, gate.ports.as_fd())?;
        watch(&gate.outside, gate.ready.as_fd())?;
        Ok(gate)
    }

    /// A new port; it leaves when it is closed.
    pub(crate) fn add(&self, port: BorrowedFd<'_>) -> Result<(), Errno> {
        watch(&self.ports, port)
    }

    /// For the program's own poll, select or epoll.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.outside.as_fd()
    }

    /// From now on a reader that finds nothing arms its ports.
    pub(crate) fn watch(&self) {
        self.watched.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    /// Says whether packets may be had at once; two system calls per burst, none per packet.
    pub(crate) fn set_ready(&self, ready: bool) {
        let ready = ready || self.is_shut();
        if self.is_watched() && self.is_ready.swap(ready, Ordering::Relaxed) != ready {
            if ready {
                ring(&self.ready);
            } else {
                silence(&self.ready);
            }
        }
    }

    /// Ends the calls that wait, or else the next one. For signal handlers, too.
    pub(crate) fn break_loop(&self) {
        // Release: pairs with the Acquire in `is_broken`.
        self.breaks.fetch_add(1, Ordering::Release);
        ring(&self.bell);
    }

    /// Ends every call, for good. For signal handlers, too.
    pub(crate) fn shut_down(&self) {
        self.shut.store(true, Ordering::Release);
        self.break_loop();
        ring(&self.ready);
    }

    pub(crate) fn is_shut(&self) -> bool {
        // Acquire: pairs with the Release in `shut_down`.
        self.shut.load(Ordering::Acquire)
    }

    /// The number of the last break that was answered; a call that may wait takes it first.
    pub(crate) fn enter(&self) -> u32 {
        self.answered.load(Ordering::Relaxed)
    }

    /// True if there was a break since `entered`, which is then answered.
    #[inline]
    pub(crate) fn is_broken(&self, entered: u32) -> bool {
        // Acquire: pairs with the Release in `break_loop`.
        let breaks = self.breaks.load(Ordering::Acquire);
        if breaks == entered {
            return false;
        }
        self.answered.store(breaks, Ordering::Relaxed);
        true
    }

    /// Sleeps until a port has news or a break is rung, at most `limit`.
    pub(crate) fn sleep(&self, entered: u32, limit: Duration) -> Woken {
        if self.breaks.load(Ordering::Acquire) == entered {
            silence(&self.bell);
            // A break between the two lines above was silenced, but its number is seen here.
            if self.breaks.load(Ordering::Acquire) != entered {
                return Woken::Now;
            }
        }
        let mut fds = [
            PollFd::from_borrowed_fd(self.ports.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
        ];
        let limit = Timespec {
            tv_sec: limit.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&limit)) {
            Ok(0) => Woken::TimedOut,
            Err(Errno::INTR) => Woken::Interrupted,
            Ok(_) | Err(_) => Woken::Now,
        }
    }

    /// One packet more was taken by the program.
    #[inline]
    pub(crate) fn count(&self, packets: u64) {
        self.received.fetch_add(packets, Ordering::Relaxed);
    }

    /// `lost` packets were lost before a packet that was taken.
    pub(crate) fn add_dropped(&self, lost: u64) {
        let told = self.told.fetch_add(lost, Ordering::Relaxed) + lost;
        self.set_dropped(told);
    }

    /// How many packets were lost so far, as the rings say.
    pub(crate) fn set_dropped(&self, dropped: u64) {
        self.dropped.fetch_max(dropped, Ordering::Relaxed);
    }

    /// Packets taken and packets lost, as last known.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let received = self.received.load(Ordering::Relaxed);
        (received, self.dropped.load(Ordering::Relaxed))
    }
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    epoll::add(epoll, fd, EventData::new_u64(0), EventFlags::IN)
}

fn ring(bell: &OwnedFd) {
    // Fails only when it rings already.
    let _rings_already = write(bell, &1u64.to_ne_bytes());
}

fn silence(bell: &OwnedFd) {
    // Fails only when it does not ring.
    let _silent_already = read(bell, &mut [0u8; 8]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_break_between_two_calls_ends_the_next_one() {
        let gate = Gate::new().unwrap();
        gate.break_loop();
        let entered = gate.enter();
        assert_eq!(gate.sleep(entered, LONG), Woken::Now);
        assert!(gate.is_broken(entered));
        let entered = gate.enter();
        assert!(!gate.is_broken(entered));
        assert_eq!(gate.sleep(entered, Duration::ZERO), Woken::TimedOut);
    }

    #[test]
    fn one_break_ends_every_call_that_waits() {
        let gate = Gate::new().unwrap();
        let (one, two) = (gate.enter(), gate.enter());
        gate.break_loop();
        assert!(gate.is_broken(one) && gate.is_broken(two));
        assert!(!gate.is_broken(gate.enter()));
    }

    #[test]
    fn a_sleeper_is_woken_by_a_break_in_another_thread() {
        let gate = Gate::new().unwrap();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let entered = gate.enter();
                while !gate.is_broken(entered) {
                    gate.sleep(entered, LONG);
                }
            });
            gate.break_loop();
            sleeper.join().unwrap();
        });
    }

    #[test]
    fn the_descriptor_is_readable_while_packets_may_be_had_and_after_the_end() {
        let gate = Gate::new().unwrap();
        let readable = |gate: &Gate| {
            let mut fds = [PollFd::from_borrowed_fd(gate.fd(), PollFlags::IN)];
            poll(
                &mut fds,
                Some(&Timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                }),
            )
            .unwrap()
                == 1
        };
        gate.watch();
        assert!(!readable(&gate));
        gate.set_ready(true);
        assert!(readable(&gate));
        gate.set_ready(false);
        assert!(!readable(&gate));
        gate.shut_down();
        gate.set_ready(false);
        assert!(readable(&gate));
    }
}
