//! Whole files through the source, and other people's tools as judges.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use vnplug_frame::Frame;
use vnplug_frame::witness::{Protocol, seed};
use vnplug_path::source::generator::{Gen, GenConfig, Sizes};
use vnplug_path::source::pcap::{PcapConfig, PcapFile, Repeat, Speed};
use vnplug_path::source::{Queue, Received, SourceError, wait};

use crate::golden::{self, Golden, Order};
use crate::{Random, read_out};

/// A directory that is removed again.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vnplug-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a test directory");
        Self(path)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("a test file");
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open(path: &Path, pace: Speed, repeat: Repeat) -> Result<Box<dyn Queue>, SourceError> {
    let config = PcapConfig {
        path: path.to_owned(),
        pace,
        repeat,
    };
    PcapFile::open(&config).map(|mut queues| queues.remove(0))
}

/// Timestamps until the end, an error, or `limit` frames.
fn play(queue: &mut dyn Queue, limit: usize) -> (Vec<u64>, Result<Received, SourceError>) {
    let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
    let mut times = Vec::new();
    loop {
        match queue.receive(&mut |frames| times.extend(frames.iter().map(|frame| frame.ts_ns))) {
            Ok(Received::Frames(_)) if times.len() < limit => {}
            Ok(Received::Nothing) => wait(queue, reader.as_fd(), Some(Duration::from_millis(200))),
            end => return (times, end),
        }
    }
}

fn three_packets(seconds: [u32; 3]) -> Vec<u8> {
    let order = Order(false);
    let mut file = order.legacy_header(0xa1b2_c3d4, (2, 4), 1);
    for second in seconds {
        file.extend(order.u32s(&[second, 0, 16, 16]));
        file.extend(*b"\0\0\0\0\0\0\0\0\0\0\0\0\x81\0\x20\x05");
    }
    file
}

#[test]
fn packets_before_the_damage_are_handed_over_first() {
    let dir = Dir::new("damage");
    let mut bytes = three_packets([1, 2, 3]);
    bytes.pop();
    let mut queue = open(&dir.file("cut", &bytes), Speed::Top, Repeat::Forever).unwrap();
    let (times, end) = play(queue.as_mut(), 100);
    assert_eq!(times.len(), 2);
    let error = end.unwrap_err().to_string();
    assert!(error.contains("byte 88: truncated"), "{error}");
    assert_eq!((queue.counters().seen, queue.state()), (2, "failed"));
    assert!(queue.receive(&mut |_| ()).is_err(), "it stays failed");
}

#[test]
fn vlan_tags_are_seen_in_the_bytes() {
    let dir = Dir::new("vlan");
    let path = dir.file("file", &three_packets([1, 2, 3]));
    let mut queue = open(&path, Speed::Top, Repeat::Once).unwrap();
    queue
        .receive(&mut |frames| assert!(frames.iter().all(|f| f.vlan_tci == 0x2005)))
        .unwrap();
}

#[test]
fn repeated_rounds_have_monotone_times() {
    let dir = Dir::new("rounds");
    let path = dir.file("file", &three_packets([10, 11, 12]));
    let mut queue = open(&path, Speed::Top, Repeat::Times(3)).unwrap();
    let (times, end) = play(queue.as_mut(), 100);
    let seconds: Vec<u64> = times.iter().map(|ns| ns / 1_000_000_000).collect();
    assert_eq!(seconds, [10, 11, 12, 13, 14, 15, 16, 17, 18]);
    assert_eq!(end.unwrap(), Received::End);
    let mut queue = open(&path, Speed::Top, Repeat::Forever).unwrap();
    assert_eq!(play(queue.as_mut(), 3000).0.len(), 3000);
    let empty = dir.file("empty", &three_packets([0; 3])[..24]);
    let mut queue = open(&empty, Speed::Top, Repeat::Forever).unwrap();
    assert_eq!(play(queue.as_mut(), 1).1.unwrap(), Received::End);
}

#[test]
fn a_day_between_packets_can_be_waited_for_and_interrupted() {
    let dir = Dir::new("day");
    let path = dir.file("file", &three_packets([0, 86_400, 86_401]));
    let mut queue = open(&path, Speed::Recorded, Repeat::Once).unwrap();
    assert_eq!(queue.receive(&mut |_| ()).unwrap(), Received::Frames(1));
    assert_eq!(
        queue.receive(&mut |_| unreachable!()).unwrap(),
        Received::Nothing
    );
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let start = Instant::now();
    wait(&mut *queue, reader.as_fd(), Some(Duration::from_millis(20)));
    assert!((20..60_000).contains(&start.elapsed().as_millis()));
    rustix::io::write(&writer, b"x").unwrap();
    wait(&mut *queue, reader.as_fd(), None);
    assert!(start.elapsed().as_secs() < 60);
    // A million times as fast, a day is 86 ms.
    let mut queue = open(&path, Speed::Times(1e6), Repeat::Once).unwrap();
    let start = Instant::now();
    assert_eq!(play(queue.as_mut(), 100).0.len(), 3);
    assert!((86..60_000).contains(&start.elapsed().as_millis()));
}

#[test]
fn strange_inputs_are_refused_or_bounded() {
    let dir = Dir::new("strange");
    for (path, word) in [
        (dir.0.clone(), "is a directory"),
        (PathBuf::from("/dev/zero"), "is a device"),
        (dir.0.join("absent"), "No such file"),
    ] {
        let error = open(&path, Speed::Top, Repeat::Once)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(word), "{error}");
    }
    let path = dir.file("sparse", &three_packets([1, 2, 3]));
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    // Zeros are packets of no bytes: they come for ever, in batches.
    let mut queue = open(&path, Speed::Top, Repeat::Once).unwrap();
    assert!(play(queue.as_mut(), 100_000).0.len() >= 100_000);
    for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(open(&path, Speed::Times(speed), Repeat::Once).is_err());
    }
    assert!(open(&path, Speed::Top, Repeat::Times(0)).is_err());
}

#[test]
fn growing_and_deleted_files_are_read_as_far_as_they_are() {
    let dir = Dir::new("growing");
    let bytes = three_packets([1, 2, 3]);
    let path = dir.file("file", &bytes[..24]);
    let mut queue = open(&path, Speed::Top, Repeat::Once).unwrap();
    File::options()
        .append(true)
        .open(&path)
        .unwrap()
        .write_all(&bytes[24..])
        .unwrap();
    fs::remove_file(&path).unwrap();
    let (times, end) = play(queue.as_mut(), 100);
    assert_eq!((times.len(), end.unwrap()), (3, Received::End));
}

#[test]
fn a_fifo_is_waited_for_and_plays_once() {
    let dir = Dir::new("fifo");
    let path = dir.0.join("fifo");
    let made = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    assert!(open(&path, Speed::Top, Repeat::Forever).is_err());
    let mut queue = open(&path, Speed::Top, Repeat::Once).unwrap();
    assert_eq!(
        queue.receive(&mut |_| unreachable!()).unwrap(),
        Received::Nothing
    );
    assert_eq!(queue.state(), "waiting");
    let bytes = three_packets([1, 2, 3]);
    let writer = std::thread::spawn(move || {
        let mut fifo = File::options().write(true).open(path).unwrap();
        for part in bytes.chunks(7) {
            fifo.write_all(part).unwrap();
        }
    });
    let (times, end) = play(queue.as_mut(), 100);
    writer.join().unwrap();
    assert_eq!((times.len(), end.unwrap()), (3, Received::End));
}

/// tcpdump's libpcap as the judge: what it reads to the end, we read to the end, with as many
/// packets.
#[test]
fn packet_counts_agree_with_libpcap() {
    let dir = Dir::new("libpcap");
    let mut random = Random(seed("counts"));
    let mut accepted = 0;
    for golden in golden::all() {
        let file = golden.file();
        let mutants: Vec<_> = (0..25).map(|_| random.mutant(&file)).collect();
        for bytes in std::iter::once(file).chain(mutants) {
            let path = dir.file("file", &bytes);
            let (packets, result) = read_out(&bytes, usize::MAX);
            let counted = Command::new("tcpdump")
                .arg("-r")
                .arg(&path)
                .arg("--count")
                .output();
            let counted = counted.expect("tcpdump is installed");
            let said = String::from_utf8_lossy(&counted.stdout);
            let other_link = result
                .as_ref()
                .is_err_and(|bad| bad.what.contains("link type"));
            if !counted.status.success() || other_link {
                continue;
            }
            accepted += 1;
            let count: usize = said.split_whitespace().next().unwrap().parse().unwrap();
            assert_eq!((packets.len(), result), (count, Ok(())), "{}", golden.name);
        }
    }
    assert!(accepted > 30, "{accepted}");
}

/// Wireshark's tools as writers and judge: every format they write, read alike.
#[test]
fn lengths_and_times_agree_with_tshark() {
    let dir = Dir::new("tshark");
    let input = dir.file("in.pcap", &Golden::file(&golden::all()[1]));
    for format in ["pcap", "nsecpcap", "modpcap", "pcapng"] {
        let path = dir.0.join(format);
        let written = Command::new("editcap")
            .args(["-F", format])
            .arg(&input)
            .arg(&path)
            .status();
        assert!(written.expect("editcap is installed").success());
        let fields = [
            "-e",
            "frame.cap_len",
            "-e",
            "frame.len",
            "-e",
            "frame.time_epoch",
        ];
        let mut tshark = Command::new("tshark");
        tshark
            .arg("-r")
            .arg(&path)
            .args(["-T", "fields"])
            .args(fields);
        let told = tshark.output().expect("tshark is installed");
        let told = String::from_utf8(told.stdout).unwrap();
        let (packets, result) = read_out(&fs::read(&path).unwrap(), usize::MAX);
        assert_eq!(result, Ok(()));
        let ours: String = packets
            .iter()
            .map(|p| {
                let (second, nanos) = (p.ts_ns / 1_000_000_000, p.ts_ns % 1_000_000_000);
                format!("{}\t{}\t{second}.{nanos:09}\n", p.bytes.len(), p.wire_len)
            })
            .collect();
        assert_eq!(ours, told, "{format}");
    }
}

/// The generator's frames are flawless to a dissector, checksums included.
#[test]
fn generated_frames_are_well_formed_to_tshark() {
    let dir = Dir::new("witness");
    let order = Order(false);
    let mut file = order.legacy_header(0xa1b2_c3d4, (2, 4), 1);
    let mut count = 0;
    for (protocols, sizes) in [
        (Protocol::ALL.to_vec(), Sizes::Range(108, 1514)),
        (vec![Protocol::Udp4], Sizes::Fixed(64)),
    ] {
        let config = GenConfig {
            sizes,
            protocols,
            flows: 600,
            vlan_tci: Some(7),
            count: Some(600),
            ..GenConfig::default()
        };
        let mut queues = Gen::open(&config).unwrap();
        let mut write = |frames: &[Frame<'_>]| {
            for frame in frames {
                file.extend(order.u32s(&[1, 0, frame.wire_len, frame.wire_len]));
                file.extend(frame.bytes);
                count += 1;
            }
        };
        while queues[0].receive(&mut write).unwrap() != Received::End {}
    }
    let path = dir.file("file", &file);
    let mut tshark = Command::new("tshark");
    tshark
        .arg("-r")
        .arg(&path)
        .args(["-T", "fields", "-e", "ip.checksum.status"]);
    for protocol in ["ip", "udp", "tcp"] {
        tshark.args(["-o", &format!("{protocol}.check_checksum:TRUE")]);
    }
    for status in [
        "udp.checksum.status",
        "tcp.checksum.status",
        "icmp.checksum.status",
    ] {
        tshark.args(["-e", status]);
    }
    tshark.args([
        "-e",
        "icmpv6.checksum.status",
        "-e",
        "_ws.malformed",
        "-e",
        "_ws.short",
    ]);
    let told = String::from_utf8(tshark.output().expect("tshark is installed").stdout).unwrap();
    // 1 is good, 3 is "none" (UDP over IPv4 without a checksum), 0 would be bad.
    assert_eq!(told.lines().count(), count);
    let known = ["1\t3\t\t\t\t\t", "1\t\t1\t\t\t\t", "1\t\t\t1\t\t\t"];
    let known_v6 = ["\t1\t\t\t\t\t", "\t\t1\t\t\t\t", "\t\t\t\t1\t\t"];
    let kinds: BTreeSet<&str> = told.lines().collect();
    assert_eq!(kinds, known.into_iter().chain(known_v6).collect());
}
