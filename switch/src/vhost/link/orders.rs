//! What the rings are told: by the entrance's thread, and by the guest's driver.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_os::peer_log;

use super::Rings;
use super::wire::{Done, Order, Setup, Started};
use crate::vhost::acks::Expansion;
use crate::vhost::control::{self, Command};
use crate::vhost::ring::{Agreed, Broken, Ring};
use crate::vhost::spec::feature;

impl Rings {
    /// Does what the entrance's thread asks. Whether there was anything.
    pub(super) fn obey(&mut self) -> bool {
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
        (self.stuck, self.hopeless) = (None, None);
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

    /// Answers what the driver asks by the control queue. Whether there may be more.
    pub(super) fn serve_control(&mut self) -> bool {
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

    /// Stops a ring that makes no sense.
    #[cold]
    pub(super) fn stop(&mut self, at: usize, broken: Broken) {
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
}

/// Commands of a control queue that are answered in one turn.
const COMMANDS: usize = 8;
