//! pcapng (draft-ietf-opsawg-pcapng): sections of blocks, each section in its own byte order.
//!
//! Section headers, interfaces and the three kinds of packet are read; other blocks are skipped,
//! but their two lengths must agree. Limits: [`MAX_BLOCK`] bytes for a block that is read,
//! [`MAX_INTERFACES`] per section.

use super::link;
use super::reader::{Bad, MAX_PACKET, Packet, Step, u16_at, u32_at, u64_at};

/// The section being read.
#[derive(Debug, Default)]
pub(super) struct Ng {
    big_endian: bool,
    interfaces: Vec<Interface>,
    /// Simple packets have no time of their own and get the previous packet's.
    last_ts_ns: u64,
}

#[derive(Debug, Clone, Copy)]
struct Interface {
    snaplen: u32,
    unit: Unit,
    offset_s: i64,
    fcs_bytes: u8,
}

/// The unit of timestamps.
#[derive(Debug, Clone, Copy)]
enum Unit {
    /// 10^-n seconds.
    Decimal(u8),
    /// 2^-n seconds.
    Binary(u8),
}

impl Ng {
    /// The block at the beginning of `input`.
    pub(super) fn step(&mut self, input: &[u8]) -> Result<Step, Bad> {
        if input.len() < 12 {
            return Ok(Step::Need(12));
        }
        // A section header's type reads the same in both orders.
        let is_section = u32_at(input, 0, false) == SECTION;
        let big_endian = if is_section {
            byte_order(input)?
        } else {
            self.big_endian
        };
        let kind = u32_at(input, 0, big_endian);
        let len = u32_at(input, 4, big_endian);
        let least = match kind {
            SECTION => 28,
            INTERFACE => 20,
            ENHANCED | OLD_PACKET => 32,
            SIMPLE => 16,
            _ => 12,
        };
        if !len.is_multiple_of(4) || len < least {
            let what = format!("block length {len}, must be a multiple of 4 and at least {least}");
            return Err(Bad { at: 4, what });
        }
        let read = matches!(kind, SECTION | INTERFACE | ENHANCED | OLD_PACKET | SIMPLE);
        if read && len > MAX_BLOCK {
            return Err(Bad {
                at: 4,
                what: format!("block length {len}, the limit is {MAX_BLOCK}"),
            });
        }
        let bytes = len as usize;
        if input.len() < bytes {
            let skip = !read && len > MAX_BLOCK / 64;
            return Ok(if skip {
                Step::Jump { len, big_endian }
            } else {
                Step::Need(bytes)
            });
        }
        check_trailer(len, u32_at(input, bytes - 4, big_endian), bytes - 4)?;
        let block = &input[..bytes - 4];
        match kind {
            SECTION => self.section(block, big_endian)?,
            INTERFACE => self.interface(block)?,
            ENHANCED => return Ok(Step::Packet(bytes, self.enhanced(block)?)),
            OLD_PACKET => return Ok(Step::Packet(bytes, self.old_packet(block)?)),
            SIMPLE => return Ok(Step::Packet(bytes, self.simple(block)?)),
            _ => {}
        }
        Ok(Step::Skip(bytes))
    }

    fn section(&mut self, block: &[u8], big_endian: bool) -> Result<(), Bad> {
        let version = (u16_at(block, 12, big_endian), u16_at(block, 14, big_endian));
        let (1, 0 | 2) = version else {
            let what = format!(
                "pcapng version {}.{}, only 1.0 is known",
                version.0, version.1
            );
            return Err(Bad { at: 12, what });
        };
        self.big_endian = big_endian;
        self.interfaces.clear();
        Ok(())
    }

    fn interface(&mut self, block: &[u8]) -> Result<(), Bad> {
        if self.interfaces.len() >= MAX_INTERFACES {
            let what = format!("more than {MAX_INTERFACES} interfaces in a section");
            return Err(Bad { at: 0, what });
        }
        link::ethernet(u32::from(u16_at(block, 8, self.big_endian)), 8)?;
        let mut interface = Interface {
            snaplen: u32_at(block, 12, self.big_endian),
            unit: Unit::Decimal(6),
            offset_s: 0,
            fcs_bytes: 0,
        };
        for option in options(block, 16, self.big_endian) {
            let Opt { code, at, value } = option?;
            match (code, value.len()) {
                (OPT_TSRESOL, 1) => interface.unit = Unit::parse(value[0], at)?,
                (OPT_TSOFFSET, 8) => {
                    interface.offset_s = u64_at(value, 0, self.big_endian) as i64;
                }
                (OPT_FCSLEN, 1) => interface.fcs_bytes = value[0],
                (OPT_TSRESOL | OPT_TSOFFSET | OPT_FCSLEN, len) => {
                    let what = format!("interface option {code} has {len} bytes");
                    return Err(Bad { at, what });
                }
                _ => {}
            }
        }
        self.interfaces.push(interface);
        Ok(())
    }

    fn enhanced(&mut self, block: &[u8]) -> Result<Packet, Bad> {
        let number = u32_at(block, 8, self.big_endian);
        self.packet(block, number as usize)
    }

    /// The obsolete packet block: as the enhanced one, but a narrower interface number.
    fn old_packet(&mut self, block: &[u8]) -> Result<Packet, Bad> {
        let number = u16_at(block, 8, self.big_endian);
        self.packet(block, number.into())
    }

    fn packet(&mut self, block: &[u8], number: usize) -> Result<Packet, Bad> {
        let word = |at| u32_at(block, at, self.big_endian);
        let interface = self.known(number)?;
        let cap_len = word(20);
        let data_end = 28 + cap_len as usize;
        if cap_len > MAX_PACKET || data_end > block.len() {
            let room = block.len() - 28;
            let what = format!(
                "captured length {cap_len}, the block has room for {room}, the limit is {MAX_PACKET}"
            );
            return Err(Bad { at: 20, what });
        }
        let ts_ns = interface.nanos(u64::from(word(12)) << 32 | u64::from(word(16)));
        let mut packet = Packet::new(28, cap_len, word(24), ts_ns, interface.fcs_bytes);
        // Damaged options after a whole packet do not spoil the packet (libpcap ignores them).
        for option in options(block, data_end.next_multiple_of(4), self.big_endian) {
            let Ok(Opt { code, value, .. }) = option else {
                break;
            };
            if code == OPT_FLAGS && value.len() == 4 {
                packet.outbound = u32_at(value, 0, self.big_endian) & 3 == 2;
            }
        }
        self.last_ts_ns = ts_ns;
        Ok(packet)
    }

    fn simple(&self, block: &[u8]) -> Result<Packet, Bad> {
        let interface = self.known(0)?;
        let wire_len = u32_at(block, 8, self.big_endian);
        let snaplen = if interface.snaplen == 0 {
            u32::MAX
        } else {
            interface.snaplen
        };
        let cap_len = wire_len.min(snaplen);
        if cap_len > MAX_PACKET || cap_len as usize > block.len() - 12 {
            let room = block.len() - 12;
            let what = format!(
                "packet length {cap_len}, the block has room for {room}, the limit is {MAX_PACKET}"
            );
            return Err(Bad { at: 8, what });
        }
        Ok(Packet::new(
            12,
            cap_len,
            wire_len,
            self.last_ts_ns,
            interface.fcs_bytes,
        ))
    }

    fn known(&self, number: usize) -> Result<Interface, Bad> {
        let known = self.interfaces.len();
        self.interfaces.get(number).copied().ok_or_else(|| {
            let what = format!("packet of interface {number}, {known} are described before it");
            Bad { at: 8, what }
        })
    }
}

impl Interface {
    /// Nanoseconds since 1970, clamped to what 64 bits hold.
    fn nanos(self, units: u64) -> u64 {
        let nanos = match self.unit {
            Unit::Decimal(n @ 0..=9) => u128::from(units) * 10u128.pow(9 - u32::from(n)),
            Unit::Decimal(n) => u128::from(units) / 10u128.pow(u32::from(n) - 9),
            Unit::Binary(n) => (u128::from(units) * 1_000_000_000) >> n,
        };
        // At most 2^64 s in nanoseconds: well inside an i128.
        let nanos = nanos as i128 + i128::from(self.offset_s) * 1_000_000_000;
        nanos.clamp(0, i128::from(u64::MAX)) as u64
    }
}

impl Unit {
    /// The limits are libpcap's: what a 64-bit count per second can express.
    fn parse(byte: u8, at: usize) -> Result<Self, Bad> {
        match byte {
            0..=19 => Ok(Self::Decimal(byte)),
            0x80..=0xbf => Ok(Self::Binary(byte & 0x7f)),
            _ => Err(Bad {
                at,
                what: format!("if_tsresol {byte:#x} is finer than 64 bits hold"),
            }),
        }
    }
}

/// Says whether a skipped or read block ends with its length again.
pub(super) fn check_trailer(len: u32, trailer: u32, at: usize) -> Result<(), Bad> {
    if len == trailer {
        return Ok(());
    }
    Err(Bad {
        at,
        what: format!("block length {len} at its beginning, {trailer} at its end"),
    })
}

fn byte_order(input: &[u8]) -> Result<bool, Bad> {
    match u32_at(input, 8, true) {
        BYTE_ORDER => Ok(true),
        word if word.swap_bytes() == BYTE_ORDER => Ok(false),
        word => Err(Bad {
            at: 8,
            what: format!("byte-order magic {word:#010x}"),
        }),
    }
}

struct Opt<'a> {
    code: u16,
    at: usize,
    value: &'a [u8],
}

/// The options from `at` to the end of the block or to `opt_endofopt`.
fn options(
    block: &[u8],
    mut at: usize,
    big_endian: bool,
) -> impl Iterator<Item = Result<Opt<'_>, Bad>> {
    std::iter::from_fn(move || {
        let header = block.get(at..at.checked_add(4)?)?;
        let (code, len) = (u16_at(header, 0, big_endian), u16_at(header, 2, big_endian));
        if code == 0 {
            return None;
        }
        let (start, end) = (at + 4, at + 4 + usize::from(len));
        let Some(value) = block.get(start..end) else {
            let what = format!("option {code} of {len} bytes reaches over its block's end");
            at = block.len();
            return Some(Err(Bad {
                at: start - 4,
                what,
            }));
        };
        at = end.next_multiple_of(4);
        Some(Ok(Opt {
            code,
            at: start,
            value,
        }))
    })
}

/// The type of a section header block.
pub(super) const SECTION: u32 = 0x0a0d_0d0a;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const INTERFACE: u32 = 1;
const OLD_PACKET: u32 = 2;
const SIMPLE: u32 = 3;
const ENHANCED: u32 = 6;
const OPT_TSRESOL: u16 = 9;
const OPT_FCSLEN: u16 = 13;
const OPT_TSOFFSET: u16 = 14;
/// Bits 0 and 1: direction, 2 is outbound.
const OPT_FLAGS: u16 = 2;
/// The longest block that is read, in bytes.
const MAX_BLOCK: u32 = 8 << 20;
const MAX_INTERFACES: usize = 65_536;
