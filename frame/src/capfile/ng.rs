//! pcapng: sections of blocks, each section in its own byte order.
//!
//! A reader takes twelve bytes to [`Block::begin`], then the whole block to [`Block::body`], then the
//! body to the function of its kind.

use super::{Bad, Clock, Order};

/// The beginning of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Its type.
    pub kind: u32,
    /// All its bytes.
    pub len: u32,
    /// Its byte order: the section's.
    pub order: Order,
}

impl Block {
    /// Reads the first twelve bytes of a block in a section of this byte order. A section header
    /// brings its own.
    ///
    /// # Errors
    /// [`Bad`] if no block is of that length, or a section header has no byte order.
    #[inline]
    pub fn begin(head: &[u8], order: Order) -> Result<Self, Bad> {
        // The type of a section header reads the same in both orders.
        let order = match Order::Little.u32(head, 0) {
            SECTION => byte_order(head)?,
            _ => order,
        };
        let (kind, len) = (order.u32(head, 0), order.u32(head, 4));
        let least = match kind {
            SECTION => 28,
            INTERFACE => 20,
            ENHANCED_PACKET | OLD_PACKET => 32,
            SIMPLE_PACKET => 16,
            _ => 12,
        };
        if !len.is_multiple_of(4) || len < least {
            let what = format!("block length {len}, must be a multiple of 4 and at least {least}");
            return Err(Bad::new(4, what));
        }
        Ok(Self { kind, len, order })
    }

    /// Whether a packet is in it.
    #[inline]
    pub fn is_packet(&self) -> bool {
        matches!(self.kind, ENHANCED_PACKET | SIMPLE_PACKET | OLD_PACKET)
    }

    /// Whether packets are in it, or what they refer to.
    #[inline]
    pub fn is_needed(&self) -> bool {
        self.is_packet() || matches!(self.kind, SECTION | INTERFACE)
    }

    /// A whole block without the second length at its end.
    ///
    /// # Errors
    /// [`Bad`] if that differs from the first.
    #[inline]
    pub fn body<'a>(&self, block: &'a [u8]) -> Result<&'a [u8], Bad> {
        let end = self.len as usize - 4;
        self.check_trailer(&block[end..])
            .map_err(|bad| Bad { at: end, ..bad })?;
        Ok(&block[..end])
    }

    /// Looks at the last four bytes of a block that was skipped.
    ///
    /// # Errors
    /// As [`body`](Self::body).
    #[inline]
    pub fn check_trailer(&self, trailer: &[u8]) -> Result<(), Bad> {
        let (len, trailer) = (self.len, self.order.u32(trailer, 0));
        if len == trailer {
            return Ok(());
        }
        let what = format!(
            "the two lengths of a block differ: {len} at its beginning, {trailer} at its end"
        );
        Err(Bad::new(0, what))
    }

    /// Of a section header: whether its version is known.
    ///
    /// # Errors
    /// [`Bad`] if not.
    pub fn section(&self, body: &[u8]) -> Result<(), Bad> {
        match (self.order.u16(body, 12), self.order.u16(body, 14)) {
            (1, 0 | 2) => Ok(()),
            (major, minor) => {
                let what = format!("pcapng version {major}.{minor}, only 1.0 is known");
                Err(Bad::new(12, what))
            }
        }
    }

    /// An interface description.
    ///
    /// # Errors
    /// [`Bad`] if one of its options cannot be.
    pub fn interface(&self, body: &[u8]) -> Result<Description, Bad> {
        let mut interface = Description {
            link_type: self.order.u16(body, 8).into(),
            snaplen: self.order.u32(body, 12),
            name: String::new(),
            clock: Clock::MICROS,
            fcs_bytes: 0,
        };
        for option in self.options(body, 16) {
            let Opt { code, at, value } = option?;
            match (code, value.len()) {
                (IF_NAME, _) => {
                    let name = value.split(|&byte| byte == 0).next().unwrap_or_default();
                    let name = String::from_utf8_lossy(name);
                    interface.name = name.chars().take(MAX_NAME).collect();
                }
                (IF_TSRESOL, 1) => interface.clock.per_second = resolution(value[0], at)?,
                (IF_TSOFFSET, 8) => interface.clock.offset_s = self.order.u64(value, 0) as i64,
                (IF_FCSLEN, 1) => interface.fcs_bytes = value[0],
                (IF_TSRESOL | IF_TSOFFSET | IF_FCSLEN, len) => {
                    let what = format!("interface option {code} has {len} bytes");
                    return Err(Bad::new(at, what));
                }
                _ => {}
            }
        }
        Ok(interface)
    }

    /// The number of a packet's interface in its section.
    #[inline]
    pub fn interface_of(&self, body: &[u8]) -> usize {
        match self.kind {
            SIMPLE_PACKET => 0,
            OLD_PACKET => self.order.u16(body, 8).into(),
            _ => self.order.u32(body, 8) as usize,
        }
    }

    /// A packet of an interface that keeps `snaplen` bytes, 0 for all.
    ///
    /// # Errors
    /// [`Bad`] if it is longer than its block.
    #[inline]
    pub fn packet(&self, body: &[u8], snaplen: u32) -> Result<Fields, Bad> {
        let word = |at| self.order.u32(body, at);
        let fields = if self.kind == SIMPLE_PACKET {
            let wire_len = word(8);
            Fields {
                units: None,
                cap_len: match snaplen {
                    0 => wire_len,
                    snaplen => wire_len.min(snaplen),
                },
                wire_len,
                at: 12,
            }
        } else {
            Fields {
                units: Some(u64::from(word(12)) << 32 | u64::from(word(16))),
                cap_len: word(20),
                wire_len: word(24),
                at: 28,
            }
        };
        let (cap_len, room) = (fields.cap_len, body.len() - fields.at);
        if cap_len as usize > room {
            let what = format!(
                "captured length {cap_len} is longer than its block, which has room for {room}"
            );
            return Err(Bad::new(fields.len_at(), what));
        }
        Ok(fields)
    }

    /// The options from `at` on.
    #[inline]
    pub fn options<'a>(
        &self,
        body: &'a [u8],
        at: usize,
    ) -> impl Iterator<Item = Result<Opt<'a>, Bad>> + use<'a> {
        options(body, at, self.order)
    }
}

/// The options of a block from `at` on, up to `opt_endofopt` or the end of `body`, which has no second
/// length. One that does not fit is the last.
pub fn options(
    body: &[u8],
    mut at: usize,
    order: Order,
) -> impl Iterator<Item = Result<Opt<'_>, Bad>> {
    std::iter::from_fn(move || {
        let header = body.get(at..at.checked_add(4)?)?;
        let (code, len) = (order.u16(header, 0), order.u16(header, 2));
        if code == OPT_END {
            return None;
        }
        let (start, end) = (at + 4, at + 4 + usize::from(len));
        let Some(value) = body.get(start..end) else {
            let what = format!("option {code} of {len} bytes reaches over its block's end");
            let bad = Bad::new(at, what);
            at = body.len();
            return Some(Err(bad));
        };
        at = end.next_multiple_of(4);
        Some(Ok(Opt {
            code,
            at: start,
            value,
        }))
    })
}

/// What a file says of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// LINKTYPE_…; 1 is Ethernet.
    pub link_type: u32,
    /// Most bytes kept of a packet; 0 is no limit.
    pub snaplen: u32,
    /// `if_name`, at most 64 characters; empty if it has none.
    pub name: String,
    /// How its timestamps count.
    pub clock: Clock,
    /// Bytes of FCS at the end of each packet.
    pub fcs_bytes: u8,
}

/// What a packet block says of its packet, without the options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fields {
    /// The timestamp in units of the interface's clock; a simple packet block has none.
    pub units: Option<u64>,
    /// Bytes that were captured; the block has them.
    pub cap_len: u32,
    /// Bytes on the wire, as the file says.
    pub wire_len: u32,
    /// Where the packet begins in the block.
    pub at: usize,
}

impl Fields {
    /// Where the block says the captured length.
    pub fn len_at(&self) -> usize {
        match self.units {
            Some(_) => 20,
            None => 8,
        }
    }

    /// Where the options begin in the block.
    pub fn options_at(&self) -> usize {
        (self.at + self.cap_len as usize).next_multiple_of(4)
    }
}

/// An option.
#[derive(Debug, Clone, Copy)]
pub struct Opt<'a> {
    /// Its code; what it means depends on the block.
    pub code: u16,
    /// Where its value begins in the block.
    pub at: usize,
    /// Its value.
    pub value: &'a [u8],
}

fn byte_order(head: &[u8]) -> Result<Order, Bad> {
    match Order::Big.u32(head, 8) {
        BYTE_ORDER_MAGIC => Ok(Order::Big),
        word if word.swap_bytes() == BYTE_ORDER_MAGIC => Ok(Order::Little),
        word => Err(Bad::new(8, format!("byte-order magic {word:#010x}"))),
    }
}

/// Units per second. The limits are libpcap's: what a 64-bit count per second can express.
fn resolution(byte: u8, at: usize) -> Result<u64, Bad> {
    let base: u64 = if byte & 0x80 == 0 { 10 } else { 2 };
    base.checked_pow(u32::from(byte & 0x7f)).ok_or_else(|| {
        let what = format!("timestamp resolution (if_tsresol) {byte:#x} is beyond 64 bits");
        Bad::new(at, what)
    })
}

/// Types of blocks.
pub const SECTION: u32 = 0x0a0d_0d0a;
/// An interface description.
pub const INTERFACE: u32 = 1;
/// The packet block that is written no more.
pub const OLD_PACKET: u32 = 2;
/// A packet without time and interface.
pub const SIMPLE_PACKET: u32 = 3;
/// Statistics of an interface.
pub const STATISTICS: u32 = 5;
/// A packet.
pub const ENHANCED_PACKET: u32 = 6;
pub(super) const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;

/// Options of any block.
pub const OPT_END: u16 = 0;
/// A comment.
pub const OPT_COMMENT: u16 = 1;
pub(super) const SHB_HARDWARE: u16 = 2;
pub(super) const SHB_OS: u16 = 3;
pub(super) const SHB_USERAPPL: u16 = 4;
pub(super) const IF_NAME: u16 = 2;
pub(super) const IF_TSRESOL: u16 = 9;
pub(super) const IF_FILTER: u16 = 11;
const IF_FCSLEN: u16 = 13;
const IF_TSOFFSET: u16 = 14;
/// Of a packet: direction and errors; see [`DIRECTION`].
pub const EPB_FLAGS: u16 = 2;
/// Of a packet: how many were lost just before it.
pub const EPB_DROPCOUNT: u16 = 4;
/// Of statistics: begin of what they count.
pub const ISB_STARTTIME: u16 = 2;
/// Its end.
pub const ISB_ENDTIME: u16 = 3;
/// Packets that came.
pub const ISB_IFRECV: u16 = 4;
/// Packets that the interface lost.
pub const ISB_IFDROP: u16 = 5;
pub(super) const ISB_FILTERACCEPT: u16 = 6;
pub(super) const ISB_OSDROP: u16 = 7;
pub(super) const ISB_USRDELIV: u16 = 8;
/// The bits of `epb_flags` that are the direction: 1 received, 2 sent.
pub const DIRECTION: u32 = 0b11;
/// The direction of a packet that the capturing host sent.
pub const OUTBOUND: u32 = 0b10;
/// The direction of a packet that it received.
pub const INBOUND: u32 = 0b01;

const MAX_NAME: usize = 64;
