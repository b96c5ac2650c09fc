//! Packet memory in a file, which VMs map.
//!
//! A memfd is gone with the daemon, and a running VM would keep the old one. A file is there for the
//! next daemon, which receives into the same pages again: the VM notices a gap. It can not be sealed,
//! as its name is there to be opened: nobody but its owner may write it, readers of the host get a
//! descriptor for reading, and QEMU maps it so. As a pool's, its mapping is watched by
//! [`super::sigbus`].

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vnplug_ring::Region;
use vnplug_ring::arena::header;

use super::memory::{self, HUGE, Shared, Watch};

/// A file that packet memory lies in.
#[derive(Debug)]
pub(crate) struct PacketFile {
    pub(crate) path: PathBuf,
    /// Bytes of it, a power of two.
    pub(crate) len: u64,
    /// Which file it is: another one of the same name is another memory.
    pub(crate) inode: u64,
    watch: Arc<Watch>,
}

/// Where it is to lie, and whose it is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketPath {
    /// In a directory on tmpfs or hugetlbfs.
    pub path: PathBuf,
    /// User and group that the daemon becomes; `None`: it stays what it is.
    pub owner: Option<(u32, u32)>,
}

impl PacketFile {
    /// Maps the file of an earlier daemon, or makes one if there is none of this length; all of it is
    /// zero then, and nothing that was in it is a whole packet to anybody.
    ///
    /// # Errors
    /// The system's; `Unsupported`: a NIC or the kernel could not write into a file there.
    pub(crate) fn open(at: &PacketPath, len: u64) -> io::Result<(Shared, Arc<Self>)> {
        let path = at.path.as_path();
        let huge = kept_in_memory(path)?;
        let us = rustix::process::geteuid().as_raw();
        let users = [us, at.owner.map_or(us, |(user, _)| user)];
        let (file, region, watch) = match memory::again(path, len, &users) {
            Ok((file, (region, watch))) => {
                forget(&region);
                (file, region, watch)
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    log::warn!(target: "source", "{error}: it is made anew");
                    std::fs::remove_file(path)?;
                }
                let (file, (region, watch)) = memory::anew(path, len)?;
                (file, region, watch)
            }
        };
        if let Some((user, group)) = at.owner {
            fchown(&file, Some(user), Some(group))?;
        }
        let inode = file.metadata()?.ino();
        let reader = File::open(path)?;
        if reader.metadata()?.ino() != inode {
            return Err(io::Error::other("it was replaced just now"));
        }
        let shared = Shared {
            region,
            fd: reader.into(),
            len,
            huge,
        };
        let path = path.to_owned();
        let it = Self {
            path,
            len,
            inode,
            watch,
        };
        Ok((shared, Arc::new(it)))
    }

    /// Somebody truncated it: what is received does not come to its readers.
    pub(crate) fn is_lost(&self) -> bool {
        self.watch.lost.load(Ordering::Acquire)
    }
}

/// Makes what was received by an earlier daemon unreadable: first no record of it is whole any more
/// to those who still look at it, then it goes. How that daemon had cut the memory is not known, but
/// every arena in it began on a huge page.
fn forget(region: &Region) {
    for at in (0..region.len()).step_by(HUGE as usize) {
        // Relaxed: the fence orders it.
        region.store_u64(at + header::EPOCH, 0, Ordering::Relaxed);
        // Pairs with the fence in ArenaReader::is_whole. One for each, as where an arena may begin is
        // the middle of another one before it.
        fence(Ordering::SeqCst);
    }
    region.clear(0, region.len());
}

/// Whether files next to `path` lie in huge pages.
fn kept_in_memory(path: &Path) -> io::Result<bool> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let kind = rustix::fs::statfs(dir)?.f_type;
    match kind as u64 & 0xffff_ffff {
        TMPFS => Ok(false),
        HUGETLBFS => Ok(true),
        _ => {
            let what = format!("{} is on no tmpfs or hugetlbfs", dir.display());
            Err(io::Error::new(io::ErrorKind::Unsupported, what))
        }
    }
}

/// `linux/magic.h`: pages of other file systems cannot be lent to a device for long.
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;

#[cfg(test)]
mod tests {
    use vnplug_ring::{ArenaReader, BufferGeometry, Buffers};

    use super::*;

    /// In `/dev/shm`, which is a tmpfs wherever the daemon's pools lie by default.
    struct Place(PacketPath);

    impl Place {
        fn new(name: &str) -> Self {
            let path = format!("/dev/shm/vnplug-{name}-{}", std::process::id());
            let path = path.into();
            Self(PacketPath { path, owner: None })
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0.path);
        }
    }

    const LEN: u64 = 8 << 20;

    #[test]
    fn the_next_daemon_has_the_same_file_and_no_arena_or_frame_of_the_last_one_is_in_it() {
        let place = Place::new("packets-again");
        let (memory, first) = PacketFile::open(&place.0, LEN).unwrap();
        // As two queues had cut it: the second arena began in the middle of what is one now.
        let attach = |at| {
            let part = memory.region.part(at, 2 << 20).unwrap();
            let geometry = BufferGeometry {
                buffer: 2048,
                buffers: 64,
                kept: 32,
                spare: 1 << 16,
                epoch: 7,
                queue: 0,
            };
            Buffers::create(part.clone(), geometry).unwrap();
            ArenaReader::attach(part).unwrap()
        };
        let readers = [attach(0), attach(4 << 20)];
        assert!(readers.iter().all(|reader| reader.is_whole(0)));
        memory.region.write(LEN - 8, b"a secret");
        let (again, second) = PacketFile::open(&place.0, LEN).unwrap();
        assert_eq!(first.inode, second.inode);
        assert!(readers.iter().all(|reader| !reader.is_whole(0)));
        // It is the same memory.
        assert_eq!(memory.region.load_u64(LEN - 8, Ordering::Relaxed), 0);
        again.region.write(LEN - 8, b"a packet");
        assert_ne!(memory.region.load_u64(LEN - 8, Ordering::Relaxed), 0);
        assert!(memory::again(&place.0.path, LEN, &[u32::MAX]).is_err());
    }

    #[test]
    fn of_another_size_it_is_another_file_and_who_has_the_old_one_keeps_it() {
        let place = Place::new("packets-other");
        let (memory, first) = PacketFile::open(&place.0, LEN).unwrap();
        memory.region.write(64, b"still me");
        let (_, second) = PacketFile::open(&place.0, 2 * LEN).unwrap();
        assert_ne!(first.inode, second.inode);
        let mut kept = [0; 8];
        memory.region.read(64, &mut kept);
        assert_eq!(&kept, b"still me");
        assert!(!first.is_lost() && !second.is_lost());
    }

    #[test]
    fn a_directory_on_a_disk_is_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("packets");
        let error = PacketFile::open(&PacketPath { path, owner: None }, LEN);
        let error = error.err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
    }
}
