//! Exported: devices, and handles that come and go.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use super::guarded;
use crate::abi::{ERROR, Interface, Pcap};
use crate::activate::{activate, set};
use crate::devices::{self, device_of, tell};
use crate::handle::Handle;
use crate::notes;
use crate::real::{is_missing, real};

/// See its manual page.
///
/// # Safety
/// As its manual page says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pcap_create(device: *const c_char, errbuf: *mut c_char) -> Pcap {
    // SAFETY: the caller's promise.
    unsafe { note_opening(device) };
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
        return unsafe {
            note_opening(device);
            (real().pcap_open_live)(device, snaplen, promisc, timeout_ms, errbuf)
        };
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

/// Says what the program does not, if it is one of those.
///
/// # Safety
/// `device` is null or ends with 0.
unsafe fn note_opening(device: *const c_char) {
    let name = match device.is_null() {
        true => c"",
        // SAFETY: not null; the caller's promise.
        false => unsafe { CStr::from_ptr(device) },
    };
    guarded((), || notes::opens(&name.to_string_lossy()));
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
