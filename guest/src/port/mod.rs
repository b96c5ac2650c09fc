//! A port: one attached reader, its rings, and what happens when the other side goes away.
//!
//! | phase   | packets                        | leaves when                                       |
//! |---------|--------------------------------|---------------------------------------------------|
//! | Live    | as they come                   | a ring's life is over, `Gone`, the socket closes  |
//! | Closing | what was published             | `Gone` or EOF say why, or 200 ms are over         |
//! | Away    | what was published, then none  | reopened (Live) or refused for good (Failed)      |
//! | Ended   | none                           | never                                             |
//! | Failed  | none                           | never                                             |
//!
//! A phase is left only when every ring is drained; what was published is never thrown away. The
//! exception is a corrupt ring, which fails at once.

mod asker;
mod batch;
mod bundle;
mod direct;
mod link;
mod phase;
mod posts;
mod rules;
mod send;
mod settle;
mod view;
mod waiting;
mod watch;
mod ways;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_ring::control::{Counted, FilterSpec, Message, Tuning};
use vnplug_ring::{Consumer, Packet};

use crate::client::{ANSWER_LIMIT, done};
use crate::error::Error;
use crate::options::PortOptions;

use asker::Answers;
pub use asker::Asker;
pub use batch::Batch;
pub use bundle::Bundle;
use direct::{Again, Beside, Direct};
use link::Link;
use phase::{Phase, Standing};
pub(crate) use rules::Kept;
pub use rules::RuleStats;
pub use send::{Outbox, Patience};
pub use view::{NextView, View};
pub use waiting::Waiting;
use watch::Watch;

/// One attached reader. It may move between threads but serves one at a time; an [`Asker`] serves the
/// others.
#[derive(Debug)]
pub struct Port {
    options: PortOptions,
    rules: Kept,
    watch: Watch,
    rings: Vec<Consumer>,
    outbox: Option<Outbox>,
    direct: Option<Box<Direct>>,
    beside: Beside,
    again: Again,
    current: usize,
    turn: u32,
    empty_polls: u32,
    /// Picoseconds of a look at the rings; 0 = not measured yet.
    round_ps: u64,
    /// The descriptor is readable because [`Port::settle`] made it so.
    flagged: bool,
    /// The doorbell rings for the first packet, or has rung: it was not emptied since it was armed.
    will_ring: bool,
    /// When the descriptor is to be readable though no packet is there.
    alarm: Option<Instant>,
    /// When room that is held back is to be looked for again.
    look_again: Option<Instant>,
    link: Option<Link>,
    /// A link that is over; its socket closes after the rings are unmapped, since an agent takes
    /// that as the sign that their place is free.
    leaving: Option<Link>,
    phase: Phase,
    backoff: Duration,
    /// Since when the port is away.
    away_since: Option<Instant>,
    /// Since when the socket refuses this user, while the port is away.
    refused_since: Option<Instant>,
    /// What an operator took, once that is known.
    revoked: Option<String>,
    opened_at: Instant,
    shared: Arc<Answers>,
    /// A packet of the current ring that is looked at where it lies.
    looked: Option<vnplug_ring::Look>,
    /// `counts.lost` when the present rings were attached.
    lost_before: u64,
    number: u32,
    device: String,
    link_type: u32,
    snaplen: u32,
}

/// What [`Port::next`] found.
#[derive(Debug)]
pub enum Next<'a> {
    /// A packet, lent until the next call.
    Packet(Packet<'a>),
    /// Nothing yet; the port's descriptor becomes readable when there is.
    Nothing,
    /// The source ended and everything was read (a file played once). A source that failed is an
    /// error instead.
    Ended,
}

/// Why [`Port::wait`] came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// Call [`Port::next`]: there are packets, or it has something else to say.
    Now,
    /// The time is over.
    TimedOut,
    /// A signal was delivered.
    Interrupted,
}

/// This reader's own counters since the port was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets taken.
    pub received: u64,
    /// Their captured bytes.
    pub bytes: u64,
    /// Packets this port lost, as the packets after them told.
    pub lost: u64,
    /// Packets with [`GAP`](vnplug_ring::layout::flags::GAP): before each an unknown number may be missing.
    pub gaps: u64,
    /// Times the port was reopened.
    pub reopened: u64,
}

/// Both sides' counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortStats {
    /// This reader's.
    pub own: Counts,
    /// The host's, of this port's present incarnation; `None` while it cannot be reached.
    pub host: Option<Counted>,
}

impl Port {
    /// Opens a port.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Permission`]: no daemon. [`Error::Refused`]: no such
    /// device, the filter does not compile, or the operator forbids it.
    pub fn open(options: PortOptions) -> Result<Self, Error> {
        Self::open_with(options, Watch::new()?)
    }

    /// Opens a port that is waited for by `watch`.
    fn open_with(options: PortOptions, watch: Watch) -> Result<Self, Error> {
        if options.direct && options.request.posts {
            // What members hand each other the host does not see.
            return Err(Error::Invalid("direct mode posts nothing"));
        }
        let rules = Kept::default();
        let (link, rings) = Link::open(&options, &rules, false, ANSWER_LIMIT, watch.seat())?;
        let mut port = Self {
            options,
            rules,
            watch,
            rings: Vec::new(),
            outbox: None,
            direct: None,
            beside: Beside::default(),
            again: Again::default(),
            current: 0,
            turn: 0,
            empty_polls: 0,
            round_ps: 0,
            flagged: false,
            will_ring: false,
            alarm: None,
            look_again: None,
            link: None,
            leaving: None,
            phase: Phase::Live,
            backoff: phase::FIRST_BACKOFF,
            away_since: None,
            refused_since: None,
            revoked: None,
            opened_at: Instant::now(),
            shared: Arc::default(),
            looked: None,
            lost_before: 0,
            number: 0,
            device: String::new(),
            link_type: 0,
            snaplen: 0,
        };
        port.install(link, rings)?;
        if port.options.direct {
            port.enter_group(None)?;
        }
        Ok(port)
    }

    /// The next packet, `Nothing` yet, or `Ended`.
    ///
    /// `Nothing` has emptied the doorbell and armed the rings: from then on the descriptor
    /// ([`fd`](Self::fd)) becomes readable at the next packet (or at the watermark, or with other
    /// news). Every other call is a few loads and stores and no system call.
    ///
    /// With another [`Waiting`] than [`Waiting::Sleep`], and in a [`Bundle`], it is [`poll_next`](Self::poll_next), which
    /// arms nothing: [`wait`](Self::wait) does what is to be done.
    ///
    /// # Errors
    /// The port is over, with the reason; every further call says the same.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "a lending iterator")]
    pub fn next(&mut self) -> Result<Next<'_>, Error> {
        if self.seek() {
            return self.lend();
        }
        if self.options.waiting != Waiting::Sleep || self.watch.shared().is_some() {
            return self.poll_next();
        }
        match self.idle()? {
            Standing::Packets => self.lend(),
            Standing::Quiet => Ok(Next::Nothing),
            Standing::Ended => Ok(Next::Ended),
        }
    }

    /// As [`next`](Self::next), for a reader that spins: it does not arm the doorbell, and makes no
    /// system call while the rings are open, but for one look at the control socket in 65,536 empty
    /// calls (so that a spinning reader, too, learns of the daemon's death).
    ///
    /// # Errors
    /// As [`next`](Self::next).
    #[inline]
    pub fn poll_next(&mut self) -> Result<Next<'_>, Error> {
        if self.seek() {
            self.empty_polls = 0;
            return self.lend();
        }
        self.empty_polls = self.empty_polls.wrapping_add(1) & 0xffff;
        self.release();
        if self.empty_polls != 0 && matches!(self.phase, Phase::Live) && self.all_open() {
            return Ok(Next::Nothing);
        }
        match self.idle()? {
            Standing::Packets => self.lend(),
            Standing::Quiet => Ok(Next::Nothing),
            Standing::Ended => Ok(Next::Ended),
        }
    }

    /// Up to `max` packets that are published now, from all rings; all are lent until the next
    /// call. Room of packets taken before is given back first.
    ///
    /// An empty batch does not say why it is empty: ask [`next`](Self::next).
    #[inline]
    pub fn batch(&mut self, max: usize) -> Batch<'_> {
        self.batch_beside(max).0
    }

    #[inline]
    fn batch_beside(&mut self, max: usize) -> (Batch<'_>, Option<&mut Outbox>) {
        self.release();
        let failed = matches!(self.phase, Phase::Failed(_));
        self.current = match self.current + 1 {
            next if next < self.rings.len() => next,
            _ => 0,
        };
        let (before, from) = self.rings.split_at_mut(self.current);
        let max = if failed { 0 } else { max };
        let batch = Batch::new(from, before, max, &self.shared.tally, &mut self.phase);
        (batch, self.outbox.as_mut())
    }

    /// As [`batch`](Self::batch), but of one ring, and in one piece of memory: from the first byte of
    /// the first packet to the last of the last there are the packets, in their order, and between
    /// them at most 40 bytes of something else. The rings have their turns.
    #[inline]
    pub fn span(&mut self, max: usize) -> Batch<'_> {
        self.release();
        let found = self.seek_next();
        self.turn = 0;
        let ring = self.rings.get_mut(self.current).filter(|_| found);
        Batch::span(ring, max, &self.shared.tally, &mut self.phase)
    }

    /// Gives the room of all packets taken so far back to the host. [`next`](Self::next) and
    /// [`batch`](Self::batch) do it now and then by themselves; a reader that pauses does it first.
    #[inline]
    pub fn release(&mut self) {
        if self.has_news_of_members() {
            self.look_after_members();
        }
        self.flush_posted();
        for ring in &mut self.rings {
            ring.release();
        }
    }

    /// Gives back what was held back for posts and has been sent since. Nothing is lent meanwhile.
    fn release_held(&mut self) {
        let rings = self.rings.iter_mut();
        rings
            .filter(|ring| ring.holds_back())
            .for_each(Consumer::release);
    }

    /// Waits until as many packets are unread as the watermark says, the oldest of them has waited
    /// for the maximum delay, the port has other news, or `timeout` is over (`None`: no limit).
    ///
    /// How it waits is [`PortOptions::waiting`](crate::PortOptions::waiting); one that does not sleep
    /// comes back at the first packet, and does not notice signals: give it a `timeout`.
    ///
    /// # Errors
    /// Only of the system; a port that is over makes it return [`Ready::Now`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Ready, Error> {
        self.wait_as_told(timeout)
    }

    /// For poll, select and epoll: readable means call [`next`](Self::next) until it says
    /// `Nothing`. The number stays the same over a reconnect. Level-triggered; an edge-triggered
    /// user must call `next` until `Nothing` at each edge.
    ///
    /// Do not read it, and do not wait on it before `next` said `Nothing` once.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }

    /// Replaces the filter, between two packets. On an error the old one stays.
    ///
    /// # Errors
    /// [`Error::Refused`] if it does not compile; [`Error::Disconnected`] while reconnecting.
    pub fn set_filter(&mut self, filter: FilterSpec) -> Result<(), Error> {
        let request = Message::Filter {
            port: self.number,
            filter: filter.clone(),
        };
        done(&self.ask(&request)?)?;
        self.options.request.filter = filter;
        // What other members hand over passes no filter of the host.
        self.choice_changed();
        Ok(())
    }

    /// Turns the port's direction, sampling, or turns it off or on, between two packets. What was
    /// published before is read as ever. On an error it stays as it was.
    ///
    /// # Errors
    /// [`Error::Disconnected`] while reconnecting; those of any request.
    pub fn tune(&mut self, tuning: Tuning) -> Result<(), Error> {
        let port = self.number;
        done(&self.ask(&Message::Tune { port, tuning })?)?;
        self.options.request.tuning = tuning;
        self.choice_changed();
        Ok(())
    }

    /// How the port is tuned.
    pub fn tuning(&self) -> Tuning {
        self.options.request.tuning
    }

    /// This reader's counters and the host's.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Protocol`]. An unreachable host is no error here.
    pub fn stats(&mut self) -> Result<PortStats, Error> {
        let stats = self.asker().stats();
        // What came unasked in between no longer makes the descriptor readable.
        self.hear();
        stats
    }

    /// For other threads, which may ask while this port is in use.
    pub fn asker(&self) -> Asker {
        Asker(Arc::clone(&self.shared))
    }

    /// Says how far this reader's own work is, to those who ask the host for the port's counters: each
    /// value is there as `reader_` and its name. At most 16, named by up to 32 of a to z, digits and `_`;
    /// they replace those of the note before. The host makes nothing of them, and forgets them when it
    /// restarts.
    ///
    /// # Errors
    /// [`Error::Refused`] also by a host that is too old to know notes; [`Error::Disconnected`] while
    /// reconnecting.
    pub fn note(&mut self, values: &[(&str, u64)]) -> Result<(), Error> {
        let value = |&(name, value): &(&str, u64)| (name.to_owned(), value);
        let request = Message::Note {
            port: self.number,
            values: values.iter().map(value).collect(),
        };
        done(&self.ask(&request)?)
    }

    /// Packets this port lost since it was opened, as its rings say now: those too that no packet
    /// has told of yet ([`Counts::lost`]). No request is made.
    pub fn dropped(&self) -> u64 {
        let rings: u64 = self.hosted().iter().map(Consumer::dropped).sum();
        self.counts().lost.max(self.lost_before + rings)
    }

    /// This reader's counters; no request is made.
    pub fn counts(&self) -> Counts {
        self.shared.tally.counts()
    }

    /// The device's name, with `host:`.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The port's number in the daemon; changes when the port is reopened.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Link type of the frames, a DLT registered by tcpdump.org; 1 = Ethernet.
    pub fn link_type(&self) -> u32 {
        self.link_type
    }

    /// The longest captured length.
    pub fn snaplen(&self) -> u32 {
        self.snaplen
    }

    /// Rings, one per receive queue of the device.
    pub fn ring_count(&self) -> usize {
        self.hosted().len()
    }

    /// True while the daemon is gone and the port tries to reopen.
    pub fn is_away(&self) -> bool {
        matches!(self.phase, Phase::Away { .. })
    }

    /// Finds a ring with a packet and makes it the current one.
    #[inline]
    fn seek(&mut self) -> bool {
        if self.turn > 0
            && let Some(ring) = self.rings.get_mut(self.current)
            && !ring.is_drained()
        {
            return true;
        }
        self.seek_next()
    }

    /// The current ring's turn is over or it is drained: room goes back, the next ring's turn.
    fn seek_next(&mut self) -> bool {
        if matches!(self.phase, Phase::Failed(_)) {
            return false;
        }
        let count = self.rings.len();
        self.flush_posted();
        if let Some(ring) = self.rings.get_mut(self.current) {
            ring.release();
        }
        for step in 1..=count {
            let index = (self.current + step) % count;
            if !self.rings[index].is_drained() {
                self.current = index;
                self.turn = TURN;
                return true;
            }
        }
        false
    }

    /// What was posted of packets whose loan is over leaves: else nobody might flush before there is room for more.
    #[inline]
    fn flush_posted(&mut self) {
        if let Some(outbox) = &mut self.outbox {
            outbox.flush_posted();
        }
    }

    /// Takes the packet that `seek` found.
    #[inline]
    fn lend(&mut self) -> Result<Next<'_>, Error> {
        self.turn -= 1;
        let ring = &mut self.rings[self.current];
        let is_beside = ring.is_beside();
        match ring.next() {
            Ok(Some(packet)) => {
                self.shared.tally.add(&packet.meta, packet.bytes.len());
                Ok(Next::Packet(packet))
            }
            Ok(None) => Ok(Next::Nothing),
            // That member's ring is over, and not the port. Other rings were not asked: who waits comes again.
            Err(_) if is_beside => {
                self.turn = 0;
                if !self.flagged {
                    self.flagged = true;
                    self.watch.set_timer(Some(Duration::ZERO));
                }
                Ok(Next::Nothing)
            }
            Err(corrupt) => {
                self.turn = 0;
                self.phase = Phase::Failed(corrupt.into());
                Err(corrupt.into())
            }
        }
    }

    // NB: neither releases nor unmaps: the Python package asks while it has packets on loan.
    fn ask(&mut self, request: &Message) -> Result<Message, Error> {
        let link = self.link.as_mut().ok_or(Error::Disconnected)?;
        let answer = link.exchange(request);
        // What came unasked in between no longer makes the descriptor readable.
        self.hear();
        answer
    }
}

impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

/// Packets taken from one ring before the next has its turn, and so between two releases.
const TURN: u32 = 64;
