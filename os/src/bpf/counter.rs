//! A number that programs add to and the daemon reads without a system call.

use std::io;
use std::sync::atomic::Ordering;

use vnplug_ring::Region;

use super::{MMAPABLE, Map, MapKind, possible_cpus};
use crate::memory;

/// A counter in parts, one per CPU (Linux ≥ 5.5). Reading it needs no capability, whatever
/// `kernel.unprivileged_bpf_disabled` says.
#[derive(Debug)]
pub struct Counter {
    map: Map,
    values: Region,
    slots: u32,
}

impl Counter {
    /// Bytes of a part: a cache line of its own.
    pub const SLOT_BYTES: u32 = 64;

    /// A counter at 0.
    pub fn create(name: &str) -> io::Result<Self> {
        let cpus = possible_cpus()?.next_power_of_two();
        let slots = u32::try_from(cpus).unwrap_or(MOST).min(MOST);
        let bytes = (slots * Self::SLOT_BYTES).next_multiple_of(4096);
        let map = Map::create_with(MapKind::Array, name, (4, bytes as usize), 1, MMAPABLE)?;
        let values = memory::mapped(&map.fd, bytes.into())?;
        Ok(Self { map, values, slots })
    }

    /// The map; its one value has the parts.
    pub(super) fn map(&self) -> &Map {
        &self.map
    }

    /// How many parts; a power of two. CPUs beyond share them.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// What was counted.
    pub fn sum(&self) -> u64 {
        let slots = (0..self.slots).map(|slot| u64::from(slot * Self::SLOT_BYTES));
        // Relaxed: numbers that nothing else depends on.
        slots.fold(0, |sum, at| {
            sum.wrapping_add(self.values.load_u64(at, Ordering::Relaxed))
        })
    }
}

/// Counters by number, an array that programs look up (Linux ≥ 5.5).
#[derive(Debug)]
pub struct Counters {
    map: Map,
    values: Region,
}

impl Counters {
    /// `count` counters at 0, a power of two from 64 on, each in a cache line of its own.
    pub fn create(name: &str, count: u32) -> io::Result<Self> {
        let bytes = Counter::SLOT_BYTES as usize;
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
        let at = u64::from(number * Counter::SLOT_BYTES);
        // Relaxed: a number that nothing else depends on.
        self.values.load_u64(at, Ordering::Relaxed)
    }
}

const MOST: u32 = 1024;
