//! The reader in `docs/ring-format.md`, compiled as it stands there, reads a real ring while the
//! producer writes it: wraps, pads, losses, sleeping and the end.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vnplug_ring::layout::{Geometry, Life, Meta, ring_size};
use vnplug_ring::{Bell, Producer};

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

/// The first block of C in the document.
fn reader_in_the_document() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ring-format.md");
    let text = std::fs::read_to_string(path).expect("the document");
    let (_, rest) = text
        .split_once("\n```c\n")
        .expect("the document has a block of C");
    rest.split_once("\n```\n").expect("its end").0.to_owned() + "\n"
}

struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("our own directory");
    }
}

fn compile(dir: &Path) -> PathBuf {
    let source = dir.join("reader.c");
    std::fs::write(&source, reader_in_the_document()).expect("our own directory");
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
        let deadline = Instant::now() + Duration::from_secs(120);
        while self.producer.used() > 0 {
            assert!(Instant::now() < deadline, "the reader does not read");
            self.publish();
            std::thread::yield_now();
        }
    }
}

#[test]
fn the_documents_reader_sees_every_packet_and_every_loss() {
    let name = format!("vnplug-ring-document-{}", std::process::id());
    let dir = Dir(std::env::temp_dir().join(name));
    std::fs::create_dir_all(&dir.0).unwrap();
    let program = compile(&dir.0);

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
