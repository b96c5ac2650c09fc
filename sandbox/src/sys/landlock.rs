//! Landlock: the fence below the filter, where the kernel has it.
//!
//! | ABI | Linux | used for |
//! |---|---|---|
//! | 1 | 5.13 | no way into other processes (ptrace, `/proc/PID/mem`); with `--files` no file is written to |
//! | 4 | 6.7 | no TCP but through us |
//! | 6 | 6.12 | no abstract Unix sockets and no signals out of the sandbox |
#![expect(
    unsafe_code,
    reason = "landlock(7)'s system calls, which rustix does not have"
)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `struct landlock_ruleset_attr` of ABI 6; older kernels take its beginning.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    files: u64,
    net: u64,
    scoped: u64,
}

/// Rules for this thread and all that it starts, not in force yet.
#[derive(Debug)]
pub(crate) struct Ruleset(OwnedFd);

/// Making block devices: what a rule set may forbid that forbids no file to an ordinary user.
const MAKE_BLOCK: u64 = 1 << 11;
const BIND_TCP: u64 = 1;
const CONNECT_TCP: u64 = 1 << 1;
const SCOPE_ABSTRACT: u64 = 1;
const SCOPE_SIGNAL: u64 = 1 << 1;

/// All ways of changing files: writing, removing, making; of ABI 2 moving to other directories, of 3 cutting.
fn writes(abi: u32) -> u64 {
    const WRITE: u64 = 1 << 1;
    const REMOVE_AND_MAKE: u64 = 0b1_1111_1111 << 4;
    const REFER: u64 = 1 << 13;
    const TRUNCATE: u64 = 1 << 14;
    let refer = if abi >= 2 { REFER } else { 0 };
    let truncate = if abi >= 3 { TRUNCATE } else { 0 };
    WRITE | REMOVE_AND_MAKE | refer | truncate
}

/// The kernel's ABI; 0 if it has no Landlock.
pub(crate) fn abi() -> u32 {
    const VERSION: libc::c_uint = 1;
    // SAFETY: with this flag the call takes no structure.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<Attributes>(),
            0_usize,
            VERSION,
        )
    };
    u32::try_from(version).unwrap_or(0)
}

impl Ruleset {
    /// Forbids TCP, abstract Unix sockets and signals to the outside as far as the kernel knows them, and with
    /// `files` changing any file.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new(abi: u32, files: bool) -> io::Result<Self> {
        let attributes = Attributes {
            files: if files { writes(abi) } else { MAKE_BLOCK },
            net: if abi >= 4 { BIND_TCP | CONNECT_TCP } else { 0 },
            scoped: if abi >= 6 {
                SCOPE_ABSTRACT | SCOPE_SIGNAL
            } else {
                0
            },
        };
        let length: usize = match abi {
            0..=3 => 8,
            4..=5 => 16,
            _ => 24,
        };
        // SAFETY: the kernel reads `length` bytes of `attributes`, which are fewer than it has.
        let number = unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                &raw const attributes,
                length,
                0,
            )
        };
        match i32::try_from(number) {
            // SAFETY: the call has just made this descriptor for us.
            Ok(number) if number >= 0 => Ok(Self(unsafe { OwnedFd::from_raw_fd(number) })),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Puts the rules in force. The thread must have set `no_new_privs`.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn enforce(self) -> io::Result<()> {
        // SAFETY: the call takes numbers.
        done(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.0.as_raw_fd(), 0) })
    }
}

fn done(result: libc::c_long) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
