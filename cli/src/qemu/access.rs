//! Lets a QEMU that runs as another user (libvirt-qemu) open what the daemon made.
//!
//! The pool file and the sockets belong to the daemon's user. QEMU opens the pool for writing and
//! connects to the sockets, so the user that QEMU runs as may do so too: by an access control list,
//! for the files must stay the daemon's (it gave up the power to open others' and needs them again
//! when it restarts); by a change of owner where the file system has no such lists (hugetlbfs).
//!
//! The user is the one in `/proc/PID/status` of the process at the other end of the monitor socket,
//! or of the domain's process under libvirt. Where a manager made that socket and handed it over,
//! the process is the manager; `--qemu-user` then names the user.

use std::io;
use std::path::Path;

use rustix::fs::FileType;
use serde_json::json;
use vnplug_os::access::{AccessList, READ, READ_WRITE};
use vnplug_os::placed::Placed;
use vnplug_ring::control::VmReady;

use super::monitor::{Monitor, MonitorError};
use crate::failure::Failure;

/// A user and its group, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// The user that the process `pid` opens files as (`self`: this one), or `None` if it is not there.
pub(crate) fn user_of(pid: &str) -> Option<Owner> {
    owner_in_status(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// A number that is this QEMU's as long as it runs and no other's: by it the daemon lets the same
/// machine attach again, and nobody else while it runs. Made of the machine's UUID and its first
/// processor's thread, which QEMU tells through any monitor.
pub(crate) fn identity(monitor: &mut dyn Monitor) -> Result<u64, MonitorError> {
    let uuid = monitor.execute("query-uuid", json!({}))?;
    let cpus = monitor.execute("query-cpus-fast", json!({}))?;
    let thread = &cpus[0]["thread-id"];
    // Numbers of threads come again, but not with the same time.
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    let started = starting_time(&stat).unwrap_or_default();
    let text = format!("{} {thread} {started}", uuid["UUID"]);
    // FNV-1a: the number has to differ, not to be secret.
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Ok(hash.max(1))
}

/// The 22nd field of `/proc/PID/stat`; the second one, the name, may hold spaces and brackets.
fn starting_time(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)
}

/// Parses `USER`, `UID` or `UID:GID`; a name is looked up in /etc/passwd alone (a static binary has
/// no other user databases).
pub(crate) fn parse_owner(text: &str) -> Result<Owner, String> {
    let number = |text: &str| text.parse::<u32>().ok();
    if let Some((uid, gid)) = text.split_once(':') {
        if let (Some(uid), Some(gid)) = (number(uid), number(gid)) {
            return Ok(Owner { uid, gid });
        }
    } else if let Some(uid) = number(text) {
        return Ok(Owner { uid, gid: uid });
    }
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    find_in_passwd(&passwd, text)
        .ok_or_else(|| format!("`{text}` is not a user of /etc/passwd; give UID:GID"))
}

/// Gives the pool and the sockets to `owner` where they are not theirs already.
///
/// Whoever runs this may have more rights than the daemon, whose user is `daemon`. So nothing is done to what is not the
/// daemon's: it could name any file.
///
/// # Errors
/// The file that could not be given away; only root may. Or one that is not the daemon's.
pub(crate) fn hand_over(ready: &VmReady, daemon: u32, owner: Owner) -> Result<(), Failure> {
    let pool = (&ready.pool_path, FileType::RegularFile);
    let sockets = [&ready.control_path, &ready.doorbell_path].map(|it| (it, FileType::Socket));
    for (path, kind) in std::iter::once(pool).chain(sockets) {
        if path.is_empty() {
            continue;
        }
        let about = |error: io::Error| {
            let to = format!("cannot open {path} to user {} that QEMU runs as", owner.uid);
            Failure::new(format!("{to}: {error}{}", advice(&error)))
        };
        let file = match named(path, kind, daemon, owner.uid) {
            // Nothing is there to be given away, and root's QEMU says so itself.
            Err(error) if owner.uid == 0 && error.kind() == io::ErrorKind::NotFound => continue,
            file => file.map_err(about)?,
        };
        // Root opens everything.
        if owner.uid == 0 || file.owner() == owner.uid {
            continue;
        }
        let list = AccessList::only(READ_WRITE, &[owner.uid]);
        match list.set(&file.path()) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                file.give(Some(owner.uid), Some(owner.gid))
            }
            other => other,
        }
        .map_err(about)?;
    }
    ready
        .arenas
        .iter()
        .try_for_each(|(path, _)| let_read(path, daemon, owner.uid))
}

/// What lies at a path that the daemon named, if it is of this kind, and the daemon's or already QEMU's user's.
fn named(path: &str, kind: FileType, daemon: u32, qemu: u32) -> io::Result<Placed> {
    let file = Placed::open(Path::new(path))?;
    let owner = file.owner();
    let what = match kind {
        _ if file.kind() == FileType::Symlink => "it is a link".to_owned(),
        FileType::Socket if file.kind() != kind => "it is no socket".to_owned(),
        _ if file.kind() != kind => "it is no regular file".to_owned(),
        // What is root's is not the daemon's because a QEMU is root's, too.
        _ if owner != daemon && (owner != qemu || qemu == 0) => {
            format!("it belongs to user {owner}, and the daemon that named it is user {daemon}")
        }
        _ => return Ok(file),
    };
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

/// What to do about an error, if more rights help.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::InvalidData => "; nothing was changed",
        _ => "; run this as root",
    }
}

/// Lets `uid` read a group's arenas, beside the users of its other VMs; nobody but the daemon may
/// write them.
fn let_read(path: &str, daemon: u32, uid: u32) -> Result<(), Failure> {
    let about = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::Unsupported => {
                "; the daemon's --pool-dir needs access lists: use a tmpfs"
            }
            _ => advice(&error),
        };
        let to = format!("cannot let user {uid}, that QEMU runs as, read {path}");
        Failure::new(format!("{to}: {error}{hint}"))
    };
    let file = named(path, FileType::RegularFile, daemon, uid).map_err(about)?;
    if uid == 0 || file.owner() == uid {
        return Ok(());
    }
    let list = AccessList::of(&file.path()).map_err(about)?;
    let mut users: Vec<u32> = list.iter().flat_map(AccessList::users).collect();
    if users.contains(&uid) {
        return Ok(());
    }
    users.push(uid);
    let list = AccessList::only(READ, &users);
    list.set(&file.path()).map_err(about)
}

/// Lets `uid` use a socket of the daemon's that others use, too, beside everybody who may already.
pub(super) fn let_in(path: &str, daemon: u32, uid: u32) -> io::Result<()> {
    let file = named(path, FileType::Socket, daemon, uid)?;
    if uid == 0 || file.owner() == uid {
        return Ok(());
    }
    let list = AccessList::of(&file.path())?;
    let mut list = list.unwrap_or_else(|| AccessList::of_mode(file.mode()));
    list.let_in(uid, READ_WRITE);
    list.set(&file.path())
}

fn owner_in_status(status: &str) -> Option<Owner> {
    // Real, effective, saved, file system (proc(5)); the last one opens files.
    let last = |key| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().nth(3)?.parse().ok()
    };
    Some(Owner {
        uid: last("Uid:")?,
        gid: last("Gid:")?,
    })
}

fn find_in_passwd(passwd: &str, name: &str) -> Option<Owner> {
    let line = passwd
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|fields| fields.len() > 3 && fields[0] == name)?;
    Some(Owner {
        uid: line[2].parse().ok()?,
        gid: line[3].parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_any_name_tells_when_it_started() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        let stat = format!("812 (a) b (c) {}", fields.join(" "));
        assert_eq!(starting_time(&stat), Some("22"));
        assert_eq!(starting_time(""), None);
    }

    #[test]
    fn the_user_is_the_one_that_opens_files() {
        let status = "Name:\tqemu\nUid:\t0\t0\t0\t64055\nGid:\t0\t0\t0\t108\n";
        let owner = Owner {
            uid: 64055,
            gid: 108,
        };
        assert_eq!(owner_in_status(status), Some(owner));
        assert_eq!(owner_in_status("Name:\tqemu\n"), None);
    }

    #[test]
    fn nothing_is_done_to_what_is_not_the_daemons() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let dir = vnplug_testing::TestDir::new("access");
        let [pool, control, strangers] = ["pool", "control", "strangers"].map(|it| dir.path(it));
        std::fs::write(&pool, "").unwrap();
        std::fs::write(&strangers, "").unwrap();
        std::fs::set_permissions(&pool, PermissionsExt::from_mode(0o600)).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&control).unwrap();
        let us = rustix::process::geteuid().as_raw();
        let qemu = Owner {
            uid: us.wrapping_add(1),
            gid: 7,
        };
        let text = |path: &std::path::PathBuf| path.to_str().unwrap().to_owned();
        let ready = |pool: &str, control: &str, arenas: &[&str]| VmReady {
            pool_path: pool.to_owned(),
            pool_len: 0,
            control_path: control.to_owned(),
            doorbell_path: String::new(),
            arenas: arenas.iter().map(|it| ((*it).to_owned(), 0)).collect(),
        };
        let has_list = |path: &std::path::PathBuf| AccessList::of(path).unwrap().is_some();
        let (pool_at, control_at) = (text(&pool), text(&control));
        let link = dir.path("link");
        std::os::unix::fs::symlink(&strangers, &link).unwrap();
        let link = text(&link);
        for (it, daemon) in [
            (ready(&link, "", &[]), us),
            (ready("", &link, &[]), us),
            (ready("", "", &[&link]), us),
            (ready("", &text(&strangers), &[]), us),
            (ready(&control_at, "", &[]), us),
            (ready(&text(&strangers), "", &[]), us.wrapping_add(2)),
            (ready("", &control_at, &[]), us.wrapping_add(2)),
            (ready("", "", &[&text(&strangers)]), us.wrapping_add(2)),
        ] {
            hand_over(&it, daemon, qemu).unwrap_err();
            // Not for root's QEMU either, which would open it.
            hand_over(&it, daemon, Owner { uid: 0, gid: 0 }).unwrap_err();
        }
        let_in(&link, us, qemu.uid).unwrap_err();
        let_in(&control_at, us.wrapping_add(2), qemu.uid).unwrap_err();
        for path in [&pool, &strangers, &control] {
            assert!(!has_list(path), "{}", path.display());
            assert_eq!(std::fs::metadata(path).unwrap().uid(), us);
        }
        // The control: what is the daemon's.
        hand_over(&ready(&pool_at, &control_at, &[&pool_at]), us, qemu).unwrap();
        let_in(&control_at, us, qemu.uid).unwrap();
        let given = std::fs::metadata(&pool).unwrap().uid() == qemu.uid;
        assert!(given || has_list(&pool) && has_list(&control));
    }

    #[test]
    fn users_are_numbers_or_names() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nlibvirt-qemu:x:64055:108::/:/bin/false\n";
        let owner = Owner {
            uid: 64055,
            gid: 108,
        };
        assert_eq!(find_in_passwd(passwd, "libvirt-qemu"), Some(owner));
        assert_eq!(find_in_passwd(passwd, "nobody"), None);
        assert_eq!(parse_owner("64055:108"), Ok(owner));
        assert_eq!(parse_owner("7"), Ok(Owner { uid: 7, gid: 7 }));
        assert!(parse_owner("no such user").is_err());
    }
}
