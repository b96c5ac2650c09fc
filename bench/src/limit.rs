//! What the machine itself allows: bare transfers between two CPUs, and copies.
//!
//! The bare transfer moves the same bytes by the same two CPUs as a hand-off does, in slots of one
//! size, with nothing around them: no header to build or check, no lengths, no wrap-around, one
//! shared counter each way per batch. What a hand-off lacks to it is what our ring costs; what is
//! left is the machine's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug_ring::Region;

use crate::handoff::Reading;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// The peer's name in the table.
pub(crate) const NAME: &str = "bare transfer of the same bytes";

/// Packets per microsecond that two CPUs can pass on at most, in a ring of so many bytes.
pub(crate) fn bare(time: Duration, len: usize, capacity: u64, reading: Reading) -> Result<f64> {
    let size = DATA + capacity;
    let region = sys::map(&sys::memory(size)?, size)?;
    // As our records: 32 bytes of header, and whole words.
    let stride = (len + 32).next_multiple_of(8);
    let slots = capacity / stride as u64;
    let read = match reading {
        Reading::InPlace => stride.min(96),
        Reading::CopiedOut => stride,
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            sys::pin(sys::cpu(1)).map_err(|error| error.to_string())?;
            write(&region, stride, slots, &over);
            Ok::<_, String>(())
        });
        let reader = scope.spawn(|| {
            let packets =
                sys::pin(sys::cpu(0)).map(|()| take(&region, (stride, read), slots, time));
            over.store(true, Ordering::Relaxed);
            packets.map_err(|error| error.to_string())
        });
        let packets = reader.join().map_err(|_| "the reader panicked")?;
        writer.join().map_err(|_| "the writer panicked")??;
        Ok(packets?)
    })
}

fn write(region: &Region, stride: usize, slots: u64, over: &AtomicBool) {
    let frames: Vec<Vec<u8>> = (0..256).map(|frame| vec![frame as u8; stride]).collect();
    let (mut written, mut slot, mut taken) = (0_u64, 0, 0);
    loop {
        for frames in frames.chunks(BATCH as usize) {
            while written + BATCH - taken > slots {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                // Acquire: pairs with the Release in `take`; the slots are free.
                taken = region.load_u64(TAKEN, Ordering::Acquire);
            }
            for frame in frames {
                region.write(DATA + slot * stride as u64, frame);
                slot = if slot + 1 == slots { 0 } else { slot + 1 };
            }
            written += BATCH;
            // Release: pairs with the Acquire in `take`; the slots are filled.
            region.store_u64(WRITTEN, written, Ordering::Release);
        }
    }
}

fn take(region: &Region, (stride, read): (usize, usize), slots: u64, time: Duration) -> f64 {
    let mut private = vec![0_u8; read];
    let (mut taken, mut slot) = (0_u64, 0);
    let begin = Instant::now();
    loop {
        for _ in 0..256 {
            // Acquire: pairs with the Release in `write`.
            let written = region.load_u64(WRITTEN, Ordering::Acquire);
            while taken != written {
                region.read(DATA + slot * stride as u64, &mut private);
                std::hint::black_box(&private);
                slot = if slot + 1 == slots { 0 } else { slot + 1 };
                taken += 1;
            }
            // Release: pairs with the Acquire in `write`.
            region.store_u64(TAKEN, taken, Ordering::Release);
        }
        let elapsed = begin.elapsed();
        if elapsed >= time {
            return taken as f64 / elapsed.as_secs_f64() / 1e6;
        }
    }
}

/// How long a cache line takes from one CPU to the other, and how fast one CPU copies.
pub(crate) fn machine(plan: &Plan) -> Result<Vec<Figure>> {
    let time = plan.time / 4;
    let mut samples = [(); 3].map(|()| Samples::default());
    for _ in 0..plan.rounds {
        samples[0].push(line_ns(time)?);
        samples[1].push(copy_gbytes(time, 1 << 18)?);
        samples[2].push(copy_gbytes(time, 1 << 28)?);
    }
    let [line, cache, memory] = samples;
    let figure = |name: &str, unit, ours, note: &str| Figure {
        name: name.to_owned(),
        unit,
        ours,
        peer: None,
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
fn line_ns(time: Duration) -> Result<f64> {
    let region = Region::heap(DATA);
    let echo = region.clone();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            sys::pin(sys::cpu(1)).map_err(|error| error.to_string())?;
            let mut seen = 0;
            while seen != u64::MAX {
                // Acquire and Release: pair with those of the other side.
                let now = echo.load_u64(WRITTEN, Ordering::Acquire);
                if now != seen {
                    seen = now;
                    echo.store_u64(TAKEN, seen, Ordering::Release);
                }
            }
            Ok::<_, String>(())
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

/// Packets per counter update, as in the hand-off.
const BATCH: u64 = 64;
/// Counters on lines of their own, then the slots.
const WRITTEN: u64 = 0;
const TAKEN: u64 = 256;
const DATA: u64 = 4096;
