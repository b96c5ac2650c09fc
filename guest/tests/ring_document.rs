//! The readers in `docs/ring-format.md`, compiled as they stand there, read a real ring and a real
//! group while the producer writes them: wraps, pads, losses, sleeping and the end.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vnplug_ring::arena::arena_size;
use vnplug_ring::layout::{Geometry, Life, Meta, ring_size};
use vnplug_ring::{Arena, ArenaGeometry, Bell, Producer};
use vnplug_testing::Deadline;

const PACKETS: u64 = 4_000;
const OFFSET: u64 = 8192;
const GEOMETRY: Geometry = Geometry {
    capacity: 4096,
    snaplen: 1000,
    link_type: 1,
    epoch: 0x00c0_ffee_0000_0100,
    port: 7,
    queue: 3,
};

/// A block of C in the document: the first is the reader of a ring, the second that of a group.
fn reader_in_the_document(number: usize) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ring-format.md");
    let text = std::fs::read_to_string(path).expect("the document");
    let rest = text
        .split("\n```c\n")
        .nth(number)
        .expect("the document has such a block of C");
    rest.split_once("\n```\n").expect("its end").0.to_owned() + "\n"
}

struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("our own directory");
    }
}

fn compile(dir: &Path, number: usize) -> PathBuf {
    let source = dir.join("reader.c");
    std::fs::write(&source, reader_in_the_document(number)).expect("our own directory");
    let program = dir.join("reader");
    let flags = "-std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -pedantic";
    let status = Command::new("cc")
        .args(flags.split(' '))
        .arg("-o")
        .args([&program, &source])
        .status()
        .expect("a C compiler");
    assert!(status.success());
    program
}

/// What the reader prints of a packet.
fn line(meta: &Meta, bytes: &[u8]) -> String {
    let sum = bytes.iter().fold(0_u32, |sum, &byte| {
        sum.wrapping_mul(31).wrapping_add(byte.into())
    });
    format!(
        "{} {} {} {} {:08x} {:04x} {} {} {} {sum:08x}",
        meta.ts_ns,
        bytes.len(),
        meta.wire_len,
        meta.lost,
        meta.flow_hash,
        meta.flags,
        meta.vlan_tci,
        meta.source,
        meta.queue
    )
}

/// The producer's side: what it would do in the daemon, with the pipe's write end.
struct Host {
    producer: Producer,
    bell: OwnedFd,
    start: Instant,
}

impl Host {
    fn publish(&mut self) {
        self.producer.publish();
        if self.producer.bell(self.start.elapsed().as_micros() as u64) == Bell::Ring {
            self.ring();
        }
    }

    fn ring(&self) {
        File::from(self.bell.try_clone().expect("a descriptor"))
            .write_all(&[1])
            .expect("the reader lives");
    }

    /// Waits until everything was read; keeps the reader's time meanwhile.
    fn drain(&mut self) {
        let deadline = Deadline::new("the reader reads");
        while self.producer.used() > 0 {
            deadline.check();
            self.publish();
            std::thread::yield_now();
        }
    }
}

fn dir(what: &str) -> Dir {
    let name = format!("vnplug-{what}-document-{}", std::process::id());
    let dir = Dir(std::env::temp_dir().join(name));
    std::fs::create_dir_all(&dir.0).expect("a directory of our own");
    dir
}

#[test]
fn the_documents_reader_of_a_group_sees_every_packet_or_counts_it() {
    const ARENA: u64 = 1 << 14;
    let dir = dir("group");
    let program = compile(&dir.0, 2);
    let place = OFFSET + ring_size(GEOMETRY.capacity);
    let memory = memfd_create("group", MemfdFlags::CLOEXEC).unwrap();
    let len = place + arena_size(ARENA);
    ftruncate(&memory, len).unwrap();
    let region = vnplug::map_memory(memory.as_fd(), len).unwrap();
    let part = |from, len| region.part(from, len).unwrap();
    let geometry = Geometry {
        snaplen: 300,
        ..GEOMETRY
    };
    let mut producer =
        Producer::create_descriptors(part(OFFSET, place - OFFSET), geometry).unwrap();
    let arena = ArenaGeometry {
        capacity: ARENA,
        snaplen: 1000,
        epoch: 0x700,
        queue: 3,
    };
    let mut arena = Arena::create(part(place, len - place), arena).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let mut reader = Command::new(program)
        .args([&path, &OFFSET.to_string(), &path, &place.to_string()])
        .stdout(Stdio::from(File::create(dir.0.join("out")).unwrap()))
        .spawn()
        .unwrap();
    let deadline = Deadline::new("the reader reads");
    let mut expected = Vec::new();
    for number in 0..PACKETS {
        let bytes: Vec<u8> = (0..number * 37 % 1001)
            .map(|at| (number ^ (at * 7)) as u8)
            .collect();
        let meta = Meta {
            ts_ns: number,
            wire_len: bytes.len() as u32 + 4,
            ..Meta::default()
        };
        let cut = &bytes[..bytes.len().min(300)];
        expected.push((meta, cut.to_owned()));
        if producer.reserve_descriptor().unwrap() {
            let placed = arena.place(&meta, &bytes);
            producer.describe(placed, false);
        }
        if number % 5 == 0 {
            producer.publish();
        }
        // Half of the time the reader is waited for, else it would lose almost all.
        while number % 64 < 32 && producer.used() > 0 {
            deadline.check();
            producer.publish();
            std::thread::yield_now();
        }
    }
    producer.finish(Life::Ended);
    assert!(reader.wait().unwrap().success());
    let text = std::fs::read_to_string(dir.0.join("out")).unwrap();
    let (mut next, mut received) = (0, 0);
    for found in text.lines() {
        if let Some(lost) = found.strip_prefix("lost ") {
            assert_eq!(received + lost.parse::<u64>().unwrap(), PACKETS);
            assert!(received > PACKETS / 4, "{received} of {PACKETS}");
            return;
        }
        let mut words = found.split(' ');
        let lost: u64 = words.nth(3).unwrap().parse().unwrap();
        next += lost;
        let (mut meta, bytes) = expected[next as usize].clone();
        meta.lost = lost as u32;
        assert_eq!(found, line(&meta, &bytes), "packet {next}");
        (next, received) = (next + 1, received + 1);
    }
    panic!("the reader did not say what it lost");
}

#[test]
fn the_documents_reader_sees_every_packet_and_every_loss() {
    let dir = dir("ring");
    let program = compile(&dir.0, 1);

    let memory = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
    let len = OFFSET + ring_size(GEOMETRY.capacity);
    ftruncate(&memory, len).unwrap();
    let region = vnplug::map_memory(memory.as_fd(), len).unwrap();
    let part = region.part(OFFSET, len - OFFSET).unwrap();
    let producer = Producer::create(part, GEOMETRY).unwrap();
    let (doorbell, bell) = std::io::pipe().unwrap();

    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let reader = Command::new(program)
        .args([&path, &OFFSET.to_string()])
        .stdin(Stdio::from(OwnedFd::from(doorbell)))
        .stdout(Stdio::from(File::create(dir.0.join("out")).unwrap()))
        .spawn();
    let mut reader = reader.unwrap();

    let mut host = Host {
        producer,
        bell: bell.into(),
        start: Instant::now(),
    };
    let mut expected = Vec::new();
    let (mut lost, mut lost_in_all, mut dice) = (0, 0_u64, 0x9e37_79b9_7f4a_7c15_u64);
    for number in 0..PACKETS {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        let bytes: Vec<u8> = (0..dice % 1001)
            .map(|at| (number ^ (at * 7)) as u8)
            .collect();
        let mut meta = Meta {
            ts_ns: 1_700_000_000_000_000_000 + number,
            wire_len: bytes.len() as u32 + 4,
            flow_hash: dice as u32,
            lost: 0,
            flags: number as u16 & 0x3f,
            vlan_tci: (dice >> 40) as u16,
            source: 2,
            queue: 3,
            ..Meta::default()
        };
        if host.producer.push(&meta, &bytes).unwrap() {
            meta.lost = std::mem::take(&mut lost);
            expected.push(line(&meta, &bytes));
        } else {
            (lost, lost_in_all) = (lost + 1, lost_in_all + 1);
        }
        if dice >> 62 == 0 {
            host.publish();
        }
        // Without this the reader would see a small part of the packets.
        if dice >> 50 & 3 == 0 {
            host.publish();
            host.drain();
        }
    }
    host.drain();
    host.producer.finish(Life::Ended);
    host.ring();

    assert!(reader.wait().unwrap().success());
    expected.push("life 1".to_owned());
    let text = std::fs::read_to_string(dir.0.join("out")).unwrap();
    let found: Vec<&str> = text.lines().collect();
    assert!(
        lost_in_all > 100 && expected.len() > 2_000,
        "{lost_in_all} lost"
    );
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "packet {at}");
    }
    assert_eq!(found.len(), expected.len());
}
