//! One batch to many ports.
//!
//! Ports are served one after the other, each with the whole batch: the batch stays in the first
//! cache level, and a port's ring is touched once per batch. Attaching, detaching and new filters
//! take effect between two batches, so that every port has judged an exact range of frames and the
//! sums close (point R): `duties`, the frames read times the subscribers of that moment, equals
//! what all ports, present and departed, were offered. A cluster is one subscriber.

pub mod flow;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::port::{BatchInfo, Port, PortCounters, Share};
use crate::source::Frame;

/// The ports of one queue.
#[derive(Debug, Default)]
pub struct Fanout {
    source: u16,
    queue: u16,
    ports: Vec<Port>,
    hashes: Vec<u32>,
    subscribers: u64,
    counters: FanoutCounters,
}

/// What went through one queue's fanout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FanoutCounters {
    /// Frames read from the source.
    pub read: u64,
    /// Their captured bytes.
    pub bytes: u64,
    /// Frames times subscribers of that moment.
    pub duties: u64,
    /// What ports that are gone had counted.
    pub departed: PortCounters,
}

impl FanoutCounters {
    /// Adds another queue's.
    pub fn add(&mut self, other: &Self) {
        self.read += other.read;
        self.bytes += other.bytes;
        self.duties += other.duties;
        self.departed.add(&other.departed);
    }
}

impl Fanout {
    /// For queue `queue` of source number `source`.
    pub fn new(source: u16, queue: u16) -> Self {
        Self {
            source,
            queue,
            ..Self::default()
        }
    }

    /// Gives a batch to every port.
    #[inline]
    pub fn deliver(&mut self, frames: &[Frame<'_>], now_us: u64) {
        self.hashes.clear();
        if !self.ports.is_empty() {
            self.hashes
                .extend(frames.iter().map(|frame| flow::flow_hash(frame.bytes)));
        }
        let batch = BatchInfo {
            frames,
            hashes: &self.hashes,
            first: self.counters.read,
            source: self.source,
            queue: self.queue,
            now_us,
        };
        for port in &mut self.ports {
            // A panic here would be a bug of ours that one reader may have found a way to: it
            // costs that reader its port and nobody else anything (R10).
            let before = port.counters.offered;
            if catch_unwind(AssertUnwindSafe(|| port.offer(&batch))).is_err() {
                port.settle(&batch, before);
            }
        }
        self.counters.read += frames.len() as u64;
        self.counters.bytes += frames
            .iter()
            .map(|frame| frame.bytes.len() as u64)
            .sum::<u64>();
        self.counters.duties += frames.len() as u64 * self.subscribers;
    }

    /// The next time [`tick`](Self::tick) has something to do.
    pub fn due_us(&self) -> Option<u64> {
        self.ports.iter().filter_map(Port::due_us).min()
    }

    /// Rings readers whose maximum delay has passed.
    pub fn tick(&mut self, now_us: u64) {
        for port in &mut self.ports {
            port.tick(now_us);
        }
    }

    /// Adds a port; it is offered the next batch.
    pub fn attach(&mut self, port: Port) {
        self.ports.push(port);
        self.recount();
    }

    /// Removes a port.
    pub fn detach(&mut self, id: u32) -> Option<Port> {
        let at = self.ports.iter().position(|port| port.id == id)?;
        let port = self.ports.remove(at);
        self.counters.departed.add(&port.counters);
        self.recount();
        Some(port)
    }

    /// One port.
    pub fn port_mut(&mut self, id: u32) -> Option<&mut Port> {
        self.ports.iter_mut().find(|port| port.id == id)
    }

    /// Gives cluster members their new shares.
    pub fn reshare(&mut self, shares: &[(u32, Share)]) {
        for (id, share) in shares {
            if let Some(port) = self.port_mut(*id) {
                port.share = *share;
            }
        }
        self.recount();
    }

    /// All ports.
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// All ports, to end them.
    pub fn ports_mut(&mut self) -> &mut [Port] {
        &mut self.ports
    }

    /// The counters, consistent between two batches.
    pub fn counters(&self) -> &FanoutCounters {
        &self.counters
    }

    fn recount(&mut self) {
        let mut clusters = HashSet::new();
        self.subscribers = self
            .ports
            .iter()
            .filter(|port| match port.share {
                Share::All => true,
                Share::Member { cluster, .. } => clusters.insert(cluster),
            })
            .count() as u64;
    }
}

#[cfg(test)]
mod tests;
