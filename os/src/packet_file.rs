//! Packet memory in a file, which VMs map.
//!
//! A memfd is gone with the daemon, and a running VM would keep the old one. A file is there for the
//! next daemon, which receives into the same pages again: the VM notices a gap. It can not be sealed,
//! as its name is there to be opened: only its owner may write it, readers of the host get a
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

use super::memory::{self, HUGE, SharedMemory, Watch};

/// A file that packet memory lies in.
#[derive(Debug)]
pub struct PacketFile {
    /// Where it is.
    pub path: PathBuf,
    /// Bytes of it, a power of two.
    pub len: u64,
    /// Which file it is: another one of the same name is another memory.
    pub inode: u64,
    /// How it is cut: cut otherwise, the middle of a frame lies where an arena did.
    pub layout: String,
    watch: Arc<Watch>,
}

/// Where it is to lie, and whose it is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketPath {
    /// In a directory on tmpfs or hugetlbfs.
    pub path: PathBuf,
    /// User and group that the daemon becomes; `None`: it stays what it is.
    pub owner: Option<(u32, u32)>,
    /// Inodes of it that may be received into again, each with how it is cut.
    pub again: Vec<(u64, String)>,
}

impl PacketFile {
    /// Maps the file of an earlier daemon, or makes one if there is none of this length and layout
    /// that may be used again; it is zeroed then, and no reader finds an old packet in it.
    ///
    /// NB: packets come into it without any port. So a VM that has the file and may not see all of
    /// them, or may write it, is kept from them only by another file.
    ///
    /// # Errors
    /// The system's, with the path; `Unsupported`: a NIC or the kernel could not write into a file
    /// there.
    pub fn open(
        at: &PacketPath,
        len: u64,
        layout: String,
    ) -> io::Result<(SharedMemory, Arc<Self>)> {
        let path = at.path.as_path();
        let huge = kept_in_memory(path)?;
        let us = rustix::process::geteuid().as_raw();
        let users = [us, at.owner.map_or(us, |(user, _)| user)];
        let there = match std::fs::symlink_metadata(path) {
            Ok(there) => Some(there),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(at_path(path, "", error)),
        };
        let inode = there.as_ref().map(MetadataExt::ino);
        let is_known = |inode: &u64| {
            let mut again = at.again.iter();
            again.any(|(it, cut)| it == inode && *cut == layout)
        };
        let known = inode.filter(is_known);
        let again = known.and_then(|inode| {
            let again = memory::again(path, inode, len, &users);
            let say = |error: &io::Error| {
                log::warn!(target: "source", "{error}: it is made again");
            };
            again.inspect_err(say).ok()
        });
        let (file, (region, watch)) = match again {
            Some((file, pool)) => {
                forget(&pool.0);
                (file, pool)
            }
            None => {
                if there.is_some() {
                    let removed = std::fs::remove_file(path);
                    removed.map_err(|error| at_path(path, "it is in the way: ", error))?;
                }
                let what = format!("{} MiB of packet memory: ", len >> 20);
                memory::anew(path, len).map_err(|error| at_path(path, &what, error))?
            }
        };
        if let Some((user, group)) = at.owner {
            fchown(&file, Some(user), Some(group))?;
        }
        let inode = file.metadata()?.ino();
        let reader = File::open(path)?;
        if reader.metadata()?.ino() != inode {
            let replaced = io::Error::other("it was replaced just now");
            return Err(at_path(path, "", replaced));
        }
        let shared = SharedMemory {
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
            layout,
            watch,
        };
        Ok((shared, Arc::new(it)))
    }

    /// Somebody truncated it, and it grew again.
    pub fn lose(&self) {
        // Release: as sigbus does.
        self.watch.lost.store(true, Ordering::Release);
    }

    /// Somebody truncated it: what is received does not come to its readers.
    pub fn is_lost(&self) -> bool {
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

/// An error with its path, and what to do about it.
fn at_path(path: &Path, what: &str, error: io::Error) -> io::Error {
    let hint = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory => "; lower frames, or make room",
        _ => "",
    };
    let text = format!("{}: {what}{error}{hint}", path.display());
    io::Error::new(error.kind(), text)
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
    struct TestDir(PacketPath);

    impl TestDir {
        fn new(name: &str) -> Self {
            let path = format!("/dev/shm/vnplug-{name}-{}", std::process::id());
            Self(PacketPath {
                path: path.into(),
                owner: None,
                again: Vec::new(),
            })
        }

        /// A VM has this file, and may see everything.
        fn again(&mut self, file: &PacketFile) {
            self.0.again = vec![(file.inode, file.layout.clone())];
        }

        fn open(&self, len: u64) -> (SharedMemory, Arc<PacketFile>) {
            PacketFile::open(&self.0, len, LAYOUT.into()).unwrap()
        }
    }

    impl Drop for TestDir {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0.path);
        }
    }

    const LEN: u64 = 8 << 20;
    const LAYOUT: &str = "as ever";

    #[test]
    fn the_next_daemon_has_the_same_file_and_no_arena_or_frame_of_the_last_one_is_in_it() {
        let mut place = TestDir::new("packets-again");
        let (memory, first) = place.open(LEN);
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
        place.again(&first);
        let (again, second) = place.open(LEN);
        assert_eq!(first.inode, second.inode);
        assert!(readers.iter().all(|reader| !reader.is_whole(0)));
        // It is the same memory.
        assert_eq!(memory.region.load_u64(LEN - 8, Ordering::Relaxed), 0);
        again.region.write(LEN - 8, b"a packet");
        assert_ne!(memory.region.load_u64(LEN - 8, Ordering::Relaxed), 0);
        assert!(memory::again(&place.0.path, first.inode, LEN, &[u32::MAX]).is_err());
    }

    #[test]
    fn a_file_that_no_vm_is_known_to_have_is_left_to_who_has_it() {
        let mut place = TestDir::new("packets-unknown");
        let path = place.0.path.clone();
        let (memory, first) = place.open(LEN);
        memory.region.write(64, b"still me");
        let other_than = |place: &TestDir, inode: u64| {
            let (other, second) = place.open(LEN);
            assert_ne!(second.inode, inode);
            other.region.write(64, b"a packet");
            let mut kept = [0; 8];
            memory.region.read(64, &mut kept);
            assert_eq!(&kept, b"still me");
            second
        };
        // Stale, or of a VM that may not see it any more.
        let second = other_than(&place, first.inode);
        place.again(&second);
        // A memory of the same length which somebody else may write, under the file's name.
        let pool = path.with_extension("pool");
        let pool_of = |path: &Path| memory::pool_file(path, LEN, true, &|| true).unwrap();
        let (theirs, _) = pool_of(&pool);
        theirs.write(64, b"still me");
        std::fs::remove_file(&path).unwrap();
        std::fs::hard_link(&pool, &path).unwrap();
        let inode = std::fs::metadata(&pool).unwrap().ino();
        other_than(&place, inode);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&pool, &path).unwrap();
        other_than(&place, inode);
        let mut kept = [0; 8];
        theirs.read(64, &mut kept);
        assert_eq!(&kept, b"still me");
        std::fs::remove_file(&pool).unwrap();
    }

    #[test]
    fn who_cannot_have_it_is_told_where_and_why() {
        let place = TestDir::new("packets-errors");
        std::fs::create_dir(&place.0.path).unwrap();
        let error = PacketFile::open(&place.0, LEN, LAYOUT.into())
            .err()
            .unwrap();
        std::fs::remove_dir(&place.0.path).unwrap();
        let (text, path) = (error.to_string(), place.0.path.to_str().unwrap());
        assert!(text.starts_with(path), "{text}");
        assert!(text.contains("it is in the way"), "{text}");
    }

    #[test]
    fn of_another_size_or_cut_it_is_another_file_and_who_has_the_old_one_keeps_it() {
        let mut place = TestDir::new("packets-other");
        let (memory, first) = place.open(LEN);
        place.again(&first);
        memory.region.write(64, b"still me");
        let (_, second) = place.open(2 * LEN);
        assert_ne!(first.inode, second.inode);
        place.again(&second);
        let cut = PacketFile::open(&place.0, 2 * LEN, "otherwise".into());
        let (_, third) = cut.unwrap();
        assert_ne!(second.inode, third.inode);
        let mut kept = [0; 8];
        memory.region.read(64, &mut kept);
        assert_eq!(&kept, b"still me");
        assert!(!first.is_lost() && !second.is_lost());
    }

    #[test]
    fn a_directory_on_a_disk_is_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("packets");
        let at = PacketPath {
            path,
            owner: None,
            again: Vec::new(),
        };
        let error = PacketFile::open(&at, LEN, LAYOUT.into());
        let error = error.err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
    }
}
