//! Programs: what the kernel's verifier says of them, and what they make of a frame.
#![expect(
    unsafe_code,
    reason = "bpf(2) has no safe wrapper; its arguments are addresses of buffers"
)]

use std::ffi::{CStr, c_int};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};

use super::xdp::ATTACH_XDP;
use super::{Info, Insn, NAME_BYTES, OBJ_GET_INFO_BY_FD, bpf, descriptor, number, object_name};

/// A program that the kernel has verified.
#[derive(Debug)]
pub struct Program {
    pub(super) fd: OwnedFd,
}

/// What a program is for (`enum bpf_prog_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum ProgramKind {
    /// A socket's filter.
    SocketFilter = 1,
    /// The kernel's traffic control, as a frame comes or goes ([`TcxLink`](super::TcxLink)).
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
struct ById {
    id: u32,
    next_id: u32,
    flags: u32,
}

const PROG_LOAD: c_int = 5;
const PROG_TEST_RUN: c_int = 10;
const PROG_GET_FD_BY_ID: c_int = 13;

/// `BPF_F_XDP_HAS_FRAGS`
const XDP_HAS_FRAGS: u32 = 1 << 5;
/// Where `struct bpf_prog_info` has the number.
const PROG_INFO_ID: usize = 4;
/// Where it has the name.
const INFO_NAME: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_told_on_one_line_and_its_end_alone() {
        assert_eq!(tail(b"0: r0\nR0 !read_ok\n\n\0rest"), "0: r0 | R0 !read_ok");
        assert_eq!(tail(&[b'a'; 1000]).len(), 400);
    }
}
