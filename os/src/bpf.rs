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
mod pin;
mod shared;
mod tcx;

use std::ffi::{CStr, c_int};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub use array::Array;
pub use asm::Insn;
pub use counter::Counters;
pub use pin::is_bpffs;
pub use shared::{Shape, Shared};
pub use tcx::TcxLink;

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

/// A program that the kernel has verified.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
}

/// What a program is for (`enum bpf_prog_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum ProgramKind {
    /// A socket's filter.
    SocketFilter = 1,
    /// The kernel's traffic control, as a frame comes or goes ([`TcxLink`]).
    Classifier = 3,
    /// The hook of a network driver.
    Xdp = 6,
}

/// The kernel did not accept a program.
#[derive(Debug)]
pub struct LoadError {
    /// The system's error.
    pub cause: io::Error,
    /// The end of the verifier's log; empty if the verifier did not run.
    pub log: String,
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.cause)?;
        match self.log.is_empty() {
            true => Ok(()),
            false => write!(f, "; the verifier says: {}", self.log),
        }
    }
}

impl Program {
    /// Loads a program; `frags`: it may see frames of several buffers (XDP, Linux ≥ 5.18).
    pub fn load(
        kind: ProgramKind,
        name: &str,
        code: &[Insn],
        frags: bool,
    ) -> Result<Self, LoadError> {
        Self::load_licensed(kind, name, code, frags, c"Dual MIT/GPL")
    }

    /// As [`load`](Self::load), of a program that others may have made. Some helpers are for programs under
    /// the GPL only.
    pub fn load_licensed(
        kind: ProgramKind,
        name: &str,
        code: &[Insn],
        frags: bool,
        license: &CStr,
    ) -> Result<Self, LoadError> {
        let mut attr = ProgramLoad {
            kind: kind as u32,
            insn_count: code.len() as u32,
            insns: code.as_ptr().addr() as u64,
            license: license.as_ptr().addr() as u64,
            log_level: 0,
            log_size: 0,
            log: 0,
            kernel_version: 0,
            flags: if frags { XDP_HAS_FRAGS } else { 0 },
            name: object_name(name),
            ifindex: 0,
            attach_type: match kind {
                ProgramKind::SocketFilter | ProgramKind::Classifier => 0,
                ProgramKind::Xdp => ATTACH_XDP,
            },
        };
        // SAFETY: BPF_PROG_LOAD reads `insn_count` instructions and the license, which live across
        // the call.
        let cause = match unsafe { descriptor(PROG_LOAD, &mut attr) } {
            Ok(fd) => return Ok(Self { fd }),
            Err(cause) => cause,
        };
        // Once more, for the log, which costs the verifier time.
        let mut log = vec![0_u8; 64 << 10];
        attr.log_level = 1;
        attr.log_size = log.len() as u32;
        attr.log = log.as_mut_ptr().addr() as u64;
        // SAFETY: as before; and the kernel writes at most `log_size` bytes of text to `log`.
        match unsafe { descriptor(PROG_LOAD, &mut attr) } {
            Ok(fd) => Ok(Self { fd }),
            Err(_) => Err(LoadError {
                cause,
                log: tail(&log),
            }),
        }
    }

    /// Runs the program on a frame, once, without a wire (Linux ≥ 4.12); its verdict.
    ///
    /// The kernel pads nothing: a frame of fewer than 14 bytes is an error.
    pub fn test(&self, frame: &[u8]) -> io::Result<u32> {
        Ok(self.test_repeatedly(frame, 1)?.0)
    }

    /// As [`test`](Self::test), `times` times; the verdict, and the nanoseconds of one run.
    pub fn test_repeatedly(&self, frame: &[u8], times: u32) -> io::Result<(u32, u32)> {
        let mut attr = TestRun {
            program_fd: self.fd.as_raw_fd() as u32,
            verdict: 0,
            bytes_in: frame.len() as u32,
            bytes_out: 0,
            data_in: frame.as_ptr().addr() as u64,
            data_out: 0,
            repeat: times,
            duration: 0,
        };
        // SAFETY: BPF_PROG_TEST_RUN reads the frame; with no address for it, it writes no output
        // but to the structure.
        unsafe { bpf(PROG_TEST_RUN, &mut attr) }?;
        Ok((attr.verdict, attr.duration))
    }

    /// As [`test`](Self::test); and what the program made of the frame, at most as much as `out` has room for.
    pub fn test_output(&self, frame: &[u8], out: &mut Vec<u8>) -> io::Result<u32> {
        let mut attr = TestRun {
            program_fd: self.fd.as_raw_fd() as u32,
            verdict: 0,
            bytes_in: frame.len() as u32,
            bytes_out: out.capacity() as u32,
            data_in: frame.as_ptr().addr() as u64,
            data_out: out.as_mut_ptr().addr() as u64,
            repeat: 1,
            duration: 0,
        };
        out.clear();
        // SAFETY: BPF_PROG_TEST_RUN reads the frame, and writes at most `bytes_out` bytes of output, for
        // which there is room.
        unsafe { bpf(PROG_TEST_RUN, &mut attr) }?;
        // SAFETY: the kernel has written `bytes_out`, and not more than there is room for.
        unsafe { out.set_len((attr.bytes_out as usize).min(out.capacity())) };
        Ok(attr.verdict)
    }

    /// Its number in the kernel, as `bpftool prog` shows it.
    pub fn id(&self) -> io::Result<u32> {
        number(&self.fd, PROG_INFO_ID)
    }

    /// Attaches the program to a socket as its filter (`SO_ATTACH_BPF`).
    pub fn attach_to_socket(&self, socket: &impl std::os::fd::AsFd) -> io::Result<()> {
        let fd: c_int = self.fd.as_raw_fd();
        // SAFETY: the option reads one integer, the program's descriptor.
        let result = unsafe {
            libc::setsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_BPF,
                (&raw const fd).cast(),
                size_of::<c_int>() as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// A program at an interface, for as long as this lives.
#[derive(Debug)]
pub struct XdpLink {
    fd: OwnedFd,
}

/// Where in the kernel an XDP program runs (`XDP_FLAGS_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Hook {
    /// After the driver, on the kernel's own packet structure: works with every driver.
    Generic = 1 << 1,
    /// In the driver, before the kernel processes the frame.
    Native = 1 << 2,
}

impl XdpLink {
    /// Attaches a program to an interface of the calling thread's network namespace.
    ///
    /// # Errors
    /// `EBUSY` or `EEXIST` if another program is there; `EOPNOTSUPP` if the driver has no such
    /// hook; `ERANGE` or `EINVAL` from drivers that cannot with the present MTU or settings.
    pub fn attach(program: &Program, index: i32, hook: Hook) -> io::Result<Self> {
        let mut attr = LinkCreate {
            program_fd: program.fd.as_raw_fd() as u32,
            target: index as u32,
            attach_type: ATTACH_XDP,
            flags: hook as u32,
        };
        // SAFETY: BPF_LINK_CREATE reads the structure only.
        let fd = unsafe { descriptor(LINK_CREATE, &mut attr) }?;
        Ok(Self { fd })
    }

    /// Replaces the program; every frame meets the old one or the new one.
    ///
    /// # Errors
    /// `ENOLINK` if the interface is gone.
    pub fn replace(&self, program: &Program) -> io::Result<()> {
        let mut attr = LinkUpdate {
            link_fd: self.fd.as_raw_fd() as u32,
            program_fd: program.fd.as_raw_fd() as u32,
            flags: 0,
            old_program_fd: 0,
        };
        // SAFETY: BPF_LINK_UPDATE reads the structure only.
        unsafe { bpf(LINK_UPDATE, &mut attr) }.map(drop)
    }
}

/// The name that its loader gave to the program with this id; needs `CAP_SYS_ADMIN`.
pub fn program_name(id: u32) -> io::Result<String> {
    let mut attr = ById {
        id,
        next_id: 0,
        flags: 0,
    };
    // SAFETY: BPF_PROG_GET_FD_BY_ID reads the structure only.
    let fd = unsafe { descriptor(PROG_GET_FD_BY_ID, &mut attr) }?;
    let mut info = [0_u8; INFO_NAME + NAME_BYTES];
    let mut attr = Info {
        fd: fd.as_raw_fd() as u32,
        info_bytes: info.len() as u32,
        info: info.as_mut_ptr().addr() as u64,
    };
    // SAFETY: BPF_OBJ_GET_INFO_BY_FD writes at most `info_bytes` bytes to `info`. Every input of it
    // that asks for more output is zero.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attr) }?;
    let name = info[INFO_NAME..].split(|&byte| byte == 0).next();
    Ok(String::from_utf8_lossy(name.unwrap_or_default()).into_owned())
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

/// The end of a NUL-terminated text, on one line.
fn tail(log: &[u8]) -> String {
    const LONGEST: usize = 400;
    let text = log.split(|&byte| byte == 0).next().unwrap_or_default();
    let text = &text[text.len().saturating_sub(LONGEST)..];
    let text = String::from_utf8_lossy(text);
    text.split('\n')
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" | ")
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
struct ProgramLoad {
    kind: u32,
    insn_count: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; NAME_BYTES],
    ifindex: u32,
    attach_type: u32,
}

#[repr(C)]
struct TestRun {
    program_fd: u32,
    verdict: u32,
    bytes_in: u32,
    bytes_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

#[repr(C)]
struct LinkUpdate {
    link_fd: u32,
    program_fd: u32,
    flags: u32,
    old_program_fd: u32,
}

#[repr(C)]
struct LinkCreate {
    program_fd: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
struct ById {
    id: u32,
    next_id: u32,
    flags: u32,
}

#[repr(C)]
struct Info {
    fd: u32,
    info_bytes: u32,
    info: u64,
}

const MAP_CREATE: c_int = 0;
const MAP_UPDATE_ELEM: c_int = 2;
const PROG_LOAD: c_int = 5;
const MAP_FREEZE: c_int = 22;
const PROG_TEST_RUN: c_int = 10;
const PROG_GET_FD_BY_ID: c_int = 13;
const OBJ_GET_INFO_BY_FD: c_int = 15;
const LINK_CREATE: c_int = 28;
const LINK_UPDATE: c_int = 29;

/// `BPF_F_MMAPABLE`
const MMAPABLE: u32 = 1 << 10;
/// Of a system call that signals interrupt.
const MAX_TRIES: u32 = 16;
/// `BPF_XDP`
const ATTACH_XDP: u32 = 37;
/// `BPF_F_XDP_HAS_FRAGS`
const XDP_HAS_FRAGS: u32 = 1 << 5;
/// `BPF_OBJ_NAME_LEN`
const NAME_BYTES: usize = 16;
/// Where `struct bpf_prog_info` and `struct bpf_map_info` have the number.
const PROG_INFO_ID: usize = 4;
const MAP_INFO_ID: usize = 4;
/// Where `struct bpf_prog_info` has the name.
const INFO_NAME: usize = 64;

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

    #[test]
    fn the_log_is_told_on_one_line_and_its_end_alone() {
        assert_eq!(tail(b"0: r0\nR0 !read_ok\n\n\0rest"), "0: r0 | R0 !read_ok");
        assert_eq!(tail(&[b'a'; 1000]).len(), 400);
    }
}
