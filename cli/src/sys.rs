//! Signals, the one thing here that the safe libraries lack: SIGINT, SIGTERM and SIGHUP end a
//! command cleanly instead of killing it.

#![expect(unsafe_code, reason = "sigaction has no safe interface")]

use std::sync::atomic::{AtomicI32, Ordering};

/// Number of the signal that asked us to stop; 0 = none.
static STOP: AtomicI32 = AtomicI32::new(0);

/// From now on SIGINT, SIGTERM and SIGHUP are remembered ([`stop`]) and interrupt a wait.
pub(crate) fn catch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: an all-zero sigaction is valid: no flags (so waits return EINTR), empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = remember as *const () as libc::sighandler_t;
        // SAFETY: `action` is initialised and the handler does one atomic store, which is
        // async-signal-safe. With a valid signal number this cannot fail.
        unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
    }
}

/// The signal that came since the last call, if any.
pub(crate) fn stop() -> Option<i32> {
    // Relaxed: the number is all that is handed over.
    match STOP.load(Ordering::Relaxed) {
        0 => None,
        _ => Some(STOP.swap(0, Ordering::Relaxed)),
    }
}

extern "C" fn remember(signal: libc::c_int) {
    STOP.store(signal, Ordering::Relaxed);
}
