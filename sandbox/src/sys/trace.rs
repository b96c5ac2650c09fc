//! A thread that is followed until it has become another program: ptrace(2), by the thread that follows it.
//!
//! Nobody waits for the stops: who waits for children of this process may take them. A stop lasts until it is ended here.
#![expect(unsafe_code, reason = "ptrace(2), which rustix does not have")]

use std::io;
use std::ptr;

/// Why a thread stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It has become another program, of which nothing has run yet.
    Became,
    /// It came out of the kernel, with a signal to handle (0: none).
    Signal(i32),
}

/// Follows a thread from now on. If this process ends, so does the thread's.
///
/// # Errors
/// `ESRCH` if it is gone, `EPERM` if it may not be looked at.
pub(crate) fn seize(thread: u32) -> io::Result<()> {
    let options = libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_EXITKILL;
    // SAFETY: the request takes numbers.
    done(unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, 0, libc::c_long::from(options)) })
}

/// It stops when it leaves the kernel, if it has not become another program before.
pub(crate) fn stop_soon(thread: u32) {
    // SAFETY: the request takes numbers. Whoever is gone need not stop.
    unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0) };
}

/// Why it stands still, if it does.
pub(crate) fn stop_of(thread: u32) -> Option<Stop> {
    // SAFETY: all-zero is a value of this structure, and the kernel writes one.
    let info = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let got = libc::ptrace(
            libc::PTRACE_GETSIGINFO,
            thread,
            ptr::null_mut::<libc::c_void>(),
            &raw mut info,
        );
        match done(got) {
            Ok(()) => info,
            // Stopped by job control.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                return Some(Stop::Signal(0));
            }
            Err(_) => return None,
        }
    };
    Some(match info.si_code >> 8 {
        libc::PTRACE_EVENT_EXEC if info.si_signo == libc::SIGTRAP => Stop::Became,
        libc::PTRACE_EVENT_STOP => Stop::Signal(0),
        _ => Stop::Signal(info.si_signo),
    })
}

/// Ends a stop and follows it no more; it gets this signal (0: none).
pub(crate) fn release(thread: u32, signal: i32) {
    let signal = libc::c_long::from(signal);
    // SAFETY: the request takes numbers. Whoever is gone was released by that.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, 0, signal) };
}

/// The number of the calling thread.
pub(crate) fn own_thread() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .unsigned_abs()
}

fn done(result: libc::c_long) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
