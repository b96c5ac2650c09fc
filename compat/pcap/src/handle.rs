//! Our `pcap_t`.
//!
//! The first word of a handle of ours is the address of a static of this library; that of the real
//! library's is a function of it. So one load and one comparison tell them apart.
//!
//! pcap(3) lets one thread at a time use a handle. Programs do more, and it works with the real
//! library, so it works here:
//!
//! | call                         | from                        | touches                        |
//! |------------------------------|-----------------------------|--------------------------------|
//! | `pcap_breakloop`             | any thread, signal handlers | `break_flag`, the eventfd      |
//! | `pcap_stats`                 | any thread, signal handlers | [`HandleState`] by turns             |
//! | `pcap_inject`                | any thread                  | `sender`, under its lock       |
//! | all others                   | any thread                  | [`HandleState`] by turns             |
//! | `pcap_close` during a call   | any thread, a callback      | `closed`, and the first line's |
//!
//! The last is an error of the program, and must not crash it: the closer sets `closed`, wakes the
//! thread that is inside, and the later of the two frees the state. After a close by
//! another thread the handle itself stays behind, a few hundred bytes without a state, on which
//! every call fails as on a handle that was never activated.
#![expect(unsafe_code, reason = "handles that a C program holds")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vnplug::PortOptions;

use crate::abi::{ERRBUF_SIZE, Pcap};
use crate::activate::Options;
use crate::inject::Sender;
use crate::read::Live;
use crate::real::real;
use crate::stats::Last;
use crate::turns::{Turns, this_thread};

/// See the module's comment.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Handle {
    tag: *const u8,
    /// The loop is to end.
    pub(crate) break_flag: AtomicBool,
    closed: AtomicU8,
    /// Somebody is taking the state apart.
    taken: AtomicBool,
    /// The thread inside a call that may wait or calls back; 0 = none.
    busy: AtomicUsize,
    /// An eventfd that ends a wait.
    break_fd: c_int,
    /// It was activated.
    active: AtomicBool,
    /// Calls of other threads than the one that receives, which a close waits for.
    visitors: AtomicU32,
    error: [AtomicU8; ERRBUF_SIZE],
    /// As the program named the device.
    pub(crate) name: CString,
    /// After the first frame that was sent.
    pub(crate) sender: Mutex<Option<Box<Sender>>>,
    /// By which the daemon knows that the port that receives and the one that sends are one handle's.
    pub(crate) number: u64,
    /// What `pcap_stats` said last.
    pub(crate) last: Last,
    state: Turns<HandleState>,
}

/// What one thread at a time uses.
#[derive(Debug)]
pub(crate) struct HandleState {
    pub(crate) options: Options,
    /// What the operator sees; empty = the library's default.
    pub(crate) label: String,
    /// After activation.
    pub(crate) live: Option<Box<Live>>,
    /// A dead handle of the real library with our link type and snaplen; null until it is needed.
    pub(crate) dead: Pcap,
}

impl Handle {
    /// A handle for the device that the program calls `name`; `None` without descriptors.
    pub(crate) fn create(name: &CStr) -> Option<Pcap> {
        // SAFETY: plain numbers.
        let break_fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if break_fd < 0 {
            return None;
        }
        let handle = Self {
            tag: &raw const TAG,
            break_flag: AtomicBool::new(false),
            closed: AtomicU8::new(OPEN),
            taken: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            break_fd,
            active: AtomicBool::new(false),
            visitors: AtomicU32::new(0),
            error: [const { AtomicU8::new(0) }; ERRBUF_SIZE],
            name: name.to_owned(),
            number: PortOptions::fresh_handle(),
            sender: Mutex::new(None),
            last: Last::default(),
            state: Turns::new(HandleState {
                options: Options::default(),
                label: String::new(),
                live: None,
                dead: ptr::null_mut(),
            }),
        };
        Some(Box::into_raw(Box::new(handle)).cast())
    }

    /// The handle behind a program's pointer; `None`: the real library's, or null.
    ///
    /// # Safety
    /// `p` is null or an open handle of this or the real library, which stays open for `'a`.
    #[inline]
    pub(crate) unsafe fn of<'a>(p: Pcap) -> Option<&'a Self> {
        // SAFETY: handles of both libraries are larger than a word.
        if p.is_null() || unsafe { (*p).first } != &raw const TAG {
            return None;
        }
        // SAFETY: only `create` makes handles with this first word.
        Some(unsafe { &*p.cast::<Self>() })
    }

    /// The state, for one short look. No code of the program's runs in `look`. `None`: a signal
    /// handler interrupted a look and has come back.
    #[inline]
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut HandleState) -> T) -> Option<T> {
        self.state.with(look)
    }

    /// The activated part of the state; `None` before, and as [`with`](Self::with).
    #[inline]
    pub(crate) fn live<T>(&self, look: impl FnOnce(&mut Live) -> T) -> Option<T> {
        self.with(|state| state.live.as_deref_mut().map(look))?
    }

    /// The same for the thread that receives, if `entered` it is.
    #[inline]
    pub(crate) fn live_as<T>(&self, entered: bool, look: impl FnOnce(&mut Live) -> T) -> Option<T> {
        if entered {
            let look = |state: &mut HandleState| state.live.as_deref_mut().map(look);
            return self.state.as_reader(look)?;
        }
        self.live(look)
    }

    /// Whether it was activated.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    pub(crate) fn set_active(&self) {
        self.active.store(true, Ordering::Release);
    }

    /// Begins a call that may last and is not one of the thread that receives.
    pub(crate) fn visit(&self) -> Visit<'_> {
        self.visitors.fetch_add(1, Ordering::AcqRel);
        Visit(self)
    }

    /// Remembers the text of an error, cut to what programs expect.
    pub(crate) fn set_error(&self, text: &str) {
        let bytes = text.bytes().filter(|&byte| byte != 0);
        let bytes = bytes.take(ERRBUF_SIZE - 1).chain([0]);
        for (place, byte) in self.error.iter().zip(bytes) {
            place.store(byte, Ordering::Relaxed);
        }
    }

    /// Where the text of the last error is; it stays for the handle's life.
    pub(crate) fn error(&self) -> *mut c_char {
        self.error.as_ptr().cast_mut().cast()
    }

    /// The text of the last error.
    pub(crate) fn error_text(&self) -> String {
        // SAFETY: its last byte is always 0.
        let text = unsafe { CStr::from_ptr(self.error()) };
        text.to_string_lossy().into_owned()
    }

    /// Ends a loop or a wait, now or the next one. For signal handlers too.
    pub(crate) fn break_loop(&self) {
        // Release: pairs with the Acquire in `take_break`.
        self.break_flag.store(true, Ordering::Release);
        self.wake();
    }

    /// True once for a call of `break_loop`.
    #[inline]
    pub(crate) fn take_break(&self) -> bool {
        if !self.break_flag.load(Ordering::Relaxed) {
            return false;
        }
        let mut count = 0_u64;
        // SAFETY: an eventfd of ours and room for its count. Nothing to read is fine.
        unsafe { libc::read(self.break_fd, (&raw mut count).cast(), 8) };
        // Acquire: pairs with the Release in `break_loop`.
        self.break_flag.swap(false, Ordering::Acquire)
    }

    /// Waits until `fd` is readable, the loop is to end, a signal was handled, or `until`. The thread
    /// may be cancelled here and only here, so nothing has to be cleaned up.
    pub(crate) fn wait(&self, fd: c_int, until: Option<Instant>) {
        let poll = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut fds = [poll(fd), poll(self.break_fd)];
        let time = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            libc::timespec {
                tv_sec: left.as_secs().min(86_400) as libc::time_t,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
        let me = self.busy.swap(PARKED, Ordering::AcqRel);
        // SAFETY: two entries, a time or none, and no signal mask.
        unsafe { ppoll(fds.as_mut_ptr(), 2, time, ptr::null()) };
        if fds[1].revents != 0 && !self.break_flag.load(Ordering::Relaxed) {
            // An old ring of the bell, whose flag was taken before it was heard.
            let mut count = 0_u64;
            // SAFETY: as in `take_break`.
            unsafe { libc::read(self.break_fd, (&raw mut count).cast(), 8) };
        }
        self.busy.store(me, Ordering::Relaxed);
    }

    /// The calling thread begins a call that may wait or calls back. Returns what `leave` wants.
    #[inline]
    pub(crate) fn enter(&self) -> Entry {
        let before = self.busy.load(Ordering::Relaxed);
        self.busy.store(this_thread(), Ordering::Relaxed);
        let reads = self.state.enter();
        Entry { before, reads }
    }

    /// True after `pcap_close`, to a thread that is still inside.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) != OPEN
    }

    /// The end of what `enter` began.
    ///
    /// # Safety
    /// `p` is a handle of ours, not used by the caller any more.
    #[inline]
    pub(crate) unsafe fn leave(p: Pcap, entry: Entry) {
        let Entry { before, reads } = entry;
        // SAFETY: the caller's promise.
        let handle = unsafe { &*p.cast::<Self>() };
        if reads {
            handle.state.leave();
        }
        // Acquire: pairs with the Release in `close`.
        if before == 0 && handle.closed.load(Ordering::Acquire) != OPEN {
            // SAFETY: this thread was the last inside.
            unsafe { Self::dismantle(p) };
            return;
        }
        // Release: pairs with the Acquire in `close`.
        handle.busy.store(before, Ordering::Release);
    }

    /// Closes a handle; see the module's comment for one that is in use.
    ///
    /// # Safety
    /// `p` is an open handle of ours.
    pub(crate) unsafe fn close(p: Pcap) {
        // SAFETY: the caller's promise.
        let handle = unsafe { &*p.cast::<Self>() };
        let me = this_thread();
        let inside = handle.busy.load(Ordering::Acquire);
        if inside == 0 {
            handle.closed.store(BY_ITS_THREAD, Ordering::Relaxed);
            // SAFETY: nobody is inside.
            return unsafe { Self::dismantle(p) };
        }
        let by = if inside == me {
            BY_ITS_THREAD
        } else {
            BY_ANOTHER
        };
        // Release: pairs with the Acquire in `leave`.
        handle.closed.store(by, Ordering::Release);
        handle.break_loop();
        if by == BY_ITS_THREAD {
            // From a callback: the call it came from takes the state apart.
            return;
        }
        // NB: `leave` looks at `closed` and then clears `busy`, without a fence. If it looked just
        // before our store, we see `busy` cleared within the time a store takes to become visible,
        // far less than this limit; if it did not, it takes the state apart itself.
        let until = Instant::now() + CLOSE_LIMIT;
        while Instant::now() < until && !handle.taken.load(Ordering::Acquire) {
            if handle.busy.load(Ordering::Acquire) == 0 {
                // SAFETY: nobody is inside.
                return unsafe { Self::dismantle(p) };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if handle.busy.load(Ordering::Acquire) == PARKED {
            // It was woken and did not come: it was cancelled.
            // SAFETY: nobody is inside.
            unsafe { Self::dismantle(p) };
        }
    }

    /// Closes the port and all that belongs to it, once.
    ///
    /// # Safety
    /// `p` is a handle of ours that is closed, and no thread is inside.
    unsafe fn dismantle(p: Pcap) {
        // SAFETY: the caller's promise; the handle is freed below at the earliest.
        let handle = unsafe { &*p.cast::<Self>() };
        // AcqRel: of two that come here, one goes on, and sees all that was done before.
        if handle.taken.swap(true, Ordering::AcqRel) {
            return;
        }
        handle.active.store(false, Ordering::Release);
        let parts = handle.with(|state| {
            let dead = std::mem::replace(&mut state.dead, ptr::null_mut());
            (state.live.take(), dead)
        });
        let (live, dead) = parts.unwrap_or((None, ptr::null_mut()));
        drop(live);
        drop(lock(&handle.sender).take());
        if !dead.is_null() {
            // SAFETY: it came from the real library and is not used again.
            unsafe { (real().pcap_close)(dead) };
        }
        let until = Instant::now() + CLOSE_LIMIT;
        while handle.visitors.load(Ordering::Acquire) != 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let visited = handle.visitors.load(Ordering::Acquire) != 0;
        if visited || handle.closed.load(Ordering::Acquire) == BY_ANOTHER {
            handle.set_error("the handle was closed by another thread");
            handle.busy.store(0, Ordering::Release);
            return;
        }
        // SAFETY: the handle came from Box::into_raw in `create`; its one thread gives it back.
        let handle = unsafe { Box::from_raw(p.cast::<Self>()) };
        // SAFETY: ours, and closed once.
        unsafe { libc::close(handle.break_fd) };
    }

    /// Rings the eventfd. Safe in signal handlers, where errno must not change.
    fn wake(&self) {
        // SAFETY: errno is the thread's own; the eventfd is ours. A full one is rung enough.
        unsafe {
            let errno = libc::__errno_location();
            let kept = *errno;
            libc::write(self.break_fd, (&raw const ONE).cast(), 8);
            *errno = kept;
        }
    }
}

/// Writes `text`, cut to the buffer and ended with 0.
pub(crate) fn write_text(buffer: &mut [c_char], text: &[u8]) {
    let Some((last, rest)) = buffer.split_last_mut() else {
        return;
    };
    *last = 0;
    let text = text.iter().filter(|&&byte| byte != 0);
    let mut len = 0;
    for (place, byte) in rest.iter_mut().zip(text) {
        *place = *byte as c_char;
        len += 1;
    }
    if let Some(end) = rest.get_mut(len) {
        *end = 0;
    }
}

/// What [`Handle::enter`] found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    /// Who was inside before.
    before: usize,
    /// This thread is the one that receives.
    pub(crate) reads: bool,
}

/// See [`Handle::visit`].
#[derive(Debug)]
pub(crate) struct Visit<'a>(&'a Handle);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.0.visitors.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A panic in a call leaves a port as it was between two of its calls.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C-unwind" {
    // A cancellation point (pthreads(7)): it may unwind.
    fn ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        time: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// In `busy`: the thread inside waits. No thread has this number.
const PARKED: usize = usize::MAX;

/// Its address marks our handles. Not a constant, which could share its address with another.
static TAG: u8 = 0x76;
static ONE: u64 = 1;

const OPEN: u8 = 0;
const BY_ITS_THREAD: u8 = 1;
const BY_ANOTHER: u8 = 2;

/// Longest time a close waits for a thread that is inside.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);
