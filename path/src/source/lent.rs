//! Memory that frames are received into, lent to the groups of a source as their arena.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_ring::Region;
use vnplug_ring::control::RingPlace;

use crate::commons::Commons;
use vnplug_os::packet_file::PacketFile;
pub use vnplug_os::packet_file::PacketPath;

/// What a queue lends: the members of groups read its frames where they were received.
///
/// It is one memory for all queues of a source. A process that has mapped it sees every frame that
/// the source receives, wanted or not, for as long as the source exists.
#[derive(Debug, Clone)]
pub struct Lent {
    /// The queue's arena, the same for all groups.
    pub commons: Arc<Commons>,
    /// Number of the arena's incarnation, by which a guest finds it.
    pub epoch: u64,
    /// A word after the queue's arena with the same number: if any of the arena is cut off, the
    /// word is lost, too.
    pub(crate) mark: Region,
    /// The file that the memory is, if VMs can map it.
    pub file: Option<Arc<PacketFile>>,
    /// Descriptor of the memory, through which nothing can be written.
    pub memory: Arc<OwnedFd>,
    /// Bytes of it to map.
    pub map_len: u64,
    /// Where the queue's arena lies.
    pub place: RingPlace,
    /// How many further frames come before a frame is recycled.
    pub kept: u64,
    /// The longest frame.
    pub snaplen: u32,
}

impl Lent {
    /// Somebody truncated the memory: nobody is to read there.
    pub fn is_lost(&self) -> bool {
        self.file.as_ref().is_some_and(|file| {
            // Relaxed: only the daemon writes it. Another number is no fault, if the file was truncated
            // and grew again.
            if self.mark.load_u64(0, Ordering::Relaxed) != self.epoch {
                file.lose();
            }
            file.is_lost()
        })
    }
}

/// Where sources make files of their packet memory.
#[derive(Debug, Clone)]
pub struct PacketDir {
    /// A directory on tmpfs or hugetlbfs.
    pub dir: PathBuf,
    /// What their names begin with.
    pub prefix: String,
    /// User and group that the daemon becomes; `None`: it stays what it is.
    pub owner: Option<(u32, u32)>,
    /// The files of earlier daemons that may be received into again, by path and inode, and how each
    /// is cut. Of any other it is not known who can read or write it.
    pub again: BTreeMap<(PathBuf, u64), String>,
}

impl PacketDir {
    /// The file of the source of this name.
    pub fn of(&self, source: &str) -> PacketPath {
        let path = self.dir.join(format!("{}{source}{PACKETS}", self.prefix));
        let of_path = self.again.iter().filter(|((at, _), _)| *at == path);
        let again = of_path.map(|((_, inode), layout)| (*inode, layout.clone()));
        PacketPath {
            owner: self.owner,
            again: again.collect(),
            path,
        }
    }
}

/// Whether a file of this name is a source's, of the daemon whose names begin so.
pub fn is_packets(prefix: &str, file: &str) -> bool {
    file.starts_with(prefix) && file.ends_with(PACKETS)
}

const PACKETS: &str = ".umem";
