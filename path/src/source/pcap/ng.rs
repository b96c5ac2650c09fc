//! A pcapng file: its sections, its interfaces, its packets.
//!
//! Section headers, interfaces and the three kinds of packet are read; other blocks are skipped,
//! but their two lengths must agree. Limits: [`MAX_BLOCK`] bytes for a block that is read,
//! [`MAX_INTERFACES`] per section.

use vnplug_frame::capfile::ng::{Block, DIRECTION, EPB_FLAGS, INTERFACE, OUTBOUND, Opt, SECTION};
use vnplug_frame::capfile::{Bad, Clock, Order};

use super::link;
use super::reader::{Packet, Step, check_length};

/// The section being read.
#[derive(Debug, Default)]
pub(super) struct Ng {
    order: Order,
    interfaces: Vec<Interface>,
    /// Simple packets have no time of their own and get the previous packet's.
    last_ts_ns: u64,
}

#[derive(Debug, Clone, Copy)]
struct Interface {
    snaplen: u32,
    clock: Clock,
    fcs_bytes: u8,
}

impl Ng {
    /// The block at the beginning of `input`.
    pub(super) fn step(&mut self, input: &[u8]) -> Result<Step, Bad> {
        if input.len() < 12 {
            return Ok(Step::Need(12));
        }
        let block = Block::begin(input, self.order)?;
        if block.is_needed() && block.len > MAX_BLOCK {
            let what = format!("block length {}, the limit is {MAX_BLOCK}", block.len);
            return Err(Bad::new(4, what));
        }
        let bytes = block.len as usize;
        if input.len() < bytes {
            let skip = !block.is_needed() && block.len > MAX_BLOCK / 64;
            return Ok(match skip {
                true => Step::Jump(block),
                false => Step::Need(bytes),
            });
        }
        let body = block.body(&input[..bytes])?;
        match block.kind {
            SECTION => {
                block.section(body)?;
                self.order = block.order;
                self.interfaces.clear();
            }
            INTERFACE => self.interface(&block, body)?,
            _ if block.is_packet() => {
                return Ok(Step::Packet(bytes, self.packet(&block, body)?));
            }
            _ => {}
        }
        Ok(Step::Skip(bytes))
    }

    fn interface(&mut self, block: &Block, body: &[u8]) -> Result<(), Bad> {
        if self.interfaces.len() >= MAX_INTERFACES {
            let what = format!("more than {MAX_INTERFACES} interfaces in a section");
            return Err(Bad::new(0, what));
        }
        let described = block.interface(body)?;
        link::ethernet(described.link_type, 8)?;
        self.interfaces.push(Interface {
            snaplen: described.snaplen,
            clock: described.clock,
            fcs_bytes: described.fcs_bytes,
        });
        Ok(())
    }

    fn packet(&mut self, block: &Block, body: &[u8]) -> Result<Packet, Bad> {
        let (number, known) = (block.interface_of(body), self.interfaces.len());
        let Some(interface) = self.interfaces.get(number) else {
            let what = format!("packet of interface {number}, {known} are described before it");
            return Err(Bad::new(8, what));
        };
        let fields = block.packet(body, interface.snaplen)?;
        check_length(fields.cap_len, fields.len_at())?;
        if let Some(units) = fields.units {
            self.last_ts_ns = interface.clock.ns(units);
        }
        let mut packet = Packet::new(
            fields.at,
            fields.cap_len,
            fields.wire_len,
            self.last_ts_ns,
            interface.fcs_bytes,
        );
        if fields.units.is_none() {
            return Ok(packet);
        }
        // Damaged options after a whole packet do not spoil the packet (libpcap ignores them).
        for option in block.options(body, fields.options_at()) {
            let Ok(Opt { code, value, .. }) = option else {
                break;
            };
            if code == EPB_FLAGS && value.len() == 4 {
                packet.outbound = block.order.u32(value, 0) & DIRECTION == OUTBOUND;
            }
        }
        Ok(packet)
    }
}

/// The longest block that is read, in bytes.
const MAX_BLOCK: u32 = 8 << 20;
const MAX_INTERFACES: usize = 65_536;
