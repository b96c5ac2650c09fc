//! eBPF: maps, programs and links (bpf(2); Linux ≥ 5.9 for links to XDP).
//!
//! Programs are arrays of instructions, made by this daemon or read from an operator's object. Everything
//! here is a descriptor. A link that is dropped, or whose process ends in whatever way, detaches
//! its program, unless somebody gave it a name in a bpf filesystem ([`TcxLink::pin`], [`Shared::pin`]).
//!
//! Making maps and programs needs `CAP_BPF`, and `CAP_NET_ADMIN` for XDP (`CAP_SYS_ADMIN` before
//! Linux 5.8). What is made stays usable without them: a program is attached to another interface,
//! a map read and written, by their descriptors.
#![expect(
    unsafe_code,
    reason = "bpf(2) has no safe wrapper; its arguments are addresses of buffers"
)]

mod array;
pub mod asm;
mod counter;
mod link;
mod pin;
mod program;
mod shared;
mod tcx;
mod xdp;

use std::ffi::c_int;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub use array::Array;
pub use asm::Insn;
pub use counter::Counters;
pub use pin::is_bpffs;
pub use program::{LoadError, Program, ProgramKind, program_name};
pub use shared::{Shape, Shared};
pub use tcx::TcxLink;
pub use xdp::{Hook, XdpLink};

/// A map: memory that programs and the daemon share.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    key_bytes: usize,
    value_bytes: usize,
}

/// What a map is (`enum bpf_map_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// From keys of any bytes.
    Hash = 1,
    /// Keys are `u32` below the number of entries.
    Array = 2,
    /// As that, with a value for each CPU.
    PerCpuArray = 6,
    /// A hash that forgets what was used the longest time ago.
    LruHash = 9,
    /// An array of AF_XDP sockets.
    Sockets = 17,
}

impl Map {
    /// Makes a map of zeroes.
    pub fn create(
        kind: MapKind,
        name: &str,
        (key_bytes, value_bytes): (usize, usize),
        entries: u32,
    ) -> io::Result<Self> {
        Self::create_with(kind, name, (key_bytes, value_bytes), entries, 0)
    }

    fn create_with(
        kind: MapKind,
        name: &str,
        (key_bytes, value_bytes): (usize, usize),
        entries: u32,
        flags: u32,
    ) -> io::Result<Self> {
        let mut attr = MapCreate {
            kind: kind as u32,
            key_bytes: key_bytes as u32,
            value_bytes: value_bytes as u32,
            entries,
            flags,
            inner_map_fd: 0,
            numa_node: 0,
            name: object_name(name),
        };
        // SAFETY: BPF_MAP_CREATE reads the structure only.
        let fd = unsafe { descriptor(MAP_CREATE, &mut attr) }?;
        Ok(Self {
            fd,
            key_bytes,
            value_bytes,
        })
    }

    /// Sets the value of a key, and makes the entry if the map has none.
    pub fn update(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.check(key)?;
        if value.len() != self.value_bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut attr = self.element(key, value.as_ptr().addr());
        // SAFETY: the kernel reads as many bytes of key and value as the map has, which were
        // checked.
        unsafe { bpf(MAP_UPDATE_ELEM, &mut attr) }.map(drop)
    }

    /// Puts an AF_XDP socket into a map of sockets; the entry goes when the socket is closed.
    pub fn set_socket(&self, index: u32, socket: &OwnedFd) -> io::Result<()> {
        self.update(&index.to_ne_bytes(), &socket.as_raw_fd().to_ne_bytes())
    }

    /// From now on no system call changes it (Linux ≥ 5.2).
    fn freeze(&self) -> io::Result<()> {
        let mut attr = self.fd.as_raw_fd() as u32;
        // SAFETY: BPF_MAP_FREEZE reads one number, the descriptor.
        unsafe { bpf(MAP_FREEZE, &mut attr) }.map(drop)
    }

    fn check(&self, key: &[u8]) -> io::Result<()> {
        match key.len() == self.key_bytes {
            true => Ok(()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn element(&self, key: &[u8], value: usize) -> MapElement {
        MapElement {
            map_fd: self.fd.as_raw_fd() as u32,
            padding: 0,
            key: key.as_ptr().addr() as u64,
            value: value as u64,
            flags: 0,
        }
    }
}

/// The number in the kernel of a program or a map, which lies at this place of what is known of it.
fn number(fd: &OwnedFd, at: usize) -> io::Result<u32> {
    let mut info = [0_u8; 8];
    let mut attr = Info {
        fd: fd.as_raw_fd() as u32,
        info_bytes: info.len() as u32,
        info: info.as_mut_ptr().addr() as u64,
    };
    // SAFETY: BPF_OBJ_GET_INFO_BY_FD writes at most `info_bytes` bytes to `info`.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attr) }?;
    let bytes = info.get(at..at + 4).and_then(|it| it.try_into().ok());
    Ok(bytes.map_or(0, u32::from_ne_bytes))
}

/// What a map is: its kind, bytes of a key and of a value, entries, flags.
fn map_shape(map: &OwnedFd) -> io::Result<[u32; 5]> {
    // `struct bpf_map_info` begins with type, id, key_size, value_size, max_entries, map_flags.
    let mut info = [0_u32; 6];
    let mut attr = Info {
        fd: map.as_raw_fd() as u32,
        info_bytes: size_of_val(&info) as u32,
        info: info.as_mut_ptr().addr() as u64,
    };
    // SAFETY: BPF_OBJ_GET_INFO_BY_FD writes at most `info_bytes` bytes to `info`, whatever the object is.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attr) }?;
    let [kind, _, key, value, entries, flags] = info;
    Ok([kind, key, value, entries, flags])
}

/// A name as the kernel wants it: letters, digits, `_` and `.`, at most 15.
fn object_name(name: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    for (to, from) in bytes.iter_mut().take(NAME_BYTES - 1).zip(name.bytes()) {
        *to = match from {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' => from,
            _ => b'_',
        };
    }
    bytes
}

/// How many CPUs per-CPU values are for (`0-3,5` in sysfs means 5 of them).
pub fn possible_cpus() -> io::Result<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let count = |range: &str| -> Option<usize> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    text.trim()
        .split(',')
        .map(count)
        .sum::<Option<usize>>()
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// # Safety
/// `attr` is the structure of `command`, and every address in it is what the command makes of it.
unsafe fn bpf<T>(command: c_int, attr: &mut T) -> io::Result<c_int> {
    let mut tries = 0;
    loop {
        tries += 1;
        // SAFETY: the kernel reads and writes at most `size_of::<T>()` bytes of `attr`; the rest
        // the caller promises.
        let result = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                command,
                std::ptr::from_mut(attr),
                size_of::<T>(),
            )
        };
        if result >= 0 {
            return Ok(result as c_int);
        }
        let error = io::Error::last_os_error();
        // The verifier gives up when a signal is pending.
        let again = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR));
        if !again || tries == MAX_TRIES {
            return Err(error);
        }
    }
}

/// # Safety
/// As [`bpf`]; and the command gives a new descriptor.
unsafe fn descriptor<T>(command: c_int, attr: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise; the descriptor is new and nobody else's.
    unsafe { Ok(OwnedFd::from_raw_fd(bpf(command, attr)?)) }
}

#[repr(C)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    name: [u8; NAME_BYTES],
}

#[repr(C)]
struct MapElement {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct Info {
    fd: u32,
    info_bytes: u32,
    info: u64,
}

const MAP_CREATE: c_int = 0;
const MAP_UPDATE_ELEM: c_int = 2;
const MAP_FREEZE: c_int = 22;
const OBJ_GET_INFO_BY_FD: c_int = 15;

/// `BPF_F_MMAPABLE`
const MMAPABLE: u32 = 1 << 10;
/// Of a system call that signals interrupt.
const MAX_TRIES: u32 = 16;
/// `BPF_OBJ_NAME_LEN`
const NAME_BYTES: usize = 16;
/// Where `struct bpf_map_info` has the number.
const MAP_INFO_ID: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_the_kernel_takes() {
        assert_eq!(&object_name("eth0-1"), b"eth0_1\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(
            &object_name("a very long name indeed"),
            b"a_very_long_nam\0"
        );
    }
}
