//! SIGTERM and SIGINT as a descriptor, so that the control loop ends in order.
#![expect(unsafe_code, reason = "signal masks, signalfd, _exit")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Blocks SIGTERM, SIGINT and SIGHUP for this thread and those it starts later, and returns a
/// descriptor that becomes readable when one comes.
///
/// # Errors
/// The system's.
pub fn termination() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset and lives across the calls; the descriptor is
    // new and ours.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        if libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

/// Ends the process at once, whatever its threads do.
pub fn leave(status: i32) -> ! {
    // SAFETY: a plain call with an integer; nothing of this process runs afterwards.
    unsafe { libc::_exit(status) }
}
