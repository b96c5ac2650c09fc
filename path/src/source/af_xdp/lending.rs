//! Packet memory as the arena of groups: its layout, and what readers get of it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_ring::control::RingPlace;
use vnplug_ring::{BufferGeometry, Buffers, Region};

use crate::commons::Commons;
use crate::source::lent::{Lent, PacketPath};
use vnplug_os::event;
use vnplug_os::memory::SharedMemory;
use vnplug_os::packet_file::PacketFile;
use vnplug_os::umem::{Umem, UmemShape};

/// The shape of lent packet memory: as many chunks again for readers, and room for copies of frames
/// that do not lie in one chunk, or that a driver does not align.
pub(super) fn shape(shape: UmemShape) -> UmemShape {
    let kept = shape.receive.max(FEWEST_KEPT);
    UmemShape {
        kept,
        spare: (kept * (shape.chunk / 4)).max(FOR_LONG_FRAMES),
        ..shape
    }
}

/// Packet memory that is to be lent: nobody finds an arena in it yet.
pub(super) struct Lending {
    shape: UmemShape,
    memory: SharedMemory,
    file: Option<Arc<PacketFile>>,
    /// The region of each queue's part that readers are shown, and the mark after it.
    parts: Vec<(Region, Region)>,
}

/// Makes the packet memory of this many queues; in a file, if `at` says where and it can lie there.
pub(super) fn make(
    shape: UmemShape,
    count: usize,
    at: Option<&PacketPath>,
) -> io::Result<(Vec<Umem>, Lending)> {
    let in_file = at.and_then(|at| {
        let shape = shape.filling(count);
        let made = Umem::in_file(shape, count, at);
        let made = made.map(|(parts, memory, file)| (shape, parts, memory, Some(file)));
        let say = |error: &io::Error| {
            log::warn!(
                target: "source",
                "VMs cannot map packet memory, and get copies: {error}; --pool-dir names another \
                 directory"
            );
        };
        made.inspect_err(say).ok()
    });
    let (shape, umems, memory, file) = match in_file {
        Some(made) => made,
        None => {
            let (umems, memory) = Umem::lent(shape, count)?;
            (shape, umems, memory, None)
        }
    };
    let part = |umem: &Umem| umem.region().part(0, shape.shown()).zip(umem.mark());
    let parts: Option<Vec<_>> = umems.iter().map(part).collect();
    let lending = Lending {
        shape,
        memory,
        file,
        parts: parts.ok_or(io::ErrorKind::InvalidInput)?,
    };
    Ok((umems, lending))
}

impl Lending {
    /// Bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.len
    }

    /// It lies in huge pages.
    pub(super) fn is_huge(&self) -> bool {
        self.memory.huge
    }

    /// Lays an arena in each queue's part, once it is sure that frames will come: VMs may have the
    /// memory already.
    pub(super) fn lay(self) -> io::Result<Vec<Lent>> {
        let (shape, map_len) = (self.shape, self.memory.len);
        let memory = Arc::new(self.memory.fd);
        let mut queues = Vec::with_capacity(self.parts.len());
        for ((shown, mark), queue) in self.parts.into_iter().zip(0_u32..) {
            let geometry = BufferGeometry {
                buffer: shape.chunk.into(),
                buffers: u64::from(shape.receive) + u64::from(shape.kept),
                kept: shape.kept.into(),
                spare: shape.spare.into(),
                epoch: event::random() | 1,
                queue,
            };
            let buffers = Buffers::create(shown, geometry).map_err(io::Error::other)?;
            // Relaxed: only this process reads it.
            mark.store_u64(0, geometry.epoch, Ordering::Relaxed);
            queues.push(Lent {
                commons: Arc::new(Commons::lent(buffers)),
                epoch: geometry.epoch,
                mark,
                file: self.file.clone(),
                memory: Arc::clone(&memory),
                map_len,
                place: RingPlace {
                    offset: u64::from(queue) * shape.bytes(),
                    len: shape.shown(),
                },
                kept: shape.kept.into(),
                snaplen: geometry.snaplen(),
            });
        }
        Ok(queues)
    }
}

/// Fewer would not outlast a batch of frames of several chunks.
const FEWEST_KEPT: u32 = 1024;
/// The longest frame, 64 KiB, more than some times.
const FOR_LONG_FRAMES: u32 = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_os::umem::LENT_HEADROOM;

    #[test]
    fn every_queue_has_an_arena_in_its_part_of_one_memory() {
        let (umems, lending) = make(shape(SHAPE), 3, None).unwrap();
        let bytes = lending.bytes();
        let attach = |umem: &Umem| {
            let shown = umem.region().part(0, umem.shape().shown()).unwrap();
            vnplug_ring::ArenaReader::attach(shown)
        };
        assert!(umems.iter().all(|umem| attach(umem).is_err()), "not yet");
        let lends = lending.lay().unwrap();
        assert_eq!((umems.len(), lends.len()), (3, 3));
        let mut end = 0;
        for (umem, lent) in umems.iter().zip(&lends) {
            assert!(lent.place.offset >= end && lent.map_len == bytes);
            end = lent.place.offset + lent.place.len;
            assert_eq!(umem.shape().shown(), lent.place.len);
            let reader = attach(umem).unwrap();
            assert_eq!(reader.snaplen(), lent.snaplen);
            assert!(lent.snaplen >= 1 << 16);
        }
        assert!(end <= bytes);
    }

    /// In `/dev/shm`, which is a tmpfs wherever the daemon's pools lie by default.
    #[test]
    fn memory_of_the_same_length_for_another_number_of_queues_is_another_file() {
        let path = format!("/dev/shm/vnplug-lending-{}", std::process::id());
        let mut at = PacketPath {
            path: path.clone().into(),
            owner: None,
            again: Vec::new(),
        };
        let made = |at: &PacketPath, count| {
            let (_, lending) = make(shape(SHAPE), count, Some(at)).unwrap();
            let file = lending.file.unwrap();
            (file.inode, file.len, file.layout.clone())
        };
        let (three, len, layout) = made(&at, 3);
        at.again = vec![(three, layout)];
        assert_eq!(made(&at, 3).0, three);
        let (four, same_len, _) = made(&at, 4);
        std::fs::remove_file(path).unwrap();
        assert_eq!(len, same_len);
        assert_ne!(three, four);
    }

    /// Wherever a file is cut, what is there when it grew again is not taken for frames.
    #[test]
    fn a_file_that_was_truncated_and_grew_again_is_lost() {
        let at = PacketPath {
            path: format!("/dev/shm/vnplug-cut-{}", std::process::id()).into(),
            owner: None,
            again: Vec::new(),
        };
        let shown = shape(SHAPE).filling(1).shown();
        for keep in [0, 4096, shown - 4096, shown] {
            let (_umems, lending) = make(shape(SHAPE), 1, Some(&at)).unwrap();
            let lent = lending.lay().unwrap().remove(0);
            assert!(!lent.is_lost());
            let (file, len) = (
                std::fs::File::options().write(true).open(&at.path),
                lent.map_len,
            );
            let file = file.unwrap();
            // What nobody reads may go.
            file.set_len(shown + 8).unwrap();
            file.set_len(len).unwrap();
            assert!(!lent.is_lost());
            file.set_len(keep).unwrap();
            file.set_len(len).unwrap();
            assert!(lent.is_lost(), "{keep} bytes were kept");
            std::fs::remove_file(&at.path).unwrap();
        }
    }

    const SHAPE: UmemShape = UmemShape {
        chunk: 2048,
        receive: 64,
        kept: 0,
        transmit: 16,
        spare: 0,
        headroom: LENT_HEADROOM,
    };
}
