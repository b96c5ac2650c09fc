//! The card that a front-end is offered: what it says of itself, what it lacks, and how much memory it takes.

use super::memory::Allowance;
use super::spec::feature;
use crate::forward::Number;
use crate::settings::PortSettings;

/// What a device says of itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Card {
    pub(crate) mac: [u8; 6],
    /// Bytes of the longest frame, Ethernet header included, FCS excluded.
    pub(crate) longest: usize,
    /// Bits of [`feature`] that it does not have.
    pub(crate) lacks: u64,
    /// The memory that it takes.
    pub(crate) memory: Allowance,
}

impl Card {
    /// The largest MTU, without tags.
    pub(super) fn mtu(&self) -> usize {
        self.longest - 22
    }

    /// `struct virtio_net_config` (virtio 1.2, 5.1.4): MAC, status, pairs, MTU.
    pub(super) fn config(&self) -> [u8; 12] {
        let mut config = [0; 12];
        config[..6].copy_from_slice(&self.mac);
        // The link is up.
        config[6] = 1;
        // One pair for who leaves the control queue to us; others have their own configuration.
        config[8] = 1;
        config[10..].copy_from_slice(&(self.mtu().min(65_535) as u16).to_le_bytes());
        config
    }
}

/// The offloads that the card of a port with these settings lacks.
pub(super) fn lacking(settings: &PortSettings) -> u64 {
    match settings {
        PortSettings { sums: true, .. } => feature::CSUM | feature::HOST_TSO,
        PortSettings { cuts: true, .. } => feature::HOST_TSO,
        _ => 0,
    }
}

/// How much memory a guest of this user's may have.
pub(super) fn allowance(uid: u32, is_trusted: bool) -> Allowance {
    match is_trusted {
        // As many pieces as QEMU's own library takes, for which front-ends are made.
        true => Allowance {
            pieces: 509,
            bytes: 1 << 46,
            stranger: None,
        },
        // This user may have 256 ports: mappings and addresses are the whole daemon's.
        false => Allowance {
            pieces: 64,
            bytes: 1 << 38,
            stranger: Some(uid),
        },
    }
}

/// The address of a guest's card at this port, if the guest asks for one: the same each time.
pub(super) fn mac(switch: &str, port: Number) -> [u8; 6] {
    // FNV-1a: it is only to differ.
    let hash = switch.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    let ([a, b, c, _], [d, e]) = (hash.to_be_bytes(), port.to_be_bytes());
    // Of those that everybody may give (IEEE 802-2014, 8.4).
    [0x02, a, b, c, d, e]
}
