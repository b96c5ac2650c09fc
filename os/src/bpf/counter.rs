//! Numbers that programs add to and the daemon reads without a system call.

use std::io;
use std::sync::atomic::Ordering;

use vnplug_ring::Region;

use super::{MMAPABLE, Map, MapKind};
use crate::memory;

/// Counters by number, an array that programs look up (Linux ≥ 5.5).
#[derive(Debug)]
pub struct Counters {
    map: Map,
    values: Region,
}

impl Counters {
    /// `count` counters at 0, a power of two from 64 on, each in a cache line of its own.
    pub fn create(name: &str, count: u32) -> io::Result<Self> {
        let bytes = SLOT_BYTES as usize;
        let map = Map::create_with(MapKind::Array, name, (4, bytes), count, MMAPABLE)?;
        let values = memory::mapped(&map.fd, u64::from(count) * bytes as u64)?;
        Ok(Self { map, values })
    }

    /// The map; the first 8 bytes of a value are its counter.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// What was counted under a number.
    pub fn read(&self, number: u32) -> u64 {
        let at = u64::from(number * SLOT_BYTES);
        // Relaxed: a number that nothing else depends on.
        self.values.load_u64(at, Ordering::Relaxed)
    }
}

/// Bytes of a counter: a cache line of its own.
const SLOT_BYTES: u32 = 64;
