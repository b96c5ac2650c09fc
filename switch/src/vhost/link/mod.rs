//! The rings of one guest, as the thread that forwards uses them.
//!
//! Which rings there are, in which memory, and what was agreed on is told by the entrance's thread as
//! one whole ([`Setup`]), which replaces the one before between two batches. The answer ([`Done`](wire::Done)) brings
//! the old one back: only then may its memory be unmapped, which happens aside. A new setup needs nothing
//! of the old one, because a ring's indices are in the guest's memory ([`super::ring`]).
//!
//! What a guest has no buffers for waits here, bounded, then it is dropped: a guest that does not
//! read costs itself only (R5). A frame that is longer than all buffers that are there waits for more of
//! them, but not for ever, as a driver may have no more to give: after `STUCK` without any new one it is
//! dropped, so that the shorter ones behind it come.
//!
//! | file | what it has |
//! |---|---|
//! | `mod.rs` | the rings, and a turn of theirs |
//! | `wire.rs` | how the entrance's thread speaks to them |
//! | `orders.rs` | what they are told, by it and by the driver |
//! | `give.rs` | frames for the guest, and those that wait |

mod give;
mod orders;
mod wire;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};

use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use vnplug_os::datagrams::Rest;
use vnplug_ring::offload::{HEADER, Offload, SHORT_HEADER, flags, gso};

use self::give::{Hopeless, Stuck, Waiting};
pub(super) use self::wire::{ANNOUNCEMENT, Order, Setup, Started, Wire};
use self::wire::{Shared, watch};
use super::acks::Expansion;
use super::call::{Caller, Calls};
use super::frames::{MAX_PARTS, Put, Scratch, take};
use super::ring::Ring;
use super::spec::feature;
use crate::batch::Batch;
use crate::exits::Due;
use crate::link::{Given, Link};

/// The rings of a guest.
pub(crate) struct Rings {
    name: String,
    shared: Arc<Shared>,
    orders: Receiver<Order>,
    setup: Box<Setup>,
    rings: Vec<Option<Ring>>,
    /// The rings in which the guest receives, one of each pair that it uses.
    receiving: Vec<usize>,
    /// Those by which it sends.
    sending: Vec<usize>,
    /// Which of `sending` is the next, so that none waits for ever.
    turn: usize,
    /// Bits of [`feature::GUEST_OFFLOADS`] that hold now.
    offloads: u64,
    /// Pairs that the guest's driver uses, if it said so.
    pairs: usize,
    /// The guest was asked to kick.
    is_armed: bool,
    announcements: Vec<[u8; ANNOUNCEMENT]>,
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// Those that waited and are dropped, since somebody asked.
    lost: u64,
    /// A merged frame did not fit into the guest's buffers, all of them together.
    is_narrow: bool,
    /// Since when the first that waits is longer than all buffers that are there.
    stuck: Option<Stuck>,
    /// What was found to be so for good.
    hopeless: Option<Hopeless>,
    /// ACKs for what was merged, if they are expanded.
    acks: Option<Box<Expansion>>,
    scratch: Scratch,
    /// Rings that learn at the end of the turn what they have back.
    held: Vec<usize>,
    /// Descriptors that may still be read in this turn: more cost the guest its frames, and nobody else
    /// his time.
    budget: usize,
}

/// A link, and what speaks to it.
///
/// # Errors
/// The system's, when descriptors are short.
pub(crate) fn pair(
    name: String,
    calls: Arc<Calls>,
    caller: Option<Caller>,
) -> io::Result<(Wire, Rings)> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    watch(&epoll, &news)?;
    let shared = Arc::new(Shared {
        epoll,
        news,
        pending: AtomicBool::new(false),
        calls,
        caller,
    });
    let (sender, orders) = channel();
    let wire = Wire {
        orders: sender,
        shared: Arc::clone(&shared),
    };
    let rings = Rings {
        name,
        shared,
        orders,
        setup: Box::default(),
        rings: Vec::new(),
        receiving: Vec::new(),
        sending: Vec::new(),
        turn: 0,
        offloads: 0,
        pairs: usize::MAX,
        is_armed: false,
        announcements: Vec::new(),
        waiting: VecDeque::new(),
        waiting_bytes: 0,
        lost: 0,
        is_narrow: false,
        stuck: None,
        hopeless: None,
        acks: None,
        scratch: Scratch::default(),
        held: Vec::new(),
        budget: 0,
    };
    Ok((wire, rings))
}

impl Rings {
    fn disarm(&mut self) {
        self.is_armed = false;
        self.rings.iter_mut().flatten().for_each(Ring::disarm);
    }

    /// Asks the guest to kick for everything that it sends, and for buffers if frames wait for them. True
    /// if there is nothing yet.
    fn arm(&mut self) -> bool {
        self.is_armed = true;
        let mut nothing = true;
        let waits = !self.waiting.is_empty();
        for at in 0..self.rings.len() {
            let is_asked = self.sending.contains(&at)
                || (waits && self.receiving.contains(&at))
                || self.setup.control == Some(at);
            let Some(Some(ring)) = self.rings.get_mut(at).filter(|_| is_asked) else {
                continue;
            };
            match ring.arm() {
                Ok(has_nothing) => nothing &= has_nothing,
                Err(broken) => self.stop(at, broken),
            }
        }
        nothing
    }

    fn is_lost(&self) -> bool {
        self.setup.memory.as_ref().is_some_and(|it| it.is_lost())
    }

    fn header_len(&self) -> usize {
        match self.setup.features & (feature::VERSION_1 | feature::MRG_RXBUF) {
            0 => SHORT_HEADER,
            _ => HEADER,
        }
    }

    /// Publishes what a ring gave back, and calls the guest if it waits.
    #[inline]
    fn publish(&mut self, at: usize) {
        if let Some(Some(ring)) = self.rings.get_mut(at)
            && ring.publish()
            && let Some(Some(started)) = self.setup.rings.get(at)
            && let Some(call) = &started.call
        {
            call.ring(&self.shared.calls);
        }
    }

    /// Takes at most `most` frames of one ring. Whether there may be more.
    fn take(&mut self, at: usize, batch: &mut Batch, most: usize) -> bool {
        let header_len = self.header_len();
        let Some(Some(ring)) = self.rings.get_mut(at) else {
            return false;
        };
        let Scratch { parts, .. } = &mut self.scratch;
        let left = batch.left();
        let (budget, acks) = (&mut self.budget, self.acks.as_deref_mut());
        let taken = take(ring, parts, header_len, batch, most, budget, acks);
        match batch.left() > left {
            true => self.held.push(at),
            false => self.publish(at),
        }
        taken.unwrap_or_else(|broken| {
            self.stop(at, broken);
            false
        })
    }

    /// Forgets edges that were seen.
    fn clear_events(&self) {
        let none = Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut events = [none; 16];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // Edges that do not fit are seen the next time. The only error is a signal.
        let _ = epoll::wait(&self.shared.epoll, &mut events, Some(&now));
    }
}

impl Link for Rings {
    fn receive(&mut self, batch: &mut Batch, most: usize) -> io::Result<Rest> {
        if self.is_armed {
            self.clear_events();
            self.disarm();
        }
        let mut more = self.obey();
        if self.is_lost() {
            let what = "its memory was truncated";
            return Err(io::Error::other(what));
        }
        self.budget = MAX_PARTS;
        more |= self.serve_control();
        if !self.waiting.is_empty() {
            self.flush();
            self.publish_received();
        }
        let mut left = most;
        while let Some(frame) = self.announcements.pop() {
            batch.push(frame.len(), Offload::default(), |place| {
                place.copy_from_slice(&frame);
                true
            });
        }
        // Each of them in turn, and none more than its part while others have something.
        let count = self.sending.len();
        let each = most.div_ceil(count.max(1));
        for _ in 0..count {
            self.turn = (self.turn + 1) % self.sending.len().max(1);
            let Some(&at) = self.sending.get(self.turn) else {
                break;
            };
            let before = batch.len();
            more |= self.take(at, batch, each.min(left));
            left = left.saturating_sub(batch.len() - before);
        }
        if more || !self.arm() {
            return Ok(Rest::More);
        }
        Ok(Rest::Nothing)
    }

    fn release(&mut self) {
        while let Some(at) = self.held.pop() {
            self.publish(at);
        }
    }

    fn takes_tails(&self) -> bool {
        true
    }

    fn expand_acks(&mut self, is: bool) {
        if !is {
            self.acks = None;
        } else if self.acks.is_none() {
            self.acks = Some(Box::default());
        }
    }

    fn added_acks(&mut self) -> u64 {
        let added = self.acks.as_mut().map(|acks| &mut acks.added);
        added.map_or(0, std::mem::take)
    }

    fn lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    fn send(&mut self, due: Due<'_>) -> Given {
        let mut given = Given::default();
        if self.is_lost() {
            given.gone = due.iter().count() as u64;
            return given;
        }
        self.budget = MAX_PARTS;
        if !self.waiting.is_empty() {
            self.flush();
        }
        let plain = Offload::default().to_header(&[]);
        for out in due.iter() {
            let Some(at) = self.receiver(&out) else {
                given.gone += 1;
                continue;
            };
            let header = out
                .offload
                .map_or(plain, |offload| offload.to_header(out.head));
            let put = match self.waiting.is_empty() && self.budget > 0 {
                true => self.put(at, &header, &out),
                false => Some(Put::Full),
            };
            match put {
                None => given.gone += 1,
                Some(Put::Never) => given.full += 1,
                Some(Put::Full | Put::Short(_)) if !self.keep(at, &header, &out) => given.full += 1,
                Some(put @ (Put::Full | Put::Short(_) | Put::Done)) => {
                    if put == Put::Done {
                        self.gave(&out);
                        if out.len() >= LONG {
                            self.publish(at);
                        }
                    }
                    given.enqueued += 1;
                    given.bytes += out.len() as u64;
                }
            }
        }
        self.publish_received();
        if !self.waiting.is_empty() {
            self.await_buffers();
        }
        given
    }

    fn merges(&self) -> bool {
        !self.is_narrow && !self.hopeless.is_some_and(|it| it.is_merged)
    }

    fn takes(&self, offload: &Offload) -> bool {
        let has = |bits: u64| self.offloads & bits == bits;
        // A super-frame without a sum to be made is none for virtio.
        if !has(feature::GUEST_CSUM) || offload.flags & flags::NEEDS_CSUM == 0 {
            return false;
        }
        let ecn = offload.gso_type & gso::ECN != 0;
        match offload.gso_type & !gso::ECN {
            gso::NONE => true,
            _ if ecn && !has(feature::GUEST_ECN) => false,
            gso::TCPV4 => has(feature::GUEST_TSO4),
            gso::TCPV6 => has(feature::GUEST_TSO6),
            gso::UDP_L4 => has(feature::GUEST_USO4 | feature::GUEST_USO6),
            _ => false,
        }
    }
}

/// Bytes of a frame that its guest learns of at once: it has work with one as long as it takes to copy the next.
const LONG: usize = 16 << 10;

impl AsFd for Rings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }
}
