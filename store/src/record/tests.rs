//! The recorder on a disk that loses its power or fails, at every operation.

mod crashes;
mod faulty;
mod lanes;
mod losses;
mod restarts;
mod session;
mod trigger;
mod trouble;

use std::collections::BTreeSet;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vnplug::{Meta, Packet};
use vnplug_frame::capfile::write::{Interface, pcap, pcapng};

use super::writer::Writer;
use super::{Chunk, Ledger, Quota, Recorder, Settings, Status, Tally};
use crate::disk::{BLOCK, Buffer, Disk, Fault, Image, Real, Sim};
use crate::name::{Format, SegmentName};
use crate::read::Reader;
use vnplug_testing::TestDir;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const DIR: &str = "/rec";
const PER_CHUNK: u64 = 25;
const START_NS: u64 = 1_795_268_701_000_000_000;
/// Between two chunks of a [`Bench`]: losses of two are two.
const GAP_NS: u64 = 2_000_000_000;

/// A recorder on these disks, with eight buffers.
fn recorder(settings: &Settings, disks: Vec<(PathBuf, Box<dyn Disk>)>) -> Recorder {
    let buffers = (0..8).map(|id| Buffer::new(settings.chunk_bytes, id));
    Recorder::start(settings.clone(), disks, buffers.collect()).unwrap()
}

/// Disks in memory, each with a directory.
fn sims(sims: &[Sim]) -> Vec<(PathBuf, Box<dyn Disk>)> {
    let disks = sims.iter().enumerate();
    let disks = disks.map(|(lane, sim)| {
        let disk: Box<dyn Disk> = Box::new(sim.clone());
        (PathBuf::from(format!("/disk{lane}")), disk)
    });
    disks.collect()
}

/// A disk in memory that is the only one.
fn alone(sim: &Sim) -> Vec<(PathBuf, Box<dyn Disk>)> {
    sims(std::slice::from_ref(sim))
}

/// A directory of a real disk, and this disk.
fn real(place: &TestDir) -> (PathBuf, Box<dyn Disk>) {
    (place.0.clone(), Box::new(Real::new(true).0))
}

fn take(recorder: &mut Recorder, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let bytes = bytes(number);
        let meta = meta(number, bytes.len());
        let packet = Packet {
            meta,
            bytes: &bytes,
        };
        assert!(recorder.take(0, &packet, &mut || false));
    }
}

fn settings(format: Format) -> Settings {
    let interface = Interface {
        name: "host:lab".into(),
        link_type: 1,
        snaplen: 0,
        filter: "ip".into(),
    };
    Settings {
        format,
        sync_every: Duration::ZERO,
        ..Settings::new("t", vec![interface])
    }
}

fn meta(number: u64, len: usize) -> Meta {
    Meta {
        ts_ns: START_NS + number * 1000,
        wire_len: len as u32,
        flow_hash: 0,
        lost: 0,
        flags: 0,
        vlan_tci: 0,
        source: 0,
        queue: 0,
        ..Meta::default()
    }
}

/// Packet `number`: its number, and as many bytes after it as it says.
fn bytes(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(60 + number as usize * 37 % 900, number as u8 | 1);
    bytes
}

/// When packet `number` of a [`Bench`] was stamped.
fn stamp(number: u64) -> u64 {
    START_NS + number * 1000 + number / PER_CHUNK * GAP_NS
}

/// The books, and a writer on a disk in memory.
struct Bench {
    ledger: Arc<Ledger>,
    writer: Writer,
    pool: Receiver<Buffer>,
    format: Format,
    chunks: u64,
    /// What the books said before each operation of the disk.
    promises: Arc<Mutex<Vec<Status>>>,
}

impl Bench {
    fn new(sim: &Sim, settings: Settings) -> Self {
        let bench = Self::on(Box::new(sim.clone()), DIR.into(), settings);
        let (ledger, promises) = (Arc::clone(&bench.ledger), Arc::clone(&bench.promises));
        sim.watch(move || {
            let mut promises = promises.lock().unwrap();
            promises.push(ledger.status());
            promises.len() as u64 - 1
        });
        bench
    }

    fn on(disk: Box<dyn Disk>, dir: PathBuf, settings: Settings) -> Self {
        let ledger = Arc::new(Ledger::new("t", &[dir.display().to_string()]));
        let (give_back, pool) = channel();
        let format = settings.format;
        let books = Arc::clone(&ledger);
        Self {
            writer: Writer::new(disk, dir, 0, settings, books, give_back),
            ledger,
            pool,
            format,
            chunks: 0,
            promises: Arc::default(),
        }
    }

    fn chunk(&mut self, begins_segment: bool) {
        let mut buffer = self
            .pool
            .try_recv()
            .unwrap_or_else(|_| Buffer::new(16 * BLOCK, 0));
        let mut tally = Tally::default();
        let mut len = 0;
        for number in self.chunks * PER_CHUNK..(self.chunks + 1) * PER_CHUNK {
            let bytes = bytes(number);
            let mut meta = meta(number, bytes.len());
            meta.ts_ns = stamp(number);
            let packet = Packet {
                meta,
                bytes: &bytes,
            };
            len = match self.format {
                Format::Pcapng => pcapng::packet(&mut buffer, len, 0, &packet),
                Format::Pcap => pcap::packet(&mut buffer, len, &packet),
            }
            .unwrap();
            tally.add(0, meta.ts_ns, bytes.len(), 0);
        }
        if self.format == Format::Pcapng {
            len = pcapng::pad(&mut buffer, len, BLOCK);
        }
        self.ledger.filling(tally.first_ns);
        self.ledger.taken(self.chunks, &tally);
        self.writer.push(Chunk {
            buffer,
            from: 0,
            len,
            serial: self.chunks,
            tally,
            begins_segment,
            note: None,
        });
        self.chunks += 1;
    }

    /// Works as if time had passed, so that a writer that pauses tries again.
    fn work(&mut self, later: u64) {
        let now = Instant::now() + Duration::from_secs(later);
        self.writer.work(now);
    }
}

/// The numbers of all packets in the segments, in the order of the files; each is as it was sent.
fn packets(image: &Image) -> Vec<u64> {
    let (numbers, damage) = read(image);
    assert_eq!(damage, "");
    numbers
}

/// The same up to the damage that each segment may have at its end: classic pcap has nothing that tells
/// what was not finished.
fn packets_after_a_crash(image: &Image) -> Vec<u64> {
    read(image).0
}

fn read(image: &Image) -> (Vec<u64>, String) {
    let (mut numbers, mut damage) = (Vec::new(), String::new());
    for (path, content) in image {
        let name = path.file_name().unwrap().to_string_lossy();
        if SegmentName::parse(&name).is_none() {
            continue;
        }
        let stream = Box::new(Cursor::new(content.clone()));
        let mut reader = Reader::stream(stream, path.clone());
        while let Ok(Some(packet)) = reader.read() {
            let number = packet.bytes.first_chunk().copied().map(u64::from_le_bytes);
            let whole = number.filter(|&number| {
                packet.bytes.len() == 60 + (number % 900 * 37 % 900) as usize
                    && packet.bytes == bytes(number)
                    && (packet.ts_ns - START_NS) % GAP_NS == number * 1000
            });
            let Some(number) = whole else {
                damage += &format!("packet {number:?} in {} is not as sent", path.display());
                break;
            };
            numbers.push(number);
        }
    }
    (numbers, damage)
}

fn assert_no_duplicates(numbers: &[u64]) {
    let unique: BTreeSet<u64> = numbers.iter().copied().collect();
    assert_eq!(unique.len(), numbers.len(), "some packets are there twice");
}

#[test]
fn a_failed_sync_is_never_made_good_by_a_second() {
    let sim = Sim::new(1 << 30);
    let mut bench = Bench::new(&sim, settings(Format::Pcapng));
    bench.chunk(true);
    bench.work(0);
    let mark = bench.ledger.status().mark;
    assert_eq!(mark, PER_CHUNK);
    bench.chunk(false);
    // The write, then the sync.
    let fault = Fault {
        at: sim.calls() + 1,
        calls: 1,
        errno: EIO,
        short: 0,
    };
    sim.fail(Some(fault));
    bench.work(0);
    bench.chunk(false);
    bench.work(1);
    let status = bench.ledger.status();
    assert_eq!(status.lost_unknown, PER_CHUNK);
    assert_eq!(status.durable, 2 * PER_CHUNK);
    assert_eq!(status.lanes[0].poisoned, 1);
    let files = sim.files();
    let segments: Vec<&PathBuf> = files
        .keys()
        .filter(|path| path.extension().unwrap() == "pcapng")
        .collect();
    assert_eq!(segments.len(), 2, "{segments:?}");
    let second = String::from_utf8_lossy(&files[segments[1]]).into_owned();
    assert!(second.contains(
        "25 packets between 20261121T134503.000025000Z and 20261121T134503.000049000Z may be \
             missing in t-0000000000"
    ));
}

#[test]
fn a_full_disk_pauses_and_goes_on_when_there_is_room() {
    let sim = Sim::new(60 << 10);
    let mut bench = Bench::new(&sim, settings(Format::Pcapng));
    for chunk in 0..4 {
        bench.chunk(chunk == 0);
        bench.work(chunk);
    }
    let status = bench.ledger.status();
    assert!(
        status.lanes[0].paused.contains("No space left"),
        "{status:?}"
    );
    assert!(status.durable < status.taken && status.lost() == 0);
    let mut other = sim.clone();
    for name in other.list(Path::new(DIR)).unwrap() {
        other.remove(&Path::new(DIR).join(name.name)).unwrap();
    }
    bench.work(100);
    let status = bench.ledger.status();
    assert_eq!(status.lanes[0].paused, "");
    assert_eq!(status.durable, status.taken);
}

#[test]
fn a_quota_recycles_the_oldest() {
    let sim = Sim::new(1 << 30);
    let mut settings = settings(Format::Pcapng);
    settings.quota = Some(Quota::Bytes(100 << 10));
    let mut bench = Bench::new(&sim, settings);
    for _ in 0..40 {
        bench.chunk(true);
        bench.work(0);
    }
    bench.writer.end(Instant::now());
    let files = sim.files();
    let segments = files
        .iter()
        .filter(|(path, _)| path.extension().unwrap() == "pcapng");
    let used: usize = segments.map(|(_, content)| content.len()).sum();
    assert!(used <= 120 << 10, "{used}");
    let there = packets(&files);
    let expected: Vec<u64> = (40 * PER_CHUNK - there.len() as u64..40 * PER_CHUNK).collect();
    assert_eq!(there, expected, "the newest are there");
    assert!(bench.ledger.status().lanes[0].recycled > 20);
}

#[test]
fn segments_end_by_size_time_and_count() {
    type Change = fn(&mut Settings);
    let cases: [(&str, Change); 3] = [
        ("size", |settings| settings.rotate_bytes = 2 << 20),
        ("time", |settings| {
            settings.rotate_time = Duration::from_micros(2500)
        }),
        ("count", |settings| settings.rotate_packets = 3000),
    ];
    for (what, change) in cases {
        let sims = [Sim::new(1 << 30), Sim::new(1 << 30)];
        let mut settings = settings(Format::Pcapng);
        change(&mut settings);
        let buffers = (0..8)
            .map(|id| Buffer::new(settings.chunk_bytes, id))
            .collect();
        let disks = sims.iter().enumerate();
        let disks = disks.map(|(lane, sim)| {
            let disk: Box<dyn Disk> = Box::new(sim.clone());
            (PathBuf::from(format!("/disk{lane}")), disk)
        });
        let mut recorder = Recorder::start(settings, disks.collect(), buffers).unwrap();
        for number in 0..20_000 {
            let bytes = bytes(number);
            let meta = meta(number, bytes.len());
            assert!(recorder.take(
                0,
                &Packet {
                    meta,
                    bytes: &bytes
                },
                &mut || false
            ));
        }
        let status = recorder.finish();
        assert_eq!(
            (status.durable, status.mark, status.lost()),
            (20_000, 20_000, 0),
            "{what}"
        );
        let mut all = Vec::new();
        for sim in &sims {
            let files = sim.files();
            for (path, content) in files
                .iter()
                .filter(|(path, _)| path.extension().unwrap() == "pcapng")
            {
                let one = packets(&Image::from([(path.clone(), content.clone())]));
                match what {
                    "size" => assert!(content.len() <= 2 << 20 | 64 << 10, "{}", content.len()),
                    "time" => assert!(one.last().unwrap() - one[0] < 5000, "{one:?}"),
                    _ => assert!(one.len() <= 3000, "{}", one.len()),
                }
                all.extend(one);
            }
        }
        all.sort_unstable();
        assert_eq!(all, (0..20_000).collect::<Vec<u64>>(), "{what}");
    }
}

#[test]
fn segments_have_their_index() {
    for format in [Format::Pcapng, Format::Pcap] {
        let dir =
            std::env::temp_dir().join(format!("vnplug-record-{}-{format:?}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (disk, _) = crate::disk::Real::new(true);
        let settings = Settings {
            rotate_packets: 7000,
            ..settings(format)
        };
        let buffers = (0..8)
            .map(|id| Buffer::new(settings.chunk_bytes, id))
            .collect();
        let disks: Vec<(PathBuf, Box<dyn Disk>)> = vec![(dir.clone(), Box::new(disk))];
        let mut recorder = Recorder::start(settings, disks, buffers).unwrap();
        for number in 0..20_000 {
            let bytes = bytes(number);
            let meta = meta(number, bytes.len());
            assert!(recorder.take(
                0,
                &Packet {
                    meta,
                    bytes: &bytes
                },
                &mut || false
            ));
        }
        assert_eq!(recorder.finish().durable, 20_000);
        let files = std::fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let segments: Vec<PathBuf> = files
            .filter(|path| {
                SegmentName::parse(&path.file_name().unwrap().to_string_lossy()).is_some()
            })
            .collect();
        assert_eq!(segments.len(), 3);
        for segment in segments {
            // True would mean that something was missing.
            assert!(
                !crate::index::rebuild(&segment).unwrap(),
                "{}",
                segment.display()
            );
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
