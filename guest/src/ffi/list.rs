//! The devices.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CString, c_char, c_int};
use std::ptr;

use super::error::{E_INVALID, c_string, guarded, number, tell, text};
use crate::{Client, Device};

/// `struct vnplug_device`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CDevice {
    pub(super) name: *mut c_char,
    pub(super) kind: *mut c_char,
    pub(super) state: *mut c_char,
    pub(super) description: *mut c_char,
    pub(super) queues: u32,
    pub(super) ports: u32,
    pub(super) link_type: u32,
    pub(super) mtu: u32,
    pub(super) speed_mbps: u32,
    pub(super) mac: [u8; 6],
    pub(super) addresses: *mut *mut c_char,
}

/// See `vnplug.h`.
///
/// # Safety
/// `socket` is null or ends with 0; `errbuf` is null or points to `errlen` bytes; `devices` and
/// `count` are null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_list(
    socket: *const c_char,
    errbuf: *mut c_char,
    errlen: usize,
    devices: *mut *mut CDevice,
    count: *mut usize,
) -> c_int {
    if devices.is_null() || count.is_null() {
        return E_INVALID;
    }
    // SAFETY: not null, and may be written by the caller's promise.
    unsafe {
        devices.write(ptr::null_mut());
        count.write(0);
    }
    let listed = guarded(|| {
        // SAFETY: the caller's promise.
        let socket = unsafe { text(socket, "socket is not UTF-8") }?;
        match socket {
            Some(path) => Client::connect_to(path.as_ref())?,
            None => Client::connect()?,
        }
        .devices()
    });
    match listed {
        Ok(list) => {
            let all: Box<[CDevice]> = list.iter().map(CDevice::of).collect();
            // SAFETY: as above.
            unsafe {
                count.write(all.len());
                devices.write(Box::into_raw(all).cast());
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

/// See `vnplug.h`.
///
/// # Safety
/// `devices` is null or came from `vnplug_list` together with `count`, and was not freed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_list_free(devices: *mut CDevice, count: usize) {
    if devices.is_null() {
        return;
    }
    // SAFETY: the slices and their strings came from `into_raw` in `vnplug_list`; a null ends each
    // list of addresses.
    unsafe {
        let all = Box::from_raw(ptr::slice_from_raw_parts_mut(devices, count));
        for device in all {
            for text in [device.name, device.kind, device.state, device.description] {
                drop(CString::from_raw(text));
            }
            let mut len = 0;
            while !(*device.addresses.add(len)).is_null() {
                drop(CString::from_raw(*device.addresses.add(len)));
                len += 1;
            }
            let addresses = ptr::slice_from_raw_parts_mut(device.addresses, len + 1);
            drop(Box::from_raw(addresses));
        }
    }
}

impl CDevice {
    /// The same with texts of its own, which `vnplug_list_free` frees.
    fn of(device: &Device) -> Self {
        let raw = |text: &str| c_string(text).into_raw();
        let addresses = device.addresses.iter().map(|address| raw(address));
        let addresses: Box<[*mut c_char]> = addresses.chain([ptr::null_mut()]).collect();
        Self {
            name: raw(&device.name),
            kind: raw(&device.kind),
            state: raw(&device.state),
            description: raw(&device.description),
            queues: device.queues,
            ports: device.ports,
            link_type: device.link_type,
            mtu: device.mtu,
            speed_mbps: device.speed_mbps,
            mac: device.mac,
            addresses: Box::into_raw(addresses).cast(),
        }
    }
}
