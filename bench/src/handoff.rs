//! One ring between two processes, one CPU each.
//!
//! The producer process copies frames from 256 hot sources (a NIC's receive buffers) into the ring
//! and publishes per batch; when the ring is full it waits instead of dropping, so that the figure
//! is the lossless rate. The reader process takes a batch, reads of each packet what a forwarder
//! reads (the record header and the packet's first cache line) and releases the batch.

use std::fmt;
use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::{Consumer, Producer, Region};

use crate::capture::SIZES;
use crate::limit::{self, Bare};
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::{memif, sys, vhost};

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
/// Bytes of a frame of the mix, on average.
const IMIX_MEAN: usize = 358;

/// What the reader does with a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Reads the record's header.
    Header,
    /// Reads the header and the first cache line where they lie.
    InPlace,
    /// Copies all bytes to private memory, and reads the header.
    CopiedOut,
}

/// What passes: frames of one length, or a mix.
#[derive(Clone, Copy)]
pub(crate) enum Sizes {
    One(usize),
    /// Of 12 frames 7 of 60 bytes, 4 of 590 and 1 of 1514, mixed.
    Imix,
}

impl Sizes {
    /// Length of the nth frame.
    pub(crate) fn of(self, frame: usize) -> usize {
        match self {
            Self::One(len) => len,
            // 5 and 12 have no common divisor: every place of the mix comes once in 12 frames.
            Self::Imix => match frame * 5 % 12 {
                0..7 => 60,
                7..11 => 590,
                _ => 1514,
            },
        }
    }

    /// Bytes of a frame, on average.
    pub(crate) fn mean(self) -> usize {
        match self {
            Self::One(len) => len,
            Self::Imix => IMIX_MEAN,
        }
    }
}

/// As names of rows and the generator's options have it.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(len) => len.fmt(f),
            Self::Imix => f.write_str("imix"),
        }
    }
}

/// Our hand-off, memif's and vhost-user's, in turns.
pub(crate) fn against_dpdk(plan: &Plan, len: usize, reading: Reading) -> Result<Vec<Figure>> {
    let name = match reading {
        Reading::CopiedOut => format!("handoff-copied-{len}"),
        Reading::InPlace | Reading::Header => format!("handoff-{len}"),
    };
    in_turns(plan, len, reading, (&name, &format!("{name}-vhost")))
}

/// The same by frame size, for shorter times: DPDK needs seconds to start.
pub(crate) fn by_length(plan: &Plan) -> Result<Vec<Figure>> {
    let plan = plan.lasting(Duration::from_millis(500));
    let mut figures = Vec::new();
    for len in SIZES {
        let (memif, vhost) = (format!("memory-memif-{len}"), format!("memory-vhost-{len}"));
        figures.extend(in_turns(&plan, len, Reading::InPlace, (&memif, &vhost))?);
    }
    Ok(figures)
}

fn in_turns(
    plan: &Plan,
    len: usize,
    reading: Reading,
    (beside_memif, beside_vhost): (&str, &str),
) -> Result<Vec<Figure>> {
    let [mut ours, mut memif, mut vhost, mut limit] = [(); 4].map(|()| Samples::default());
    let sizes = Sizes::One(len);
    for round in 1..=plan.rounds {
        ours.push(measure(plan.time, sizes, CAPACITY, reading)?);
        limit.push(bare(plan.time, sizes, CAPACITY, reading)?);
        memif.push(memif::measure(plan, len, 1)?);
        vhost.push(vhost::measure(plan, len, 1)?);
        let [us, bare, one, two] = [&ours, &limit, &memif, &vhost].map(Samples::last);
        eprintln!(
            "  round {round}, {len} B: ours {us:.2}, bare transfer {bare:.2}, memif {one:.2}, \
             vhost-user {two:.2} Mpps"
        );
    }
    let reads = match reading {
        Reading::Header => "reads the header",
        Reading::InPlace => "reads header and first 64 B in place",
        Reading::CopiedOut => "reads the header and copies all bytes out",
    };
    let figure = |name: &str, peer: &str, samples, note| Figure {
        name: name.to_owned(),
        unit: "Mpps",
        ours: ours.clone(),
        peer: Some((peer.to_owned(), samples)),
        limit: Some(Limit::new(limit::BARE, limit.clone())),
        note: format!(
            "received, nothing lost, two processes, one CPU each. Ours: producer copies {len} B \
             from one of {FRAMES} hot frames and writes a 32 B header, publishes per {PUBLISH}; \
             reader {reads}, releases per {RELEASE}; ring {CAPACITY} B. {note} The limit: threads \
             that write and read the same bytes in slots of one size, without headers, checks and \
             lengths, with one counter per 64 packets each way.",
        ),
    };
    Ok(vec![
        figure(beside_memif, memif::NAME, memif, memif::NOTE),
        figure(beside_vhost, vhost::NAME, vhost, vhost::NOTE),
    ])
}

/// The limit of a hand-off, in half of its time.
fn bare(time: Duration, sizes: Sizes, capacity: u64, reading: Reading) -> Result<f64> {
    Bare::one(sizes, capacity, reading).mpps(time / 2)
}

/// Our hand-off of a mix of sizes, beside frames of the mix's mean length.
pub(crate) fn imix(plan: &Plan) -> Result<Vec<Figure>> {
    let [mut ours, mut mean, mut limit] = [(); 3].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        ours.push(measure(plan.time, Sizes::Imix, CAPACITY, Reading::InPlace)?);
        limit.push(bare(plan.time, Sizes::Imix, CAPACITY, Reading::InPlace)?);
        mean.push(measure(
            plan.time,
            Sizes::One(IMIX_MEAN),
            CAPACITY,
            Reading::InPlace,
        )?);
        let (mix, same) = (ours.last(), mean.last());
        eprintln!("  round {round}: mix {mix:.2}, frames of {IMIX_MEAN} B {same:.2} Mpps");
    }
    Ok(vec![Figure {
        name: "handoff-imix".into(),
        unit: "Mpps",
        ours,
        peer: Some((format!("ours, {IMIX_MEAN} bytes each"), mean)),
        limit: Some(Limit::new(limit::BARE, limit)),
        note:
            "as handoff-60; of 12 frames 7 have 60 B, 4 have 590 B and 1 has 1514 B, mixed; beside \
             them frames of the mean length, which the bare transfer has too. testpmd cannot send \
             such a mix without a further copy"
                .to_owned(),
    }])
}

/// Our hand-off by size of the ring.
pub(crate) fn sizes(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for len in [60, 1514] {
        for shift in [14, 16, 18, 20, 22, 24] {
            let (mut ours, mut limit) = (Samples::default(), Samples::default());
            let (time, sizes, capacity) = (plan.time / 4, Sizes::One(len), 1 << shift);
            for _ in 0..plan.rounds {
                ours.push(measure(time, sizes, capacity, Reading::InPlace)?);
                limit.push(bare(time, sizes, capacity, Reading::InPlace)?);
            }
            figures.push(Figure {
                name: format!("handoff-{len}-{}K", capacity / 1024),
                unit: "Mpps",
                ours,
                peer: None,
                limit: Some(Limit::new(limit::BARE, limit)),
                note: format!(
                    "as handoff-{len} with a record area of {capacity} B; the bare transfer has one \
                     counter per eighth of the ring at most"
                ),
            });
        }
    }
    Ok(figures)
}

/// Packets received per microsecond.
fn measure(time: Duration, sizes: Sizes, capacity: u64, reading: Reading) -> Result<f64> {
    let size = ring_size(capacity);
    let memory = sys::memory(size)?;
    let region = sys::map(&memory, size)?;
    // A length of 0 stands for the mix.
    let len = match sizes {
        Sizes::One(len) => len,
        Sizes::Imix => 0,
    };
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
    sys::pin(sys::cpu(READER_CPU))?;
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
                    Reading::Header => {}
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
    sys::pin(sys::cpu(PRODUCER_CPU))?;
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
    let sizes = if len == 0 {
        Sizes::Imix
    } else {
        Sizes::One(len)
    };
    let frames: Vec<Vec<u8>> = (0..FRAMES)
        .map(|frame| vec![frame as u8; sizes.of(frame)])
        .collect();
    let mut meta = Meta::default();
    loop {
        for chunk in frames.chunks(PUBLISH) {
            for frame in chunk {
                meta.wire_len = frame.len() as u32;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_is_seven_to_four_to_one() {
        let of = |len| {
            (0..12)
                .filter(|&frame| Sizes::Imix.of(frame) == len)
                .count()
        };
        assert_eq!([of(60), of(590), of(1514)], [7, 4, 1]);
        let sum: usize = (0..12).map(|frame| Sizes::Imix.of(frame)).sum();
        assert_eq!(sum.div_ceil(12), Sizes::Imix.mean());
    }
}
