//! The rings of one guest, as the thread that forwards uses them.
//!
//! Which rings there are, in which memory, and what was agreed on is told by the entrance's thread as
//! one whole ([`Setup`]), which replaces the one before between two batches. The answer ([`Done`]) brings
//! the old one back: only then may its memory be unmapped, which happens aside. A new setup needs nothing
//! of the old one, because a ring's indices are in the guest's memory ([`super::ring`]).
//!
//! What a guest has no buffers for waits here, bounded, then it is dropped: a guest that does not
//! read costs itself only (R5). A frame that is longer than all buffers that are there waits for more of
//! them, but not for ever, as a driver may have no more to give: after [`STUCK`] without any new one it is
//! dropped, so that the shorter ones behind it come.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use vnplug_frame::flow::flow_hash;
use vnplug_os::closer::PeerFd;
use vnplug_os::datagrams::Rest;
use vnplug_os::{event, peer_log};
use vnplug_ring::offload::{HEADER, Offload, SHORT_HEADER, flags, gso};

use super::acks::Expansion;
use super::call::{Call, Caller, Calls};
use super::control::{self, Command};
use super::frames::{Head, MAX_PARTS, Put, Scratch, put, take};
use super::memory::Memory;
use super::ring::{Agreed, Broken, Place, Ring};
use super::spec::feature;
use crate::batch::Batch;
use crate::exits::{Due, Out};
use crate::link::{Given, Link};

/// What a guest's port is to be.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    /// What the guest's driver acknowledged.
    pub(crate) features: u64,
    pub(crate) memory: Option<Arc<Memory>>,
    /// By their numbers: even ones are for the guest to receive, odd ones to send. None: not served.
    pub(crate) rings: Vec<Option<Started>>,
    /// The number of the control queue, if it is served.
    pub(crate) control: Option<usize>,
}

/// A ring that is to be served.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) place: Place,
    pub(crate) call: Option<Arc<Call>>,
}

/// What the thread that forwards is asked.
pub(crate) enum Order {
    /// This is the setup now.
    Setup(Box<Setup>, Sender<Done>),
    /// Sends this frame as the guest's.
    Announce([u8; ANNOUNCEMENT]),
}

/// The setup was replaced.
#[derive(Debug)]
pub(crate) struct Done {
    /// The indices of rings that were served before.
    pub(crate) indices: Vec<Option<u16>>,
    /// What was in use before.
    pub(crate) _old: Box<Setup>,
}

/// Speaks to a link.
#[derive(Debug)]
pub(crate) struct Wire {
    orders: Sender<Order>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Watches the kicks, and `news`.
    epoll: OwnedFd,
    news: OwnedFd,
    pending: AtomicBool,
    calls: Arc<Calls>,
    /// Who calls the guest, if that is not the thread that forwards.
    caller: Option<Caller>,
}

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
    /// Bytes from which on a frame was found to be so for good, its header included.
    hopeless: u64,
    /// ACKs for what was merged, if they are expanded.
    acks: Option<Box<Expansion>>,
    scratch: Scratch,
    /// Rings that learn at the end of the turn what they have back.
    held: Vec<usize>,
    /// Descriptors that may still be read in this turn: more cost the guest its frames, and nobody else
    /// his time.
    budget: usize,
}

/// A frame that waits for buffers, with its header before it.
struct Waiting {
    receiver: usize,
    bytes: Box<[u8]>,
    /// As [`Out::merged`].
    merged: Option<u16>,
}

/// A ring to which its guest adds nothing.
#[derive(Clone, Copy)]
struct Stuck {
    ring: usize,
    /// The guest's index there.
    seen: u16,
    since: Instant,
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
        hopeless: u64::MAX,
        acks: None,
        scratch: Scratch::default(),
        held: Vec::new(),
        budget: 0,
    };
    Ok((wire, rings))
}

/// Edges only: no eventfd of a peer's is ever read.
fn watch(epoll: &OwnedFd, fd: impl AsFd) -> io::Result<()> {
    let flags = EventFlags::IN | EventFlags::ET;
    Ok(epoll::add(epoll, fd, EventData::new_u64(0), flags)?)
}

impl Wire {
    /// Gives an order. False: the link is gone.
    pub(crate) fn send(&self, order: Order) -> bool {
        let sent = self.orders.send(order).is_ok();
        // Release: pairs with the Acquire in `Rings::obey`; the order is in the channel.
        self.shared.pending.store(true, Ordering::Release);
        event::ring(&self.shared.news);
        sent
    }

    /// The link looks when this eventfd is written to.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn watch(&self, kick: impl AsFd) -> io::Result<()> {
        watch(&self.shared.epoll, kick)
    }

    /// Not any more. NB: before it is closed, as the peer has a copy.
    pub(crate) fn forget(&self, kick: impl AsFd) {
        let _ = epoll::delete(&self.shared.epoll, kick);
    }

    /// All calls of the switch.
    pub(crate) fn calls(&self) -> &Calls {
        &self.shared.calls
    }

    /// How a ring's guest is called by this descriptor; `None` if it is of another kind.
    pub(crate) fn call(&self, fd: PeerFd) -> Option<Arc<Call>> {
        self.shared.calls.add(fd, self.shared.caller.clone())
    }
}

impl Rings {
    /// Does what the entrance's thread asks. Whether there was anything.
    fn obey(&mut self) -> bool {
        // Acquire: pairs with the Release in `Wire::send`.
        let news = self.shared.pending.load(Ordering::Relaxed)
            && self.shared.pending.swap(false, Ordering::Acquire);
        if !news {
            return false;
        }
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Setup(setup, done) => {
                    let indices = self.rings.iter();
                    let indices = indices.map(|ring| ring.as_ref().map(Ring::index));
                    let indices = indices.collect();
                    let old = self.replace(setup);
                    // Who asked is gone, or the answer is there.
                    let _ = done.send(Done { indices, _old: old });
                }
                Order::Announce(frame) => {
                    // One says it all.
                    self.announcements.clear();
                    self.announcements.push(frame);
                }
            }
        }
        true
    }

    fn replace(&mut self, setup: Box<Setup>) -> Box<Setup> {
        let had_control = self.setup.control.is_some();
        let old = std::mem::replace(&mut self.setup, setup);
        let setup = &self.setup;
        let has = |bits: u64| setup.features & bits == bits;
        let agreed = Agreed {
            event_idx: has(feature::EVENT_IDX),
            indirect: has(feature::INDIRECT_DESC),
        };
        let ring = |started: &Option<Started>| {
            let place = started.as_ref()?.place.clone();
            let memory = Arc::clone(setup.memory.as_ref()?);
            Some(Ring::new(place, agreed, memory))
        };
        self.rings = setup.rings.iter().map(ring).collect();
        // A driver that begins anew has forgotten what it said.
        let is_anew = setup.control.is_some() && !had_control;
        // Whether what is written is logged is no matter of the driver's.
        let is_other = (old.features ^ setup.features) & !feature::LOG_ALL != 0;
        if is_anew || is_other {
            self.offloads = setup.features & feature::GUEST_OFFLOADS;
            self.pairs = usize::MAX;
        }
        if let Some(acks) = self.acks.as_mut().filter(|_| is_anew || is_other) {
            // It has other flows.
            **acks = Expansion::default();
        }
        if is_other {
            // They may be what the guest does not take any more.
            self.lost += self.waiting.len() as u64;
            self.waiting.clear();
            self.waiting_bytes = 0;
        }
        self.is_narrow = false;
        (self.stuck, self.hopeless) = (None, u64::MAX);
        self.count_rings();
        self.disarm();
        for started in self.setup.rings.iter().flatten() {
            // The guest may wait for what the descriptor before was called for.
            if let Some(call) = &started.call {
                call.ring(&self.shared.calls);
            }
        }
        old
    }

    fn count_rings(&mut self) {
        let control = self.setup.control;
        let is_there = |at: usize| matches!(self.rings.get(at), Some(Some(_)));
        let all = 0..self.rings.len();
        let receiving = all.clone().step_by(2);
        let receiving = receiving.filter(|at| is_there(*at) && Some(*at) != control);
        let sending = all.skip(1).step_by(2).filter(|at| is_there(*at));
        let (receiving, sending): (Vec<_>, Vec<_>) = (receiving.collect(), sending.collect());
        // Both of a pair, if there is one: a driver that uses fewer pairs stops the others.
        let pairs = receiving
            .iter()
            .copied()
            .filter(|at| sending.contains(&(at + 1)) && at / 2 < self.pairs);
        let pairs: Vec<usize> = pairs.collect();
        self.receiving = if pairs.is_empty() { receiving } else { pairs };
        self.sending = sending;
    }

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

    /// Stops a ring that makes no sense.
    #[cold]
    fn stop(&mut self, at: usize, broken: Broken) {
        peer_log!(
            log::Level::Warn,
            "switch",
            "{}: ring {at} is stopped: {broken}",
            self.name
        );
        // NB: also what frames of this turn are read from. It is the guest's own that it may change by that.
        self.publish(at);
        if let Some(ring) = self.rings.get_mut(at) {
            *ring = None;
        }
        self.count_rings();
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

    /// Gives a frame to the guest, if it has buffers.
    #[inline]
    fn put(&mut self, at: usize, header: &[u8; HEADER], out: &Out<'_>) -> Option<Put> {
        let header_len = self.header_len();
        let is_mergeable = self.setup.features & feature::MRG_RXBUF != 0;
        let ring = self.rings.get_mut(at)?.as_mut()?;
        let header = Head {
            bytes: *header,
            len: header_len,
            is_mergeable,
        };
        let put = put(ring, &mut self.scratch, header, out);
        // One at least: a chain of none costs, too.
        self.budget = self.budget.saturating_sub(self.scratch.parts.len().max(1));
        let need = (header_len + out.len()) as u64;
        match put {
            Ok(Put::Short) if self.is_hopeless(at, need) => {
                self.is_narrow |= out.merged.is_some();
                Some(Put::Never)
            }
            Ok(put) => {
                self.is_narrow |= put == Put::Never && out.merged.is_some();
                if put == Put::Done && need >= self.hopeless {
                    self.hopeless = u64::MAX;
                }
                Some(put)
            }
            Err(broken) => {
                self.stop(at, broken);
                None
            }
        }
    }

    /// Whether the guest will have no room for so many bytes, as far as one can know: it has buffers, fewer
    /// than that, and has not added any for long; or it had no room for so many before.
    #[cold]
    fn is_hopeless(&mut self, at: usize, need: u64) -> bool {
        if need >= self.hopeless {
            return true;
        }
        let Some(Some(ring)) = self.rings.get(at) else {
            return false;
        };
        let (seen, now) = (ring.seen(), Instant::now());
        let before = self.stuck.filter(|it| (it.ring, it.seen) == (at, seen));
        let stuck = before.unwrap_or(Stuck {
            ring: at,
            seen,
            since: now,
        });
        self.stuck = Some(stuck);
        let is_hopeless = now.duration_since(stuck.since) >= STUCK;
        if is_hopeless {
            self.hopeless = need;
        }
        is_hopeless
    }

    /// Which ring a frame is received in.
    #[inline]
    fn receiver(&self, out: &Out<'_>) -> Option<usize> {
        match *self.receiving {
            [] => None,
            [only] => Some(only),
            ref all => {
                let bytes = if out.head.is_empty() {
                    out.body
                } else {
                    out.head
                };
                all.get(flow_hash(bytes) as usize % all.len()).copied()
            }
        }
    }

    /// Gives what waits, as far as there are buffers.
    fn flush(&mut self) {
        while self.budget > 0
            && let Some(first) = self.waiting.pop_front()
        {
            let (header, frame) = first.bytes.split_at(HEADER);
            let header: &[u8; HEADER] = header.first_chunk().unwrap_or(&[0; HEADER]);
            // Its ring may be gone since.
            let at = match self.receiving.contains(&first.receiver) {
                true => first.receiver,
                false => match self.receiving.first() {
                    Some(at) => *at,
                    None => {
                        self.waiting.push_front(first);
                        break;
                    }
                },
            };
            let out = Out {
                head: frame,
                body: &[],
                tail: None,
                offload: None,
                merged: first.merged,
            };
            // The guest may have changed its offloads since.
            let offload = header.first_chunk().map(Offload::from_header);
            let offload = offload.unwrap_or_default();
            let put = match offload.is_due() && !self.takes(&offload) {
                true => Some(Put::Never),
                false => self.put(at, header, &out),
            };
            match put {
                Some(Put::Done) => self.gave(&out),
                Some(Put::Full | Put::Short) => {
                    self.waiting.push_front(first);
                    break;
                }
                // Its buffers make no sense, or its ring.
                Some(Put::Never) | None => self.lost += 1,
            }
            self.waiting_bytes -= first.bytes.len();
        }
    }

    /// The guest has this frame.
    #[inline]
    fn gave(&mut self, out: &Out<'_>) {
        if let Some(acks) = &mut self.acks {
            acks.given(out.head, out.body, out.len(), out.merged);
        }
    }

    fn publish_received(&mut self) {
        for place in 0..self.receiving.len() {
            if let Some(&at) = self.receiving.get(place) {
                self.publish(at);
            }
        }
    }

    /// Keeps a frame until there are buffers; false if too much waits.
    fn keep(&mut self, at: usize, header: &[u8; HEADER], out: &Out<'_>) -> bool {
        let len = HEADER + out.len();
        if self.waiting.len() >= MAX_FRAMES || self.waiting_bytes + len > MAX_BYTES {
            return false;
        }
        let mut bytes = Vec::with_capacity(len);
        for part in [header, out.head, out.body] {
            bytes.extend_from_slice(part);
        }
        if let Some(tail) = out.tail {
            let begin = bytes.len();
            bytes.resize(len, 0);
            tail.read(&mut bytes[begin..]);
        }
        self.waiting.push_back(Waiting {
            receiver: at,
            bytes: bytes.into_boxed_slice(),
            merged: out.merged,
        });
        self.waiting_bytes += len;
        true
    }

    /// Answers what the driver asks by the control queue. Whether there may be more.
    fn serve_control(&mut self) -> bool {
        let Some(at) = self.setup.control else {
            return false;
        };
        let mut more = true;
        for _ in 0..COMMANDS {
            let Some(Some(ring)) = self.rings.get_mut(at) else {
                return false;
            };
            match control::next(ring, &mut self.scratch.parts) {
                Ok(None) => {
                    more = false;
                    break;
                }
                Ok(Some(Command::Offloads(bits))) => {
                    self.offloads = bits & self.setup.features & feature::GUEST_OFFLOADS;
                }
                Ok(Some(Command::Pairs(pairs))) => {
                    self.pairs = pairs;
                    self.count_rings();
                }
                Ok(Some(Command::Nothing)) => {}
                Err(broken) => {
                    self.stop(at, broken);
                    return false;
                }
            }
        }
        self.publish(at);
        more
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
                Some(Put::Full | Put::Short) if !self.keep(at, &header, &out) => given.full += 1,
                Some(put @ (Put::Full | Put::Short | Put::Done)) => {
                    if put == Put::Done {
                        self.gave(&out);
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
        !self.is_narrow
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

impl Rings {
    /// Frames wait that did not before: the guest is to kick when it has buffers.
    fn await_buffers(&mut self) {
        if !self.is_armed {
            // The next turn does it.
            return;
        }
        for place in 0..self.receiving.len() {
            let ring = self.rings.get_mut(self.receiving[place]);
            if let Some(Some(ring)) = ring
                && !ring.arm().unwrap_or(true)
            {
                // They came in this moment: let this thread look.
                event::ring(&self.shared.news);
            }
        }
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

impl AsFd for Rings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }
}

/// Bytes of the frame that tells switches where a guest is.
pub(crate) const ANNOUNCEMENT: usize = 60;
/// What waits for a guest at most: frames, and their bytes.
const MAX_FRAMES: usize = 512;
const MAX_BYTES: usize = 1 << 20;
/// How long a frame waits for more buffers than are there while the guest adds none.
const STUCK: Duration = Duration::from_secs(1);
/// Commands of a control queue that are answered in one turn.
const COMMANDS: usize = 8;
