//! A capture by libpcap, whosever it is: what a counter needs of it.
#![expect(unsafe_code, reason = "calls into libpcap through dlopen")]

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::libpcap::{Compile, Library, Program};
use crate::row::Result;

/// The functions that a counter needs.
pub(super) struct Functions {
    create: Create,
    set_snaplen: SetInt,
    set_promisc: SetInt,
    set_timeout: SetInt,
    set_buffer_size: SetInt,
    activate: Activate,
    dispatch: Dispatch,
    last_error: LastError,
    close: Close,
    compile: Compile,
    set_filter: SetFilter,
    breakloop: Close,
}

type Create = unsafe extern "C" fn(*const c_char, *mut c_char) -> *mut c_void;
type SetInt = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
type Activate = unsafe extern "C" fn(*mut c_void) -> c_int;
type Dispatch = unsafe extern "C" fn(*mut c_void, c_int, Callback, *mut c_uchar) -> c_int;
type LastError = unsafe extern "C" fn(*mut c_void) -> *const c_char;
type Close = unsafe extern "C" fn(*mut c_void);
type SetFilter = unsafe extern "C" fn(*mut c_void, *mut Program) -> c_int;

type Callback = extern "C" fn(*mut c_uchar, *const c_void, *const c_uchar);

impl Functions {
    /// Finds them.
    pub(super) fn load() -> Result<Self> {
        let library = Library::load()?;
        // SAFETY: the types are those of pcap.h 1.10 for these names.
        unsafe {
            Ok(Self {
                create: library.function(c"pcap_create")?,
                set_snaplen: library.function(c"pcap_set_snaplen")?,
                set_promisc: library.function(c"pcap_set_promisc")?,
                set_timeout: library.function(c"pcap_set_timeout")?,
                set_buffer_size: library.function(c"pcap_set_buffer_size")?,
                activate: library.function(c"pcap_activate")?,
                dispatch: library.function(c"pcap_dispatch")?,
                last_error: library.function(c"pcap_geterr")?,
                close: library.function(c"pcap_close")?,
                compile: library.function(c"pcap_compile")?,
                set_filter: library.function(c"pcap_setfilter")?,
                breakloop: library.function(c"pcap_breakloop")?,
            })
        }
    }

    /// Captures from a device: whole packets, promiscuous, 100 ms, [`BUFFER_BYTES`].
    pub(super) fn open(self, device: &str, filter: &str) -> Result<Capture> {
        let name = CString::new(device)?;
        let mut error = [0; 256];
        // SAFETY: a NUL-terminated name and PCAP_ERRBUF_SIZE bytes.
        let handle = unsafe { (self.create)(name.as_ptr(), error.as_mut_ptr()) };
        let handle = NonNull::new(handle).ok_or_else(|| format!("cannot capture from {device}"))?;
        let capture = Capture {
            library: self,
            handle,
        };
        let (library, pcap) = (&capture.library, capture.handle.as_ptr());
        // SAFETY: `pcap` is open until the capture is dropped.
        let status = unsafe {
            (library.set_snaplen)(pcap, 262_144);
            (library.set_promisc)(pcap, 1);
            (library.set_timeout)(pcap, READ_TIMEOUT.as_millis() as c_int);
            (library.set_buffer_size)(pcap, BUFFER_BYTES);
            (library.activate)(pcap)
        };
        if status < 0 {
            return Err(capture.error());
        }
        if !filter.is_empty() {
            let text = CString::new(filter)?;
            let mut program = Program::EMPTY;
            // SAFETY: all of them live through both calls. The program is not freed: the process
            // needs it to its end.
            let failed = unsafe {
                (library.compile)(pcap, &raw mut program, text.as_ptr(), 1, u32::MAX) < 0
                    || (library.set_filter)(pcap, &raw mut program) < 0
            };
            if failed {
                return Err(capture.error());
            }
        }
        capture.break_on_signals();
        Ok(capture)
    }
}

/// Takes note of SIGINT and SIGUSR1, which also end a capture's call that waits.
pub(super) fn catch_signals() {
    extern "C" fn interrupted(signal: c_int) {
        if signal == libc::SIGUSR1 {
            // Relaxed: read by the same thread, after the signal.
            ASKED.store(true, Ordering::Relaxed);
        } else {
            ENDED.store(true, Ordering::Relaxed);
        }
        if let Some((breakloop, handle)) = BREAK.get() {
            // SAFETY: the process ends soon after the handle is closed; pcap_breakloop may be
            // called from a signal handler.
            unsafe { breakloop(*handle as *mut c_void) };
        }
    }
    for signal in [libc::SIGINT, libc::SIGUSR1] {
        // SAFETY: the handler only does what signal-safety(7) and pcap_breakloop(3PCAP) allow;
        // no SA_RESTART, so that it ends a waiting call.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = interrupted as extern "C" fn(c_int) as usize;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Whether somebody has asked how far it is (SIGUSR1) since the last look.
pub(super) fn asked() -> bool {
    ASKED.swap(false, Ordering::Relaxed)
}

/// Whether SIGINT came.
pub(super) fn ended() -> bool {
    ENDED.load(Ordering::Relaxed)
}

/// An open capture.
pub(super) struct Capture {
    library: Functions,
    handle: NonNull<c_void>,
}

impl Capture {
    /// Makes SIGINT and SIGUSR1 end a call of [`dispatch`](Self::dispatch).
    fn break_on_signals(&self) {
        // A second capture would keep the first one's; the process has one.
        let _ = BREAK.set((self.library.breakloop, self.handle.as_ptr() as usize));
        catch_signals();
    }

    /// Waits for packets or for a signal, and says how many the callback got.
    pub(super) fn dispatch(&mut self) -> Result<u64> {
        extern "C" fn count(user: *mut c_uchar, _: *const c_void, _: *const c_uchar) {
            // SAFETY: `user` is the counter below, which nobody else touches meanwhile.
            unsafe { *user.cast::<u64>() += 1 };
        }
        let mut packets = 0_u64;
        let user = (&raw mut packets).cast();
        // SAFETY: the handle is open; `count` and `user` fit together and outlive the call.
        let status = unsafe { (self.library.dispatch)(self.handle.as_ptr(), -1, count, user) };
        match status {
            0.. | PCAP_ERROR_BREAK => Ok(packets),
            _ => Err(self.error()),
        }
    }

    fn error(&self) -> crate::row::Error {
        // SAFETY: the handle is open; the text is NUL-terminated and valid until the next call.
        let text = unsafe { CStr::from_ptr((self.library.last_error)(self.handle.as_ptr())) };
        text.to_string_lossy().into_owned().into()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and this is its end.
        unsafe { (self.library.close)(self.handle.as_ptr()) };
    }
}

/// A signal came that asks.
static ASKED: AtomicBool = AtomicBool::new(false);
/// A signal came that ends.
static ENDED: AtomicBool = AtomicBool::new(false);
/// What the signal handler calls, and with what.
static BREAK: OnceLock<(Close, usize)> = OnceLock::new();
/// pcap.h's: the loop ended because of pcap_breakloop.
const PCAP_ERROR_BREAK: c_int = -2;
/// How long the last packets may wait for others.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// The kernel's or the daemon's buffer for one capture.
pub(super) const BUFFER_BYTES: c_int = 16 << 20;
