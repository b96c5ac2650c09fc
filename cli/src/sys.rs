//! What the safe libraries lack: SIGINT, SIGTERM and SIGHUP end a command cleanly instead of killing
//! it; and whether standard output was closed when we were started.

#![expect(
    unsafe_code,
    reason = "sigaction has no safe interface, and nothing safe runs before the standard library"
)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// Number of the signal that asked us to stop; 0 = none.
static STOP: AtomicI32 = AtomicI32::new(0);

/// From now on SIGINT, SIGTERM and SIGHUP are remembered ([`stop`]) and interrupt a wait.
pub(crate) fn catch_signals() {
    for signal in SIGNALS {
        // SAFETY: an all-zero sigaction is valid: no flags (so waits return EINTR), empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = remember as *const () as libc::sighandler_t;
        // SAFETY: `action` is initialised and the handler does one atomic store, which is
        // async-signal-safe. With a valid signal number this cannot fail.
        unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
    }
}

/// From now on SIGHUP ends the process at once, for one whose terminal library reads on without end when the terminal is gone.
pub(crate) fn end_with_terminal() {
    // SAFETY: an all-zero sigaction is valid: no flags, empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = libc::SIG_DFL;
    // SAFETY: `action` is initialised; with a valid signal number this cannot fail.
    unsafe { libc::sigaction(libc::SIGHUP, &action, std::ptr::null_mut()) };
}

/// From now on SIGUSR1 is remembered ([`triggered`]), or ignored.
pub(crate) fn catch_trigger(remembered: bool) {
    // SAFETY: an all-zero sigaction is valid: no flags, empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = match remembered {
        true => note_trigger as *const () as libc::sighandler_t,
        false => libc::SIG_IGN,
    };
    // SAFETY: `action` is initialised and the handler does one atomic store, which is
    // async-signal-safe. With a valid signal number this cannot fail.
    unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) };
}

/// Whether SIGUSR1 came since the last call.
pub(crate) fn triggered() -> bool {
    // Relaxed: the fact is all that is handed over.
    TRIGGERED.load(Ordering::Relaxed) && TRIGGERED.swap(false, Ordering::Relaxed)
}

extern "C" fn note_trigger(_: libc::c_int) {
    TRIGGERED.store(true, Ordering::Relaxed);
}

static TRIGGERED: AtomicBool = AtomicBool::new(false);

/// From now on a file that reaches the limit of the process (`ulimit -f`) is an error of the write,
/// and no signal that kills.
pub(crate) fn ignore_long_files() {
    // SAFETY: an all-zero sigaction is valid: no flags, empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = libc::SIG_IGN;
    // SAFETY: `action` is initialised; with a valid signal number this cannot fail.
    unsafe { libc::sigaction(libc::SIGXFSZ, &action, std::ptr::null_mut()) };
}

/// Whether we were started without a standard output (`>&-`). Rust's start puts `/dev/null` in its
/// place, so that all we print would vanish and look as if written.
pub(crate) fn stdout_was_closed() -> bool {
    // Relaxed: written before there was a second thread.
    STDOUT_CLOSED.load(Ordering::Relaxed)
}

static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

// SAFETY: the C library calls what is in this section once, before Rust's start; `look` makes one
// system call and one atomic store.
#[unsafe(link_section = ".init_array")]
#[used]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: fcntl with F_GETFD takes no pointers.
    if unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } < 0 {
        STDOUT_CLOSED.store(true, Ordering::Relaxed);
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

/// From now on these signals do nothing but make the descriptor readable; for a loop that polls.
///
/// # Errors
/// No descriptor can be made.
pub(crate) fn signals_as_fd() -> io::Result<OwnedFd> {
    // SAFETY: an all-zero sigset_t is valid memory for sigemptyset to initialise.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` lives through the calls; the signal numbers are valid; the old mask is not asked
    // for. This runs before the command starts any thread.
    let fd = unsafe {
        libc::sigemptyset(&mut set);
        for signal in SIGNALS {
            libc::sigaddset(&mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

extern "C" fn remember(signal: libc::c_int) {
    STOP.store(signal, Ordering::Relaxed);
}

const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
