//! Programs at the hook of a network driver (XDP).

use std::io;

use super::Program;
use super::link::Link;

/// A program at an interface, for as long as this lives.
#[derive(Debug)]
pub struct XdpLink(Link);

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
        Link::attach(program, index, ATTACH_XDP, hook as u32).map(Self)
    }

    /// Replaces the program; every frame meets the old one or the new one.
    ///
    /// # Errors
    /// `ENOLINK` if the interface is gone.
    pub fn replace(&self, program: &Program) -> io::Result<()> {
        self.0.replace(program)
    }
}

/// `BPF_XDP`
pub(super) const ATTACH_XDP: u32 = 37;
