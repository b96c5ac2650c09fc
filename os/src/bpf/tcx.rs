//! Programs at the way in of an interface, before the host's stack (TCX, Linux ≥ 6.6).

use std::io;
use std::path::Path;

use super::Program;
use super::link::Link;
use super::pin::{pin, pinned};

/// A program at the way in of an interface; it is there while this lives, or a name of it
/// ([`pin`](Self::pin)).
#[derive(Debug)]
pub struct TcxLink(Link);

impl TcxLink {
    /// Attaches a program behind those that are there, at an interface of the calling thread's network
    /// namespace.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.6; `ENODEV` if there is no such interface.
    pub fn attach(program: &Program, index: i32) -> io::Result<Self> {
        Link::attach(program, index, TCX_INGRESS, 0).map(Self)
    }

    /// The link of this name in a bpf filesystem.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(Link(pinned(path)?)))
    }

    /// Gives it a name, under which it stays when the daemon ends in whatever way.
    ///
    /// # Errors
    /// `EEXIST` if the name is taken.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.0.0, path)
    }

    /// Replaces the program; every frame meets the old one or the new one.
    ///
    /// # Errors
    /// `ENOLINK` if the interface is gone; `EINVAL` if it is no such link.
    pub fn replace(&self, program: &Program) -> io::Result<()> {
        self.0.replace(program)
    }
}

/// `BPF_TCX_INGRESS`
const TCX_INGRESS: u32 = 46;
