//! The files of the host's groups, as the VMs that map them have them.
//!
//! Such a file is made by the attach that names its group first, is found again by the next daemon
//! through the records of its VMs, and goes with the last of them.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use serde::{Deserialize, Serialize};
use vnplug_ring::arena::header;
use vnplug_ring::control::{HostGroup, code};

use super::{Dirs, check_name, instance, remove};
use crate::hub::{HostGroupSize, Refusal, arena_bytes};
use crate::sys::memory::{GoOn, Pool, pool_file};

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
}

/// The memory of a group, and a descriptor that cannot write it.
pub(crate) struct ArenaFile {
    pub(crate) memory: Pool,
    pub(crate) reader: OwnedFd,
}

impl GroupRecord {
    /// What a VM is to get of a group of this size.
    pub(crate) fn new(wanted: &HostGroup, size: HostGroupSize, dirs: &Dirs) -> Self {
        let file = format!("vnplug-{}-{}.arena", instance(&dirs.state), wanted.name);
        Self {
            name: wanted.name.clone(),
            source: wanted.source.clone(),
            capacity: size.capacity,
            path: dirs.pools.join(file),
            len: size.len,
        }
    }

    /// Makes its file, which takes as long as a pool's.
    ///
    /// # Errors
    /// As [`pool_file`].
    pub(super) fn make(&self, go_on: GoOn<'_>) -> io::Result<ArenaFile> {
        // One without a record is what an interrupted attach left behind.
        remove(&self.path);
        let memory = pool_file(&self.path, self.len, true, go_on)?;
        self.with_reader(memory).inspect_err(|_| remove(&self.path))
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

/// Each is a PCI device.
pub(crate) const MAX_GROUPS: usize = 8;
