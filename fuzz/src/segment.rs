//! A segment whose writer was killed, or whose machine lost its power: after what was acknowledged
//! there is anything, and the index beside it ends anywhere.
//!
//! Holds: every packet that was acknowledged is read, first and unchanged, by the reader; extract
//! finds it, with the old index and with one that is made again.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use vnplug::{Meta, Packet};
use vnplug_frame::capfile::write::{Interface, pcap, pcapng};
use vnplug_store::extract::{Extract, Query};
use vnplug_store::filter::Filter;
use vnplug_store::index::{Sidecar, rebuild};
use vnplug_store::name::{Format, SegmentName};
use vnplug_store::read::Reader;

use crate::Dice;

/// 2026-11-21T13:45:00Z.
const START_NS: u64 = 1_795_268_700_000_000_000;

/// Checks it with these bytes: the packets, how much of the next one is there, what follows, and what
/// the index is.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let mode = dice.byte();
    let format = match mode & 1 {
        0 => Format::Pcapng,
        _ => Format::Pcap,
    };
    let mut segment = Segment::new(format);
    for _ in 0..dice.byte() % 16 {
        segment.add(&mut dice);
    }
    let acknowledged = segment.packets.len();
    let whole = segment.bytes.len();
    segment.add(&mut dice);
    let torn = usize::from(dice.u16()) % (segment.bytes.len() - whole + 1);
    segment.bytes.truncate(whole + torn);
    segment.packets.truncate(acknowledged);
    let zeros = usize::from(dice.byte()) * usize::from(dice.byte() % 32);
    segment.bytes.resize(whole + torn + zeros, 0);
    let (index_cut, index_garbage) = (dice.u16(), dice.byte());
    let garbage = dice.bytes(usize::from(index_garbage)).to_vec();
    segment.bytes.extend(dice.0);

    segment.read();
    // Files cost more than all the rest.
    if mode & 6 == 0 {
        let path = place().join(segment.name.to_string());
        fs::write(&path, &segment.bytes[..whole]).expect("room");
        rebuild(&path).expect("a whole segment");
        fs::write(&path, &segment.bytes).expect("room");
        let index = Sidecar::path_of(&path);
        let mut bytes = fs::read(&index).expect("an index");
        bytes.truncate(usize::from(index_cut));
        bytes.extend(garbage);
        fs::write(&index, bytes).expect("room");
        segment.extract(&path);
        rebuild(&path).expect("the segment can be read");
        segment.extract(&path);
        fs::remove_file(&path).expect("it is there");
        fs::remove_file(&index).expect("it is there");
    }
}

struct Segment {
    name: SegmentName,
    bytes: Vec<u8>,
    packets: Vec<(u64, u32, Vec<u8>)>,
}

impl Segment {
    fn new(format: Format) -> Self {
        let interface = Interface {
            name: "lab".to_owned(),
            link_type: 1,
            snaplen: 0,
            filter: String::new(),
        };
        Self {
            name: SegmentName {
                recording: "rec".to_owned(),
                sequence: 0,
                start_ns: START_NS,
                format,
            },
            bytes: match format {
                Format::Pcapng => pcapng::header(&[interface], ""),
                Format::Pcap => pcap::header(&[interface]),
            },
            packets: Vec::new(),
        }
    }

    /// Writes a packet, and now and then what pads a write.
    fn add(&mut self, dice: &mut Dice<'_>) {
        let len = usize::from(dice.u16()) % 200;
        let kind = dice.byte();
        let last_ns = self.packets.last().map_or(START_NS, |(ts_ns, ..)| *ts_ns);
        let bytes = dice.bytes(len);
        let meta = Meta {
            ts_ns: last_ns + u64::from(dice.u16()),
            wire_len: bytes.len() as u32 + u32::from(kind & 0x10),
            flow_hash: 0,
            lost: u32::from(kind & 3),
            flags: u16::from(kind >> 5),
            vlan_tci: 0,
            source: 0,
            queue: 0,
            ..Meta::default()
        };
        let packet = Packet { meta, bytes };
        let at = self.bytes.len();
        self.bytes.resize(at + 8192, 0);
        let end = match self.name.format {
            Format::Pcapng => pcapng::packet(&mut self.bytes, at, 0, &packet),
            Format::Pcap => pcap::packet(&mut self.bytes, at, &packet),
        };
        let mut end = end.expect("room was made");
        if kind & 0x0c == 0x0c && self.name.format == Format::Pcapng {
            end = pcapng::pad(&mut self.bytes, end, 4096);
        }
        self.bytes.truncate(end);
        self.packets
            .push((meta.ts_ns, meta.wire_len, bytes.to_vec()));
    }

    /// The acknowledged packets come first.
    fn read(&self) {
        let input = Box::new(Cursor::new(self.bytes.clone()));
        let mut reader = Reader::stream(input, PathBuf::from("fuzz"));
        let mut left = self.packets.iter();
        loop {
            match (reader.read(), left.next()) {
                (Ok(Some(packet)), Some(expected)) => {
                    assert_eq!((packet.ts_ns, packet.wire_len), (expected.0, expected.1));
                    assert_eq!(packet.bytes, expected.2);
                }
                (Ok(Some(_)), None) => {}
                (ended, None) => {
                    drop(ended);
                    break;
                }
                (ended, Some(missing)) => panic!("{missing:?} is missing: {ended:?}"),
            }
        }
    }

    /// The acknowledged packets are among those found, in their order.
    fn extract(&self, path: &Path) {
        let query = Query {
            from_ns: 0,
            to_ns: u64::MAX,
            filter: Filter::new("").expect("no filter"),
        };
        let mut extract = Extract::open(&[path.to_owned()], query).expect("a segment");
        let mut left = self.packets.iter().peekable();
        while let Some(packet) = extract.read().expect("no filter") {
            let expected = left.peek();
            if expected.is_some_and(|it| {
                it.0 == packet.ts_ns && it.1 == packet.wire_len && it.2 == packet.bytes
            }) {
                left.next();
            }
        }
        assert_eq!(left.next(), None, "missing: {:?}", extract.problems());
    }
}

/// A directory of this process, in memory.
fn place() -> &'static Path {
    static PLACE: OnceLock<PathBuf> = OnceLock::new();
    PLACE.get_or_init(|| {
        let path = PathBuf::from(format!("/dev/shm/vnplug-fuzz-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory in memory");
        path
    })
}
