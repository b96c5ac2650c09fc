//! What the machine itself allows: bare transfers between two CPUs, copies, cache lines, memory.
//!
//! Rows measure the limit that fits them in the same rounds as ours and the peer's, and print how
//! much of it ours reaches; the row `limit` tells the machine's figures by themselves.

mod bare;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use vnplug_ring::Region;

use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

pub(crate) use bare::Bare;

/// The limit's name where packets pass from one CPU to the other.
pub(crate) const BARE: &str = "bare transfer of the same bytes";
/// The limit's name where a sender feeds a wire.
pub(crate) const SENDER: &str = "the sender, nobody listening";
/// The limit's name where rings come or go: see [`memory_s`].
pub(crate) const MEMORY: &str = "the kernel's time for the memory";

/// The limit's name where guests' frames are copied from buffer to buffer: see [`buffers_mpps`].
pub(crate) const BUFFERS: &str = "bare copies from buffer to buffer";

/// How long a cache line takes from one CPU to the other, how fast they calculate, and how fast one copies.
pub(crate) fn machine(plan: &Plan) -> Result<Vec<Figure>> {
    let time = plan.time / 4;
    let mut samples = [(); 4].map(|()| Samples::default());
    for _ in 0..plan.rounds {
        samples[0].push(line_ns(time)?);
        samples[1].push(step_ns(time)?);
        samples[2].push(copy_gbytes(time, 1 << 18)?);
        samples[3].push(copy_gbytes(time, 1 << 28)?);
    }
    let [line, step, cache, memory] = samples;
    let figure = |name: &str, unit, ours, note: &str| Figure {
        name: name.to_owned(),
        unit,
        ours,
        peer: None,
        limit: None,
        note: note.to_owned(),
    };
    Ok(vec![
        figure(
            "limit-line",
            "ns",
            line,
            "one way of a counter between two CPUs, half a round trip: the least that any wake-up or \
             hand-over costs",
        ),
        figure(
            "limit-cpu",
            "ns",
            step,
            "eight steps of xorshift64 that do not wait for each other, on two CPUs at once, the slower \
             one; if the highest is twice the lowest, something else uses the same core",
        ),
        figure(
            "limit-copy-cache",
            "GB/s",
            cache,
            "memcpy by one CPU, 256 KiB to 256 KiB, bytes copied",
        ),
        figure(
            "limit-copy-memory",
            "GB/s",
            memory,
            "memcpy by one CPU, 256 MiB to 256 MiB, bytes copied",
        ),
    ])
}

/// Nanoseconds of half a round trip.
pub(crate) fn line_ns(time: Duration) -> Result<f64> {
    let region = Region::heap(DATA);
    let echo = region.clone();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            // It answers also where it may not be: who asks waits for that.
            let pinned = sys::pin(sys::cpu(1)).map_err(|error| error.to_string());
            let mut seen = 0;
            while seen != u64::MAX {
                // Acquire and Release: pair with those of the other side.
                let now = echo.load_u64(WRITTEN, Ordering::Acquire);
                if now != seen {
                    seen = now;
                    echo.store_u64(TAKEN, seen, Ordering::Release);
                }
            }
            pinned
        });
        let asking = scope.spawn(move || {
            let pinned = sys::pin(sys::cpu(0)).map_err(|error| error.to_string());
            let (begin, mut trips) = (Instant::now(), 0_u64);
            while pinned.is_ok() && begin.elapsed() < time {
                for _ in 0..1024 {
                    trips += 1;
                    region.store_u64(WRITTEN, trips, Ordering::Release);
                    while region.load_u64(TAKEN, Ordering::Acquire) != trips {
                        std::hint::spin_loop();
                    }
                }
            }
            let half = begin.elapsed().as_nanos() as f64 / trips.max(1) as f64 / 2.0;
            region.store_u64(WRITTEN, u64::MAX, Ordering::Release);
            pinned.map(|()| half)
        });
        let half = asking.join().map_err(|_| "the asking thread panicked")?;
        other.join().map_err(|_| "the other thread panicked")??;
        Ok(half?)
    })
}

/// Nanoseconds of a fixed amount of work, done by both CPUs; of the slower one.
fn step_ns(time: Duration) -> Result<f64> {
    let work = |cpu: usize| {
        sys::pin(cpu).map_err(|error| error.to_string())?;
        let (begin, mut steps) = (Instant::now(), 0_u64);
        // Eight that do not wait for each other keep all units of a core busy.
        let mut states = [1_u64, 2, 3, 4, 5, 6, 7, 8];
        loop {
            for _ in 0..4096 {
                for state in &mut states {
                    *state ^= *state << 13;
                    *state ^= *state >> 7;
                    *state ^= *state << 17;
                }
            }
            std::hint::black_box(&states);
            steps += 4096;
            let elapsed = begin.elapsed();
            if elapsed >= time {
                return Ok::<_, String>(elapsed.as_nanos() as f64 / steps as f64);
            }
        }
    };
    std::thread::scope(|scope| {
        let both = [sys::cpu(0), sys::cpu(1)].map(|cpu| scope.spawn(move || work(cpu)));
        let mut slower = 0_f64;
        for one in both {
            let ns = one.join().map_err(|_| "a calculating thread panicked")??;
            slower = slower.max(ns);
        }
        Ok(slower)
    })
}

/// Gigabytes per second from one buffer to another.
fn copy_gbytes(time: Duration, len: usize) -> Result<f64> {
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            sys::pin(sys::cpu(0)).map_err(|error| error.to_string())?;
            let (from, mut to) = (vec![1_u8; len], vec![2_u8; len]);
            let (begin, mut bytes) = (Instant::now(), 0);
            loop {
                to.copy_from_slice(std::hint::black_box(&from));
                std::hint::black_box(&to);
                bytes += len;
                let elapsed = begin.elapsed();
                if elapsed >= time {
                    return Ok::<_, String>(bytes as f64 / elapsed.as_secs_f64() / 1e9);
                }
            }
        });
        Ok(copier.join().map_err(|_| "the copying thread panicked")??)
    })
}

/// Frames that one CPU copies per microsecond, from guests' buffers into guests' buffers and nothing else: two ways in
/// turns, [`BURST`] after each other, as many buffers for each end of a way as its ring has.
pub(crate) fn buffers_mpps(time: Duration, cpu: usize, len: usize, ring: usize) -> Result<f64> {
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            sys::pin(sys::cpu(cpu)).map_err(|error| error.to_string())?;
            let mut ways = [1_u8, 2].map(|fill| [(); 2].map(|()| vec![fill; ring * BUFFER]));
            let (begin, mut frames) = (Instant::now(), 0);
            loop {
                for [from, to] in &mut ways {
                    for frame in frames..frames + BURST {
                        let at = frame % ring * BUFFER;
                        to[at..at + len]
                            .copy_from_slice(&std::hint::black_box(&from)[at..at + len]);
                    }
                    std::hint::black_box(to);
                }
                frames += BURST;
                let elapsed = begin.elapsed();
                if elapsed >= time {
                    let both = (ways.len() * frames) as f64;
                    return Ok::<_, String>(both / elapsed.as_secs_f64() / 1e6);
                }
            }
        });
        Ok(copier.join().map_err(|_| "the copying thread panicked")??)
    })
}

/// Seconds in which the kernel gives `many` times so much shared memory, one after the other, and in
/// which it takes it back; measured with fewer.
pub(crate) fn memory_s(bytes: u64, many: usize) -> Result<(f64, f64)> {
    const AT_ONCE: u64 = 128 << 20;
    // Each is a descriptor as well.
    let few = (AT_ONCE / bytes).clamp(1, 512).min(many as u64);
    let begin = Instant::now();
    let mut all = Vec::with_capacity(few as usize);
    for _ in 0..few {
        let memory = sys::memory(bytes)?;
        fallocate(&memory, FallocateFlags::empty(), 0, bytes)?;
        all.push(memory);
    }
    let given = begin.elapsed().as_secs_f64();
    drop(all);
    let taken = begin.elapsed().as_secs_f64() - given;
    let scale = many as f64 / few as f64;
    Ok((given * scale, taken * scale))
}

/// Words of two sides on lines of their own.
const WRITTEN: u64 = 0;
const TAKEN: u64 = 256;
const DATA: u64 = 4096;
/// Frames that a forwarder takes at once.
const BURST: usize = 64;
/// Bytes from one buffer of DPDK to the next: its descriptor, headroom and 2 KiB.
const BUFFER: usize = 2432;
