//! The files of the host's groups, as the VMs that map them have them.
//!
//! Such a file is made by the attach that names its group first, is found again by the next daemon
//! through the records of its VMs, and goes with the last of them. Where the file is the packet memory
//! of a source it is the source's: it is there before its first VM, and stays as long as the source
//! has it or a VM that maps it is recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirEntry, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use vnplug_ring::arena::header;
use vnplug_ring::control::{HostGroup, code};

use super::dirs::ARENA;
use super::{Dirs, Memories, check_name, remove};
use crate::hub::Peer;
use crate::hub::policy::{Policy, Sight};
use crate::hub::{Home, HostGroupSize, Refusal, arena_bytes};
use vnplug_os::access::AccessList;
use vnplug_os::memory::{GoOn, Pool, pool_file};
use vnplug_os::placed::Placed;
use vnplug_path::source::lent::{PacketDir, is_packets};

/// A group of the host that a VM may join, as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GroupRecord {
    pub(crate) name: String,
    pub(crate) source: String,
    /// Bytes of each arena's record area.
    pub(crate) capacity: u64,
    /// The file of its arenas.
    pub(crate) path: PathBuf,
    /// Bytes of it.
    pub(crate) len: u64,
    /// Which file it is, if it is the packet memory of the source; 0: it is the group's own.
    #[serde(default)]
    pub(crate) inode: u64,
    /// How packet memory is cut; a record of a daemon that did not say has what no memory has.
    #[serde(default)]
    pub(crate) layout: String,
}

/// The memory of a group, and a descriptor that cannot write it.
pub(crate) struct ArenaFile {
    pub(crate) memory: Pool,
    pub(crate) reader: OwnedFd,
}

impl GroupRecord {
    /// What a VM is to get of a group of this size.
    pub(crate) fn new(wanted: &HostGroup, size: HostGroupSize, dirs: &Dirs) -> Self {
        let (path, inode, layout) = match (&size.packets, size.path) {
            (Some(file), _) => (file.path.clone(), file.inode, file.layout.clone()),
            (None, Some(path)) => (path, 0, String::new()),
            (None, None) => (dirs.fresh(&wanted.name, ARENA), 0, String::new()),
        };
        Self {
            name: wanted.name.clone(),
            source: wanted.source.clone(),
            capacity: size.capacity,
            path,
            len: size.len,
            inode,
            layout,
        }
    }

    /// Its file is the packet memory of its source.
    pub(crate) fn is_packets(&self) -> bool {
        self.inode != 0
    }

    /// Makes its file, which takes as long as a pool's, if it is the group's own.
    ///
    /// # Errors
    /// As [`pool_file`].
    pub(super) fn make(&self, go_on: GoOn<'_>) -> io::Result<Option<ArenaFile>> {
        if self.is_packets() {
            return Ok(None);
        }
        let memory = pool_file(&self.path, self.len, true, go_on)?;
        let file = self.with_reader(memory).inspect_err(|_| remove(&self.path));
        file.map(Some)
    }

    /// Deletes its file, which was made for nobody, if it is the group's own.
    pub(super) fn abandon(&self) {
        if !self.is_packets() {
            remove(&self.path);
        }
    }

    /// Opens the file that an earlier daemon made. What it holds is from before.
    ///
    /// # Errors
    /// As [`pool_file`].
    pub(crate) fn reopen(&self) -> io::Result<ArenaFile> {
        let memory = pool_file(&self.path, self.len, false, &|| true)?;
        // NB: what a VM was granted may have changed since; of the old packets nobody gets one.
        // Guests still look at them: none is whole any more before the first byte goes.
        let each = arena_bytes(self.capacity);
        for nth in 0..self.len / each {
            // Relaxed: the fence orders it.
            memory
                .0
                .store_u64(nth * each + header::EPOCH, 0, Ordering::Relaxed);
        }
        // Pairs with the fence in ArenaReader::is_whole.
        fence(Ordering::SeqCst);
        memory.0.clear(0, self.len);
        self.with_reader(memory)
    }

    /// Where the arenas lie, in this file.
    pub(crate) fn home(&self, file: ArenaFile) -> Home {
        Home::File {
            path: self.path.clone(),
            memory: file.memory,
            reader: file.reader,
        }
    }

    fn with_reader(&self, memory: Pool) -> io::Result<ArenaFile> {
        let reader = File::open(&self.path)?.into();
        Ok(ArenaFile { memory, reader })
    }

    /// Whether an attach that asks for `wanted` asks for this; its size apart.
    pub(super) fn is(&self, wanted: &HostGroup) -> bool {
        self.name == wanted.name && self.source == wanted.source
    }
}

/// Checks the names of the groups that an attach asks for.
pub(crate) fn check(groups: &[HostGroup]) -> Result<(), Refusal> {
    if groups.len() > MAX_GROUPS {
        let what = format!("{} groups; a VM joins at most {MAX_GROUPS}", groups.len());
        return Err(Refusal::new(code::LIMIT, what));
    }
    for (at, group) in groups.iter().enumerate() {
        check_name("group", &group.name)?;
        if groups[..at].iter().any(|other| other.name == group.name) {
            let what = format!("group {:?} is named twice", group.name);
            return Err(Refusal::new(code::INVALID, what));
        }
    }
    Ok(())
}

/// Deletes files of groups that ended.
pub(crate) fn remove_files(paths: impl IntoIterator<Item = impl AsRef<Path>>) {
    for path in paths {
        remove(path.as_ref());
    }
}

/// Where sources make their packet memory, for the daemon of this state directory.
pub(crate) fn packet_dir(dirs: &Dirs, owner: Option<(u32, u32)>, policy: &Policy) -> PacketDir {
    PacketDir {
        dir: dirs.pools.clone(),
        prefix: dirs.prefix(),
        owner,
        again: whole(&Memories::of_all(dirs), policy),
    }
}

/// The files, by path and inode, whose VMs all see everything of the source now, and how they are cut.
/// With one whose record cannot be read there are none, for it may have any.
fn whole(vms: &[Option<Memories>], policy: &Policy) -> BTreeMap<(PathBuf, u64), String> {
    let (mut whole, mut partly) = (BTreeMap::new(), BTreeSet::new());
    for vm in vms {
        let Some(vm) = vm else {
            return BTreeMap::new();
        };
        for group in vm.groups.iter().filter(|group| group.is_packets()) {
            let viewer = || Peer::Vm(vm.name.clone());
            let sight = vm.allow.as_ref();
            let sight = sight.map(|allow| policy.sight(&viewer(), &group.source, allow));
            let sees_all = sight == Some(Sight::Through(String::new()));
            let file = (group.path.clone(), group.inode);
            let layout = whole.entry(file).or_insert_with(|| group.layout.clone());
            // Nor one of which two records say different things.
            if !sees_all || *layout != group.layout {
                partly.insert(group.inode);
            }
        }
    }
    whole.retain(|(_, inode), _| !partly.contains(inode));
    whole
}

/// Deletes packet memory that no VM has, when it is dropped: however a daemon ends, nobody else does.
pub(crate) struct Unplugged(pub(crate) Dirs);

impl Drop for Unplugged {
    fn drop(&mut self) {
        let vms: Option<Vec<Memories>> = Memories::of_all(&self.0).into_iter().collect();
        // One whose record cannot be read may have any.
        if let Some(vms) = vms {
            let groups = || vms.iter().flat_map(|vm| &vm.groups);
            remove_packets(&self.0, |path| groups().any(|group| group.path == path));
        }
    }
}

/// Deletes packet memory of earlier daemons that nobody has any more, according to `is_used`.
pub(crate) fn remove_packets(dirs: &Dirs, is_used: impl Fn(&Path) -> bool) {
    let ours = packets(dirs).into_iter();
    for path in ours.filter(|path| !is_used(path)) {
        remove(&path);
    }
}

/// The files of packet memory that there are.
fn packets(dirs: &Dirs) -> Vec<PathBuf> {
    let prefix = dirs.prefix();
    let is_one = |entry: &DirEntry| {
        let name = entry.file_name();
        name.to_str().is_some_and(|it| is_packets(&prefix, it))
    };
    let entries = std::fs::read_dir(&dirs.pools).into_iter().flatten();
    let ours = entries.flatten().filter(is_one);
    ours.map(|entry| entry.path()).collect()
}

/// Takes back from users that QEMU runs as what `vnplug attach` gave them: no VM maps it any more.
pub(crate) fn withdraw(path: &Path) {
    // None was given, or there are no lists: nothing is to be done.
    let withdraw = |file: Placed| match AccessList::remove(&file.path())? {
        true => file.set_mode(0o600),
        false => Ok(()),
    };
    let done = Placed::open(path).and_then(|file| match file.kind() {
        FileType::RegularFile => withdraw(file),
        _ => Err(io::Error::other("it is no regular file")),
    });
    if let Err(error) = done {
        log::warn!(target: "vm", "{}: {error}", path.display());
    }
}

/// Each is a PCI device.
pub(crate) const MAX_GROUPS: usize = 8;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    use vnplug_ring::arena::ArenaGeometry;
    use vnplug_ring::layout::Meta;
    use vnplug_ring::{Arena, ArenaReader};

    use std::os::unix::fs::PermissionsExt;

    use vnplug_os::access::READ;

    use super::*;

    const CAPACITY: u64 = 1 << 16;

    fn record() -> GroupRecord {
        let file = format!("vnplug-arenas-{}.arena", std::process::id());
        GroupRecord {
            name: "g".into(),
            source: "lab".into(),
            capacity: CAPACITY,
            path: std::env::temp_dir().join(file),
            len: 1 << 20,
            inode: 0,
            layout: String::new(),
        }
    }

    #[test]
    fn who_had_a_file_through_a_vm_that_is_gone_has_it_no_more() {
        let path = std::env::temp_dir().join(format!("vnplug-withdraw-{}", std::process::id()));
        File::create(&path).unwrap();
        AccessList::only(READ, &[65_534]).set(&path).unwrap();
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o640);
        withdraw(&path);
        assert_eq!(mode(), 0o600);
        assert_eq!(AccessList::of(&path).unwrap(), None);
        // Where there is none it is nothing.
        withdraw(&path);
        assert_eq!(mode(), 0o600);
        remove(&path);
    }

    /// A guest reads on while the next daemon clears what the last one left.
    ///
    /// NB: that the epochs go first, and the fence, are not seen to be missing on x86-64: it clears in
    /// order, and an arena's header is before its records.
    #[test]
    fn nobody_takes_a_packet_for_whole_while_its_file_is_reopened() {
        let group = record();
        let file = group.make(&|| true).unwrap().unwrap();
        // The last arena, which is cleared late.
        let at = (group.len / arena_bytes(CAPACITY) - 1) * arena_bytes(CAPACITY);
        let part = |pool: &Pool| pool.0.part(at, arena_bytes(CAPACITY)).unwrap();
        let part = part(&file.memory);
        let mut seen = 0;
        for epoch in 1..=100 {
            let geometry = ArenaGeometry {
                capacity: CAPACITY,
                snaplen: 1000,
                epoch,
                queue: 0,
            };
            let mut arena = Arena::create(part.clone(), geometry).unwrap();
            let placed = arena.place(&Meta::default(), &[7; 1000]);
            let (reader, ready) = (ArenaReader::attach(part.clone()), AtomicBool::new(false));
            let reader = reader.unwrap();
            seen += std::thread::scope(|scope| {
                let reading = scope.spawn(|| {
                    let deadline = Instant::now() + Duration::from_secs(60);
                    for whole in 0_u64.. {
                        assert!(Instant::now() < deadline, "it is never told");
                        let mut bytes = [0; 1000];
                        let record = 4096 + u64::from(placed.at) * 8 + 32;
                        part.read(record, &mut bytes);
                        if !reader.is_whole(placed.seq) {
                            return whole;
                        }
                        assert_eq!(bytes, [7; 1000], "torn");
                        ready.store(true, Ordering::Release);
                    }
                    unreachable!("it counts without end");
                });
                while !ready.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                drop(group.reopen().unwrap());
                reading.join().unwrap()
            });
        }
        assert!(seen >= 100);
        remove(&group.path);
    }
}
