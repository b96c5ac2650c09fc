//! Signals as descriptors, so that a loop hears of them where it waits for everything else.
#![expect(unsafe_code, reason = "signal masks, signalfd, _exit")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// What ends a process in order.
pub const TERMINATION: &[i32] = &[libc::SIGTERM, libc::SIGINT];
/// The terminal is gone; a daemon reads its configuration again.
pub const HANGUP: &[i32] = &[libc::SIGHUP];

/// Blocks these signals for this thread and those it starts later, and returns a descriptor that becomes readable when one
/// comes. It can be read without waiting.
///
/// # Errors
/// The system's.
pub fn descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset and lives across the calls; the descriptor is
    // new and ours.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
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
