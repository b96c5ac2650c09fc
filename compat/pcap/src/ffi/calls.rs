//! Exported: the calls that are one expression each.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::ptr;

use libc::FILE;

use super::{activated, guarded};
use crate::abi::{ERROR, Opaque, Pcap, Program};
use crate::activate::{
    MAX_SNAPLEN, activate, set, set_name, set_precision, set_tstamp_type, set_watermark,
};
use crate::filter::{self, fail, missing};
use crate::handle::{Handle, HandleState};
use crate::inject::inject;
use crate::read::{self, Live};
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
        |handle| c_int::from(handle.with(|state| state.options.nanoseconds) == Some(true)), ERROR;
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
    fn pcap_bufsize(p: Pcap) -> c_int = |handle| activated(handle, |live| live.buffer_bytes), ERROR;

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

/// Of PF_RING's libpcap; handles of the real library have nothing like it.
///
/// # Safety
/// `p` is null or an open handle; `name` is null or a string that ends with 0.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_set_application_name(p: Pcap, name: *mut c_char) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { Handle::of(p) } {
        Some(handle) if !name.is_null() => guarded(ERROR, || {
            // SAFETY: the caller's promise.
            set_name(handle, &unsafe { CStr::from_ptr(name) }.to_string_lossy())
        }),
        _ => ERROR,
    }
}

/// Of PF_RING's libpcap; handles of the real library have nothing like it.
///
/// # Safety
/// `p` is null or an open handle.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_set_watermark(p: Pcap, watermark: c_uint) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { Handle::of(p) } {
        Some(handle) => guarded(ERROR, || set_watermark(handle, watermark)),
        None => ERROR,
    }
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
    let Some(dead) = handle.with(dead_handle).flatten() else {
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
fn dead_handle(state: &mut HandleState) -> Option<Pcap> {
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
    if !handle.is_active() {
        return activated(handle, |_| 0);
    }
    if bytes.is_null() || len == 0 || len > isize::MAX as usize {
        return fail(handle, "no frame to send");
    }
    // SAFETY: not null; the caller's promise.
    let frame = unsafe { std::slice::from_raw_parts(bytes, len) };
    match inject(handle, frame) {
        Ok(()) => 0,
        Err(text) => fail(handle, &text),
    }
}
