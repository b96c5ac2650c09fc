//! What both ways of a guest have: their rings, each at its number, and what was agreed on.

use std::sync::Arc;

use vnplug_os::peer_log;
use vnplug_ring::offload::{HEADER, SHORT_HEADER};

use super::wire::{Setup, Shared};
use crate::vhost::ring::{Broken, Ring};
use crate::vhost::spec::feature;

/// The rings of one way.
pub(super) struct Half {
    pub(super) shared: Arc<Shared>,
    pub(super) setup: Arc<Setup>,
    /// Those of this way; the others are not there.
    pub(super) rings: Vec<Option<Ring>>,
}

impl Half {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            setup: Arc::default(),
            rings: Vec::new(),
        }
    }

    pub(super) fn has(&self, at: usize) -> bool {
        matches!(self.rings.get(at), Some(Some(_)))
    }

    #[inline]
    pub(super) fn ring(&mut self, at: usize) -> Option<&mut Ring> {
        self.rings.get_mut(at)?.as_mut()
    }

    /// The guest's memory was truncated.
    pub(super) fn is_lost(&self) -> bool {
        self.setup.memory.as_ref().is_some_and(|it| it.is_lost())
    }

    /// Bytes of the header before each frame.
    #[inline]
    pub(super) fn header_len(&self) -> usize {
        match self.setup.features & (feature::VERSION_1 | feature::MRG_RXBUF) {
            0 => SHORT_HEADER,
            _ => HEADER,
        }
    }

    /// The guest need not kick.
    pub(super) fn disarm(&mut self) {
        self.rings.iter_mut().flatten().for_each(Ring::disarm);
    }

    /// Publishes what a ring gave back, and calls the guest if it waits.
    #[inline]
    pub(super) fn publish(&mut self, at: usize) {
        if let Some(Some(ring)) = self.rings.get_mut(at)
            && ring.publish()
            && let Some(Some(started)) = self.setup.rings.get(at)
            && let Some(call) = &started.call
        {
            call.ring(&self.shared.calls);
        }
    }

    /// Stops a ring that makes no sense.
    #[cold]
    pub(super) fn stop(&mut self, at: usize, broken: Broken) {
        peer_log!(
            log::Level::Warn,
            "switch",
            "{}: ring {at} is stopped: {broken}",
            self.shared.name
        );
        // NB: also what frames of this turn are read from. It is the guest's own that it may change by that.
        self.publish(at);
        if let Some(ring) = self.rings.get_mut(at) {
            *ring = None;
        }
    }
}
