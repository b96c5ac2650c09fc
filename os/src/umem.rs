//! Packet memory of AF_XDP (UMEM): how it is cut, and which chunks the kernel is to have.
//!
//! ```text
//!   page │ spare │ receive chunks: kernel's, RX ring, taken, kept │ mark │ transmit chunks
//!   └──────────────── what readers may be shown ──────────────────┘        └── ours alone
//! ```
//!
//! Packet memory that is **lent** is the arena of groups, too: the page is its header, the spare
//! area takes copies of what does not lie in one chunk, and readers map it. Then the newest `kept`
//! chunks that were taken are held back from the kernel, first in, first out: what comes in at one
//! end pushes out as many at the other, so that a frame stays while `kept` further chunks are
//! taken. After them is a page for a mark, which is lost if anything is cut off the file (`Lent`).
//! Memory that is not lent has neither a spare area nor a mark, and keeps nothing.

use std::io;
use std::sync::Arc;

use vnplug_ring::Region;

use super::memory::{self, HUGE, SharedMemory};
use super::packet_file::{PacketFile, PacketPath};

/// Packet memory of one socket at a time.
#[derive(Debug)]
pub struct Umem {
    region: Region,
    shape: UmemShape,
    /// Chunks held back, in a circle.
    kept: Box<[u64]>,
    /// The place of the oldest one.
    oldest: u32,
}

/// How packet memory is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UmemShape {
    /// Bytes of a chunk, a power of two: 2048 or 4096.
    pub chunk: u32,
    /// Chunks for the kernel to receive into, a power of two.
    pub receive: u32,
    /// Further ones that are held back after they were taken; 0 if the memory is not lent.
    pub kept: u32,
    /// Chunks to send from, a power of two; they lie after the others.
    pub transmit: u32,
    /// Bytes between the first page and the chunks, a multiple of a page.
    pub spare: u32,
    /// Bytes before each frame that the kernel does not touch, besides its own 256.
    pub headroom: u32,
}

impl UmemShape {
    /// Where the chunks begin.
    pub const fn chunks_at(&self) -> u64 {
        PAGE + self.spare as u64
    }

    /// Bytes that readers may be shown, from the first page to the last receive chunk.
    pub const fn shown(&self) -> u64 {
        self.chunks_at() + (self.receive as u64 + self.kept as u64) * self.chunk as u64
    }

    /// Offset of the first transmit chunk from the first chunk. In lent memory a huge page may begin
    /// there.
    pub const fn transmit_at(&self) -> u64 {
        let at = match self.kept {
            0 => self.shown(),
            _ => (self.shown() + PAGE).next_multiple_of(HUGE),
        };
        at - self.chunks_at()
    }

    /// Bytes from the first chunk to the last.
    pub const fn chunk_bytes(&self) -> u64 {
        self.transmit_at() + self.transmit as u64 * self.chunk as u64
    }

    /// Bytes in all.
    pub const fn bytes(&self) -> u64 {
        let bytes = self.chunks_at() + self.chunk_bytes();
        match self.kept {
            0 => bytes,
            _ => bytes.next_multiple_of(HUGE),
        }
    }

    /// Bytes of a file with this many of these: a power of two, as the devices of VMs have.
    pub const fn file_bytes(&self, count: usize) -> u64 {
        (self.bytes() * count as u64).next_power_of_two()
    }

    /// The shape with which this many fill their file: more chunks are held back.
    pub const fn filling(self, count: usize) -> Self {
        let each = self.file_bytes(count) / count as u64 / HUGE * HUGE;
        let sent = (self.transmit as u64 * self.chunk as u64).next_multiple_of(HUGE);
        let chunks = (each - sent - self.chunks_at() - PAGE) / self.chunk as u64;
        Self {
            kept: chunks as u32 - self.receive,
            ..self
        }
    }

    /// The layout of memory for this many of these: two daemons may use the same memory if it is
    /// equal.
    fn layout(&self, count: usize) -> String {
        let Self {
            chunk,
            receive,
            kept,
            transmit,
            spare,
            headroom,
        } = self;
        format!("{count}x{spare}+({receive}+{kept}+{transmit})x{chunk}-{headroom}")
    }
}

impl Umem {
    /// Commits memory that nobody else sees, in huge pages if it can; and whether it did.
    pub fn alone(shape: UmemShape) -> io::Result<(Self, bool)> {
        let mut memory = memory::sealed("vnplug-umem", shape.bytes(), &|| true)?;
        memory.collapse();
        let huge = memory.huge;
        Ok((Self::new(memory.region, shape), huge))
    }

    /// Commits memory to be lent, for this many sockets: one descriptor, one part after the other.
    pub fn lent(shape: UmemShape, count: usize) -> io::Result<(Vec<Self>, SharedMemory)> {
        let bytes = shape.bytes() * count as u64;
        Self::cut(
            memory::write_sealed("vnplug-umem", bytes, &|| true)?,
            shape,
            count,
        )
    }

    /// As [`lent`](Self::lent), in a file that nobody else may map for writing.
    pub fn in_file(
        shape: UmemShape,
        count: usize,
        at: &PacketPath,
    ) -> io::Result<(Vec<Self>, SharedMemory, Arc<PacketFile>)> {
        let (memory, file) = PacketFile::open(at, shape.file_bytes(count), shape.layout(count))?;
        let (parts, memory) = Self::cut(memory, shape, count)?;
        Ok((parts, memory, file))
    }

    fn cut(
        mut memory: SharedMemory,
        shape: UmemShape,
        count: usize,
    ) -> io::Result<(Vec<Self>, SharedMemory)> {
        let each = shape.bytes();
        let mut parts = Vec::with_capacity(count);
        for at in (0..count as u64).map(|nth| nth * each) {
            // A process that maps the descriptor finds nothing there: sent frames are not for
            // readers.
            let sent = shape.chunks_at() + shape.transmit_at();
            memory.unshare(at + sent, each - sent)?;
            let part = memory.region.part(at, each);
            let part = part.ok_or(io::ErrorKind::InvalidInput)?;
            parts.push(Self::new(part, shape));
        }
        memory.collapse();
        Ok((parts, memory))
    }

    fn new(region: Region, shape: UmemShape) -> Self {
        let last = shape.receive + shape.kept;
        let kept = (shape.receive..last).map(|index| shape.offset(index));
        Self {
            region,
            shape,
            kept: kept.collect(),
            oldest: 0,
        }
    }

    /// A word in lent memory that no reader is shown, after everything that they are.
    pub fn mark(&self) -> Option<Region> {
        self.region.part(self.shape.shown(), 8)
    }

    /// How it is cut.
    pub fn shape(&self) -> UmemShape {
        self.shape
    }

    /// All of it.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Receive chunks that the kernel is to have when a socket begins: all that are not held back.
    pub fn free(&self) -> Vec<u64> {
        let mut chunks = vec![true; (self.shape.receive + self.shape.kept) as usize];
        for at in &*self.kept {
            if let Some(free) = chunks.get_mut((at / u64::from(self.shape.chunk)) as usize) {
                *free = false;
            }
        }
        let free = (0..).zip(chunks).filter(|&(_, free)| free);
        // Never more than the kernel's ring has places.
        free.map(|(index, _)| self.shape.offset(index))
            .take(self.shape.receive as usize)
            .collect()
    }

    /// Holds a taken chunk back; gives the oldest one instead.
    #[inline]
    pub fn exchange(&mut self, chunk: u64) -> u64 {
        let Some(oldest) = self.kept.get_mut(self.oldest as usize) else {
            return chunk;
        };
        self.oldest = match self.oldest + 1 {
            next if next < self.shape.kept => next,
            _ => 0,
        };
        std::mem::replace(oldest, chunk)
    }
}

impl UmemShape {
    /// Offset of a chunk from the first one.
    fn offset(&self, index: u32) -> u64 {
        u64::from(index) * u64::from(self.chunk)
    }
}

/// Headroom with which a stamp of 16 bytes begins a pair of cache lines, and the frame's first 112
/// bytes fill it.
pub const HEADROOM: u32 = 144;
/// As above if readers are shown the frame: a record's header of 32 bytes begins the pair.
pub const LENT_HEADROOM: u32 = 160;

const PAGE: u64 = 4096;

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const LENT: UmemShape = UmemShape {
        chunk: 2048,
        receive: 64,
        kept: 64,
        transmit: 16,
        spare: 1 << 16,
        headroom: LENT_HEADROOM,
    };

    #[test]
    fn chunks_come_back_in_turn_and_a_new_socket_gets_those_that_are_not_held_back() {
        let (mut parts, _) = Umem::lent(LENT, 2).unwrap();
        assert_eq!(parts.len(), 2);
        let mut umem = parts.remove(1);
        let mut kernel: VecDeque<u64> = umem.free().into();
        assert_eq!(kernel.len(), 64);
        let mut last = VecDeque::new();
        for _ in 0..1000 {
            let chunk = kernel.pop_front().unwrap();
            assert!(!last.contains(&chunk), "it was held back");
            last.push_back(chunk);
            if last.len() > 64 {
                last.pop_front();
            }
            kernel.push_back(umem.exchange(chunk));
        }
        let free = umem.free();
        assert_eq!(free.len(), 64);
        assert!(free.iter().all(|chunk| !last.contains(chunk)));
    }

    #[test]
    fn parts_in_a_file_fill_it_and_none_is_smaller_than_before() {
        for (receive, count) in [(64, 1), (1024, 1), (1024, 3), (16_384, 4), (16_384, 7)] {
            let shape = UmemShape {
                receive,
                kept: receive,
                ..LENT
            };
            let filling = shape.filling(count);
            assert_eq!(filling.file_bytes(count), shape.file_bytes(count));
            assert!(filling.kept >= shape.kept && filling.bytes() >= shape.bytes());
            let left = filling.file_bytes(count) - filling.bytes() * count as u64;
            assert!(left < HUGE * count as u64, "{receive} {count}: {left}");
        }
    }

    #[test]
    fn memory_that_is_not_lent_keeps_nothing() {
        let shape = UmemShape {
            kept: 0,
            spare: 0,
            ..LENT
        };
        let (mut umem, _) = Umem::alone(shape).unwrap();
        assert_eq!(umem.free().len(), 64);
        assert_eq!(umem.exchange(4096), 4096);
    }

    #[test]
    fn what_is_sent_is_not_seen_through_the_descriptor() {
        let (parts, memory) = Umem::lent(LENT, 2).unwrap();
        for (nth, umem) in parts.iter().enumerate() {
            let (shown, sent) = (LENT.shown() - 8, LENT.chunks_at() + LENT.transmit_at());
            for at in [shown, sent, LENT.bytes() - 8] {
                umem.region().write(at, &[nth as u8 + 1; 8]);
            }
            let file = std::fs::File::from(memory.fd.try_clone().unwrap());
            let at_file = |at| {
                use std::os::unix::fs::FileExt;
                let mut bytes = [0; 8];
                let at = nth as u64 * LENT.bytes() + at;
                file.read_exact_at(&mut bytes, at).unwrap();
                bytes[0]
            };
            assert_eq!(at_file(shown), nth as u8 + 1);
            assert_eq!((at_file(sent), at_file(LENT.bytes() - 8)), (0, 0));
        }
    }
}
