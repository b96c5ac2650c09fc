//! The limit of a lookup: reading one address of each frame and looking once into a plain table of as
//! many entries, and, where rings are filled, copying the frame to the end of the ring found there.

use std::time::Duration;

use super::hosts::{HOSTS, NOT_EACH, RING, per_packet};

/// A table from hosts to ports, without anything that makes it a filter.
pub(super) struct Bare {
    /// Of each host the port that wants its packets, if any, and its address.
    table: Vec<(u32, u32)>,
    /// Bytes of all rings, one after the other, and the end of each.
    rings: Vec<u8>,
    ends: Vec<usize>,
}

impl Bare {
    /// How many hosts have a port: the first ones.
    pub(super) fn new(ports: usize) -> Self {
        let entry = |host| {
            let port = if host < ports { host } else { NOBODY as usize };
            (port as u32, address(host))
        };
        Self {
            table: (0..HOSTS).map(entry).collect(),
            rings: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// The same with rings.
    pub(super) fn with_rings(ports: usize) -> Self {
        Self {
            rings: vec![1; ports * RING as usize],
            ends: vec![0; ports],
            ..Self::new(ports)
        }
    }

    /// Nanoseconds per packet of the look.
    pub(super) fn look(&self, packets: &[Vec<u8>], time: Duration) -> f64 {
        per_packet(time, || {
            for packet in packets {
                std::hint::black_box(self.port(packet));
            }
            packets.len()
        })
    }

    /// Nanoseconds per packet of the look, and of comparing the source with the host of every filter
    /// that says `not`.
    pub(super) fn look_and_compare(&self, packets: &[Vec<u8>], time: Duration) -> f64 {
        let hosts = self.table.iter().filter(|(port, _)| *port != NOBODY);
        let others: Vec<u32> = hosts
            .step_by(NOT_EACH)
            .map(|(_, address)| *address)
            .collect();
        per_packet(time, || {
            for packet in packets {
                let port = std::hint::black_box(self.port(packet));
                let source = port.map_or(0, address);
                std::hint::black_box(others.iter().filter(|&&host| host != source).count());
            }
            packets.len()
        })
    }

    /// Nanoseconds per packet of look and copy.
    pub(super) fn deliver(&mut self, packets: &[&[u8]], time: Duration) -> f64 {
        per_packet(time, || {
            for packet in packets {
                if let Some(port) = self.port(packet) {
                    // As our records: 32 bytes of header, and whole words.
                    let record = (packet.len() + 32).next_multiple_of(8);
                    let mut end = self.ends[port];
                    if end + record > RING as usize {
                        end = 0;
                    }
                    let at = port * RING as usize + end;
                    self.rings[at..at + packet.len()].copy_from_slice(packet);
                    self.ends[port] = end + record;
                }
            }
            std::hint::black_box(&self.rings);
            packets.len()
        })
    }

    #[inline]
    fn port(&self, packet: &[u8]) -> Option<usize> {
        let source = packet.get(SOURCE..SOURCE + 4)?;
        let source = u32::from_be_bytes(source.try_into().ok()?);
        let (port, address) = *self.table.get((source >> 8 & 0xffff) as usize)?;
        (address == source && port != NOBODY).then_some(port as usize)
    }
}

/// Of the nth host on the wire.
fn address(host: usize) -> u32 {
    10 << 24 | (host as u32) << 8 | 1
}

/// Where an IPv4 packet has its source.
const SOURCE: usize = 26;
const NOBODY: u32 = u32::MAX;
