//! What a frame is, to everything between wire and ring.
//!
//! - [`acks`]: one ACK for a super-frame made those of its segments.
//! - [`aggregate`]: TCP segments merged into super-frames; the inverse of `offload`.
//! - [`Frame`]: bytes borrowed from the queue that received them, and their metadata.
//! - [`capfile`]: capture files, read and written.
//! - [`flow`]: the hash that assigns flows to the members of a cluster.
//! - [`headers`]: where the headers of a frame lie; what is understood of VLAN tags and IP.
//! - [`lock`]: whose frames somebody may send.
//! - [`offload`]: super-frames cut and checksums filled, as a NIC would have done it.
//! - [`segment`]: where the headers of a TCP segment lie.
//! - [`tunnel`]: what a tunnel carries.
//! - [`witness`]: what generated frames carry, so that a receiver can prove loss, duplication,
//!   reordering and corruption.

pub mod acks;
pub mod aggregate;
pub mod capfile;
pub mod flow;
pub mod headers;
pub mod lock;
pub mod offload;
pub mod segment;
pub mod tunnel;
pub mod witness;

use vnplug_ring::layout::flags;
use vnplug_ring::offload::Offload;

/// One frame, borrowed from the queue that received it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Frame<'a> {
    /// The captured bytes, Ethernet header included, FCS excluded, VLAN tag in place.
    pub bytes: &'a [u8],
    /// Length on the wire in bytes, FCS excluded; at least `bytes.len()`.
    pub wire_len: u32,
    /// Nanoseconds since 1970-01-01 UTC.
    pub ts_ns: u64,
    /// `vnplug_ring::layout::flags`.
    pub flags: u16,
    /// Outermost VLAN TCI, valid with `flags::VLAN`.
    pub vlan_tci: u16,
    /// What its sender left to a NIC, valid with `flags::OFFLOAD`.
    pub offload: Offload,
    /// The ports of a switch that it is due to.
    pub due: &'a [u16],
    /// It is a frame that was there before, in another form (with another VLAN tag), for these ports. Nobody
    /// else has it, and it does not count as one more.
    pub is_form: bool,
    /// The port of a switch that sent it; 0 = none.
    pub from: u16,
}

/// The outermost VLAN tag in a frame's bytes: the flag that says so, and the TCI. As the kernel has it,
/// which knows 802.1Q and 802.1ad only.
#[inline]
pub fn vlan_of(bytes: &[u8]) -> (u16, u16) {
    // IEEE 802.1Q-2018, 9.4: TPID and TCI, big-endian, after the addresses.
    match bytes.get(12..16) {
        Some(&[0x81, 0x00, c0, c1] | &[0x88, 0xa8, c0, c1]) => {
            (flags::VLAN, u16::from_be_bytes([c0, c1]))
        }
        _ => (0, 0),
    }
}

/// The same empty vector for frames of another lifetime; keeps its memory, as the standard library
/// collects in place where both take equally many bytes.
pub fn recycle<T, U>(mut batch: Vec<T>) -> Vec<U> {
    batch.clear();
    batch
        .into_iter()
        .map(|_| unreachable!("the vector is empty"))
        .collect()
}

/// The most frames a batch has (R4: a fixed budget of work per turn).
pub const MAX_BATCH: usize = 256;
