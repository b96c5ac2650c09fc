//! The first page of a VM's memory pool: how a guest agent recognises the device as ours.
//!
//! One VM has one pool (R6). The daemon allocates rings in it, from [`FIRST_RING`] on; the control
//! channel tells the agent where. The page is written once by the host; the host never reads it
//! again while the VM runs.
//!
//! ```text
//! 0x00 u64  magic "VNPLPOOL"
//! 0x08 u32  version (1)
//! 0x10 u64  bytes of the pool
//! 0x18 u64  random number of the pool (the same as in the Welcome on its control channel)
//! 0x20      name of the VM, at most 63 bytes, zero-terminated
//! ```

use std::sync::atomic::Ordering;

use crate::region::Region;

/// First eight bytes of a pool: `VNPLPOOL` in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"VNPLPOOL");
/// Version of this page.
pub const VERSION: u32 = 1;
/// Rings lie at or after this offset.
pub const FIRST_RING: u64 = 4096;
/// Longest name of a VM in bytes.
pub const MAX_NAME: usize = 63;

/// What the first page of a pool says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolHeader {
    /// Bytes of the pool.
    pub len: u64,
    /// Random number of this pool.
    pub id: u64,
    /// The operator's name for the VM.
    pub name: String,
}

impl PoolHeader {
    /// Writes the page; the host does this before the VM sees the memory.
    ///
    /// # Panics
    /// If the name is longer than [`MAX_NAME`] or the region smaller than a page.
    pub fn write(&self, region: &Region) {
        assert!(
            self.name.len() <= MAX_NAME,
            "names are checked when a VM is made"
        );
        region.clear(0, FIRST_RING);
        region.store_u32(0x08, VERSION, Ordering::Relaxed);
        region.store_u64(0x10, self.len, Ordering::Relaxed);
        region.store_u64(0x18, self.id, Ordering::Relaxed);
        region.write(0x20, self.name.as_bytes());
        region.store_u64(0, MAGIC, Ordering::Release);
    }

    /// Reads the page; `None` if this is not a pool of this version.
    pub fn read(region: &Region) -> Option<Self> {
        if region.len() < FIRST_RING || region.load_u64(0, Ordering::Acquire) != MAGIC {
            return None;
        }
        if region.load_u32(0x08, Ordering::Relaxed) != VERSION {
            return None;
        }
        let mut name = [0; MAX_NAME + 1];
        region.read(0x20, &mut name);
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(MAX_NAME);
        Some(Self {
            len: region.load_u64(0x10, Ordering::Relaxed),
            id: region.load_u64(0x18, Ordering::Relaxed),
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_page_reads_back_and_other_memory_does_not() {
        let region = Region::heap(FIRST_RING);
        assert_eq!(PoolHeader::read(&region), None);
        let header = PoolHeader {
            len: 1 << 26,
            id: 42,
            name: "probe".into(),
        };
        header.write(&region);
        assert_eq!(PoolHeader::read(&region), Some(header));
    }
}
