//! Many ports of one reader.
//!
//! A port's handle stays where it is, for the caller has its address; the bundle knows the handles of
//! its ports, and each of them its bundle and its place there.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::time::Duration;

use super::CPort;
use super::error::{E_INVALID, guarded, number, tell};
use super::options::{COptions, read_options};
use super::packet::outcome;
use crate::Bundle;

/// `vnplug_bundle`.
#[derive(Debug)]
pub(crate) struct CBundle {
    bundle: Bundle,
    /// Each came from `Box::into_raw` and is open.
    ports: Vec<*mut CPort>,
    /// The same by the numbers that the bundle has for them; null: none.
    numbered: Vec<*mut CPort>,
}

/// See `vnplug.h`.
///
/// # Safety
/// `errbuf` is null or points to `errlen` bytes; `out` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_bundle_new(
    errbuf: *mut c_char,
    errlen: usize,
    out: *mut *mut CBundle,
) -> c_int {
    if out.is_null() {
        return E_INVALID;
    }
    let made = guarded(|| {
        Ok(Box::new(CBundle {
            bundle: Bundle::new()?,
            ports: Vec::new(),
            numbered: Vec::new(),
        }))
    });
    let (status, bundle) = match made {
        Ok(bundle) => (0, Box::into_raw(bundle)),
        Err(error) => {
            // SAFETY: the caller's promise about `errbuf` is passed on.
            unsafe { tell(&error, errbuf, errlen) };
            (number(&error), ptr::null_mut())
        }
    };
    // SAFETY: not null, and may be written by the caller's promise.
    unsafe { out.write(bundle) };
    status
}

/// See `vnplug.h`.
///
/// # Safety
/// `bundle` is null or open, and neither it nor its ports are in use by another thread; the rest as
/// of [`vnplug_open`](super::vnplug_open).
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_bundle_open(
    bundle: *mut CBundle,
    options: *const COptions,
    errbuf: *mut c_char,
    errlen: usize,
    out: *mut *mut CPort,
) -> c_int {
    if out.is_null() {
        return E_INVALID;
    }
    // SAFETY: not null, and may be written by the caller's promise.
    unsafe { out.write(ptr::null_mut()) };
    // SAFETY: the caller's promise.
    let Some(ours) = (unsafe { bundle.as_mut() }) else {
        return E_INVALID;
    };
    let opened = guarded(|| {
        // SAFETY: the caller's promise about `options` is passed on.
        let options = unsafe { read_options(options) }?;
        let port = ours.bundle.open_apart(options)?;
        let number = ours.bundle.number_of(&port).unwrap_or_default();
        Ok((CPort::new(port), number))
    });
    match opened {
        Ok((mut port, number)) => {
            (port.bundle, port.place, port.number) = (bundle, ours.ports.len(), number);
            let port = Box::into_raw(port);
            ours.ports.push(port);
            if number >= ours.numbered.len() {
                ours.numbered.resize(number + 1, ptr::null_mut());
            }
            ours.numbered[number] = port;
            // SAFETY: as above.
            unsafe { out.write(port) };
            0
        }
        Err(error) => {
            // SAFETY: the caller's promise about `errbuf` is passed on.
            unsafe { tell(&error, errbuf, errlen) };
            number(&error)
        }
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `bundle` is null or open, and neither it nor its ports are in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_bundle_wait(
    bundle: *mut CBundle,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(ours) = (unsafe { bundle.as_mut() }) else {
        return E_INVALID;
    };
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let waited = guarded(|| {
        let CBundle {
            bundle, numbered, ..
        } = ours;
        bundle.wait_apart(timeout, |number, look| {
            let handle = numbered.get(number).copied().unwrap_or(ptr::null_mut());
            // SAFETY: a handle that is not null is open, and in nobody else's use by the caller's promise.
            if let Some(handle) = unsafe { handle.as_ref() } {
                // SAFETY: as said; one is looked at at a time.
                look(unsafe { &mut *handle.port.get() });
            }
            true
        })
    });
    waited.map_or_else(|error| number(&error), outcome)
}

/// See `vnplug.h`.
///
/// # Safety
/// `bundle` is null or open, and neither it nor its ports are in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_bundle_next_ready(bundle: *mut CBundle) -> *mut CPort {
    // SAFETY: the caller's promise.
    let Some(ours) = (unsafe { bundle.as_mut() }) else {
        return ptr::null_mut();
    };
    let found = guarded(|| {
        while let Some(number) = ours.bundle.next_awake() {
            match ours.numbered.get(number) {
                Some(port) if !port.is_null() => return Ok(*port),
                _ => {}
            }
        }
        Ok(ptr::null_mut())
    });
    found.unwrap_or(ptr::null_mut())
}

/// See `vnplug.h`.
///
/// # Safety
/// `bundle` is null or open; `count` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_bundle_ports(
    bundle: *const CBundle,
    count: *mut usize,
) -> *const *mut CPort {
    // SAFETY: the caller's promise.
    let ports = unsafe { bundle.as_ref() }.map_or(&[][..], |ours| &ours.ports);
    if !count.is_null() {
        // SAFETY: not null, and may be written by the caller's promise.
        unsafe { count.write(ports.len()) };
    }
    ports.as_ptr()
}

/// See `vnplug.h`.
///
/// # Safety
/// `bundle` is null or came from `vnplug_bundle_new` and was not closed; neither it nor its ports are
/// in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_bundle_close(bundle: *mut CBundle) {
    if bundle.is_null() {
        return;
    }
    // SAFETY: it came from Box::into_raw in `vnplug_bundle_new`, and is given back once.
    let ours = unsafe { Box::from_raw(bundle) };
    // Nobody is left to be told of a panic.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        ours.bundle.end();
        for port in ours.ports {
            // SAFETY: it came from Box::into_raw in `vnplug_bundle_open`, and whoever closes one by
            // itself takes it out of here first.
            drop(unsafe { Box::from_raw(port) });
        }
    }));
}

/// Takes a port that is to be closed out of its bundle, if it is of one.
///
/// # Safety
/// `port` is open, and neither its bundle nor the ports there are in use by another thread.
pub(super) unsafe fn take_out(port: *mut CPort) {
    // SAFETY: the caller's promise; a bundle that is closed has closed its ports.
    unsafe {
        let (bundle, place, number) = ((*port).bundle, (*port).place, (*port).number);
        let Some(ours) = bundle.as_mut() else {
            return;
        };
        ours.numbered[number] = ptr::null_mut();
        ours.ports.swap_remove(place);
        if let Some(&moved) = ours.ports.get(place) {
            (*moved).place = place;
        }
    }
}
