//! The vnet header before each frame (struct virtio_net_hdr, virtio 1.2 section 5.1.6).
//!
//! It says what was left to the sender's NIC: a super-frame to be cut (`--segments merged`), or a
//! transport checksum to be filled in. Readers of the TAP then see the same mark as on the interface
//! itself (packet(7), `TP_STATUS_CSUMNOTREADY`), and do not take such packets for damaged ones.

use vnplug::{Packet, flags};
use vnplug_frame::headers::{self, Link};

/// Bytes of the header; the TUN driver's default (TUNSETVNETHDRSZ).
pub const SIZE: usize = 10;

/// The header for this packet.
#[inline]
pub fn of(packet: &Packet<'_>) -> [u8; SIZE] {
    if packet.meta.flags & flags::OFFLOAD != 0 {
        return packet.meta.offload.to_native_header(packet.bytes);
    }
    let mut header = [0; SIZE];
    if packet.meta.flags & flags::CSUM_NOT_READY != 0
        && let Some((start, offset)) = checksum(packet.bytes)
    {
        header[0] = NEEDS_CSUM;
        // NB: legacy headers are in the machine's own byte order.
        header[6..8].copy_from_slice(&start.to_ne_bytes());
        header[8..10].copy_from_slice(&offset.to_ne_bytes());
    }
    header
}

/// Where the transport header starts in the frame, and where in it the checksum is; `None` if the
/// captured bytes do not reach so far, or there is no such header.
fn checksum(frame: &[u8]) -> Option<(u16, u16)> {
    let link = Link::of(frame, 12);
    let carried = headers::ip(link.ethertype?, link.network(frame))?;
    let start = link.at + 2 + carried.at;
    let offset = match carried.protocol {
        TCP if !carried.later => 16,
        UDP if !carried.later => 6,
        _ => return None,
    };
    word(frame, start + offset)?;
    Some((u16::try_from(start).ok()?, offset as u16))
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let word = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([word[0], word[1]]))
}

/// Of a super-frame of UDP: bytes of each of its datagrams, but for the last; else 0.
pub fn datagram_size(header: &[u8]) -> usize {
    match *header {
        [_, kind, _, _, low, high, ..] if kind & !ECN == UDP_DATAGRAMS => {
            // NB: as above.
            u16::from_ne_bytes([low, high]).into()
        }
        _ => 0,
    }
}

const NEEDS_CSUM: u8 = 1;
/// VIRTIO_NET_HDR_GSO_UDP_L4, and the bit that may stand beside a kind.
const UDP_DATAGRAMS: u8 = 5;
const ECN: u8 = 0x80;
const TCP: u8 = 6;
const UDP: u8 = 17;

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_frame::headers::{IPV4, IPV6};

    const VLAN: u16 = 0x8100;
    const SERVICE_VLAN: u16 = 0x88a8;

    fn frame(kinds: &[u16], ip: &[u8], transport: usize) -> Vec<u8> {
        let mut frame = vec![0; 12];
        for (index, kind) in kinds.iter().enumerate() {
            frame.extend(if index == 0 { vec![] } else { vec![0, 7] });
            frame.extend(kind.to_be_bytes());
        }
        frame.extend(ip);
        frame.resize(frame.len() + transport, 0);
        frame
    }

    fn ipv4(words: u8, protocol: u8, fragment: u16) -> Vec<u8> {
        let mut ip = vec![0; usize::from(words) * 4];
        (ip[0], ip[9]) = (0x40 | words, protocol);
        ip[6..8].copy_from_slice(&fragment.to_be_bytes());
        ip
    }

    #[test]
    fn the_checksum_is_found_behind_tags_and_options() {
        let mut ipv6 = vec![0; 40];
        ipv6[6] = TCP;
        let mut behind_a_header = vec![0; 48];
        behind_a_header[40] = TCP; // in a hop-by-hop header, which is protocol 0
        for (frame, place) in [
            (frame(&[IPV4], &ipv4(5, UDP, 0), 8), Some((34, 6))),
            (frame(&[IPV4], &ipv4(7, TCP, 0x4000), 20), Some((42, 16))),
            (frame(&[VLAN, IPV4], &ipv4(5, TCP, 0), 20), Some((38, 16))),
            (
                frame(&[SERVICE_VLAN, VLAN, IPV6], &ipv6, 20),
                Some((62, 16)),
            ),
            (frame(&[IPV6], &behind_a_header, 20), Some((62, 16))),
            (frame(&[IPV4], &ipv4(5, UDP, 100), 8), None),
            (frame(&[IPV4], &ipv4(5, 1, 0), 8), None),
            (frame(&[IPV4], &ipv4(5, TCP, 0), 17), None),
            (frame(&[0x0806], &[0; 28], 0), None),
        ] {
            assert_eq!(checksum(&frame), place, "{frame:02x?}");
        }
    }

    #[test]
    fn any_cut_of_a_frame_is_looked_at_safely() {
        let whole = frame(&[VLAN, IPV4], &ipv4(15, TCP, 0), 20);
        for len in 0..whole.len() {
            checksum(&whole[..len]);
        }
        assert_eq!(checksum(&[0xff; 64]), None);
    }

    #[test]
    fn only_frames_without_their_checksum_are_marked() {
        let bytes = frame(&[IPV4], &ipv4(5, UDP, 0), 8);
        let mut packet = Packet {
            meta: vnplug::Meta::default(),
            bytes: &bytes,
        };
        assert_eq!(of(&packet), [0; SIZE]);
        packet.meta.flags = flags::CSUM_NOT_READY;
        assert_eq!(of(&packet)[0], NEEDS_CSUM);
        packet.meta.flags |= flags::OFFLOAD;
        (packet.meta.offload.gso_type, packet.meta.offload.gso_size) = (5, 700);
        let [_, kind, _, _, low, high, ..] = of(&packet);
        assert_eq!((kind, u16::from_ne_bytes([low, high])), (5, 700));
    }
}
