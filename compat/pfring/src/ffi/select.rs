//! Which packets are received.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::Ordering;
use std::time::Duration;

use vnplug::{Balance, Direction, Tuning};

use super::attempt;
use crate::abi::ring::{Ring, flags, mode};
use crate::device;
use crate::error::{INVALID_ARGUMENT, NOT_SUPPORTED};
use crate::handle::{Failure, Handle};

const INVALID: Failure = Failure::new(INVALID_ARGUMENT, libc::EINVAL);
const UNSUPPORTED: Failure = Failure::new(NOT_SUPPORTED, libc::ENOTSUP);

/// `pfring_set_poll_watermark`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_poll_watermark(
    ring: *mut Ring,
    watermark: u16,
) -> c_int {
    let act = |handle: &Handle| {
        let mut reader = handle.reader();
        let most = reader.largest_watermark();
        reader.settings.watermark = Some(u32::from(watermark).clamp(1, most));
        reader.wake_at();
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_poll_watermark_timeout`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_poll_watermark_timeout(
    ring: *mut Ring,
    ms: u16,
) -> c_int {
    let act = |handle: &Handle| {
        let mut reader = handle.reader();
        let timeout = Duration::from_millis(ms.into());
        reader.settings.watermark_timeout = (ms > 0).then_some(timeout);
        reader.wake_at();
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_poll_duration`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_poll_duration(
    ring: *mut Ring,
    duration: c_uint,
) -> c_int {
    let act = |handle: &Handle| {
        handle.set_poll_duration(Duration::from_millis(duration.into()));
        let shown = u16::try_from(duration).unwrap_or(u16::MAX);
        handle.ring.poll_duration.store(shown, Ordering::Relaxed);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_bpf_filter`.
///
/// # Safety
/// See [`super::with`]; `filter_buffer` is NULL or a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_bpf_filter(
    ring: *mut Ring,
    filter_buffer: *const c_char,
) -> c_int {
    if filter_buffer.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a C string, as the caller says.
    let text = unsafe { CStr::from_ptr(filter_buffer) };
    let act = |handle: &Handle| {
        let text = text.to_str().map_err(|_| INVALID)?.to_owned();
        set_filter(handle, text)
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_remove_bpf_filter`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_remove_bpf_filter(ring: *mut Ring) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, |handle| set_filter(handle, String::new())) }
}

fn set_filter(handle: &Handle, text: String) -> Result<(), Failure> {
    // The host filters what is received; a filter of what is sent would be none.
    if handle.ring.flags & flags::TX_BPF != 0 {
        return Err(UNSUPPORTED);
    }
    let mut reader = handle.reader();
    let old = reader.settings.clone();
    reader.settings.filter = text;
    Ok(reader.filter(old)?)
}

/// `pfring_set_vlan_id`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_vlan_id(ring: *mut Ring, vlan_id: u16) -> c_int {
    let act = |handle: &Handle| {
        let vlan = match vlan_id {
            ANY_VLAN => None,
            0..=4095 => Some(vlan_id),
            _ => return Err(INVALID),
        };
        let mut reader = handle.reader();
        let old = reader.settings.clone();
        reader.settings.vlan = vlan;
        Ok(reader.filter(old)?)
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_direction`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_direction(ring: *mut Ring, direction: u32) -> c_int {
    let act = |handle: &Handle| {
        let wanted = match direction {
            0 => Direction::Both,
            1 => Direction::Rx,
            2 => Direction::Tx,
            _ => return Err(INVALID),
        };
        let mut reader = handle.reader();
        let tuning = reader.settings.tuning;
        reader.tune(Tuning {
            direction: wanted,
            ..tuning
        })?;
        handle.ring.direction.store(direction, Ordering::Relaxed);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_sampling_rate`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_sampling_rate(ring: *mut Ring, rate: u32) -> c_int {
    let act = |handle: &Handle| {
        if rate == 0 {
            return Err(INVALID);
        }
        let mut reader = handle.reader();
        let tuning = reader.settings.tuning;
        reader.tune(Tuning {
            sample: rate,
            ..tuning
        })?;
        handle.ring.sampling_rate.store(rate, Ordering::Relaxed);
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_socket_mode`: asks at once for what sending needs.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_socket_mode(ring: *mut Ring, wanted: u32) -> c_int {
    let act = |handle: &Handle| match wanted {
        mode::SEND_AND_RECV | mode::SEND_ONLY | mode::RECV_ONLY | mode::MANAGEMENT_ONLY => {
            handle.set_mode(wanted)
        }
        _ => Err(INVALID),
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_packet_slicing`: `caplen` of `pfring_open` cuts packets here.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_packet_slicing(
    ring: *mut Ring,
    level: u32,
    _additional_bytes: u32,
) -> c_int {
    let act = |_: &Handle| if level == 0 { Ok(()) } else { Err(UNSUPPORTED) };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_channel_id`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_channel_id(ring: *mut Ring, channel_id: u32) -> c_int {
    let mask = match channel_id {
        // RING_ANY_CHANNEL, cut to the argument's width.
        u32::MAX => u64::MAX,
        id => 1u64.checked_shl(id).unwrap_or(0),
    };
    // SAFETY: the caller's promise.
    unsafe { pfring_set_channel_mask(ring, mask) }
}

/// `pfring_set_channel_mask`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_channel_mask(
    ring: *mut Ring,
    channel_mask: u64,
) -> c_int {
    let act = |handle: &Handle| {
        handle.only_disabled()?;
        let name = handle.name.to_str().map_err(|_| INVALID)?;
        let targets = device::with_mask(name, channel_mask, handle.queues).ok_or(INVALID)?;
        Ok(handle.reader().replace(targets, &handle.gate)?)
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_set_cluster`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_cluster(
    ring: *mut Ring,
    cluster_id: c_uint,
    the_type: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { join(ring, cluster_id, the_type) }
}

/// `pfring_set_cluster_consumer`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_cluster_consumer(
    ring: *mut Ring,
    cluster_id: u16,
    _queue_id: u16,
    the_type: u32,
    _options: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { join(ring, cluster_id.into(), the_type) }
}

/// `pfring_remove_from_cluster`.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_remove_from_cluster(ring: *mut Ring) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, |handle| set_cluster(handle, None)) }
}

/// # Safety
/// See [`super::with`].
unsafe fn join(ring: *mut Ring, cluster_id: u32, the_type: u32) -> c_int {
    let act = |handle: &Handle| {
        let balance = balance(the_type)?;
        set_cluster(handle, Some((cluster_id, balance)))
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

fn set_cluster(handle: &Handle, cluster: Option<(u32, Balance)>) -> Result<(), Failure> {
    handle.only_disabled()?;
    let mut reader = handle.reader();
    let old = std::mem::replace(&mut reader.settings.cluster, cluster);
    let reopened = reader.reopen(&handle.gate);
    if reopened.is_err() {
        reader.settings.cluster = old;
    }
    Ok(reopened?)
}

/// How a cluster type shares: the daemon's flow hash keeps a flow, and all fragments of a datagram,
/// together, and looks into tunnels. It does not keep two hosts together.
fn balance(the_type: u32) -> Result<Balance, Failure> {
    match the_type {
        PER_FLOW
        | PER_FLOW_4_TUPLE
        | PER_FLOW_5_TUPLE
        | PER_FLOW_IP_5_TUPLE
        | PER_INNER_FLOW
        | PER_INNER_FLOW_4_TUPLE
        | PER_INNER_FLOW_5_TUPLE
        | PER_INNER_FLOW_IP_5_TUPLE => Ok(Balance::Flow),
        ROUND_ROBIN => Ok(Balance::RoundRobin),
        0..=LAST_CLUSTER_TYPE => Err(UNSUPPORTED),
        _ => Err(INVALID),
    }
}

/// `pfring_enable_rss_rehash`: the daemon's hash is symmetric in any case.
///
/// # Safety
/// See [`super::with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_enable_rss_rehash(ring: *mut Ring) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, |_| Ok(())) }
}

/// `pfring_set_application_name`.
///
/// # Safety
/// See [`super::with`]; `name` is NULL or a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_set_application_name(
    ring: *mut Ring,
    name: *mut c_char,
) -> c_int {
    if name.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a C string, as the caller says.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let act = |handle: &Handle| {
        let label: String = name.chars().take(MAX_NAME).collect();
        handle
            .reader()
            .rename(format!("{label}[{}]", std::process::id()));
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `RING_ANY_VLAN`.
const ANY_VLAN: u16 = 0xffff;
/// Characters of an application's name that are kept.
const MAX_NAME: usize = 64;

/// `cluster_type`.
const PER_FLOW: u32 = 0;
const ROUND_ROBIN: u32 = 1;
const PER_FLOW_4_TUPLE: u32 = 3;
const PER_FLOW_5_TUPLE: u32 = 4;
const PER_INNER_FLOW: u32 = 6;
const PER_INNER_FLOW_4_TUPLE: u32 = 8;
const PER_INNER_FLOW_5_TUPLE: u32 = 9;
const PER_FLOW_IP_5_TUPLE: u32 = 11;
const PER_INNER_FLOW_IP_5_TUPLE: u32 = 12;
const LAST_CLUSTER_TYPE: u32 = 13;
