//! Opening, enabling, closing.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{CStr, c_char, c_int, c_ushort};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use vnplug::split_group;

use super::{attempt, calls, leave, set_errno, with};
use crate::abi::ring::Ring;
use crate::device::{MAX_QUEUES, targets};
use crate::error::{self, INVALID_ARGUMENT};
use crate::handle::{Failure, Handle};

/// `pfring_open`.
///
/// # Safety
/// `device_name` is NULL or a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_open(
    device_name: *const c_char,
    caplen: u32,
    flags: u32,
) -> *mut Ring {
    if device_name.is_null() {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    // SAFETY: a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(device_name) }.to_owned();
    let opened = std::panic::catch_unwind(|| {
        let ring = Ring::new(caplen.min(MAX_CAPLEN), flags);
        Handle::open(name, ring)
    });
    match opened {
        Ok(Ok(handle)) => {
            let mut handle = Box::new(handle);
            handle.show();
            handle.ring.calls = calls::present();
            Box::into_raw(handle).cast()
        }
        Ok(Err(failure)) => {
            set_errno(failure.errno);
            null_mut()
        }
        Err(_panic) => {
            set_errno(libc::EIO);
            null_mut()
        }
    }
}

/// `pfring_open_multichannel`.
///
/// # Safety
/// `device_name` is NULL or a C string; `ring` has room for `MAX_NUM_RX_CHANNELS` pointers.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_open_multichannel(
    device_name: *const c_char,
    caplen: u32,
    flags: u32,
    ring: *mut *mut Ring,
) -> u8 {
    if device_name.is_null() || ring.is_null() {
        set_errno(libc::EINVAL);
        return 0;
    }
    // SAFETY: a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(device_name) }.to_string_lossy();
    let (devices, group) = split_group(&name);
    let base = devices.split_once('@').map_or(devices, |(base, _)| base);
    let group = match group {
        "" => String::new(),
        group => format!("/{group}"),
    };
    let queues = targets(base).and_then(|targets| crate::handle::facts(targets.first()?));
    let count = queues.map_or(1, |device| device.queues.clamp(1, MAX_QUEUES));
    let mut opened = 0;
    for queue in 0..count {
        let Ok(one) = std::ffi::CString::new(format!("{base}@{queue}{group}")) else {
            break;
        };
        // SAFETY: a C string that lives over the call.
        let handle = unsafe { pfring_open(one.as_ptr(), caplen, flags) };
        if handle.is_null() {
            break;
        }
        // SAFETY: less than MAX_NUM_RX_CHANNELS, for which there is room.
        unsafe { ring.add(queue as usize).write(handle) };
        opened += 1;
    }
    opened
}

/// `pfring_enable_ring`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_enable_ring(ring: *mut Ring) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { enable(ring, true) }
}

/// `pfring_disable_ring`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_disable_ring(ring: *mut Ring) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { enable(ring, false) }
}

/// # Safety
/// See [`with`].
unsafe fn enable(ring: *mut Ring, enabled: bool) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, |handle| handle.enable(enabled)) }
}

/// `pfring_breakloop`. May be called from a signal handler.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_breakloop(ring: *mut Ring) {
    // SAFETY: the caller's promise.
    unsafe { with(ring, (), |handle| handle.gate.break_loop()) };
}

/// `pfring_shutdown`. May be called from a signal handler.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_shutdown(ring: *mut Ring) {
    let act = |handle: &Handle| {
        handle.gate.shut_down();
        handle.ring.is_shutting_down.store(1, Ordering::Relaxed);
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, (), act) };
}

/// `pfring_close`.
///
/// # Safety
/// See [`with`]; the ring is not used by calls that begin later.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_close(ring: *mut Ring) {
    if ring.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { pfring_shutdown(ring) };
    // SAFETY: gives up the program's hold, which `pfring_open` counted.
    unsafe { leave(ring.cast()) };
}

/// `pfring_bind`.
///
/// # Safety
/// See [`with`]; `device_name` is NULL or a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_bind(ring: *mut Ring, device_name: *mut c_char) -> c_int {
    if device_name.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(device_name) }.to_string_lossy();
    let act = |handle: &Handle| {
        handle.only_disabled()?;
        let no_device = Failure::new(error::BAD_IFNAME, libc::ENODEV);
        let more = targets(&name).ok_or(no_device)?;
        let mut reader = handle.reader();
        let mut all = reader.targets().to_vec();
        all.extend(more);
        Ok(reader.replace(all, &handle.gate)?)
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_config`: makes this process's thread a real-time one, once; ends the program if it may
/// not, as PF_RING does.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn pfring_config(cpu_percentage: c_ushort) {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    let parameters = libc::sched_param {
        sched_priority: cpu_percentage.into(),
    };
    // SAFETY: a complete structure that lives over the call.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) } < 0 {
        let why = std::io::Error::last_os_error();
        eprintln!("pfring_config: no real-time priority {cpu_percentage}: {why}");
        std::process::exit(1);
    }
}

/// `MAX_CAPLEN`.
const MAX_CAPLEN: u32 = 65_600;
