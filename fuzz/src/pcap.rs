//! Classic capture files, read by the source, by the recorder's reader and by libpcap.
//!
//! Holds: no panic, bounded work, and wherever libpcap reads a file to its end both readers of ours
//! find the same packets ([`compare`]).

use std::io::Cursor;
use std::path::PathBuf;

use vnplug_path::source::pcap::reader::{Peek, Reader};
use vnplug_store::read::{End, Reader as StoreReader};

use crate::libpcap;

/// Checks it with these bytes, which get a magic number of this format if they have none.
pub fn check(bytes: &[u8]) {
    const MAGICS: [u32; 6] = [
        0xa1b2_c3d4,
        0xd4c3_b2a1,
        0xa1b2_3c4d,
        0x4d3c_b2a1,
        0xa1b2_cd34,
        0x34cd_b2a1,
    ];
    let mut file = bytes.to_vec();
    if let Some(magic) = file.first_chunk_mut()
        && !MAGICS.contains(&u32::from_le_bytes(*magic))
    {
        *magic = MAGICS[usize::from(magic[0]) % MAGICS.len()].to_le_bytes();
    }
    compare(&file);
}

/// Both readers against libpcap.
///
/// A reader may end where libpcap goes on, if it says so; up to there, and everywhere if it says
/// nothing, it has libpcap's packets. Ours keep what a file has beyond its own snapshot length, and the
/// source takes frame check sequences away.
pub(crate) fn compare(file: &[u8]) {
    let ours = [source(file), store(file)];
    let Some(theirs) = libpcap::read(file).filter(|theirs| theirs.whole) else {
        return;
    };
    let is_classic = !file.starts_with(&[0x0a, 0x0d, 0x0d, 0x0a]);
    for (name, (packets, end)) in ["source", "store"].iter().zip(&ours) {
        match end {
            Ok(()) => assert_eq!(packets.len(), theirs.packets.len(), "{name}"),
            Err(why) => assert!(packets.len() <= theirs.packets.len(), "{name}: {why}"),
        }
        for (number, (our, their)) in packets.iter().zip(&theirs.packets).enumerate() {
            let both = our.bytes.len().min(their.bytes.len());
            if theirs.ethernet {
                assert_eq!(our.bytes[..both], their.bytes[..both], "{name}: {number}");
            }
            // The source gives no packet a shorter length than it has bytes.
            let longest = our.bytes.len().max(their.bytes.len());
            let (wire_len, most) = match *name {
                "source" => (their.wire_len.max(longest as u32), 255),
                _ => (their.wire_len, 0),
            };
            let cut = wire_len.checked_sub(our.wire_len);
            let cut = cut
                .filter(|cut| *cut <= most)
                .unwrap_or_else(|| panic!("{name}: {number}: {} for {wire_len}", our.wire_len));
            assert!(
                our.bytes.len() + cut as usize >= their.bytes.len(),
                "{name}: {number}: {} bytes of {}",
                our.bytes.len(),
                their.bytes.len()
            );
            if is_classic {
                assert!(
                    is_time(our.ts_ns, their),
                    "{name}: {number}: {} {their:?}",
                    our.ts_ns
                );
            }
        }
    }
    // libpcap's own arithmetic overflows in units below 2^-34 s, so two of ours have to agree.
    for (number, (one, other)) in ours[0].0.iter().zip(&ours[1].0).enumerate() {
        assert_eq!(one.ts_ns, other.ts_ns, "{number}");
    }
}

fn is_time(ns: u64, their: &libpcap::Packet) -> bool {
    // Neither word has a sign in the file; libpcap gives them one, and scales the second.
    let seconds = u64::from(their.seconds as u32) * 1_000_000_000;
    let micro = u64::from((their.ns / 1000) as u32) * 1000;
    let nano = u64::from(their.ns as u32);
    ns == seconds + micro || ns == seconds + nano
}

/// A packet as our readers have it.
#[derive(Debug)]
struct Packet {
    ts_ns: u64,
    wire_len: u32,
    bytes: Vec<u8>,
}

/// Packets, and what is said at their end if the file goes on.
type Read = (Vec<Packet>, Result<(), String>);

/// Read by the daemon's source.
fn source(file: &[u8]) -> Read {
    let mut reader = Reader::new(Cursor::new(file));
    let mut packets = Vec::new();
    loop {
        match reader.peek() {
            Ok(Peek::Packet(packet)) => {
                packets.push(Packet {
                    ts_ns: packet.ts_ns,
                    wire_len: packet.wire_len,
                    bytes: reader.bytes(&packet).to_vec(),
                });
                reader.advance();
            }
            Ok(Peek::Starved(needed)) => {
                reader.fill(needed).expect("memory can be read");
            }
            Ok(Peek::End) => return (packets, Ok(())),
            Err(bad) => return (packets, Err(bad.to_string())),
        }
    }
}

/// Read by the recorder's reader.
fn store(file: &[u8]) -> Read {
    let input = Box::new(Cursor::new(file.to_vec()));
    let mut reader = StoreReader::stream(input, PathBuf::from("fuzz"));
    let mut packets = Vec::new();
    let end = loop {
        match reader.read() {
            Ok(Some(packet)) => packets.push(Packet {
                ts_ns: packet.ts_ns,
                wire_len: packet.wire_len,
                bytes: packet.bytes.to_vec(),
            }),
            Ok(None) => break None,
            Err(error) => break Some(error.to_string()),
        }
    };
    match (end, reader.end()) {
        (Some(error), _) => (packets, Err(error)),
        (None, End::Clean) => (packets, Ok(())),
        (None, end) => (packets, Err(format!("{end:?}"))),
    }
}
