//! Parsing and printing packets; small helpers that programs expect here.

#![expect(unsafe_code, reason = "the C ABI")]

use std::ffi::{c_char, c_double, c_int, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_raw_parts;
use std::time::{SystemTime, UNIX_EPOCH};

use libc::{time_t, timeval};

use crate::abi::packet::PacketHeader;
use crate::error::{GENERIC, INVALID_ARGUMENT};
use crate::parse::{Headers, headers, symmetric_hash};
use crate::print;

/// `pfring_parse_pkt`.
///
/// # Safety
/// `pkt` is NULL or `hdr->caplen` bytes; `hdr` is NULL or a header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_parse_pkt(
    pkt: *mut u8,
    hdr: *mut PacketHeader,
    level: u8,
    add_timestamp: u8,
    add_hash: u8,
) -> c_int {
    if pkt.is_null() || hdr.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a header, as the caller says.
    let header = unsafe { &mut *hdr };
    // SAFETY: this many bytes, as the caller says.
    let packet = unsafe { from_raw_parts(pkt, header.caplen as usize) };
    let Ok(found) = catch_unwind(|| headers(packet, level)) else {
        return GENERIC;
    };
    let Headers {
        mut parsed,
        level,
        flags,
    } = found;
    parsed.last_matched_rule_id = header.extended.parsed.last_matched_rule_id;
    header.extended.parsed = parsed;
    header.extended.flags |= flags;
    if add_timestamp != 0 && { header.ts }.tv_sec == 0 {
        header.ts = now();
    }
    if add_hash != 0 && { header.extended.pkt_hash } == 0 {
        header.extended.pkt_hash = symmetric_hash(&parsed);
    }
    level.into()
}

/// `pfring_print_parsed_pkt`.
///
/// # Safety
/// `buff` has room for `buff_len` bytes; `p` is `h->caplen` bytes; `h` is a header.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_print_parsed_pkt(
    buff: *mut c_char,
    buff_len: c_uint,
    p: *const u8,
    h: *const PacketHeader,
) -> c_int {
    if buff.is_null() || p.is_null() || h.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: a header, as the caller says.
    let header = unsafe { &*h };
    // SAFETY: this many bytes, as the caller says.
    let packet = unsafe { from_raw_parts(p, header.caplen as usize) };
    let parsed = header.extended.parsed;
    let (hash, len) = (header.extended.pkt_hash, header.len);
    // SAFETY: room, as the caller says.
    unsafe { put(buff, buff_len, || print::line(&parsed, hash, packet, len)) }
}

/// `pfring_print_pkt`.
///
/// # Safety
/// `buff` has room for `buff_len` bytes; `p` is `caplen` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_print_pkt(
    buff: *mut c_char,
    buff_len: c_uint,
    p: *const u8,
    len: c_uint,
    caplen: c_uint,
) -> c_int {
    if buff.is_null() || p.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: this many bytes, as the caller says.
    let packet = unsafe { from_raw_parts(p, caplen as usize) };
    let text = || {
        let parsed = headers(packet, u8::MAX).parsed;
        print::line(&parsed, symmetric_hash(&parsed), packet, len)
    };
    // SAFETY: room, as the caller says.
    unsafe { put(buff, buff_len, text) }
}

/// `pfring_format_numbers`.
///
/// # Safety
/// `buf` is NULL or has room for `buf_len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn pfring_format_numbers(
    val: c_double,
    buf: *mut c_char,
    buf_len: c_uint,
    add_decimals: u8,
) -> *mut c_char {
    if !buf.is_null() {
        // SAFETY: room, as the caller says.
        unsafe { put(buf, buf_len, || print::number(val, add_decimals != 0)) };
    }
    buf
}

/// `gmt_to_local`: seconds to add to GMT for the local time at `t` (0 = now).
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gmt_to_local(t: time_t) -> i32 {
    let at = match t {
        0 => now().tv_sec,
        t => t,
    };
    // SAFETY: numbers and a pointer, for which zeros are valid.
    let mut local: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both live over the call.
    let converted = unsafe { libc::localtime_r(&raw const at, &raw mut local) };
    match converted.is_null() {
        true => 0,
        false => i32::try_from(local.tm_gmtoff).unwrap_or(0),
    }
}

/// Writes text as a C string, cut to the room there is; returns the length written.
///
/// # Safety
/// `buff` has room for `len` bytes.
unsafe fn put(buff: *mut c_char, len: c_uint, text: impl FnOnce() -> String) -> c_int {
    let Some(room) = (len as usize).checked_sub(1) else {
        return 0;
    };
    let Ok(text) = catch_unwind(AssertUnwindSafe(text)) else {
        return GENERIC;
    };
    let len = text.len().min(room);
    // SAFETY: `len` bytes and the NUL fit.
    unsafe {
        text.as_ptr().copy_to_nonoverlapping(buff.cast(), len);
        buff.add(len).write(0);
    }
    c_int::try_from(len).unwrap_or(c_int::MAX)
}

fn now() -> timeval {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    timeval {
        tv_sec: since.as_secs() as i64,
        tv_usec: since.subsec_micros().into(),
    }
}
