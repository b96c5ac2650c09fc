//! What the guest sends: a turn of its rings.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use vnplug_os::datagrams::Rest;
use vnplug_ring::offload::Offload;

use super::half::Half;
use super::locked;
use super::outgoing::Outgoing;
use super::wire::{ANNOUNCEMENT, Order, Shared};
use crate::batch::Batch;
use crate::queue::ENOUGH;
use crate::vhost::frames::{MAX_PARTS, take};
use crate::vhost::ring::{Broken, Part};

/// The rings by which a guest sends, and its control queue.
pub(super) struct Incoming {
    pub(super) half: Half,
    pub(super) orders: Receiver<Order>,
    /// The rings by which it sends.
    pub(super) sending: Vec<usize>,
    /// Which of them is the next, so that none waits for ever.
    turn: usize,
    /// The guest was asked to kick.
    is_armed: bool,
    pub(super) announcements: Vec<[u8; ANNOUNCEMENT]>,
    /// ACKs that it sends may stand for several.
    expands_acks: bool,
    pub(super) parts: Vec<Part>,
    /// Rings that learn at the end of the turn what they have back.
    held: Vec<usize>,
    /// Descriptors that may still be read in this turn: more cost the guest its frames, and nobody else
    /// his time.
    budget: usize,
}

/// How a turn of [`pass`](super::Guest::pass) ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    /// There may be more.
    More,
    /// There is nothing, and the guest is asked to kick.
    Nothing,
    /// Another thread is to go on with it.
    Refer,
}

impl Incoming {
    pub(super) fn new(shared: Arc<Shared>, orders: Receiver<Order>) -> Self {
        Self {
            half: Half::new(shared),
            orders,
            sending: Vec::new(),
            turn: 0,
            is_armed: false,
            announcements: Vec::new(),
            expands_acks: false,
            parts: Vec::new(),
            held: Vec::new(),
            budget: 0,
        }
    }

    /// Takes at most `most` frames, as far as the batch has room.
    ///
    /// # Errors
    /// The port is to be closed, and why.
    pub(super) fn receive(
        &mut self,
        outgoing: &Mutex<Outgoing>,
        batch: &mut Batch,
        most: usize,
    ) -> io::Result<Rest> {
        let mut more = self.begin(outgoing)?;
        let mut left = most;
        while let Some(frame) = self.announcements.pop() {
            batch.push(frame.len(), Offload::default(), |place| {
                place.copy_from_slice(&frame);
                true
            });
        }
        // Each of them in turn, and none more than its part while others have something.
        let count = self.sending.len();
        let each = most.div_ceil(count.max(1));
        for _ in 0..count {
            let Some(at) = self.next_ring() else {
                break;
            };
            let before = batch.len();
            let was_left = batch.left();
            more |= self.take(outgoing, at, batch, each.min(left));
            match batch.left() > was_left {
                true => self.held.push(at),
                false => self.half.publish(at),
            }
            left = left.saturating_sub(batch.len() - before);
        }
        if more || !self.arm(outgoing) {
            return Ok(Rest::More);
        }
        Ok(Rest::Nothing)
    }

    /// See [`Guest::pass`](super::Guest::pass).
    pub(super) fn pass(
        &mut self,
        outgoing: &Mutex<Outgoing>,
        batch: &mut Batch,
        most: usize,
        mut forward: impl FnMut(&Batch) -> usize,
    ) -> io::Result<Passage> {
        let mut more = self.begin(outgoing)?;
        if !self.announcements.is_empty() {
            return Ok(Passage::Refer);
        }
        let (count, mut bytes) = (self.sending.len(), 0);
        let each = most.div_ceil(count.max(1));
        for _ in 0..count {
            let Some(at) = self.next_ring() else {
                break;
            };
            batch.clear();
            more |= self.take(outgoing, at, batch, each);
            if !self.half.has(at) {
                // It is stopped, and what was taken of it never entered.
                continue;
            }
            bytes += batch.bytes();
            let done = forward(batch);
            let left = batch.len() - done;
            if left > 0
                && let Some(ring) = self.half.ring(at)
            {
                ring.take_back(left as u16);
            }
            self.half.publish(at);
            if left > 0 {
                // It is this ring's turn again.
                self.turn += self.sending.len().saturating_sub(1);
                return Ok(Passage::Refer);
            }
            if bytes >= ENOUGH {
                more = true;
                break;
            }
        }
        if more || !self.arm(outgoing) {
            return Ok(Passage::More);
        }
        Ok(Passage::Nothing)
    }

    /// A turn failed: what it took and was not told of is there again.
    pub(super) fn undo(&mut self) {
        for place in 0..self.sending.len() {
            if let Some(ring) = self.half.ring(self.sending[place]) {
                ring.take_back(u16::MAX);
            }
        }
    }

    /// The frames of the batch are done with.
    pub(super) fn release(&mut self) {
        while let Some(at) = self.held.pop() {
            self.half.publish(at);
        }
    }

    pub(super) fn expand_acks(&mut self, is: bool) {
        self.expands_acks = is;
    }

    /// What comes before frames are taken: whether there may be more of it.
    fn begin(&mut self, outgoing: &Mutex<Outgoing>) -> io::Result<bool> {
        if self.is_armed {
            self.clear_events();
            self.disarm(outgoing);
        }
        let mut more = self.obey(outgoing);
        if self.half.is_lost() {
            let what = "its memory was truncated";
            return Err(io::Error::other(what));
        }
        self.budget = MAX_PARTS;
        more |= self.serve_control(outgoing);
        // SeqCst: see `Shared::is_armed`.
        if self.half.shared.waits.load(Ordering::SeqCst) {
            locked(outgoing).go_on();
        }
        Ok(more)
    }

    /// The ring whose turn it is.
    fn next_ring(&mut self) -> Option<usize> {
        self.turn = (self.turn + 1) % self.sending.len().max(1);
        self.sending.get(self.turn).copied()
    }

    /// Takes at most `most` frames of one ring. Whether there may be more.
    fn take(
        &mut self,
        outgoing: &Mutex<Outgoing>,
        at: usize,
        batch: &mut Batch,
        most: usize,
    ) -> bool {
        let header_len = self.half.header_len();
        let Some(Some(ring)) = self.half.rings.get_mut(at) else {
            return false;
        };
        let (parts, budget) = (&mut self.parts, &mut self.budget);
        let taken = match self.expands_acks {
            false => take(ring, parts, header_len, batch, most, budget, None),
            true => {
                let mut outgoing = locked(outgoing);
                let acks = outgoing.acks.as_deref_mut();
                take(ring, parts, header_len, batch, most, budget, acks)
            }
        };
        taken.unwrap_or_else(|broken| {
            self.stop(outgoing, at, broken);
            false
        })
    }

    /// Stops a ring that makes no sense.
    #[cold]
    pub(super) fn stop(&mut self, outgoing: &Mutex<Outgoing>, at: usize, broken: Broken) {
        self.half.stop(at, broken);
        self.count_rings(&mut locked(outgoing));
    }

    /// Finds out by which rings the guest sends.
    pub(super) fn count_rings(&mut self, outgoing: &mut Outgoing) {
        let sending = (1..self.half.rings.len()).step_by(2);
        self.sending = sending.filter(|at| self.half.has(*at)).collect();
        outgoing.pair_with(&self.sending);
    }

    pub(super) fn disarm(&mut self, outgoing: &Mutex<Outgoing>) {
        self.is_armed = false;
        let shared = &self.half.shared;
        shared.is_armed.store(false, Ordering::SeqCst);
        if shared.asks.load(Ordering::Relaxed) {
            locked(outgoing).disarm();
        }
        self.half.disarm();
    }

    /// Asks the guest to kick for everything that it sends, and for buffers if frames wait for them. True
    /// if there is nothing yet.
    fn arm(&mut self, outgoing: &Mutex<Outgoing>) -> bool {
        self.is_armed = true;
        // SeqCst: see there.
        self.half.shared.is_armed.store(true, Ordering::SeqCst);
        let mut nothing = true;
        for at in 0..self.half.rings.len() {
            let is_asked = self.sending.contains(&at) || self.half.setup.control == Some(at);
            let Some(Some(ring)) = self.half.rings.get_mut(at).filter(|_| is_asked) else {
                continue;
            };
            match ring.arm() {
                Ok(has_nothing) => nothing &= has_nothing,
                Err(broken) => self.stop(outgoing, at, broken),
            }
        }
        if self.half.shared.waits.load(Ordering::SeqCst) {
            nothing &= locked(outgoing).arm();
        }
        nothing
    }

    /// Forgets edges that were seen.
    fn clear_events(&self) {
        let none = Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut events = [none; 16];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // Edges that do not fit are seen the next time. The only error is a signal.
        let _ = epoll::wait(&self.half.shared.epoll, &mut events, Some(&now));
    }
}
