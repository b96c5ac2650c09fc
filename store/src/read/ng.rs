//! A pcapng file: its sections, its interfaces, its packets and statistics.

use vnplug_frame::capfile::ng::{
    Block, ENHANCED_PACKET, EPB_DROPCOUNT, EPB_FLAGS, INTERFACE, ISB_ENDTIME, ISB_IFDROP,
    ISB_IFRECV, ISB_STARTTIME, OPT_COMMENT, Opt, SECTION, STATISTICS,
};
use vnplug_frame::capfile::{Bad, Order};

use super::input::Input;
use super::{End, Found, Interface, MAX_BLOCK_BYTES, Note, Problem, Step};

/// What the blocks of a section refer to.
#[derive(Debug, Default)]
pub(super) struct Section {
    order: Order,
    /// The first interface of the section among all.
    first: usize,
    /// Of the section.
    interfaces: usize,
    /// Simple packets have no time: that of the packet before.
    last_ns: u64,
    /// Where section headers and interface descriptions are.
    pub(super) definitions: Vec<u64>,
}

impl Section {
    /// Reads one block.
    pub(super) fn step(
        &mut self,
        input: &mut Input,
        interfaces: &mut Vec<Interface>,
        comment: &mut String,
        notes: Option<&mut Vec<Note>>,
    ) -> Result<Step, Problem> {
        let offset = input.offset();
        let Some(start) = input.peek(12)? else {
            let end = if input.buffered() == 0 {
                End::Clean
            } else {
                End::Torn(offset)
            };
            return Ok(Step::End(end));
        };
        if start[..8] == [0; 8] {
            return Ok(Step::End(End::Unwritten(offset)));
        }
        let head = Block::begin(start, self.order)?;
        if head.kind == SECTION {
            self.order = head.order;
        }
        let len = head.len as usize;
        let wanted = notes.filter(|notes| {
            head.kind == STATISTICS && head.len <= LONGEST_NOTE && notes.len() < MAX_NOTES
        });
        if let Some(notes) = wanted {
            let Some(block) = input.peek(len)? else {
                return Ok(Step::End(End::Torn(offset)));
            };
            notes.extend(self.note(&head, &block[..len - 4], interfaces));
            input.take(len);
            return Ok(Step::Other);
        }
        if !head.is_needed() {
            return Ok(match input.skip(u64::from(head.len))? {
                true => Step::Other,
                false => Step::End(End::Torn(offset)),
            });
        }
        if len > MAX_BLOCK_BYTES {
            return Err(Bad::new(4, "block of more than 16 MiB").into());
        }
        let Some(block) = input.peek(len)? else {
            return Ok(Step::End(End::Torn(offset)));
        };
        let body = head.body(block)?;
        let step = match head.kind {
            SECTION => self.section(&head, body, offset, interfaces.len())?,
            INTERFACE => {
                let known = self.definitions.last().is_some_and(|&last| last >= offset);
                let described = head.interface(body)?;
                if !known {
                    if interfaces.len() >= MAX_INTERFACES {
                        return Err(Bad::new(0, "more than 65536 interfaces").into());
                    }
                    interfaces.push(Interface::described(described));
                    self.interfaces += 1;
                    self.definitions.push(offset);
                }
                Step::Other
            }
            _ => Step::Packet(self.packet(&head, body, offset, interfaces, comment)?),
        };
        input.take(len);
        Ok(step)
    }

    fn section(
        &mut self,
        head: &Block,
        body: &[u8],
        offset: u64,
        interfaces: usize,
    ) -> Result<Step, Problem> {
        head.section(body)?;
        // Read once more after a seek, it changes nothing.
        if self.definitions.last().is_none_or(|&last| last < offset) {
            if self.definitions.len().saturating_sub(interfaces) >= MAX_SECTIONS {
                return Err(Bad::new(0, "more than 65536 sections").into());
            }
            self.definitions.push(offset);
            (self.first, self.interfaces) = (interfaces, 0);
        }
        Ok(Step::Other)
    }

    fn packet(
        &mut self,
        head: &Block,
        body: &[u8],
        offset: u64,
        interfaces: &[Interface],
        comment: &mut String,
    ) -> Result<Found, Problem> {
        let interface = head.interface_of(body);
        if interface >= self.interfaces {
            let what = "packet of an interface that was not described";
            return Err(Bad::new(8, what).into());
        }
        let interface = self.first + interface;
        let Interface { clock, snaplen, .. } = &interfaces[interface];
        let fields = head.packet(body, *snaplen)?;
        if let Some(units) = fields.units {
            self.last_ns = clock.ns(units);
        }
        let (mut flags, mut lost) = (0, 0);
        comment.clear();
        if head.kind == ENHANCED_PACKET {
            for Opt { code, value, .. } in head.options(body, fields.options_at()).flatten() {
                match (code, value.len()) {
                    (EPB_FLAGS, 4) => flags = head.order.u32(value, 0),
                    (EPB_DROPCOUNT, 8) => lost = head.order.u64(value, 0),
                    (OPT_COMMENT, _) => {
                        if !comment.is_empty() {
                            comment.push('\n');
                        }
                        comment.push_str(&String::from_utf8_lossy(value));
                    }
                    _ => {}
                }
            }
        }
        Ok(Found {
            ts_ns: self.last_ns,
            wire_len: fields.wire_len,
            interface,
            flags,
            lost,
            offset,
            skip: fields.at,
            len: fields.cap_len as usize,
        })
    }

    /// Statistics; `None` if they are of no interface that is known.
    fn note(&self, head: &Block, body: &[u8], interfaces: &[Interface]) -> Option<Note> {
        let order = head.order;
        let fixed = body.get(8..20)?;
        let number = order.u32(fixed, 0) as usize;
        let interface = interfaces.get(self.first.checked_add(number)?)?;
        let time = |bytes: &[u8]| {
            let units = u64::from(order.u32(bytes, 0)) << 32 | u64::from(order.u32(bytes, 4));
            interface.clock.ns(units)
        };
        let mut note = Note {
            at_ns: time(&fixed[4..]),
            ..Note::default()
        };
        let (mut from_ns, mut to_ns) = (None, None);
        for Opt { code, value, .. } in head.options(body, 20).flatten() {
            match (code, value.len()) {
                (OPT_COMMENT, _) if note.comment.is_empty() => {
                    note.comment = String::from_utf8_lossy(value).into_owned();
                }
                (ISB_STARTTIME, 8) => from_ns = Some(time(value)),
                (ISB_ENDTIME, 8) => to_ns = Some(time(value)),
                (ISB_IFRECV, 8) => note.received = Some(order.u64(value, 0)),
                (ISB_IFDROP, 8) => note.dropped = Some(order.u64(value, 0)),
                _ => {}
            }
        }
        note.range_ns = from_ns.zip(to_ns);
        Some(note)
    }
}

const MAX_INTERFACES: usize = 1 << 16;
const MAX_SECTIONS: usize = 1 << 16;
/// Longer statistics are passed over, and so is what comes after this many.
const LONGEST_NOTE: u32 = 64 << 10;
const MAX_NOTES: usize = 4096;
