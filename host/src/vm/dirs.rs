//! Where the files of VMs lie, and what they are named.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::DirEntry;
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
    /// Where a new file that QEMU is to map lies. No other file had this name: a QEMU that has the memory of one
    /// that is gone cannot be taken for one that has this.
    pub(super) fn fresh(&self, name: &str, kind: &str) -> PathBuf {
        let (prefix, number) = (self.prefix(), event::random());
        self.pools
            .join(format!("{prefix}{name}.{number:016x}.{kind}"))
    }

    /// The pools that there are of a VM. Those of earlier daemons have no number.
    pub(super) fn pools_of(&self, name: &str) -> Vec<PathBuf> {
        let start = format!("{}{name}.", self.prefix());
        let is_one = |file: &str| {
            let rest = file.strip_prefix(&start);
            let rest = rest.and_then(|rest| rest.strip_suffix("pool"));
            rest.is_some_and(|number| number.is_empty() || is_number(number))
        };
        self.own(is_one)
    }

    /// Files of ours whose names are such.
    fn own(&self, is_one: impl Fn(&str) -> bool) -> Vec<PathBuf> {
        let us = rustix::process::geteuid().as_raw();
        let is_ours = |entry: &DirEntry| {
            let status = entry.metadata();
            entry.file_name().to_str().is_some_and(&is_one)
                && status.is_ok_and(|it| it.is_file() && it.uid() == us)
        };
        let entries = std::fs::read_dir(&self.pools).into_iter().flatten();
        let ours = entries.flatten().filter(is_ours);
        ours.map(|entry| entry.path()).collect()
    }

    /// How the names of this daemon's files begin.
    pub(super) fn prefix(&self) -> String {
        format!("vnplug-{}-", instance(&self.state))
    }
}

/// The number in the name of a file, and the dot after it.
fn is_number(text: &str) -> bool {
    let digits = text.strip_suffix('.').unwrap_or_default();
    digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
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

/// Deletes pools and arenas of ours that no record tells of: a daemon that was killed while it attached a VM left
/// them, and they may be large. `known` are the names of the others.
pub(super) fn sweep(dirs: &Dirs, kinds: &[&str], known: &HashSet<OsString>) {
    let prefix = dirs.prefix();
    let is_one = |file: &str| {
        let kind = file.rsplit('.').next().unwrap_or_default();
        file.starts_with(&prefix) && kinds.contains(&kind)
    };
    for path in dirs.own(is_one) {
        if !path.file_name().is_some_and(|name| known.contains(name)) {
            log::info!(target: "vm", "{}: an attach that did not end left it", path.display());
            remove(&path);
        }
    }
}

/// Deletes everything of a VM that lies in the file system.
pub(super) fn remove_all(state: &Path, name: &str, pools: &[PathBuf]) {
    pools.iter().for_each(|pool| remove(pool));
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

/// How names of files end that VMs map: their pools, and memory of groups of the host.
pub(super) const POOL: &str = "pool";
pub(super) const ARENA: &str = "arena";
