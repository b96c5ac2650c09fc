//! The memory that a port is built on: a process' own, a place in its VM's pool, or a device that was plugged
//! into its VM for it.

use std::os::fd::OwnedFd;

use vnplug_ring::control::grow::PLUGGED_OFFSET;
use vnplug_ring::control::{ArenaHome, Arenas, RingPlace, code};
use vnplug_ring::layout::Geometry;
use vnplug_ring::{Producer, Region};

use super::Refusal;
use super::open::{fresh_epoch, no_memory};
use super::places::Places;
use super::plan::PortPlan;
use vnplug_os::memory::{self, Holes};

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
        places: &'a mut Places,
        /// What does not lie there.
        grown: Grown,
    },
}

/// What of a VM's port lies in devices that were plugged for it, and not in the pool.
#[derive(Debug, Default)]
pub(crate) struct Grown {
    /// Its rings, behind the first page of theirs.
    pub(crate) rings: Option<Plugged>,
    /// The arenas of the group that it is the first member of, from the beginning of theirs.
    pub(crate) arenas: Option<Plugged>,
}

/// Memory of a device.
#[derive(Debug)]
pub(crate) struct Plugged {
    pub(crate) region: Region,
    /// The number by which the guest's agent finds it. Arenas are found by their own.
    pub(crate) memory: u64,
}

/// Memory of a process' port.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    pub(crate) rings: memory::Rings,
    /// Of the group that it is the first member of.
    pub(crate) arenas: Option<memory::SharedMemory>,
}

/// Memory for a port that is being opened. What it took of a pool goes back when it is dropped, unless
/// it was [kept](Self::keep).
pub(super) struct Ground<'a> {
    pub(super) region: Region,
    pub(super) map_len: u64,
    /// Of its rings, in the order of its queues.
    pub(super) rings: Vec<RingPlace>,
    /// Of its transmit ring; empty if it does not send.
    pub(super) transmit: RingPlace,
    /// Descriptors that travel with the answer.
    pub(super) fds: Vec<OwnedFd>,
    /// Of the words of one that sends: its reader may punch holes there.
    pub(super) holes: Option<Holes>,
    /// For the arenas of the group that it is the first member of.
    pub(super) arenas: Option<memory::SharedMemory>,
    /// Likewise, of a VM's port.
    pub(super) plugged_arenas: Option<Plugged>,
    /// Of a VM's port.
    pub(super) pool: Option<Taken<'a>>,
    /// Where all of it lies in the pool, or the device that it lies in.
    pub(super) place: Option<RingPlace>,
}

/// Places that were taken of a pool, and go back if they are not kept.
pub(super) struct Taken<'a> {
    pub(super) region: &'a Region,
    pool: &'a mut Places,
    taken: Vec<RingPlace>,
}

impl<'a> Ground<'a> {
    /// Takes what the port that is planned needs.
    pub(super) fn of(plan: &PortPlan, memory: Memory<'a>) -> Result<Self, Refusal> {
        match memory {
            Memory::Own(own) => Self::own(plan, own),
            Memory::Pool {
                region,
                places,
                grown,
            } => Self::in_vm(plan, region, places, grown),
        }
    }

    fn own(plan: &PortPlan, memory: OwnMemory) -> Result<Self, Refusal> {
        let OwnMemory { rings, arenas } = memory;
        let shape = plan.shape();
        let sends = plan.transmit > 0;
        let words = sends.then(|| rings.words.try_clone()).transpose();
        let words = words.map_err(|error| no_memory(0, &error))?;
        Ok(Self {
            region: rings.region,
            map_len: shape.map_len(),
            rings: shape.places().collect(),
            transmit: match sends {
                true => shape.transmit_place(),
                false => RingPlace::default(),
            },
            fds: vec![rings.words, rings.records],
            holes: words.map(|words| Holes::new(words, shape.words_len())),
            arenas,
            plugged_arenas: None,
            pool: None,
            place: None,
        })
    }

    fn in_vm(
        plan: &PortPlan,
        region: &'a Region,
        places: &'a mut Places,
        grown: Grown,
    ) -> Result<Self, Refusal> {
        let mut pool = Taken {
            region,
            pool: places,
            taken: Vec::new(),
        };
        let (region, all, place) = match grown.rings {
            Some(Plugged { region, memory }) => {
                let all = RingPlace {
                    offset: PLUGGED_OFFSET,
                    len: plan.bytes(),
                };
                (region, all, RingPlace::device(memory))
            }
            None => {
                let all = pool.take(plan.bytes(), |free, bytes| {
                    format!(
                        "the VM's pool has {free} bytes free and this port needs {bytes} in one piece: \
                         use a smaller ring, close ports, or attach with a larger --pool or, in QEMU, with \
                         --grow"
                    )
                })?;
                (Region::clone(region), all, all)
            }
        };
        let queues = plan.queues.len() as u64;
        let ring = |at| RingPlace {
            offset: all.offset + at * plan.each,
            len: plan.each,
        };
        Ok(Self {
            map_len: region.len(),
            region,
            rings: (0..queues).map(ring).collect(),
            transmit: match plan.transmit {
                0 => RingPlace::default(),
                _ => RingPlace {
                    offset: all.offset + plan.each * queues,
                    len: plan.transmit_bytes(),
                },
            },
            fds: Vec::new(),
            holes: None,
            arenas: None,
            plugged_arenas: grown.arenas,
            pool: Some(pool),
            place: Some(place),
        })
    }

    /// The number of the device that it lies in; 0: none.
    pub(super) fn device(&self) -> u64 {
        let device = self.place.and_then(|place| place.as_device());
        device.unwrap_or(0)
    }

    /// Where its reader finds its group's arenas: not with the rings, if those lie elsewhere.
    pub(super) fn arenas_from_here(&self, arenas: Arenas) -> Arenas {
        match arenas.home {
            ArenaHome::WithTheRings if self.device() != 0 => Arenas {
                home: ArenaHome::Apart,
                ..arenas
            },
            _ => arenas,
        }
    }

    /// Whether it is a process' own.
    pub(super) fn is_own(&self) -> bool {
        self.pool.is_none()
    }

    /// Lays the rings of port `id` there.
    pub(super) fn lay(
        &self,
        plan: &PortPlan,
        id: u32,
        link_type: u32,
    ) -> Result<Vec<Producer>, Refusal> {
        let rings = self.rings.iter().zip(&plan.queues);
        let lay = |(place, &queue): (&RingPlace, &usize)| {
            let geometry = Geometry {
                capacity: plan.capacity,
                snaplen: plan.snaplen,
                link_type,
                epoch: fresh_epoch(),
                port: id,
                queue: queue as u32,
            };
            let make = match plan.group {
                None => Producer::create,
                Some(_) => Producer::create_descriptors,
            };
            let made = make(self.part(*place)?, geometry);
            made.map_err(|error| Refusal::new(code::INVALID, error.to_string()))
        };
        rings.map(lay).collect()
    }

    /// The memory of one of its rings.
    pub(super) fn part(&self, place: RingPlace) -> Result<Region, Refusal> {
        let part = self.region.part(place.offset, place.len);
        part.ok_or_else(|| Refusal::new(code::INTERNAL, "a ring outside its memory"))
    }
}

impl Taken<'_> {
    /// Takes a place; `advice` says what to do where none is free, by what is free and what is needed.
    pub(super) fn take(
        &mut self,
        bytes: u64,
        advice: impl Fn(u64, u64) -> String,
    ) -> Result<RingPlace, Refusal> {
        let Some(place) = self.pool.take(bytes) else {
            let what = advice(self.pool.free(), bytes);
            return Err(Refusal::new(code::NO_MEMORY, what));
        };
        self.taken.push(place);
        Ok(place)
    }

    /// They stay taken.
    pub(super) fn keep(mut self) {
        self.taken.clear();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.taken.iter().for_each(|place| self.pool.give(*place));
    }
}
