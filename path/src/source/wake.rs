//! What a queue waits for when it has nothing, and the sleep of the thread that serves it.
//!
//! A queue never blocks. It says what it waits for ([`Wake`]); the thread sleeps on what all its
//! queues wait for together ([`Sleep`]), and tells each what was seen. So one thread can serve
//! several queues, and what it waits for besides is its own business.
//!
//! A queue of many descriptors has them in an epoll instance ([`Queue::epoll`]). Its thread sleeps in that
//! (`look`), so that one system call ends the sleep and says which of them ended it.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::epoll::{self, Event, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use smallvec::SmallVec;

use super::Queue;

/// What may give a queue that has nothing something to do.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wake<'a> {
    /// Descriptors that become readable then.
    pub fds: [Option<BorrowedFd<'a>>; 2],
    /// How long it can wait at most, whatever they say: zero if there may be frames now, `None` if
    /// there is no limit.
    pub within: Option<Duration>,
}

impl Wake<'_> {
    /// There may be frames now.
    pub const NOW: Self = Self {
        fds: [None, None],
        within: Some(Duration::ZERO),
    };
}

/// What `poll(2)` said of a [`Wake`]'s descriptors.
pub type Seen = [PollFlags; 2];

/// Nothing was.
pub(crate) const NOTHING: Seen = [PollFlags::empty(); 2];

/// A sleep on what several queues wait for.
#[derive(Default)]
pub struct Sleep<'a> {
    /// Three of each queue: its thread's waker, and its own two.
    fds: SmallVec<[PollFd<'a>; 3 * USUAL]>,
    within: Option<Duration>,
    /// Somebody can go on at once.
    is_over: bool,
}

impl<'a> Sleep<'a> {
    /// Also until `waker` is readable, or what a queue waits for has come.
    pub fn add(&mut self, waker: BorrowedFd<'a>, wake: Wake<'a>) {
        self.fds
            .push(PollFd::from_borrowed_fd(waker, PollFlags::IN));
        let own = wake.fds.map(|fd| match fd {
            Some(fd) => PollFd::from_borrowed_fd(fd, PollFlags::IN),
            // Nothing is asked of it.
            None => PollFd::from_borrowed_fd(waker, PollFlags::empty()),
        });
        self.fds.extend(own);
        self.is_over |= wake.within == Some(Duration::ZERO);
        self.limit(wake.within);
    }

    /// And not longer than this.
    pub fn limit(&mut self, within: Option<Duration>) {
        self.within = [self.within, within].into_iter().flatten().min();
    }

    /// Whether somebody can go on at once: then there is no sleep, and nothing is seen.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Sleeps, to the nanosecond. Returns early on a signal, and after an hour. What was seen, in the
    /// order in which the queues were added.
    pub fn sleep(mut self) -> smallvec::IntoIter<[Seen; USUAL]> {
        if !self.is_over {
            // An error (a signal) is an early return: the flags stay empty.
            let _ = poll(&mut self.fds, Some(&timeout(self.within)));
        }
        let seen = self.fds.chunks_exact(3).map(|fds| match fds {
            [_, first, second] => [first.revents(), second.revents()],
            _ => NOTHING,
        });
        seen.collect::<SmallVec<[Seen; USUAL]>>().into_iter()
    }
}

/// Sleeps until frames may be there, `waker` is readable or `timeout` has passed: what a thread does
/// that serves this queue alone.
pub fn wait(queue: &mut dyn Queue, waker: BorrowedFd<'_>, timeout: Option<Duration>) {
    let epoll = queue.epoll();
    let mut wake = queue.arm();
    if let Some(epoll) = &epoll {
        wake.fds[0] = Some(epoll.as_fd());
    }
    let mut sleep = Sleep::default();
    sleep.add(waker, wake);
    sleep.limit(timeout);
    let seen = sleep.sleep().next();
    if let Some(epoll) = &epoll {
        look(epoll, Some(Duration::ZERO), |number, flags| {
            queue.found(number, flags);
        });
    }
    queue.woke(seen.unwrap_or(NOTHING));
}

/// Sleeps, to the nanosecond, until something that an epoll instance watches has something, or the time is over, and says
/// what has: with which number it is watched, and how it is. Returns early on a signal, and after an hour.
pub(crate) fn look(
    epoll: impl AsFd,
    within: Option<Duration>,
    mut found: impl FnMut(u64, EventFlags),
) {
    let mut events = [Event {
        flags: EventFlags::empty(),
        data: epoll::EventData::new_u64(0),
    }; EVENTS];
    let limit = timeout(within);
    let count = match epoll::wait(&epoll, &mut events, Some(&limit)) {
        Ok(count) => count,
        Err(Errno::INTR) => 0,
        Err(_) => look_in_two(epoll, &mut events, &limit),
    };
    for event in &events[..count] {
        found(event.data.u64(), event.flags);
    }
}

/// The same in two calls. Linux before 5.11 sleeps in epoll for whole milliseconds only, and sandboxes may not know the
/// later call.
#[cold]
fn look_in_two(epoll: impl AsFd, events: &mut [Event], limit: &Timespec) -> usize {
    let mut fd = [PollFd::new(&epoll, PollFlags::IN)];
    // The only error that is possible is a signal.
    let _ = poll(&mut fd, Some(limit));
    epoll::wait(&epoll, events, Some(&Timespec::default())).unwrap_or(0)
}

/// What the system is given of a limit.
fn timeout(within: Option<Duration>) -> Timespec {
    let limit = within.unwrap_or(LONGEST).min(LONGEST);
    Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    }
}

/// Queues of a thread for which nothing is allocated.
const USUAL: usize = 8;
/// Events that are looked at together. The kernel has all that stay in turns.
const EVENTS: usize = 64;
const LONGEST: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Instant;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn whoever_has_something_ends_the_sleep_of_all_and_is_told_what() {
        let event = |count| eventfd(count, EventfdFlags::empty()).unwrap();
        let (silent, rung) = (event(0), event(1));
        let mut sleep = Sleep::default();
        sleep.add(silent.as_fd(), Wake::default());
        let wake = Wake {
            fds: [Some(silent.as_fd()), Some(rung.as_fd())],
            within: None,
        };
        sleep.add(silent.as_fd(), wake);
        let seen: Vec<Seen> = sleep.sleep().collect();
        let nothing = PollFlags::empty();
        assert_eq!(seen, [[nothing; 2], [nothing, PollFlags::IN]]);
    }

    #[test]
    fn who_looks_learns_what_there_is_by_one_call_and_by_two() {
        let event = |count| eventfd(count, EventfdFlags::empty()).unwrap();
        let (silent, rung) = (event(0), event(1));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for (fd, number) in [(&silent, 7), (&rung, 8)] {
            let data = epoll::EventData::new_u64(number);
            epoll::add(&epoll, fd, data, EventFlags::IN).unwrap();
        }
        let mut all = Vec::new();
        look(&epoll, None, |number, flags| all.push((number, flags)));
        assert_eq!(all, [(8, EventFlags::IN)]);
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 2];
        assert_eq!(look_in_two(&epoll, &mut events, &timeout(None)), 1);
        assert_eq!({ events[0].data }.u64(), 8);
        // Less than a millisecond is no whole one, and not none.
        rustix::io::read(&rung, &mut [0; 8]).unwrap();
        let limit = Duration::from_micros(500);
        let begun = Instant::now();
        look(&epoll, Some(limit), |number, _| {
            panic!("{number} has nothing")
        });
        assert_eq!(look_in_two(&epoll, &mut events, &timeout(Some(limit))), 0);
        assert!(begun.elapsed() >= 2 * limit);
    }

    #[test]
    fn the_shortest_limit_counts_and_zero_is_no_sleep() {
        let silent = eventfd(0, EventfdFlags::empty()).unwrap();
        let begun = Instant::now();
        for within in [Duration::from_millis(20), Duration::ZERO] {
            let mut sleep = Sleep::default();
            sleep.add(silent.as_fd(), Wake::default());
            let wake = Wake {
                within: Some(within),
                ..Wake::default()
            };
            sleep.add(silent.as_fd(), wake);
            sleep.limit(Some(Duration::from_secs(60)));
            assert_eq!(sleep.sleep().count(), 2);
            assert!(begun.elapsed() >= Duration::from_millis(20));
        }
        assert!(begun.elapsed() < Duration::from_secs(50));
    }
}
