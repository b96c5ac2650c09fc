//! Memory of the program: copied out once, by `process_vm_readv`.
#![expect(
    unsafe_code,
    reason = "process_vm_readv(2), which rustix does not have"
)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

/// Copies `into.len()` bytes at `address` of the process that `thread` is in.
///
/// Whether `thread` was still the same one the caller asks afterwards (`Listener::waits`).
///
/// # Errors
/// `EFAULT` if not all of it can be read.
pub(crate) fn read(thread: u32, address: u64, into: &mut [u8]) -> io::Result<()> {
    match read_some(thread, address, into) {
        Ok(length) if length == into.len() => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        Err(error) => Err(error),
    }
}

/// Copies what can be read of `into.len()` bytes at `address`; returns how many bytes.
///
/// # Errors
/// `EFAULT` if nothing can be read; the system's else.
pub(crate) fn read_some(thread: u32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    if into.is_empty() {
        return Ok(0);
    }
    let here = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let there = libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: into.len(),
    };
    // SAFETY: `here` is `into`, which is exclusively ours; `there` is looked up in the other process.
    let length = unsafe {
        libc::process_vm_readv(
            thread as libc::pid_t,
            &raw const here,
            1,
            &raw const there,
            1,
            0,
        )
    };
    usize::try_from(length).map_err(|_| io::Error::last_os_error())
}

/// Memory that can be written to: that of the process as it was when it was opened, also if its number means
/// another one by now.
#[derive(Debug)]
pub(crate) struct Memory(File);

impl Memory {
    /// Opens the memory of the process that `thread` is in.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open(thread: u32) -> io::Result<Self> {
        let path = format!("/proc/{thread}/mem");
        OpenOptions::new().write(true).open(path).map(Self)
    }

    /// Writes all of it there.
    ///
    /// # Errors
    /// The system's, if not all of it can be written.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, address)
    }
}
