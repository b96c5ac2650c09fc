//! Makes an index while packets are written.

use super::block::{self, Block, Chunk, Probe};
use super::code::Writer;
use super::keys::{Family, Flow, keys};
use super::table::Table;
use super::{CHUNK_BYTES, CHUNKS, Key};

/// Sees the packets of a segment in the order of the file, and hands out blocks of its index.
///
/// No call allocates, but for a block that is full (every 16 MiB of the segment). About 2 MiB of memory.
///
/// ```
/// use vnplug_store::index::Builder;
///
/// let mut builder = Builder::new();
/// let mut sidecar: Vec<u8> = Vec::new();
/// builder.definition(0); // a section header
/// builder.definition(28); // an interface description
/// builder.packet(48, 1, 1_700_000_000_000_000_000, &[0; 60]);
/// builder.amount(60, 0);
/// sidecar.extend(builder.take()); // to be appended to the `.vnx`; mostly nothing
/// sidecar.extend(builder.finish(140)); // the segment is closed and has 140 bytes
/// assert_eq!(&sidecar[..4], b"VNX1");
/// ```
#[derive(Debug)]
pub struct Builder {
    /// The block at work; its keys are in the tables below.
    block: Block,
    /// The chunk at work.
    chunk: Chunk,
    /// Its bit; changes with each chunk.
    bit: u64,
    /// Numbers chunks over all blocks; what a flow that was seen is compared with.
    age: u32,
    seen: Box<[Seen]>,
    last_ether: (u16, u32),
    ether: Table,
    vlan: Box<[u64]>,
    protocol: Box<[u64]>,
    port: Box<[u64]>,
    v4: Table,
    v6: Table,
    /// Frames that are full.
    ready: Vec<u8>,
    total: Chunk,
}

/// A flow whose keys are in the tables for the chunk of this age.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    flow: Flow,
    age: u32,
}

impl Builder {
    /// At the beginning of a segment.
    pub fn new() -> Self {
        Self {
            block: Block::default(),
            chunk: EMPTY,
            bit: 1,
            age: 1,
            seen: vec![Seen::default(); SEEN].into(),
            last_ether: (0, 0),
            ether: Table::new(MAX_ETHERTYPES),
            vlan: vec![0; 1 << 12].into(),
            protocol: vec![0; 1 << 8].into(),
            port: vec![0; 1 << 16].into(),
            v4: Table::new(MAX_ADDRESSES),
            v6: Table::new(MAX_ADDRESSES),
            ready: Vec::new(),
            total: EMPTY,
        }
    }

    /// In the middle of a segment whose index has `blocks` blocks up to `offset`, where a packet's
    /// block begins, with `total` for all of them.
    pub(super) fn resume(blocks: u32, offset: u64, total: Chunk) -> Self {
        let mut builder = Self::new();
        builder.block.number = blocks;
        builder.chunk.start = offset;
        builder.total = total;
        builder
    }

    /// A section header or an interface description begins at `offset`.
    pub fn definition(&mut self, offset: u64) {
        self.block.definitions.push(offset);
    }

    /// A packet's block begins at `offset` of the segment; `link_type` is its interface's (1 is
    /// Ethernet), `bytes` is what was captured. Call it in the order of the file.
    #[inline]
    pub fn packet(&mut self, offset: u64, link_type: u32, ts_ns: u64, bytes: &[u8]) {
        if offset >= self.chunk.start + CHUNK_BYTES && self.chunk.packets > 0 {
            self.end_chunk(offset);
        }
        let probe = Probe {
            offset,
            ts_ns,
            len_bytes: bytes.len() as u32,
        };
        if self.chunk.packets == 0 && self.block.chunks.is_empty() {
            self.block.first = probe;
        }
        self.block.last = probe;
        self.chunk.packets += 1;
        self.chunk.low_ns = self.chunk.low_ns.min(ts_ns);
        self.chunk.high_ns = self.chunk.high_ns.max(ts_ns);
        if link_type == ETHERNET {
            self.frame(bytes);
        } else {
            self.anything();
        }
    }

    /// How long the packet was that was told last, on the wire, and how many packets were lost just
    /// before it.
    #[inline]
    pub fn amount(&mut self, wire_len: u32, lost: u64) {
        self.chunk.wire_bytes += u64::from(wire_len);
        self.chunk.lost = self.chunk.lost.saturating_add(lost);
    }

    /// In this place of the segment stands that packets are missing, in words: who looks for anything in its time
    /// reads the chunk.
    #[cold]
    pub fn mark(&mut self) {
        self.anything();
    }

    #[inline]
    fn frame(&mut self, bytes: &[u8]) {
        let Self {
            bit,
            age,
            ether,
            vlan,
            last_ether,
            block,
            ..
        } = self;
        let (bit, age) = (*bit, *age);
        let note_ether = |kind: u16| {
            if *last_ether != (kind, age) {
                *last_ether = (kind, age);
                if !ether.add(u32::from(kind), bit) {
                    block.keys[Key::Ethertype as usize].any |= bit;
                }
            }
        };
        let keys = keys(bytes, note_ether, |number| vlan[usize::from(number)] |= bit);
        if keys.anything {
            return self.anything();
        }
        if keys.any_port {
            self.block.keys[Key::Port as usize].any |= bit;
        }
        let flow = keys.flow;
        if flow.family == Family::Other {
            return;
        }
        let seen = &mut self.seen[flow.spread() % SEEN];
        if seen.age == age && seen.flow == flow {
            return;
        }
        *seen = Seen { flow, age };
        self.flow(flow);
    }

    /// Notes the keys of a flow that this chunk did not have before, or not lately.
    fn flow(&mut self, flow: Flow) {
        let bit = self.bit;
        let (table, key) = match flow.family {
            Family::V6 => (&mut self.v6, Key::V6),
            _ => (&mut self.v4, Key::V4),
        };
        for address in flow.addresses {
            if !table.add(address, bit) {
                self.block.keys[key as usize].any |= bit;
            }
        }
        if flow.family != Family::Arp {
            self.protocol[usize::from(flow.protocol)] |= bit;
        }
        for &port in &flow.ports[..usize::from(flow.port_count)] {
            self.port[usize::from(port)] |= bit;
        }
    }

    /// The chunk may have any key.
    fn anything(&mut self) {
        for keys in &mut self.block.keys {
            keys.any |= self.bit;
        }
    }

    #[cold]
    fn end_chunk(&mut self, end: u64) {
        let chunk = Chunk { end, ..self.chunk };
        self.block.chunks.push(chunk);
        self.total.packets += chunk.packets;
        self.total.low_ns = self.total.low_ns.min(chunk.low_ns);
        self.total.high_ns = self.total.high_ns.max(chunk.high_ns);
        self.chunk = Chunk {
            start: end,
            ..EMPTY
        };
        self.bit = self.bit.rotate_left(1);
        self.age = self.age.wrapping_add(1).max(1);
        if self.block.chunks.len() == CHUNKS {
            self.end_block();
        }
    }

    /// Writes the block at work to `ready` and begins the next one.
    fn end_block(&mut self) {
        let keys = &mut self.block.keys;
        let tables = [
            (Key::Ethertype, &mut self.ether),
            (Key::V4, &mut self.v4),
            (Key::V6, &mut self.v6),
        ];
        for (key, table) in tables {
            table.drain_into(&mut keys[key as usize].list);
        }
        let arrays = [
            (Key::Vlan, &mut self.vlan),
            (Key::Protocol, &mut self.protocol),
            (Key::Port, &mut self.port),
        ];
        for (key, array) in arrays {
            let list = &mut keys[key as usize].list;
            for (key, chunks) in array.iter_mut().enumerate() {
                if *chunks != 0 {
                    list.push((key as u32, std::mem::take(chunks)));
                }
            }
        }
        let block = &mut self.block;
        block::frame(&mut self.ready, block::BLOCK, |out| block.encode(out));
        block.number += 1;
        block.definitions.clear();
        block.chunks.clear();
        for keys in &mut block.keys {
            keys.any = 0;
            keys.list.clear();
        }
        self.bit = 1;
    }

    /// What is to be appended to the index now; mostly nothing.
    #[inline]
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.ready)
    }

    /// The segment is closed and `len_bytes` long: the rest of its index. The builder is at the
    /// beginning of the next segment then.
    pub fn finish(&mut self, len_bytes: u64) -> Vec<u8> {
        self.finish_torn(len_bytes, len_bytes)
    }

    /// As [`finish`](Self::finish), of a segment of which only what is before `end` can be read.
    pub(super) fn finish_torn(&mut self, end: u64, len_bytes: u64) -> Vec<u8> {
        if self.chunk.packets > 0 {
            self.end_chunk(end);
        }
        if !self.block.chunks.is_empty() {
            self.end_block();
        }
        let trailer = super::Trailer {
            len_bytes,
            blocks: self.block.number,
            packets: self.total.packets,
            low_ns: self.total.low_ns,
            high_ns: self.total.high_ns,
        };
        block::frame(&mut self.ready, block::TRAILER, |out| trailer.encode(out));
        for keys in &mut self.block.keys {
            keys.any = 0;
        }
        (self.block.number, self.total, self.chunk) = (0, EMPTY, EMPTY);
        self.block.definitions.clear();
        self.take()
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Flow {
    #[inline]
    fn spread(&self) -> usize {
        let addresses = u64::from(self.addresses[0]) << 32 | u64::from(self.addresses[1]);
        let ports = u64::from(self.ports[0]) << 16 | u64::from(self.ports[1]);
        let mixed = (addresses ^ ports.rotate_left(21)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 40) as usize
    }
}

impl super::Trailer {
    fn encode(&self, out: &mut Vec<u8>) {
        let mut writer = Writer(out);
        writer.u64(self.len_bytes);
        writer.u32(self.blocks);
        writer.u64(self.packets);
        writer.u64(self.low_ns);
        writer.u64(self.high_ns);
    }
}

/// LINKTYPE_ETHERNET.
const ETHERNET: u32 = 1;
const EMPTY: Chunk = Chunk {
    start: 0,
    end: 0,
    packets: 0,
    low_ns: u64::MAX,
    high_ns: 0,
    wire_bytes: 0,
    lost: 0,
};
/// Flows that are known again without looking into the tables.
const SEEN: usize = 1024;
/// Keys of a block; chunks with more may have any key. Two for each packet of 1400 bytes.
const MAX_ADDRESSES: usize = 24 << 10;
const MAX_ETHERTYPES: usize = 1024;
