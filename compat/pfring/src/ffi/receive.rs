//! Receiving: one packet, a burst, a loop; waiting.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{c_int, c_uint};
use std::slice::from_raw_parts;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{timespec, timeval};
use vnplug::Meta;

use super::{attempt, code, with};
use crate::abi::packet::{CHECKSUM_OFFLOAD, Offsets, PacketHeader, PacketInfo, UNKNOWN_INTERFACE};
use crate::abi::ring::Ring;
use crate::error::{GENERIC, INVALID_ARGUMENT, NO_PKT_AVAILABLE};
use crate::handle::{Failure, Handle, Received};
use crate::parse::{headers, symmetric_hash};
use crate::reader::Lent;

/// `pfringProcesssPacket`.
type Looper = Option<unsafe extern "C" fn(*const PacketHeader, *const u8, *const u8)>;

/// `pfring_recv`.
///
/// # Safety
/// See [`with`]; `buffer` and `hdr` are NULL or writable; with `buffer_len` > 0, `*buffer` has room
/// for this many bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_recv(
    ring: *mut Ring,
    buffer: *mut *mut u8,
    buffer_len: c_uint,
    hdr: *mut PacketHeader,
    wait: u8,
) -> c_int {
    let act = |handle: &Handle| {
        // Another reader's call would take a lent packet away.
        if buffer.is_null() || hdr.is_null() || (buffer_len == 0 && handle.reentrant) {
            return INVALID_ARGUMENT;
        }
        let entered = (wait != 0).then(|| handle.gate.enter());
        let received = handle.receive(wait != 0, entered, |lent| {
            // SAFETY: `hdr` is writable, as the caller says.
            unsafe { fill_header(handle, lent, hdr) };
            reflect(handle, lent);
            if buffer_len == 0 {
                // SAFETY: `buffer` is writable, as the caller says.
                unsafe { buffer.write(lent.data.cast_mut()) };
            } else {
                let len = lent
                    .len
                    .min(handle.caplen as usize)
                    .min(buffer_len as usize);
                // SAFETY: `len` bytes are in the ring, which is locked, and in the caller's buffer.
                unsafe { lent.data.copy_to_nonoverlapping(*buffer, len) };
            }
        });
        counted(received.map(|received| match received {
            Received::Packet(()) => Received::Packet(1),
            Received::Nothing => Received::Nothing,
            Received::Broken => Received::Broken,
        }))
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, INVALID_ARGUMENT, act) }
}

/// `pfring_recv_parsed`.
///
/// # Safety
/// As [`pfring_recv`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_recv_parsed(
    ring: *mut Ring,
    buffer: *mut *mut u8,
    buffer_len: c_uint,
    hdr: *mut PacketHeader,
    wait: u8,
    level: u8,
    add_timestamp: u8,
    add_hash: u8,
) -> c_int {
    // SAFETY: the caller's promise.
    let received = unsafe { pfring_recv(ring, buffer, buffer_len, hdr, wait) };
    if received <= 0 {
        return received;
    }
    let mut seen = PacketLen::default();
    if buffer_len > 0 {
        // SAFETY: just filled. What did not fit the buffer cannot be parsed.
        seen = unsafe { PacketLen::cut(hdr, buffer_len) };
    }
    // SAFETY: `caplen` bytes of the packet are at `*buffer`.
    let level =
        unsafe { super::packet::pfring_parse_pkt(*buffer, hdr, level, add_timestamp, add_hash) };
    // SAFETY: as above.
    unsafe { seen.restore(hdr) };
    level.max(1)
}

/// The captured length of a header, put aside while a shorter one is in force.
#[derive(Default)]
struct PacketLen(Option<u32>);

impl PacketLen {
    /// # Safety
    /// `hdr` is a header.
    unsafe fn cut(hdr: *mut PacketHeader, len: u32) -> Self {
        // SAFETY: the caller's promise.
        let whole = unsafe { (*hdr).caplen };
        // SAFETY: the caller's promise.
        unsafe { (*hdr).caplen = whole.min(len) };
        Self(Some(whole))
    }

    /// # Safety
    /// `hdr` is the header of before.
    unsafe fn restore(self, hdr: *mut PacketHeader) {
        if let Some(whole) = self.0 {
            // SAFETY: the caller's promise.
            unsafe { (*hdr).caplen = whole };
        }
    }
}

/// `pfring_recv_burst`.
///
/// # Safety
/// See [`with`]; `packets` has room for `num_packets`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_recv_burst(
    ring: *mut Ring,
    packets: *mut PacketInfo,
    num_packets: u8,
    wait: u8,
) -> c_int {
    let act = |handle: &Handle| {
        if packets.is_null() || num_packets == 0 || handle.reentrant {
            return INVALID_ARGUMENT;
        }
        let entered = handle.gate.enter();
        let room = usize::from(num_packets);
        counted(
            handle.receive_burst(wait != 0, entered, room, |index, lent| {
                let info = PacketInfo {
                    data: lent.data.cast_mut(),
                    ts: time_of_day(lent.meta.ts_ns),
                    caplen: u16::try_from(lent.len.min(handle.caplen as usize)).unwrap_or(u16::MAX),
                    len: u16::try_from(lent.meta.wire_len).unwrap_or(u16::MAX),
                    flags: flags(&lent.meta),
                    hash: lent.meta.flow_hash,
                };
                // SAFETY: `index` is less than `num_packets`.
                unsafe { packets.add(index).write(info) };
            }),
        )
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, INVALID_ARGUMENT, act) }
}

/// `pfring_loop`.
///
/// # Safety
/// See [`with`]; `looper` may be called with `user_bytes`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_loop(
    ring: *mut Ring,
    looper: Looper,
    user_bytes: *const u8,
    wait: u8,
) -> c_int {
    let act = |handle: &Handle| {
        let Some(looper) = looper else {
            return INVALID_ARGUMENT;
        };
        // SAFETY: a header of zeros is a valid one.
        let mut header: PacketHeader = unsafe { std::mem::zeroed() };
        let mut copy = Vec::new();
        let entered = handle.gate.enter();
        loop {
            let received = handle.receive(wait != 0, Some(entered), |lent| {
                // SAFETY: our own header.
                unsafe { fill_header(handle, lent, &raw mut header) };
                reflect(handle, lent);
                if handle.reentrant {
                    copy.clear();
                    // SAFETY: this many bytes are in the ring, which is locked.
                    copy.extend_from_slice(unsafe { from_raw_parts(lent.data, lent.len) });
                    copy.as_ptr()
                } else {
                    lent.data
                }
            });
            match received {
                // SAFETY: the packet is there until the next call that receives.
                Ok(Received::Packet(data)) => unsafe {
                    looper(&raw const header, data, user_bytes)
                },
                Ok(Received::Nothing) => std::hint::spin_loop(),
                Ok(Received::Broken) => return 0,
                Err(failure) => return code(Err(failure)),
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, INVALID_ARGUMENT, act) }
}

/// `pfring_poll`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_poll(ring: *mut Ring, wait_duration: c_uint) -> c_int {
    let act = |handle: &Handle| {
        let limit = Duration::from_millis(wait_duration.into());
        code(handle.wait(limit).map(c_int::from))
    };
    // SAFETY: the caller's promise.
    unsafe { with(ring, INVALID_ARGUMENT, act) }
}

/// `pfring_get_selectable_fd`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_get_selectable_fd(ring: *mut Ring) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { with(ring, GENERIC, Handle::watch) }
}

/// `pfring_is_pkt_available`.
///
/// # Safety
/// See [`with`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_is_pkt_available(ring: *mut Ring) -> c_int {
    let act = |handle: &Handle| code(handle.peek().map(|lent| lent.is_some().into()));
    // SAFETY: the caller's promise.
    unsafe { with(ring, INVALID_ARGUMENT, act) }
}

/// `pfring_next_pkt_time`.
///
/// # Safety
/// See [`with`]; `ts` is NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_next_pkt_time(ring: *mut Ring, ts: *mut timespec) -> c_int {
    let act = |handle: &Handle| {
        let ns = next_time(handle)?;
        if !ts.is_null() {
            let time = timespec {
                tv_sec: (ns / 1_000_000_000) as i64,
                tv_nsec: (ns % 1_000_000_000) as i64,
            };
            // SAFETY: writable, as the caller says.
            unsafe { ts.write(time) };
        }
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

/// `pfring_next_pkt_raw_timestamp`.
///
/// # Safety
/// See [`with`]; `timestamp_ns` is NULL or writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_next_pkt_raw_timestamp(
    ring: *mut Ring,
    timestamp_ns: *mut u64,
) -> c_int {
    let act = |handle: &Handle| {
        let ns = next_time(handle)?;
        if !timestamp_ns.is_null() {
            // SAFETY: writable, as the caller says.
            unsafe { timestamp_ns.write(ns) };
        }
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { attempt(ring, act) }
}

fn next_time(handle: &Handle) -> Result<u64, Failure> {
    let lent = handle.peek()?;
    let none = Failure::new(NO_PKT_AVAILABLE, libc::EAGAIN);
    lent.map(|lent| lent.meta.ts_ns).ok_or(none)
}

/// How many packets there are, as C has it.
fn counted(received: Result<Received<usize>, Failure>) -> c_int {
    match received {
        Ok(Received::Packet(count)) => count as c_int,
        Ok(Received::Nothing) => 0,
        Ok(Received::Broken) => {
            super::set_errno(libc::EINTR);
            0
        }
        Err(failure) => code(Err(failure)),
    }
}

/// Fills a packet's header: the short part, and the long one if the ring was opened for it.
///
/// # Safety
/// `hdr` is writable; the packet is there.
unsafe fn fill_header(handle: &Handle, lent: &Lent, hdr: *mut PacketHeader) {
    let meta = &lent.meta;
    // SAFETY: writable, and any bytes are a valid header.
    let header = unsafe { &mut *hdr };
    header.ts = time_of_day(meta.ts_ns);
    header.caplen = (lent.len as u32).min(handle.caplen);
    header.len = meta.wire_len;
    let extended = &mut header.extended;
    extended.timestamp_ns = meta.ts_ns;
    extended.flags = flags(meta);
    extended.rx_direction = u8::from(meta.flags & vnplug::flags::OUTBOUND == 0);
    (extended.port_id, extended.device_id) = (0, meta.source);
    extended.if_index = handle.if_index;
    extended.pkt_hash = meta.flow_hash;
    if handle.long_header && handle.parse {
        // SAFETY: this many bytes are in the ring, and stay at least until the next call.
        let packet = unsafe { from_raw_parts(lent.data, lent.len) };
        let found = headers(packet, u8::MAX);
        extended.parsed = found.parsed;
        extended.flags |= found.flags;
        if meta.flow_hash == 0 {
            extended.pkt_hash = symmetric_hash(&found.parsed);
        }
    } else {
        // What an earlier packet left there must not pass for this one's.
        extended.parsed.offset = Offsets::default();
    }
    if handle.long_header {
        extended.tx.bounce_interface = UNKNOWN_INTERFACE;
        extended.pid = 0;
    }
}

/// Sends a packet on, if the program wants all of them reflected. The ring is locked.
fn reflect(handle: &Handle, lent: &Lent) {
    if handle.reflects.load(Ordering::Relaxed) {
        // SAFETY: this many bytes are in the ring, which is locked.
        handle.reflect(unsafe { from_raw_parts(lent.data, lent.len) });
    }
}

fn flags(meta: &Meta) -> u32 {
    match meta.flags & vnplug::flags::CSUM_NOT_READY {
        0 => 0,
        _ => CHECKSUM_OFFLOAD,
    }
}

fn time_of_day(ns: u64) -> timeval {
    timeval {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_usec: (ns % 1_000_000_000 / 1000) as i64,
    }
}
