//! VMs whose devices are in the definition of their machine (`vnplug attach qemu --permanent`): after a boot of the host
//! they are there again, with an empty pool in the file that the definition names, before the machine starts.
//!
//! A machine that was started first has made that file itself, as its own user: no daemon can serve it, and it is for
//! whoever attached it to attach it again.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::Vm;
use super::dirs::{Dirs, remove};
use super::record::{Record, this_boot};
use vnplug_os::access::{AccessList, READ_WRITE};
use vnplug_os::event;
use vnplug_os::memory::pool_file;

impl Vm {
    /// Makes one of an earlier boot again.
    pub(super) fn after_boot(record: Record, dirs: &Dirs) -> io::Result<Self> {
        record.check()?;
        let record = Record {
            boot: this_boot(),
            // Where it was to move to, it did.
            held: None,
            ..record
        };
        let is_there = is_there(&record)?;
        let pool = pool_file(&record.pool, record.file_len(), !is_there, &|| true)?;
        let made = let_in(&record).and_then(|()| {
            let vm = Self::open(record.clone(), pool, event::random(), dirs)?;
            vm.record.save(&dirs.state).map(|()| vm)
        });
        // NB: the record stays. What is short now may be there when the next daemon starts.
        let vm = made.inspect_err(|_| remove(&record.pool))?;
        let name = &record.name;
        log::info!(target: "vm", "VM {name:?} is in its machine's definition: it has a new pool since the host's boot");
        Ok(vm)
    }
}

/// Whether its file is there, from a daemon that was killed before it had written down that it made it.
fn is_there(record: &Record) -> io::Result<bool> {
    let path = &record.pool;
    let found = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    if found.uid() != rustix::process::geteuid().as_raw() {
        let user = found.uid();
        return Err(io::Error::other(format!(
            "user {user} made {} since the host's boot, so its machine was started before the daemon: attach it again, with \
             --permanent",
            path.display()
        )));
    }
    let is_whole = found.is_file() && found.len() == record.file_len();
    if !is_whole {
        std::fs::remove_file(path)?;
    }
    Ok(is_whole)
}

/// Lets the user that its machine runs as open the pool; its sockets take over who may.
fn let_in(record: &Record) -> io::Result<()> {
    let us = rustix::process::geteuid().as_raw();
    match record.stays_for {
        // Root opens everything.
        Some(uid) if uid != 0 && uid != us => set_list(&record.pool, uid),
        _ => Ok(()),
    }
}

fn set_list(path: &Path, uid: u32) -> io::Result<()> {
    let list = AccessList::only(READ_WRITE, &[uid]);
    list.set(path).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot let user {uid} open {}: {error}", path.display()),
        )
    })
}
