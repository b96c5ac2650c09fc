//! The host's end of a ring of descriptors: one for each reader of a group.
//!
//! Everything but the records is a ring's: its words, its life, its wake-up. Descriptors have one
//! size that divides the area, so nothing is ever padded.

use std::sync::atomic::Ordering;

use super::{PeerLied, Producer};
use crate::arena::{DESCRIPTOR, DESCRIPTOR_GAP, DESCRIPTORS_MAGIC, Placed};
use crate::layout::{DATA_OFFSET, Geometry, LIFE};
use crate::producer::CreateError;
use crate::region::Region;

impl Producer {
    /// Lays an empty ring of descriptors into `region`. Its `snaplen` is what its reader wants of
    /// each packet; the records lie in an arena.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_descriptors(region: Region, geometry: Geometry) -> Result<Self, CreateError> {
        crate::header::lay(&region, &geometry, DESCRIPTORS_MAGIC, LIFE, 0)?;
        Ok(Self::at(region, geometry, 0, 0))
    }

    /// Whether one more descriptor has room; if not, the loss is counted.
    ///
    /// # Errors
    /// [`PeerLied`] as [`reserve`](Self::reserve).
    #[inline]
    pub fn reserve_descriptor(&mut self) -> Result<bool, PeerLied> {
        let capacity = self.geometry.capacity;
        if self.head.wrapping_sub(self.tail) + DESCRIPTOR > capacity {
            self.refresh_tail()?;
            if self.head.wrapping_sub(self.tail) + DESCRIPTOR > capacity {
                self.dropped += 1;
                self.lose();
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes a descriptor into the room that [`reserve_descriptor`](Self::reserve_descriptor) found; it becomes visible
    /// with the next [`publish`](Self::publish).
    #[inline]
    pub fn describe(&mut self, placed: Placed, gap: bool) {
        let offset = DATA_OFFSET + (self.head & (self.geometry.capacity - 1));
        let gap = if gap { DESCRIPTOR_GAP } else { 0 };
        let lost = self.lost.min(DESCRIPTOR_GAP - 1) | gap;
        let place = u64::from(placed.at) | u64::from(lost) << 32;
        self.region.store_u64(offset, placed.seq, Ordering::Relaxed);
        self.region.store_u64(offset + 8, place, Ordering::Relaxed);
        self.head = self.head.wrapping_add(DESCRIPTOR);
        self.lost = 0;
        self.written = self.written.wrapping_add(1);
    }
}
