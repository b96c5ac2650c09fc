//! One socket's frames, batch by batch, and its states when its interface goes away.
//!
//! | link   | meaning                                      | leaves it                          |
//! |--------|----------------------------------------------|------------------------------------|
//! | `Up`   | frames may come                              | the socket reports an error        |
//! | `Down` | administratively down; the kernel re-attaches the socket by itself | the interface is up, or deleted |
//! | `Gone` | the interface was deleted or moved away      | a new socket is bound, by name     |
//!
//! The old rings stay until the new ones are there, and are read out first: what the kernel counted
//! is either handed out or counted as dropped.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::netdevice;
use vnplug_ring::layout::flags;
use vnplug_ring::offload::Offload;

use super::Direction;
use super::held::{Behind, Held, STEP};
use super::outbox::Outbox;
use super::rings::Rings;
use super::socket::{Bound, Opener};
use crate::source::early::{EarlyDrop, Loaded, Seat};
use crate::source::link_state::LinkState;
use crate::source::{
    Flushed, Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter, Wake,
};
use vnplug_frame::offload::work;
use vnplug_frame::{Frame, MAX_BATCH, recycle};
use vnplug_os::interface;
use vnplug_os::interface::Link;
use vnplug_os::kept::Keeping;
use vnplug_os::namespace::Id;

/// Packet sockets with their rings.
#[derive(Debug)]
pub(super) struct PacketQueue {
    opener: Arc<Opener>,
    rings: Rings,
    /// Always empty between calls; keeps its memory.
    batch: Vec<Frame<'static>>,
    bound: Link,
    namespace: Option<Id>,
    link: LinkState,
    seat: Result<Seat, String>,
    /// What the kernel passes, if that is not everything.
    pub(super) early: Option<Box<Loaded>>,
    /// Flags for the next frame handed out.
    mark: u16,
    outbox: Outbox,
    /// The interface's MTU, if it was asked for since the last flush; 0: nobody says.
    mtu: Option<u32>,
    counters: QueueCounters,
    /// Frames handed out.
    read: u64,
    /// Which of the interface's queues.
    number: u32,
    /// The sockets, as long as somebody keeps them over a restart.
    keeping: Vec<Keeping>,
    /// Nothing is handed out yet.
    held: Option<Held>,
    /// What came meanwhile is being handed out.
    behind: Option<Behind>,
    /// What another process left was never counted in a quiet moment.
    unsure: bool,
}

impl PacketQueue {
    pub(super) fn new(opener: Arc<Opener>, bound: Bound) -> Self {
        let seat = opener.seat(bound.link);
        Self::with_seat(opener, bound, seat)
    }

    /// Whose early filters are made for this seat.
    pub(super) fn with_seat(opener: Arc<Opener>, bound: Bound, seat: Result<Seat, String>) -> Self {
        let outbox = Outbox::new(opener.config().offload);
        let mut queue = Self {
            opener,
            bound: bound.link,
            namespace: bound.namespace,
            seat,
            early: None,
            link: LinkState::Up,
            rings: bound.rings,
            batch: Vec::with_capacity(MAX_BATCH),
            mark: 0,
            outbox,
            mtu: None,
            counters: QueueCounters::default(),
            read: 0,
            number: bound.queue,
            keeping: bound.keeping,
            held: bound.resumed.then(Held::default),
            behind: None,
            unsure: false,
        };
        queue.settle(bound.link.up);
        if bound.resumed {
            queue.take_over();
        }
        queue
    }

    /// Begins to count where another process stopped: what lies in the rings is ours, and what was lost since it counted.
    fn take_over(&mut self) {
        for _ in 0..TRIES {
            self.take_statistics();
            let (before, waiting) = (self.counters.seen, self.rings.waiting());
            self.take_statistics();
            // Else frames came while the rings were counted, and may be among them.
            let is_sure = self.counters.seen == before;
            self.counters.seen = self.counters.dropped + waiting;
            if is_sure {
                return;
            }
        }
        self.unsure = true;
    }

    /// Whether nothing is to be handed out yet.
    fn is_held(&mut self) -> bool {
        let Some(held) = &mut self.held else {
            return false;
        };
        if !held.is_over(|| self.rings.are_half_full()) {
            return true;
        }
        if let Some(filter) = self.held.take().and_then(|held| held.filter)
            && let Err(error) = self.narrow(filter)
        {
            // Everything is more than what was wanted, but never too little.
            log::warn!(target: "source", "{error}: the kernel drops nothing before the ring");
        }
        self.behind = Some(Behind::now());
        false
    }

    /// Whether what was held waits for a reader.
    fn waits(&mut self) -> bool {
        let is_over = |it: &Behind| it.is_over(|| self.rings.are_half_full());
        if self.behind.as_ref().is_some_and(is_over) {
            self.behind = None;
        }
        self.behind.as_ref().is_some_and(|it| it.is_crowded)
    }

    /// The state after a bind, which leaves an error on the socket if the interface is down.
    fn settle(&mut self, up: bool) {
        self.take_error();
        self.link = LinkState::of(up);
    }

    /// The errors of all sockets: each of them reports what happens to the interface.
    fn take_error(&self) -> Option<io::Error> {
        let sockets = self.rings.sockets();
        sockets.fold(None, |found, socket| found.or(socket.take_error()))
    }

    fn take_statistics(&mut self) {
        for socket in self.rings.sockets() {
            // The option cannot fail on a packet socket with a ring; if it did, nothing was cleared
            // and the next call has it all.
            let Ok(now) = socket.take_statistics() else {
                continue;
            };
            self.counters.seen += u64::from(now.tp_packets);
            self.counters.dropped += u64::from(now.tp_drops);
            self.counters.freezes += u64::from(now.tp_freeze_q_cnt);
            if now.tp_drops > 0 {
                self.mark |= flags::SOURCE_LOSS;
            }
        }
    }

    /// Takes the statistics, and counts what waits in the rings at that moment.
    ///
    /// Frames come while the rings are counted; the kernel's statistics before and after show how
    /// many. So the counters add up also under load, and frames that are nowhere still show.
    fn count_waiting(&mut self) -> u64 {
        // What was shown never was in the rings.
        let taken = |it: &Self| {
            let counters = &it.counters;
            counters
                .seen
                .saturating_sub(counters.shown + counters.dropped)
        };
        self.take_statistics();
        let before = taken(self);
        let counted = self.rings.waiting();
        self.take_statistics();
        let after = taken(self);
        if self.unsure && after == before {
            let counters = &mut self.counters;
            counters.seen = counters.shown + counters.dropped + self.read + counted;
            self.unsure = false;
            return counted;
        }
        let rest = after.saturating_sub(self.read);
        rest.clamp(counted, counted + after.saturating_sub(before))
    }

    /// Looks again at how the interface is; `ENETDOWN` was seen, or it was not up last time.
    fn look(&mut self) {
        let socket = self.rings.socket();
        if socket
            .bound_to()
            .is_ok_and(|index| index != self.bound.index)
        {
            self.look_for_another();
            return;
        }
        // By index, as it may have been renamed.
        let up = netdevice::index_to_name(socket, self.bound.index as u32)
            .map_err(Into::into)
            .and_then(|name| interface::link(socket, &name))
            .is_ok_and(|link| link.up);
        self.link = LinkState::of(up);
        if up {
            self.counters.rebinds += 1;
            self.mark |= flags::SOURCE_LOSS;
            log::info!(target: "source", "interface {:?} is up again", self.opener.config().interface);
        }
    }

    /// The interface is gone: binds to one of the same name when it is time, and there is one.
    fn look_for_another(&mut self) {
        let now = Instant::now();
        let LinkState::Gone(retry) = self.link else {
            log::warn!(target: "source", "interface {:?} is gone", self.opener.config().interface);
            // The last frames come when their block's time is over.
            let drain = 2 * Duration::from_millis(self.opener.config().block_timeout_ms.into());
            self.link = LinkState::gone(now + drain + DRAIN_MARGIN);
            return;
        };
        if !retry.is_due(now) || !self.rings.is_empty() {
            return;
        }
        match self.reopen() {
            Ok(bound) => {
                self.take_statistics();
                // What still lies in the old rings goes with them.
                self.counters.dropped += self.rings.waiting();
                self.bound = bound.link;
                self.namespace = bound.namespace;
                self.rings = bound.rings;
                self.keeping = bound.keeping;
                self.settle(bound.link.up);
                self.counters.rebinds += 1;
                self.mark |= flags::SOURCE_LOSS;
                log::info!(target: "source", "interface {:?} is back", self.opener.config().interface);
            }
            Err(error) => {
                log::debug!(target: "source", "{error}");
                self.link = retry.later(now);
            }
        }
    }

    fn reopen(&self) -> Result<Bound, SourceError> {
        // Asked first, because a ring is expensive.
        self.opener.link(self.rings.socket())?;
        let bound = self.opener.open(self.number)?;
        let early = self.early.as_deref();
        let filtered = self.opener.filter(&bound.rings, bound.link, early);
        // Everything is more than what was wanted, but never too little.
        filtered.or_else(|_| self.opener.start(&bound))?;
        Ok(bound)
    }

    /// Which of the interface's queues it is.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// The network namespace in which it is, if it is not the thread's.
    pub(super) fn namespace(&self) -> Option<Id> {
        self.namespace
    }

    /// For who goes on when this is over.
    pub(super) fn opener(&self) -> &Arc<Opener> {
        &self.opener
    }

    /// Lets go of the interface. What it counted but for what the kernel's filter dropped, and that filter.
    pub(super) fn close(mut self) -> (QueueCounters, Option<Box<Loaded>>) {
        self.take_statistics();
        // What still lies in the rings goes with them.
        let counters = &mut self.counters;
        counters.dropped = counters.seen.saturating_sub(counters.shown + self.read);
        (self.counters, self.early)
    }

    /// There was another one before, and frames may have passed between.
    pub(super) fn follows(&mut self) {
        self.counters.rebinds += 1;
        self.mark |= flags::SOURCE_LOSS;
    }

    /// The longest sleep before the interface must be looked at again.
    fn patience(&self) -> Option<Duration> {
        match self.link {
            LinkState::Up => None,
            LinkState::Down => Some(DOWN_PAUSE),
            LinkState::Gone(retry) => Some(retry.patience()),
        }
    }
}

impl Queue for PacketQueue {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        if self.is_held() || self.waits() {
            return Ok(Received::Nothing);
        }
        let most = if self.is_behind() { STEP } else { MAX_BATCH };
        self.rings.release_spent();
        // A block has frames, but nothing relies on it: one round through the rings at most.
        for _ in 0..self.rings.blocks() {
            let Some(next) = self.rings.next() else {
                self.behind = None;
                return Ok(Received::Nothing);
            };
            if self.rings.take_losing() {
                self.take_statistics();
            }
            let mut batch = recycle(std::mem::take(&mut self.batch));
            let Some(mut walk) = self.rings.walk(next, self.opener.config().snaplen) else {
                return Ok(Received::Nothing);
            };
            walk.fill(&mut batch, most);
            let (cursor, malformed) = walk.stop();
            if let Some(first) = batch.first_mut() {
                first.flags |= std::mem::take(&mut self.mark);
            }
            let frames = batch.len();
            if frames > 0 {
                sink(&batch);
            }
            self.batch = recycle(batch);
            self.read += frames as u64;
            self.counters.dropped += u64::from(malformed);
            self.rings.stopped(cursor);
            self.rings.release_spent();
            if frames > 0 {
                return Ok(Received::Frames(frames));
            }
        }
        Ok(Received::Nothing)
    }

    fn is_behind(&self) -> bool {
        self.behind.is_some()
    }

    fn is_crowded(&mut self, is_crowded: bool) {
        if let Some(behind) = &mut self.behind {
            behind.is_crowded = is_crowded;
        }
    }

    fn arm(&mut self) -> Wake<'_> {
        let within = self.patience();
        let held = self.held.as_ref().map(Held::pause);
        if let Some(within) = held.or_else(|| self.behind.as_ref().and_then(Behind::pause)) {
            return Wake {
                fds: [None, None],
                within: Some(within),
            };
        }
        match self.rings.arm() {
            None => Wake::NOW,
            input => Wake {
                fds: [input, None],
                within,
            },
        }
    }

    fn woke(&mut self, [input, _]: Seen) {
        if input.contains(PollFlags::ERR)
            && let Some(cause) = self.take_error()
        {
            let name = &self.opener.config().interface;
            log::warn!(target: "source", "interface {name:?}: {cause}");
            self.look();
        } else if !matches!(self.link, LinkState::Up) {
            self.look();
        }
    }

    fn counters(&mut self) -> QueueCounters {
        let waiting = self.count_waiting();
        // The kernel's own counters know nothing of what its filter drops.
        let early = self.seat.as_ref().map_or(0, Seat::dropped);
        let config = self.opener.config();
        let patience = self
            .rings
            .patience_ms(config.block_size, config.block_timeout_ms);
        QueueCounters {
            patience_ms: Some(patience),
            waiting,
            seen: self.counters.seen + early,
            early,
            ..self.counters
        }
    }

    fn is_pressed(&self) -> bool {
        self.rings.are_half_full()
    }

    fn state(&self) -> &'static str {
        self.link.name()
    }

    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        Some(self)
    }

    fn early(&mut self) -> Option<&mut dyn EarlyDrop> {
        Some(self)
    }
}

impl EarlyDrop for PacketQueue {
    fn seat(&self) -> Result<Seat, String> {
        self.seat.clone()
    }

    fn narrow(&mut self, filter: Box<Loaded>) -> Result<(), SourceError> {
        // What those want who come back is not known yet.
        if let Some(held) = &mut self.held {
            held.filter = Some(filter);
            return Ok(());
        }
        self.opener.filter(&self.rings, self.bound, Some(&filter))?;
        self.early = Some(filter);
        Ok(())
    }
}

impl Transmitter for PacketQueue {
    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        self.transmit_offloaded(bytes, &Offload::default())
    }

    fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        match self.link {
            LinkState::Up => self.outbox.place(len),
            LinkState::Down | LinkState::Gone(_) => None,
        }
    }

    fn placed(&mut self, frame: Range<usize>, offload: &Offload) -> Transmit {
        if offload.is_super_frame() {
            let mtu = self.mtu();
            if is_beyond(mtu, self.outbox.at(&frame), offload) {
                return Transmit::BadLength;
            }
        }
        self.outbox.placed(frame, offload)
    }

    fn takes_offload(&self) -> bool {
        self.outbox.has_headers()
    }

    fn transmit_offloaded(&mut self, bytes: &[u8], offload: &Offload) -> Transmit {
        let is_too_long = offload.is_super_frame() && is_beyond(self.mtu(), bytes, offload);
        match self.link {
            LinkState::Up if is_too_long => Transmit::BadLength,
            LinkState::Up => self.outbox.take(bytes, offload),
            LinkState::Down | LinkState::Gone(_) => Transmit::LinkDown,
        }
    }

    fn flush(&mut self, shown: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        let counters = &mut self.counters;
        self.mtu = None;
        // The kernel shows no socket of a group what one of them sends. On loopback it comes back in.
        let shows = self.opener.direction(self.bound) != Direction::Rx;
        let snaplen = self.opener.config().snaplen;
        self.outbox
            .flush(self.rings.socket(), snaplen, &mut |frames| {
                if shows {
                    counters.seen += frames.len() as u64;
                    counters.shown += frames.len() as u64;
                    shown(frames);
                }
            })
    }
}

impl PacketQueue {
    /// The interface's MTU, which is asked for once before a flush; 0: it is not known.
    fn mtu(&mut self) -> u32 {
        let (socket, index) = (self.rings.socket(), self.bound.index);
        let ask = || interface::mtu(socket, index).unwrap_or(0);
        *self.mtu.get_or_insert_with(ask)
    }
}

/// Whether the packets of a super-frame are longer than this MTU allows. NB: of frames that are not cut the kernel says
/// it (EMSGSIZE); these it takes, and they are lost behind it. What does not fit its frame it refuses.
fn is_beyond(mtu: u32, frame: &[u8], offload: &Offload) -> bool {
    let Ok(Some(work)) = work(frame, frame.len() as u32, offload) else {
        return false;
    };
    // As the kernel counts frames: one tag of 802.1Q is no part of it.
    let tag = 4 * usize::from(frame.get(12..14) == Some(&[0x81, 0]));
    mtu > 0 && work.longest() > mtu as usize + HEADER + tag
}

/// Bytes of an Ethernet header.
const HEADER: usize = 14;
/// How often frames are counted that come meanwhile.
const TRIES: usize = 100;
/// How often an interface that is down is looked at, to see it deleted or up.
const DOWN_PAUSE: Duration = Duration::from_millis(50);
/// Added to twice the block timeout: older kernels keep it in ticks of up to 10 ms.
const DRAIN_MARGIN: Duration = Duration::from_millis(30);
