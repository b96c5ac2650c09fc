//! The program's user and rights, where the supervisor is root and the program's process is not any more: what is done
//! for it is done as it.
#![expect(
    unsafe_code,
    reason = "setresuid(2), setfsuid(2) and their like for one thread, which rustix does not have"
)]

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use super::process::Told;

/// A user to act as.
#[derive(Debug)]
pub(crate) struct Identity {
    users: Ids,
    groups_of: Ids,
    groups: Vec<u32>,
}

/// Real, effective, and the one for files.
type Ids = [u32; 3];

impl Identity {
    /// The user of a thread, of which the kernel has told already where it can; `None` if there is nothing that the
    /// supervisor may and the thread may not.
    ///
    /// # Errors
    /// If the thread is gone.
    pub(crate) fn of(thread: u32, told: Option<Told>) -> io::Result<Option<Self>> {
        let is_root = |told: Told| told.users == [0; 3];
        if !rustix::process::geteuid().is_root() || told.is_some_and(is_root) {
            return Ok(None);
        }
        let status = fs::read_to_string(format!("/proc/{thread}/status"))?;
        let users = ids(&status, "Uid:");
        if users == [0; 3] {
            return Ok(None);
        }
        Ok(Some(Self {
            users,
            groups_of: ids(&status, "Gid:"),
            groups: list(&status, "Groups:"),
        }))
    }

    /// Acts as this user: to files and the ways to them, and to whoever asks the kernel who is at the other end of a
    /// Unix socket.
    pub(crate) fn act<T>(identity: Option<&Self>, act: impl FnOnce() -> T) -> T {
        let Some(identity) = identity else {
            return act();
        };
        let before = rustix::process::getgroups().unwrap_or_default();
        let before: Vec<u32> = before.iter().map(|group| group.as_raw()).collect();
        let users = [rustix::process::getuid(), rustix::process::geteuid()].map(|id| id.as_raw());
        let groups = [rustix::process::getgid(), rustix::process::getegid()].map(|id| id.as_raw());
        become_user(&identity.groups, identity.groups_of, identity.users);
        let result = act();
        // The saved user is root's all the while. Its rights come back with it, and are needed for the groups.
        become_user(&[], [KEEP; 3], [users[0], users[1], users[1]]);
        become_user(&before, [groups[0], groups[1], groups[1]], [KEEP; 3]);
        result
    }
}

/// Whether a thread may bind to a port, as far as the supervisor's own rights do not tell.
pub(crate) fn may_bind(thread: u32, port: u16) -> bool {
    const NET_BIND_SERVICE: u64 = 1 << 10;
    if !rustix::process::geteuid().is_root() || port == 0 {
        return true;
    }
    if port >= first_free_port() {
        return true;
    }
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let rights = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    rights.is_some_and(|rights| rights & NET_BIND_SERVICE != 0)
}

/// From this port on everybody may bind. The file stays open: to open it costs more than to read it.
fn first_free_port() -> u16 {
    static SETTING: OnceLock<Option<File>> = OnceLock::new();
    let setting =
        SETTING.get_or_init(|| File::open("/proc/sys/net/ipv4/ip_unprivileged_port_start").ok());
    let mut text = [0; 16];
    let read = setting.as_ref().map(|file| file.read_at(&mut text, 0));
    let text = match read {
        Some(Ok(length)) => String::from_utf8_lossy(&text[..length]),
        _ => return 1024,
    };
    // Above all ports, nobody may.
    let first = text.trim().parse::<u32>().unwrap_or(1024);
    u16::try_from(first).unwrap_or(u16::MAX)
}

fn list(status: &str, name: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let words = line.unwrap_or("").split_whitespace();
    words.filter_map(|word| word.parse().ok()).collect()
}

fn ids(status: &str, name: &str) -> Ids {
    let all = list(status, name);
    [0, 1, 3].map(|at| all.get(at).copied().unwrap_or(NOBODY))
}

/// Whether a thread with this `status` may say that it is this user and group: one of those that it is.
pub(crate) fn may_claim(status: &str, user: u32, group: u32) -> bool {
    let is_root = ids(status, "Uid:")[1] == 0;
    let has = |name: &str, id: u32| list(status, name).iter().take(3).any(|own| *own == id);
    is_root || has("Uid:", user) && has("Gid:", group)
}

fn become_user(groups: &[u32], group: Ids, user: Ids) {
    // SAFETY: the calls are about this thread alone (not glibc's, which change all threads), take numbers, and
    // read `groups`. They fail only without root's rights, and then there is nothing to give up.
    unsafe {
        if group != [KEEP; 3] {
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr());
            libc::syscall(libc::SYS_setresgid, group[0], group[1], KEEP);
            libc::syscall(libc::SYS_setfsgid, group[2]);
        }
        if user != [KEEP; 3] {
            libc::syscall(libc::SYS_setresuid, user[0], user[1], KEEP);
            libc::syscall(libc::SYS_setfsuid, user[2]);
        }
    }
}

/// Leaves an id as it is.
const KEEP: u32 = u32::MAX;

/// Who has nothing.
const NOBODY: u32 = 65_534;
