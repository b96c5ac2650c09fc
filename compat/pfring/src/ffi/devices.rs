//! The list of devices.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{CString, c_char};
use std::ptr::null_mut;

use vnplug::{Client, Device};

use super::set_errno;
use crate::abi::packet::Interface;
use crate::device;
use crate::error;

/// `pfring_findalldevs`: the daemon's devices, and NULL with `errno` if it cannot be asked.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn pfring_findalldevs() -> *mut Interface {
    let asked = std::panic::catch_unwind(|| {
        let mut client = Client::connect()?;
        let devices = client.devices()?;
        Ok((client.server().to_owned(), devices))
    });
    match asked {
        Ok(Ok((server, devices))) => {
            let all = devices.iter().rev();
            all.fold(null_mut(), |next, device| {
                Box::into_raw(Box::new(interface(device, &server, next)))
            })
        }
        Ok(Err::<_, vnplug::Error>(failed)) => {
            set_errno(error::errno(&failed));
            null_mut()
        }
        Err(_panic) => null_mut(),
    }
}

/// `pfring_freealldevs`.
///
/// # Safety
/// `list` is NULL or what `pfring_findalldevs` returned, not freed before.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_freealldevs(list: *mut Interface) {
    let mut next = list;
    while !next.is_null() {
        // SAFETY: made by Box::into_raw in `pfring_findalldevs`.
        let one = unsafe { Box::from_raw(next) };
        next = one.next;
        for text in [one.name, one.system_name, one.module, one.module_version] {
            if !text.is_null() {
                // SAFETY: made by CString::into_raw in `interface`.
                drop(unsafe { CString::from_raw(text) });
            }
        }
    }
}

fn interface(device: &Device, server: &str, next: *mut Interface) -> Interface {
    Interface {
        name: text(&device.name),
        system_name: text(device::bare(&device.name)),
        module: text("vnplug"),
        module_version: text(server),
        sn: null_mut(),
        mac: device.mac,
        bus_id: [0; 4],
        status: match device.state.as_str() {
            "up" | "waiting" => 1,
            "down" | "gone" | "failed" => 0,
            _ => -1,
        },
        license: 1,
        license_expiration: 0,
        next,
    }
}

/// A C string of our own; the daemon's names have no NUL inside.
fn text(text: &str) -> *mut c_char {
    CString::new(text).map_or(null_mut(), CString::into_raw)
}
