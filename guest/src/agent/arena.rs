//! Finding what lies in a shared-memory device of its own: the arenas of a group of the host, which the
//! guest cannot write, and memory of a back-end.
//!
//! A group's begins with the header of the group's first arena, whose epoch is new each time the arenas are
//! laid, so that it names one group among several. It is looked for when a port is opened: the host
//! lays the arenas before it answers.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rustix::fs::{Mode, OFlags, open};
use vnplug_ring::Region;
use vnplug_ring::arena::{ARENA_MAGIC, header};
use vnplug_ring::control::grow::PLUGGED_MAGIC;

use super::find::{Identity, entries, is_ivshmem};
use super::room;
use crate::map::map_read_only;

/// Devices that somebody else writes, an application or a back-end on the host: what their first page says may be a lie.
#[derive(Debug, Default)]
pub(super) struct Handed(Vec<Identity>);

/// Opens, for reading only, the device whose first arena has this epoch.
pub(super) fn find(root: &Path, handed: &mut Handed, epoch: u64) -> Option<OwnedFd> {
    let (_, memory) = find_device(root, handed, false, |page| {
        page.load_u64(header::MAGIC, Ordering::Acquire) == ARENA_MAGIC
            && page.load_u64(header::EPOCH, Ordering::Relaxed) == epoch
    })?;
    Some(memory)
}

/// Opens the device with memory that was plugged under this number. It is found once: from then on its first page is no
/// more believed.
pub(super) fn find_plugged(
    root: &Path,
    handed: &mut Handed,
    number: u64,
    writable: bool,
) -> Option<OwnedFd> {
    let (device, memory) = find_device(root, handed, writable, |page| {
        page.load_u64(0, Ordering::Acquire) == PLUGGED_MAGIC
            && page.load_u64(8, Ordering::Relaxed) == number
    })?;
    handed.0.extend(Identity::of(&device));
    Some(memory)
}

/// Opens the shared-memory device whose first page says what `is_it` asks. If two say so one of them lies, and none is
/// believed.
fn find_device(
    root: &Path,
    handed: &mut Handed,
    writable: bool,
    is_it: impl Fn(&Region) -> bool,
) -> Option<(PathBuf, OwnedFd)> {
    handed.0.retain(Identity::still_there);
    let bus = root.join("sys/bus/pci");
    let devices = entries(&bus.join("devices")).into_iter();
    let devices = devices.filter(|device| is_ivshmem(device));
    let mut found = devices.filter_map(|device| {
        if Identity::of(&device).is_some_and(|it| handed.0.contains(&it)) {
            return None;
        }
        room::make(&bus, &device, room::PATIENCE);
        if let Err(error) = fs::write(device.join("enable"), "1") {
            log::debug!("{}: cannot enable: {error}", device.display());
        }
        let access = match writable {
            true => OFlags::RDWR,
            false => OFlags::RDONLY,
        };
        let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY;
        let memory = open(device.join("resource2"), flags, Mode::empty()).ok()?;
        let page = map_read_only(memory.as_fd(), PAGE).ok()?;
        is_it(&page).then_some((device, memory))
    });
    let one = found.next()?;
    if let Some((other, _)) = found.next() {
        let (one, other) = (one.0.display(), other.display());
        log::warn!("{one} and {other} say that they are the same memory: neither is used");
        return None;
    }
    Some(one)
}

const PAGE: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::map;

    struct Tree(PathBuf);

    impl Tree {
        fn device(&self, slot: &str, magic: u64, epoch: u64) {
            let dir = self.0.join("sys/bus/pci/devices").join(slot);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("vendor"), "0x1af4\n").unwrap();
            fs::write(dir.join("device"), "0x1110\n").unwrap();
            let mut page = vec![0; PAGE as usize];
            page[..8].copy_from_slice(&magic.to_le_bytes());
            page[16..24].copy_from_slice(&epoch.to_le_bytes());
            fs::write(dir.join("resource2"), page).unwrap();
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn a_group_has_its_own_device_and_nobody_gets_it_for_writing() {
        let name = format!("vnplug-arena-{}", std::process::id());
        let tree = Tree(std::env::temp_dir().join(name));
        tree.device("0000:00:04.0", vnplug_ring::pool::MAGIC, 7);
        tree.device("0000:00:05.0", ARENA_MAGIC, 6);
        tree.device("0000:00:06.0", ARENA_MAGIC, 7);
        let mut handed = Handed::default();
        assert!(find(&tree.0, &mut handed, 8).is_none());
        let found = find(&tree.0, &mut handed, 7).unwrap();
        let page = map_read_only(found.as_fd(), PAGE).unwrap();
        assert_eq!(page.load_u64(header::EPOCH, Ordering::Relaxed), 7);
        assert_eq!(page.load_u64(0, Ordering::Relaxed), ARENA_MAGIC);
        assert!(map(found.as_fd(), PAGE).is_err(), "it can be written");
    }

    #[test]
    fn a_device_that_was_handed_out_is_not_taken_for_anything_else() {
        let name = format!("vnplug-handed-{}", std::process::id());
        let tree = Tree(std::env::temp_dir().join(name));
        tree.device("0000:00:05.0", PLUGGED_MAGIC, 0);
        let path = tree.0.join("sys/bus/pci/devices/0000:00:05.0/resource2");
        let says = |at: usize, word: u64| {
            let mut page = fs::read(&path).unwrap();
            page[at..at + 8].copy_from_slice(&word.to_le_bytes());
            fs::write(&path, page).unwrap();
        };
        says(8, 11);
        let mut handed = Handed::default();
        // For reading: a back-end on the host writes it.
        assert!(find_plugged(&tree.0, &mut handed, 11, false).is_some());
        assert!(find_plugged(&tree.0, &mut handed, 11, true).is_none());
        // Who writes it says that it is another, and that it is a group's.
        says(8, 12);
        assert!(find_plugged(&tree.0, &mut handed, 12, true).is_none());
        says(0, ARENA_MAGIC);
        says(16, 7);
        assert!(find(&tree.0, &mut handed, 7).is_none());
        // An agent that has not handed it out would believe it.
        assert!(find(&tree.0, &mut Handed::default(), 7).is_some());
        // Not where the group's own is: one of both lies.
        tree.device("0000:00:06.0", ARENA_MAGIC, 7);
        assert!(find(&tree.0, &mut Handed::default(), 7).is_none());
        assert!(find(&tree.0, &mut handed, 7).is_some());
    }
}
