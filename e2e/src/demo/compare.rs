//! Compares what a guest captured with what tcpdump saw on the host, packet for packet.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::path::Path;

use crate::error::{LabError, Result};

/// One packet of a capture file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    /// Nanoseconds since 1970.
    time_ns: u64,
    /// Length on the wire and captured bytes.
    content: (u32, Vec<u8>),
}

impl Packet {
    /// What was captured.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.content.1
    }
}

/// How two captures of the same wire relate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Comparison {
    /// In both, byte for byte and with the same wire length; each packet counts once.
    pub(super) identical: u64,
    /// Only in the host's.
    pub(super) missing: u64,
    /// Only in the guest's.
    pub(super) extra: u64,
    /// Of the identical ones: after a packet that the host saw later. Two listeners on a machine
    /// with several processors may see packets of opposite directions in a different order.
    pub(super) moved: u64,
    /// Of the identical ones: the largest difference of the two time stamps in nanoseconds.
    pub(super) apart_ns: u64,
}

impl Comparison {
    pub(super) fn of(host: &[Packet], guest: &[Packet]) -> Self {
        let mut places: HashMap<&(u32, Vec<u8>), VecDeque<usize>> = HashMap::new();
        for (at, packet) in host.iter().enumerate() {
            places.entry(&packet.content).or_default().push_back(at);
        }
        let mut result = Self::default();
        let mut furthest = 0;
        for packet in guest {
            let place = places.get_mut(&packet.content);
            let Some(at) = place.and_then(VecDeque::pop_front) else {
                result.extra += 1;
                continue;
            };
            result.identical += 1;
            result.moved += u64::from(at < furthest);
            furthest = furthest.max(at);
            let apart = host[at].time_ns.abs_diff(packet.time_ns);
            result.apart_ns = result.apart_ns.max(apart);
        }
        result.missing = host.len() as u64 - result.identical;
        result
    }

    pub(super) fn is_complete(&self) -> bool {
        self.identical > 0 && self.missing == 0 && self.extra == 0
    }
}

/// How many packets of the wire these are. A guest's NIC may hand over one where TCP segments were
/// merged (GRO); it counts as what it was merged of: the sender fills all segments but the last.
pub(super) fn on_the_wire(packets: &[Packet]) -> u64 {
    packets
        .iter()
        .map(|packet| segments(packet).unwrap_or(1))
        .sum()
}

/// Segments of a TCP packet over IPv4 (RFC 791, RFC 9293) that is longer than the MTU.
fn segments(Packet { content, .. }: &Packet) -> Option<u64> {
    let ip = content.1.get(14..)?;
    let (total, ip_header) = (word16(ip, 2)?, usize::from(ip.first()? & 15) * 4);
    if total <= MTU || content.1.get(12..14) != Some(&[8, 0]) || ip.get(9) != Some(&6) {
        return None;
    }
    let headers = ip_header + usize::from(ip.get(ip_header + 12)? >> 4) * 4;
    let room = MTU.checked_sub(headers).filter(|room| *room > 0)?;
    Some(total.saturating_sub(headers).div_ceil(room) as u64)
}

fn word16(bytes: &[u8], at: usize) -> Option<usize> {
    let pair = [*bytes.get(at)?, *bytes.get(at + 1)?];
    Some(usize::from(u16::from_be_bytes(pair)))
}

/// Reads a capture file.
///
/// # Errors
/// [`LabError::Protocol`] if it is no little-endian pcap file (of version 2.4), or ends in the
/// middle of a packet.
pub(super) fn read(path: &Path) -> Result<Vec<Packet>> {
    let bytes = fs::read(path).map_err(LabError::io(format!("read {}", path.display())))?;
    parse(&bytes).ok_or_else(|| {
        let text = format!("{}: no whole pcap file", path.display());
        LabError::Protocol(text)
    })
}

fn parse(bytes: &[u8]) -> Option<Vec<Packet>> {
    let (header, mut rest) = bytes.split_at_checked(24)?;
    let unit_ns = match u32::from_le_bytes([header[0], header[1], header[2], header[3]]) {
        NANOSECONDS => 1,
        MICROSECONDS => 1000,
        _ => return None,
    };
    let mut packets = Vec::new();
    while !rest.is_empty() {
        // Seconds, their fraction, captured length, length on the wire.
        let (head, after) = rest.split_first_chunk::<16>()?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (content, after) = after.split_at_checked(word(8) as usize)?;
        packets.push(Packet {
            time_ns: u64::from(word(0)) * 1_000_000_000 + u64::from(word(4)) * unit_ns,
            content: (word(12), content.to_vec()),
        });
        rest = after;
    }
    Some(packets)
}

const NANOSECONDS: u32 = 0xa1b2_3c4d;
const MICROSECONDS: u32 = 0xa1b2_c3d4;
/// Of the wire, in bytes without the Ethernet header.
const MTU: usize = 1500;

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(time_ns: u64, byte: u8) -> Packet {
        let content = (60, vec![byte; 4]);
        Packet { time_ns, content }
    }

    #[test]
    fn what_is_missing_extra_moved_and_apart_is_counted() {
        let host = [1, 2, 2, 3].map(|byte| packet(100, byte));
        let same = Comparison::of(&host, &host);
        assert!(same.is_complete() && same.moved == 0 && same.apart_ns == 0);
        let guest = [
            packet(100, 2),
            packet(90, 1),
            packet(100, 9),
            packet(100, 2),
        ];
        let result = Comparison::of(&host, &guest);
        let expected = Comparison {
            identical: 3,
            missing: 1,
            extra: 1,
            moved: 1,
            apart_ns: 10,
        };
        assert_eq!(result, expected);
        assert!(!result.is_complete());
        assert!(
            !Comparison::of(&[], &[]).is_complete(),
            "silence proves nothing"
        );
    }

    #[test]
    fn a_merged_packet_counts_as_its_segments() {
        let tcp = |payload: u16| {
            let mut bytes = vec![0; 14 + 20 + 32 + usize::from(payload)];
            bytes[12] = 8;
            bytes[14] = 0x45;
            bytes[16..18].copy_from_slice(&(52 + payload).to_be_bytes());
            bytes[23] = 6;
            bytes[46] = 8 << 4;
            let content = (bytes.len() as u32, bytes);
            Packet {
                time_ns: 0,
                content,
            }
        };
        for (payload, packets) in [(0, 1), (1448, 1), (1449, 2), (2896, 2), (2897, 3)] {
            assert_eq!(on_the_wire(&[tcp(payload)]), packets, "{payload}");
        }
        assert_eq!(on_the_wire(&[packet(0, 0), tcp(2896)]), 3);
    }

    #[test]
    fn a_capture_file_is_read_whole_or_not_at_all() {
        let mut file = NANOSECONDS.to_le_bytes().to_vec();
        file.resize(24, 0);
        for word in [7_u32, 5, 2, 60] {
            file.extend(word.to_le_bytes());
        }
        file.extend([8, 9]);
        let packets = parse(&file).unwrap();
        assert_eq!((packets.len(), packets[0].time_ns), (1, 7_000_000_005));
        assert_eq!(packets[0].content, (60, vec![8, 9]));
        assert_eq!(parse(&file[..41]), None);
        file[0] = 0;
        assert_eq!(parse(&file), None);
    }
}
