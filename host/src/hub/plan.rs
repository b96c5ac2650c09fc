//! What a port would be, without memory: where it reads, how large its rings are, and what it shares.

use std::num::NonZeroU16;

use vnplug_ring::control::apart::Shape;
use vnplug_ring::control::{Open, Segments, code};
use vnplug_ring::layout::{MAX_CAPACITY, MAX_SNAPLEN, MIN_CAPACITY, record_size, ring_size};
use vnplug_ring::offload::PREFIX;

use super::cluster::ClusterKey;
use super::group::GroupPlan;
use super::{Hub, Peer, Programs, Refusal};
use vnplug_os::mappings;

/// Bytes of memory that a port needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// For its rings.
    pub(crate) rings: Shape,
    /// For the arenas of the group that it is the first member of.
    pub(crate) arenas: u64,
}

impl Need {
    pub(crate) fn total(self) -> u64 {
        self.rings.words_len() + self.rings.records_len() + self.arenas
    }
}

/// A port that may be, without memory.
pub(super) struct PortPlan {
    pub(super) source: usize,
    pub(super) queues: Vec<usize>,
    /// The port of a switch that was named.
    pub(super) port: Option<NonZeroU16>,
    pub(super) cluster: Option<ClusterKey>,
    /// Bytes of a record at most.
    pub(super) snaplen: u32,
    /// How many of them may come before a frame.
    pub(super) prefix: u32,
    pub(super) capacity: u64,
    /// Bytes of one queue's ring with its header.
    pub(super) each: u64,
    /// Bytes of the transmit ring's record area; 0 = none.
    pub(super) transmit: u64,
    pub(super) group: Option<GroupPlan>,
}

impl PortPlan {
    /// Of a VM's port.
    pub(super) fn bytes(&self) -> u64 {
        self.each * self.queues.len() as u64 + self.transmit_bytes()
    }

    /// Of a process' port.
    pub(super) fn shape(&self) -> Shape {
        Shape {
            rings: self.queues.len() as u64,
            capacity: self.capacity,
            transmit: self.transmit_bytes(),
        }
    }

    /// Bytes of the arenas of the group that it is the first member of.
    fn arena_bytes(&self) -> u64 {
        let first = self.group.as_ref().filter(|group| group.is_first);
        let own = first.filter(|group| group.lent.is_none() && !group.is_hosts());
        own.map_or(0, |group| group.each() * self.queues.len() as u64)
    }

    /// Bytes of the transmit ring with its header.
    pub(super) fn transmit_bytes(&self) -> u64 {
        match self.transmit {
            0 => 0,
            capacity => ring_size(capacity).next_multiple_of(4096),
        }
    }
}

impl Hub {
    /// What a port would be.
    pub(super) fn plan(
        &self,
        request: &Open,
        owner: &Peer,
        programs: &Programs,
    ) -> Result<PortPlan, Refusal> {
        let named = self.find(&request.device)?;
        let (source, queue) = (named.source, named.queue);
        if self.ports.len() >= self.limits.ports {
            let most = self.limits.ports;
            let what = format!("{most} ports are open, the limit; close some or raise max_ports");
            return Err(Refusal::new(code::LIMIT, what));
        }
        self.may_take_part(request, source, queue)?;
        let prefix = prefix(request.segments);
        let most = MAX_SNAPLEN - prefix;
        let snaplen = match request.snaplen {
            0 => most,
            snaplen => snaplen.min(most),
        };
        let group = self.plan_group(request, owner, programs)?;
        let (capacity, longest) = match &group {
            None => {
                let capacity = self.capacity(request, snaplen)?;
                (capacity, longest_record(capacity))
            }
            Some(group) => (self.descriptor_capacity(request, group)?, group.snaplen()),
        };
        let snaplen = (snaplen + prefix).min(longest);
        let cluster =
            (!request.cluster.is_empty()).then(|| (named, owner.clone(), request.cluster.clone()));
        if let Some(existing) = cluster.as_ref().and_then(|key| self.clusters.get(key))
            && existing.balance != request.balance
        {
            let what = format!(
                "cluster {:?} shares by {:?}; all members must use the same",
                request.cluster, existing.balance
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        let queues: Vec<usize> = match queue {
            Some(queue) => vec![queue],
            None => (0..self.sources[source].workers.len()).collect(),
        };
        self.must_turn(source, &queues)?;
        Ok(PortPlan {
            each: ring_size(capacity).next_multiple_of(4096),
            source,
            queues,
            port: named.port,
            cluster,
            snaplen,
            prefix,
            capacity,
            transmit: self.transmit_capacity(request)?,
            group,
        })
    }

    /// Bytes of memory that a port needs.
    ///
    /// # Errors
    /// [`Refusal`], as [`open`](Self::open) would give it.
    pub(crate) fn need(
        &self,
        request: &Open,
        owner: &Peer,
        programs: &Programs,
    ) -> Result<Need, Refusal> {
        let plan = self.plan(request, owner, programs)?;
        Ok(Need {
            rings: plan.shape(),
            arenas: plan.arena_bytes(),
        })
    }

    /// Bytes that a VM's port needs for its rings, and for the arenas of the group that it is the first member
    /// of.
    ///
    /// # Errors
    /// [`Refusal`], as [`open`](Self::open) would give it.
    pub(crate) fn need_in_vm(
        &self,
        request: &Open,
        owner: &Peer,
        programs: &Programs,
    ) -> Result<(u64, u64), Refusal> {
        let plan = self.plan(request, owner, programs)?;
        Ok((plan.bytes(), plan.arena_bytes()))
    }

    /// What counts for its owner's limits: bytes of the record areas of rings and arenas, and mappings.
    pub(super) fn counted(
        &self,
        request: &Open,
        owner: &Peer,
        programs: &Programs,
    ) -> Result<(u64, u64), Refusal> {
        let plan = self.plan(request, owner, programs)?;
        let arena = plan.group.as_ref().filter(|group| group.is_first);
        let each = plan.capacity + arena.map_or(0, GroupPlan::owned);
        let bytes = each * plan.queues.len() as u64 + plan.transmit;
        Ok((bytes, mappings::of(&plan.shape().pieces())))
    }

    pub(super) fn capacity(&self, request: &Open, snaplen: u32) -> Result<u64, Refusal> {
        let most = self.limits.max_ring_bytes.min(MAX_CAPACITY);
        let wanted = match request.ring_bytes {
            0 => self.limits.ring_bytes,
            bytes if bytes > most => {
                let what = format!("a ring of {bytes} bytes; the limit is {most}");
                return Err(Refusal::new(code::INVALID, what));
            }
            bytes => bytes,
        };
        let capacity = wanted.max(MIN_CAPACITY).next_power_of_two();
        // A snaplen asked for by name must fit; whole packets are cut to what fits.
        let longest = longest_record(capacity) - prefix(request.segments);
        if request.snaplen != 0 && snaplen > longest {
            let what = format!(
                "a ring of {capacity} bytes holds records up to {longest}; make the ring larger or the \
                 snaplen smaller"
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        Ok(capacity)
    }
}

/// Bytes before a frame in a record, at most.
pub(super) fn prefix(segments: Segments) -> u32 {
    match segments {
        Segments::Wire => 0,
        Segments::Merged => PREFIX as u32,
    }
}

/// The longest record that always fits a ring of this capacity.
pub(super) fn longest_record(capacity: u64) -> u32 {
    let half = capacity / 2 - record_size(0) - 8;
    MAX_SNAPLEN.min(u32::try_from(half).unwrap_or(MAX_SNAPLEN))
}
