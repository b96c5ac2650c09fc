//! Filtering rules.

use std::ffi::{c_char, c_ulong};

use super::packet::IpAddr;

/// `filtering_rule_core_fields`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, packed)]
pub(crate) struct Core {
    pub(crate) if_index: i32,
    pub(crate) smac: [u8; 6],
    pub(crate) dmac: [u8; 6],
    pub(crate) vlan_id: u16,
    pub(crate) eth_type: u16,
    pub(crate) proto: u8,
    pub(crate) shost: IpAddr,
    pub(crate) dhost: IpAddr,
    pub(crate) shost_mask: IpAddr,
    pub(crate) dhost_mask: IpAddr,
    pub(crate) sport_low: u16,
    pub(crate) sport_high: u16,
    pub(crate) dport_low: u16,
    pub(crate) dport_high: u16,
    pub(crate) tcp_flags: u8,
}

/// The anonymous `tunnel` of `filtering_rule_extended_fields`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct TunnelFields {
    pub(crate) tunnel_id: u32,
    pub(crate) shost: IpAddr,
    pub(crate) dhost: IpAddr,
    pub(crate) shost_mask: IpAddr,
    pub(crate) dhost_mask: IpAddr,
}

/// `filtering_rule_extended_fields`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, packed)]
pub(crate) struct ExtendedFields {
    pub(crate) optional_fields: u16,
    pub(crate) tunnel: TunnelFields,
    pub(crate) payload_pattern: [c_char; 32],
}

/// `filtering_internals`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, packed)]
pub(crate) struct Internals {
    pub(crate) jiffies_last_match: c_ulong,
    pub(crate) reflector_dev: usize,
}

/// `filtering_rule`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, packed)]
pub(crate) struct FilteringRule {
    pub(crate) rule_id: u16,
    pub(crate) rule_action: u32,
    pub(crate) balance_id: u8,
    pub(crate) balance_pool: u8,
    pub(crate) locked: u8,
    pub(crate) bidirectional: u8,
    pub(crate) core: Core,
    pub(crate) extended: ExtendedFields,
    pub(crate) reflector_device_name: [c_char; 8],
    pub(crate) internals: Internals,
}

/// `hash_filtering_rule`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, packed)]
pub(crate) struct HashRule {
    pub(crate) rule_id: u16,
    pub(crate) vlan_id: u16,
    pub(crate) ip_version: u8,
    pub(crate) proto: u8,
    pub(crate) host_peer_a: IpAddr,
    pub(crate) host_peer_b: IpAddr,
    pub(crate) port_peer_a: u16,
    pub(crate) port_peer_b: u16,
    pub(crate) rule_action: u32,
    pub(crate) reflector_device_name: [c_char; 8],
    pub(crate) internals: Internals,
}

/// `hash_filtering_rule_stats`.
#[derive(Debug, Clone, Copy)]
#[repr(C, packed)]
pub(crate) struct Stats {
    pub(crate) matched: u64,
    pub(crate) filtered: u64,
    pub(crate) match_forward: u64,
    pub(crate) inactivity: u32,
}

/// `FILTERING_RULE_AUTO_RULE_ID`.
pub(crate) const AUTO_RULE_ID: u16 = 0xffff;
/// `FILTER_TUNNEL_ID_FLAG`.
pub(crate) const TUNNEL_ID_FLAG: u16 = 1;
