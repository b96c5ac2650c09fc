//! Objects that outlive the daemon: their names in a bpf filesystem (Linux ≥ 4.4).
#![expect(
    unsafe_code,
    reason = "bpf(2) has no safe wrapper; its arguments are addresses of buffers"
)]

use std::ffi::{CString, c_int};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{bpf, descriptor};

/// Gives an object a name, under which it stays when its descriptors are closed.
///
/// # Errors
/// `EEXIST` if the name is taken; `EPERM` if the directory is on no bpf filesystem.
pub(super) fn pin(object: &OwnedFd, path: &Path) -> io::Result<()> {
    let path = name(path)?;
    let mut attr = Object {
        path: path.as_ptr().addr() as u64,
        fd: object.as_raw_fd() as u32,
        flags: 0,
    };
    // SAFETY: BPF_OBJ_PIN reads the structure and the path, which lives across the call.
    unsafe { bpf(OBJ_PIN, &mut attr) }.map(drop)
}

/// The object of a name.
///
/// # Errors
/// `NotFound` if there is none.
pub(super) fn pinned(path: &Path) -> io::Result<OwnedFd> {
    let path = name(path)?;
    let mut attr = Object {
        path: path.as_ptr().addr() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: BPF_OBJ_GET reads the structure and the path, which lives across the call.
    unsafe { descriptor(OBJ_GET, &mut attr) }
}

/// Whether a directory is on a bpf filesystem.
///
/// # Errors
/// The system's, if there is no such directory.
pub fn is_bpffs(dir: &Path) -> io::Result<bool> {
    Ok(i128::from(rustix::fs::statfs(dir)?.f_type) == i128::from(BPF_FS_MAGIC))
}

fn name(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

#[repr(C)]
struct Object {
    path: u64,
    fd: u32,
    flags: u32,
}

const OBJ_PIN: c_int = 6;
const OBJ_GET: c_int = 7;
/// Of `linux/magic.h`.
const BPF_FS_MAGIC: u32 = 0xcafe_4a11;
