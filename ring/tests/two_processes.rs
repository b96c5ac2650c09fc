//! A ring between two processes, one of which is killed at any moment.
//!
//! The test starts its own program again with the wanted role in the environment.
#![cfg(test)]
#![expect(unsafe_code, reason = "maps the memory that both processes share")]

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::{Consumer, Producer, Region};
use vnplug_testing::Deadline;

const ROLE: &str = "VNPLUG_RING_TEST_ROLE";
const CAPACITY: u64 = 1 << 16;
const SNAPLEN: usize = 256;
/// How often a process is killed per test.
const KILLS: u64 = 40;

#[test]
fn a_killed_reader_costs_nobody_else_and_its_successor_goes_on() {
    if role_is_ours("reader") {
        return;
    }
    let (fd, region) = memory();
    let mut producer = Producer::create(region.clone(), geometry(1)).unwrap();
    let (mut number, mut missing) = (0_u64, Vec::new());
    for kill in 0..KILLS {
        let reader = spawn("reader", "a_killed_reader", &fd);
        let deadline = Deadline::new("the reader reads");
        let end = Instant::now() + Duration::from_micros(20_000 + kill * 7919 % 10_000);
        // Every other one is killed after it has read, however late it is given a processor.
        let read = |region: &Region| Consumer::attach(region.clone()).unwrap().taken();
        let before = read(&region);
        while Instant::now() < end || (kill % 2 == 0 && read(&region) == before) {
            deadline.check();
            for _ in 0..32 {
                if !push(&mut producer, number) {
                    missing.push(number);
                }
                number += 1;
            }
            producer.publish();
        }
        kill_and_reap(reader);
        // The dead reader's ring fills; that is a counted loss and nothing else.
        while push(&mut producer, number) {
            number += 1;
        }
        missing.push(number);
        number += 1;
        producer.publish();
        assert_eq!(producer.dropped(), missing.len() as u64);
        assert_eq!(producer.written() + producer.dropped(), number);
    }
    let mut last = Consumer::attach(region).unwrap();
    assert!(last.taken() > 0, "the killed readers read");
    // What remains is the newest packets, whole and in order.
    let mut remaining = Vec::new();
    while let Some(packet) = last.next().unwrap() {
        check(packet.meta, packet.bytes);
        remaining.push(packet.meta.ts_ns);
    }
    let written: Vec<u64> = (0..number)
        .rev()
        .filter(|n| missing.binary_search(n).is_err())
        .collect();
    remaining.reverse();
    assert_eq!(remaining, written[..remaining.len()]);
}

#[test]
fn a_killed_producer_leaves_whole_records() {
    if role_is_ours("producer") {
        return;
    }
    let mut packets = 0_u64;
    for kill in 0..KILLS {
        let (fd, region) = memory();
        let child = spawn("producer", "a_killed_producer", &fd);
        let deadline = Deadline::new("the producer writes");
        let mut consumer = loop {
            match Consumer::attach(region.clone()) {
                Ok(consumer) => break consumer,
                Err(error) => deadline.check_seen(&error),
            }
        };
        let end = Instant::now() + Duration::from_micros(1_000 + kill * 7919 % 10_000);
        let mut expect = 0;
        let mut read = |consumer: &mut Consumer| {
            let mut count = 0;
            for packet in consumer.batch(64) {
                let packet = packet.expect("sound records");
                check(packet.meta, packet.bytes);
                expect += u64::from(packet.meta.lost);
                assert_eq!(packet.meta.ts_ns, expect);
                expect += 1;
                count += 1;
            }
            consumer.release();
            count
        };
        let enough = packets + 500;
        while Instant::now() < end || packets < enough {
            deadline.check();
            packets += read(&mut consumer);
        }
        kill_and_reap(child);
        while !consumer.is_drained() {
            packets += read(&mut consumer);
        }
    }
}

/// In a child: plays the role until it is killed.
fn role_is_ours(role: &str) -> bool {
    let Ok(words) = std::env::var(ROLE) else {
        return false;
    };
    let (name, fd) = words.split_once(' ').expect("role and descriptor");
    if name != role {
        return true;
    }
    // With the thread that started it: a test that fails leaves no process behind.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let path = format!("/proc/self/fd/{fd}");
    let memory = File::options().read(true).write(true).open(path).unwrap();
    let region = map(&memory.into());
    if name == "reader" {
        let mut consumer = Consumer::attach(region).unwrap();
        let mut next = None;
        loop {
            for packet in consumer.batch(7) {
                let packet = packet.expect("sound records");
                check(packet.meta, packet.bytes);
                let expect =
                    next.map_or(packet.meta.ts_ns, |n: u64| n + u64::from(packet.meta.lost));
                assert_eq!(packet.meta.ts_ns, expect);
                next = Some(expect + 1);
            }
            consumer.release();
        }
    }
    let mut producer = Producer::create(region, geometry(2)).unwrap();
    for number in 0.. {
        push(&mut producer, number);
        if number % 5 == 0 {
            producer.publish();
        }
    }
    true
}

fn push(producer: &mut Producer, number: u64) -> bool {
    let frame = [number as u8; SNAPLEN];
    let len = (number * 37 % SNAPLEN as u64) as usize;
    let meta = Meta {
        ts_ns: number,
        wire_len: len as u32,
        ..Meta::default()
    };
    producer
        .push(&meta, &frame[..len])
        .expect("a killed reader does not lie")
}

fn check(meta: Meta, bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, meta.ts_ns * 37 % SNAPLEN as u64);
    assert!(bytes.iter().all(|byte| *byte == meta.ts_ns as u8));
}

fn spawn(role: &str, test: &str, fd: &OwnedFd) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--test-threads=1", test])
        .env(ROLE, format!("{role} {}", fd.as_raw_fd()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn kill_and_reap(mut child: Child) {
    assert!(
        child.try_wait().unwrap().is_none(),
        "the child failed by itself"
    );
    child.kill().unwrap();
    child.wait().unwrap();
}

fn geometry(port: u32) -> Geometry {
    let snaplen = SNAPLEN as u32;
    Geometry {
        capacity: CAPACITY,
        snaplen,
        link_type: 1,
        epoch: 0x100,
        port,
        queue: 0,
    }
}

fn memory() -> (OwnedFd, Region) {
    // No CLOEXEC: the child gets the descriptor by its number.
    let fd = memfd_create("vnplug-ring-test", MemfdFlags::empty()).unwrap();
    ftruncate(&fd, ring_size(CAPACITY)).unwrap();
    let region = map(&fd);
    (fd, region)
}

fn map(fd: &OwnedFd) -> Region {
    struct Mapping(usize);
    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: mapped below with this length; the region that used it is gone.
            unsafe { munmap(self.0 as *mut _, ring_size(CAPACITY) as usize) }.unwrap();
        }
    }
    let len = ring_size(CAPACITY);
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            len as usize,
            flags,
            MapFlags::SHARED,
            fd,
            0,
        )
    };
    let base = NonNull::new(base.unwrap().cast::<u8>()).unwrap();
    let owner = Arc::new(Mapping(base.as_ptr().addr()));
    // SAFETY: `owner` keeps the mapping, page-aligned and `len` long, until the region is gone.
    unsafe { Region::from_raw(base, len, owner) }
}
