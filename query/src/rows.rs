//! The rows of `flows`: packets counted by flow and minute, as Arrow's arrays.

use std::sync::Arc;

use datafusion::arrow::array::{
    ArrayRef, Int64Builder, RecordBatch, StringBuilder, TimestampNanosecondBuilder, UInt8Builder,
    UInt16Builder,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use datafusion::arrow::error::ArrowError;
use datafusion::common::HashMap;

use crate::frame::{Frame, IPV4, IPV6, Key, Talk, protocol_name};

/// What is counted of a packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) ts_ns: u64,
    /// Bytes on the wire.
    pub(crate) bytes: u64,
    /// Bytes that were captured.
    pub(crate) captured: u64,
    /// `epb_flags`.
    pub(crate) flags: u32,
    /// LINKTYPE_….
    pub(crate) link_type: u32,
    pub(crate) frame: Frame,
}

/// What a flow has sent in a minute.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    packets: u64,
    bytes: u64,
    captured: u64,
    first_ns: u64,
    last_ns: u64,
    tcp_flags: Option<u8>,
}

/// Packets of one segment, counted.
#[derive(Debug)]
pub(crate) struct Rows {
    segment: String,
    most: usize,
    sums: HashMap<Key, Sum>,
    /// Names of interfaces that were seen.
    interfaces: Vec<String>,
    numbers: HashMap<String, u32>,
    /// The number of the last packet's.
    latest: u32,
}

impl Rows {
    /// No packets of a segment of this name; at most this many rows are to be held.
    pub(crate) fn new(segment: String, most: usize) -> Self {
        Self {
            segment,
            most,
            sums: HashMap::default(),
            interfaces: Vec::new(),
            numbers: HashMap::default(),
            latest: 0,
        }
    }

    /// Counts a packet that came in through an interface of this name.
    pub(crate) fn add(&mut self, packet: Seen, interface: &str) {
        let key = Key {
            minute: (packet.ts_ns.min(LATEST_NS) / MINUTE_NS) as u32,
            interface: self.interface(interface),
            direction: (packet.flags & 3) as u8,
            link_type: packet.link_type,
            vlans: packet.frame.vlans,
            talk: packet.frame.talk,
        };
        let sum = self.sums.entry(key).or_insert(Sum {
            first_ns: u64::MAX,
            ..Sum::default()
        });
        sum.packets += 1;
        sum.bytes += packet.bytes;
        sum.captured += packet.captured;
        sum.first_ns = sum.first_ns.min(packet.ts_ns);
        sum.last_ns = sum.last_ns.max(packet.ts_ns);
        if let Some(flags) = packet.frame.tcp_flags {
            sum.tcp_flags = Some(sum.tcp_flags.unwrap_or(0) | flags);
        }
    }

    /// True if there are enough rows to be taken.
    pub(crate) fn is_full(&self) -> bool {
        self.sums.len() >= self.most
    }

    /// True if there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.sums.is_empty()
    }

    /// What makes room: all rows but those of the last minute, to which more may come; all if those are
    /// most.
    pub(crate) fn make_room(&mut self) -> Result<RecordBatch, ArrowError> {
        let last = self.sums.keys().map(|key| key.minute).max().unwrap_or(0);
        let of_last = self.sums.keys().filter(|key| key.minute == last).count();
        let before = if of_last * 2 > self.sums.len() {
            last + 1
        } else {
            last
        };
        let rows = self.sums.extract_if(|key, _| key.minute < before);
        let rows = rows.collect();
        self.batch(rows)
    }

    /// All rows that are left.
    pub(crate) fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        let rows = self.sums.drain().collect();
        self.batch(rows)
    }

    /// Rows as Arrow has them, sorted by minute.
    fn batch(&self, mut rows: Vec<(Key, Sum)>) -> Result<RecordBatch, ArrowError> {
        rows.sort_unstable_by_key(|(key, _)| *key);
        let mut columns = Columns::default();
        for (key, sum) in rows {
            columns.row(&key, &sum, self);
        }
        columns.finish()
    }

    /// The number of an interface's name.
    fn interface(&mut self, name: &str) -> u32 {
        let latest = self.interfaces.get(self.latest as usize);
        if latest.is_some_and(|latest| latest == name) {
            return self.latest;
        }
        self.latest = match self.numbers.get(name) {
            Some(&number) => number,
            None => {
                let number = self.interfaces.len() as u32;
                self.interfaces.push(name.to_owned());
                self.numbers.insert(name.to_owned(), number);
                number
            }
        };
        self.latest
    }
}

/// The columns of `flows`; [`schema`] says what they are.
#[derive(Default)]
struct Columns {
    minute: TimestampNanosecondBuilder,
    first: TimestampNanosecondBuilder,
    last: TimestampNanosecondBuilder,
    protocol: UInt8Builder,
    proto: StringBuilder,
    src: StringBuilder,
    dst: StringBuilder,
    src_port: UInt16Builder,
    dst_port: UInt16Builder,
    packets: Int64Builder,
    bytes: Int64Builder,
    captured: Int64Builder,
    tcp_flags: UInt8Builder,
    vlan: UInt16Builder,
    inner_vlan: UInt16Builder,
    ethertype: UInt16Builder,
    src_mac: StringBuilder,
    dst_mac: StringBuilder,
    link_type: UInt16Builder,
    direction: StringBuilder,
    interface: StringBuilder,
    segment: StringBuilder,
}

impl Columns {
    fn row(&mut self, key: &Key, sum: &Sum, rows: &Rows) {
        let minute = u64::from(key.minute) * MINUTE_NS;
        self.minute.append_value(stamp(minute));
        self.first.append_value(stamp(sum.first_ns));
        self.last.append_value(stamp(sum.last_ns));
        self.talk(&key.talk);
        self.packets.append_value(count(sum.packets));
        self.bytes.append_value(count(sum.bytes));
        self.captured.append_value(count(sum.captured));
        self.tcp_flags.append_option(sum.tcp_flags);
        self.vlan.append_option(key.vlans[0]);
        self.inner_vlan.append_option(key.vlans[1]);
        // LINKTYPEs have 16 bits in every format; what says more is none.
        self.link_type
            .append_option(u16::try_from(key.link_type).ok());
        self.direction.append_option(match key.direction {
            1 => Some("in"),
            2 => Some("out"),
            _ => None,
        });
        let name = rows.interfaces.get(key.interface as usize);
        self.interface
            .append_option(name.filter(|name| !name.is_empty()));
        self.segment.append_value(&rows.segment);
    }

    fn talk(&mut self, talk: &Talk) {
        match *talk {
            Talk::Ip {
                from,
                to,
                protocol,
                ports,
            } => {
                self.protocol.append_value(protocol);
                self.proto.append_value(protocol_name(protocol));
                self.src.append_value(from.to_string());
                self.dst.append_value(to.to_string());
                self.src_port.append_option(ports.map(|ports| ports[0]));
                self.dst_port.append_option(ports.map(|ports| ports[1]));
                self.ethertype
                    .append_value(if from.is_ipv4() { IPV4 } else { IPV6 });
                self.src_mac.append_null();
                self.dst_mac.append_null();
            }
            Talk::Other { ethertype, macs } => {
                self.protocol.append_null();
                self.proto.append_null();
                self.src.append_null();
                self.dst.append_null();
                self.src_port.append_null();
                self.dst_port.append_null();
                let ethertype = ethertype.filter(|&kind| kind >= LOWEST_ETHERTYPE);
                self.ethertype.append_option(ethertype);
                self.src_mac.append_option(macs.map(|macs| mac(macs[0])));
                self.dst_mac.append_option(macs.map(|macs| mac(macs[1])));
            }
        }
    }

    fn finish(mut self) -> Result<RecordBatch, ArrowError> {
        let utc = |mut builder: TimestampNanosecondBuilder| -> ArrayRef {
            Arc::new(builder.finish().with_timezone(UTC))
        };
        let columns: Vec<ArrayRef> = vec![
            utc(self.minute),
            utc(self.first),
            utc(self.last),
            Arc::new(self.protocol.finish()),
            Arc::new(self.proto.finish()),
            Arc::new(self.src.finish()),
            Arc::new(self.dst.finish()),
            Arc::new(self.src_port.finish()),
            Arc::new(self.dst_port.finish()),
            Arc::new(self.packets.finish()),
            Arc::new(self.bytes.finish()),
            Arc::new(self.captured.finish()),
            Arc::new(self.tcp_flags.finish()),
            Arc::new(self.vlan.finish()),
            Arc::new(self.inner_vlan.finish()),
            Arc::new(self.ethertype.finish()),
            Arc::new(self.src_mac.finish()),
            Arc::new(self.dst_mac.finish()),
            Arc::new(self.link_type.finish()),
            Arc::new(self.direction.finish()),
            Arc::new(self.interface.finish()),
            Arc::new(self.segment.finish()),
        ];
        RecordBatch::try_new(schema(), columns)
    }
}

/// The columns of `flows`, in order; docs/query.md says what they mean.
pub(crate) fn schema() -> SchemaRef {
    let always = |name: &str, of: DataType| Field::new(name, of, false);
    let maybe = |name: &str, of: DataType| Field::new(name, of, true);
    Arc::new(Schema::new(vec![
        always("minute", time_type()),
        always("first", time_type()),
        always("last", time_type()),
        maybe("protocol", DataType::UInt8),
        maybe("proto", DataType::Utf8),
        maybe("src", DataType::Utf8),
        maybe("dst", DataType::Utf8),
        maybe("src_port", DataType::UInt16),
        maybe("dst_port", DataType::UInt16),
        always("packets", DataType::Int64),
        always("bytes", DataType::Int64),
        always("captured", DataType::Int64),
        maybe("tcp_flags", DataType::UInt8),
        maybe("vlan", DataType::UInt16),
        maybe("inner_vlan", DataType::UInt16),
        maybe("ethertype", DataType::UInt16),
        maybe("src_mac", DataType::Utf8),
        maybe("dst_mac", DataType::Utf8),
        maybe("link_type", DataType::UInt16),
        maybe("direction", DataType::Utf8),
        maybe("interface", DataType::Utf8),
        always("segment", DataType::Utf8),
    ]))
}

/// Nanoseconds since 1970 UTC.
pub(crate) fn time_type() -> DataType {
    DataType::Timestamp(TimeUnit::Nanosecond, Some(UTC.into()))
}

/// A time as Arrow has it: until 2262.
pub(crate) fn stamp(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// A number as Arrow has it.
pub(crate) fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// UTC in words that every build of Arrow understands.
pub(crate) const UTC: &str = "+00:00";
const MINUTE_NS: u64 = 60_000_000_000;
const LATEST_NS: u64 = i64::MAX as u64;
/// Below it is a length (IEEE 802.3, 3.2.6).
const LOWEST_ETHERTYPE: u16 = 0x600;
/// Rows that are held at once at most, some 50 MB.
pub(crate) const MOST_ROWS: usize = 1 << 17;
/// What a row takes while it is counted, made a part of a batch, and written.
pub(crate) const ROW_BYTES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Talk;

    #[test]
    fn a_minute_is_cut_only_if_it_has_too_many_rows_of_its_own() {
        let mut rows = Rows::new("x".into(), 100);
        let add = |rows: &mut Rows, minute: u64, flow: u16| {
            let talk = Talk::Other {
                ethertype: Some(flow),
                macs: None,
            };
            let frame = Frame {
                talk,
                vlans: [None; 2],
                tcp_flags: None,
            };
            let packet = Seen {
                ts_ns: minute * MINUTE_NS,
                bytes: 60,
                captured: 60,
                flags: 0,
                link_type: 1,
                frame,
            };
            rows.add(packet, "eth0");
        };
        (0..60).for_each(|flow| add(&mut rows, 7, flow));
        (0..39).for_each(|flow| add(&mut rows, 8, flow));
        assert!(!rows.is_full());
        add(&mut rows, 8, 39);
        assert!(rows.is_full());
        assert_eq!(rows.make_room().unwrap().num_rows(), 60);
        // More of the same flows is no further row.
        (0..40).for_each(|flow| add(&mut rows, 8, flow));
        (40..100).for_each(|flow| add(&mut rows, 8, flow));
        assert!(rows.is_full());
        assert_eq!(rows.make_room().unwrap().num_rows(), 100);
        assert!(rows.is_empty());
    }
}
