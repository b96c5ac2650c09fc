//! Trust groups: ports of one user on one switch that hand frames to each other without it; see
//! [`vnplug_ring::direct`].
//!
//! The daemon knows who is a member, gives each the memory of the others, readable only, and publishes where
//! stations are. It never maps a member's memory.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vnplug_os::closer::PeerFd;
use vnplug_os::{event, memory, socket};
use vnplug_ring::control::{Direct, DirectMember, Members, Message, code};
use vnplug_ring::direct::{GENERATION_BITS, Member, SLOTS, TABLE_SIZE, Table, home_size};
use vnplug_ring::layout::MIN_CAPACITY;

use super::{Hub, NO_DESCRIPTORS, Peer, Refusal, no_memory};

/// The trust groups: of which source, and whose.
pub(super) type DirectGroups = BTreeMap<(usize, Peer), DirectGroup>;

/// A trust group.
pub(super) struct DirectGroup {
    id: u64,
    table: Table,
    /// The table, for readers.
    memory: OwnedFd,
    slots: [Option<Place>; SLOTS],
    generation: u32,
}

/// A member.
struct Place {
    port: u32,
    /// Its port of the switch.
    number: NonZeroU16,
    generation: u32,
    capacity: u64,
    /// Its home.
    home: PeerFd,
    /// What rings its bell.
    bell: OwnedFd,
    /// The others whose descriptors it was given: slot and generation. It is given none twice.
    told: Vec<(u8, u32)>,
}

impl Hub {
    /// Tells a port who is in its trust group; with the memory of a home, makes it a member first.
    ///
    /// # Errors
    /// [`Refusal`]; the port is no member then.
    pub(crate) fn direct(
        &mut self,
        request: &Direct,
        home: Option<PeerFd>,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        let invalid = |what: &str| Refusal::new(code::INVALID, what);
        let not_here =
            || invalid("direct mode is for ports of processes that take part in a switch");
        let record = self.ports.get(&request.port).ok_or_else(not_here)?;
        let (Some(number), Peer::User(_)) = (record.member, &record.owner) else {
            return Err(not_here());
        };
        if !record.twin.is_empty() {
            return Err(invalid("what goes directly goes through no program"));
        }
        let key = (record.source, record.owner.clone());
        let is_first = home.is_some();
        let mut fds = Vec::new();
        if let Some(home) = home {
            check(&home, request.capacity)?;
            // In place of what it was.
            self.leave_direct(request.port);
            let watched = self.is_watched(key.0);
            if !self.direct.contains_key(&key) {
                let group = DirectGroup::new(self.next_direct)?;
                self.next_direct += 1;
                group.table.set_watched(watched);
                self.direct.insert(key.clone(), group);
            }
            let group = self.direct.get_mut(&key).ok_or_else(not_here)?;
            let joined = group.join(request, number, home);
            let (slot, bell) = match joined {
                Ok(joined) => joined,
                Err(refusal) => {
                    self.direct.retain(|_, group| !group.is_empty());
                    return Err(refusal);
                }
            };
            if let Some(board) = &self.sources[key.0].board {
                board.direct(number, Some((group.id, group.table.clone(), slot)));
            }
            match copy(&group.memory) {
                Ok(table) => fds.extend([table, bell]),
                Err(refusal) => {
                    self.leave_direct(request.port);
                    return Err(refusal);
                }
            }
        }
        let no_home = || invalid("direct mode takes one descriptor, none came");
        let told = self.direct.get_mut(&key);
        let told = told
            .ok_or_else(no_home)
            .and_then(|group| group.tell(request.port, &mut fds));
        match told {
            Ok((slot, generation, others)) => {
                let members = Members {
                    slot,
                    generation,
                    is_first,
                    others,
                };
                Ok((Message::Members(members), fds))
            }
            Err(refusal) => {
                self.leave_direct(request.port);
                Err(refusal)
            }
        }
    }

    /// A port is no member any more.
    pub(super) fn leave_direct(&mut self, port: u32) {
        let has_it = |group: &DirectGroup| group.place_of(port);
        let mut groups = self.direct.iter_mut();
        let Some((key, group, slot)) =
            groups.find_map(|(key, group)| has_it(group).map(|slot| (key.clone(), group, slot)))
        else {
            return;
        };
        group.table.set_member(slot, None);
        let place = group.slots[slot].take();
        if group.is_empty() {
            self.direct.remove(&key);
        }
        let Some(place) = place else {
            return;
        };
        // NB: pages are freed with the last descriptor, which takes its time.
        let closer = self.closers.of(&key.1);
        closer.let_go(place.home.into_owned());
        closer.let_go(place.bell);
        if let Some(board) = &self.sources[key.0].board {
            board.direct(place.number, None);
        }
    }

    /// Somebody began to look at a source, or ended: while one looks at a switch, all frames go through it.
    pub(super) fn watch_direct(&self, source: usize) {
        if !self.direct.keys().any(|(of, _)| *of == source) {
            return;
        }
        let watched = self.is_watched(source);
        let groups = self.direct.iter();
        for (_, group) in groups.filter(|((of, _), _)| *of == source) {
            group.table.set_watched(watched);
        }
    }

    fn is_watched(&self, source: usize) -> bool {
        let mut ports = self.ports.values();
        ports.any(|record| record.source == source && record.member.is_none())
    }
}

impl DirectGroup {
    fn new(id: u64) -> Result<Self, Refusal> {
        let memory = memory::write_sealed("vnplug-table", TABLE_SIZE, &|| true);
        let memory = memory.map_err(|error| no_memory(TABLE_SIZE, &error))?;
        let table = Table::create(memory.region, event::random());
        Ok(Self {
            id,
            table: table.ok_or_else(|| Refusal::new(code::INTERNAL, "a table too small"))?,
            memory: memory.fd,
            slots: Default::default(),
            generation: 0,
        })
    }

    fn is_empty(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    fn place_of(&self, port: u32) -> Option<usize> {
        let is_its = |place: &Option<Place>| place.as_ref().is_some_and(|it| it.port == port);
        self.slots.iter().position(is_its)
    }

    /// Who the others are, and the descriptors of those that this member was not told of before.
    fn tell(
        &mut self,
        port: u32,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(u8, u32, Vec<DirectMember>), Refusal> {
        let no_member =
            || Refusal::new(code::INVALID, "direct mode takes one descriptor, none came");
        let slot = self.place_of(port).ok_or_else(no_member)?;
        let mut others = Vec::new();
        for (at, place) in (0..).zip(&self.slots) {
            let Some(place) = place.as_ref().filter(|_| usize::from(at) != slot) else {
                continue;
            };
            others.push(DirectMember {
                slot: at,
                generation: place.generation,
                capacity: place.capacity,
            });
        }
        let names = others.iter().map(|it| (it.slot, it.generation));
        let names: Vec<(u8, u32)> = names.collect();
        let own = self.slots[slot].as_mut().ok_or_else(no_member)?;
        let told = std::mem::replace(&mut own.told, names.clone());
        let generation = own.generation;
        for name in names.into_iter().filter(|name| !told.contains(name)) {
            if let Some(place) = &self.slots[usize::from(name.0)] {
                fds.extend([copy(&place.home)?, copy(&place.bell)?]);
            }
        }
        Ok((slot as u8, generation, others))
    }

    /// Takes a slot; the reading end of its bell.
    fn join(
        &mut self,
        request: &Direct,
        number: NonZeroU16,
        home: PeerFd,
    ) -> Result<(usize, OwnedFd), Refusal> {
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            let what = format!("direct mode has room for {SLOTS} ports of one user on a switch");
            return Err(Refusal::new(code::LIMIT, what));
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (theirs, bell) = pair.map_err(|errno| no_memory(0, &errno.into()))?;
        // Where the kernel can see to that (Linux 6.16), no member sends another descriptors.
        socket::pass_rights(&theirs, false);
        self.generation = self.generation % MAX_GENERATION + 1;
        let generation = self.generation;
        self.slots[slot] = Some(Place {
            port: request.port,
            number,
            generation,
            capacity: request.capacity,
            home,
            bell,
            told: Vec::new(),
        });
        let member = Member {
            generation,
            merged: request.merged,
        };
        self.table.set_member(slot, Some(member));
        Ok((slot, theirs))
    }
}

/// Whether a descriptor is the memory of a home: nobody can map it writable any more, or change its length.
fn check(home: &PeerFd, capacity: u64) -> Result<(), Refusal> {
    let refuse = |what: String| Refusal::new(code::INVALID, what);
    if !capacity.is_power_of_two() || !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
        let what = format!(
            "rings of {capacity} bytes for direct mode: use a power of two from {MIN_CAPACITY} to \
             {MAX_CAPACITY}"
        );
        return Err(refuse(what));
    }
    let no_home = || refuse("direct mode takes a sealed memfd, see vnplug_ring::direct".into());
    let needed = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    // NB: first. It asks no file's server, and says that this is a memfd: what is asked then, the kernel knows.
    let seals = fcntl_get_seals(home.as_fd()).map_err(|_| no_home())?;
    let is_tmpfs = || fstatfs(home.as_fd()).is_ok_and(|it| it.f_type as u64 == TMPFS_MAGIC);
    if !seals.contains(needed) || !is_tmpfs() {
        return Err(no_home());
    }
    let len = fstat(home.as_fd()).map_err(|_| no_home())?.st_size as u64;
    if len != home_size(capacity) {
        let need = home_size(capacity);
        return Err(refuse(format!(
            "a home of {len} bytes, which needs {need} for rings of {capacity}"
        )));
    }
    Ok(())
}

fn copy(fd: impl AsFd) -> Result<OwnedFd, Refusal> {
    let copied = fd.as_fd().try_clone_to_owned();
    copied.map_err(|_| Refusal::new(code::NO_MEMORY, NO_DESCRIPTORS))
}

/// Bytes of the largest ring to another member.
const MAX_CAPACITY: u64 = 4 << 20;
const MAX_GENERATION: u32 = (1 << GENERATION_BITS) - 1;
/// Of linux/magic.h: memory in ordinary pages. Huge ones may be missing when they are touched.
const TMPFS_MAGIC: u64 = 0x0102_1994;
