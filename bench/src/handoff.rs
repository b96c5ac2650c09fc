//! One ring between two processes, one CPU each.
//!
//! The producer process copies frames from 256 hot sources (a NIC's receive buffers) into the ring
//! and publishes per batch; when the ring is full it waits instead of dropping, so that the figure
//! is the lossless rate. The reader process takes a batch, reads of each packet what a forwarder
//! reads (the record header and the packet's first cache line) and releases the batch.

use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::{Consumer, Producer, Region};

use crate::memif;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// Bytes of the record area. The ring lives in the producer's cache; see [`vnplug_ring::layout`].
const CAPACITY: u64 = 1 << 19;
/// Packets per publish.
const PUBLISH: usize = 64;
/// Packets per release.
const RELEASE: usize = 64;
/// Different source frames.
const FRAMES: usize = 256;
/// CPU of the reader; the producer has the other one.
const READER_CPU: usize = 0;
const PRODUCER_CPU: usize = 1;

/// What the reader does with a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Reads the header and the first cache line where they lie.
    InPlace,
    /// Copies all bytes to private memory, and reads the header.
    CopiedOut,
}

/// Our hand-off and memif's, in turns.
pub(crate) fn against_memif(plan: &Plan, len: usize, reading: Reading) -> Result<Vec<Figure>> {
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for round in 1..=plan.rounds {
        let our_rate = measure(plan.time, len, CAPACITY, reading)?;
        let their_rate = memif::measure(plan, len, 1)?;
        eprintln!("  round {round}: ours {our_rate:.2}, memif {their_rate:.2} Mpps");
        ours.push(our_rate);
        theirs.push(their_rate);
    }
    let (name, reads) = match reading {
        Reading::InPlace => ("handoff", "reads header and first 64 B in place"),
        Reading::CopiedOut => (
            "handoff-copied",
            "reads the header and copies all bytes out",
        ),
    };
    Ok(vec![Figure {
        name: format!("{name}-{len}"),
        unit: "Mpps",
        ours,
        peer: Some((memif::NAME.to_owned(), theirs)),
        note: format!(
            "received, nothing lost, two processes, one CPU each. Ours: producer copies {len} B \
             from one of {FRAMES} hot frames and writes a 32 B header, publishes per {PUBLISH}; \
             reader {reads}, releases per {RELEASE}; ring {CAPACITY} B. {}",
            memif::NOTE
        ),
    }])
}

/// Our hand-off by size of the ring.
pub(crate) fn sizes(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for len in [60, 1514] {
        for shift in [14, 16, 18, 20, 22, 24] {
            let mut ours = Samples::default();
            for _ in 0..plan.rounds {
                ours.push(measure(plan.time / 4, len, 1 << shift, Reading::InPlace)?);
            }
            figures.push(Figure {
                name: format!("handoff-{len}-{}K", (1 << shift) / 1024),
                unit: "Mpps",
                ours,
                peer: None,
                note: format!("as handoff-{len} with a record area of {} B", 1 << shift),
            });
        }
    }
    Ok(figures)
}

/// Packets received per microsecond.
fn measure(time: Duration, len: usize, capacity: u64, reading: Reading) -> Result<f64> {
    let size = ring_size(capacity);
    let memory = sys::memory(size)?;
    let region = sys::map(&memory, size)?;
    let words = [u64::try_from(memory.as_raw_fd())?, len as u64, capacity];
    let child = Command::new(std::env::current_exe()?)
        .args(["child", "handoff-producer"])
        .args(words.map(|word| word.to_string()))
        .spawn()?;
    let _child = Killed(child);
    std::thread::scope(|scope| {
        let reader =
            scope.spawn(|| consume(time, region, reading).map_err(|error| error.to_string()));
        Ok(reader.join().map_err(|_| "the reader panicked")??)
    })
}

/// The reader: packets received per microsecond.
fn consume(time: Duration, region: Region, reading: Reading) -> Result<f64> {
    sys::pin(READER_CPU)?;
    let patience = Instant::now();
    let mut consumer = loop {
        match Consumer::attach(region.clone()) {
            Ok(consumer) => break consumer,
            Err(error) if patience.elapsed().as_secs() >= 5 => return Err(error.into()),
            Err(_) => std::thread::yield_now(),
        }
    };
    let warm = time / 8;
    let mut begin = Instant::now();
    let (mut warming, mut before, mut sum) = (true, 0, 0_u64);
    let mut private = [0_u8; 2048];
    loop {
        for _ in 0..256 {
            let mut taken = false;
            for packet in consumer.batch(RELEASE) {
                let packet = packet?;
                taken = true;
                sum = sum.wrapping_add(packet.meta.ts_ns);
                match reading {
                    Reading::InPlace => sum ^= first_line(packet.bytes),
                    Reading::CopiedOut => {
                        private[..packet.bytes.len()].copy_from_slice(packet.bytes);
                        std::hint::black_box(&private);
                    }
                }
            }
            consumer.release();
            if !taken {
                std::hint::spin_loop();
            }
        }
        let elapsed = begin.elapsed();
        if warming && elapsed >= warm {
            (warming, before, begin) = (false, consumer.taken(), Instant::now());
        } else if !warming && elapsed >= time {
            std::hint::black_box(sum);
            let packets = consumer.taken().wrapping_sub(before);
            return Ok(packets as f64 / elapsed.as_secs_f64() / 1e6);
        }
    }
}

/// Reads the first cache line of the packet's bytes.
#[inline]
fn first_line(bytes: &[u8]) -> u64 {
    let (words, _) = bytes[..bytes.len().min(64)].as_chunks::<8>();
    words
        .iter()
        .fold(0, |sum, word| sum ^ u64::from_ne_bytes(*word))
}

/// The producer's process: fills the ring until it is killed.
pub(crate) fn producer(words: &[String]) -> Result<()> {
    let [fd, len, capacity] = words else {
        return Err("FD LEN CAPACITY".into());
    };
    let (fd, len): (i32, usize) = (fd.parse()?, len.parse()?);
    let capacity: u64 = capacity.parse()?;
    sys::pin(PRODUCER_CPU)?;
    let path = format!("/proc/self/fd/{fd}");
    let memory = std::fs::File::options().read(true).write(true).open(path)?;
    let region = sys::map(&memory, ring_size(capacity))?;
    let geometry = Geometry {
        capacity,
        snaplen: 2048,
        link_type: 1,
        epoch: 0x100,
        port: 0,
        queue: 0,
    };
    let mut producer = Producer::create(region, geometry)?;
    let frames: Vec<Vec<u8>> = (0..FRAMES).map(|frame| vec![frame as u8; len]).collect();
    let mut meta = Meta {
        wire_len: u32::try_from(len)?,
        ..Meta::default()
    };
    loop {
        for chunk in frames.chunks(PUBLISH) {
            for frame in chunk {
                meta.ts_ns += 1;
                meta.flow_hash = meta.flow_hash.wrapping_add(0x9e37_79b9);
                // A full ring is waited for; the reader gets what is there.
                while !producer.push(&meta, frame)? {
                    producer.publish();
                    std::hint::spin_loop();
                }
            }
            producer.publish();
        }
    }
}

/// A child that does not outlive its row.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
