//! One source to many ports.
//!
//! A daemon's generator runs flat out on one CPU; on the other CPU one thread of ours holds all
//! ports and takes their packets without looking into them, so that the figure is the producer's
//! cost. The peer is the floor of any design that gives every reader a copy of its own: one thread
//! on the source's CPU that copies the same frames into as many plain buffers, which nobody reads.
//! With 8 ports DPDK's memif is a second peer: one testpmd sends to as many interfaces, one receives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug::Port;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};

use crate::memif;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// CPU of the source's thread, and of the copying peer.
const SOURCE_CPU: usize = 0;
/// CPU of the thread that takes all packets.
const READER_CPU: usize = 1;
/// Bytes of each ring.
const RING: usize = 1 << 19;
/// Frames per batch, as the daemon's.
const BATCH: usize = 64;
/// The number of ports for which memif is a peer too.
const MEMIF_PORTS: usize = 8;
/// The peer's name in the table.
const PEER: &str = "memcpy to plain buffers";

/// Rate, and cost per packet and port, with `ports` ports.
pub(crate) fn against_copies(plan: &Plan, len: usize, ports: usize) -> Result<Vec<Figure>> {
    let ring = RING;
    let (mut rates, mut costs, mut dropped) =
        (Samples::default(), Samples::default(), Samples::default());
    let (mut peer_rates, mut peer_costs) = (Samples::default(), Samples::default());
    let mut memif_rates = Samples::default();
    // Nanoseconds per packet and port, of so many packets per microsecond.
    let cost = |rate: f64| 1e3 / (rate * ports as f64);
    for round in 1..=plan.rounds {
        let (rate, lost) = measure(plan.time, len, ports, Sharing::Private)?;
        let peer = copy(plan.time, len, ports, ring)?;
        eprintln!("  round {round}: ours {rate:.2}, memcpy {peer:.2} Mpps, dropped {lost:.3}");
        if ports == MEMIF_PORTS {
            let memif = memif::measure(plan, len, ports)? / ports as f64;
            eprintln!("           memif {memif:.2} Mpps to each");
            memif_rates.push(memif);
        }
        rates.push(rate);
        costs.push(cost(rate));
        dropped.push(lost);
        peer_rates.push(peer);
        peer_costs.push(cost(peer));
    }
    let note = format!(
        "a daemon's generator on CPU {SOURCE_CPU}, {ports} ports without filters, rings of {ring} \
         B, one thread on CPU {READER_CPU} takes from all; of the packets for the ports {:.1} % \
         found a full ring; what is counted is delivered. The peer copies {len} B per packet \
         and port into plain buffers of {ring} B, which nobody reads.",
        dropped.median() * 100.0
    );
    let mut figures = Vec::new();
    if ports == MEMIF_PORTS {
        figures.push(Figure {
            name: format!("fanout-{ports}-{len}-memif"),
            unit: "Mpps to each port",
            ours: rates.clone(),
            peer: Some((memif::NAME.to_owned(), memif_rates)),
            note: format!(
                "{note} This peer: what each of {ports} interfaces receives. {}",
                memif::NOTE
            ),
        });
    }
    figures.extend([
        Figure {
            name: format!("fanout-{ports}-{len}"),
            unit: "Mpps to each port",
            ours: rates,
            peer: Some((PEER.to_owned(), peer_rates)),
            note: note.clone(),
        },
        Figure {
            name: format!("fanout-{ports}-{len}-cost"),
            unit: "ns per packet and port",
            ours: costs,
            peer: Some((PEER.to_owned(), peer_costs)),
            note,
        },
    ]);
    Ok(figures)
}

/// How ports have their packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Each in a ring of its own.
    Private,
    /// All in one arena.
    Group,
}

/// Packets delivered to each port per microsecond, and the share that found a full ring.
pub(crate) fn measure(
    time: Duration,
    len: usize,
    ports: usize,
    sharing: Sharing,
) -> Result<(f64, f64)> {
    let lab = Lab::new()?;
    let source = format!("lab=gen,size={len},cpus={}", sys::cpu(SOURCE_CPU));
    let daemon = Daemon::start(&lab, None, &["--source", &source])?;
    let mut opened = Vec::new();
    for _ in 0..ports {
        let options = daemon.port("lab");
        opened.push(match sharing {
            Sharing::Private => options.ring_bytes(RING as u64).open()?,
            // An arena of the same size, and a descriptor for every record that fits.
            Sharing::Group => options
                .group("bench")
                .arena_bytes(RING as u64)
                .ring_bytes(RING as u64 / 4)
                .open()?,
        });
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            drain(opened, &over, sys::cpu(READER_CPU)).map_err(|error| error.to_string())
        });
        std::thread::sleep(time / 8);
        let (begin, before) = (Instant::now(), Tally::of(&daemon));
        std::thread::sleep(time);
        let after = Tally::of(&daemon);
        let seconds = begin.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        reader.join().map_err(|_| "the reader panicked")??;
        let (delivered, full) = (after.delivered - before.delivered, after.full - before.full);
        let rate = delivered as f64 / ports as f64 / seconds / 1e6;
        Ok((rate, full as f64 / (full + delivered).max(1) as f64))
    })
}

/// Sums over all ports.
pub(crate) struct Tally {
    pub(crate) delivered: u64,
    full: u64,
}

impl Tally {
    /// Of the daemon's ports by now.
    pub(crate) fn of(daemon: &Daemon) -> Self {
        let counters = daemon.counters();
        let sum = |name: &str| {
            let ports = counters.iter().filter(|counted| counted.kind == "port");
            ports.map(|counted| value(counted, name)).sum()
        };
        Self {
            delivered: sum("delivered"),
            full: sum("dropped_full"),
        }
    }
}

/// Takes all packets of all ports, on one CPU, until it is over.
pub(crate) fn drain(mut ports: Vec<Port>, over: &AtomicBool, cpu: usize) -> Result<()> {
    sys::pin(cpu)?;
    while !over.load(Ordering::Relaxed) {
        for port in &mut ports {
            for packet in port.batch(usize::MAX) {
                std::hint::black_box(packet?.meta.wire_len);
            }
            port.release();
        }
    }
    Ok(())
}

/// The peer: packets copied into every buffer, per microsecond.
fn copy(time: Duration, len: usize, ports: usize, ring: usize) -> Result<f64> {
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            sys::pin(sys::cpu(SOURCE_CPU)).map_err(|error| error.to_string())?;
            let frames: Vec<Vec<u8>> = (0..BATCH).map(|frame| vec![frame as u8; len]).collect();
            let mut buffers = vec![(vec![0_u8; ring], 0); ports];
            let (begin, mut packets) = (Instant::now(), 0_u64);
            loop {
                for _ in 0..16 {
                    for (buffer, at) in &mut buffers {
                        for frame in &frames {
                            if *at + len > ring {
                                *at = 0;
                            }
                            buffer[*at..*at + len].copy_from_slice(frame);
                            *at += len.next_multiple_of(8);
                        }
                        std::hint::black_box(&buffer);
                    }
                    packets += BATCH as u64;
                }
                let elapsed = begin.elapsed();
                if elapsed >= time {
                    return Ok::<_, String>(packets as f64 / elapsed.as_secs_f64() / 1e6);
                }
            }
        });
        Ok(copier.join().map_err(|_| "the peer panicked")??)
    })
}
