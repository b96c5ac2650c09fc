//! Sending, and one port per thread.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{c_char, c_int};
use std::time::Duration;

use super::CPort;
use super::error::{E_INVALID, guarded, number, tell};
use super::options::{COptions, read_options};
use crate::Error;

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `frame` is null or points to `len`
/// bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_push(
    port: *mut CPort,
    frame: *const u8,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    if frame.is_null() || len > isize::MAX as usize {
        return E_INVALID;
    }
    // SAFETY: the caller's promise; a frame lent by this port stays where it is, for `present_outbox`
    // neither releases nor unmaps.
    let frame = unsafe { std::slice::from_raw_parts(frame, len) };
    let pushed = handle.attempt(|port| port.present_outbox()?.push(frame));
    pushed.map_or_else(|status| status, c_int::from)
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_push`], for `head` with `head_len` and `rest` with `rest_len`; each may be null if its length
/// is 0.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_forward(
    port: *mut CPort,
    head: *const u8,
    head_len: usize,
    rest: *const u8,
    rest_len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    // SAFETY: the caller's promise; what this port has lent stays where it is, as in `vnplug_push`.
    let (Some(head), Some(rest)) = (unsafe { (bytes(head, head_len), bytes(rest, rest_len)) })
    else {
        return E_INVALID;
    };
    let pushed = handle.attempt(|port| port.present_outbox()?.forward(head, rest));
    pushed.map_or_else(|status| status, c_int::from)
}

/// See `vnplug.h`.
///
/// # Safety
/// Both are null or open, and neither is in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_lend(from: *mut CPort, to: *mut CPort) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(lender), Some(sender)) = (unsafe { (from.as_ref(), to.as_ref()) }) else {
        return E_INVALID;
    };
    if from == to {
        return E_INVALID;
    }
    lender.status(|lender| {
        // They are two ports, each used by nobody else.
        let lent = sender.attempt(|sender| Ok(lender.lend_to(sender)));
        lent.unwrap_or(Err(Error::Invalid("the port that sends failed")))
    })
}

/// Bytes that may be none; `None` if there cannot be such.
///
/// # Safety
/// `from` is null or points to `len` bytes that do not change while the slice lives.
unsafe fn bytes<'a>(from: *const u8, len: usize) -> Option<&'a [u8]> {
    match (from.is_null(), len) {
        (_, 0) => Some(&[]),
        (true, _) => None,
        (false, len) if len > isize::MAX as usize => None,
        // SAFETY: the caller's promise.
        (false, len) => Some(unsafe { std::slice::from_raw_parts(from, len) }),
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_flush(port: *mut CPort) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    handle.status(|port| {
        port.present_outbox()?.flush();
        Ok(())
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_push`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_send(
    port: *mut CPort,
    frame: *const u8,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise is passed on.
    let pushed = unsafe { vnplug_push(port, frame, len) };
    if pushed < 0 {
        return pushed;
    }
    // SAFETY: as above.
    match unsafe { vnplug_flush(port) } {
        0 => pushed,
        status => status,
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_wait_for_room(
    port: *mut CPort,
    len: usize,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(handle), Ok(ms)) = (unsafe { port.as_ref() }, u64::try_from(timeout_ms)) else {
        return E_INVALID;
    };
    let room = handle.attempt(|port| port.wait_for_room(len, Duration::from_millis(ms)));
    room.map_or_else(|status| status, c_int::from)
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_open`](super::vnplug_open); `ports` is null or has room for `count` pointers.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_open_spread(
    options: *const COptions,
    count: usize,
    errbuf: *mut c_char,
    errlen: usize,
    ports: *mut *mut CPort,
) -> c_int {
    if ports.is_null() || count == 0 || count > MAX_SPREAD {
        return E_INVALID;
    }
    let opened = guarded(|| {
        // SAFETY: the caller's promise about `options` is passed on.
        unsafe { read_options(options) }?.spread(count)
    });
    match opened {
        Ok(opened) => {
            for (at, port) in opened.into_iter().enumerate() {
                // SAFETY: `at < count`, and the caller's promise about `ports`.
                unsafe { ports.add(at).write(Box::into_raw(CPort::new(port))) };
            }
            0
        }
        Err(error) => {
            // SAFETY: the caller's promise about `errbuf` is passed on.
            unsafe { tell(&error, errbuf, errlen) };
            number(&error)
        }
    }
}

const MAX_SPREAD: usize = 1024;
