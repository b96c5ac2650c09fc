//! The program's process, between fork and exec: what it gives up, stage by stage.
//!
//! 1. **Should**: have standard input, output and error. **Mustn't**: have any other descriptor after exec; a socket of
//!    the network as one of the three, which was made by somebody else and would be judged by nobody.
//! 2. **Should**: be what the user is. **Mustn't**: gain rights by exec (`no_new_privs`); as root: administer
//!    the network or look into other processes.
//! 3. Landlock. **Mustn't**: look into or signal processes outside, connect by TCP itself.
//! 4. The filter. **Mustn't**: make any call that is handed over without an answer of the supervisor.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::thread::CapabilitySet;

use crate::filter::{self, Terms};
use crate::sys::landlock::Ruleset;
use crate::sys::{process, seccomp, socket};

/// What becomes of the process.
pub(crate) struct Start {
    pub(crate) words: Vec<OsString>,
    pub(crate) terms: Terms,
    /// What Landlock forbids; `None` where it is missing and the user accepts that.
    pub(crate) fence: Option<Ruleset>,
    /// Done first, with the user's own rights.
    pub(crate) enter: Option<Box<dyn FnOnce() -> io::Result<()>>>,
}

/// What the process says over its channel: the number of its listener's descriptor, or an error's text.
pub(crate) const READY: u8 = b'r';
pub(crate) const FAILED: u8 = b'f';
/// exec failed, with the number of this error.
pub(crate) const NOT_RUN: u8 = b'n';

/// Becomes the program. Returns only if that fails, after the supervisor was told.
pub(crate) fn become_program(start: Start, channel: &OwnedFd) {
    let words = start.words.clone();
    match confine(start, channel) {
        Ok(()) => {
            let error = Command::new(&words[0]).args(&words[1..]).exec();
            let mut told = vec![NOT_RUN];
            told.extend(error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes());
            let _ = rustix::io::write(channel, &told);
        }
        Err(error) => {
            let mut told = vec![FAILED];
            told.extend(error.to_string().into_bytes());
            let _ = rustix::io::write(channel, &told);
        }
    }
}

fn confine(start: Start, channel: &OwnedFd) -> io::Result<()> {
    close_others()?;
    if let Some(enter) = start.enter {
        enter()?;
    }
    drop_rights()?;
    rustix::thread::set_no_new_privs(true)?;
    if let Some(fence) = start.fence {
        fence
            .enforce()
            .map_err(|error| io::Error::other(format!("Landlock: {error}")))?;
    }
    let code = filter::program(start.terms);
    let listener = seccomp::install(&code)
        .map_err(|error| io::Error::other(format!("the filter of system calls: {error}")))?;
    // From here on the supervisor answers; what is used now passes the filter.
    let mut told = vec![READY];
    told.extend(listener.as_fd().as_raw_fd().to_ne_bytes());
    rustix::io::write(channel, &told)?;
    let mut go = [0];
    if rustix::io::read(channel, &mut go)? != 1 {
        return Err(io::Error::other("the supervisor has ended"));
    }
    Ok(())
}

/// All descriptors but the first three are closed at exec, and these are no sockets of a network.
fn close_others() -> io::Result<()> {
    process::close_on_exec_from(3)?;
    for number in 0..3 {
        let Ok(file) = process::standard(number) else {
            continue;
        };
        let Ok(domain) = socket::option(file, libc::SO_DOMAIN) else {
            continue;
        };
        if domain != libc::AF_UNIX {
            return Err(io::Error::other(format!(
                "descriptor {number} is a socket of the network, which was not made in the sandbox: \
                 give the program a pipe (… | vnplug sandbox … | …)"
            )));
        }
    }
    Ok(())
}

/// Root without what administers networks, kernels and other processes. Others have none of it.
fn drop_rights() -> io::Result<()> {
    let dropped = CapabilitySet::NET_ADMIN
        | CapabilitySet::SYS_ADMIN
        | CapabilitySet::SYS_PTRACE
        | CapabilitySet::SYS_MODULE
        | CapabilitySet::SYS_RAWIO
        | CapabilitySet::SYS_BOOT
        | CapabilitySet::MKNOD
        | CapabilitySet::DAC_READ_SEARCH
        | CapabilitySet::BPF
        | CapabilitySet::PERFMON
        | CapabilitySet::CHECKPOINT_RESTORE;
    let mut sets = rustix::thread::capabilities(None)?;
    if sets.permitted.is_empty() {
        return Ok(());
    }
    for right in dropped.iter() {
        match rustix::thread::remove_capability_from_bounding_set(right) {
            // A right that this kernel does not know, or the bounding set is closed to us.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    sets.permitted &= !dropped;
    sets.effective &= !dropped;
    sets.inheritable &= !dropped;
    rustix::thread::set_capabilities(None, sets)?;
    Ok(())
}
