//! Packet memory as the arena of groups: how it is cut for that, and what readers get of it.

use std::io;
use std::sync::Arc;

use vnplug_ring::control::RingPlace;
use vnplug_ring::{BufferGeometry, Buffers};

use crate::port::commons::Commons;
use crate::source::lent::{Lent, PacketPath};
use crate::sys::event;
use crate::sys::umem::{Umem, UmemShape};

/// The shape with which packet memory is lent: as many chunks again for readers, and room for
/// copies of what does not lie in one chunk, or where a driver does not align its frames.
pub(super) fn shape(shape: UmemShape) -> UmemShape {
    let kept = shape.receive.max(FEWEST_KEPT);
    UmemShape {
        kept,
        spare: (kept * (shape.chunk / 4)).max(FOR_LONG_FRAMES),
        ..shape
    }
}

/// Packet memory that is lent.
pub(super) struct Lending {
    /// Each queue's part.
    pub(super) queues: Vec<(Umem, Lent)>,
    pub(super) bytes: u64,
    pub(super) huge: bool,
}

/// Makes the packet memory of so many queues, and lays an arena in each part; in a file, if `at` says
/// where and it can lie there.
pub(super) fn lend(shape: UmemShape, count: usize, at: Option<&PacketPath>) -> io::Result<Lending> {
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
    let (shape, parts, memory, file) = match in_file {
        Some(made) => made,
        None => {
            let (parts, memory) = Umem::lent(shape, count)?;
            (shape, parts, memory, None)
        }
    };
    let fd = Arc::new(memory.fd);
    let mut queues = Vec::with_capacity(count);
    for (umem, queue) in parts.into_iter().zip(0_u32..) {
        let geometry = BufferGeometry {
            buffer: shape.chunk.into(),
            buffers: u64::from(shape.receive) + u64::from(shape.kept),
            kept: shape.kept.into(),
            spare: shape.spare.into(),
            epoch: event::random() | 1,
            queue,
        };
        let shown = umem.region().part(0, shape.shown());
        let shown = shown.ok_or(io::ErrorKind::InvalidInput)?;
        let header = shown.clone();
        let buffers = Buffers::create(shown, geometry).map_err(io::Error::other)?;
        let lent = Lent {
            commons: Arc::new(Commons::lent(buffers)),
            epoch: geometry.epoch,
            header,
            file: file.clone(),
            memory: Arc::clone(&fd),
            map_len: memory.len,
            place: RingPlace {
                offset: u64::from(queue) * shape.bytes(),
                len: shape.shown(),
            },
            kept: shape.kept.into(),
            snaplen: geometry.snaplen(),
        };
        queues.push((umem, lent));
    }
    Ok(Lending {
        queues,
        bytes: memory.len,
        huge: memory.huge,
    })
}

/// Fewer would not outlast a batch of frames of several chunks.
const FEWEST_KEPT: u32 = 1024;
/// The longest frame, 64 KiB, more than some times.
const FOR_LONG_FRAMES: u32 = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::umem::LENT_HEADROOM;

    #[test]
    fn every_queue_has_an_arena_in_its_part_of_one_memory() {
        let whole = UmemShape {
            chunk: 4096,
            receive: 64,
            kept: 0,
            transmit: 16,
            spare: 0,
            headroom: LENT_HEADROOM,
        };
        let shape = shape(whole);
        let lending = lend(shape, 3, None).unwrap();
        assert_eq!(lending.queues.len(), 3);
        let mut end = 0;
        for (umem, lent) in &lending.queues {
            assert!(lent.place.offset >= end && lent.map_len == lending.bytes);
            end = lent.place.offset + lent.place.len;
            let shown = umem.region().part(0, lent.place.len).unwrap();
            let reader = vnplug_ring::ArenaReader::attach(shown).unwrap();
            assert_eq!(reader.snaplen(), lent.snaplen);
            assert!(lent.snaplen >= 1 << 16);
        }
        assert!(end <= lending.bytes);
    }
}
