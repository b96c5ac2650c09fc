//! Links: a program at an interface, until its link is closed that has no name.
#![expect(
    unsafe_code,
    reason = "bpf(2) has no safe wrapper; its arguments are addresses of buffers"
)]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::{Program, bpf, descriptor};

/// The descriptor of one.
#[derive(Debug)]
pub(super) struct Link(pub(super) OwnedFd);

impl Link {
    /// Attaches a program to an interface of the calling thread's network namespace, at a place of this
    /// type (`enum bpf_attach_type`).
    pub(super) fn attach(
        program: &Program,
        index: i32,
        attach_type: u32,
        flags: u32,
    ) -> io::Result<Self> {
        let mut attr = LinkCreate {
            program_fd: program.fd.as_raw_fd() as u32,
            target: index as u32,
            attach_type,
            flags,
        };
        // SAFETY: BPF_LINK_CREATE reads the structure only.
        let fd = unsafe { descriptor(LINK_CREATE, &mut attr) }?;
        Ok(Self(fd))
    }

    /// Replaces the program; every frame meets the old one or the new one.
    pub(super) fn replace(&self, program: &Program) -> io::Result<()> {
        let mut attr = LinkUpdate {
            link_fd: self.0.as_raw_fd() as u32,
            program_fd: program.fd.as_raw_fd() as u32,
            flags: 0,
            old_program_fd: 0,
        };
        // SAFETY: BPF_LINK_UPDATE reads the structure only.
        unsafe { bpf(LINK_UPDATE, &mut attr) }.map(drop)
    }
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

const LINK_CREATE: c_int = 28;
const LINK_UPDATE: c_int = 29;
