//! The C ABI. `include/vnplug.h` is its manual; these files follow it, function by function.
//!
//! Every function catches panics, checks pointers for null, and trusts what it cannot check: that
//! non-null pointers point to what the header says.
#![expect(unsafe_code, reason = "the C ABI's island")]

mod backend;
mod bundle;
mod channel;
mod error;
mod list;
mod options;
mod packet;
mod rules;
mod send;

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use vnplug_ring::control::{FilterSpec, Tuning, code};

use crate::{Asker, Error, Port};
use error::{E_INVALID, Text, c_string, describe, guarded, number, tell, text};
use options::{CInsn, COptions, direction, read_options, read_program, write_sized};

/// `vnplug_port`.
pub(crate) struct CPort {
    /// One thread's at a time; the other fields are everybody's.
    port: UnsafeCell<Port>,
    asker: Asker,
    fd: c_int,
    device: CString,
    error: Text,
    /// The bundle it is a port of, or null, where there, and its number there.
    bundle: *mut bundle::CBundle,
    place: usize,
    number: usize,
}

/// `struct vnplug_stats`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CStats {
    size: usize,
    received: u64,
    bytes: u64,
    lost: u64,
    gaps: u64,
    reopened: u64,
}

/// `struct vnplug_tuning`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CTuning {
    direction: u32,
    sample: u32,
    paused: u32,
}

/// See `vnplug.h`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vnplug_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// See `vnplug.h`.
///
/// # Safety
/// `options` is null or points to `options->size` bytes, its strings end with 0, `program` points
/// to `program_len` instructions; `errbuf` is null or points to `errlen` bytes; `out` is null or
/// may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_open(
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
    let opened = guarded(|| {
        // SAFETY: the caller's promise about `options` is passed on.
        let options = unsafe { read_options(options) }?;
        Ok(CPort::new(options.open()?))
    });
    match opened {
        Ok(port) => {
            // SAFETY: as above.
            unsafe { out.write(Box::into_raw(port)) };
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
/// `port` is null or came from `vnplug_open` or one of its like and was not closed; if it is of a
/// bundle, neither that nor its ports are in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_close(port: *mut CPort) {
    if !port.is_null() {
        // SAFETY: the caller's promise. It came from Box::into_raw, and is given back once.
        let port = unsafe {
            bundle::take_out(port);
            Box::from_raw(port)
        };
        // Nobody is left to be told of a panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(port)));
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_fd(port: *const CPort) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(E_INVALID, |handle| handle.fd)
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `filter` is null or ends with 0.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_set_filter(
    port: *mut CPort,
    filter: *const c_char,
) -> c_int {
    // SAFETY: the caller's promises.
    let (Some(handle), text) = (unsafe { (port.as_ref(), text(filter, "filter is not UTF-8")) })
    else {
        return E_INVALID;
    };
    handle.status(|port| {
        port.set_filter(match text?.map(str::trim) {
            None | Some("") => FilterSpec::All,
            Some(text) => FilterSpec::Expression(text.into()),
        })
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `program` is null or points to `len`
/// instructions.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_set_program(
    port: *mut CPort,
    program: *const CInsn,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promises.
    let (Some(handle), spec) = (unsafe { (port.as_ref(), read_program(program, len)) }) else {
        return E_INVALID;
    };
    handle.status(|port| port.set_filter(spec?))
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `tuning` is null or may be read.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_tune(port: *mut CPort, tuning: *const CTuning) -> c_int {
    // SAFETY: the caller's promises.
    let (Some(handle), Some(tuning)) = (unsafe { (port.as_ref(), tuning.as_ref()) }) else {
        return E_INVALID;
    };
    handle.status(|port| {
        port.tune(Tuning {
            direction: direction(tuning.direction)?,
            sample: tuning.sample,
            enabled: tuning.paused == 0,
        })
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open; `stats` is null or points to `stats->size` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_stats(port: *const CPort, stats: *mut CStats) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    let counts = handle.asker.counts();
    let full = CStats {
        size: size_of::<CStats>(),
        received: counts.received,
        bytes: counts.bytes,
        lost: counts.lost,
        gaps: counts.gaps,
        reopened: counts.reopened,
    };
    // SAFETY: the caller's promise; the struct begins with its size.
    match unsafe { write_sized(stats, &full) } {
        true => 0,
        false => E_INVALID,
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open; `name` is null or ends with 0; `value`
/// is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_host_counter(
    port: *mut CPort,
    name: *const c_char,
    value: *mut u64,
) -> c_int {
    // SAFETY: the caller's promises.
    let (handle, name) = unsafe { (port.as_ref(), text(name, "name is not UTF-8")) };
    let (Some(handle), Ok(Some(name)), false) = (handle, name, value.is_null()) else {
        return E_INVALID;
    };
    let refused = |code, text: &str| {
        Err(Error::Refused {
            code,
            text: text.into(),
        })
    };
    let found = handle.told(guarded(|| {
        let Some(host) = handle.asker.stats()?.host else {
            return refused(
                code::UNAVAILABLE,
                "the host cannot be reached at this moment",
            );
        };
        match host.values.iter().find(|(key, _)| key == name) {
            Some((_, value)) => Ok(*value),
            None => refused(code::NOT_FOUND, "the host has no such counter"),
        }
    }));
    match found {
        Ok(found) => {
            // SAFETY: not null, and may be written by the caller's promise.
            unsafe { value.write(found) };
            0
        }
        Err(status) => status,
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_last_error(port: *const CPort) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(c"the port is NULL".as_ptr(), |handle| handle.error.as_ptr())
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_device_name(port: *const CPort) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(c"".as_ptr(), |handle| handle.device.as_ptr())
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_link_type(port: *const CPort) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(0, |handle| handle.look(Port::link_type))
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_snaplen(port: *const CPort) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(0, |handle| handle.look(Port::snaplen))
}

impl CPort {
    fn new(port: Port) -> Box<Self> {
        Box::new(Self {
            device: c_string(port.device()),
            asker: port.asker(),
            fd: port.fd().as_raw_fd(),
            port: UnsafeCell::new(port),
            error: Text::default(),
            bundle: ptr::null_mut(),
            place: 0,
            number: 0,
        })
    }

    /// Runs `call`, remembers its error's text and returns its number.
    fn attempt<T>(&self, call: impl FnOnce(&mut Port) -> Result<T, Error>) -> Result<T, c_int> {
        // SAFETY: by the header's rule only one thread is in a call that comes here, and no call
        // makes another one.
        let port = unsafe { &mut *self.port.get() };
        self.told(guarded(|| call(port)))
    }

    /// Remembers an error's text and makes it its number.
    fn told<T>(&self, result: Result<T, Error>) -> Result<T, c_int> {
        result.map_err(|error| {
            self.error.set(&describe(&error));
            number(&error)
        })
    }

    fn look<T>(&self, look: impl FnOnce(&Port) -> T) -> T {
        // SAFETY: as in `attempt`.
        look(unsafe { &*self.port.get() })
    }

    fn status(&self, call: impl FnOnce(&mut Port) -> Result<(), Error>) -> c_int {
        self.attempt(call).err().unwrap_or(0)
    }
}

impl std::fmt::Debug for CPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.look(|port| port.fmt(f))
    }
}

#[cfg(test)]
mod tests;
