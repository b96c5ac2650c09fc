//! What stands before a packet's bytes.

use crate::layout::{Meta, RECORD_HEADER, flags};
use crate::offload::{HEADER, Offload, PREFIX, SHORT_HEADER};
use crate::region::Region;

#[derive(Debug, Clone, Copy)]
pub(super) struct Taken {
    pub(super) at: u64,
    pub(super) cap_len: u32,
}

#[inline]
pub(crate) fn read_meta(region: &Region, at: u64) -> (u32, Meta) {
    let [lens, ts_ns, hash_lost, tail] = region.read_words(at);
    let meta = Meta {
        ts_ns,
        wire_len: (lens >> 32) as u32,
        flow_hash: hash_lost as u32,
        lost: (hash_lost >> 32) as u32,
        flags: tail as u16,
        vlan_tci: (tail >> 16) as u16,
        source: (tail >> 32) as u16,
        queue: (tail >> 48) as u16,
        offload: Offload::default(),
    };
    (lens as u32, meta)
}

/// Reads what stands before a frame, if the record with these fields says that something does, and
/// returns its length.
#[inline(always)]
pub(crate) fn read_offload(region: &Region, at: u64, cap_len: u32, meta: &mut Meta) -> u64 {
    if meta.flags & flags::OFFLOAD == 0 {
        return 0;
    }
    read_prefix(region, at, cap_len, meta)
}

#[cold]
fn read_prefix(region: &Region, at: u64, cap_len: u32, meta: &mut Meta) -> u64 {
    // A reader that cuts records to its own snaplen may have less of it.
    if (cap_len as usize) < PREFIX {
        meta.flags &= !flags::OFFLOAD;
        return u64::from(cap_len);
    }
    let mut header = [0; SHORT_HEADER];
    region.read(at + RECORD_HEADER + (PREFIX - HEADER) as u64, &mut header);
    meta.offload = Offload::from_header(&header);
    PREFIX as u64
}
