//! Closing ports: the queues' threads are told at once, and answer when they come to it.
//!
//! Who closes one port may wait for that; who closes many begins all, and looks for the answers
//! later. What a thread may still write to is given to nobody else before it has answered.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use vnplug_ring::layout::Life;

use super::{ANSWER, Charge, Closed, Hub, Owner, PortRecord, Remains};
use crate::port::sender::Sender;
use crate::port::{Port, PortCounters};
use crate::source::worker::Command;

/// A port that its queues' threads were told to let go.
pub(crate) struct Closing {
    id: u32,
    record: PortRecord,
    sender: Option<Receiver<Option<Box<Sender>>>>,
    sent: Option<Box<Sender>>,
    /// Its memory, until it is freed.
    charge: Charge,
    /// Of the queues whose answers are not here yet.
    pub(super) queues: Vec<Receiver<Option<Box<Port>>>>,
    #[expect(clippy::vec_box, reason = "kept as the threads hand them over")]
    let_go: Vec<Box<Port>>,
    /// A queue's thread did not answer.
    is_stuck: bool,
    until: Instant,
}

impl Closing {
    /// Which port it is.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// True when all threads have answered, or had the time to; looks at most until `until`.
    pub(crate) fn is_over(&mut self, until: Instant) -> bool {
        while let Some(queue) = self.queues.last() {
            match queue.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Some(port)) => self.let_go.push(port),
                Err(RecvTimeoutError::Timeout) if Instant::now() < self.until => return false,
                _ => self.is_stuck = true,
            }
            self.queues.pop();
        }
        let Some(sender) = &self.sender else {
            return true;
        };
        match sender.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(sender) => self.sent = sender,
            Err(RecvTimeoutError::Timeout) if Instant::now() < self.until => return false,
            // It may still read there.
            Err(_) => {
                log::error!(target: "port", "port {}: a source's thread does not answer", self.id);
                self.record.places.clear();
                self.is_stuck = true;
            }
        }
        self.sender = None;
        true
    }
}

impl Hub {
    /// Closes a port, and waits until its queues' threads have let it go.
    pub fn close(&mut self, id: u32) -> Option<Closed> {
        let closing = self.begin_close(id)?;
        Some(self.finish_close(closing))
    }

    /// Tells the queues' threads to let a port go.
    pub(crate) fn begin_close(&mut self, id: u32) -> Option<Closing> {
        let record = self.ports.remove(&id)?;
        self.own(id, &record, false);
        self.closed += 1;
        let mut charge = Charge::new(self.owed_by(&record.owner));
        if matches!(record.owner, Owner::User(_)) {
            charge.add(record.bytes());
        }
        let shares = self.leave(record.cluster.as_ref(), id);
        let sender =
            (record.transmit > 0).then(|| self.detach_sender(id, record.source, record.queues[0]));
        let detach = |&queue: &usize| {
            let (reply, answer) = channel();
            let command = Command::Detach(id, Life::Closed, shares.clone(), reply);
            self.sources[record.source].workers[queue].send(command);
            answer
        };
        Some(Closing {
            id,
            sender,
            sent: None,
            charge,
            queues: record.queues.iter().map(detach).collect(),
            record,
            let_go: Vec::new(),
            is_stuck: false,
            until: Instant::now() + ANSWER,
        })
    }

    /// Waits for the threads' answers if need be, and frees what they let go.
    pub(crate) fn finish_close(&mut self, mut closing: Closing) -> Closed {
        let until = closing.until;
        closing.is_over(until);
        let Closing {
            id,
            record,
            let_go: ports,
            sent: sender,
            mut charge,
            is_stuck,
            ..
        } = closing;
        let mut places = record.places;
        let mut counters = PortCounters::default();
        ports.iter().for_each(|port| counters.add(&port.counters));
        self.wants_no_more(record.source, &record.wanted);
        let group = record.group.as_ref();
        let before = self.arena_bytes(&record.owner);
        let arenas = self.leave_group(group);
        charge.add(before.saturating_sub(self.arena_bytes(&record.owner)));
        if is_stuck {
            // It has the memory for good.
            std::mem::forget(std::mem::take(&mut charge));
            log::error!(target: "port", "port {id}: a source's thread does not answer");
            // It may still write there: the places are lost, not given to another ring. The group's
            // likewise; its other members had the same thread.
            places.clear();
            if let Some(group) = group.filter(|group| !self.groups.contains_key(group)) {
                self.bar_stuck_host_group(group);
            }
        } else {
            places.extend(arenas);
        }
        Closed {
            counters,
            places,
            remains: Remains {
                _ports: ports,
                _sender: sender,
                charge,
            },
        }
    }

    /// What an owner's closed ports have that is not freed yet.
    fn owed_by(&mut self, owner: &Owner) -> &Arc<AtomicU64> {
        self.owed.retain(|_, owed| Arc::strong_count(owed) > 1);
        self.owed.entry(owner.clone()).or_default()
    }
}
