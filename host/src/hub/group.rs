//! Groups: ports that read one copy of each packet.
//!
//! A group belongs to who made it, as a cluster does: its members have one owner, one source and one
//! obligatory filter, for each of them can read what any of them asked for. The first member says
//! how large the arena is; with the last one it goes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use vnplug_ring::arena::{ArenaGeometry, arena_size, arena_snaplen};
use vnplug_ring::control::{ArenaHome, Arenas, Open, RingPlace, code};
use vnplug_ring::layout::{MAX_CAPACITY, MIN_CAPACITY};
use vnplug_ring::{Arena, Region};

use super::cluster::ClusterKey;
use super::open::{fresh_epoch, no_memory};
use super::{Hub, Owner, Programs, Refusal};
use crate::filter::Program;
use crate::port::commons::Commons;
use crate::port::pool::Places;
use crate::sys::memory::Shared;

/// Source, queue if one was named, owner, name.
pub(super) type GroupKey = ClusterKey;

/// A group with members.
pub(super) struct Group {
    members: usize,
    guard: Option<Arc<Program>>,
    /// Bytes of each arena's record area.
    capacity: u64,
    commons: Vec<Arc<Commons>>,
    arenas: Arenas,
    /// Descriptor of the arenas' memory, for processes.
    fd: Option<OwnedFd>,
    /// Where they lie in a VM's pool.
    place: Option<RingPlace>,
}

/// What a port has to do with groups.
#[derive(Debug, Clone)]
pub(super) struct GroupPlan {
    pub(super) key: GroupKey,
    /// Bytes of each arena's record area.
    pub(super) capacity: u64,
    /// It is the first member.
    pub(super) is_first: bool,
}

impl GroupPlan {
    /// Bytes of one arena with its header.
    pub(super) fn each(&self) -> u64 {
        arena_size(self.capacity).next_multiple_of(4096)
    }

    /// The longest packet that a member can have whole.
    pub(super) fn snaplen(&self) -> u32 {
        arena_snaplen(self.capacity)
    }
}

impl Hub {
    /// The group that a request wants to join, if it wants to.
    pub(super) fn plan_group(
        &self,
        request: &Open,
        owner: &Owner,
    ) -> Result<Option<GroupPlan>, Refusal> {
        if request.group.is_empty() {
            return Ok(None);
        }
        let (source, queue) = self.find(&request.device)?;
        let key = (source, queue, owner.clone(), request.group.clone());
        let is_first = !self.groups.contains_key(&key);
        let capacity = match self.groups.get(&key) {
            Some(group) => group.capacity,
            None => self.arena_capacity(request)?,
        };
        Ok(Some(GroupPlan {
            key,
            capacity,
            is_first,
        }))
    }

    fn arena_capacity(&self, request: &Open) -> Result<u64, Refusal> {
        let most = self.limits.max_ring_bytes.min(MAX_CAPACITY);
        let wanted = match request.arena_bytes {
            0 => self.limits.ring_bytes,
            bytes if bytes > most => {
                let what = format!("an arena of {bytes} bytes; the limit is {most}");
                return Err(Refusal::new(code::INVALID, what));
            }
            bytes => bytes,
        };
        Ok(wanted.max(MIN_ARENA).next_power_of_two())
    }

    /// Bytes of a member's ring of descriptors.
    pub(super) fn descriptor_capacity(
        &self,
        request: &Open,
        group: &GroupPlan,
    ) -> Result<u64, Refusal> {
        let most = self.limits.max_ring_bytes.min(MAX_CAPACITY);
        let wanted = match request.ring_bytes {
            // One for every 128 bytes of the arena.
            0 => group.capacity / 8,
            bytes if bytes > most => {
                let what = format!("a ring of {bytes} bytes; the limit is {most}");
                return Err(Refusal::new(code::INVALID, what));
            }
            bytes => bytes,
        };
        if request.snaplen > group.snaplen() {
            let what = format!(
                "an arena of {} bytes holds packets up to {}; make the arena larger or the snaplen \
                 smaller",
                group.capacity,
                group.snaplen()
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        Ok(wanted.max(MIN_CAPACITY).next_power_of_two())
    }

    /// Whether a port whose packets passed this guard may read what the group's members read.
    pub(super) fn may_join(&self, group: &GroupPlan, programs: &Programs) -> Result<(), Refusal> {
        let Some(existing) = self.groups.get(&group.key) else {
            return Ok(());
        };
        let of = |guard: &Option<Arc<Program>>| guard.as_ref().map(|it| it.instructions().to_vec());
        if of(&existing.guard) == of(&programs.guard) {
            return Ok(());
        }
        let what = format!(
            "the grants changed since group {:?} was made, and its members share every packet: use \
             another name",
            group.key.3
        );
        Err(Refusal::new(code::DENIED, what))
    }

    /// Makes the arenas of a group's first member: in memory of their own, or in its VM's pool.
    pub(super) fn make_group(
        &mut self,
        plan: &GroupPlan,
        queues: &[usize],
        guard: Option<&Arc<Program>>,
        own: Option<Shared>,
        pool: Option<(&Region, &mut Places)>,
    ) -> Result<(), Refusal> {
        let bytes = plan.each() * queues.len() as u64;
        let (memory, place) = match (own, pool) {
            (Some(own), _) => {
                let memory = (ArenaHome::Apart, own.region, 0, Some(own.fd));
                (memory, None)
            }
            (None, Some((region, places))) => {
                let place = places.take(bytes).ok_or_else(|| {
                    let free = places.free();
                    let what = format!(
                        "the VM's pool has {free} bytes free and the group's arenas need {bytes} \
                         in one piece: use smaller ones or attach with a larger --pool"
                    );
                    Refusal::new(code::NO_MEMORY, what)
                })?;
                let memory = (ArenaHome::WithTheRings, region.clone(), place.offset, None);
                (memory, Some((places, place)))
            }
            (None, None) => return Err(ended()),
        };
        match lay(plan, queues, memory) {
            Ok((commons, arenas, fd)) => {
                let group = Group {
                    members: 0,
                    guard: guard.cloned(),
                    capacity: plan.capacity,
                    commons,
                    arenas,
                    fd,
                    place: place.map(|(_, place)| place),
                };
                self.groups.insert(plan.key.clone(), group);
                Ok(())
            }
            Err(refusal) => {
                if let Some((places, place)) = place {
                    places.give(place);
                }
                Err(refusal)
            }
        }
    }

    /// Adds a member: what it shares in each queue, where that lies, and a descriptor of it.
    pub(super) fn join_group(&mut self, key: &GroupKey) -> Result<Joined, Refusal> {
        let group = self.groups.get_mut(key).ok_or_else(ended)?;
        let fd = group.fd.as_ref().map(|fd| fd.as_fd().try_clone_to_owned());
        let fd = fd.transpose().map_err(|error| no_memory(0, &error))?;
        group.members += 1;
        Ok(Joined {
            commons: group.commons.clone(),
            arenas: group.arenas.clone(),
            fd,
        })
    }

    /// Takes a member out; with the last one the arenas go. Returns what goes back to a VM's pool.
    pub(super) fn leave_group(&mut self, key: Option<&GroupKey>) -> Option<RingPlace> {
        let key = key?;
        let group = self.groups.get_mut(key)?;
        group.members -= 1;
        self.end_group(key)
    }

    /// Ends a group that has no member; also one whose first member could not be made after all.
    pub(super) fn end_group(&mut self, key: &GroupKey) -> Option<RingPlace> {
        if self.groups.get(key)?.members > 0 {
            return None;
        }
        let group = self.groups.remove(key)?;
        // Some reader may still look, and the place may serve something else.
        for commons in &group.commons {
            commons.retire();
        }
        group.place
    }

    /// Bytes of the arenas of an owner.
    pub(super) fn arena_bytes(&self, owner: &Owner) -> u64 {
        let own = self.groups.iter().filter(|((_, _, by, _), _)| by == owner);
        own.map(|(_, group)| group.capacity * group.commons.len() as u64)
            .sum()
    }

    /// Bytes of a group's arenas, and frames that were copied into them.
    pub(super) fn group_counters(&self, key: &GroupKey) -> Option<(u64, u64)> {
        let group = self.groups.get(key)?;
        let copies = group.commons.iter().map(|commons| commons.copies()).sum();
        Some((group.capacity * group.commons.len() as u64, copies))
    }
}

type Home = (ArenaHome, Region, u64, Option<OwnedFd>);
type Laid = (Vec<Arc<Commons>>, Arenas, Option<OwnedFd>);

/// Lays an arena for each queue.
fn lay(plan: &GroupPlan, queues: &[usize], memory: Home) -> Result<Laid, Refusal> {
    let (home, region, base, fd) = memory;
    let mut commons = Vec::with_capacity(queues.len());
    let mut places = Vec::with_capacity(queues.len());
    for (at, &queue) in queues.iter().enumerate() {
        let place = RingPlace {
            offset: base + at as u64 * plan.each(),
            len: plan.each(),
        };
        let geometry = ArenaGeometry {
            capacity: plan.capacity,
            snaplen: plan.snaplen(),
            epoch: fresh_epoch(),
            queue: queue as u32,
        };
        let part = region
            .part(place.offset, place.len)
            .ok_or_else(|| Refusal::new(code::INTERNAL, "an arena outside its memory"))?;
        let arena = Arena::create(part, geometry)
            .map_err(|error| Refusal::new(code::INVALID, error.to_string()))?;
        commons.push(Arc::new(Commons::new(arena)));
        places.push(place);
    }
    let arenas = Arenas {
        home,
        memory: 0,
        map_len: region.len(),
        places,
    };
    Ok((commons, arenas, fd))
}

/// It was there when its first member's memory was counted.
fn ended() -> Refusal {
    Refusal::new(
        code::UNAVAILABLE,
        "the group ended just now: open the port again",
    )
}

/// What a new member has of its group.
#[derive(Default)]
pub(super) struct Joined {
    pub(super) commons: Vec<Arc<Commons>>,
    pub(super) arenas: Arenas,
    pub(super) fd: Option<OwnedFd>,
}

/// Smallest record area of an arena: a frame of 16 KiB fits.
const MIN_ARENA: u64 = 1 << 16;
