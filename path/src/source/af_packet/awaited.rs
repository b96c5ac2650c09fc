//! A queue of an interface that is not there yet, or of a network namespace that may go.
//!
//! It looks for the interface by name, as a queue does whose interface was deleted, and from then on it is the packet queue. If
//! that is in a network namespace of its own, it looks whether that is still the one of that name; if not it lets go of the
//! interface, so that the namespace can end, and looks again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_os::interface::Link;
use vnplug_ring::offload::Offload;

use super::queue::PacketQueue;
use super::socket::Opener;
use crate::source::early::{EarlyDrop, Loaded, Seat};
use crate::source::link_state::{LinkState, Retry};
use crate::source::{
    Flushed, Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter, Wake,
};
use vnplug_frame::Frame;

#[derive(Debug)]
pub(super) struct Awaited {
    opener: Arc<Opener>,
    /// Which of the interface's queues.
    number: u32,
    /// Since the interface was there.
    found: Option<PacketQueue>,
    retry: Retry,
    seat: Result<Seat, String>,
    /// What the kernel is to pass once there is something.
    early: Option<Box<Loaded>>,
    /// Why it could not be received, though it is there, as the log has it.
    told: String,
    /// Of queues that are over, without what the kernel's filter dropped.
    before: Option<QueueCounters>,
    /// When it is looked whether the namespace is the same.
    check_at: Instant,
    /// When a queue is let go whose namespace is another one.
    leave_at: Option<Instant>,
}

impl Awaited {
    pub(super) fn new(opener: Arc<Opener>, number: u32) -> Self {
        // Loopback is the only interface that takes another filter, and it is always there.
        let seat = opener.seat(Link {
            index: 0,
            hardware: libc::ARPHRD_ETHER,
            mac: [0; 6],
            mtu: 0,
            up: false,
            running: false,
        });
        Self::with(opener, number, seat, None)
    }

    /// Whose interface is there already.
    pub(super) fn found(queue: PacketQueue) -> Self {
        let opener = Arc::clone(queue.opener());
        let (number, seat) = (queue.number(), EarlyDrop::seat(&queue));
        Self::with(opener, number, seat, Some(queue))
    }

    fn with(
        opener: Arc<Opener>,
        number: u32,
        seat: Result<Seat, String>,
        found: Option<PacketQueue>,
    ) -> Self {
        let now = Instant::now();
        Self {
            opener,
            number,
            found,
            retry: Retry::at(now),
            seat,
            early: None,
            told: String::new(),
            before: None,
            check_at: now + CHECK,
            leave_at: None,
        }
    }

    fn look(&mut self) {
        let now = Instant::now();
        if !self.retry.is_due(now) || !self.may_return() {
            return;
        }
        let name = &self.opener.config().interface;
        match self.open() {
            Ok(mut queue) => {
                // For when the interface is made again.
                queue.early = self.early.take();
                if self.before.is_some() {
                    queue.follows();
                }
                log::info!(target: "source", "interface {name:?} is there");
                self.told.clear();
                self.found = Some(queue);
                self.check_at = now + CHECK;
                return;
            }
            // It is not there.
            Err(None) => {}
            Err(Some(error)) => {
                let error = error.to_string();
                if error != self.told {
                    log::warn!(target: "source", "{error}; it is tried again");
                    self.told = error;
                }
            }
        }
        if let LinkState::Gone(retry) = self.retry.later(now) {
            self.retry = retry;
        }
    }

    /// Opens the queue; no error if there is no such interface.
    fn open(&self) -> Result<PacketQueue, Option<SourceError>> {
        if !self.opener.is_there()? {
            return Err(None);
        }
        let bound = self.opener.open(self.number)?;
        let early = self.early.as_deref();
        let filtered = self.opener.filter(&bound.rings, bound.link, early);
        // Everything is more than what was wanted, but never too little.
        filtered.or_else(|_| self.opener.start(&bound))?;
        let (opener, seat) = (Arc::clone(&self.opener), self.seat.clone());
        Ok(PacketQueue::with_seat(opener, bound, seat))
    }

    /// Whether there may be something yet.
    fn may_return(&self) -> bool {
        let namespace = self.opener.config().namespace.as_ref();
        self.before.is_none() || namespace.is_none_or(|it| it.may_return())
    }

    /// Lets go of a queue whose namespace is gone, or is another one by that name.
    fn check(&mut self) {
        let config = self.opener.config();
        let (Some(namespace), Some(queue)) = (&config.namespace, &self.found) else {
            return;
        };
        let now = Instant::now();
        if now >= self.check_at {
            self.check_at = now + CHECK;
            if self.leave_at.is_none() && namespace.id() != queue.namespace() {
                let (name, interface) = (namespace.name(), &config.interface);
                log::warn!(target: "source", "network namespace {name:?} is gone, and with it interface {interface:?}");
                // The last frames come when their block's time is over.
                let drain = 2 * Duration::from_millis(config.block_timeout_ms.into());
                self.leave_at = Some(now + drain + DRAIN_MARGIN);
            }
        }
        if self.leave_at.is_some_and(|at| now >= at)
            && let Some(queue) = self.found.take()
        {
            self.leave_at = None;
            let (counters, early) = queue.close();
            self.before.get_or_insert_default().add(&counters);
            self.early = early;
            self.retry = Retry::at(now);
        }
    }
}

impl Queue for Awaited {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        match &mut self.found {
            Some(queue) => queue.receive(sink),
            None => Ok(Received::Nothing),
        }
    }

    fn arm(&mut self) -> Wake<'_> {
        let may_return = self.may_return();
        let check = self.opener.config().namespace.as_ref().map(|_| {
            let at = self.leave_at.unwrap_or(self.check_at).min(self.check_at);
            at.saturating_duration_since(Instant::now()).max(MIN_PAUSE)
        });
        match &mut self.found {
            Some(queue) => {
                let wake = queue.arm();
                let within = [wake.within, check].into_iter().flatten().min();
                Wake { within, ..wake }
            }
            None => Wake {
                fds: [None, None],
                within: may_return.then(|| self.retry.patience()),
            },
        }
    }

    fn woke(&mut self, seen: Seen) {
        match &mut self.found {
            Some(queue) => {
                queue.woke(seen);
                self.check();
            }
            None => self.look(),
        }
    }

    fn counters(&mut self) -> QueueCounters {
        let mut counters = match &mut self.found {
            Some(queue) => queue.counters(),
            None => {
                let early = self.seat.as_ref().map_or(0, Seat::dropped);
                QueueCounters {
                    seen: early,
                    early,
                    ..QueueCounters::default()
                }
            }
        };
        if let Some(before) = &self.before {
            counters.add(before);
        }
        counters
    }

    fn is_pressed(&self) -> bool {
        self.found.as_ref().is_some_and(Queue::is_pressed)
    }

    fn state(&self) -> &'static str {
        match (&self.found, &self.before) {
            (Some(queue), _) => queue.state(),
            (None, Some(_)) => "gone",
            (None, None) => "missing",
        }
    }

    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        if self.found.is_none() {
            return Some(self);
        }
        self.found.as_mut().map(|queue| queue as _)
    }

    fn early(&mut self) -> Option<&mut dyn EarlyDrop> {
        if self.found.is_none() {
            return Some(self);
        }
        self.found.as_mut().map(|queue| queue as _)
    }
}

impl EarlyDrop for Awaited {
    fn seat(&self) -> Result<Seat, String> {
        self.seat.clone()
    }

    fn narrow(&mut self, filter: Box<Loaded>) -> Result<(), SourceError> {
        self.early = Some(filter);
        Ok(())
    }
}

impl Transmitter for Awaited {
    fn transmit(&mut self, _: &[u8]) -> Transmit {
        Transmit::LinkDown
    }

    fn takes_offload(&self) -> bool {
        self.opener.config().offload
    }

    fn transmit_offloaded(&mut self, _: &[u8], _: &Offload) -> Transmit {
        Transmit::LinkDown
    }

    fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        Flushed::default()
    }
}

/// How often it is looked whether a namespace is the same.
const CHECK: Duration = Duration::from_millis(500);
const MIN_PAUSE: Duration = Duration::from_millis(1);
/// Added to twice the block timeout: older kernels keep it in ticks of up to 10 ms.
const DRAIN_MARGIN: Duration = Duration::from_millis(30);
