//! Reading what a program wants of a port.
#![expect(unsafe_code, reason = "the C ABI's island")]

use std::ffi::c_char;
use std::ptr;
use std::time::Duration;

use vnplug_ring::control::{Balance, Direction, FilterSpec, Segments};

use super::error::text;
use crate::{Error, PortOptions, Waiting};

/// `struct vnplug_insn`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CInsn {
    pub(super) code: u16,
    pub(super) jt: u8,
    pub(super) jf: u8,
    pub(super) k: u32,
}

/// `struct vnplug_options`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct COptions {
    pub(super) size: usize,
    pub(super) device: *const c_char,
    pub(super) filter: *const c_char,
    pub(super) program: *const CInsn,
    pub(super) program_len: usize,
    pub(super) ring_bytes: u64,
    pub(super) max_delay_us: u64,
    pub(super) watermark: u32,
    pub(super) snaplen: u32,
    pub(super) direction: u32,
    pub(super) sample: u32,
    pub(super) cluster: *const c_char,
    pub(super) balance: u32,
    pub(super) no_reconnect: u32,
    pub(super) label: *const c_char,
    pub(super) socket: *const c_char,
    pub(super) paused: u32,
    pub(super) waiting: u32,
    pub(super) transmit_bytes: u64,
    pub(super) spin_us: u32,
    pub(super) longest_sleep_us: u32,
    pub(super) group: *const c_char,
    pub(super) arena_bytes: u64,
    pub(super) segments: u32,
    pub(super) posts: u32,
    pub(super) twin: *const c_char,
    pub(super) joins: u32,
    pub(super) reserved: u32,
}

/// Reads a struct that begins with its size, as the program was compiled with it: what it does not have is
/// zero.
///
/// # Safety
/// `T` is `repr(C)`, begins with a `usize` and may be all zeros. `given` is null or points to as many bytes
/// as that says.
pub(super) unsafe fn read_sized<T: Copy>(given: *const T) -> Result<T, Error> {
    if given.is_null() {
        return Err(Error::Invalid("options is NULL"));
    }
    // SAFETY: every version of the struct begins with its size.
    let size = unsafe { given.cast::<usize>().read() };
    if size < size_of::<usize>() || size > 1 << 16 {
        return Err(Error::Invalid(
            "options.size: use the function that initialises it",
        ));
    }
    let known = size.min(size_of::<T>());
    let mut options = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable and fit; all-zero is valid by the caller's promise.
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
    Ok(options)
}

/// Writes a struct that begins with its size, as far as the program knows it; false if it has no size.
///
/// # Safety
/// `T` is `repr(C)` and begins with a `usize`, its own size as the program has set it in `out`; `out` is null
/// or points to as many bytes.
pub(super) unsafe fn write_sized<T: Copy>(out: *mut T, full: &T) -> bool {
    if out.is_null() {
        return false;
    }
    // SAFETY: every version of the struct begins with its size.
    let size = unsafe { out.cast::<usize>().read() };
    let head = size_of::<usize>();
    if size < head {
        return false;
    }
    let bytes = size.min(size_of::<T>());
    // SAFETY: `bytes` is at most the size of either, and at least the head's, which stays; the two do not
    // overlap.
    unsafe {
        let from = ptr::from_ref(full).cast::<u8>().add(head);
        ptr::copy_nonoverlapping(from, out.cast::<u8>().add(head), bytes - head);
    }
    true
}

/// # Safety
/// As [`vnplug_open`](super::vnplug_open) for `options`.
pub(super) unsafe fn read_options(given: *const COptions) -> Result<PortOptions, Error> {
    // SAFETY: the caller's promise; zeros are numbers and null pointers.
    let options = unsafe { read_sized(given) }?;
    // SAFETY: the strings end with 0, by the caller's promise.
    let (device, filter, cluster, label, socket, group, twin) = unsafe {
        (
            text(options.device, "device is not UTF-8")?,
            text(options.filter, "filter is not UTF-8")?,
            text(options.cluster, "cluster is not UTF-8")?,
            text(options.label, "label is not UTF-8")?,
            text(options.socket, "socket is not UTF-8")?,
            text(options.group, "group is not UTF-8")?,
            text(options.twin, "twin is not UTF-8")?,
        )
    };
    let mut port = PortOptions::new(device.ok_or(Error::Invalid("device is NULL"))?)
        .filter(filter.unwrap_or(""))
        .snaplen(options.snaplen)
        .sample(options.sample)
        .ring_bytes(options.ring_bytes)
        .watermark(options.watermark)
        .reconnect(options.no_reconnect == 0)
        .enabled(options.paused == 0)
        .transmit(options.transmit_bytes)
        .waiting(waiting(&options)?)
        .group(group.unwrap_or(""))
        .program(twin.unwrap_or(""))
        .arena_bytes(options.arena_bytes)
        .direction(direction(options.direction)?)
        .segments(segments(options.segments)?);
    match options.posts {
        0 => {}
        1 => port = port.posts(),
        _ => return Err(Error::Invalid("options.posts: 0 or 1")),
    }
    match (options.joins, options.reserved) {
        (0, 0) => {}
        (1, 0) => port = port.join(),
        (2, 0) => port = port.direct(),
        (0..=2, _) => return Err(Error::Invalid("options.reserved: 0")),
        _ => return Err(Error::Invalid("options.joins: 0, 1 (switch) or 2 (direct)")),
    }
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

/// A way of waiting by its numbers in `vnplug.h`.
fn waiting(options: &COptions) -> Result<Waiting, Error> {
    let or = |us: u32, usual: Duration| match us {
        0 => usual,
        us => Duration::from_micros(us.into()),
    };
    Ok(match (options.waiting, Waiting::BALANCED) {
        (0, _) => Waiting::Sleep,
        (
            1,
            Waiting::Adaptive {
                spin,
                longest_sleep,
            },
        ) => Waiting::Adaptive {
            spin: or(options.spin_us, spin),
            longest_sleep: or(options.longest_sleep_us, longest_sleep),
        },
        (2, _) => Waiting::Spin,
        _ => return Err(Error::Invalid("waiting")),
    })
}

/// # Safety
/// `program` is null or points to `len` instructions.
pub(super) unsafe fn read_program(program: *const CInsn, len: usize) -> Result<FilterSpec, Error> {
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

/// A direction by its number in `vnplug.h`.
pub(super) fn direction(number: u32) -> Result<Direction, Error> {
    Ok(match number {
        0 => Direction::Both,
        1 => Direction::Rx,
        2 => Direction::Tx,
        _ => return Err(Error::Invalid("direction")),
    })
}

/// How super-frames come, by its number in `vnplug.h`.
fn segments(number: u32) -> Result<Segments, Error> {
    Ok(match number {
        0 => Segments::Wire,
        1 => Segments::Merged,
        _ => return Err(Error::Invalid("segments")),
    })
}

const MAX_INSNS: usize = 4096;
