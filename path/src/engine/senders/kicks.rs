//! How the thread that serves senders sleeps, and how it is woken.
//!
//! The socket of a process' kicks is watched for edges: each kick tells again, whatever lies there unread. So what the kernel
//! lets be nothing but bytes is read now and then only ([`Kick`]), and a kick costs the thread no call but the one that
//! ended its sleep.
//!
//! A socket that is full takes no kick, and tells of none. Somebody who kicks unasked fills it between two reads. So what lies
//! unread is read when a look finds nothing, or when it is [`OLD_US`] old.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use vnplug_os::closer::PeerFd;
use vnplug_os::socket;
use vnplug_os::socket::Heard;
use vnplug_ring::layout::Life;

use super::{Senders, quarantine};
use crate::engine::sender::Sender;
use crate::source::{OF_THREAD, wake};

/// Our end of the socket pair by which a process kicks us. Reading never blocks and takes no descriptors, and another
/// thread closes it (R7, R8).
#[derive(Debug)]
pub(crate) struct Kick {
    socket: PeerFd,
    /// The kernel refuses descriptors there.
    pub(in crate::engine) refuses: bool,
    /// How often it was heard since it was read; 1 if that left something.
    unread: u32,
}

impl Kick {
    pub(crate) fn new(socket: PeerFd) -> Self {
        let refuses = socket::refuses_rights(&socket);
        Self {
            socket,
            refuses,
            unread: 0,
        }
    }

    /// It was heard. Reads it at once, unless the thread looks often and heard it less than [`UNREAD`] times since.
    fn heard(&mut self, is_often: bool) -> std::io::Result<Heard> {
        self.unread += 1;
        match self.refuses && is_often && self.unread < UNREAD {
            true => Ok(Heard::Nothing),
            false => self.read(),
        }
    }

    fn read(&mut self) -> std::io::Result<Heard> {
        let mut bytes = [0; 1024];
        let heard = match self.refuses {
            true => socket::receive_bytes(&self.socket, &mut bytes),
            false => socket::receive(&self.socket, &mut bytes),
        };
        let may_leave_some = matches!(heard, Ok(Heard::Bytes(count)) if count == bytes.len());
        self.unread = u32::from(may_leave_some);
        heard
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Senders {
    /// Kicks are heard where the queue learns what it has, from now on.
    ///
    /// # Errors
    /// The system's; then they are not.
    pub(in crate::engine) fn join(
        &mut self,
        epoll: Arc<OwnedFd>,
        waker: BorrowedFd<'_>,
    ) -> rustix::io::Result<()> {
        epoll::add(&*epoll, waker, EventData::new_u64(OWN), EventFlags::IN)?;
        self.epoll = Some(epoll);
        self.is_of_queue = true;
        Ok(())
    }

    /// The queue is over, and nobody empties what it watches: kicks are heard apart from now on.
    #[cold]
    pub(in crate::engine) fn part(&mut self, waker: BorrowedFd<'_>) {
        if !std::mem::take(&mut self.is_of_queue) {
            return;
        }
        let before = self.epoll.take();
        for at in 0..self.all.len() {
            let Some(sender) = &mut self.all[at] else {
                continue;
            };
            unwatch(&before, sender);
            watch(&mut self.epoll, waker, sender, at);
        }
    }

    /// Whether kicks are heard where the queue learns what it has.
    #[inline]
    pub(in crate::engine) fn are_of_queue(&self) -> bool {
        self.is_of_queue
    }

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

    /// While the thread does not sleep: looks now and then whether one that sleeps has kicked. Where kicks are heard with
    /// the queue's, they are looked for together.
    #[inline]
    pub(in crate::engine) fn listen(&mut self, now_us: u64) -> Vec<(u32, String)> {
        self.age(now_us);
        let sleeps = self.awake.count() < self.places.len() && !self.is_of_queue;
        if !sleeps || now_us.saturating_sub(self.looked_us) < LOOK_US {
            return Vec::new();
        }
        self.looked_us = now_us;
        self.hear(Some(Duration::ZERO), &mut |_, _| {})
    }

    /// What to sleep on: `waker` and, if there are any, the kicks.
    pub(in crate::engine) fn waker<'a>(&'a self, waker: BorrowedFd<'a>) -> BorrowedFd<'a> {
        self.epoll.as_ref().map_or(waker, |epoll| epoll.as_fd())
    }

    /// Hears who kicked, and `found` what the queue's own descriptors have: at once, or after a sleep there of no more than
    /// that. Who sent anything but bytes is quarantined, and returned.
    pub(in crate::engine) fn hear(
        &mut self,
        within: Option<Duration>,
        found: &mut dyn FnMut(u64, EventFlags),
    ) -> Vec<(u32, String)> {
        let Some(epoll) = self.epoll.clone() else {
            return Vec::new();
        };
        let mut liars = Vec::new();
        let mut is_quiet = true;
        wake::look(&*epoll, within, |number, flags| {
            is_quiet = false;
            match number {
                OWN => {}
                // NB: each of them. An edge that is passed over does not come again.
                _ if number & OF_THREAD != 0 => {
                    liars.extend(self.kicked((number ^ OF_THREAD) as usize));
                }
                _ => found(number, flags),
            }
        });
        if (is_quiet || self.is_old) && self.unread.count() > 0 {
            self.settle(&mut liars);
        }
        liars
    }

    /// When what lies unread is to be read, if nothing comes before.
    pub(in crate::engine) fn settles(&mut self, now_us: u64) -> Option<Duration> {
        let age_us = self.age(now_us)?;
        Some(Duration::from_micros(OLD_US.saturating_sub(age_us)))
    }

    /// For how long something has lain unread.
    #[inline]
    fn age(&mut self, now_us: u64) -> Option<u64> {
        if self.unread.count() == 0 || self.epoll.is_none() {
            (self.unread_since_us, self.is_old) = (None, false);
            return None;
        }
        let since_us = *self.unread_since_us.get_or_insert(now_us);
        let age_us = now_us.saturating_sub(since_us);
        self.is_old = age_us >= OLD_US;
        Some(age_us)
    }

    /// The one at this place kicked: it is looked at from now on. NB: before it is armed again, so that what is read here is
    /// of no arming to come.
    fn kicked(&mut self, at: usize) -> Option<(u32, String)> {
        self.awake.set(at);
        // NB: elsewhere nothing is heard as long as no ring sleeps, and more may lie there than a socket has room for.
        let is_often = self.is_of_queue;
        self.take(at, |kick| kick.heard(is_often))
    }

    /// Reads what lies unread, of [`MANY`] at most: the others have their turn at the next look, which is soon if it is old.
    pub(super) fn settle(&mut self, liars: &mut Vec<(u32, String)>) {
        if self.unsettled == 0 {
            self.unsettled = self.unread.count();
        }
        let many = MANY.min(self.unsettled);
        self.unsettled -= many;
        if self.unsettled == 0 {
            (self.unread_since_us, self.is_old) = (None, false);
        }
        for _ in 0..many {
            let next = self.unread.next_from(self.settled);
            let Some(at) = next.or_else(|| self.unread.next_from(0)) else {
                return;
            };
            self.settled = at + 1;
            liars.extend(self.take(at, Kick::read));
            liars.extend(self.ask_again(at));
        }
    }

    /// The kicks of one that may sleep were read, and nobody may have heard of the last: the kernel tells of one only if it is
    /// still there when it is asked. So it is asked for another, and what it wrote before that is looked for.
    fn ask_again(&mut self, at: usize) -> Option<(u32, String)> {
        if self.awake.next_from(at) == Some(at) {
            return None;
        }
        let sender = self.all.get_mut(at)?.as_mut()?;
        match sender.arm() {
            Ok(true) => self.awake.set(at),
            Ok(false) => {}
            Err(lie) => return Some(quarantine(sender, lie.to_string())),
        }
        None
    }

    /// Judges what `reads` has of the kicks of the one at this place.
    fn take(
        &mut self,
        at: usize,
        reads: impl FnOnce(&mut Kick) -> std::io::Result<Heard>,
    ) -> Option<(u32, String)> {
        self.unread.clear(at);
        let sender = self.all.get_mut(at)?.as_mut()?;
        let kick = sender.kick.as_mut()?;
        match reads(kick) {
            Ok(Heard::Bytes(1..) | Heard::Nothing) => {
                if kick.unread > 0 {
                    self.unread.set(at);
                }
                None
            }
            Ok(Heard::Rights) => {
                let why = "descriptors came with its kicks";
                unwatch(&self.epoll, sender);
                Some(quarantine(sender, why.to_owned()))
            }
            // The other end is closed.
            Ok(Heard::Bytes(_)) | Err(_) => {
                unwatch(&self.epoll, sender);
                None
            }
        }
    }
}

/// Does not hear a sender's kicks any more.
pub(super) fn unwatch(epoll: &Option<Arc<OwnedFd>>, sender: &Sender) {
    if let (Some(epoll), Some(kick)) = (epoll, &sender.kick) {
        // Its other end may be closed, and then it is out already.
        let _ = epoll::delete(epoll, kick);
    }
}

/// Watches a sender's kicks in the epoll instance, which is made now if there is none. Who cannot be heard sends nothing.
pub(super) fn watch(
    epoll: &mut Option<Arc<OwnedFd>>,
    waker: BorrowedFd<'_>,
    sender: &mut Sender,
    at: usize,
) {
    let Some(kick) = &sender.kick else {
        return;
    };
    if let Err(error) = add(epoll, waker, kick, at) {
        log::error!(target: "port", "port {}: its kicks cannot be heard: {error}", sender.id);
        sender.finish(Life::Failed);
    }
}

fn add(
    epoll: &mut Option<Arc<OwnedFd>>,
    waker: BorrowedFd<'_>,
    kick: &Kick,
    at: usize,
) -> rustix::io::Result<()> {
    let epoll = match epoll {
        Some(epoll) => epoll,
        none => {
            let made = epoll::create(CreateFlags::CLOEXEC)?;
            epoll::add(&made, waker, EventData::new_u64(OWN), EventFlags::IN)?;
            none.insert(Arc::new(made))
        }
    };
    let data = EventData::new_u64(at as u64 | OF_THREAD);
    epoll::add(&**epoll, kick, data, EventFlags::IN | EventFlags::ET)
}

/// The event of the thread's own waker.
const OWN: u64 = u64::MAX;
/// How often a thread that does not sleep looks for kicks, if it has rings that sleep: a system call.
pub(super) const LOOK_US: u64 = 50;
/// How often a socket of kicks is heard before it is read. A ring that is armed kicks once, and there are some armings at most
/// between two looks; a socket with the usual room holds more than 250 kicks.
pub(super) const UNREAD: u32 = 8;
/// How long kicks lie unread at most, while the thread hears of others all the time.
const OLD_US: u64 = 10_000;
/// Sockets that are read in a turn at most.
const MANY: usize = 64;
