//! Ten thousand targets on a full wire, each with a port of its own.
//!
//! A daemon's generator sends 60-byte packets of 10,000 hosts in turn, flat out on one CPU. One
//! process opens a port per host, with a filter for its address and a ring of its own, all in one
//! bundle, and one thread on the other CPU takes the packets of all of them. So every packet goes to
//! another port than the one before, and nothing of a port is in a cache when its next packet comes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug::Bundle;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};

use super::bare::Bare;
use super::hosts::packets;
use crate::row::{Figure, Plan, Result, Samples};
use crate::{limit, sys};

/// How many.
const TARGETS: u32 = 10_000;
/// Bytes of each ring.
const RING: u64 = 1 << 14;
/// CPU of the source's thread, and of the readers.
const SOURCE_CPU: usize = 0;
const READER_CPU: usize = 1;

/// How long it takes to open the ports, what they get, and how long it takes to close them.
pub(crate) fn targets(plan: &Plan) -> Result<Vec<Figure>> {
    let (mut samples, mut limits): ([Samples; 4], [Samples; 3]) = Default::default();
    let (mut bare, packets) = (Bare::with_rings(TARGETS as usize), packets());
    let packets: Vec<&[u8]> = packets.iter().map(Vec::as_slice).collect();
    for round in 1..=plan.rounds {
        let measured = measure(plan.time)?;
        for (samples, sample) in samples.iter_mut().zip(measured) {
            samples.push(sample);
        }
        let delivered = 1e3 / bare.deliver(&packets, plan.time / 4);
        let (given, taken) = limit::memory_s(RING, TARGETS as usize)?;
        for (limits, limit) in limits.iter_mut().zip([delivered, given, taken]) {
            limits.push(limit);
        }
        let [opened, closed, rate, full] = measured;
        eprintln!(
            "  round {round}: opened in {opened:.1} s, {rate:.2} Mpps delivered, {full:.2} % found a \
             full ring, closed in {closed:.1} s"
        );
    }
    let [opened, closed, rate, full] = samples;
    let [copied, given, taken] = limits;
    let note = format!(
        "{TARGETS} ports with `host ADDRESS`, rings of {RING} B, a daemon's generator flat out on \
         CPU {SOURCE_CPU}, one thread on CPU {READER_CPU} takes from all; {:.2} % of the packets \
         found a full ring",
        full.median()
    );
    let figure = |name: &str, unit, ours, what: &str| Figure {
        name: format!("targets-{name}"),
        unit,
        ours,
        peer: None,
        limit: None,
        note: format!("{what}: {note}"),
    };
    Ok(vec![
        figure("delivered", "Mpps", rate, "to all ports together")
            .limited("one look into a plain table, and the copy", &copied),
        figure("opened", "s", opened, "until the last port is open").limited(limit::MEMORY, &given),
        figure("closed", "s", closed, "until the daemon has none").limited(limit::MEMORY, &taken),
    ])
}

/// Seconds to open and to close, packets per microsecond, and percent that found a full ring.
fn measure(time: Duration) -> Result<[f64; 4]> {
    let lab = Lab::new()?;
    let source = format!(
        "lab=gen,size=60,flows={TARGETS},cpus={}",
        sys::cpu(SOURCE_CPU)
    );
    let daemon = Daemon::start(&lab, None, &["--source", &source])?;
    let begin = Instant::now();
    let mut bundle = Bundle::new()?;
    for target in 0..TARGETS {
        let [_, x, y, z] = target.to_be_bytes();
        let options = daemon.port("lab").ring_bytes(RING);
        bundle.open(options.filter(&format!("host 10.{x}.{y}.{z}")))?;
    }
    let opened = begin.elapsed().as_secs_f64();
    let over = AtomicBool::new(false);
    let (bundle, rate, full) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| drain(bundle, &over).map_err(|error| error.to_string()));
        std::thread::sleep(time);
        let (begin, before) = (Instant::now(), tally(&daemon));
        std::thread::sleep(time);
        let (seconds, after) = (begin.elapsed().as_secs_f64(), tally(&daemon));
        over.store(true, Ordering::Relaxed);
        let bundle = reader.join().map_err(|_| "the reader panicked")??;
        let (delivered, full) = ((after.0 - before.0) as f64, (after.1 - before.1) as f64);
        let lost = full / (full + delivered).max(1.0) * 100.0;
        Ok::<_, crate::row::Error>((bundle, delivered / seconds / 1e6, lost))
    })?;
    daemon.audit();
    let begin = Instant::now();
    drop(bundle);
    daemon.await_no_ports();
    Ok([opened, begin.elapsed().as_secs_f64(), rate, full])
}

/// Packets delivered to all ports, and those that found a full ring.
fn tally(daemon: &Daemon) -> (u64, u64) {
    let counters = daemon.counters();
    let sum = |name: &str| {
        let ports = counters.iter().filter(|counted| counted.kind == "port");
        ports.map(|counted| value(counted, name)).sum()
    };
    (sum("delivered"), sum("dropped_full"))
}

/// Takes all packets of all ports, and hands the ports back.
fn drain(mut bundle: Bundle, over: &AtomicBool) -> Result<Bundle> {
    sys::pin(sys::cpu(READER_CPU))?;
    while !over.load(Ordering::Relaxed) {
        for port in bundle.ports() {
            for packet in port.batch(usize::MAX) {
                std::hint::black_box(packet?.meta.wire_len);
            }
            port.release();
        }
    }
    Ok(bundle)
}
