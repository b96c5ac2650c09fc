//! One source to many ports.
//!
//! A daemon's generator runs flat out on one CPU; on the other CPU one thread of ours holds all
//! ports and takes their packets without looking into them, so that the figure is the producer's
//! cost. The peer is the floor of any design that gives every reader a copy of its own: one thread
//! on the source's CPU that copies the same frames into as many plain buffers, which nobody reads.
//! With 2 and 8 ports DPDK's memif and vhost-user are peers too: one testpmd sends to as many
//! interfaces, one receives.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vnplug::Port;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_ring::control::Counted;

use crate::handoff::{Reading, Sizes};
use crate::limit::{self, Bare};
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::{memif, sys, vhost};

/// CPU of the source's thread, and of the copying peer.
const SOURCE_CPU: usize = 0;
/// CPU of the thread that takes all packets.
const READER_CPU: usize = 1;
/// Bytes of each ring.
const RING: usize = 1 << 19;
/// Frames per batch, about the daemon's: the mix five times.
const BATCH: usize = 60;
/// The numbers of ports for which DPDK is a peer too. With one it is in the row `handoff`, and it
/// knows at most 32 interfaces (`RTE_MAX_ETHPORTS`).
const BESIDE_DPDK: [usize; 2] = [2, 8];
const DPDK_TIME: Duration = Duration::from_secs(1);
/// How often a further port's cost is taken; the middle one counts.
const DIFFERENCES: usize = 3;
/// Longest wait for the daemon to have forgotten ports.
const PATIENCE: Duration = Duration::from_secs(30);
/// The peer's name in the table.
const PEER: &str = "memcpy to plain buffers";

/// Rate, and cost per packet and port, with `ports` ports.
pub(crate) fn against_copies(plan: &Plan, sizes: Sizes, ports: usize) -> Result<Vec<Figure>> {
    let [mut rates, mut dropped, mut copies, mut limit] = [(); 4].map(|()| Samples::default());
    let mut dpdk = [(); 2].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let Measured { rate, lost, .. } =
            measure(plan.time, sizes, ports, Sharing::Private, Pace::FlatOut)?;
        let copied = copy(plan.time / 2, sizes, ports)?;
        let bare = bare(plan.time / 2, sizes, ports, Sharing::Private)?;
        eprintln!(
            "  round {round}: ours {rate:.2}, dropped {lost:.3}, memcpy {copied:.2}, bare transfer \
             {bare:.2} Mpps"
        );
        rates.push(rate);
        dropped.push(lost);
        copies.push(copied);
        limit.push(bare);
        let beside_dpdk = BESIDE_DPDK.contains(&ports);
        if let (Sizes::One(len), true) = (sizes, beside_dpdk) {
            let plan = plan.lasting(DPDK_TIME);
            let [memif, vhost] = &mut dpdk;
            memif.push(memif::measure(&plan, len, ports)? / ports as f64);
            vhost.push(vhost::measure(&plan, len, ports)? / ports as f64);
            let (one, two) = (memif.last(), vhost.last());
            eprintln!("           memif {one:.2}, vhost-user {two:.2} Mpps to each");
        }
    }
    let note = format!(
        "a daemon's generator on CPU {SOURCE_CPU}, {ports} ports without filters, rings of {RING} \
         B, one thread on CPU {READER_CPU} takes from all; of the packets for the ports {:.1} % \
         found a full ring; what is counted is delivered. The limit: the same bytes, bare, from one \
         CPU to the other through as many rings",
        dropped.median() * 100.0
    );
    let copying = format!(
        "{note}. The peer copies {} B per packet and port into plain buffers of {RING} B, which \
         nobody reads",
        sizes.mean()
    );
    let peer = |samples| Some((PEER.to_owned(), samples));
    let name = format!("fanout-{ports}-{sizes}");
    // Nanoseconds per packet and port, of this many packets per microsecond.
    let cost = |rate: f64| 1e3 / (rate * ports as f64);
    let costs = |rates: &Samples| rates.all().iter().copied().map(cost).collect();
    let mut figures = vec![
        Figure {
            name: name.clone(),
            unit: RATE,
            ours: rates.clone(),
            peer: peer(copies.clone()),
            limit: Some(Limit::new(limit::BARE, limit.clone())),
            note: copying.clone(),
        },
        Figure {
            name: format!("{name}-cost"),
            unit: COST,
            ours: costs(&rates),
            peer: peer(costs(&copies)),
            limit: Some(Limit::converted(limit::BARE, &limit, cost)),
            note: copying,
        },
    ];
    let peers = [
        ("memif", memif::NAME, memif::NOTE),
        ("vhost", vhost::NAME, vhost::NOTE),
    ];
    for (samples, (suffix, peer, what)) in dpdk.into_iter().zip(peers) {
        if !samples.all().is_empty() {
            figures.push(Figure {
                name: format!("{name}-{suffix}"),
                unit: RATE,
                ours: rates.clone(),
                peer: Some((peer.to_owned(), samples)),
                limit: Some(Limit::new(limit::BARE, limit.clone())),
                note: format!("{note}. The peer: what each of {ports} interfaces receives. {what}"),
            });
        }
    }
    Ok(figures)
}

/// Packets per microsecond for each port that the machine allows: the same bytes, bare.
pub(crate) fn bare(time: Duration, sizes: Sizes, ports: usize, sharing: Sharing) -> Result<f64> {
    let bare = Bare {
        rings: ports,
        shared: sharing == Sharing::Group,
        ..Bare::one(sizes, RING as u64, Reading::Header)
    };
    bare.mpps(time)
}

/// How ports have their packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Each in a ring of its own.
    Private,
    /// All in one arena.
    Group,
}

/// How fast a source goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    FlatOut,
    /// Packets per second; between them it sleeps.
    Packets(u64),
}

/// What became of a source's packets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    /// Delivered to each port per microsecond.
    pub(crate) rate: f64,
    /// Taken by its reader per microsecond.
    pub(crate) taken: f64,
    /// The share of the packets for ports that their readers did not get: the ring was full, or the
    /// group's arena was overwritten before.
    pub(crate) lost: f64,
    /// Nanoseconds of the daemon's processor time per packet of the source.
    pub(crate) spent_ns: f64,
}

/// Has one thread take all packets of this many ports.
pub(crate) fn measure(
    time: Duration,
    sizes: Sizes,
    ports: usize,
    sharing: Sharing,
    pace: Pace,
) -> Result<Measured> {
    let daemon = start(sizes, pace)?;
    let mut opened = open(&daemon, sharing, ports)?;
    turn(&daemon, &mut opened, time)
}

/// What each port after the first adds to the daemon's processor time per packet, at a rate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Further {
    /// Nanoseconds; the middle one of a few differences.
    pub(crate) ns: f64,
    /// The share of the packets for ports that their readers did not get.
    pub(crate) lost: f64,
}

/// One daemon has one port and all of them in turns, so that a difference is one of moments that
/// follow each other, with the same threads and the same memory.
pub(crate) fn further(
    time: Duration,
    sizes: Sizes,
    ports: usize,
    sharing: Sharing,
    pps: u64,
) -> Result<Further> {
    let daemon = start(sizes, Pace::Packets(pps))?;
    let mut opened = open(&daemon, sharing, 1)?;
    let mut one = turn(&daemon, &mut opened, time)?;
    let (mut more, mut lost) = (Samples::default(), Samples::default());
    for _ in 0..DIFFERENCES {
        opened.extend(open(&daemon, sharing, ports - 1)?);
        let many = turn(&daemon, &mut opened, time)?;
        opened.truncate(1);
        let again = turn(&daemon, &mut opened, time)?;
        let alone = (one.spent_ns + again.spent_ns) / 2.0;
        more.push((many.spent_ns - alone) / (ports - 1) as f64);
        lost.push(many.lost);
        one = again;
    }
    Ok(Further {
        ns: more.median(),
        lost: lost.median(),
    })
}

/// A daemon with a generator.
fn start(sizes: Sizes, pace: Pace) -> Result<Daemon> {
    let lab = Lab::new()?;
    let mut source = format!("lab=gen,size={sizes},cpus={}", sys::cpu(SOURCE_CPU));
    if let Pace::Packets(pps) = pace {
        source += &format!(",pps={pps}");
    }
    let daemon = Daemon::start(&lab, None, &["--source", &source])?;
    if pace != Pace::FlatOut {
        // A real-time thread's sleeps are exact: it would wake for every single packet.
        let pid = daemon.pid().to_string();
        let status = Command::new("chrt")
            .args(["-a", "-o", "-p", "0", &pid])
            .status()?;
        if !status.success() {
            return Err(format!("chrt (package util-linux): {status}").into());
        }
    }
    Ok(daemon)
}

/// Further ports.
fn open(daemon: &Daemon, sharing: Sharing, count: usize) -> Result<Vec<Port>> {
    let options = |_| {
        let options = daemon.port("lab");
        Ok(match sharing {
            Sharing::Private => options.ring_bytes(RING as u64).open()?,
            // An arena of the same size, and a descriptor for every record that fits.
            Sharing::Group => options
                .group("bench")
                .arena_bytes(RING as u64)
                .ring_bytes(RING as u64 / 4)
                .open()?,
        })
    };
    (0..count).map(options).collect()
}

/// Takes from all ports that the daemon has.
fn turn(daemon: &Daemon, ports: &mut [Port], time: Duration) -> Result<Measured> {
    let count = ports.len();
    // The daemon may not have noticed yet that others are gone.
    let patience = Instant::now();
    while daemon.counters().iter().filter(is_port).count() != count {
        if patience.elapsed() > PATIENCE {
            return Err(format!("the daemon has not {count} port(s)").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let (over, seen) = (AtomicBool::new(false), SeenByReader::default());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let drained = drain(ports, &over, &seen, sys::cpu(READER_CPU));
            drained.map_err(|error| error.to_string())
        });
        std::thread::sleep(time / 8);
        let before = Tally::of(daemon);
        let (begin, seen_before) = (Instant::now(), seen.get());
        std::thread::sleep(time);
        let (seconds, seen_after) = (begin.elapsed().as_secs_f64(), seen.get());
        let after = Tally::of(daemon);
        over.store(true, Ordering::Relaxed);
        reader.join().map_err(|_| "the reader panicked")??;
        let [taken, lost] = [0, 1].map(|at| (seen_after[at] - seen_before[at]) as f64);
        let offered = (after.offered - before.offered).max(1) as f64;
        Ok(Measured {
            rate: (after.delivered - before.delivered) as f64 / count as f64 / seconds / 1e6,
            taken: taken / count as f64 / seconds / 1e6,
            lost: lost / (taken + lost).max(1.0),
            spent_ns: (after.spent_ns - before.spent_ns) as f64 / (offered / count as f64),
        })
    })
}

fn is_port(counted: &&Counted) -> bool {
    counted.kind == "port"
}

/// Sums over all ports.
pub(crate) struct Tally {
    pub(crate) delivered: u64,
    offered: u64,
    /// The daemon's processor time.
    spent_ns: u64,
}

impl Tally {
    /// Of the daemon's ports by now.
    pub(crate) fn of(daemon: &Daemon) -> Self {
        let counters = daemon.counters();
        let sum = |name: &str| {
            let ports = counters.iter().filter(is_port);
            ports.map(|counted| value(counted, name)).sum()
        };
        Self {
            delivered: sum("delivered"),
            offered: sum("offered"),
            spent_ns: spent_ns(daemon.pid()),
        }
    }
}

/// Processor time of all threads of a process, exactly; 0 where the kernel does not tell.
fn spent_ns(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let spent = |thread: std::fs::DirEntry| {
        let line = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        line.split(' ').next()?.parse::<u64>().ok()
    };
    let threads = threads.into_iter().flatten().flatten();
    threads.filter_map(spent).sum()
}

/// What a reader has had so far.
#[derive(Default)]
pub(crate) struct SeenByReader {
    taken: AtomicU64,
    /// What the packets told: its ring was full, or the group's arena was overwritten before.
    lost: AtomicU64,
}

impl SeenByReader {
    /// Taken and lost.
    pub(crate) fn get(&self) -> [u64; 2] {
        [&self.taken, &self.lost].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Takes all packets of all ports, on one CPU, until it is over.
pub(crate) fn drain(
    ports: &mut [Port],
    over: &AtomicBool,
    seen: &SeenByReader,
    cpu: usize,
) -> Result<()> {
    sys::pin(cpu)?;
    let (mut taken, mut lost) = (0, 0);
    while !over.load(Ordering::Relaxed) {
        for port in &mut *ports {
            for packet in port.batch(usize::MAX) {
                taken += 1;
                lost += u64::from(packet?.meta.lost);
            }
            port.release();
        }
        seen.taken.store(taken, Ordering::Relaxed);
        seen.lost.store(lost, Ordering::Relaxed);
    }
    Ok(())
}

/// The peer: packets copied into every buffer, per microsecond.
fn copy(time: Duration, sizes: Sizes, ports: usize) -> Result<f64> {
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            sys::pin(sys::cpu(SOURCE_CPU)).map_err(|error| error.to_string())?;
            let frames: Vec<Vec<u8>> = (0..BATCH)
                .map(|frame| vec![frame as u8; sizes.of(frame)])
                .collect();
            let mut buffers = vec![(vec![0_u8; RING], 0); ports];
            let (begin, mut packets) = (Instant::now(), 0_u64);
            loop {
                for _ in 0..16 {
                    for (buffer, at) in &mut buffers {
                        for frame in &frames {
                            if *at + frame.len() > RING {
                                *at = 0;
                            }
                            buffer[*at..*at + frame.len()].copy_from_slice(frame);
                            *at += frame.len().next_multiple_of(8);
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

/// Units.
pub(crate) const RATE: &str = "Mpps to each port";
pub(crate) const COST: &str = "ns per packet and port";
