//! The transmit rings that one queue's thread serves, between two of its batches.
//!
//! While the thread runs it looks at each ring that is **awake** once per turn (one load). Before it sleeps it
//! arms those, and a sender that finds its ring armed kicks: a process by its socket, whose other end is in
//! the epoll instance that the thread then sleeps on, which is the queue's if it has one; a VM by a message that the control
//! thread relays as a command. The handshake that loses no kick is that of `ring/src/wake.rs`.
//!
//! A ring in which nothing was found [`PATIENCE`](super::sender::PATIENCE) times is armed at once and not looked at any more until it
//! kicks: it is **asleep**. So ten thousand of which one sends cost what that one costs ([`News`]). While the
//! thread has other work it looks for kicks now and then ([`LOOK_US`], or with the queue's descriptors); that is how late a
//! ring that slept is served at most, beyond its turn.
//!
//! Here is who they are; `turns.rs` has whose turn it is and how much each may take, `kicks.rs` how the thread sleeps and
//! is woken.

pub(super) mod kicks;
#[cfg(test)]
pub(super) mod tests;
mod turns;

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use vnplug_os::peer_log;
use vnplug_ring::Region;
use vnplug_ring::layout::Life;
use vnplug_ring::news::News;

use super::terms::Terms;
use crate::engine::sender::{SendCounters, Sender};

/// The senders of one queue.
#[derive(Debug)]
pub(super) struct Senders {
    /// By place.
    all: Vec<Option<Sender>>,
    free: Vec<usize>,
    places: HashMap<u32, usize>,
    /// Those that are awake.
    awake: News,
    /// Those whose kicks lie unread.
    unread: News,
    /// Since when some do, as far as a turn or a sleep saw it.
    unread_since_us: Option<u64>,
    /// That is a while ago.
    is_old: bool,
    /// How many are still to be read in this round, and from which place on.
    unsettled: usize,
    settled: usize,
    /// When it was last looked for kicks.
    looked_us: u64,
    /// Whose turn it is.
    next: usize,
    /// It has its bytes for this turn already.
    is_within: bool,
    /// Bytes that a sender of weight 1 may take in its turn.
    quantum: u64,
    /// Those that sent something since all had their turn.
    active: u64,
    /// Watches the thread's own waker and every kick: the queue's, or made with the first kick.
    epoll: Option<Arc<OwnedFd>>,
    /// It is the queue's.
    is_of_queue: bool,
    /// The counters of senders that are gone.
    departed: SendCounters,
}

/// The result of a turn.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// Frames taken.
    pub(super) frames: usize,
    /// A port that lied (or, by a fault of ours, cannot be served), and why: to be quarantined.
    pub(super) liar: Option<(u32, String)>,
}

impl Default for Senders {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            free: Vec::new(),
            places: HashMap::new(),
            awake: News::default(),
            unread: News::default(),
            unread_since_us: None,
            is_old: false,
            unsettled: 0,
            settled: 0,
            looked_us: 0,
            next: 0,
            is_within: false,
            quantum: turns::LEAST_QUANTUM,
            active: 0,
            epoll: None,
            is_of_queue: false,
            departed: SendCounters::default(),
        }
    }
}

impl Senders {
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Adds a sender; `waker` is what the thread sleeps on otherwise.
    pub(super) fn attach(&mut self, mut sender: Sender, waker: BorrowedFd<'_>) {
        let at = self.free.pop().unwrap_or(self.all.len());
        kicks::watch(&mut self.epoll, waker, &mut sender, at);
        self.places.insert(sender.id, at);
        self.awake.set(at);
        // So that no turn need allocate for it.
        self.unread.set(at);
        self.unread.clear(at);
        match self.all.get_mut(at) {
            Some(place) => *place = Some(sender),
            None => self.all.push(Some(sender)),
        }
    }

    /// The frames that a closing sender may still send: a program may write and end.
    pub(super) fn last_of(&mut self, id: u32) -> u64 {
        self.wake(&[id]);
        self.get(id).map_or(0, |sender| sender.counters.taken) + LAST
    }

    /// Whether a closing sender has sent `last` frames, or all that it wrote.
    pub(super) fn is_done(&mut self, id: u32, last: u64) -> bool {
        self.get(id).is_none_or(|sender| {
            // Who closes does not wait for its rate.
            sender.counters.taken >= last || !sender.has_frames() || sender.held_us.is_some()
        })
    }

    fn get(&mut self, id: u32) -> Option<&mut Sender> {
        let at = *self.places.get(&id)?;
        self.all[at].as_mut()
    }

    /// These have news, as far as they are here.
    pub(super) fn wake(&mut self, ids: &[u32]) {
        for id in ids {
            if let Some(at) = self.places.get(id) {
                self.awake.set(*at);
            }
        }
    }

    /// Removes a sender, whose ring ends with this life.
    pub(super) fn detach(&mut self, id: u32, life: Life) -> Option<Sender> {
        let at = self.places.remove(&id)?;
        let mut sender = self.all[at].take()?;
        self.awake.clear(at);
        self.unread.clear(at);
        self.free.push(at);
        if at == self.next {
            self.is_within = false;
        }
        self.departed.add(&sender.counters);
        sender.finish(life);
        kicks::unwatch(&self.epoll, &sender);
        if self.is_empty() && !self.is_of_queue {
            self.epoll = None;
        }
        Some(sender)
    }

    /// Has a sender send on other terms from now on; returns the old ones, or those if there is no such sender.
    pub(super) fn set_terms(&mut self, id: u32, terms: Arc<Terms>, now_us: u64) -> Arc<Terms> {
        match self.get(id) {
            Some(sender) => sender.set_terms(terms, now_us),
            None => terms,
        }
    }

    /// What a sender sends may be posted in these record areas of another port, too; returns what it has no use for.
    pub(super) fn lend(
        &mut self,
        id: u32,
        (port, first, areas): (u32, u16, Vec<Region>),
    ) -> Vec<Region> {
        match self.get(id) {
            Some(sender) => sender.lend(port, first, areas),
            None => areas,
        }
    }

    /// Nothing of that port may be posted by a sender any more; returns its record areas.
    pub(super) fn withdraw(&mut self, id: u32, port: u32) -> Vec<Region> {
        let sender = self.get(id);
        sender.map_or_else(Vec::new, |sender| sender.withdraw(port))
    }

    /// Ends a sender's ring by an operator's word; it stays, for its counters.
    pub(super) fn revoke(&mut self, id: u32) {
        if let Some(sender) = self.get(id) {
            sender.revoke();
        }
    }

    /// Ends all of them.
    pub(super) fn finish(&mut self, life: Life) {
        for sender in self.all.iter_mut().flatten() {
            sender.finish(life);
        }
    }

    /// The fates of each present sender's frames.
    pub(super) fn counters(&self) -> impl Iterator<Item = (u32, SendCounters)> {
        let all = self.all.iter().flatten();
        all.map(|sender| (sender.id, sender.counters))
    }

    /// The fates of all frames, those of senders that are gone included.
    pub(super) fn total(&self) -> SendCounters {
        let mut total = self.departed;
        let all = self.all.iter().flatten();
        all.for_each(|sender| total.add(&sender.counters));
        total
    }
}

fn quarantine(sender: &mut Sender, why: String) -> (u32, String) {
    peer_log!(
        log::Level::Warn,
        "port",
        "port {} may not send any more: {why}",
        sender.id
    );
    sender.finish(Life::Quarantined);
    (sender.id, why)
}

/// Frames that are still sent for a port that closes: more than a usual ring holds.
const LAST: u64 = 8_192;
