//! Closing ports: the queues' threads are told at once, and answer when they come to it.
//!
//! Nobody waits for that: who closes ports begins, and looks for the answers later. What a thread may
//! still write to is given to nobody else before it has answered, however long that takes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use vnplug_ring::Region;
use vnplug_ring::layout::Life;

use super::{Charge, Closed, Hub, Owed, Peer, PortRecord, Remains};
use vnplug_path::engine::Command;
use vnplug_path::engine::sender::Sender;
use vnplug_path::port::{Port, PortCounters};

/// A port that its queues' threads were told to let go.
pub(crate) struct Closing {
    id: u32,
    record: PortRecord,
    sender: Option<Owed<Option<Box<Sender>>>>,
    /// What others could post of it.
    pub(super) withdrawn: Vec<Owed<Vec<Region>>>,
    /// Of its queues.
    pub(super) queues: Vec<Owed<Option<Box<Port>>>>,
    /// Its memory, until it is freed.
    charge: Charge,
}

impl Closing {
    /// Which port it is.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// True when all threads have answered, or are gone; looks at most until `until`.
    pub(crate) fn is_over(&mut self, until: Instant) -> bool {
        let queues = self.queues.iter_mut().map(|owed| owed.is_certain(until));
        let queues = queues.fold(true, |all, over| all & over);
        let areas = self.withdrawn.iter_mut();
        let queues = areas.fold(queues, |all, owed| all & owed.is_certain(until));
        let sender = self.sender.as_mut();
        queues & sender.is_none_or(|owed| owed.is_certain(until))
    }

    /// Whether a thread that is stalled has to answer.
    pub(crate) fn is_stalled(&self) -> bool {
        let sender = self.sender.as_ref();
        let areas = self.withdrawn.iter().any(Owed::is_stalled);
        areas || self.queues.iter().any(Owed::is_stalled) || sender.is_some_and(Owed::is_stalled)
    }
}

impl Hub {
    /// Tells the queues' threads to let a port go.
    pub(crate) fn begin_close(&mut self, id: u32) -> Option<Closing> {
        let record = self.ports.remove(&id)?;
        self.own(id, &record, false);
        self.reads(&record, false);
        self.leave_direct(id);
        self.watch_direct(record.source);
        self.closed += 1;
        self.sources[record.source].closing += 1;
        let mut charge = Charge::new(self.owed_by(&record.owner));
        if matches!(record.owner, Peer::User(_)) {
            charge.add(record.bytes());
        }
        let shares = self.leave(record.cluster.as_ref(), id);
        let sender =
            (record.transmit > 0).then(|| self.detach_sender(id, record.source, record.queues[0]));
        let detach = |&queue: &usize| {
            let line = self.sources[record.source].workers[queue].line();
            Owed::ask(line, |reply| {
                Command::Detach(id, Life::Closed, shares.clone(), reply)
            })
        };
        Some(Closing {
            id,
            sender,
            withdrawn: self.withdraw(id, &record.lent_to),
            charge,
            queues: record.queues.iter().map(detach).collect(),
            record,
        })
    }

    /// Frees what the threads let go; call it when the closing is over.
    pub(crate) fn finish_close(&mut self, closing: Closing) -> Closed {
        let Closing {
            id,
            mut record,
            sender,
            withdrawn,
            queues,
            mut charge,
        } = closing;
        self.returned(id, &record);
        let mut places = std::mem::take(&mut record.places);
        let heard: Vec<_> = queues.into_iter().map(Owed::take).collect();
        let sent = sender.map(Owed::take);
        let is_lost = heard.iter().any(Result::is_err) || sent.as_ref().is_some_and(Result::is_err);
        let ports: Vec<Box<Port>> = heard.into_iter().filter_map(Result::ok).flatten().collect();
        let sender = sent.and_then(Result::ok).flatten();
        // A thread that is gone reads nothing any more.
        let areas = withdrawn.into_iter().map(Owed::take);
        let areas = areas.filter_map(Result::ok).flatten();
        let areas = areas.chain(std::mem::take(&mut record.areas)).collect();
        let mut counters = PortCounters::default();
        ports.iter().for_each(|port| counters.add(&port.counters));
        self.sources[record.source].closing -= 1;
        self.wants_no_more(record.source, &record.wanted);
        let group = record.group.as_ref();
        let before = self.arena_bytes(&record.owner);
        let arenas = self.leave_group(group);
        charge.add(before.saturating_sub(self.arena_bytes(&record.owner)));
        if is_lost {
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
            self.part_with(&record);
            places.extend(arenas);
        }
        Closed {
            counters,
            places,
            remains: Remains {
                _ports: ports,
                _sender: sender,
                _areas: areas,
                charge,
            },
        }
    }

    /// What an owner's closed ports have that is not freed yet.
    fn owed_by(&mut self, owner: &Peer) -> &Arc<AtomicU64> {
        self.owed.retain(|_, owed| Arc::strong_count(owed) > 1);
        self.owed.entry(owner.clone()).or_default()
    }
}
