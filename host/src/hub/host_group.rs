//! Groups of the host: VMs, and operators' processes, that read one copy of each packet.
//!
//! An ordinary group belongs to who made it. A group of the host is made by an operator who attaches
//! VMs to it: its arenas lie in a file of the daemon's that each of them maps, and none of them can
//! write. What one member may see all may, so all have the same sight of the source; it is fixed as
//! long as the group lasts. It ends with its last VM.
//!
//! Where the source lends its packet memory as a file, that is the file of groups whose members see
//! everything: frames reach the guests without a copy. It is the source's, and outlives the group.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_ring::Region;
use vnplug_ring::control::{HostGroup as Wanted, Open, Segments, code};

use super::group::{GroupKey, GroupPlan, LentPlan, Whose, arena_bytes, same_segments};
use super::{Hub, Named, Peer, Programs, Refusal};
use vnplug_os::memory::Pool;
use vnplug_os::packet_file::PacketFile;
use vnplug_path::source::Lent;

/// The groups of the host, by name.
#[derive(Default)]
pub(super) struct HostGroups {
    groups: BTreeMap<String, HostGroup>,
    /// How many there were: a name may come again, with other memory.
    made: u64,
}

struct HostGroup {
    number: u64,
    source: usize,
    /// Bytes of each arena's record area.
    capacity: u64,
    home: Home,
    /// The obligatory filter of every member.
    sight: String,
    admitted: BTreeSet<Peer>,
    /// Its memory cannot be used, and why: nobody can open a port in it.
    lost: Option<String>,
    /// VMs that have its memory and see other things of its source, and what is to be done: nobody
    /// can open a port in it while there is one.
    unlike: BTreeMap<String, String>,
}

/// Where a group of the host has its arenas.
pub(crate) enum Home {
    /// In a file of its own, with a descriptor opened for reading only.
    File {
        path: PathBuf,
        memory: Pool,
        reader: OwnedFd,
    },
    /// In the packet memory of its source.
    Packets(Arc<PacketFile>),
    /// VMs have them plugged in, and we cannot.
    Lost(String),
}

impl Home {
    /// Bytes of the file that VMs map.
    fn len(&self) -> u64 {
        match self {
            Self::File { memory, .. } => memory.0.len(),
            Self::Packets(file) => file.len,
            Self::Lost(_) => 0,
        }
    }
}

/// What a group of the host is to be made of.
pub(crate) struct NewHostGroup {
    pub(crate) name: String,
    /// Its source, by name.
    pub(crate) source: String,
    /// Bytes of each arena's record area.
    pub(crate) capacity: u64,
    /// The obligatory filter of every member.
    pub(crate) sight: String,
    pub(crate) home: Home,
    /// Users that may join beside the VMs.
    pub(crate) operators: Vec<u32>,
}

/// What a group of the host that a VM wants is or would be.
#[derive(Debug, Clone)]
pub(crate) struct HostGroupSize {
    /// Bytes of each arena's record area.
    pub(crate) capacity: u64,
    /// Bytes of the file; a power of two, for that is what QEMU's devices have.
    pub(crate) len: u64,
    /// The file, if it is the packet memory of the source.
    pub(crate) packets: Option<Arc<PacketFile>>,
    /// The file of its own that it has already.
    pub(crate) path: Option<PathBuf>,
    /// It has to be made.
    pub(crate) is_new: bool,
}

impl Hub {
    /// What a VM would join that has the sight of the source which `sight` tells.
    ///
    /// # Errors
    /// [`Refusal`]: there is no such source, the size is impossible, or the group of this name is of
    /// another source, size or sight; or that of `sight`.
    pub(crate) fn size_host_group(
        &self,
        wanted: &Wanted,
        sight: impl FnOnce() -> Result<String, Refusal>,
    ) -> Result<HostGroupSize, Refusal> {
        let at = self.whole_source(&wanted.source)?;
        let source = &self.sources[at].name;
        let sight = sight()?;
        let name = &wanted.name;
        let Some(group) = self.host_groups.groups.get(name) else {
            // Who says a size wants memory of that size, and who sees less than all must not have what
            // the source lends.
            let is_whole = wanted.arena_bytes == 0 && sight.is_empty();
            if let Some((lent, file)) = self.plugged(at).filter(|_| is_whole) {
                return Ok(HostGroupSize {
                    capacity: lent.place.len,
                    len: file.len,
                    packets: Some(Arc::clone(file)),
                    path: None,
                    is_new: true,
                });
            }
            let capacity = self.arena_capacity(wanted.arena_bytes)?;
            return Ok(HostGroupSize {
                capacity,
                len: self.host_arena_bytes(at, capacity),
                packets: None,
                path: None,
                is_new: true,
            });
        };
        let exists = |what: String| Err(Refusal::new(code::EXISTS, what));
        if group.source != at {
            let its = &self.sources[group.source].name;
            return exists(format!(
                "group {name:?} is of source {its:?}: choose another name, or detach its VMs"
            ));
        }
        let (packets, path) = match &group.home {
            Home::Packets(file) => (Some(Arc::clone(file)), None),
            Home::File { path, .. } => (None, Some(path.clone())),
            Home::Lost(_) => (None, None),
        };
        if wanted.arena_bytes != 0 && packets.is_some() {
            return exists(format!(
                "group {name:?} reads the packet memory of {source:?}: leave the size out, or detach \
                 its VMs"
            ));
        }
        if let Home::Lost(what) = &group.home {
            return exists(what.clone());
        }
        if wanted.arena_bytes != 0 && self.arena_capacity(wanted.arena_bytes)? != group.capacity {
            return exists(format!(
                "group {name:?} has arenas of {} bytes: leave the size out, or detach its VMs",
                group.capacity
            ));
        }
        if group.sight != sight {
            return exists(format!(
                "the members of group {name:?} read what any of them asks for, and see {} of \
                 {source:?}; this VM would see {}: give it the same --allow, or choose another name",
                shown(&group.sight),
                shown(&sight)
            ));
        }
        Ok(HostGroupSize {
            capacity: group.capacity,
            len: group.home.len(),
            packets,
            path,
            is_new: false,
        })
    }

    /// A source of which a group can be: with all its queues.
    fn whole_source(&self, name: &str) -> Result<usize, Refusal> {
        match self.find(name)? {
            Named {
                source,
                queue: None,
                port: None,
            } => Ok(source),
            Named { source, .. } => {
                let source = &self.sources[source].name;
                let what = format!("a group has all queues of its source: write {source:?}");
                Err(Refusal::new(code::INVALID, what))
            }
        }
    }

    /// Whether there is a group of this name.
    pub(crate) fn has_host_group(&self, name: &str) -> bool {
        self.host_groups.groups.contains_key(name)
    }

    /// Whether a group reads the packet memory of a source.
    pub(crate) fn has_host_group_of(&self, source: usize) -> bool {
        let mut groups = self.host_groups.groups.values();
        groups.any(|group| group.source == source)
    }

    /// Makes a group; only operators are members so far.
    ///
    /// # Errors
    /// [`Refusal`] if its source is not there, or the memory too small for its queues.
    pub(crate) fn add_host_group(&mut self, new: NewHostGroup) -> Result<(), Refusal> {
        let source = self.sources.iter().position(|it| it.name == new.source);
        let Some(source) = source else {
            let what = format!("group {:?}: no source {:?}", new.name, new.source);
            return Err(Refusal::new(code::NOT_FOUND, what));
        };
        if let Home::File { memory, .. } = &new.home
            && memory.0.len() < self.host_arena_bytes(source, new.capacity)
        {
            let what = format!("group {:?}: its source has other queues now", new.name);
            return Err(Refusal::new(code::INVALID, what));
        }
        self.host_groups.made += 1;
        let group = HostGroup {
            number: self.host_groups.made,
            source,
            capacity: new.capacity,
            lost: match &new.home {
                Home::Lost(what) => Some(what.clone()),
                _ => None,
            },
            home: new.home,
            sight: new.sight,
            admitted: new.operators.into_iter().map(Peer::User).collect(),
            unlike: BTreeMap::new(),
        };
        self.host_groups.groups.insert(new.name, group);
        Ok(())
    }

    /// Lets a VM join a group, with the sight it has.
    pub(crate) fn admit(&mut self, group: &str, vm: &str, sight: &str) {
        let Some(it) = self.host_groups.groups.get_mut(group) else {
            return;
        };
        it.admitted.insert(Peer::Vm(vm.to_owned()));
        if it.sight != sight {
            // Only a configuration that changed between two daemons brings this about.
            let what = format!(
                "VM {vm:?} sees {} of the source of group {group:?}, another member {}; members \
                 read what any of them asks for: detach VM {vm:?}, or give all the same grants",
                shown(sight),
                shown(&it.sight)
            );
            log::error!(target: "vm", "{what}");
            it.unlike.insert(vm.to_owned(), what);
        }
    }

    /// Nobody can open a port in a group until this VM is detached, which counts as a member of it.
    pub(crate) fn bar_for(&mut self, group: &str, vm: &str, what: String) {
        log::error!(target: "vm", "{what}");
        if let Some(it) = self.host_groups.groups.get_mut(group) {
            it.unlike.insert(vm.to_owned(), what);
            it.admitted.insert(Peer::Vm(vm.to_owned()));
        }
    }

    /// Takes a VM out of its groups of the host; gives the files of those that end thereby.
    pub(crate) fn expel(&mut self, vm: &str) -> Vec<PathBuf> {
        let owner = Peer::Vm(vm.to_owned());
        for group in self.host_groups.groups.values_mut() {
            group.admitted.remove(&owner);
            group.unlike.remove(vm);
        }
        let ended = |group: &HostGroup| !group.admitted.iter().any(|it| matches!(it, Peer::Vm(_)));
        let ended = self.host_groups.groups.extract_if(.., |_, it| ended(it));
        let path = |group: HostGroup| match group.home {
            Home::File { path, memory, .. } => {
                // Freed with the last port that still reads it, even if others map it.
                memory.1.give_up();
                Some(path)
            }
            Home::Packets(_) | Home::Lost(_) => None,
        };
        ended.filter_map(|(_, group)| path(group)).collect()
    }

    /// The obligatory filter of a port that wants to join a group of the host, if it does.
    pub(crate) fn host_sight(&self, request: &Open, owner: &Peer) -> Option<&str> {
        let named = self.find(&request.device).ok()?;
        let source = Some(named.source).filter(|_| named.port.is_none())?;
        let (_, group) = self.host_groups.of(source, &request.group, owner)?;
        Some(&group.sight)
    }

    /// The group of the host that a request wants to join, if it does.
    pub(super) fn plan_host_group(
        &self,
        source: usize,
        request: &Open,
        owner: &Peer,
        programs: &Programs,
    ) -> Result<Option<GroupPlan>, Refusal> {
        let Some((name, group)) = self.host_groups.of(source, &request.group, owner) else {
            return Ok(None);
        };
        if let Some(what) = group.lost.iter().chain(group.unlike.values()).next() {
            return Err(Refusal::new(code::UNAVAILABLE, what.clone()));
        }
        // It may have been made while the port's filter was compiled or its memory made: what an
        // operator asks for then is not for its VMs to see.
        if programs.sight != group.sight {
            let what = format!("group {name:?} was made just now: open the port again");
            return Err(Refusal::new(code::UNAVAILABLE, what));
        }
        // Its members are readers of several owners, old ones among them.
        same_segments(name, Segments::Wire, request)?;
        let key = GroupKey {
            source,
            queue: None,
            port: None,
            whose: Whose::Host(group.number),
            name: name.clone(),
        };
        let lent = match group.home {
            Home::Packets(_) => self.plugged(source).map(|(lent, _)| LentPlan::of(lent)),
            Home::File { .. } | Home::Lost(_) => None,
        };
        Ok(Some(GroupPlan {
            is_first: !self.groups.contains_key(&key),
            key,
            capacity: group.capacity,
            lent,
            segments: Segments::Wire,
        }))
    }

    /// The memory of a group of the host, and a descriptor of it for processes.
    pub(super) fn host_memory(&self, key: &GroupKey) -> std::io::Result<Option<(Region, OwnedFd)>> {
        let group = self.host_groups.groups.get(&key.name);
        let group = group.filter(|it| key.whose == Whose::Host(it.number));
        let Some(Home::File { memory, reader, .. }) = group.map(|it| &it.home) else {
            return Ok(None);
        };
        let reader = reader.as_fd().try_clone_to_owned()?;
        Ok(Some((memory.0.clone(), reader)))
    }

    /// What a source lends that VMs can map.
    fn plugged(&self, source: usize) -> Option<(&Lent, &Arc<PacketFile>)> {
        let lent = self.sources[source].lent.as_ref()?.first()?;
        let file = lent.file.as_ref()?;
        (!lent.is_lost()).then_some((lent, file))
    }

    /// Whether a source that lends its packet memory can lend it to VMs; `None`: it does not lend it.
    pub(crate) fn lends(&self, source: &str) -> Option<bool> {
        let at = self.sources.iter().position(|it| it.name == source)?;
        let lent = self.sources[at].lent.as_ref();
        let lends = lent.is_some_and(|lent| !lent.is_empty());
        lends.then(|| self.plugged(at).is_some())
    }

    /// The files of packet memory that there are now, each with its source's name.
    pub(crate) fn packet_files(&self) -> impl Iterator<Item = (&str, &Arc<PacketFile>)> {
        self.sources.iter().filter_map(|source| {
            let lent = source.lent.as_ref()?.first()?;
            Some((source.name.as_str(), lent.file.as_ref()?))
        })
    }

    /// Bars groups whose file was truncated under us.
    pub(crate) fn bar_lost_host_groups(&mut self) {
        for (name, group) in &mut self.host_groups.groups {
            let (is_lost, then) = match &group.home {
                Home::File { memory, .. } => (memory.1.lost.load(Ordering::Acquire), ""),
                Home::Packets(file) => (file.is_lost(), " and restart the daemon"),
                Home::Lost(_) => (false, ""),
            };
            if group.lost.is_none() && is_lost {
                let what =
                    format!("the arena of group {name:?} was truncated: detach its VMs{then}");
                log::error!(target: "vm", "{what}");
                group.lost = Some(what);
            }
        }
    }

    /// Bars a group whose last member left while a thread may still write to its arenas: the next
    /// member's would be laid there, and torn frames be taken for whole ones.
    pub(super) fn bar_stuck_host_group(&mut self, key: &GroupKey) {
        let group = self.host_groups.groups.get_mut(&key.name);
        let is_it = |it: &&mut HostGroup| {
            // In packet memory nothing is laid for the next member.
            key.whose == Whose::Host(it.number) && !matches!(it.home, Home::Packets(_))
        };
        if let Some(group) = group.filter(is_it) {
            let what = format!(
                "a thread of the source of group {:?} does not answer and may still write to the \
                 group's arena: detach its VMs, or restart the daemon",
                key.name
            );
            log::error!(target: "vm", "{what}");
            group.lost = Some(what);
        }
    }

    /// Bytes of the file of a group.
    fn host_arena_bytes(&self, source: usize, capacity: u64) -> u64 {
        let queues = self.sources[source].workers.len() as u64;
        (arena_bytes(capacity) * queues)
            .next_power_of_two()
            .max(MIN_FILE)
    }
}

impl HostGroups {
    /// The group of this name and source, if the owner may join it.
    fn of(&self, source: usize, name: &str, owner: &Peer) -> Option<(&String, &HostGroup)> {
        let (name, group) = self.groups.get_key_value(name)?;
        (group.source == source && group.admitted.contains(owner)).then_some((name, group))
    }
}

/// What of a source somebody sees.
fn shown(sight: &str) -> String {
    match sight {
        "" => "everything".into(),
        filter => format!("{filter:?}"),
    }
}

/// A huge page.
const MIN_FILE: u64 = 2 << 20;
