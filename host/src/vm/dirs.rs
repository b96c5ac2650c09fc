//! Where the files of VMs lie, and what they are named.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vnplug_os::event;

/// Where VMs' files lie.
#[derive(Debug, Clone)]
pub(crate) struct Dirs {
    /// Sockets and records.
    pub(crate) state: PathBuf,
    /// Pools: a tmpfs or hugetlbfs.
    pub(crate) pools: PathBuf,
    /// Bytes of a pool when the operator does not say.
    pub(crate) pool_bytes: u64,
}

impl Dirs {
    pub(super) fn pool_path(&self, name: &str) -> PathBuf {
        let instance = instance(&self.state);
        self.pools.join(format!("vnplug-{instance}-{name}.pool"))
    }

    /// Where a new pool is to lie: as [`pool_path`](Self::pool_path), unless somebody else has that
    /// name in a directory where everybody may make files.
    pub(super) fn new_pool_path(&self, name: &str) -> PathBuf {
        let named = self.pool_path(name);
        let us = rustix::process::geteuid().as_raw();
        match std::fs::symlink_metadata(&named) {
            Ok(there) if there.uid() != us => self.unused_pool_path(name),
            _ => named,
        }
    }

    /// As [`new_pool_path`](Self::new_pool_path), but never one that was used before.
    pub(super) fn unused_pool_path(&self, name: &str) -> PathBuf {
        let number = format!("{:016x}.pool", event::random());
        self.pool_path(name).with_extension(number)
    }
}

/// Refuses a pool that an earlier daemon cannot have made for this VM: what it is named is overwritten.
pub(super) fn check_pool(pool: &Path, name: &str) -> io::Result<()> {
    let file = pool.file_name().unwrap_or_default().to_string_lossy();
    if file.starts_with("vnplug-") && file.contains(&format!("-{name}.")) && file.ends_with(".pool")
    {
        return Ok(());
    }
    let what = format!("{} is no pool of VM {name:?}", pool.display());
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

/// Deletes pools of ours that no record tells of: a daemon that was killed while it attached a VM left
/// them, and they may be large.
pub(super) fn sweep(dirs: &Dirs, known: &HashSet<OsString>) {
    let us = rustix::process::geteuid().as_raw();
    let prefix = format!("vnplug-{}-", instance(&dirs.state));
    let entries = std::fs::read_dir(&dirs.pools);
    for entry in entries.into_iter().flatten().flatten() {
        let file = entry.file_name();
        let named = file.to_str();
        let is_pool = named.is_some_and(|it| it.starts_with(&prefix) && it.ends_with(".pool"));
        let is_ours = || {
            entry
                .metadata()
                .is_ok_and(|it| it.is_file() && it.uid() == us)
        };
        if is_pool && !known.contains(&file) && is_ours() {
            let path = entry.path();
            log::info!(target: "vm", "{}: an attach that did not end left it", path.display());
            remove(&path);
        }
    }
}

/// Deletes everything of a VM that lies in the file system.
pub(super) fn remove_all(state: &Path, name: &str, pool: &Path) {
    remove(pool);
    remove(&control_path(state, name));
    remove(&doorbell_path(state, name));
    remove(&record_path(state, name));
}

/// Deletes a file, which may be gone already.
pub(super) fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            log::warn!(target: "vm", "{}: {error}", path.display());
        }
        _ => {}
    }
}

pub(super) fn control_path(state: &Path, name: &str) -> PathBuf {
    state.join("vms").join(format!("{name}.control"))
}

pub(super) fn doorbell_path(state: &Path, name: &str) -> PathBuf {
    state.join("vms").join(format!("{name}.doorbell"))
}

/// The records of VMs that there are.
pub(super) fn records(dirs: &Dirs) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dirs.state.join("vms"));
    let paths = entries.into_iter().flatten().flatten().map(|it| it.path());
    let is_one = |path: &PathBuf| path.extension().is_some_and(|it| it == "toml");
    paths.filter(is_one).collect()
}

pub(super) fn record_path(state: &Path, name: &str) -> PathBuf {
    state.join("vms").join(format!("{name}.toml"))
}

/// A short name for the daemon that owns this state directory, so that several can share a tmpfs.
pub(super) fn instance(state: &Path) -> String {
    let state = std::fs::canonicalize(state).unwrap_or_else(|_| state.to_owned());
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in state.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{:08x}", hash as u32)
}
