//! Capture files for tests, and the program that is asked about them.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use vnplug_store::extract::{Format, Output as Writer, Packet};
use vnplug_store::read::Interface;

/// 2026-11-21T13:45:00Z.
pub(crate) const START_NS: u64 = 1_795_268_700_000_000_000;
pub(crate) const SECOND: u64 = 1_000_000_000;

/// A directory of its own, removed at the end.
pub(crate) struct Lab(pub(crate) PathBuf);

impl Lab {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vnplug-query-{name}-{}", std::process::id()));
        // What a killed run of the same number left.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A segment of the recording `t`, closed long ago.
    pub(crate) fn segment(&self, sequence: u64, packets: &[Sample]) -> PathBuf {
        let start = packets.first().map_or(START_NS, |packet| packet.ts_ns);
        let start = vnplug_store::name::time(start);
        let path = self.path(&format!("t-{sequence:010}-{start}.pcapng"));
        write(&path, packets);
        path
    }

    /// Asks; the answer must be whole.
    pub(crate) fn ask(&self, sql: &str, more: &[&str]) -> String {
        let output = self.try_ask(sql, more);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{sql}: {errors}");
        assert_eq!(errors, "", "{sql}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Asks for lines of CSV, without that of the names.
    pub(crate) fn lines(&self, sql: &str, more: &[&str]) -> Vec<String> {
        let csv = self.ask(sql, &[&["--format", "csv"], more].concat());
        csv.lines().skip(1).map(str::to_owned).collect()
    }

    /// Asks for one number.
    pub(crate) fn number(&self, sql: &str, more: &[&str]) -> u64 {
        self.lines(sql, more)[0].parse().unwrap()
    }

    /// Asks for what must fail; what is said on stderr.
    pub(crate) fn refusal(&self, sql: &str, more: &[&str]) -> String {
        let output = self.try_ask(sql, more);
        assert_eq!(output.status.code(), Some(1), "{sql}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    pub(crate) fn try_ask(&self, sql: &str, more: &[&str]) -> Output {
        run(&[&[sql, self.0.to_str().unwrap()], more].concat())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vnplug-query"))
        .args(arguments)
        .output()
        .unwrap()
}

/// Sets when a file was changed last: closed segments are older than a few seconds.
pub(crate) fn age(path: &Path, changed: SystemTime) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(changed).unwrap();
}

pub(crate) fn long_ago() -> SystemTime {
    SystemTime::now() - Duration::from_secs(3600)
}

/// A packet of a capture file.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) ts_ns: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) wire_len: u32,
    pub(crate) interface: &'static str,
    pub(crate) flags: u32,
}

impl Sample {
    pub(crate) fn new(ts_ns: u64, bytes: Vec<u8>) -> Self {
        Self {
            ts_ns,
            wire_len: bytes.len() as u32,
            bytes,
            interface: "eth7",
            flags: 0,
        }
    }
}

/// Writes a capture file that was closed long ago.
pub(crate) fn write(path: &Path, packets: &[Sample]) {
    let to = BufWriter::new(File::create(path).unwrap());
    let mut writer = Writer::new(Box::new(to), Format::Pcapng);
    let mut interface = Interface::ethernet();
    for packet in packets {
        interface.name = packet.interface.to_owned();
        let packet = Packet {
            ts_ns: packet.ts_ns,
            bytes: &packet.bytes,
            wire_len: packet.wire_len,
            flags: packet.flags,
            lost: 0,
            comment: "",
            interface: &interface,
        };
        writer.write(&packet).unwrap();
    }
    writer.finish().unwrap();
    age(path, long_ago());
}

/// An Ethernet frame with an IPv4 packet in it.
pub(crate) fn v4(from: [u8; 4], to: [u8; 4], protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    frame.extend((20 + payload.len() as u16).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
    frame.extend(from);
    frame.extend(to);
    frame.extend(payload);
    frame
}

/// UDP of this many bytes in all.
pub(crate) fn udp(from: [u8; 4], to: [u8; 4], ports: [u16; 2], len: usize) -> Vec<u8> {
    let mut payload = Vec::new();
    payload.extend(ports[0].to_be_bytes());
    payload.extend(ports[1].to_be_bytes());
    payload.extend((len.saturating_sub(34) as u16).to_be_bytes());
    payload.extend([0, 0]);
    payload.resize(payload.len().max(len.saturating_sub(34)), 0);
    v4(from, to, 17, &payload)
}

/// A header of TCP.
pub(crate) fn tcp(from: [u8; 4], to: [u8; 4], ports: [u16; 2], flags: u8) -> Vec<u8> {
    let mut payload = Vec::new();
    payload.extend(ports[0].to_be_bytes());
    payload.extend(ports[1].to_be_bytes());
    payload.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    v4(from, to, 6, &payload)
}

/// A source of numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit
    }
}

/// Packets of many kinds over some minutes: IPv4, IPv6, VLANs, ARP, others, and cut ones.
pub(crate) fn mix(seed: u64, count: usize) -> Vec<Sample> {
    let mut random = Random(seed);
    let mut ts_ns = START_NS;
    let mut packets = Vec::new();
    for _ in 0..count {
        ts_ns += random.below(2 * 300 * SECOND / count as u64);
        let host = |random: &mut Random| [10, 1, random.below(3) as u8, random.below(20) as u8];
        let (from, to) = (host(&mut random), host(&mut random));
        let ports = [
            1024 + random.below(4) as u16,
            [53, 80, 443][random.below(3) as usize],
        ];
        let mut bytes = match random.below(10) {
            0..4 => udp(from, to, ports, 60 + random.below(1300) as usize),
            4..7 => tcp(from, to, ports, 1 << random.below(6)),
            7 => {
                let mut frame = vec![
                    2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd, 0x60, 0, 0, 0,
                ];
                frame.extend([0, 8, 58, 64]);
                for last in [from[3], to[3]] {
                    frame.extend([0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
                }
                frame.extend([128, 0, 0, 0, 0, 1, 0, 1]);
                frame
            }
            8 => v4(from, to, 1, &[8, 0, 0, 0, 0, 1, 0, 1]),
            _ => {
                let mut frame = vec![0xff; 6];
                frame.extend([2, 0, 0, 0, 0, from[3], 8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
                frame.extend([0; 20]);
                frame
            }
        };
        if random.below(5) == 0 {
            bytes.splice(12..12, [0x81, 0, 0, 1 + random.below(3) as u8]);
        }
        let mut packet = Sample::new(ts_ns, bytes);
        if random.below(20) == 0 {
            packet.bytes.truncate(random.below(40) as usize);
        }
        packet.interface = ["eth7", "eth8"][random.below(2) as usize];
        packet.flags = random.below(3) as u32;
        packets.push(packet);
    }
    packets
}
