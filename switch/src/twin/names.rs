//! What the twin is called on a bpf filesystem: one directory for a switch, which holds the names of its maps and links.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use vnplug_os::bpf::is_bpffs;

/// Where bpf filesystems are, and our part of it.
pub(super) const ROOT: &str = "/sys/fs/bpf";
pub(super) const PROJECT: &str = "vnplug";
/// Names of the maps.
pub(super) const STATE: &str = "state";
pub(super) const TABLE: &str = "table";

/// A directory, and no link to one.
const IS_DIR: OFlags = OFlags::DIRECTORY
    .union(OFlags::RDONLY)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW);

/// Makes the directory, for nobody else: what holds it. Others may make what they like where bpf filesystems are,
/// so nothing is followed, and what is somebody else's is not taken.
pub(super) fn directory(switch: &str, user: Option<(u32, u32)>) -> Result<OwnedFd, String> {
    if !is_bpffs(Path::new(ROOT)).unwrap_or(false) {
        return Err(format!(
            "twin needs a bpf filesystem at {ROOT}: mount -t bpf bpf {ROOT}"
        ));
    }
    let root = rustix::fs::open(ROOT, IS_DIR, Mode::empty());
    let root = root.map_err(|error| format!("{ROOT}: {error}"))?;
    let project = Path::new(ROOT).join(PROJECT);
    let ours = own_directory(&root, PROJECT, &project, None)?;
    settle_on(&ours, &project, Mode::from(0o711))?;
    let name = pin_name(switch);
    let path = project.join(&name);
    let lock = own_directory(&ours, &name, &path, user)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        // Only now: until then it may be that of a daemon that lives.
        Ok(()) => settle_on(&lock, &path, Mode::from(0o700)).map(|()| lock),
        Err(Errno::WOULDBLOCK) => Err(format!(
            "another daemon has a switch of this name with twin uplinks ({})",
            path.display()
        )),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// A directory in another, which is ours, or was made by a daemon that became `user`.
fn own_directory(
    parent: &OwnedFd,
    name: &str,
    path: &Path,
    user: Option<(u32, u32)>,
) -> Result<OwnedFd, String> {
    let failed = |error: Errno| format!("{}: {error}", path.display());
    match rustix::fs::mkdirat(parent, name, Mode::from(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(failed(error)),
    }
    let dir = rustix::fs::openat(parent, name, IS_DIR, Mode::empty()).map_err(failed)?;
    let is = rustix::fs::fstat(&dir).map_err(failed)?;
    let us = rustix::process::geteuid();
    if is.st_uid != us.as_raw() && user.is_none_or(|(uid, _)| is.st_uid != uid) {
        let (path, uid) = (path.display(), is.st_uid);
        return Err(format!(
            "{path} belongs to user {uid}: remove it, and start again"
        ));
    }
    Ok(dir)
}

/// Makes a directory ours alone.
fn settle_on(dir: &OwnedFd, path: &Path, mode: Mode) -> Result<(), String> {
    let us = rustix::process::geteuid();
    let is = rustix::fs::fstat(dir);
    let settled = is.and_then(|is| {
        if is.st_uid != us.as_raw() {
            rustix::fs::fchown(dir, Some(us), None)?;
        }
        rustix::fs::fchmod(dir, mode)
    });
    settled.map_err(|error| format!("{}: {error}", path.display()))
}

/// Removes names, but for those that are `kept`.
pub(super) fn clear(dir: &Path, kept: impl Fn(&str) -> bool) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    let names: Vec<OsString> = entries.flatten().map(|it| it.file_name()).collect();
    for name in names {
        if name.to_str().is_none_or(|name| !kept(name)) {
            let _ = std::fs::remove_file(dir.join(name));
        }
    }
}

pub(super) fn link_name(index: u32) -> String {
    format!("link-{index}")
}

/// A name on a bpf filesystem has no dots.
pub(super) fn pin_name(switch: &str) -> String {
    switch.replace(['.', '/'], "_")
}
