//! Bare transfers: the same bytes by the same two CPUs as a hand-off or a fan-out moves, in slots of
//! one size, with nothing around them: no header to build or check, no lengths, no wrap-around, one
//! shared counter each way per batch. What ours lacks to it is what our rings cost; what is left is
//! the machine's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug_ring::Region;

use crate::handoff::{Reading, Sizes};
use crate::row::Result;
use crate::sys;

/// What is passed on, and to how many.
#[derive(Clone, Copy)]
pub(crate) struct Bare {
    pub(crate) sizes: Sizes,
    /// Bytes of each ring, or of the arena.
    pub(crate) capacity: u64,
    pub(crate) reading: Reading,
    /// Rings, which one reader takes from in turn.
    pub(crate) rings: usize,
    /// Each packet is written once, and 16 bytes that stand for it into each ring.
    pub(crate) shared: bool,
}

impl Bare {
    /// One ring of packets.
    pub(crate) fn one(sizes: Sizes, capacity: u64, reading: Reading) -> Self {
        Self {
            sizes,
            capacity,
            reading,
            rings: 1,
            shared: false,
        }
    }

    /// Packets per microsecond that come out of each ring.
    pub(crate) fn mpps(self, time: Duration) -> Result<f64> {
        let size = self.ring_bytes() * (self.rings as u64 + 1);
        let region = sys::map(&sys::memory(size)?, size)?;
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                sys::pin(sys::cpu(1)).map_err(|error| error.to_string())?;
                self.write(&region, &over);
                Ok::<_, String>(())
            });
            let reader = scope.spawn(|| {
                let packets = sys::pin(sys::cpu(0)).map(|()| self.take(&region, time));
                over.store(true, Ordering::Relaxed);
                packets.map_err(|error| error.to_string())
            });
            let packets = reader.join().map_err(|_| "the reader panicked")?;
            writer.join().map_err(|_| "the writer panicked")??;
            Ok(packets? / self.rings as f64)
        })
    }

    /// Bytes of a packet: as our records, 32 of header and whole words.
    fn record(self) -> usize {
        (self.sizes.mean() + 32).next_multiple_of(8)
    }

    /// Bytes of what is written into each ring.
    fn stride(self) -> usize {
        if self.shared { 16 } else { self.record() }
    }

    /// A ring of what stands for packets has a place for each that is in the arena, at least.
    fn slots(self) -> u64 {
        let bytes = self.capacity / if self.shared { 4 } else { 1 };
        bytes / self.stride() as u64
    }

    fn ring_bytes(self) -> u64 {
        DATA + self.capacity
    }

    fn write(self, region: &Region, over: &AtomicBool) {
        let (record, stride, slots) = (self.record(), self.stride(), self.slots());
        let frames: Vec<Vec<u8>> = (0..256).map(|frame| vec![frame as u8; record]).collect();
        let mut places = vec![Cursor::default(); self.rings];
        let (arena, records) = (self.arena(), self.capacity / record as u64);
        // A power of two, so that the frames are whole batches.
        let batch = BATCH.min(1 << (slots / PART).max(1).ilog2());
        let mut next = 0;
        for frames in frames.chunks(batch as usize).cycle() {
            if over.load(Ordering::Relaxed) {
                return;
            }
            if self.shared {
                for frame in frames {
                    region.write(arena + next * record as u64, frame);
                    next = if next + 1 == records { 0 } else { next + 1 };
                }
            }
            for (ring, place) in (0..).zip(&mut places) {
                let base = ring * self.ring_bytes();
                if place.counted + batch - place.seen > slots {
                    // Acquire: pairs with the Release in `take`; the slots are free.
                    place.seen = region.load_u64(base + TAKEN, Ordering::Acquire);
                    if place.counted + batch - place.seen > slots {
                        continue;
                    }
                }
                for frame in frames {
                    let at = base + DATA + place.slot * stride as u64;
                    region.write(at, &frame[..stride]);
                    place.step(slots);
                }
                // Release: pairs with the Acquire in `take`; the slots are filled.
                region.store_u64(base + WRITTEN, place.counted, Ordering::Release);
            }
        }
    }

    /// Packets per microsecond of all rings together.
    fn take(self, region: &Region, time: Duration) -> f64 {
        let (record, stride, slots) = (self.record(), self.stride(), self.slots());
        let (arena, records) = (self.arena(), self.capacity / record as u64);
        let look = match self.reading {
            Reading::Header => 32,
            Reading::InPlace => record.min(96),
            Reading::CopiedOut => record,
        };
        let mut private = vec![0_u8; record];
        let mut places = vec![Cursor::default(); self.rings];
        let (mut begin, mut packets, mut looks) = (Instant::now(), 0_u64, 0_u64);
        let mut warming = true;
        loop {
            for (ring, place) in (0..).zip(&mut places) {
                let base = ring * self.ring_bytes();
                // Acquire: pairs with the Release in `write`.
                let written = region.load_u64(base + WRITTEN, Ordering::Acquire);
                packets += written - place.counted;
                while place.counted != written {
                    let at = base + DATA + place.slot * stride as u64;
                    if self.shared {
                        region.read(at, &mut private[..stride]);
                        let at = arena + place.counted % records * record as u64;
                        region.read(at, &mut private[..look]);
                    } else {
                        region.read(at, &mut private[..look]);
                    }
                    std::hint::black_box(&private);
                    place.step(slots);
                }
                // Release: pairs with the Acquire in `write`.
                region.store_u64(base + TAKEN, place.counted, Ordering::Release);
            }
            looks += 1;
            let elapsed = match looks % 64 {
                0 => begin.elapsed(),
                _ => continue,
            };
            if warming && elapsed >= time / 8 {
                // The first look at each page is no transfer.
                (warming, packets, begin) = (false, 0, Instant::now());
            } else if !warming && elapsed >= time {
                return packets as f64 / elapsed.as_secs_f64() / 1e6;
            }
        }
    }

    /// Where the arena's records are: after the rings.
    fn arena(self) -> u64 {
        self.ring_bytes() * self.rings as u64 + DATA
    }
}

/// Where one side is in a ring.
#[derive(Clone, Default)]
struct Cursor {
    /// Packets written or taken.
    counted: u64,
    /// Of which this is the next one's slot.
    slot: u64,
    /// What the other side said last.
    seen: u64,
}

impl Cursor {
    #[inline]
    fn step(&mut self, slots: u64) {
        self.counted += 1;
        self.slot = if self.slot + 1 == slots {
            0
        } else {
            self.slot + 1
        };
    }
}

/// Packets per counter update, as in the hand-off.
const BATCH: u64 = 64;
/// A batch has at most this part of a ring: in a small one the two sides would wait for each other.
const PART: u64 = 8;
/// Counters on lines of their own, then the slots.
const WRITTEN: u64 = 0;
const TAKEN: u64 = 256;
const DATA: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_out_of_every_ring() {
        for (rings, shared) in [(1, false), (3, false), (3, true)] {
            let bare = Bare {
                rings,
                shared,
                ..Bare::one(Sizes::Imix, 1 << 16, Reading::Header)
            };
            // Longer each time, for who takes them waits for a processor, too.
            let mut times = (0..10).map(|turn| Duration::from_millis(20 << turn));
            assert!(times.any(|time| bare.mpps(time).unwrap() > 0.0));
        }
    }
}
