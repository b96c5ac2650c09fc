//! Finding the memory pool and the control channel inside a guest.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use vnplug_ring::control::VIRTIO_PORT_NAME;
use vnplug_ring::pool::{FIRST_RING, PoolHeader};

use super::{AgentDevice, room};
use crate::error::Error;
use crate::map::map;

/// The memory and the channel of this guest.
#[derive(Debug)]
pub(super) struct Found {
    /// Every pool there is; the host's Welcome says which one is meant.
    pub(super) pools: Vec<Pool>,
    pub(super) channel: OwnedFd,
    /// What the channel was found by; another or none means it was unplugged.
    pub(super) channel_id: Option<Identity>,
}

/// One memory pool.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) memory: OwnedFd,
    pub(super) header: PoolHeader,
    pub(super) id: Option<Identity>,
}

/// A file, by its number and not only by its name, so that unplugging and plugging shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Identity {
    pub(super) fn of(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        Some(Self {
            path: path.into(),
            device: meta.dev(),
            inode: meta.ino(),
        })
    }

    pub(super) fn still_there(&self) -> bool {
        Self::of(&self.path).as_ref() == Some(self)
    }
}

/// Looks for both; `Ok(None)`: not there (yet).
pub(super) fn find(device: &AgentDevice) -> Result<Option<Found>, Error> {
    let (memory, channel) = match device {
        AgentDevice::Search => (None, None),
        AgentDevice::Paths { memory, channel } => (memory.as_deref(), channel.as_deref()),
        AgentDevice::Given { memory, channel } => {
            let copy = |fd: &OwnedFd| {
                fd.try_clone().map_err(|error| Error::System {
                    what: "cannot copy a descriptor",
                    errno: rustix::io::Errno::from_io_error(&error)
                        .unwrap_or(rustix::io::Errno::IO),
                })
            };
            let Some(pool) = pool(copy(memory)?, None) else {
                return Ok(None);
            };
            return Ok(Some(Found {
                pools: vec![pool],
                channel: copy(channel)?,
                channel_id: None,
            }));
        }
    };
    let pools = match memory {
        Some(path) => open_pool(path, path).into_iter().collect(),
        None => search_pools(Path::new("/")),
    };
    if pools.is_empty() {
        return Ok(None);
    }
    let place = match channel {
        Some(path) => Some((path.to_owned(), path.to_owned())),
        None => search_channel(Path::new("/")),
    };
    let Some((path, id)) = place else {
        return Ok(None);
    };
    let channel_id = Identity::of(&id);
    match open(&path, open_flags() | OFlags::NONBLOCK, Mode::empty()) {
        Ok(channel) => Ok(Some(Found {
            pools,
            channel,
            channel_id,
        })),
        Err(errno) => {
            log::warn!("cannot open the channel {}: {errno}", path.display());
            Ok(None)
        }
    }
}

/// All pools under `root`: PCI devices first, then User-mode Linux's.
fn search_pools(root: &Path) -> Vec<Pool> {
    let mut pools = Vec::new();
    let bus = root.join("sys/bus/pci");
    for device in entries(&bus.join("devices")) {
        if is_ivshmem(&device) {
            room::make(&bus, &device, room::PATIENCE);
            if !device.join("resource2").exists() {
                // No place yet, or none at all.
                continue;
            }
            // Resources of a device that no driver has enabled cannot be mapped.
            if let Err(error) = fs::write(device.join("enable"), "1") {
                log::debug!("{}: cannot enable: {error}", device.display());
            }
            pools.extend(open_pool(&device.join("resource2"), &device));
        }
    }
    if pools.is_empty() {
        let mmapper = root.join("dev/mmapper");
        pools.extend(open_pool(&mmapper, &mmapper));
    }
    pools
}

/// The channel's path and what identifies it.
fn search_channel(root: &Path) -> Option<(PathBuf, PathBuf)> {
    for port in entries(&root.join("sys/class/virtio-ports")) {
        let name = fs::read_to_string(port.join("name")).unwrap_or_default();
        if name.trim_end() == VIRTIO_PORT_NAME {
            return Some((root.join("dev").join(port.file_name()?), port));
        }
    }
    let line = fs::read_to_string(root.join("proc/cmdline")).ok()?;
    let tty = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix("vnplug="))?;
    if tty.contains('/') || tty.is_empty() {
        log::warn!("vnplug= on the kernel command line names no tty");
        return None;
    }
    let path = root.join("dev").join(tty);
    Some((path.clone(), path))
}

/// Vendor and device number of QEMU's shared memory device.
pub(super) fn is_ivshmem(device: &Path) -> bool {
    let word = |file| fs::read_to_string(device.join(file)).unwrap_or_default();
    word("vendor").trim_end() == "0x1af4" && word("device").trim_end() == "0x1110"
}

fn open_pool(path: &Path, id: &Path) -> Option<Pool> {
    let id = Identity::of(id);
    let memory = open(path, open_flags(), Mode::empty()).ok()?;
    pool(memory, id)
}

fn pool(memory: OwnedFd, id: Option<Identity>) -> Option<Pool> {
    let region = map(memory.as_fd(), FIRST_RING).ok()?;
    let header = PoolHeader::read(&region)?;
    // A doorbell device has our header too, to tell whose it is, but only that page.
    let stat = fstat(&memory).ok()?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if is_file && (stat.st_size as u64) < header.len {
        return None;
    }
    Some(Pool { memory, header, id })
}

pub(super) fn entries(dir: &Path) -> Vec<PathBuf> {
    let list = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<_> = list.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

pub(super) fn open_flags() -> OFlags {
    OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY
}

#[cfg(test)]
mod tests {
    use vnplug_ring::Region;

    use super::*;

    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let name = format!("vnplug-find-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn file(&self, path: &str, bytes: &[u8]) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }

        fn pci(&self, slot: &str, device: &str, memory: &[u8]) {
            let dir = format!("sys/bus/pci/devices/{slot}");
            self.file(&format!("{dir}/vendor"), b"0x1af4\n");
            self.file(&format!("{dir}/device"), device.as_bytes());
            self.file(&format!("{dir}/resource2"), memory);
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn pool_page(id: u64) -> Vec<u8> {
        page(id, FIRST_RING)
    }

    fn page(id: u64, len: u64) -> Vec<u8> {
        let region = Region::heap(FIRST_RING);
        let name = "vm".into();
        PoolHeader { len, id, name }.write(&region);
        let mut bytes = vec![0; FIRST_RING as usize];
        region.read(0, &mut bytes);
        bytes
    }

    #[test]
    fn only_shared_memory_devices_with_our_header_are_pools() {
        let tree = Tree::new("pci");
        tree.pci("0000:00:03.0", "0x1000\n", &pool_page(1));
        tree.pci("0000:00:04.0", "0x1110\n", &[0; 4096]);
        tree.pci("0000:00:05.0", "0x1110\n", &pool_page(2));
        // A doorbell device: the pool is longer than the device.
        tree.pci("0000:00:02.0", "0x1110\n", &page(2, 1 << 20));
        let pools = search_pools(&tree.0);
        let ids: Vec<_> = pools.iter().map(|pool| pool.header.id).collect();
        assert_eq!(ids, [2]);
        assert_eq!(
            fs::read_to_string(tree.0.join("sys/bus/pci/devices/0000:00:05.0/enable")).unwrap(),
            "1"
        );
    }

    #[test]
    fn uml_has_its_memory_and_a_named_tty() {
        let tree = Tree::new("uml");
        assert!(search_pools(&tree.0).is_empty() && search_channel(&tree.0).is_none());
        tree.file("dev/mmapper", &pool_page(3));
        tree.file("proc/cmdline", b"root=/dev/x vnplug=ttyS1 quiet\n");
        assert_eq!(search_pools(&tree.0)[0].header.id, 3);
        assert_eq!(search_channel(&tree.0).unwrap().0, tree.0.join("dev/ttyS1"));
        tree.file("proc/cmdline", b"vnplug=../../etc/passwd\n");
        assert!(search_channel(&tree.0).is_none());
    }

    #[test]
    fn the_channel_is_found_by_its_name() {
        let tree = Tree::new("port");
        tree.file(
            "sys/class/virtio-ports/vport1p1/name",
            b"org.qemu.guest_agent.0\n",
        );
        tree.file(
            "sys/class/virtio-ports/vport1p2/name",
            b"org.vnplug.control\n",
        );
        assert_eq!(
            search_channel(&tree.0).unwrap().0,
            tree.0.join("dev/vport1p2")
        );
    }

    #[test]
    fn a_replaced_file_is_another_identity() {
        let tree = Tree::new("identity");
        tree.file("a", b"");
        let path = tree.0.join("a");
        let id = Identity::of(&path).unwrap();
        assert!(id.still_there());
        tree.file("b", b"");
        fs::rename(tree.0.join("b"), &path).unwrap();
        assert!(!id.still_there());
    }
}
