//! The C ABI. `include/vnplug.h` is its manual; this file follows it, function by function.
//!
//! Every function catches panics, checks pointers for null, and trusts what it cannot check: that
//! non-null pointers point to what the header says.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::time::Duration;

use vnplug_ring::Packet;
use vnplug_ring::control::{Balance, Direction, FilterSpec, code};

use crate::{Client, Error, Next, Port, PortOptions, Ready};

/// `vnplug_port`.
pub(crate) struct CPort {
    port: Port,
    device: CString,
    error: CString,
}

/// `struct vnplug_packet`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CPacket {
    data: *const u8,
    ts_ns: u64,
    cap_len: u32,
    wire_len: u32,
    flow_hash: u32,
    lost: u32,
    flags: u16,
    vlan_tci: u16,
    source: u16,
    queue: u16,
}

/// `struct vnplug_insn`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CInsn {
    code: u16,
    jt: u8,
    jf: u8,
    k: u32,
}

/// `struct vnplug_options`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct COptions {
    size: usize,
    device: *const c_char,
    filter: *const c_char,
    program: *const CInsn,
    program_len: usize,
    ring_bytes: u64,
    max_delay_us: u64,
    watermark: u32,
    snaplen: u32,
    direction: u32,
    sample: u32,
    cluster: *const c_char,
    balance: u32,
    no_reconnect: u32,
    label: *const c_char,
    socket: *const c_char,
}

/// `struct vnplug_stats`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CStats {
    size: usize,
    received: u64,
    bytes: u64,
    lost: u64,
    gaps: u64,
    reopened: u64,
}

/// `struct vnplug_device`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CDevice {
    name: *mut c_char,
    kind: *mut c_char,
    state: *mut c_char,
    description: *mut c_char,
    queues: u32,
    ports: u32,
}

/// See `vnplug.h`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vnplug_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// See `vnplug.h`.
///
/// # Safety
/// `options` is null or points to `options->size` bytes, its strings end with 0, `program` points
/// to `program_len` instructions; `errbuf` is null or points to `errlen` bytes; `out` is null or
/// may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_open(
    options: *const COptions,
    errbuf: *mut c_char,
    errlen: usize,
    out: *mut *mut CPort,
) -> c_int {
    if out.is_null() {
        return E_INVALID;
    }
    // SAFETY: not null, and may be written by the caller's promise.
    unsafe { out.write(ptr::null_mut()) };
    let opened = guarded(|| {
        // SAFETY: the caller's promise about `options` is passed on.
        let options = unsafe { read_options(options) }?;
        let port = options.open()?;
        let device = c_string(port.device());
        Ok(Box::new(CPort {
            port,
            device,
            error: CString::default(),
        }))
    });
    match opened {
        Ok(port) => {
            // SAFETY: as above.
            unsafe { out.write(Box::into_raw(port)) };
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
/// `port` is null or came from `vnplug_open` and was not closed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_close(port: *mut CPort) {
    if !port.is_null() {
        // SAFETY: it came from Box::into_raw in `vnplug_open`, and is given back once.
        let port = unsafe { Box::from_raw(port) };
        // Nobody is left to be told of a panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(port)));
    }
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
    let Some(handle) = (unsafe { port.as_mut() }) else {
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
/// `port` is null or open and not in use by another thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_release(port: *mut CPort) {
    // SAFETY: the caller's promise.
    if let Some(handle) = unsafe { port.as_mut() } {
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
    let Some(handle) = (unsafe { port.as_mut() }) else {
        return E_INVALID;
    };
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    match handle.attempt(|port| port.wait(timeout)) {
        Ok(Ready::Now) => 1,
        Ok(Ready::TimedOut) => 0,
        Ok(Ready::Interrupted) => 3,
        Err(status) => status,
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_fd(port: *const CPort) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(E_INVALID, |handle| handle.port.fd().as_raw_fd())
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `filter` is null or ends with 0.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_set_filter(
    port: *mut CPort,
    filter: *const c_char,
) -> c_int {
    // SAFETY: the caller's promises.
    let (Some(handle), text) = (unsafe { (port.as_mut(), text(filter, "filter is not UTF-8")) })
    else {
        return E_INVALID;
    };
    handle.status(|port| {
        port.set_filter(match text?.map(str::trim) {
            None | Some("") => FilterSpec::All,
            Some(text) => FilterSpec::Expression(text.into()),
        })
    })
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `program` is null or points to `len`
/// instructions.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_set_program(
    port: *mut CPort,
    program: *const CInsn,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promises.
    let (Some(handle), spec) = (unsafe { (port.as_mut(), read_program(program, len)) }) else {
        return E_INVALID;
    };
    handle.status(|port| port.set_filter(spec?))
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open; `stats` is null or points to `stats->size` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_stats(port: *const CPort, stats: *mut CStats) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { port.as_ref() }) else {
        return E_INVALID;
    };
    if stats.is_null() {
        return E_INVALID;
    }
    // SAFETY: every version of the struct begins with its size.
    let size = unsafe { stats.cast::<usize>().read() };
    if size < size_of::<usize>() {
        return E_INVALID;
    }
    let counts = handle.port.counts();
    let full = CStats {
        size,
        received: counts.received,
        bytes: counts.bytes,
        lost: counts.lost,
        gaps: counts.gaps,
        reopened: counts.reopened,
    };
    let bytes = size.min(size_of::<CStats>());
    // SAFETY: `bytes` is at most the size of either; the two do not overlap.
    unsafe { ptr::copy_nonoverlapping(ptr::from_ref(&full).cast::<u8>(), stats.cast(), bytes) };
    0
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open and not in use by another thread; `name` is null or ends with 0; `value`
/// is null or may be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_host_counter(
    port: *mut CPort,
    name: *const c_char,
    value: *mut u64,
) -> c_int {
    // SAFETY: the caller's promises.
    let (handle, name) = unsafe { (port.as_mut(), text(name, "name is not UTF-8")) };
    let (Some(handle), Ok(Some(name)), false) = (handle, name, value.is_null()) else {
        return E_INVALID;
    };
    let refused = |code, text: &str| {
        Err(Error::Refused {
            code,
            text: text.into(),
        })
    };
    let found = handle.attempt(|port| {
        let Some(host) = port.stats()?.host else {
            return refused(
                code::UNAVAILABLE,
                "the host cannot be reached at this moment",
            );
        };
        match host.values.iter().find(|(key, _)| key == name) {
            Some((_, value)) => Ok(*value),
            None => refused(code::NOT_FOUND, "the host has no such counter"),
        }
    });
    match found {
        Ok(found) => {
            // SAFETY: not null, and may be written by the caller's promise.
            unsafe { value.write(found) };
            0
        }
        Err(status) => status,
    }
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_last_error(port: *const CPort) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(c"the port is NULL".as_ptr(), |handle| handle.error.as_ptr())
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_device_name(port: *const CPort) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(c"".as_ptr(), |handle| handle.device.as_ptr())
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_link_type(port: *const CPort) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(0, |handle| handle.port.link_type())
}

/// See `vnplug.h`.
///
/// # Safety
/// `port` is null or open.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vnplug_snaplen(port: *const CPort) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { port.as_ref() }.map_or(0, |handle| handle.port.snaplen())
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
            let raw = |text: &str| c_string(text).into_raw();
            let all: Box<[CDevice]> = list
                .iter()
                .map(|device| CDevice {
                    name: raw(&device.name),
                    kind: raw(&device.kind),
                    state: raw(&device.state),
                    description: raw(&device.description),
                    queues: device.queues,
                    ports: device.ports,
                })
                .collect();
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
    // SAFETY: the slice and its strings came from `into_raw` in `vnplug_list`.
    unsafe {
        let all = Box::from_raw(ptr::slice_from_raw_parts_mut(devices, count));
        for device in all {
            for text in [device.name, device.kind, device.state, device.description] {
                drop(CString::from_raw(text));
            }
        }
    }
}

impl CPort {
    /// Runs `call`, remembers its error's text and returns its number.
    fn attempt<T>(&mut self, call: impl FnOnce(&mut Port) -> Result<T, Error>) -> Result<T, c_int> {
        let port = &mut self.port;
        guarded(|| call(port)).map_err(|error| {
            self.error = c_string(&describe(&error));
            number(&error)
        })
    }

    fn status(&mut self, call: impl FnOnce(&mut Port) -> Result<(), Error>) -> c_int {
        self.attempt(call).err().unwrap_or(0)
    }
}

impl CPacket {
    fn of(packet: &Packet<'_>) -> Self {
        let meta = &packet.meta;
        Self {
            data: packet.bytes.as_ptr(),
            ts_ns: meta.ts_ns,
            cap_len: packet.bytes.len() as u32,
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

impl std::fmt::Debug for CPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.port.fmt(f)
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
    let Some(handle) = (unsafe { port.as_mut() }) else {
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

/// # Safety
/// As [`vnplug_open`] for `options`.
unsafe fn read_options(given: *const COptions) -> Result<PortOptions, Error> {
    if given.is_null() {
        return Err(Error::Invalid("options is NULL"));
    }
    // SAFETY: every version of the struct begins with its size.
    let size = unsafe { given.cast::<usize>().read() };
    if size < size_of::<usize>() || size > 1 << 16 {
        return Err(Error::Invalid("options.size: use vnplug_options_init"));
    }
    let known = size.min(size_of::<COptions>());
    let mut options = std::mem::MaybeUninit::<COptions>::zeroed();
    // SAFETY: `known` bytes are readable and fit; all-zero is a valid COptions.
    let options = unsafe {
        ptr::copy_nonoverlapping(given.cast::<u8>(), options.as_mut_ptr().cast(), known);
        options.assume_init()
    };
    // SAFETY: the caller says that `size` bytes are there.
    let rest = unsafe { std::slice::from_raw_parts(given.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|&byte| byte != 0) {
        return Err(Error::Invalid(
            "options: this library is older than the program",
        ));
    }
    // SAFETY: the strings end with 0, by the caller's promise.
    let (device, filter, cluster, label, socket) = unsafe {
        (
            text(options.device, "device is not UTF-8")?,
            text(options.filter, "filter is not UTF-8")?,
            text(options.cluster, "cluster is not UTF-8")?,
            text(options.label, "label is not UTF-8")?,
            text(options.socket, "socket is not UTF-8")?,
        )
    };
    let mut port = PortOptions::new(device.ok_or(Error::Invalid("device is NULL"))?)
        .filter(filter.unwrap_or(""))
        .snaplen(options.snaplen)
        .sample(options.sample)
        .ring_bytes(options.ring_bytes)
        .watermark(options.watermark)
        .reconnect(options.no_reconnect == 0)
        .direction(match options.direction {
            0 => Direction::Both,
            1 => Direction::Rx,
            2 => Direction::Tx,
            _ => return Err(Error::Invalid("direction")),
        });
    if !options.program.is_null() {
        if filter.is_some() {
            return Err(Error::Invalid("filter and program: set one of them"));
        }
        // SAFETY: the caller's promise.
        port = port.filter_spec(unsafe { read_program(options.program, options.program_len) }?);
    }
    if options.max_delay_us > 0 {
        port = port.max_delay(Duration::from_micros(options.max_delay_us));
    }
    if let Some(cluster) = cluster {
        let balance = match options.balance {
            0 => Balance::Flow,
            1 => Balance::RoundRobin,
            _ => return Err(Error::Invalid("balance")),
        };
        port = port.cluster(cluster, balance);
    }
    if let Some(label) = label {
        port = port.label(label);
    }
    Ok(match socket {
        Some(socket) => port.socket(socket),
        None => port,
    })
}

/// # Safety
/// `program` is null or points to `len` instructions.
unsafe fn read_program(program: *const CInsn, len: usize) -> Result<FilterSpec, Error> {
    if program.is_null() || len == 0 || len > MAX_INSNS {
        return Err(Error::Invalid(
            "a program of no or of more than 4096 instructions",
        ));
    }
    // SAFETY: not null; the caller's promise.
    let insns = unsafe { std::slice::from_raw_parts(program, len) };
    let bytes = insns.iter().flat_map(|insn| {
        let ([a, b], k) = (insn.code.to_le_bytes(), insn.k.to_le_bytes());
        [a, b, insn.jt, insn.jf, k[0], k[1], k[2], k[3]]
    });
    Ok(FilterSpec::Program(bytes.collect()))
}

/// # Safety
/// `text` is null or ends with 0, and stays for `'a`.
unsafe fn text<'a>(text: *const c_char, bad: &'static str) -> Result<Option<&'a str>, Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::Invalid(bad))
}

/// Writes the error's text, cut to the buffer and ended with 0.
///
/// # Safety
/// `errbuf` is null or points to `errlen` bytes.
unsafe fn tell(error: &Error, errbuf: *mut c_char, errlen: usize) {
    if errbuf.is_null() || errlen == 0 {
        return;
    }
    let text = c_string(&describe(error));
    let len = text.as_bytes().len().min(errlen - 1);
    // SAFETY: `len + 1 <= errlen` bytes are written; a fresh string does not overlap the buffer.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr(), errbuf, len);
        errbuf.add(len).write(0);
    }
}

fn guarded<T>(call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Error::Invalid(DEFECT)))
}

fn describe(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Text from the host may hold anything; a C string may not hold a 0.
fn c_string(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().filter(|&byte| byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

fn number(error: &Error) -> c_int {
    match error {
        Error::Invalid(DEFECT) => -24,
        Error::Invalid(_) => E_INVALID,
        Error::Unreachable { .. } => -2,
        Error::Permission { .. } => -3,
        Error::Disconnected => -4,
        Error::TimedOut => -5,
        Error::Protocol(_) => -6,
        Error::Version { .. } => -7,
        Error::Refused { code, .. } => match *code {
            code::NOT_FOUND => -11,
            code::DENIED => -12,
            code::FILTER => -13,
            code::NO_MEMORY => -14,
            code::LIMIT => -15,
            code::UNAVAILABLE => -16,
            _ => -10,
        },
        Error::Gone(_) => -20,
        Error::Quarantined => -21,
        Error::Corrupt(_) | Error::Ring(_) => -22,
        Error::System { .. } => -23,
        Error::SourceFailed(_) => -25,
    }
}

const PACKET: c_int = 1;
const E_INVALID: c_int = -1;
const DEFECT: &str = "a defect of the library: it panicked";
const MAX_INSNS: usize = 4096;

#[cfg(test)]
#[path = "ffi_tests.rs"]
mod tests;
