//! Chunks: packets on their way to the disk, encoded already.

use std::sync::Arc;

use crate::disk::Buffer;

/// A buffer with packets, written as it is.
#[derive(Debug)]
pub struct Chunk {
    /// The memory.
    pub buffer: Buffer,
    /// Where the packets begin in it; 0 but for a classic pcap file that is written again.
    pub from: usize,
    /// Bytes, padding included.
    pub len: usize,
    /// Its number among all chunks of the recorder.
    pub serial: u64,
    /// What is in it.
    pub tally: Tally,
    /// It begins a segment, by size, time or count.
    pub begins_segment: bool,
    /// What its segment says about itself, if it begins one.
    pub note: Option<Arc<str>>,
}

/// Packets of a chunk or a segment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many.
    pub packets: u64,
    /// Their captured bytes.
    pub bytes: u64,
    /// The earliest stamp, nanoseconds since 1970; meaningless without packets.
    pub first_ns: u64,
    /// The latest.
    pub last_ns: u64,
    /// Of each interface: packets, and those lost before them in the ring.
    pub interfaces: Vec<(u64, u64)>,
}

impl Tally {
    /// Counts a packet.
    #[inline]
    pub fn add(&mut self, interface: usize, ts_ns: u64, bytes: usize, lost: u32) {
        if self.packets == 0 {
            (self.first_ns, self.last_ns) = (ts_ns, ts_ns);
        }
        self.packets += 1;
        self.bytes += bytes as u64;
        self.first_ns = self.first_ns.min(ts_ns);
        self.last_ns = self.last_ns.max(ts_ns);
        if self.interfaces.len() <= interface {
            self.interfaces.resize(interface + 1, (0, 0));
        }
        let (packets, dropped) = &mut self.interfaces[interface];
        *packets += 1;
        *dropped += u64::from(lost);
    }

    /// Packets that were lost in the ring before them.
    pub fn lost(&self) -> u64 {
        self.interfaces.iter().map(|(_, lost)| lost).sum()
    }

    /// Counts what another has counted.
    pub fn merge(&mut self, other: &Self) {
        if other.packets == 0 {
            return;
        }
        if self.packets == 0 {
            (self.first_ns, self.last_ns) = (other.first_ns, other.last_ns);
        }
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.first_ns = self.first_ns.min(other.first_ns);
        self.last_ns = self.last_ns.max(other.last_ns);
        let count = self.interfaces.len().max(other.interfaces.len());
        self.interfaces.resize(count, (0, 0));
        for (mine, theirs) in self.interfaces.iter_mut().zip(&other.interfaces) {
            mine.0 += theirs.0;
            mine.1 += theirs.1;
        }
    }
}
