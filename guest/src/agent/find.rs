//! Finding the memory pool and the control channel inside a guest.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::Errno;
use vnplug_ring::control::VIRTIO_PORT_NAME;
use vnplug_ring::pool::{FIRST_RING, PoolHeader};

use super::{AgentDevice, dax, room};
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

/// What looking for them found.
#[derive(Debug)]
pub(super) enum Looked {
    Found(Found),
    /// Not there (yet).
    Nothing,
    /// This kernel lets nobody map the memory that there is.
    LockedDown,
}

/// Memory pools.
#[derive(Debug, Default)]
struct Pools {
    all: Vec<Pool>,
    /// There is a device that this kernel lets nobody map.
    is_refused: bool,
}

/// One memory pool.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) memory: OwnedFd,
    pub(super) header: PoolHeader,
    pub(super) id: Option<Identity>,
}

impl Pool {
    /// Takes over what its header says now; false if it is no pool any more.
    pub(super) fn read_again(&mut self) -> bool {
        let header = map(self.memory.as_fd(), FIRST_RING)
            .ok()
            .and_then(|region| PoolHeader::read(&region));
        let Some(header) = header.filter(|header| header.len == self.header.len) else {
            return false;
        };
        self.header = header;
        true
    }
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

/// Looks for both.
pub(super) fn find(device: &AgentDevice) -> Result<Looked, Error> {
    let memory = match device {
        AgentDevice::Search => None,
        AgentDevice::Paths { memory, .. } => memory.as_deref(),
        AgentDevice::Given { memory, channel } => {
            let copy = |fd: &OwnedFd| {
                fd.try_clone().map_err(|error| Error::System {
                    what: "cannot copy a descriptor",
                    errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
                })
            };
            let Ok(Some(pool)) = pool(copy(memory)?, None) else {
                return Ok(Looked::Nothing);
            };
            return Ok(Looked::Found(Found {
                pools: vec![pool],
                channel: copy(channel)?,
                channel_id: None,
            }));
        }
    };
    let mut pools = Pools::default();
    match memory {
        Some(path) => pools.add(path, path),
        None => pools = search_pools(Path::new("/")),
    }
    match (pools.all.is_empty(), pools.is_refused) {
        (true, false) => return Ok(Looked::Nothing),
        (true, true) => return Ok(Looked::LockedDown),
        (false, _) => {}
    }
    Ok(match open_channel(device) {
        Some((channel, channel_id)) => Looked::Found(Found {
            pools: pools.all,
            channel,
            channel_id,
        }),
        None => Looked::Nothing,
    })
}

/// The channel alone, and what it was found by. Not of [`AgentDevice::Given`].
pub(super) fn open_channel(device: &AgentDevice) -> Option<(OwnedFd, Option<Identity>)> {
    let (path, id) = match device {
        AgentDevice::Paths {
            channel: Some(path),
            ..
        } => (path.clone(), path.clone()),
        AgentDevice::Given { .. } => return None,
        _ => search_channel(Path::new("/"))?,
    };
    let id = Identity::of(&id);
    match open(&path, open_flags() | OFlags::NONBLOCK, Mode::empty()) {
        Ok(channel) => Some((channel, id)),
        Err(errno) => {
            log::warn!("cannot open the channel {}: {errno}", path.display());
            None
        }
    }
}

/// All pools under `root`: PCI devices first, then virtio-pmem's, then User-mode Linux's.
fn search_pools(root: &Path) -> Pools {
    let mut pools = Pools::default();
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
            pools.add(&device.join("resource2"), &device);
        }
    }
    for dax in dax::search(root) {
        pools.add(&dax.node, &dax.device);
    }
    if pools.all.is_empty() {
        let mmapper = root.join("dev/mmapper");
        pools.add(&mmapper, &mmapper);
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

impl Pools {
    /// Adds the pool that is at `path`, if one is.
    fn add(&mut self, path: &Path, id: &Path) {
        let id = Identity::of(id);
        let Ok(memory) = open(path, open_flags(), Mode::empty()) else {
            return;
        };
        match pool(memory, id) {
            Ok(pool) => self.all.extend(pool),
            // NB: of a kernel that is locked down; whoever lacks a right has opened nothing.
            Err(Error::System {
                errno: Errno::PERM, ..
            }) => self.is_refused = true,
            Err(_) => {}
        }
    }
}

pub(super) fn pool(memory: OwnedFd, id: Option<Identity>) -> Result<Option<Pool>, Error> {
    let region = map(memory.as_fd(), FIRST_RING)?;
    let Some(header) = PoolHeader::read(&region) else {
        return Ok(None);
    };
    // A doorbell device has our header too, to tell whose it is, but only that page.
    let stat = fstat(&memory).map_err(Error::system("cannot inspect a memory pool"))?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if is_file && (stat.st_size as u64) < header.len {
        return Ok(None);
    }
    Ok(Some(Pool { memory, header, id }))
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
        let pools = search_pools(&tree.0).all;
        let ids: Vec<_> = pools.iter().map(|pool| pool.header.id).collect();
        assert_eq!(ids, [2]);
        assert_eq!(
            fs::read_to_string(tree.0.join("sys/bus/pci/devices/0000:00:05.0/enable")).unwrap(),
            "1"
        );
    }

    #[test]
    fn a_virtio_pmem_device_is_a_pool_when_its_driver_and_our_uuid_are_there() {
        let tree = Tree::new("dax");
        let device = |name: &str, uuid: &str, id: u64| {
            let dir = format!("sys/devices/region-{name}");
            tree.file(&format!("{dir}/uuid"), uuid.as_bytes());
            tree.file(&format!("{dir}/{name}/size"), b"");
            tree.file(&format!("dev/{name}"), &pool_page(id));
        };
        let bind = |name: &str| {
            let driver = tree.0.join("sys/bus/dax/drivers/device_dax");
            fs::create_dir_all(&driver).unwrap();
            let to = tree.0.join(format!("sys/devices/region-{name}/{name}"));
            std::os::unix::fs::symlink(to, driver.join(name)).unwrap();
        };
        let ids = || {
            let pools = search_pools(&tree.0).all;
            pools.iter().map(|pool| pool.header.id).collect::<Vec<_>>()
        };
        device("dax0.0", "564e504c-504d-454d-0700-000000000000\n", 7);
        device("dax1.0", "0e0e504c-504d-454d-0800-000000000000\n", 8);
        assert_eq!(ids(), [0; 0]);
        bind("dax0.0");
        bind("dax1.0");
        assert_eq!(ids(), [7]);
    }

    #[test]
    fn uml_has_its_memory_and_a_named_tty() {
        let tree = Tree::new("uml");
        assert!(search_pools(&tree.0).all.is_empty() && search_channel(&tree.0).is_none());
        tree.file("dev/mmapper", &pool_page(3));
        tree.file("proc/cmdline", b"root=/dev/x vnplug=ttyS1 quiet\n");
        assert_eq!(search_pools(&tree.0).all[0].header.id, 3);
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
