//! Sending.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::slice::from_raw_parts;

use super::{attempt, code, with};
use crate::abi::ring::Ring;
use crate::device;
use crate::error::{BAD_IFNAME, INVALID_ARGUMENT};
use crate::handle::{Failure, Handle};
use crate::reader::Lent;

const INVALID: Failure = Failure::new(INVALID_ARGUMENT, libc::EINVAL);

/// `pfring_send`.
///
/// # Safety
/// See [`with`]; `pkt` is NULL or has `pkt_len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_send(
    ring: *mut Ring,
    pkt: *mut c_char,
    pkt_len: c_uint,
    flush_packet: u8,
) -> c_int {
    let act = |handle: &Handle| {
        if pkt.is_null() {
            return code(Err(INVALID));
        }
        // SAFETY: this many bytes, as the caller says.
        let frame = unsafe { from_raw_parts(pkt.cast::<u8>(), pkt_len as usize) };
        let sent = handle.send(frame, flush_packet != 0);
        code(sent.map(|()| c_int::try_from(pkt_len).unwrap_or(c_int::MAX)))
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, INVALID_ARGUMENT, act) }
}

/// `pfring_flush_tx_packets`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_flush_tx_packets(ring: *mut Ring) -> c_int {
    let act = |handle: &Handle| {
        handle.flush();
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_tx_watermark`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_tx_watermark(ring: *mut Ring, watermark: u16) -> c_int {
    let act = |handle: &Handle| {
        handle.set_tx_watermark(watermark);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_send_last_rx_packet`.
///
/// # Safety
/// See [`with`]. The packet that was received last is still lent.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_send_last_rx_packet(
    ring: *mut Ring,
    tx_interface_id: c_int,
) -> c_int {
    // SAFETY: the packet is in the ring, which is locked, until the next burst is taken.
    let copy = |lent: &Lent| unsafe { from_raw_parts(lent.data, lent.len) }.to_vec();
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, |handle| handle.send_last(tx_interface_id, copy)) }
}

/// `pfring_set_reflector_device`.
///
/// # Safety
/// See [`with`]; `device_name` is NULL or a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_reflector_device(
    ring: *mut Ring,
    device_name: *mut c_char,
) -> c_int {
    if device_name.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(device_name) }.to_string_lossy();
    let act = |handle: &Handle| {
        let targets = device::targets(&name).unwrap_or_default();
        let first = targets.into_iter().next();
        handle.reflect_to(first.ok_or(Failure::new(BAD_IFNAME, libc::ENODEV))?)
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}
