//! Taking packets.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::c_int;
use std::time::Duration;

use vnplug_ring::Packet;
use vnplug_ring::layout::Meta;

use super::CPort;
use super::error::E_INVALID;
use crate::{Error, Next, NextView, Port, Ready};

/// `struct vnplug_packet`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CPacket {
    pub(super) data: *const u8,
    pub(super) ts_ns: u64,
    pub(super) cap_len: u32,
    pub(super) wire_len: u32,
    pub(super) flow_hash: u32,
    pub(super) lost: u32,
    pub(super) flags: u16,
    pub(super) vlan_tci: u16,
    pub(super) source: u16,
    pub(super) queue: u16,
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `packet` is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_next(port: *mut CPort, packet: *mut CPacket) -> c_int {
    // SAFETY: the caller's promises are passed on.
    unsafe { one(port, packet, Port::next) }
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_next`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_poll_next(port: *mut CPort, packet: *mut CPacket) -> c_int {
    // SAFETY: the caller's promises are passed on.
    unsafe { one(port, packet, Port::poll_next) }
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_next`]; `packets` is null or points to room for `max`; `count` is null or may be
/// written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_next_batch(
    port: *mut CPort,
    packets: *mut CPacket,
    max: usize,
    count: *mut usize,
) -> c_int {
    if packets.is_null() || count.is_null() || max == 0 {
        return E_INVALID;
    }
    // SAFETY: the caller's promise about `count`.
    unsafe { count.write(0) };
    // SAFETY: the caller's promise about `port`.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    let taken = handle.attempt(|port| {
        let mut taken = 0;
        for packet in port.batch(max) {
            // SAFETY: `taken < max`, and the caller's promise about `packets`.
            unsafe { packets.add(taken).write(CPacket::of(&packet?)) };
            taken += 1;
        }
        Ok(taken)
    });
    match taken {
        // SAFETY: `max` is at least 1; the caller's promises are passed on.
        Ok(0) => unsafe {
            let outcome = one(port, packets, Port::next);
            count.write(usize::from(outcome == PACKET));
            outcome
        },
        Ok(taken) => {
            // SAFETY: the caller's promise about `count`.
            unsafe { count.write(taken) };
            PACKET
        }
        Err(status) => status,
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// As [`vnplug_next`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_look(port: *mut CPort, packet: *mut CPacket) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    if packet.is_null() {
        return E_INVALID;
    }
    let outcome = handle.attempt(|port| {
        Ok(match port.next_view()? {
            NextView::Packet(view) => {
                let seen = CPacket::at(view.meta(), view.as_ptr(), view.len());
                // SAFETY: not null, and may be written by the caller's promise.
                unsafe { packet.write(seen) };
                PACKET
            }
            NextView::Nothing => 0,
            NextView::Ended => 2,
        })
    });
    outcome.unwrap_or_else(|status| status)
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_is_whole(port: *mut CPort) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    let whole = handle.attempt(|port| Ok(c_int::from(port.settle_view())));
    whole.unwrap_or_else(|status| status)
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_release(port: *mut CPort) {
    // SAFETY: the caller's promise.
    if let Some(handle) = unsafe { port.as_ref() } {
        // There is nothing that can fail but a defect, which the next call tells.
        let _ = handle.attempt(|port| {
            port.release();
            Ok(())
        });
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_wait(port: *mut CPort, timeout_ms: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let waited = handle.attempt(|port| port.wait(timeout));
    waited.map_or_else(|status| status, outcome)
}

/// What a wait came to, by its number in `vnplug.h`.
pub(super) fn outcome(ready: Ready) -> c_int {
    match ready {
        Ready::Now => 1,
        Ready::TimedOut => 0,
        Ready::Interrupted => 3,
    }
}

impl CPacket {
    fn of(packet: &Packet<'_>) -> Self {
        Self::at(
            &packet.meta,
            packet.bytes.as_ptr(),
            packet.bytes.len() as u32,
        )
    }

    fn at(meta: &Meta, data: *const u8, cap_len: u32) -> Self {
        Self {
            data,
            ts_ns: meta.ts_ns,
            cap_len,
            wire_len: meta.wire_len,
            flow_hash: meta.flow_hash,
            lost: meta.lost,
            flags: meta.flags,
            vlan_tci: meta.vlan_tci,
            source: meta.source,
            queue: meta.queue,
        }
    }
}

/// One packet by `take`.
///
/// # Safety
/// As [`vnplug_next`].
unsafe fn one(
    port: *mut CPort,
    packet: *mut CPacket,
    take: impl FnOnce(&mut Port) -> Result<Next<'_>, Error>,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    if packet.is_null() {
        return E_INVALID;
    }
    let outcome = handle.attempt(|port| {
        Ok(match take(port)? {
            Next::Packet(taken) => {
                // SAFETY: not null, and may be written by the caller's promise.
                unsafe { packet.write(CPacket::of(&taken)) };
                PACKET
            }
            Next::Nothing => 0,
            Next::Ended => 2,
        })
    });
    outcome.unwrap_or_else(|status| status)
}

pub(super) const PACKET: c_int = 1;
