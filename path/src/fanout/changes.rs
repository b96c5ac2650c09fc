//! Ports come, go, and are given other frames: between two batches.

use std::sync::Arc;

use vnplug_filter::Program;
use vnplug_ring::control::Tuning;
use vnplug_ring::layout::Life;

use super::Fanout;
use super::seat::{Delivery, Seat};
use crate::port::{Port, Share};

impl Fanout {
    /// Adds a port; it is offered the next batch.
    pub fn attach(&mut self, port: Box<Port>) {
        self.budget.count(port.owner, true);
        match port.only {
            None => self.seat(port),
            Some(only) => self.ends.attach(only, port, (self.source, self.queue)),
        }
    }

    pub(super) fn seat(&mut self, port: Box<Port>) {
        let at = self.free.pop().unwrap_or(self.seats.len() as u32);
        self.by_id.insert(port.id, at);
        if port.member.is_none() {
            self.count(port.judge.share(), true);
        }
        let seat = Some(Seat::new(port));
        match self.seats.get_mut(at as usize) {
            Some(place) => *place = seat,
            None => self.seats.push(seat),
        }
        self.place(at);
    }

    /// Removes a port; its counters are final.
    pub fn detach(&mut self, id: u32) -> Option<Box<Port>> {
        let port = match self.ends.has(id) {
            false => self.unseat(id),
            true => self.ends.detach(id, &mut self.counters),
        }?;
        self.budget.count(port.owner, false);
        Some(port)
    }

    pub(super) fn unseat(&mut self, id: u32) -> Option<Box<Port>> {
        let at = self.by_id.remove(&id)?;
        self.leave(at);
        let mut seat = self.seats[at as usize].take()?;
        seat.forget_due(at, &mut self.due);
        self.free.push(at);
        if seat.port.member.is_none() {
            self.count(seat.port.judge.share(), false);
        }
        self.counters.departed.add(&seat.port.counters);
        Some(seat.port)
    }

    /// One port, for what does not decide which frames it is given: pause, direction, share, guard
    /// and filter have methods of their own here.
    pub fn port_mut(&mut self, id: u32) -> Option<&mut Port> {
        if self.ends.has(id) {
            return self.ends.of(id)?.port_mut(id);
        }
        let at = *self.by_id.get(&id)?;
        self.seats[at as usize].as_mut().map(|seat| &mut *seat.port)
    }

    /// Gives a port another filter; the old one is for the caller to free.
    pub fn set_filter(&mut self, id: u32, filter: Option<Arc<Program>>) -> Option<Arc<Program>> {
        let mut old = None;
        // If the port does not exist, the new one is given back.
        let mut new = Some(filter);
        self.change(id, |port| {
            if let Some(filter) = new.take() {
                old = port.judge.set_filter(filter);
            }
        });
        new.unwrap_or(old)
    }

    /// Sets the operator's filter of a port; the old one is for the caller to free.
    pub fn set_guard(&mut self, id: u32, guard: Option<Arc<Program>>) -> Option<Arc<Program>> {
        let mut old = None;
        self.change(id, |port| old = port.set_guard(guard));
        old
    }

    /// Ends a port's ring by an operator's word; see [`Port::revoke`].
    pub fn revoke(&mut self, id: u32, nothing: Arc<Program>) {
        self.change(id, |port| port.revoke(nothing));
    }

    /// Tunes a port.
    pub fn tune(&mut self, id: u32, tuning: Tuning) {
        self.change(id, |port| port.judge.tune(tuning));
    }

    /// Stops serving a port.
    pub fn quarantine(&mut self, id: u32, why: String) {
        self.change(id, |port| port.quarantine(why));
    }

    /// Gives cluster members their new shares.
    pub fn reshare(&mut self, shares: &[(u32, Share)]) {
        for &(id, share) in shares {
            if let Some(end) = self.ends.of(id) {
                end.reshare(&[(id, share)]);
                continue;
            }
            let Some(before) = self.port_mut(id).map(|port| port.judge.share()) else {
                continue;
            };
            self.count(before, false);
            self.count(share, true);
            self.change(id, |port| port.judge.set_share(share));
        }
    }

    /// Ends all rings with this life.
    pub fn finish(&mut self, life: Life) {
        self.ends.finish(life);
        for (at, seat) in (0..).zip(&mut self.seats) {
            if let Some(seat) = seat {
                seat.port.finish(life);
                seat.note(at, &mut self.due, &mut self.moved);
            }
        }
    }

    /// Changes something that decides which frames a port is given.
    fn change(&mut self, id: u32, change: impl FnOnce(&mut Port)) {
        match self.ends.of(id) {
            Some(end) => end.change_own(id, change),
            None => self.change_own(id, change),
        }
    }

    pub(super) fn change_own(&mut self, id: u32, change: impl FnOnce(&mut Port)) {
        let Some(&at) = self.by_id.get(&id) else {
            return;
        };
        self.leave(at);
        if let Some(seat) = &mut self.seats[at as usize] {
            change(&mut seat.port);
        }
        self.place(at);
    }

    /// Finds out how a seat's port is to be given frames, from the next batch on.
    pub(super) fn place(&mut self, at: u32) {
        if let Some(seat) = &mut self.seats[at as usize] {
            seat.enter(at, &mut self.index, self.totals);
            match seat.place {
                Delivery::Whole => self.whole.push(at),
                Delivery::Due(number) => self.members.add(number, at),
                Delivery::Indexed(_) => {}
            }
        }
    }

    /// Undoes [`place`](Self::place); the port's counters are exact by themselves.
    pub(super) fn leave(&mut self, at: u32) {
        if let Some(seat) = &mut self.seats[at as usize] {
            match seat.place {
                Delivery::Whole => self.whole.retain(|other| *other != at),
                Delivery::Due(number) => self.members.remove(number, at),
                Delivery::Indexed(_) => {}
            }
            seat.leave(at, &mut self.index, self.totals);
        }
    }

    pub(super) fn count(&mut self, share: Share, comes: bool) {
        let change = |count: &mut u64| match comes {
            true => *count += 1,
            false => *count -= 1,
        };
        match share {
            Share::All => change(&mut self.alone),
            Share::Member { cluster, .. } => {
                change(self.clusters.entry(cluster).or_default());
                if self.clusters.get(&cluster) == Some(&0) {
                    self.clusters.remove(&cluster);
                }
            }
        }
    }
}
