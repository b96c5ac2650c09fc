//! What the ring lost before a packet, and how a file tells it.

use vnplug_frame::capfile::write::pcapng;

use crate::name::Format;

use super::RING_FULL;

/// A loss in the ring before a packet.
#[derive(Debug)]
pub(super) struct RingLoss {
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
    pub(super) packets: u64,
    /// The file has it.
    pub(super) told: bool,
}

/// Writes a loss to where it happened, if the format has words for it: where that ends, or `None` if it
/// has no room.
#[cold]
pub(super) fn tell_loss(
    memory: &mut [u8],
    at: usize,
    interface: usize,
    loss: &RingLoss,
    format: Format,
) -> Option<usize> {
    if format == Format::Pcap {
        return Some(at);
    }
    let mut block = Vec::new();
    let comment = format!("{} {}: {RING_FULL}", loss.packets, pcapng::HERE);
    let statistics = pcapng::Statistics {
        interface: interface as u32,
        at_ns: loss.to_ns,
        range_ns: Some((loss.from_ns, loss.to_ns)),
        comment: &comment,
        ..Default::default()
    };
    pcapng::statistics(&mut block, &statistics);
    let end = at + block.len();
    memory.get_mut(at..end)?.copy_from_slice(&block);
    Some(end)
}
