//! Where the files of VMs lie, and what they are named.

use std::io;
use std::path::{Path, PathBuf};

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
