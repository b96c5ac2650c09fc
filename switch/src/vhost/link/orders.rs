//! What a guest's rings are told: by the entrance's thread, and by the guest's driver.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::incoming::Incoming;
use super::locked;
use super::outgoing::Outgoing;
use super::wire::{Done, Order, Setup, Started};
use crate::vhost::acks::Expansion;
use crate::vhost::control::{self, Command};
use crate::vhost::ring::{Agreed, Ring};
use crate::vhost::spec::feature;

impl Incoming {
    /// Does what the entrance's thread asks. Whether there was anything.
    pub(super) fn obey(&mut self, outgoing: &Mutex<Outgoing>) -> bool {
        // Acquire: pairs with the Release in `Wire::send`.
        let pending = &self.half.shared.pending;
        let news = pending.load(Ordering::Relaxed) && pending.swap(false, Ordering::Acquire);
        if !news {
            return false;
        }
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Setup(setup, done) => {
                    let replaced = self.replace(outgoing, Arc::new(*setup));
                    // Who asked is gone, or the answer is there.
                    let _ = done.send(replaced);
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

    /// This is the setup from now on.
    fn replace(&mut self, outgoing: &Mutex<Outgoing>, setup: Arc<Setup>) -> Done {
        let mut to = locked(outgoing);
        let all = self.half.rings.iter().zip(&to.half.rings);
        let index = |(from, to): (&Option<Ring>, &Option<Ring>)| {
            let ring = from.as_ref().or(to.as_ref());
            ring.map(Ring::index)
        };
        let indices = all.map(index).collect();
        let had_control = self.half.setup.control.is_some();
        let old = std::mem::replace(&mut self.half.setup, Arc::clone(&setup));
        to.half.setup = Arc::clone(&setup);
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
        self.half.rings = setup.rings.iter().map(ring).collect();
        let is_for_guest = |at: usize| at.is_multiple_of(2) && Some(at) != setup.control;
        let parts = self.half.rings.iter_mut().enumerate();
        to.half.rings = parts
            .map(|(at, ring)| is_for_guest(at).then(|| ring.take()).flatten())
            .collect();
        // A driver that begins anew has forgotten what it said.
        let is_anew = setup.control.is_some() && !had_control;
        // Whether what is written is logged is no matter of the driver's.
        let is_other = (old.features ^ setup.features) & !feature::LOG_ALL != 0;
        if is_anew || is_other {
            self.half.shared.offer(setup.features);
            to.pairs = usize::MAX;
            if let Some(acks) = &mut to.acks {
                // It has other flows.
                **acks = Expansion::default();
            }
        }
        if is_other {
            to.forget_waiting();
        }
        to.is_narrow = false;
        (to.stuck, to.hopeless) = (None, None);
        to.tell_merges();
        to.disarm();
        // NB: before anybody else gives: the rings before are not these.
        self.count_rings(&mut to);
        drop(to);
        self.disarm(outgoing);
        for started in setup.rings.iter().flatten() {
            // The guest may wait for what the descriptor before was called for.
            if let Some(call) = &started.call {
                call.ring(&self.half.shared.calls);
            }
        }
        Done { indices, _old: old }
    }

    /// Answers what the driver asks by the control queue. Whether there may be more.
    pub(super) fn serve_control(&mut self, outgoing: &Mutex<Outgoing>) -> bool {
        let Some(at) = self.half.setup.control else {
            return false;
        };
        let mut more = true;
        for _ in 0..COMMANDS {
            let Some(Some(ring)) = self.half.rings.get_mut(at) else {
                return false;
            };
            match control::next(ring, &mut self.parts) {
                Ok(None) => {
                    more = false;
                    break;
                }
                Ok(Some(Command::Offloads(bits))) => {
                    // NB: locked. Nobody is giving what the driver does not take any more.
                    let _outgoing = locked(outgoing);
                    self.half.shared.offer(bits & self.half.setup.features);
                }
                Ok(Some(Command::Pairs(pairs))) => {
                    let mut outgoing = locked(outgoing);
                    outgoing.pairs = pairs;
                    outgoing.count_rings();
                }
                Ok(Some(Command::Nothing)) => {}
                Err(broken) => {
                    self.stop(outgoing, at, broken);
                    return false;
                }
            }
        }
        self.half.publish(at);
        more
    }
}

/// Commands of a control queue that are answered in one turn.
const COMMANDS: usize = 8;
