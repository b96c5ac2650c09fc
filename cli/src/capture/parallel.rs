//! `vnplug count --threads N`: one ring per thread, and nothing that the threads share.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde_json::json;
use vnplug::{Packet, Port};

use super::{PortArgs, Sink};
use crate::failure::{Failure, OK, Outcome};
use crate::text::grouped;
use crate::{out, sys};

/// What one thread has read, for the others to look at; on lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shown {
    packets: AtomicU64,
    bytes: AtomicU64,
    lost: AtomicU64,
}

struct Part<'a> {
    shown: &'a Shown,
    packets: u64,
    bytes: u64,
    over: &'a AtomicBool,
}

impl Part<'_> {
    fn show(&self) -> Result<(), Failure> {
        // Relaxed: numbers to be looked at, and joined threads to be summed up.
        self.shown.packets.store(self.packets, Ordering::Relaxed);
        self.shown.bytes.store(self.bytes, Ordering::Relaxed);
        match self.over.load(Ordering::Relaxed) {
            true => Err(Failure::quiet()),
            false => Ok(()),
        }
    }
}

impl Sink for Part<'_> {
    #[inline]
    fn packet(&mut self, packet: &Packet<'_>) -> Result<(), Failure> {
        self.packets += 1;
        self.bytes += u64::from(packet.meta.wire_len);
        Ok(())
    }

    fn idle(&mut self) -> Result<(), Failure> {
        self.show()
    }

    fn tick(&mut self, port: &mut Port) -> Result<(), Failure> {
        self.shown.lost.store(port.counts().lost, Ordering::Relaxed);
        self.show()
    }
}

/// Counts with `threads` threads until the first of them ends.
pub(super) fn count(args: &PortArgs, threads: usize, as_json: bool, socket: &Path) -> Outcome {
    let ports = args.opened(args.options(socket).spread(threads))?;
    let start = Instant::now();
    let shown: Vec<Shown> = (0..threads).map(|_| Shown::default()).collect();
    let over = AtomicBool::new(false);
    sys::catch_signals();
    let read = |mut port: Port, shown: &Shown| {
        let mut part = Part {
            shown,
            packets: 0,
            bytes: 0,
            over: &over,
        };
        let driven = args.drive(&mut port, &mut part);
        let stopped_by_another = over.swap(true, Ordering::Relaxed);
        // The summary shows all of it, whatever ended it.
        let _ = part.show();
        shown.lost.store(port.counts().lost, Ordering::Relaxed);
        match driven {
            Err(failure) if !stopped_by_another => Err(failure),
            _ => Ok(()),
        }
    };
    let ended = std::thread::scope(|scope| {
        let parts = ports.into_iter().zip(&shown);
        let running: Vec<_> = parts
            .map(|(port, shown)| scope.spawn(|| read(port, shown)))
            .collect();
        let joined = running.into_iter().map(|thread| {
            let panicked = |_| Err(Failure::new("a reading thread panicked"));
            thread.join().unwrap_or_else(panicked)
        });
        // All are joined before the first failure counts.
        joined.collect::<Vec<_>>()
    });
    summary(&shown, start.elapsed().as_secs_f64(), as_json)?;
    ended.into_iter().collect::<Result<(), Failure>>()?;
    Ok(OK)
}

fn summary(shown: &[Shown], seconds: f64, as_json: bool) -> Result<(), Failure> {
    let of = |shown: &Shown| {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [read(&shown.packets), read(&shown.bytes), read(&shown.lost)]
    };
    let each: Vec<[u64; 3]> = shown.iter().map(of).collect();
    let sum = |at: usize| each.iter().map(|part| part[at]).sum::<u64>();
    let (packets, bytes, lost) = (sum(0), sum(1), sum(2));
    let rate = (packets as f64 / seconds).round() as u64;
    if as_json {
        let threads: Vec<_> = each
            .iter()
            .map(|[packets, bytes, lost]| json!({"packets": packets, "bytes": bytes, "lost": lost}))
            .collect();
        let line = json!({
            "summary": true, "seconds": seconds, "packets": packets, "bytes": bytes, "lost": lost,
            "packets_per_second": rate, "threads": threads,
        });
        return out::raw(&format!("{line}\n"));
    }
    for (number, [packets, bytes, lost]) in each.iter().enumerate() {
        out::line(&format!(
            "thread {number}: {} packets, {} bytes, {} lost",
            grouped(*packets),
            grouped(*bytes),
            grouped(*lost)
        ))?;
    }
    out::line(&format!(
        "{} packets, {} bytes in {seconds:.3} s: {} packets/s; {} lost",
        grouped(packets),
        grouped(bytes),
        grouped(rate),
        grouped(lost)
    ))
}
