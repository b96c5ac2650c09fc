//! How the thread that serves senders sleeps, and how it is woken.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use vnplug_os::socket;
use vnplug_os::socket::Heard;

use super::{Senders, quarantine};
use crate::engine::sender::Sender;

impl Senders {
    /// Asks all to kick; those that sleep were asked before. True: one has frames already (or has just been
    /// quarantined), do not sleep.
    pub(in crate::engine) fn arm(&mut self) -> (bool, Option<(u32, String)>) {
        let mut ready = false;
        for at in self.awake.iter() {
            let Some(sender) = self.all.get_mut(at).and_then(Option::as_mut) else {
                continue;
            };
            // The time wakes it, and no kick.
            if sender.held_us.is_some() {
                continue;
            }
            match sender.arm() {
                Ok(waits) => ready |= waits,
                Err(lie) => return (true, Some(quarantine(sender, lie.to_string()))),
            }
        }
        (ready, None)
    }

    /// While the thread does not sleep: looks now and then whether one that sleeps has kicked.
    #[inline]
    pub(in crate::engine) fn listen(&mut self, now_us: u64) -> Option<(u32, String)> {
        let sleeps = self.awake.count() < self.places.len();
        if !sleeps || now_us.saturating_sub(self.looked_us) < LOOK_US {
            return None;
        }
        self.looked_us = now_us;
        self.hush()
    }

    /// What to sleep on: `waker` and, if there are any, the kicks.
    pub(in crate::engine) fn waker<'a>(&'a self, waker: BorrowedFd<'a>) -> BorrowedFd<'a> {
        self.epoll.as_ref().map_or(waker, AsFd::as_fd)
    }

    /// Empties the sockets that were kicked, after a sleep. Bounded: further bytes are found after
    /// the next turn. A sender of anything but bytes is quarantined.
    pub(in crate::engine) fn hush(&mut self) -> Option<(u32, String)> {
        let epoll = self.epoll.as_ref()?;
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 16];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let found = epoll::wait(epoll, &mut events, Some(&now)).unwrap_or(0);
        for event in &events[..found] {
            let at = event.data.u64() as usize;
            let Some(sender) = self.all.get_mut(at).and_then(Option::as_mut) else {
                continue;
            };
            self.awake.set(at);
            let Some(kick) = &sender.kick else {
                continue;
            };
            match socket::receive(kick, &mut [0; 256]) {
                Ok(Heard::Bytes(1..) | Heard::Nothing) => {}
                Ok(Heard::Rights) => {
                    let _ = epoll::delete(epoll, kick);
                    let why = "descriptors came with its kicks";
                    return Some(quarantine(sender, why.to_owned()));
                }
                // The other end is closed, and would stay readable for ever.
                Ok(Heard::Bytes(_)) | Err(_) => {
                    let _ = epoll::delete(epoll, kick);
                }
            }
        }
        None
    }

    pub(super) fn unwatch(&self, sender: &Sender) {
        if let (Some(epoll), Some(kick)) = (&self.epoll, &sender.kick) {
            // Its other end may be closed, and then it is out already.
            let _ = epoll::delete(epoll, kick);
        }
    }
}

/// Adds a kick to the epoll instance, which is made now if there is none.
pub(super) fn watch(
    epoll: &mut Option<OwnedFd>,
    waker: BorrowedFd<'_>,
    kick: BorrowedFd<'_>,
    at: usize,
) -> rustix::io::Result<()> {
    let add = |epoll: &OwnedFd, fd: BorrowedFd<'_>, data| {
        epoll::add(epoll, fd, EventData::new_u64(data), EventFlags::IN)
    };
    if epoll.is_none() {
        let made = epoll::create(CreateFlags::CLOEXEC)?;
        add(&made, waker, OWN)?;
        *epoll = Some(made);
    }
    match epoll {
        Some(epoll) => add(epoll, kick, at as u64),
        None => Ok(()),
    }
}

/// The event of the thread's own waker.
const OWN: u64 = u64::MAX;
/// How often a thread that does not sleep looks for kicks, if it has rings that sleep: a system call.
pub(super) const LOOK_US: u64 = 50;
