//! One receive queue's frames, batch by batch, and its states when its interface goes away.
//!
//! | link   | meaning                                      | leaves it                          |
//! |--------|----------------------------------------------|------------------------------------|
//! | `Up`   | frames may come                              | rtnetlink tells of a change        |
//! | `Down` | administratively down; the socket stays bound | the interface is up, or deleted   |
//! | `Gone` | the interface was deleted or moved away      | a new socket is bound, by name     |
//!
//! A reset of the NIC, other channels, other offloads: the kernel keeps program and socket where
//! they are, and frames come again by themselves.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::netdevice;
use vnplug_ring::layout::{MAX_SNAPLEN, flags};

use super::flow::{Clock, Flow};
use super::netlink::Watch;
use super::program::{STAMP_BYTES, read_stamp};
use super::socket::{Bound, Opener, any_socket};
use crate::source::early::{EarlyDrop, Loaded, Seat};
use crate::source::link_state::LinkState;
use crate::source::{
    Flushed, Lent, Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter, Wake,
};
use vnplug_frame::{Frame, MAX_BATCH, recycle, vlan_of};
use vnplug_os::interface;
use vnplug_os::umem::Umem;
use vnplug_os::xdp::{Piece, Socket, Unsent};

/// An AF_XDP socket at a receive queue.
#[derive(Debug)]
pub(super) struct XdpQueue {
    opener: Arc<Opener>,
    queue: u32,
    bound: Side,
    /// Its packet memory, as readers have it.
    lent: Option<Lent>,
    watch: Watch,
    link: LinkState,
    /// It was said why a new interface cannot be used.
    told_unfit: bool,
    index: i32,
    mtu: u32,
    /// Always empty between calls; keeps its memory.
    batch: Vec<Frame<'static>>,
    /// Frames of several pieces, joined.
    joined: Vec<u8>,
    clock: Clock,
    flow: Flow,
    /// Calls of `receive` that found nothing since the news were heard.
    idle: u32,
    /// Flags for the next frame handed out.
    mark: u16,
    /// Frames taken by [`Transmitter::transmit`] since the last flush.
    outgoing: u64,
    counters: QueueCounters,
    /// What the present socket has counted, as far as it is in `counters`.
    told: Told,
    /// Frames handed out.
    read: u64,
}

/// The socket, or between two of them its memory.
#[derive(Debug)]
enum Side {
    Bound {
        socket: Box<Socket>,
        zero_copy: bool,
    },
    Loose(Option<Umem>),
}

#[derive(Debug, Clone, Copy, Default)]
struct Told {
    dropped: u64,
    starved: u64,
}

impl XdpQueue {
    pub(crate) fn new(
        opener: Arc<Opener>,
        queue: u32,
        bound: Bound,
        lent: Option<Lent>,
    ) -> Result<Self, SourceError> {
        let watch =
            Watch::new().map_err(|cause| SourceError::io("cannot watch the interfaces", cause))?;
        Ok(Self {
            opener,
            queue,
            lent,
            watch,
            link: LinkState::of(bound.link.up),
            told_unfit: false,
            index: bound.link.index,
            mtu: bound.link.mtu,
            bound: Side::Bound {
                zero_copy: bound.how.zero_copy,
                socket: Box::new(bound.socket),
            },
            batch: Vec::with_capacity(MAX_BATCH),
            joined: Vec::new(),
            clock: Clock::default(),
            flow: Flow::new(),
            idle: 0,
            mark: 0,
            outgoing: 0,
            counters: QueueCounters::default(),
            read: 0,
            told: Told::default(),
        })
    }

    /// Adds what the present socket counted since the last time.
    fn take_statistics(&mut self) {
        let Side::Bound { socket, .. } = &self.bound else {
            return;
        };
        // It cannot fail on such a socket; if it did, the next call would have it all.
        let Ok(now) = socket.statistics() else {
            return;
        };
        // Both are frames that found no room: no free chunk, or none that is long enough; no place
        // in the RX ring.
        let dropped = now.rx_dropped + now.rx_ring_full.unwrap_or(0);
        let starved = now.rx_fill_ring_empty_descs.unwrap_or(0);
        if dropped > self.told.dropped {
            self.mark |= flags::SOURCE_LOSS;
        }
        self.counters.dropped += dropped - self.told.dropped;
        self.counters.freezes += starved - self.told.starved;
        self.told = Told { dropped, starved };
    }

    /// Frames that the program sent to a socket.
    fn sent(&self) -> u64 {
        self.opener.plan().seen(self.queue)
    }

    /// Those of `sent` that were neither read nor counted as dropped.
    fn unread(&self, sent: u64) -> u64 {
        sent.saturating_sub(self.read + self.counters.dropped)
    }

    /// Those that wait in the RX ring, where a few more may still be on the way to.
    fn count_waiting(&self, sent: u64) -> u64 {
        let most = match &self.bound {
            Side::Bound { socket, .. } => u64::from(socket.waiting()) + ON_THE_WAY,
            Side::Loose(_) => 0,
        };
        self.unread(sent).min(most)
    }

    /// Looks again at how the interface is: something changed, or it was not up last time.
    fn look(&mut self) {
        if let LinkState::Gone(_) = self.link {
            return self.look_for_another();
        }
        let Ok(any) = any_socket() else {
            return;
        };
        let link = self.seen_by(&any);
        let name = &self.opener.config().interface;
        match (link, self.link) {
            (Err(_), _) => {
                log::warn!(target: "source", "interface {name:?} is gone");
                self.link = LinkState::gone(Instant::now());
            }
            (Ok(link), LinkState::Up) if !link.up => {
                log::warn!(target: "source", "interface {name:?} is down");
                self.link = LinkState::Down;
            }
            (Ok(link), LinkState::Down) if link.up => {
                log::info!(target: "source", "interface {name:?} is up again");
                self.link = LinkState::Up;
                self.mtu = link.mtu;
                self.counters.rebinds += 1;
                self.mark |= flags::SOURCE_LOSS;
            }
            (Ok(link), _) => {
                self.mtu = link.mtu;
                self.opener.look_at_channels(&any);
            }
        }
    }

    /// What the kernel says of the interface now.
    fn seen_by(&self, any: &OwnedFd) -> io::Result<interface::Link> {
        // By index, as it may have been renamed.
        let name = netdevice::index_to_name(any, self.index as u32)?;
        interface::link(any, &name)
    }

    /// Whether frames can leave; `false` if nobody can say.
    fn has_carrier(&self) -> bool {
        any_socket().is_ok_and(|any| self.seen_by(&any).is_ok_and(|link| link.running))
    }

    /// The interface is gone: binds to one of the same name when it is time, and there is one.
    fn look_for_another(&mut self) {
        let now = Instant::now();
        let LinkState::Gone(retry) = self.link else {
            return;
        };
        // What came before is read first.
        if !retry.is_due(now) || self.has_frames() {
            return;
        }
        // Asked first, because a socket is expensive.
        let exists = self.opener.link().is_ok();
        if !exists {
            self.link = retry.later(now);
            return;
        }
        match self.rebind() {
            Ok(()) => {
                let name = &self.opener.config().interface;
                log::info!(target: "source", "interface {name:?} is back");
            }
            Err(error) => {
                // Said once, though tried for ever.
                let level = if self.told_unfit {
                    log::Level::Debug
                } else {
                    log::Level::Warn
                };
                log::log!(target: "source", level, "receive queue {}: {error}", self.queue);
                self.told_unfit = true;
                self.link = retry.later(now);
            }
        }
    }

    fn rebind(&mut self) -> Result<(), SourceError> {
        self.take_statistics();
        let umem = match std::mem::replace(&mut self.bound, Side::Loose(None)) {
            Side::Bound { socket, .. } => socket.close(),
            Side::Loose(Some(umem)) => umem,
            Side::Loose(None) => match self.opener.umem() {
                Ok(umem) => umem,
                Err(unfit) => return Err(unfit.error),
            },
        };
        self.told = Told::default();
        // What the program sent to the old socket and nobody read went with it.
        self.counters.dropped += self.unread(self.sent());
        let bound = match self.opener.bind(self.queue, umem, Duration::ZERO) {
            Ok(bound) => bound,
            Err((unfit, umem)) => {
                self.bound = Side::Loose(Some(umem));
                return Err(unfit.error);
            }
        };
        let started = self.opener.start(self.queue, &bound);
        self.index = bound.link.index;
        self.mtu = bound.link.mtu;
        self.bound = Side::Bound {
            zero_copy: bound.how.zero_copy,
            socket: Box::new(bound.socket),
        };
        started?;
        self.link = LinkState::of(bound.link.up);
        self.told_unfit = false;
        self.counters.rebinds += 1;
        self.mark |= flags::SOURCE_LOSS;
        Ok(())
    }

    /// Replaces packet memory whose file was truncated, and which reads as zeros, by memory that
    /// nobody else sees.
    fn leave_lost_memory(&mut self) {
        log::error!(
            target: "source",
            "interface {:?}: the file of its packet memory was truncated; it goes on without, and \
             groups that read there do not: restart the daemon",
            self.opener.config().interface
        );
        self.take_statistics();
        self.told = Told::default();
        self.bound = Side::Loose(None);
        self.counters.dropped += self.unread(self.sent());
        self.lent = None;
        self.link = LinkState::gone(Instant::now());
    }

    /// Hears the news now and then, for a thread that never waits.
    fn hear(&mut self) {
        self.idle += 1;
        if self.idle >= NEWS_EVERY {
            self.idle = 0;
            if self.watch.changed() || matches!(self.link, LinkState::Gone(_)) {
                self.look();
            }
        }
    }

    fn has_frames(&self) -> bool {
        match &self.bound {
            Side::Bound { socket, .. } => socket.waiting() > 0,
            Side::Loose(_) => false,
        }
    }

    /// The longest sleep before the interface must be looked at again.
    fn patience(&self) -> Option<Duration> {
        match self.link {
            LinkState::Up | LinkState::Down => None,
            LinkState::Gone(retry) => Some(retry.patience()),
        }
    }
}

impl Queue for XdpQueue {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        let Side::Bound { socket, .. } = &mut self.bound else {
            self.hear();
            return Ok(Received::Nothing);
        };
        if socket.receive(MAX_BATCH).is_empty() {
            if self.opener.config().busy_poll_us > 0 {
                socket.poll_driver();
            }
            self.hear();
            return Ok(Received::Nothing);
        }
        if self.clock.read() {
            self.take_statistics();
        }
        let Side::Bound { socket, .. } = &mut self.bound else {
            return Ok(Received::Nothing);
        };
        let single = socket.taken().iter().all(|piece| !piece.more);
        let mut batch = recycle(std::mem::take(&mut self.batch));
        let now_ns = self.clock.now_ns;
        let stamps = self.opener.config().stamps;
        let ts = |piece| match stamps {
            true => stamp(socket, piece, &self.clock),
            false => now_ns,
        };
        if single {
            let pieces = socket.taken().len();
            batch.extend((0..pieces).map(|piece| frame(socket.bytes(piece, 0), ts(piece))));
        } else {
            join(socket, &mut self.joined);
            let mut joined = &self.joined[..];
            let mut piece = 0;
            while let Some(len) = frame_pieces(&socket.taken()[piece..]) {
                let bytes = match len {
                    1 => socket.bytes(piece, 0),
                    pieces => {
                        let pieces = &socket.taken()[piece..piece + pieces];
                        let len: usize = pieces.iter().map(|piece| piece.len as usize).sum();
                        let (bytes, rest) = joined.split_at(len);
                        joined = rest;
                        bytes
                    }
                };
                batch.push(frame(bytes, ts(piece)));
                piece += len;
            }
        }
        if let Some(first) = batch.first_mut() {
            first.flags |= std::mem::take(&mut self.mark);
        }
        let frames = batch.len();
        if self.lent.as_ref().is_some_and(Lent::is_lost) {
            self.batch = recycle(batch);
            self.counters.dropped += frames as u64;
            self.leave_lost_memory();
            return Ok(Received::Nothing);
        }
        if frames > 0 {
            sink(&batch);
        }
        self.batch = recycle(batch);
        if !single {
            let whole: usize = whole_pieces(socket.taken());
            socket.untake(socket.taken().len() - whole);
        }
        if let Some(lent) = &self.lent {
            // First readers are told, then the kernel may write.
            lent.commons.end_turn(socket.taken().len() as u64);
        }
        socket.refill();
        self.flow.frames += frames as u64;
        self.read += frames as u64;
        match frames {
            0 => Ok(Received::Nothing),
            frames => Ok(Received::Frames(frames)),
        }
    }

    fn arm(&mut self) -> Wake<'_> {
        if self.has_frames() {
            return Wake::NOW;
        }
        // While frames come, they gather: a wake-up costs more than many of them.
        let longest = Duration::from_micros(self.opener.config().coalesce_us.into());
        let pause = self.flow.pause(longest, self.opener.frames());
        let input = match (&self.bound, self.link) {
            // A socket whose interface is gone is readable for ever.
            (Side::Bound { socket, .. }, LinkState::Up | LinkState::Down) if pause.is_none() => {
                Some(socket.as_fd())
            }
            _ => None,
        };
        Wake {
            within: [self.patience(), pause].into_iter().flatten().min(),
            fds: [input, Some(self.watch.as_fd())],
        }
    }

    fn woke(&mut self, [input, news]: Seen) {
        let failed = input.contains(PollFlags::ERR);
        let changed = !news.is_empty() && self.watch.changed();
        if failed && let Side::Bound { socket, .. } = &self.bound {
            // `ENETDOWN`: the interface was deleted, which the look will tell.
            let _ = socket.take_error();
        }
        if failed || changed || matches!(self.link, LinkState::Gone(_)) {
            self.look();
        }
    }

    fn counters(&mut self) -> QueueCounters {
        self.take_statistics();
        let early = self.opener.plan().early(self.queue);
        let program = self.opener.plan().stopped(self.queue);
        let sent = self.sent();
        QueueCounters {
            seen: sent + early + program,
            early,
            program,
            waiting: self.count_waiting(sent),
            ..self.counters
        }
    }

    fn lent(&self) -> Option<Lent> {
        self.lent.clone()
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

impl EarlyDrop for XdpQueue {
    fn seat(&self) -> Result<Seat, String> {
        match self.opener.config().early {
            true => Ok(Seat::xdp(Arc::clone(self.opener.plan()))),
            false => Err("off: as configured".into()),
        }
    }

    fn narrow(&mut self, filter: Box<Loaded>) -> Result<(), SourceError> {
        match *filter {
            Loaded::Xdp(programs) => self.opener.narrow(programs),
            Loaded::Socket(_) => Err(SourceError::new("not a filter for XDP")),
        }
    }
}

impl Transmitter for XdpQueue {
    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        let (Side::Bound { socket, .. }, LinkState::Up) = (&mut self.bound, self.link) else {
            return Transmit::LinkDown;
        };
        let longest = (self.mtu + super::fault::HEADERS) as usize;
        if bytes.len() < ETHERNET_HEADER || bytes.len() > longest.min(socket.longest_sent()) {
            return Transmit::BadLength;
        }
        if !socket.transmit(bytes) {
            return Transmit::Full;
        }
        self.outgoing += 1;
        Transmit::Taken
    }

    fn flush(&mut self, _shown: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        let mut flushed = Flushed {
            sent: std::mem::take(&mut self.outgoing),
            ..Flushed::default()
        };
        let Side::Bound { socket, zero_copy } = &mut self.bound else {
            flushed.link_down = std::mem::take(&mut flushed.sent);
            return flushed;
        };
        if flushed.sent == 0 {
            return flushed;
        }
        let Unsent { refused, retracted } = socket.flush(!*zero_copy);
        // Frames of an earlier flush may be among them.
        let refused = u64::from(refused).min(flushed.sent - u64::from(retracted));
        flushed.sent -= refused + u64::from(retracted);
        flushed.link_down = retracted.into();
        match refused {
            0 => {}
            _ if self.has_carrier() => flushed.full = refused,
            _ => flushed.link_down += refused,
        }
        flushed
    }
}

/// The time of the frame that begins with this piece.
#[inline]
fn stamp(socket: &Socket, piece: usize, clock: &Clock) -> u64 {
    match read_stamp(socket.bytes(piece, STAMP_BYTES)) {
        Some(monotonic_ns) => monotonic_ns.wrapping_add(clock.offset_ns),
        None => clock.now_ns,
    }
}

#[inline]
fn frame(bytes: &[u8], ts_ns: u64) -> Frame<'_> {
    let wire_len = bytes.len() as u32;
    let bytes = &bytes[..bytes.len().min(MAX_SNAPLEN as usize)];
    let (flags, vlan_tci) = vlan_of(bytes);
    Frame {
        bytes,
        wire_len,
        ts_ns,
        flags,
        vlan_tci,
        ..Frame::default()
    }
}

/// How many pieces the first frame has; `None` if it is not whole.
fn frame_pieces(pieces: &[Piece]) -> Option<usize> {
    pieces.iter().position(|piece| !piece.more).map(|at| at + 1)
}

/// How many pieces belong to whole frames.
fn whole_pieces(pieces: &[Piece]) -> usize {
    pieces
        .iter()
        .rposition(|piece| !piece.more)
        .map_or(0, |at| at + 1)
}

/// Puts frames of several pieces together, one after the other.
fn join(socket: &Socket, joined: &mut Vec<u8>) {
    joined.clear();
    let mut first = 0;
    while let Some(pieces) = frame_pieces(&socket.taken()[first..]) {
        if pieces > 1 {
            (first..first + pieces)
                .for_each(|piece| joined.extend_from_slice(socket.bytes(piece, 0)));
        }
        first += pieces;
    }
}

const ETHERNET_HEADER: usize = 14;
/// How often nothing comes before a thread that polls hears the news.
const NEWS_EVERY: u32 = 1024;
/// The most frames that are between the program and the RX ring: what a driver takes in one turn
/// (`NAPI_POLL_WEIGHT`).
const ON_THE_WAY: u64 = 64;
