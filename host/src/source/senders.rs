//! The transmit rings that one queue's thread serves, between two of its batches.
//!
//! While the thread runs it looks at each ring once per turn (one load). Before it sleeps it arms
//! them, and a sender that finds its ring armed kicks: a process by its socket, whose other end is in
//! the epoll instance that the thread then sleeps on; a VM by a message that the control thread
//! relays as a command. The handshake that loses no kick is that of `ring/src/layout.rs`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::{RecvFlags, recv};
use vnplug_ring::layout::Life;

use super::{MAX_BATCH, Queue};
use crate::noise::peer_log;
use crate::port::sender::{SendCounters, Sender};

/// The senders of one queue.
#[derive(Debug, Default)]
pub(super) struct Senders {
    all: Vec<Sender>,
    /// Whose turn is first.
    next: usize,
    /// The thread's own waker and every kick; made with the first kick.
    epoll: Option<OwnedFd>,
    /// What senders that are gone had counted.
    departed: SendCounters,
}

/// What a turn came to.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// Frames taken.
    pub(super) frames: usize,
    /// A port that lied (or, by a fault of ours, cannot be served), and why: to be quarantined.
    pub(super) liar: Option<(u32, String)>,
}

impl Senders {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Adds a sender; `waker` is what the thread sleeps on otherwise.
    pub(super) fn attach(&mut self, mut sender: Sender, waker: BorrowedFd<'_>) {
        if let Some(kick) = &sender.kick
            && let Err(error) = watch(&mut self.epoll, waker, kick.as_fd())
        {
            log::error!(target: "port", "port {}: its kicks cannot be heard: {error}", sender.id);
            sender.finish(Life::Failed);
        }
        self.all.push(sender);
    }

    /// Removes a sender, whose ring ends with this life.
    pub(super) fn detach(&mut self, id: u32, life: Life) -> Option<Sender> {
        let at = self.all.iter().position(|sender| sender.id == id)?;
        let mut sender = self.all.remove(at);
        self.departed.add(&sender.counters);
        sender.finish(life);
        self.unwatch(&sender);
        if self.all.is_empty() {
            self.epoll = None;
        }
        Some(sender)
    }

    /// Sends what waits: at most [`MAX_BATCH`] frames in all and [`EACH`] of one sender.
    pub(super) fn serve(&mut self, queue: &mut dyn Queue) -> Served {
        let mut served = Served::default();
        let count = self.all.len();
        for step in 0..count {
            let left = MAX_BATCH - served.frames;
            if left == 0 {
                break;
            }
            let at = (self.next + step) % count;
            let sender = &mut self.all[at];
            // A panic here would be a bug of ours that a sender may have found a way to: it costs
            // that port and nobody else anything (R10).
            let went = catch_unwind(AssertUnwindSafe(|| sender.serve(queue, EACH.min(left))));
            let why = match went {
                Ok(Ok(frames)) => {
                    served.frames += frames;
                    continue;
                }
                Ok(Err(lie)) => lie.to_string(),
                Err(_) => "the daemon failed while sending for it; please report this".to_owned(),
            };
            served.liar = Some(quarantine(sender, why));
            break;
        }
        self.next = if count == 0 {
            0
        } else {
            (self.next + 1) % count
        };
        served
    }

    /// Asks all to kick. True: somebody has frames already (or has just been quarantined), do not
    /// sleep.
    pub(super) fn arm(&mut self) -> (bool, Option<(u32, String)>) {
        let mut ready = false;
        for sender in &mut self.all {
            match sender.arm() {
                Ok(waits) => ready |= waits,
                Err(lie) => return (true, Some(quarantine(sender, lie.to_string()))),
            }
        }
        (ready, None)
    }

    /// What to sleep on: `waker` and, if there are any, the kicks.
    pub(super) fn waker<'a>(&'a self, waker: BorrowedFd<'a>) -> BorrowedFd<'a> {
        self.epoll.as_ref().map_or(waker, AsFd::as_fd)
    }

    /// Empties the sockets that were kicked, after a sleep. Bounded: what more was written is found
    /// after the next turn.
    pub(super) fn hush(&mut self) {
        let Some(epoll) = &self.epoll else {
            return;
        };
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
            let number = event.data.u64();
            let sender = self
                .all
                .iter()
                .find(|sender| kick_number(sender) == Some(number));
            let Some(kick) = sender.and_then(|sender| sender.kick.as_ref()) else {
                continue;
            };
            let mut bytes = [0; 256];
            // 0 bytes: the other end is closed, and would stay readable for ever.
            // Never blocks, whatever the peer did to its end (R8).
            if recv(kick, &mut bytes, RecvFlags::DONTWAIT) == Ok((0, 0)) {
                let _ = epoll::delete(epoll, kick);
            }
        }
    }

    /// Ends all of them.
    pub(super) fn finish(&mut self, life: Life) {
        for sender in &mut self.all {
            sender.finish(life);
        }
    }

    /// What became of each present sender's frames.
    pub(super) fn counters(&self) -> impl Iterator<Item = (u32, SendCounters)> {
        self.all.iter().map(|sender| (sender.id, sender.counters))
    }

    /// What became of all frames, those of senders that are gone included.
    pub(super) fn total(&self) -> SendCounters {
        let mut total = self.departed;
        self.all
            .iter()
            .for_each(|sender| total.add(&sender.counters));
        total
    }

    fn unwatch(&self, sender: &Sender) {
        if let (Some(epoll), Some(kick)) = (&self.epoll, &sender.kick) {
            // Its other end may be closed, and then it is out already.
            let _ = epoll::delete(epoll, kick);
        }
    }
}

fn quarantine(sender: &mut Sender, why: String) -> (u32, String) {
    peer_log!(
        log::Level::Warn,
        "port",
        "port {} may not send any more: {why}",
        sender.id
    );
    sender.finish(Life::Quarantined);
    (sender.id, why)
}

/// Adds a kick to the epoll instance, which is made now if there is none.
fn watch(
    epoll: &mut Option<OwnedFd>,
    waker: BorrowedFd<'_>,
    kick: BorrowedFd<'_>,
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
        Some(epoll) => add(epoll, kick, number_of(kick)),
        None => Ok(()),
    }
}

fn kick_number(sender: &Sender) -> Option<u64> {
    sender.kick.as_ref().map(|kick| number_of(kick.as_fd()))
}

/// A descriptor's number names its kick: it is open as long as it is watched.
fn number_of(kick: BorrowedFd<'_>) -> u64 {
    use std::os::fd::AsRawFd;
    kick.as_raw_fd() as u64
}

/// The event of the thread's own waker.
const OWN: u64 = u64::MAX;
/// Frames of one sender in a turn.
const EACH: usize = 64;
