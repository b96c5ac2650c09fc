//! Pairs of datagram sockets, as QEMU's `-netdev dgram` wants them: each end has a name, and sends to the
//! other's.
//!
//! A client binds a socket in the directory, `NAME`; the switch finds it there, makes `NAME.port`, which is
//! connected to it, and the pair is a port. Both ends find each other again by name, so a client does not
//! notice that the daemon was restarted but by the frames that it sent meanwhile, which are lost.
//!
//! Whose port it is, is said by the owner of the client's file. Nobody but that socket can send to ours,
//! for ours is connected to it, and not to a name.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::porter::{self, Access, Directory};

/// The directory, and what is there.
pub(super) struct Pairs {
    dir: Directory,
    access: Access,
    /// Clients that cannot join: the reason is said once.
    refused: HashSet<String>,
}

/// A client's socket that has no port.
pub(super) struct Found {
    pub(super) name: String,
    pub(super) uid: u32,
    file: OwnedFd,
    /// Connected to it, or why that is not possible.
    ours: io::Result<OwnedFd>,
}

/// A pair; our name goes with it.
#[derive(Debug)]
pub(super) struct Pair {
    name: String,
    theirs: OwnedFd,
    ours: PathBuf,
}

impl Pairs {
    pub(super) fn new(dir: Directory, access: Access) -> io::Result<Self> {
        dir.clear(|name| name.ends_with(OURS))?;
        Ok(Self {
            dir,
            access,
            refused: HashSet::new(),
        })
    }

    /// The clients that are there and have no port; `is_held`: one of this name has.
    pub(super) fn found(&mut self, is_held: impl Fn(&str) -> bool) -> Vec<Found> {
        let entries = std::fs::read_dir(&self.dir.real).into_iter().flatten();
        let mut all = Vec::new();
        for entry in entries.flatten().take(MAX_FILES) {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if name.ends_with(OURS) || name.chars().any(char::is_control) || is_held(&name) {
                continue;
            }
            let Ok((file, uid)) = porter::find_socket(&self.dir.real.join(&name)) else {
                continue;
            };
            let ours = porter::connected(&file);
            if all.len() == MAX_FOUND {
                // The rest is found next time: each has two descriptors here.
                break;
            }
            // Nobody has it any more.
            let is_left = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            if !ours.as_ref().is_err_and(is_left) {
                all.push(Found {
                    name,
                    uid,
                    file,
                    ours,
                });
            }
        }
        self.refused
            .retain(|name| all.iter().any(|found| found.name == *name));
        all
    }

    /// The one of this name cannot join now; whether that is news.
    pub(super) fn refuse(&mut self, name: &str) -> bool {
        self.refused.len() < MAX_FILES && self.refused.insert(name.to_owned())
    }

    /// Makes our end.
    ///
    /// # Errors
    /// Why that is not possible.
    pub(super) fn join(&self, found: Found) -> Result<(OwnedFd, Pair), String> {
        let Found {
            name,
            uid,
            file,
            ours,
        } = found;
        let socket = ours.map_err(|error| {
            let advice = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "; it is open to nobody but its user: let the daemon's user write it"
                }
                _ => "",
            };
            format!("{name}: {error}{advice}")
        })?;
        let mut ours = OsString::from(&name);
        ours.push(OURS);
        let ours = self.dir.real.join(ours);
        let named = porter::name_for(&socket, &ours, uid, &self.access);
        named.map_err(|error| format!("{}: {error}", ours.display()))?;
        let pair = Pair {
            name,
            theirs: file,
            ours,
        };
        Ok((socket, pair))
    }
}

impl Pair {
    pub(super) fn is_of(&self, name: &str) -> bool {
        self.name == name
    }

    /// Whether somebody has the client's socket.
    pub(super) fn is_alive(&self) -> bool {
        // It is asked by a socket of no name, which the client's refuses if it is connected itself.
        match porter::connected(&self.theirs) {
            Ok(_) => true,
            Err(error) => error.kind() != io::ErrorKind::ConnectionRefused,
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ours);
    }
}

/// What our names end with.
const OURS: &str = ".port";
/// Clients that are found at once.
const MAX_FOUND: usize = 64;
/// Files of the directory that are looked at.
const MAX_FILES: usize = 8192;
