//! The classic pcap file: a header of 24 bytes, then packets.
//!
//! Both byte orders; microseconds, nanoseconds, and Kuznetzov's modified format with its longer
//! packet header. Versions 2.0 to 2.4 and AIX's 543.0, whose lengths are swapped.

use super::{Bad, Order, Record};

/// How to read a file's packets.
#[derive(Debug, Clone, Copy)]
pub struct Classic {
    order: Order,
    /// Nanoseconds in a unit of the fraction.
    unit_ns: u64,
    /// Bytes of a packet's header.
    pub record_bytes: usize,
    first: First,
    /// Most bytes kept of a packet.
    pub snaplen: u32,
    /// LINKTYPE_… in the low bits; the upper ones are libpcap's `LT_FCS_LENGTH`.
    pub link: u32,
}

/// Which of a packet's two lengths comes first.
#[derive(Debug, Clone, Copy)]
enum First {
    /// Captured, on the wire: since version 2.4.
    Captured,
    /// Version 2.3 had both orders; the captured one is not the longer.
    Shorter,
    /// Up to version 2.2, and in AIX's 543.0.
    Wire,
}

impl Classic {
    /// Whether `head`, at least four bytes, begins as a pcap file does.
    pub fn is_magic(head: &[u8]) -> bool {
        let known = |order: Order| is_known(order.u32(head, 0));
        known(Order::Big) || known(Order::Little)
    }

    /// Reads a file's header, [`HEADER_BYTES`] long; `None` if the magic is of no pcap file.
    ///
    /// # Errors
    /// [`Bad`] if its version is unknown.
    pub fn parse(head: &[u8]) -> Result<Option<Self>, Bad> {
        let order = match is_known(Order::Big.u32(head, 0)) {
            true => Order::Big,
            false => Order::Little,
        };
        let (unit_ns, record_bytes) = match order.u32(head, 0) {
            MAGIC_US => (1000, 16),
            MAGIC_NS => (1, 16),
            // Alexey Kuznetsov's format: eight more bytes in each packet's header.
            MAGIC_MODIFIED => (1000, 24),
            _ => return Ok(None),
        };
        let first = match (order.u16(head, 4), order.u16(head, 6)) {
            (2, 4) => First::Captured,
            (2, 3) => First::Shorter,
            (2, 0..=2) | (543, 0) => First::Wire,
            (major, minor) => {
                let what = format!("pcap version {major}.{minor}, only 2.0 to 2.4 are known");
                return Err(Bad::new(4, what));
            }
        };
        Ok(Some(Self {
            order,
            unit_ns,
            record_bytes,
            first,
            snaplen: order.u32(head, 16),
            link: order.u32(head, 20),
        }))
    }

    /// A packet's header, `record_bytes` long.
    #[inline]
    pub fn record(&self, head: &[u8]) -> Record {
        let word = |at| self.order.u32(head, at);
        let (first, second) = (word(8), word(12));
        let (cap_len, wire_len) = match self.first {
            First::Wire => (second, first),
            First::Shorter if first > second => (second, first),
            _ => (first, second),
        };
        Record {
            cap_len,
            wire_len,
            ts_ns: u64::from(word(0)) * super::NS + u64::from(word(4)) * self.unit_ns,
        }
    }
}

fn is_known(magic: u32) -> bool {
    matches!(magic, MAGIC_US | MAGIC_NS | MAGIC_MODIFIED)
}

/// Bytes of a file's header.
pub const HEADER_BYTES: usize = 24;
const MAGIC_US: u32 = 0xa1b2_c3d4;
pub(super) const MAGIC_NS: u32 = 0xa1b2_3c4d;
const MAGIC_MODIFIED: u32 = 0xa1b2_cd34;
