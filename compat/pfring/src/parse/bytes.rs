//! Numbers at an offset of a packet; `None` after its end.

pub(super) fn array<const N: usize>(packet: &[u8], at: usize) -> Option<[u8; N]> {
    packet.get(at..)?.first_chunk().copied()
}

pub(super) fn u8_at(packet: &[u8], at: usize) -> Option<u8> {
    packet.get(at).copied()
}

pub(super) fn u16_at(packet: &[u8], at: usize) -> Option<u16> {
    array(packet, at).map(u16::from_be_bytes)
}

pub(super) fn u32_at(packet: &[u8], at: usize) -> Option<u32> {
    array(packet, at).map(u32::from_be_bytes)
}
