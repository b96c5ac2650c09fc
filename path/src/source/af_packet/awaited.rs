//! A queue of an interface that is not there yet.
//!
//! It looks for the interface by name, as a queue does whose interface was deleted, and from then on it is the packet queue.

use std::sync::Arc;
use std::time::Instant;

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
    /// Since the interface was there.
    found: Option<PacketQueue>,
    retry: Retry,
    seat: Result<Seat, String>,
    /// What the kernel is to pass once there is something.
    early: Option<Box<Loaded>>,
    /// Why it could not be received, though it is there, as the log has it.
    told: String,
}

impl Awaited {
    pub(super) fn new(opener: Arc<Opener>) -> Self {
        Self {
            // Loopback is the only interface that takes another filter, and it is always there.
            seat: opener.seat(Link {
                index: 0,
                hardware: libc::ARPHRD_ETHER,
                mac: [0; 6],
                mtu: 0,
                up: false,
                running: false,
            }),
            opener,
            found: None,
            retry: Retry::at(Instant::now()),
            early: None,
            told: String::new(),
        }
    }

    fn look(&mut self) {
        let now = Instant::now();
        if !self.retry.is_due(now) {
            return;
        }
        let name = &self.opener.config().interface;
        match self.open() {
            Ok(mut queue) => {
                // For when the interface is made again.
                queue.early = self.early.take();
                log::info!(target: "source", "interface {name:?} is there");
                self.found = Some(queue);
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
        let bound = self.opener.open()?;
        let early = self.early.as_deref();
        let filtered = self.opener.filter(&bound.rings, bound.link, early);
        // Everything is more than what was wanted, but never too little.
        filtered.or_else(|_| self.opener.start(&bound))?;
        let (opener, seat) = (Arc::clone(&self.opener), self.seat.clone());
        Ok(PacketQueue::with_seat(opener, bound, seat))
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
        match &mut self.found {
            Some(queue) => queue.arm(),
            None => Wake {
                fds: [None, None],
                within: Some(self.retry.patience()),
            },
        }
    }

    fn woke(&mut self, seen: Seen) {
        match &mut self.found {
            Some(queue) => queue.woke(seen),
            None => self.look(),
        }
    }

    fn counters(&mut self) -> QueueCounters {
        let found = self.found.as_mut();
        found.map(Queue::counters).unwrap_or_default()
    }

    fn is_pressed(&self) -> bool {
        self.found.as_ref().is_some_and(Queue::is_pressed)
    }

    fn state(&self) -> &'static str {
        self.found.as_ref().map_or("missing", Queue::state)
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
