//! Giving up power after start.
//!
//! | stage | should | must not |
//! |---|---|---|
//! | start | open the configured sources, make directories, raise limits | serve anyone |
//! | [`drop_all_but`] | keep `CAP_NET_RAW` (an interface that comes back is opened again), for AF_XDP `CAP_IPC_LOCK` (packet memory is locked memory) | gain anything by exec, change owner, mount, trace, load |
#![expect(
    unsafe_code,
    reason = "capset and prctl have no safe wrapper that sets all sets at once"
)]

use std::io;

/// What the daemon may keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Keep {
    /// `CAP_NET_RAW`: packet and XDP sockets.
    NetRaw = 13,
    /// `CAP_IPC_LOCK`: locked memory without limit.
    IpcLock = 14,
}

const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Switches to `user` (uid, gid) if given and keeps no capability but these, for this thread and
/// every thread it starts later. No exec gains any back.
///
/// Call it before the first thread is started: Linux capabilities belong to threads.
///
/// # Errors
/// The system's.
pub(crate) fn drop_all_but(keep: &[Keep], user: Option<(u32, u32)>) -> io::Result<()> {
    let keep = keep.iter().fold(0_u32, |bits, &one| bits | 1 << one as u32);
    // SAFETY: plain system calls with integer arguments, and capset with two structures that live
    // across the call.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        // The bounding set can only be cut with CAP_SETPCAP; without it there is nothing to cut.
        for capability in 0..64 as libc::c_ulong {
            if u64::from(keep) >> capability & 1 == 0 {
                libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
            }
        }
        if let Some((uid, gid)) = user {
            check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
            check(libc::setgroups(0, std::ptr::null()))?;
            check(libc::setresgid(gid, gid, gid))?;
            check(libc::setresuid(uid, uid, uid))?;
        }
        let header = CapHeader {
            version: CAPABILITY_VERSION_3,
            pid: 0,
        };
        let mut current = [CapData::default(); 2];
        check(libc::syscall(libc::SYS_capget, &raw const header, current.as_mut_ptr()) as i32)?;
        let kept = current[0].permitted & keep;
        let data = [
            CapData {
                effective: kept,
                permitted: kept,
                inheritable: 0,
            },
            CapData::default(),
        ];
        check(libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) as i32)?;
        // Core dumps would hold captured packets.
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0))?;
    }
    Ok(())
}

/// Names a user of the system: (uid, gid).
///
/// # Errors
/// `NotFound` if `/etc/passwd` has no such user.
pub(crate) fn user(name: &str) -> io::Result<(u32, u32)> {
    let passwd = std::fs::read_to_string("/etc/passwd")?;
    passwd
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&name))
        .and_then(|fields| Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?)))
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no user {name}")))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
