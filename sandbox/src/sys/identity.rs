//! The program's user and rights, where the supervisor is root and the program's process is not any more: what is done
//! for it is done as it.
#![expect(
    unsafe_code,
    reason = "setfsuid(2) and its like for one thread, which rustix does not have"
)]

use std::fs;
use std::io;

/// A user to act as.
#[derive(Debug)]
pub(crate) struct Identity {
    user: u32,
    group: u32,
    groups: Vec<u32>,
}

impl Identity {
    /// The user of a thread; `None` if there is nothing that the supervisor may and the thread may not.
    ///
    /// # Errors
    /// If the thread is gone.
    pub(crate) fn of(thread: u32) -> io::Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let status = fs::read_to_string(format!("/proc/{thread}/status"))?;
        let user = list(&status, "Uid:").get(3).copied().unwrap_or(NOBODY);
        if user == 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            user,
            group: list(&status, "Gid:").get(3).copied().unwrap_or(NOBODY),
            groups: list(&status, "Groups:"),
        }))
    }

    /// Acts as this user, as far as files and the ways to them are concerned.
    pub(crate) fn act<T>(identity: Option<&Self>, act: impl FnOnce() -> T) -> T {
        let Some(identity) = identity else {
            return act();
        };
        let before = rustix::process::getgroups().unwrap_or_default();
        let before: Vec<u32> = before.iter().map(|group| group.as_raw()).collect();
        become_user(&identity.groups, identity.group, identity.user);
        let result = act();
        become_user(&before, rustix::process::getegid().as_raw(), 0);
        result
    }
}

/// Whether a thread may bind to a port, as far as the supervisor's own rights do not tell.
pub(crate) fn may_bind(thread: u32, port: u16) -> bool {
    const NET_BIND_SERVICE: u64 = 1 << 10;
    if !rustix::process::geteuid().is_root() || port == 0 {
        return true;
    }
    let first = fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let first = first
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(1024);
    if port >= first {
        return true;
    }
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let rights = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    rights.is_some_and(|rights| rights & NET_BIND_SERVICE != 0)
}

fn list(status: &str, name: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let words = line.unwrap_or("").split_whitespace();
    words.filter_map(|word| word.parse().ok()).collect()
}

fn become_user(groups: &[u32], group: u32, user: u32) {
    // SAFETY: the calls are about this thread alone (not glibc's, which change all threads), take numbers, and
    // read `groups`. They fail only without root's rights, and then there is nothing to give up.
    unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr());
        libc::syscall(libc::SYS_setfsgid, group);
        libc::syscall(libc::SYS_setfsuid, user);
    }
}

/// Who has nothing.
const NOBODY: u32 = 65_534;
