//! Groups: ports that read one copy of each packet.
//!
//! A group belongs to who made it, as a cluster does: its members have one owner, one source and one
//! obligatory filter, for each of them can read what any of them asked for. The first member says
//! how large the arena is; with the last one it goes. A group of the host ([`super::host_group`])
//! has several owners, and memory that is there before its first member.

use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use vnplug_ring::arena::{ArenaGeometry, DESCRIPTOR, arena_size, arena_snaplen};
use vnplug_ring::control::{ArenaHome, Arenas, Open, RingPlace, Segments, code};
use vnplug_ring::layout::{MAX_CAPACITY, MIN_CAPACITY};
use vnplug_ring::{Arena, Region};

use super::ground::Ground;
use super::open::{fresh_epoch, no_memory};
use super::plan::PortPlan;
use super::{Hub, Named, Peer, Programs, Refusal};
use vnplug_filter::Program;
use vnplug_path::commons::Commons;
use vnplug_path::source::Lent;

/// Which group it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GroupKey {
    pub(super) source: usize,
    /// Of one that has only this queue.
    pub(super) queue: Option<usize>,
    /// Of one that has only what passes this port of a switch.
    pub(super) port: Option<NonZeroU16>,
    pub(super) whose: Whose,
    pub(super) name: String,
}

/// Whose a group is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Whose {
    /// Who made it.
    Owner(Peer),
    /// The host's, by its number.
    Host(u64),
}

/// A group with members.
pub(super) struct Group {
    members: usize,
    guard: Option<Arc<Program>>,
    /// How all members get super-frames.
    segments: Segments,
    /// Bytes of each arena's record area.
    capacity: u64,
    /// The queues that have an arena; `commons` and the places of `arenas` are in their order.
    queues: Vec<usize>,
    commons: Vec<Arc<Commons>>,
    arenas: Arenas,
    /// The arenas are the source's, and outlive the group.
    is_lent: bool,
    /// Descriptor of the arenas' memory, for processes.
    fd: Option<OwnedFd>,
    /// Where they lie in a VM's pool, or the device that was plugged for them.
    place: Option<RingPlace>,
}

/// What a port has to do with groups.
#[derive(Debug, Clone)]
pub(super) struct GroupPlan {
    pub(super) key: GroupKey,
    /// How its members get super-frames.
    pub(super) segments: Segments,
    /// Bytes of each arena's record area.
    pub(super) capacity: u64,
    /// What its source lends, instead of arenas of the group's own.
    pub(super) lent: Option<LentPlan>,
    /// It is the first member.
    pub(super) is_first: bool,
}

/// Of frames that members read where they were received.
#[derive(Debug, Clone, Copy)]
pub(super) struct LentPlan {
    /// Frames that there is time for.
    kept: u64,
    snaplen: u32,
}

impl LentPlan {
    pub(super) fn of(lent: &Lent) -> Self {
        Self {
            kept: lent.kept,
            snaplen: lent.snaplen,
        }
    }
}

impl GroupPlan {
    /// Bytes of one arena with its header.
    pub(super) fn each(&self) -> u64 {
        arena_bytes(self.capacity)
    }

    /// Its memory is there already, and nobody's own.
    pub(super) fn is_hosts(&self) -> bool {
        matches!(self.key.whose, Whose::Host(_))
    }

    /// Bytes of memory that one queue takes of the group's owner.
    pub(super) fn owned(&self) -> u64 {
        if self.lent.is_some() || self.is_hosts() {
            return 0;
        }
        self.capacity
    }

    /// The longest packet that a member can have whole.
    pub(super) fn snaplen(&self) -> u32 {
        match self.lent {
            Some(lent) => lent.snaplen,
            None => arena_snaplen(self.capacity),
        }
    }

    /// Bytes of a member's ring of descriptors, if it does not say.
    fn descriptors(&self) -> u64 {
        match self.lent {
            // One for every frame that it can have.
            Some(lent) => lent.kept * DESCRIPTOR,
            // One for every 128 bytes of the arena.
            None => self.capacity / 8,
        }
    }
}

impl Hub {
    /// The group that a request wants to join, if it wants to.
    pub(super) fn plan_group(
        &self,
        request: &Open,
        owner: &Peer,
        programs: &Programs,
    ) -> Result<Option<GroupPlan>, Refusal> {
        if request.group.is_empty() {
            return Ok(None);
        }
        let Named {
            source,
            queue,
            port,
        } = self.find(&request.device)?;
        if port.is_none()
            && let Some(plan) = self.plan_host_group(source, request, owner, programs)?
        {
            return Ok(Some(plan));
        }
        let key = GroupKey {
            source,
            queue,
            port,
            whose: Whose::Owner(owner.clone()),
            name: request.group.clone(),
        };
        let existing = self.groups.get(&key);
        if let Some(group) = existing {
            same_segments(&request.group, group.segments, request)?;
        }
        // What the source lends shows every frame: nobody has it from whom some are kept.
        let may_see_all = matches!(owner, Peer::User(_)) && programs.guard.is_none();
        let lends = existing.map_or(may_see_all, |group| group.is_lent);
        let lent = self.sources[source].lent.as_ref();
        let lent = lent.and_then(|lent| lent.first());
        let lent = lent.filter(|lent| lends && (existing.is_some() || !lent.is_lost()));
        let capacity = match (existing, lent) {
            (Some(group), _) => group.capacity,
            (None, Some(lent)) => lent.place.len,
            (None, None) => self.arena_capacity(request.arena_bytes)?,
        };
        Ok(Some(GroupPlan {
            is_first: existing.is_none(),
            lent: lent.map(LentPlan::of),
            segments: request.segments,
            key,
            capacity,
        }))
    }

    /// Bytes of the record area of an arena that is to have `wanted`; 0 = the default.
    pub(super) fn arena_capacity(&self, wanted: u64) -> Result<u64, Refusal> {
        let most = self.limits.max_ring_bytes.min(MAX_CAPACITY);
        let wanted = match wanted {
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
            0 => group.descriptors(),
            bytes if bytes > most => {
                let what = format!("a ring of {bytes} bytes; the limit is {most}");
                return Err(Refusal::new(code::INVALID, what));
            }
            bytes => bytes,
        };
        if request.snaplen > group.snaplen() {
            let larger = match group.lent {
                Some(_) => "",
                None => "make the arena larger or ",
            };
            let what = format!(
                "an arena of {} bytes holds packets up to {}; {larger}make the snaplen smaller",
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
            group.key.name
        );
        Err(Refusal::new(code::DENIED, what))
    }

    /// Makes a port a member of the group that it is planned for, if it is; the first one makes the group.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was changed.
    pub(super) fn enter_group(
        &mut self,
        plan: &PortPlan,
        guard: Option<&Arc<Program>>,
        ground: &mut Ground<'_>,
    ) -> Result<Joined, Refusal> {
        let Some(group) = &plan.group else {
            return Ok(Joined::default());
        };
        if group.is_first {
            self.make_group(group, plan.queues.clone(), guard, ground)?;
        }
        let joined = self.join_group(&group.key, &plan.queues);
        if joined.is_err() {
            self.end_group(&group.key);
        }
        joined
    }

    /// Makes the arenas of a group's first member: in memory of their own, in its VM's pool, or in the
    /// host's for all queues of the source.
    fn make_group(
        &mut self,
        plan: &GroupPlan,
        mut queues: Vec<usize>,
        guard: Option<&Arc<Program>>,
        ground: &mut Ground<'_>,
    ) -> Result<(), Refusal> {
        if plan.is_hosts() {
            queues = (0..self.sources[plan.key.source].workers.len()).collect();
        }
        if plan.lent.is_some() {
            return self.lend(plan, queues);
        }
        let hosts = self.host_memory(&plan.key);
        let hosts = hosts.map_err(|error| no_memory(0, &error))?;
        let bytes = plan.each() * queues.len() as u64;
        let mut place = None;
        let memory = match (ground.arenas.take(), &mut ground.pool) {
            _ if plan.is_hosts() => {
                let (region, reader) = hosts.ok_or_else(ended)?;
                (ArenaHome::Apart, region, 0, Some(reader))
            }
            (Some(own), _) => (ArenaHome::Apart, own.region, 0, Some(own.fd)),
            (None, Some(pool)) => match ground.plugged_arenas.take() {
                Some(plugged) => (ArenaHome::Plugged, plugged.region, 0, None),
                None => {
                    let taken = pool.take(bytes, |free, bytes| {
                        format!(
                            "the VM's pool has {free} bytes free and the group's arenas need {bytes} in \
                             one piece: use smaller ones, or attach with a larger --pool or, in QEMU, with \
                             --grow"
                        )
                    })?;
                    place = Some(taken);
                    let region = pool.region.clone();
                    (ArenaHome::WithTheRings, region, taken.offset, None)
                }
            },
            (None, None) => return Err(ended()),
        };
        let (commons, arenas, fd) = lay(plan, &queues, memory)?;
        if arenas.home == ArenaHome::Plugged {
            place = Some(RingPlace::device(arenas.memory));
        }
        let group = Group {
            members: 0,
            guard: guard.cloned(),
            segments: plan.segments,
            capacity: plan.capacity,
            queues,
            commons,
            arenas,
            is_lent: false,
            fd,
            place,
        };
        self.groups.insert(plan.key.clone(), group);
        Ok(())
    }

    /// Makes a group on the arenas that the source lends.
    fn lend(&mut self, plan: &GroupPlan, queues: Vec<usize>) -> Result<(), Refusal> {
        let lent = self.sources[plan.key.source].lent.as_ref();
        let of = |&queue: &usize| lent.and_then(|lent| lent.get(queue));
        let lent: Vec<&Lent> = queues.iter().filter_map(of).collect();
        let Some(first) = lent.first().filter(|_| lent.len() == queues.len()) else {
            return Err(ended());
        };
        let fd = first.memory.try_clone();
        let group = Group {
            members: 0,
            guard: None,
            segments: plan.segments,
            capacity: plan.capacity,
            queues,
            commons: lent.iter().map(|lent| Arc::clone(&lent.commons)).collect(),
            arenas: Arenas {
                home: ArenaHome::Apart,
                memory: first.epoch,
                map_len: first.map_len,
                places: lent.iter().map(|lent| lent.place).collect(),
            },
            is_lent: true,
            fd: Some(fd.map_err(|error| no_memory(0, &error))?),
            place: None,
        };
        self.groups.insert(plan.key.clone(), group);
        Ok(())
    }

    /// Adds a member: what it shares in each queue, where that lies, and a descriptor of it.
    fn join_group(&mut self, key: &GroupKey, queues: &[usize]) -> Result<Joined, Refusal> {
        let group = self.groups.get_mut(key).ok_or_else(ended)?;
        let fd = group.fd.as_ref().map(|fd| fd.as_fd().try_clone_to_owned());
        let fd = fd.transpose().map_err(|error| no_memory(0, &error))?;
        let at = |queue| group.queues.iter().position(|it| it == queue);
        let places: Option<Vec<usize>> = queues.iter().map(at).collect();
        let places = places.ok_or_else(ended)?;
        group.members += 1;
        Ok(Joined {
            commons: places.iter().map(|&at| group.commons[at].clone()).collect(),
            arenas: Arenas {
                places: places.iter().map(|&at| group.arenas.places[at]).collect(),
                ..group.arenas.clone()
            },
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
        if !group.is_lent {
            group.commons.iter().for_each(|commons| commons.retire());
        }
        group.place
    }

    /// Bytes of the arenas of an owner.
    pub(super) fn arena_bytes(&self, owner: &Peer) -> u64 {
        let whose = Whose::Owner(owner.clone());
        let groups = self.groups.iter();
        let own = groups.filter(|(key, group)| key.whose == whose && !group.is_lent);
        own.map(|(_, group)| group.capacity * group.commons.len() as u64)
            .sum()
    }

    /// Bytes of a group's arenas, frames that were copied into them, and frames that lie there as
    /// they were received.
    pub(super) fn group_counters(&self, key: &GroupKey) -> Vec<(String, u64)> {
        let Some(group) = self.groups.get(key) else {
            return Vec::new();
        };
        let sum = |of: fn(&Commons) -> u64| group.commons.iter().map(|it| of(it)).sum();
        vec![
            (
                "arena_bytes".into(),
                group.capacity * group.commons.len() as u64,
            ),
            ("arena_copies".into(), sum(Commons::copies)),
            ("arena_lent".into(), sum(Commons::lent_frames)),
        ]
    }
}

type Home = (ArenaHome, Region, u64, Option<OwnedFd>);
type Laid = (Vec<Arc<Commons>>, Arenas, Option<OwnedFd>);

/// Members share one copy of each packet, so all of them have it in the same way.
///
/// # Errors
/// [`Refusal`] if the group's way is not the request's.
pub(super) fn same_segments(group: &str, its: Segments, request: &Open) -> Result<(), Refusal> {
    if its == request.segments {
        return Ok(());
    }
    let (its, wanted) = (its.name(), request.segments.name());
    let what = format!(
        "group {group:?} has segments={its}, not {wanted}: all members must use the same; use another \
         name, or {its}"
    );
    Err(Refusal::new(code::INVALID, what))
}

/// Bytes of an arena with its header.
pub(crate) fn arena_bytes(capacity: u64) -> u64 {
    arena_size(capacity).next_multiple_of(4096)
}

/// Lays an arena for each queue.
fn lay(plan: &GroupPlan, queues: &[usize], memory: Home) -> Result<Laid, Refusal> {
    let (home, region, base, fd) = memory;
    let mut commons = Vec::with_capacity(queues.len());
    let mut places = Vec::with_capacity(queues.len());
    let mut first_epoch = 0;
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
        if at == 0 {
            first_epoch = geometry.epoch;
        }
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
        memory: match home {
            ArenaHome::Apart | ArenaHome::Plugged => first_epoch,
            _ => 0,
        },
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
