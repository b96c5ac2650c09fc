//! What is known about a ring and its device.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{CStr, c_char, c_int};

use super::{attempt, with};
use crate::abi::packet::{CardSettings, Stat};
use crate::abi::ring::Ring;
use crate::error::{GENERIC, INVALID_ARGUMENT, UNABLE_TO_GET_INFO};
use crate::handle::{Failure, Handle, facts, local_index};

const UNKNOWN: Failure = Failure::new(UNABLE_TO_GET_INFO, libc::ENODEV);
const INVALID: Failure = Failure::new(INVALID_ARGUMENT, libc::EINVAL);

/// `pfring_stats`. May be called from a signal handler.
///
/// # Safety
/// See [`with`]; `stats` is NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_stats(ring: *mut Ring, stats: *mut Stat) -> c_int {
    let act = |handle: &Handle| {
        if stats.is_null() {
            return INVALID_ARGUMENT;
        }
        let (recv, drop) = handle.counts();
        let found = Stat {
            recv,
            drop,
            shunt: 0,
        };
        // SAFETY: writable, as the caller says.
        unsafe { stats.write(found) };
        0
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, INVALID_ARGUMENT, act) }
}

/// `pfring_version`.
///
/// # Safety
/// `version` is NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_version(ring: *mut Ring, version: *mut u32) -> c_int {
    if ring.is_null() || version.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller's promise.
    unsafe { pfring_version_noring(version) };
    0
}

/// `pfring_version_noring`: of the API, as `RING_VERSION_NUM`.
///
/// # Safety
/// `version` is NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_version_noring(version: *mut u32) {
    if !version.is_null() {
        // SAFETY: writable, as the caller says.
        unsafe { version.write(API_VERSION) };
    }
}

/// `pfring_get_num_rx_channels`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_num_rx_channels(ring: *mut Ring) -> u8 {
    let act = |handle: &Handle| u8::try_from(handle.queues).unwrap_or(u8::MAX);
    // SAFETY: the caller's promise.
    unsafe { with(ring, 1, act) }
}

/// `pfring_get_ring_id`: the port's number in the daemon.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_ring_id(ring: *mut Ring) -> u32 {
    let act = |handle: &Handle| {
        handle
            .reader()
            .ports()
            .first()
            .map_or(0, |port| port.number())
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, 0, act) }
}

/// `pfring_get_num_queued_pkts`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_num_queued_pkts(ring: *mut Ring) -> u32 {
    let act = |handle: &Handle| u32::try_from(handle.reader().queued()).unwrap_or(u32::MAX);
    // SAFETY: the caller's promise.
    unsafe { with(ring, 0, act) }
}

/// `pfring_get_slot_header_len`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_slot_header_len(ring: *mut Ring) -> u16 {
    // SAFETY: the caller's promise.
    unsafe { with(ring, 0, Handle::slot_header_len) }
}

/// `pfring_get_caplen`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_caplen(ring: *mut Ring) -> c_int {
    let act = |handle: &Handle| c_int::try_from(handle.longest()).unwrap_or(c_int::MAX);
    // SAFETY: the caller's promise.
    unsafe { with(ring, GENERIC, act) }
}

/// `pfring_get_link_type`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_link_type(ring: *mut Ring) -> c_int {
    let act = |handle: &Handle| {
        let first = handle.reader().ports().first().map(|port| port.link_type());
        first.map_or(ETHERNET, |link_type| link_type as c_int)
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, GENERIC, act) }
}

/// `pfring_get_link_status`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_link_status(ring: *mut Ring) -> c_int {
    let act = |handle: &Handle| {
        let device = handle.facts();
        device.map_or(0, |device| {
            matches!(device.state.as_str(), "up" | "waiting").into()
        })
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, 0, act) }
}

/// `pfring_get_mtu_size`: 0 = unknown.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_mtu_size(ring: *mut Ring) -> c_int {
    let act = |handle: &Handle| handle.facts().map_or(0, |device| device.mtu as c_int);
    // SAFETY: the caller's promise.
    unsafe { with(ring, GENERIC, act) }
}

/// `pfring_get_interface_speed`: 0 = unknown.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_interface_speed(ring: *mut Ring) -> u32 {
    let act = |handle: &Handle| handle.facts().map_or(0, |device| device.speed_mbps);
    // SAFETY: the caller's promise.
    unsafe { with(ring, 0, act) }
}

/// `pfring_get_ethtool_link_speed`: of a device of the daemon; 0 = unknown.
///
/// # Safety
/// `ifname` is NULL or a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_ethtool_link_speed(ifname: *const c_char) -> u32 {
    if ifname.is_null() {
        return 0;
    }
    // SAFETY: a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(ifname) }.to_string_lossy();
    facts(&name).map_or(0, |device| device.speed_mbps)
}

/// `pfring_get_card_settings`.
///
/// # Safety
/// See [`with`]; `settings` is NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_card_settings(
    ring: *mut Ring,
    settings: *mut CardSettings,
) -> c_int {
    let act = |handle: &Handle| {
        if settings.is_null() {
            return Err(INVALID);
        }
        let mut reader = handle.reader();
        let slots = reader.slots();
        let longest = reader.ports().iter().map(|port| port.snaplen()).max();
        let found = CardSettings {
            max_packet_size: longest.ok_or(UNKNOWN)?,
            rx_ring_slots: slots,
            tx_ring_slots: 0,
        };
        // SAFETY: writable, as the caller says.
        unsafe { settings.write(found) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_get_bound_device_address`.
///
/// # Safety
/// See [`with`]; `mac_address` is NULL or has room for six bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_bound_device_address(
    ring: *mut Ring,
    mac_address: *mut [u8; 6],
) -> c_int {
    let act = |handle: &Handle| {
        if mac_address.is_null() {
            return Err(INVALID);
        }
        let mac = handle.facts().map(|device| device.mac);
        let mac = mac.filter(|mac| *mac != [0; 6]).ok_or(UNKNOWN)?;
        // SAFETY: room for six bytes, as the caller says.
        unsafe { mac_address.write(mac) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_get_bound_device_ifindex`.
///
/// # Safety
/// See [`with`]; `if_index` is NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_bound_device_ifindex(
    ring: *mut Ring,
    if_index: *mut c_int,
) -> c_int {
    let act = |handle: &Handle| {
        if if_index.is_null() {
            return Err(INVALID);
        }
        if handle.if_index < 0 {
            return Err(UNKNOWN);
        }
        // SAFETY: writable, as the caller says.
        unsafe { if_index.write(handle.if_index) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_get_device_ifindex`.
///
/// # Safety
/// See [`with`]; `device_name` is NULL or a C string, `if_index` NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_device_ifindex(
    ring: *mut Ring,
    device_name: *mut c_char,
    if_index: *mut c_int,
) -> c_int {
    let act = |_: &Handle| {
        if device_name.is_null() || if_index.is_null() {
            return Err(INVALID);
        }
        // SAFETY: a C string, as the caller says.
        let name = unsafe { CStr::from_ptr(device_name) }.to_string_lossy();
        let index = facts(&name).map_or(-1, |device| local_index(&device));
        if index < 0 {
            return Err(UNKNOWN);
        }
        // SAFETY: writable, as the caller says.
        unsafe { if_index.write(index) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `RING_VERSION_NUM`.
const API_VERSION: u32 = 0x08_09_00;
/// `DLT_EN10MB`.
const ETHERNET: c_int = 1;
