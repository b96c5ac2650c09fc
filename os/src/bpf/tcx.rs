//! Programs at the way in of an interface, before the host's stack (TCX, Linux ≥ 6.6).
#![expect(
    unsafe_code,
    reason = "bpf(2) has no safe wrapper; its arguments are addresses of buffers"
)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use super::pin::{pin, pinned};
use super::{LINK_CREATE, LINK_UPDATE, LinkCreate, LinkUpdate, Program, bpf, descriptor};

/// A program at the way in of an interface; it is there while this lives, or a name of it
/// ([`pin`](Self::pin)).
#[derive(Debug)]
pub struct TcxLink {
    fd: OwnedFd,
}

impl TcxLink {
    /// Attaches a program behind those that are there, at an interface of the calling thread's network
    /// namespace.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.6; `ENODEV` if there is no such interface.
    pub fn attach(program: &Program, index: i32) -> io::Result<Self> {
        let mut attr = LinkCreate {
            program_fd: program.fd.as_raw_fd() as u32,
            target: index as u32,
            attach_type: TCX_INGRESS,
            flags: 0,
        };
        // SAFETY: BPF_LINK_CREATE reads the structure only.
        let fd = unsafe { descriptor(LINK_CREATE, &mut attr) }?;
        Ok(Self { fd })
    }

    /// The link of this name in a bpf filesystem.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { fd: pinned(path)? })
    }

    /// Gives it a name, under which it stays when the daemon ends in whatever way.
    ///
    /// # Errors
    /// `EEXIST` if the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// Replaces the program; every frame meets the old one or the new one.
    ///
    /// # Errors
    /// `ENOLINK` if the interface is gone; `EINVAL` if it is no such link.
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

/// `BPF_TCX_INGRESS`
const TCX_INGRESS: u32 = 46;
