//! A packet's header, and what is said about devices and bursts.

use std::ffi::{c_char, c_int};

use libc::{time_t, timeval};

/// `ip_addr`: IPv6 as on the wire, or IPv4 in the host's byte order in the first four bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct IpAddr {
    words: [u32; 4],
}

impl IpAddr {
    pub(crate) fn v4(address: u32) -> Self {
        Self {
            words: [address, 0, 0, 0],
        }
    }

    pub(crate) fn v6(bytes: [u8; 16]) -> Self {
        let mut words = [0; 4];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_ne_bytes(*chunk);
        }
        Self { words }
    }

    pub(crate) fn as_v4(self) -> u32 {
        self.words[0]
    }

    /// Whether it uses no more than an IPv4 address does.
    pub(crate) fn is_v4(self) -> bool {
        self.words[1..] == [0; 3]
    }

    pub(crate) fn as_v6(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (chunk, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(self.words) {
            *chunk = word.to_ne_bytes();
        }
        bytes
    }
}

/// `struct pkt_offset`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C, packed)]
pub(crate) struct Offsets {
    pub(crate) eth: i16,
    pub(crate) vlan: i16,
    pub(crate) l3: i16,
    pub(crate) l4: i16,
    pub(crate) payload: i16,
}

/// `tunnel_info`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C, packed)]
pub(crate) struct Tunnel {
    pub(crate) id: u32,
    pub(crate) dmac: [u8; 6],
    pub(crate) smac: [u8; 6],
    pub(crate) eth_type: u16,
    pub(crate) ip_version: u8,
    pub(crate) proto: u8,
    pub(crate) ip_src: IpAddr,
    pub(crate) ip_dst: IpAddr,
    pub(crate) l4_src_port: u16,
    pub(crate) l4_dst_port: u16,
}

/// The anonymous `tcp` of `struct pkt_parsing_info`, which is not packed inside.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Tcp {
    pub(crate) flags: u8,
    pub(crate) seq_num: u32,
    pub(crate) ack_num: u32,
}

/// `struct pkt_parsing_info`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C, packed)]
pub(crate) struct Parsed {
    pub(crate) dmac: [u8; 6],
    pub(crate) smac: [u8; 6],
    pub(crate) eth_type: u16,
    pub(crate) vlan_id: u16,
    pub(crate) qinq_vlan_id: u16,
    pub(crate) ip_version: u8,
    pub(crate) l3_proto: u8,
    pub(crate) ip_tos: u8,
    pub(crate) ip_src: IpAddr,
    pub(crate) ip_dst: IpAddr,
    pub(crate) l4_src_port: u16,
    pub(crate) l4_dst_port: u16,
    pub(crate) icmp_type: u8,
    pub(crate) icmp_code: u8,
    pub(crate) tcp: Tcp,
    pub(crate) tunnel: Tunnel,
    pub(crate) last_matched_rule_id: i32,
    pub(crate) offset: Offsets,
}

/// The anonymous `tx` of `struct pfring_extended_pkthdr`, which is not packed inside.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Transmit {
    pub(crate) bounce_interface: i32,
    pub(crate) reserved: *mut u8,
}

/// `struct pfring_extended_pkthdr`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub(crate) struct Extended {
    pub(crate) timestamp_ns: u64,
    pub(crate) flags: u32,
    pub(crate) rx_direction: u8,
    pub(crate) port_id: u8,
    pub(crate) device_id: u16,
    pub(crate) if_index: i32,
    pub(crate) pkt_hash: u32,
    pub(crate) tx: Transmit,
    pub(crate) pid: u32,
    pub(crate) parsed: Parsed,
}

/// `struct pfring_pkthdr`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub(crate) struct PacketHeader {
    pub(crate) ts: timeval,
    pub(crate) caplen: u32,
    pub(crate) len: u32,
    pub(crate) extended: Extended,
}

/// `pfring_packet_info`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct PacketInfo {
    pub(crate) data: *mut u8,
    pub(crate) ts: timeval,
    pub(crate) caplen: u16,
    pub(crate) len: u16,
    pub(crate) flags: u32,
    pub(crate) hash: u32,
}

/// `pfring_stat`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Stat {
    pub(crate) recv: u64,
    pub(crate) drop: u64,
    pub(crate) shunt: u64,
}

/// `pfring_card_settings`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct CardSettings {
    pub(crate) max_packet_size: u32,
    pub(crate) rx_ring_slots: u32,
    pub(crate) tx_ring_slots: u32,
}

/// `pfring_if_t`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Interface {
    pub(crate) name: *mut c_char,
    pub(crate) system_name: *mut c_char,
    pub(crate) module: *mut c_char,
    pub(crate) module_version: *mut c_char,
    pub(crate) sn: *mut c_char,
    pub(crate) mac: [u8; 6],
    pub(crate) bus_id: [c_int; 4],
    pub(crate) status: c_int,
    pub(crate) license: c_int,
    pub(crate) license_expiration: time_t,
    pub(crate) next: *mut Interface,
}

/// `NO_TUNNEL_ID`.
pub(crate) const NO_TUNNEL_ID: u32 = u32::MAX;
/// `UNKNOWN_INTERFACE`.
pub(crate) const UNKNOWN_INTERFACE: i32 = -1;
/// `PKT_FLAGS_CHECKSUM_OFFLOAD`.
pub(crate) const CHECKSUM_OFFLOAD: u32 = 1;
/// `PKT_FLAGS_IP_MORE_FRAG`.
pub(crate) const IP_MORE_FRAG: u32 = 1 << 2;
/// `PKT_FLAGS_IP_FRAG_OFFSET`.
pub(crate) const IP_FRAG_OFFSET: u32 = 1 << 3;
/// Bytes of a header without its long part, which begins with `tx`.
pub(crate) const SHORT_HEADER: usize =
    std::mem::offset_of!(PacketHeader, extended) + std::mem::offset_of!(Extended, tx);

// As the C compiler has it on 64-bit Linux.
const _: () = {
    assert!(size_of::<IpAddr>() == 16 && size_of::<Offsets>() == 10);
    assert!(size_of::<Tcp>() == 12 && size_of::<Transmit>() == 16);
    assert!(SHORT_HEADER == 48);
};
