//! Another process' AF_XDP sockets, and how they are set.
#![expect(unsafe_code, reason = "options of sockets that no library names")]

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Copies of the AF_XDP sockets that a process holds.
pub(crate) fn of(pid: u32) -> Vec<OwnedFd> {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("pidfd_open");
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    open.filter_map(|entry| {
        let number = entry.ok()?.file_name().into_string().ok()?.parse().ok()?;
        pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()
    })
    .filter(|fd| sockopt::socket_domain(fd) == Ok(AddressFamily::from_raw(AF_XDP)))
    .collect()
}

/// Whether it prefers polling to interrupts, and for how many microseconds it polls at most.
pub(crate) fn busy_poll(socket: &OwnedFd) -> (c_int, c_int) {
    let option = |name| {
        let (mut value, mut len): (c_int, _) = (-1, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: these options write one integer, which has room.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                (&raw mut value).cast(),
                &raw mut len,
            )
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        value
    };
    (option(SO_PREFER_BUSY_POLL), option(libc::SO_BUSY_POLL))
}

/// linux/socket.h
const AF_XDP: u16 = 44;
/// asm-generic/socket.h
const SO_PREFER_BUSY_POLL: c_int = 69;
