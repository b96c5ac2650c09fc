//! Giving up privileges after the start.
//!
//! | stage | should | must not |
//! |---|---|---|
//! | start | open the configured sources, make directories, raise limits | serve anyone |
//! | [`drop_all_but`] | keep `CAP_NET_RAW` (an interface that comes back is opened again), for AF_XDP `CAP_IPC_LOCK` (packet memory is locked memory), for early drop `CAP_BPF` | gain anything by exec, change owner, mount, trace |
//! | [`keep_only`] | `vnplug-early`: `CAP_BPF`, to have the kernel verify filters, and for those of AF_XDP sources with `early=yes` `CAP_NET_ADMIN`; `vnplug-programs`: both, `CAP_NET_RAW` and `CAP_IPC_LOCK`, to load operators' programs and to open AF_XDP sources that are added; all others: the rest | load programs anywhere else |
//! | [`keep_only`] | `vnplug-netns`, if a source names a network namespace: `CAP_SYS_ADMIN`, to have short-lived threads enter it | do anything but start them |
#![expect(
    unsafe_code,
    reason = "capset and prctl have no safe wrapper that sets all sets at once"
)]

use std::io;

/// The privileges that the daemon may keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Keep {
    /// `CAP_NET_ADMIN`: loads XDP programs.
    NetAdmin = 12,
    /// `CAP_NET_RAW`: packet and XDP sockets.
    NetRaw = 13,
    /// `CAP_IPC_LOCK`: locked memory without limit.
    IpcLock = 14,
    /// `CAP_SYS_ADMIN`: enters other network namespaces, and does much else.
    SysAdmin = 21,
    /// `CAP_BPF`: loads filters into the kernel (Linux ≥ 5.8).
    Bpf = 39,
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
pub fn drop_all_but(keep: &[Keep], user: Option<(u32, u32)>) -> io::Result<()> {
    // SAFETY: plain system calls with integer arguments, and capset with two structures that live
    // across the call.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        // The bounding set can only be cut with CAP_SETPCAP; without it there is nothing to cut.
        for capability in (0..64_u32).filter(|it| !keep.iter().any(|keep| *keep as u32 == *it)) {
            let capability = libc::c_ulong::from(capability);
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        if let Some((uid, gid)) = user {
            check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
            check(libc::setgroups(0, std::ptr::null()))?;
            check(libc::setresgid(gid, gid, gid))?;
            check(libc::setresuid(uid, uid, uid))?;
        }
    }
    keep_only(keep)?;
    // SAFETY: a plain system call with integer arguments.
    unsafe {
        // Core dumps would hold captured packets.
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0))
    }
}

/// Keeps none but these capabilities, for this thread and every thread it starts later; one that is
/// not there is not gained.
///
/// # Errors
/// The system's.
pub fn keep_only(keep: &[Keep]) -> io::Result<()> {
    // SAFETY: capget and capset with two structures that live across the calls.
    unsafe {
        let header = CapHeader {
            version: CAPABILITY_VERSION_3,
            pid: 0,
        };
        let mut current = [CapData::default(); 2];
        check(libc::syscall(libc::SYS_capget, &raw const header, current.as_mut_ptr()) as i32)?;
        let mut data = [CapData::default(); 2];
        for &capability in keep {
            data[capability as usize / 32].permitted |= 1 << (capability as u32 % 32);
        }
        for (data, current) in data.iter_mut().zip(current) {
            data.permitted &= current.permitted;
            data.effective = data.permitted;
        }
        check(libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) as i32)
    }
}

/// A user of the system by name: (uid, gid).
///
/// # Errors
/// `NotFound` if `/etc/passwd` has no such user.
pub fn user(name: &str) -> io::Result<(u32, u32)> {
    let found = line("/etc/passwd", |fields| fields.first() == Some(&name))?;
    found
        .and_then(|fields| Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?)))
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no user {name}")))
}

/// A group of the system by name.
///
/// # Errors
/// `NotFound` if `/etc/group` has no such group.
pub fn group(name: &str) -> io::Result<u32> {
    let found = line("/etc/group", |fields| fields.first() == Some(&name))?;
    found
        .and_then(|fields| fields.get(2)?.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no group {name:?}")))
}

/// A user's name, or the number if the system has no name for it.
pub fn user_name(uid: u32) -> String {
    let is_it = |fields: &[&str]| fields.get(2).is_some_and(|it| it.parse() == Ok(uid));
    let found = line("/etc/passwd", is_it).ok().flatten();
    let name = found.and_then(|fields| fields.into_iter().next());
    name.unwrap_or_else(|| uid.to_string())
}

/// The first line of such a file that is wanted.
fn line(path: &str, wanted: impl Fn(&[&str]) -> bool) -> io::Result<Option<Vec<String>>> {
    let text = std::fs::read_to_string(path)?;
    let mut lines = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let found = lines.find(|fields| wanted(fields));
    Ok(found.map(|fields| fields.into_iter().map(str::to_owned).collect()))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
