//! The exported functions that know our handles. Each asks whose the handle is; one of the real
//! library's goes there, untouched.
//!
//! No panic crosses into C: it becomes `PCAP_ERROR`.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use libc::FILE;

use crate::abi::{
    ERROR, ERROR_NOT_ACTIVATED, Handler, Interface, Opaque, PacketHeader, Pcap, PcapStat, Program,
};
use crate::activate::{MAX_SNAPLEN, activate, set, set_precision, set_tstamp_type};
use crate::devices::{self, device_of, tell};
use crate::filter::{self, fail, missing};
use crate::handle::{Handle, State};
use crate::inject::inject;
use crate::read::{self, Live, Progress, Turn, Until};
use crate::real::{is_missing, real};

/// Functions whose call on our handle is one expression.
macro_rules! export {
    ($(fn $name:ident($p:ident: Pcap $(, $arg:ident: $type:ty)*) $(-> $result:ty)? = |$handle:ident| $ours:expr, $bad:expr;)*) => {$(
        /// See its manual page.
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($p: Pcap $(, $arg: $type)*) $(-> $result)? {
            // SAFETY: the caller's promise.
            match unsafe { Handle::of($p) } {
                Some($handle) => guarded($bad, || $ours),
                // SAFETY: the caller's promise is passed on.
                None => unsafe { (real().$name)($p $(, $arg)*) },
            }
        }
    )*};
}

export! {
    fn pcap_set_snaplen(p: Pcap, snaplen: c_int) -> c_int =
        |handle| set(handle, |options| options.snaplen = snaplen), ERROR;
    fn pcap_set_promisc(p: Pcap, on: c_int) -> c_int =
        |handle| { let _ = on; set(handle, |_| ()) }, ERROR;
    fn pcap_set_rfmon(p: Pcap, on: c_int) -> c_int =
        |handle| set(handle, |options| options.rfmon = on != 0), ERROR;
    fn pcap_set_timeout(p: Pcap, timeout_ms: c_int) -> c_int =
        |handle| set(handle, |options| options.timeout_ms = timeout_ms), ERROR;
    fn pcap_set_immediate_mode(p: Pcap, on: c_int) -> c_int =
        |handle| set(handle, |options| options.immediate = on != 0), ERROR;
    fn pcap_set_buffer_size(p: Pcap, bytes: c_int) -> c_int =
        |handle| set(handle, |options| if bytes > 0 { options.buffer_bytes = bytes }), ERROR;
    fn pcap_set_protocol_linux(p: Pcap, protocol: c_int) -> c_int =
        |handle| set(handle, |options| options.protocol = protocol), ERROR;
    fn pcap_set_tstamp_type(p: Pcap, kind: c_int) -> c_int =
        |handle| set_tstamp_type(handle, kind), ERROR;
    fn pcap_set_tstamp_precision(p: Pcap, precision: c_int) -> c_int =
        |handle| set_precision(handle, precision), ERROR;
    fn pcap_get_tstamp_precision(p: Pcap) -> c_int =
        |handle| c_int::from(handle.with(|state| state.options.nanoseconds)), ERROR;
    fn pcap_can_set_rfmon(p: Pcap) -> c_int = |handle| { let _ = handle; 0 }, ERROR;
    fn pcap_activate(p: Pcap) -> c_int = |handle| activate(handle), ERROR;

    fn pcap_breakloop(p: Pcap) = |handle| handle.break_loop(), ();
    fn pcap_geterr(p: Pcap) -> *mut c_char = |handle| handle.error(), c"".as_ptr().cast_mut();
    fn pcap_fileno(p: Pcap) -> c_int = |handle| read::selectable_fd(handle).unwrap_or(-1), -1;
    fn pcap_get_selectable_fd(p: Pcap) -> c_int =
        |handle| read::selectable_fd(handle).unwrap_or(-1), -1;
    fn pcap_get_required_select_timeout(p: Pcap) -> *const libc::timeval =
        |handle| { let _ = handle; ptr::null() }, ptr::null();
    fn pcap_file(p: Pcap) -> *mut FILE = |handle| { let _ = handle; ptr::null_mut() },
        ptr::null_mut();

    fn pcap_datalink(p: Pcap) -> c_int = |handle| activated(handle, link_type), ERROR;
    // The bits that a file's header has beside the link type; there are none.
    fn pcap_datalink_ext(p: Pcap) -> c_int = |handle| activated(handle, |_| 0), ERROR;
    fn pcap_snapshot(p: Pcap) -> c_int = |handle| activated(handle, |live| live.snaplen), ERROR;
    fn pcap_is_swapped(p: Pcap) -> c_int = |handle| activated(handle, |_| 0), ERROR;
    fn pcap_major_version(p: Pcap) -> c_int = |handle| activated(handle, |_| 0), ERROR;
    fn pcap_minor_version(p: Pcap) -> c_int = |handle| activated(handle, |_| 0), ERROR;
    fn pcap_bufsize(p: Pcap) -> c_int = |handle| activated(handle, |live| {
        c_int::try_from(live.port.ring_bytes()).unwrap_or(c_int::MAX)
    }), ERROR;

    fn pcap_list_datalinks(p: Pcap, list: *mut *mut c_int) -> c_int =
        |handle| match activated(handle, link_type) {
            // SAFETY: the caller's promise about `list`.
            kind if kind >= 0 => unsafe { give_list(handle, list, kind) },
            status => status,
        }, ERROR;
    fn pcap_set_datalink(p: Pcap, link_type: c_int) -> c_int =
        |handle| set_datalink(handle, link_type), ERROR;
    fn pcap_list_tstamp_types(p: Pcap, list: *mut *mut c_int) -> c_int =
        // SAFETY: the caller's promise about `list`.
        |handle| unsafe { give_list(handle, list, crate::abi::TSTAMP_HOST) }, ERROR;

    fn pcap_setfilter(p: Pcap, program: *mut Program) -> c_int =
        // SAFETY: the caller's promise about `program`.
        |handle| unsafe { filter::set(handle, program) }, ERROR;
    fn pcap_compile(p: Pcap, program: *mut Program, text: *const c_char, optimize: c_int, netmask: u32) -> c_int =
        |handle| {
            let snaplen = if is_missing() { handle.live(|live| live.snaplen) } else { None };
            // SAFETY: the caller's promises.
            if snaplen.is_some_and(|bytes| unsafe { filter::compile_nothing(program, text, bytes) }) {
                return 0;
            }
            with_dead(handle, "pcap_compile", ERROR, |dead| {
                // SAFETY: the caller's promises, for a handle of the real library.
                unsafe { (real().pcap_compile)(dead, program, text, optimize, netmask) }
            })
        }, ERROR;
    fn pcap_dump_open(p: Pcap, name: *const c_char) -> *mut Opaque =
        |handle| with_dead(handle, "pcap_dump_open", ptr::null_mut(), |dead| {
            // SAFETY: as for `pcap_compile`.
            unsafe { (real().pcap_dump_open)(dead, name) }
        }), ptr::null_mut();
    fn pcap_dump_open_append(p: Pcap, name: *const c_char) -> *mut Opaque =
        |handle| with_dead(handle, "pcap_dump_open_append", ptr::null_mut(), |dead| {
            // SAFETY: as for `pcap_compile`.
            unsafe { (real().pcap_dump_open_append)(dead, name) }
        }), ptr::null_mut();
    fn pcap_dump_fopen(p: Pcap, file: *mut FILE) -> *mut Opaque =
        |handle| with_dead(handle, "pcap_dump_fopen", ptr::null_mut(), |dead| {
            // SAFETY: as for `pcap_compile`.
            unsafe { (real().pcap_dump_fopen)(dead, file) }
        }), ptr::null_mut();

    fn pcap_inject(p: Pcap, bytes: *const c_void, len: usize) -> c_int =
        |handle| {
            // SAFETY: the caller's promise: `len` bytes.
            match unsafe { transmit(handle, bytes.cast(), len) } {
                0 => c_int::try_from(len).unwrap_or(c_int::MAX),
                status => status,
            }
        }, ERROR;
    fn pcap_sendpacket(p: Pcap, bytes: *const c_uchar, len: c_int) -> c_int =
        // SAFETY: the caller's promise: `len` bytes.
        |handle| unsafe { transmit(handle, bytes, usize::try_from(len).unwrap_or(0)) }, ERROR;

    fn pcap_perror(p: Pcap, prefix: *const c_char) = |handle| {
        // SAFETY: the caller's promise: a string that ends with 0.
        let prefix = if prefix.is_null() { c"" } else { unsafe { CStr::from_ptr(prefix) } };
        eprintln!("{}: {}", prefix.to_string_lossy(), handle.error_text());
    }, ();
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_create(device: *const c_char, errbuf: *mut c_char) -> Pcap {
    // SAFETY: the caller's promise.
    match unsafe { our_device(device) } {
        Some(name) => Handle::create(name).unwrap_or_else(|| {
            let text = std::io::Error::last_os_error().to_string();
            // SAFETY: the caller's promise.
            unsafe { tell(errbuf, &text) };
            ptr::null_mut()
        }),
        // SAFETY: the caller's promise is passed on.
        None => unsafe { (real().pcap_create)(device, errbuf) },
    }
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_open_live(
    device: *const c_char,
    snaplen: c_int,
    promisc: c_int,
    timeout_ms: c_int,
    errbuf: *mut c_char,
) -> Pcap {
    // SAFETY: the caller's promise.
    let Some(name) = (unsafe { our_device(device) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_open_live)(device, snaplen, promisc, timeout_ms, errbuf) };
    };
    // SAFETY: the caller's promise; the new handle is ours, and closed once if it fails.
    unsafe {
        let p = pcap_create(device, errbuf);
        let Some(handle) = Handle::of(p) else {
            return p;
        };
        set(handle, |options| {
            options.snaplen = snaplen;
            options.timeout_ms = timeout_ms;
        });
        let status = guarded(ERROR, || activate(handle));
        if status >= 0 {
            return p;
        }
        let (name, text) = (name.to_string_lossy(), handle.error_text());
        if status == ERROR || is_missing() {
            tell(errbuf, &format!("{name}: {text}"));
        } else {
            let status = CStr::from_ptr((real().pcap_statustostr)(status)).to_string_lossy();
            tell(errbuf, &format!("{name}: {status} ({text})"));
        }
        Handle::close(p);
        ptr::null_mut()
    }
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_close(p: Pcap) {
    // SAFETY: the caller's promise.
    match unsafe { Handle::of(p) } {
        // SAFETY: an open handle of ours.
        Some(_) => guarded((), || unsafe { Handle::close(p) }),
        // SAFETY: the caller's promise is passed on.
        None => unsafe { (real().pcap_close)(p) },
    }
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pcap_next_ex(
    p: Pcap,
    header: *mut *mut PacketHeader,
    bytes: *mut *const c_uchar,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { Handle::of(p) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_next_ex)(p, header, bytes) };
    };
    let before = handle.enter();
    let status = match one(handle) {
        Ok(lent) => {
            // SAFETY: both may be written by the caller's promise. The header stays with the handle.
            unsafe {
                header.write(lent.header);
                bytes.write(lent.bytes);
            }
            1
        }
        Err(status) => status,
    };
    // SAFETY: our handle, not used here any more.
    unsafe { Handle::leave(p, before) };
    status
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pcap_next(
    p: Pcap,
    header: *mut PacketHeader,
) -> *const c_uchar {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { Handle::of(p) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_next)(p, header) };
    };
    let before = handle.enter();
    let bytes = match one(handle) {
        Ok(lent) => {
            // SAFETY: may be written by the caller's promise; the handle's header is there until
            // it is left.
            unsafe { header.write(*lent.header) };
            lent.bytes
        }
        Err(_) => ptr::null(),
    };
    // SAFETY: our handle, not used here any more.
    unsafe { Handle::leave(p, before) };
    bytes
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pcap_dispatch(
    p: Pcap,
    count: c_int,
    handler: Handler,
    user: *mut c_uchar,
) -> c_int {
    // SAFETY: the caller's promises are passed on.
    unsafe {
        match Handle::of(p) {
            Some(handle) => many(p, handle, count, Until::OneBuffer, handler, user),
            None => (real().pcap_dispatch)(p, count, handler, user),
        }
    }
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pcap_loop(
    p: Pcap,
    count: c_int,
    handler: Handler,
    user: *mut c_uchar,
) -> c_int {
    // SAFETY: the caller's promises are passed on.
    unsafe {
        match Handle::of(p) {
            Some(handle) => many(p, handle, count, Until::Count, handler, user),
            None => (real().pcap_loop)(p, count, handler, user),
        }
    }
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_setnonblock(p: Pcap, on: c_int, errbuf: *mut c_char) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { Handle::of(p) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_setnonblock)(p, on, errbuf) };
    };
    guarded(ERROR, || {
        read::set_nonblock(handle, on != 0);
        0
    })
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_getnonblock(p: Pcap, errbuf: *mut c_char) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { Handle::of(p) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_getnonblock)(p, errbuf) };
    };
    let status = guarded(ERROR, || {
        activated(handle, |live| c_int::from(live.nonblock))
    });
    if status < 0 {
        // SAFETY: the caller's promise.
        unsafe { tell(errbuf, &handle.error_text()) };
    }
    status
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_stats(p: Pcap, stats: *mut PcapStat) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { Handle::of(p) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_stats)(p, stats) };
    };
    guarded(ERROR, || {
        activated(handle, |live| {
            let Live { port, base, .. } = live;
            // SAFETY: may be written by the caller's promise.
            unsafe { stats.write(base.stats(port)) };
            0
        })
    })
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_setdirection(p: Pcap, direction: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { Handle::of(p) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_setdirection)(p, direction) };
    };
    guarded(ERROR, || read::set_direction(handle, direction))
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_findalldevs(
    list: *mut *mut Interface,
    errbuf: *mut c_char,
) -> c_int {
    // SAFETY: the caller's promises are passed on.
    guarded(ERROR, || unsafe { devices::find_all(list, errbuf) })
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_freealldevs(list: *mut Interface) {
    // SAFETY: one list, made in one way; the caller's promise is passed on.
    unsafe { (real().pcap_freealldevs)(list) };
}

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_lookupnet(
    device: *const c_char,
    net: *mut u32,
    mask: *mut u32,
    errbuf: *mut c_char,
) -> c_int {
    // SAFETY: the caller's promises are passed on.
    unsafe {
        match our_device(device) {
            Some(name) => {
                let (number, bits) = guarded((0, 0), || devices::network(&name.to_string_lossy()));
                net.write(number);
                mask.write(bits);
                0
            }
            None => (real().pcap_lookupnet)(device, net, mask, errbuf),
        }
    }
}

/// # Safety
/// As [`read::many`]; `p` is `handle`.
unsafe fn many(
    p: Pcap,
    handle: &Handle,
    count: c_int,
    until: Until,
    handler: Handler,
    user: *mut c_uchar,
) -> c_int {
    let before = handle.enter();
    let mut progress = Progress::default();
    let status = loop {
        // SAFETY: the caller's promise is passed on.
        let turn = guarded(Turn::Return(ERROR), || unsafe {
            read::many(handle, &mut progress, count, until, handler, user)
        });
        match turn {
            Turn::Return(status) => break status,
            Turn::Wait(fd, limit) => handle.wait(fd, limit),
        }
    };
    // SAFETY: our handle, not used here any more.
    unsafe { Handle::leave(p, before) };
    status
}

/// One packet, as [`read::one`] gives it.
#[inline]
fn one(handle: &Handle) -> Result<read::Lent, c_int> {
    let mut progress = Progress::default();
    loop {
        let bad = Turn::Return(Err(ERROR));
        match guarded(bad, || read::one(handle, &mut progress)) {
            Turn::Return(lent) => return lent,
            Turn::Wait(fd, limit) => handle.wait(fd, limit),
        }
    }
}

/// The device's name if it is ours.
///
/// # Safety
/// `device` is null or ends with 0, and stays for `'a`.
unsafe fn our_device<'a>(device: *const c_char) -> Option<&'a CStr> {
    if device.is_null() {
        return None;
    }
    // SAFETY: not null; the caller's promise.
    let name = unsafe { CStr::from_ptr(device) };
    device_of(name.to_str().ok()?).map(|_| name)
}

/// Runs `call`; a panic, which is a defect of this library, becomes `bad`.
///
/// The thread cannot be cancelled (`pthread_cancel`) meanwhile: that unwinds, and ends the program
/// where something catches. It can be in [`Handle::wait`], as in the real library's.
#[inline]
fn guarded<T>(bad: T, call: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: a place for the old state.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(bad);
    // SAFETY: the state that was; no place for the one that is.
    unsafe { pthread_setcancelstate(before, ptr::null_mut()) };
    result
}

unsafe extern "C" {
    // glibc writes the old state only where there is a place for it (pthread_setcancelstate(3)).
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// bits/pthread.h of glibc.
const CANCEL_DISABLE: c_int = 1;

/// Runs `look` on an activated handle.
fn activated(handle: &Handle, look: impl FnOnce(&mut Live) -> c_int) -> c_int {
    handle.live(look).unwrap_or_else(|| {
        handle.set_error("This handle hasn't been activated yet");
        ERROR_NOT_ACTIVATED
    })
}

fn link_type(live: &mut Live) -> c_int {
    c_int::try_from(live.port.link_type()).unwrap_or(ERROR)
}

/// Runs `call` on a dead handle of the real library's that is like ours, and takes over the text of
/// its error.
fn with_dead<T: PartialEq + Copy>(
    handle: &Handle,
    name: &str,
    bad: T,
    call: impl FnOnce(Pcap) -> T,
) -> T {
    let Some(dead) = handle.with(dead_handle) else {
        handle.set_error(&format!("not-yet-activated pcap_t passed to {name}"));
        return bad;
    };
    if dead.is_null() {
        handle.set_error(&missing());
        return bad;
    }
    let result = call(dead);
    if result == bad {
        // SAFETY: an open handle of the real library's; its text ends with 0.
        let text = unsafe { CStr::from_ptr((real().pcap_geterr)(dead)) };
        handle.set_error(&text.to_string_lossy());
    }
    result
}

/// The dead handle, made at the first use; null if it cannot be; `None` before activation.
fn dead_handle(state: &mut State) -> Option<Pcap> {
    let live = state.live.as_deref_mut()?;
    if state.dead.is_null() {
        let precision = u32::from(live.nanoseconds);
        let (kind, snaplen) = (link_type(live), live.snaplen.min(MAX_SNAPLEN));
        // SAFETY: plain numbers.
        state.dead =
            unsafe { (real().pcap_open_dead_with_tstamp_precision)(kind, snaplen, precision) };
    }
    Some(state.dead)
}

/// Gives the program a list of one number, to be freed with its function for that.
///
/// # Safety
/// `list` may be written.
unsafe fn give_list(handle: &Handle, list: *mut *mut c_int, number: c_int) -> c_int {
    // SAFETY: a plain allocation; what it returns has room for one number.
    unsafe {
        let memory = libc::malloc(size_of::<c_int>()).cast::<c_int>();
        if memory.is_null() {
            return fail(handle, "out of memory");
        }
        memory.write(number);
        list.write(memory);
    }
    1
}

fn set_datalink(handle: &Handle, wanted: c_int) -> c_int {
    match activated(handle, link_type) {
        kind if kind == wanted => 0,
        status if status < 0 => status,
        _ => {
            // SAFETY: plain numbers; the name is null or a constant of the library's.
            let name = unsafe {
                let name = (real().pcap_datalink_val_to_name)(wanted);
                (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy())
            };
            let text = match name {
                Some(name) => format!("{name} is not one of the DLTs supported by this device"),
                None => format!("DLT {wanted} is not one of the DLTs supported by this device"),
            };
            fail(handle, &text)
        }
    }
}

/// Sends a frame; 0 or an error.
///
/// # Safety
/// `bytes` is null or points to `len` bytes.
unsafe fn transmit(handle: &Handle, bytes: *const c_uchar, len: usize) -> c_int {
    if handle.live(|_| ()).is_none() {
        return activated(handle, |_| 0);
    }
    if bytes.is_null() || len == 0 || len > isize::MAX as usize {
        return fail(handle, "no frame to send");
    }
    // SAFETY: not null; the caller's promise.
    let frame = unsafe { std::slice::from_raw_parts(bytes, len) };
    match handle.with(|state| inject(state, frame)) {
        Ok(()) => 0,
        Err(text) => fail(handle, &text),
    }
}
