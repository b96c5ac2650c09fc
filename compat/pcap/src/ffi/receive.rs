//! Exported: receiving, and what concerns it.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{c_char, c_int, c_uchar};
use std::ptr;

use super::{activated, guarded};
use crate::abi::{ERROR, Handler, PacketHeader, Pcap, PcapStat};
use crate::devices::tell;
use crate::handle::Handle;
use crate::read::{self, Progress, Turn, Until};
use crate::real::real;
use crate::stats;

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
    let entry = handle.enter();
    let status = match one(handle, entry.reads) {
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
    unsafe { Handle::leave(p, entry) };
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
    let entry = handle.enter();
    let bytes = match one(handle, entry.reads) {
        Ok(lent) => {
            // SAFETY: may be written by the caller's promise; the handle's header is there until
            // it is left.
            unsafe { header.write(*lent.header) };
            lent.bytes
        }
        Err(_) => ptr::null(),
    };
    // SAFETY: our handle, not used here any more.
    unsafe { Handle::leave(p, entry) };
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
pub(crate) unsafe extern "C" fn pcap_stats(p: Pcap, out: *mut PcapStat) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { Handle::of(p) }) else {
        // SAFETY: the caller's promise is passed on.
        return unsafe { (real().pcap_stats)(p, out) };
    };
    guarded(ERROR, || {
        match stats::of(handle) {
            Some(now) => {
                // SAFETY: may be written by the caller's promise.
                unsafe { out.write(now) };
                0
            }
            None => activated(handle, |_| ERROR),
        }
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
    let entry = handle.enter();
    let mut progress = Progress::new(entry.reads);
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
    unsafe { Handle::leave(p, entry) };
    status
}

/// One packet, as [`read::one`] gives it.
#[inline]
fn one(handle: &Handle, reads: bool) -> Result<read::Lent, c_int> {
    let mut progress = Progress::new(reads);
    loop {
        let bad = Turn::Return(Err(ERROR));
        match guarded(bad, || read::one(handle, &mut progress)) {
            Turn::Return(lent) => return lent,
            Turn::Wait(fd, limit) => handle.wait(fd, limit),
        }
    }
}
