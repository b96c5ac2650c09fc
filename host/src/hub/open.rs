//! Opening a port: what it would be, its memory, and telling the source's threads.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use vnplug_ring::control::apart::Shape;
use vnplug_ring::control::{HOST_PREFIX, Open, Opened, RingPlace, code};
use vnplug_ring::layout::{
    Geometry, MAX_CAPACITY, MAX_SNAPLEN, MIN_CAPACITY, record_size, ring_size,
};
use vnplug_ring::{Producer, Region};

use super::cluster::ClusterKey;
use super::group::{GroupPlan, Joined};
use super::pace::Pace;
use super::send::MAX_SEND;
use super::{Hub, Owed, Owner, PortRecord, Programs, Refusal, RuleBook};
use vnplug_os::memory::Holes;
use vnplug_os::{event, mappings, memory};
use vnplug_path::batch::Handle;
use vnplug_path::engine::Command;
use vnplug_path::port::Port;
use vnplug_path::port::doorbell::Doorbell;

/// Where a port's ring memory comes from.
pub(crate) enum Memory<'a> {
    /// Memfds of its own, of the shape that [`Hub::need`] says; the descriptors travel with the
    /// answer.
    Own(OwnMemory),
    /// A VM's pool.
    Pool {
        /// The pool.
        region: &'a Region,
        /// Its places.
        places: &'a mut crate::hub::places::Places,
    },
}

/// Memory of a process' port.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    pub(crate) rings: memory::Rings,
    /// Of the group that it is the first member of.
    pub(crate) arenas: Option<memory::Shared>,
}

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
struct Plan {
    source: usize,
    queues: Vec<usize>,
    cluster: Option<ClusterKey>,
    snaplen: u32,
    capacity: u64,
    /// Bytes of one queue's ring with its header.
    each: u64,
    /// Bytes of the transmit ring's record area; 0 = none.
    transmit: u64,
    group: Option<GroupPlan>,
}

impl Plan {
    /// Of a port in a VM's pool.
    fn bytes(&self) -> u64 {
        self.each * self.queues.len() as u64 + self.transmit_bytes()
    }

    /// Of a process' port.
    fn shape(&self) -> Shape {
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
    fn transmit_bytes(&self) -> u64 {
        match self.transmit {
            0 => 0,
            capacity => ring_size(capacity).next_multiple_of(4096),
        }
    }
}

/// What was opened, with the descriptors for a process.
pub(crate) struct Opening {
    /// The answer.
    pub opened: Opened,
    /// Memory and wake-up descriptors; none for a port in a pool.
    pub fds: Vec<OwnedFd>,
    /// What wakes its reader.
    pub doorbell: Doorbell,
    /// When these are answered, the kernel lets through what the port wants.
    pub widening: Vec<Owed<()>>,
}

impl Hub {
    /// What a port would be.
    fn plan(&self, request: &Open, owner: &Owner, programs: &Programs) -> Result<Plan, Refusal> {
        let (source, queue) = self.find(&request.device)?;
        if self.ports.len() >= self.limits.ports {
            let most = self.limits.ports;
            let what = format!("{most} ports are open, the limit; close some or raise max_ports");
            return Err(Refusal::new(code::LIMIT, what));
        }
        let snaplen = match request.snaplen {
            0 => MAX_SNAPLEN,
            snaplen => snaplen.min(MAX_SNAPLEN),
        };
        let group = self.plan_group(request, owner, programs)?;
        let (capacity, longest) = match &group {
            None => {
                let capacity = self.capacity(request, snaplen)?;
                (capacity, longest_record(capacity))
            }
            Some(group) => (self.descriptor_capacity(request, group)?, group.snaplen()),
        };
        let snaplen = snaplen.min(longest);
        let cluster = (!request.cluster.is_empty())
            .then(|| (source, queue, owner.clone(), request.cluster.clone()));
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
        Ok(Plan {
            each: ring_size(capacity).next_multiple_of(4096),
            source,
            queues,
            cluster,
            snaplen,
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
        owner: &Owner,
        programs: &Programs,
    ) -> Result<Need, Refusal> {
        let plan = self.plan(request, owner, programs)?;
        Ok(Need {
            rings: plan.shape(),
            arenas: plan.arena_bytes(),
        })
    }

    /// What counts for its owner's limits: bytes of the record areas of rings and arenas, and mappings.
    pub(super) fn counted(
        &self,
        request: &Open,
        owner: &Owner,
        programs: &Programs,
    ) -> Result<(u64, u64), Refusal> {
        let plan = self.plan(request, owner, programs)?;
        let arena = plan.group.as_ref().filter(|group| group.is_first);
        let each = plan.capacity + arena.map_or(0, GroupPlan::owned);
        let bytes = each * plan.queues.len() as u64 + plan.transmit;
        Ok((bytes, mappings::of(&plan.shape().pieces())))
    }

    /// Makes a port and tells the source's threads. Without a doorbell it gets a pipe of its own.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was changed.
    pub(crate) fn open(
        &mut self,
        request: &Open,
        owner: Owner,
        programs: Programs,
        memory: Memory<'_>,
        doorbell: Option<Doorbell>,
    ) -> Result<Opening, Refusal> {
        let plan = self.plan(request, &owner, &programs)?;
        let (total, shape) = (plan.bytes(), plan.shape());
        let transmit_bytes = plan.transmit_bytes();
        if let Some(group) = &plan.group {
            self.may_join(group, &programs)?;
        }
        let Plan {
            source,
            queues,
            cluster,
            snaplen,
            capacity,
            each,
            transmit,
            group,
        } = plan;
        let id = self.fresh_port();
        let mut pool = None;
        let mut arena_memory = None;
        let is_process = matches!(memory, Memory::Own(_));
        let own_places: Vec<RingPlace> = shape.places().collect();
        let mut holes = None;
        let (region, base, mut fds, map_len, given) = match memory {
            Memory::Own(OwnMemory { rings, arenas }) => {
                self.say_pages(rings.huge);
                arena_memory = arenas;
                if transmit > 0 {
                    let words = rings.words.try_clone();
                    let words = words.map_err(|error| no_memory(0, &error))?;
                    holes = Some(Holes::new(words, shape.words_len()));
                }
                let fds = vec![rings.words, rings.records];
                (rings.region, 0, fds, shape.map_len(), Vec::new())
            }
            Memory::Pool { region, places } => {
                let places = pool.insert(places);
                let place = places.take(total).ok_or_else(|| {
                    let free = places.free();
                    let what = format!(
                        "the VM's pool has {free} bytes free and this port needs {total} in one \
                         piece: use a smaller ring, close ports or attach with a larger --pool"
                    );
                    Refusal::new(code::NO_MEMORY, what)
                })?;
                (
                    Region::clone(region),
                    place.offset,
                    Vec::new(),
                    region.len(),
                    vec![place],
                )
            }
        };
        let doorbell = match doorbell {
            Some(doorbell) => doorbell,
            None => {
                let closer = self.closers.of(&owner);
                let (doorbell, theirs) =
                    Doorbell::process(closer).map_err(|error| no_memory(0, &error))?;
                fds.push(theirs);
                doorbell
            }
        };
        // All rings first: what fails here leaves nothing behind but the place, which goes back.
        let mut rings = Vec::with_capacity(queues.len());
        let mut producers = Vec::with_capacity(queues.len());
        for (at, &queue) in queues.iter().enumerate() {
            let place = match is_process {
                true => own_places[at],
                false => RingPlace {
                    offset: base + at as u64 * each,
                    len: each,
                },
            };
            let geometry = Geometry {
                capacity,
                snaplen,
                link_type: self.sources[source].link_type,
                epoch: fresh_epoch(),
                port: id,
                queue: queue as u32,
            };
            let part = region.part(place.offset, place.len);
            let producer = part
                .ok_or_else(|| Refusal::new(code::INTERNAL, "a ring outside its memory"))
                .and_then(|part| {
                    let make = match group {
                        None => Producer::create,
                        Some(_) => Producer::create_descriptors,
                    };
                    make(part, geometry)
                        .map_err(|error| Refusal::new(code::INVALID, error.to_string()))
                });
            match producer {
                Ok(producer) => producers.push(producer),
                Err(refusal) => {
                    if let (Some(places), Some(place)) = (pool, given.first()) {
                        places.give(*place);
                    }
                    return Err(refusal);
                }
            }
            rings.push(place);
        }
        let joined = group.as_ref().map(|group| {
            let guard = programs.guard.as_ref();
            let pool = pool.as_deref_mut().map(|places| (&region, places));
            if group.is_first {
                self.make_group(group, queues.clone(), guard, arena_memory, pool)?;
            }
            self.join_group(&group.key, &queues)
        });
        let Joined {
            commons,
            arenas,
            fd: arena_fd,
        } = match joined.transpose() {
            Ok(joined) => joined.unwrap_or_default(),
            Err(refusal) => {
                let arenas = group.as_ref().and_then(|group| self.end_group(&group.key));
                if let Some(places) = pool {
                    given
                        .iter()
                        .chain(&arenas)
                        .for_each(|place| places.give(*place));
                }
                return Err(refusal);
            }
        };
        let number = self.number_of(&owner);
        let handle = Handle {
            port: id,
            owner: number,
            number: request.handle,
        };
        let mut transmits = RingPlace::default();
        if transmit > 0 {
            transmits = match is_process {
                true => shape.transmit_place(),
                false => RingPlace {
                    offset: base + each * queues.len() as u64,
                    len: transmit_bytes,
                },
            };
            let geometry = Geometry {
                capacity: transmit,
                snaplen: longest_record(transmit).min(MAX_SEND),
                link_type: self.sources[source].link_type,
                epoch: fresh_epoch(),
                port: id,
                queue: queues[0] as u32,
            };
            let closer = is_process.then(|| self.closers.of(&owner));
            let place = (source, queues[0]);
            let of = (geometry, handle);
            match self.attach_sender(&region, transmits, of, place, closer, holes) {
                Ok(kick) => fds.extend(kick),
                Err(refusal) => {
                    let arenas = self.leave_group(group.as_ref().map(|group| &group.key));
                    if let Some(places) = pool {
                        given
                            .iter()
                            .chain(&arenas)
                            .for_each(|place| places.give(*place));
                    }
                    return Err(refusal);
                }
            }
        }
        let (wanted, widening) =
            self.will_want(source, programs.guard.as_ref(), programs.filter.as_ref());
        fds.extend(arena_fd.filter(|_| is_process));
        let share = self.join(cluster.as_ref(), id, request.balance);
        for (at, (producer, &queue)) in producers.into_iter().zip(&queues).enumerate() {
            let mut port = Port::new(id, producer, doorbell.clone());
            port.owner = number;
            port.handle = handle;
            port.commons = commons.get(at).cloned();
            port.judge.set_guard(programs.guard.clone());
            port.judge.set_filter(programs.filter.clone());
            port.judge.tune(request.tuning);
            port.judge.set_share(share.0);
            port.mark_gap = request.reopened;
            let command = Command::Attach(Box::new(port), share.1.clone());
            self.sources[source].workers[queue].send(command);
        }
        self.opened += 1;
        let record = PortRecord {
            source,
            queues,
            cluster,
            group: group.map(|group| group.key),
            places: given,
            program: programs.filter,
            guard: programs.guard,
            wanted,
            owner,
            number,
            label: request.label.chars().take(64).collect(),
            filter: programs.text,
            filter_version: 0,
            notes: Vec::new(),
            last: BTreeMap::new(),
            tuning: request.tuning,
            rules: RuleBook::default(),
            capacity,
            transmit,
            mappings: match is_process {
                true => mappings::of(&shape.pieces()),
                false => 0,
            },
            pace: Pace::new(),
        };
        self.own(id, &record, true);
        self.ports.insert(id, record);
        self.settle_early(source);
        let opened = Opened {
            port: id,
            map_len,
            rings,
            snaplen,
            link_type: self.sources[source].link_type,
            device: format!("{HOST_PREFIX}{}", self.sources[source].name),
            vector: u32::MAX,
            transmit: transmits,
            arenas,
            apart: is_process,
        };
        Ok(Opening {
            opened,
            fds,
            doorbell,
            widening,
        })
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
        if request.snaplen != 0 && snaplen > longest_record(capacity) {
            let what = format!(
                "a ring of {capacity} bytes holds records up to {}; make the ring larger or the \
                 snaplen smaller",
                longest_record(capacity)
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        Ok(capacity)
    }

    fn fresh_port(&mut self) -> u32 {
        loop {
            let id = self.next_port;
            self.next_port = self.next_port.checked_add(1).unwrap_or(1);
            if !self.ports.contains_key(&id) {
                return id;
            }
        }
    }

    fn say_pages(&mut self, huge: bool) {
        if self.huge != Some(huge) {
            self.huge = Some(huge);
            log::info!(target: "port", "rings lie in {}", if huge {
                "huge pages"
            } else {
                "ordinary memory: no huge pages are free (`sysctl vm.nr_hugepages=N` reserves some)"
            });
        }
    }
}

/// The longest record that always fits a ring of this capacity.
fn longest_record(capacity: u64) -> u32 {
    let half = capacity / 2 - record_size(0) - 8;
    MAX_SNAPLEN.min(u32::try_from(half).unwrap_or(MAX_SNAPLEN))
}

/// What to do when the daemon is out of descriptors.
pub(crate) const NO_DESCRIPTORS: &str = "the daemon is at its limit of open files: raise LimitNOFILE \
                                         in its service file, or have readers of many ports open \
                                         them in a bundle";

pub(crate) fn no_memory(bytes: u64, error: &io::Error) -> Refusal {
    let advice = match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => NO_DESCRIPTORS,
        _ if error.kind() == io::ErrorKind::QuotaExceeded => "or fewer ports of fewer queues",
        _ => "use a smaller ring or free memory",
    };
    let what = format!("{bytes} bytes of ring memory: {error}; {advice}");
    Refusal::new(code::NO_MEMORY, what)
}

pub(super) fn fresh_epoch() -> u64 {
    // Low eight bits zero, never zero in all.
    (event::random() | 1 << 32) & !0xff
}
