//! Contexts that receive: one wire to 1 to 32 ports by their addresses, against as many TAPs on a bridge.
//!
//! The wire is a TAP into which a thread writes, frames to each address in turn, flat out. One thread reads all
//! contexts, as a host with that many guests would have to, on two CPUs with everything else.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use vnplug::Bundle;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::{Lab, Netns};

use super::CONTEXTS;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

const LEN: usize = 1514;
/// The interface by which frames come in.
const WIRE: &str = "in0";
/// A ring for each context, and what a TAP queues is as many frames at least.
const RING: u64 = 2 << 20;
/// Frames taken from one context before the next has its turn.
const TURN: usize = 64;

/// What came in a while.
struct Came {
    /// Packets a second, of all contexts.
    pps: f64,
    /// Microseconds of all CPUs for each, whatever they did.
    cost: f64,
}

pub(crate) fn receive(plan: &Plan) -> Result<Vec<Figure>> {
    let empty = || vec![[(); 4].map(|()| Samples::default()); CONTEXTS.len()];
    let mut samples = empty();
    for round in 1..=plan.rounds {
        for (count, samples) in CONTEXTS.into_iter().zip(&mut samples) {
            let (ours, taps) = (by_rings(plan.time, count)?, by_taps(plan.time, count)?);
            for (to, sample) in samples
                .iter_mut()
                .zip([ours.pps, ours.cost, taps.pps, taps.cost])
            {
                to.push(sample);
            }
        }
        let line = samples.iter().map(|it| {
            let [pps, cost, of_taps, tap_cost] = [0, 1, 2, 3].map(|at| it[at].last());
            format!("{pps:.0} at {cost:.2} us (TAPs {of_taps:.0} at {tap_cost:.2})")
        });
        eprintln!("  round {round}: {}", line.collect::<Vec<_>>().join(", "));
    }
    let mut figures = Vec::new();
    for (count, [pps, cost, of_taps, tap_cost]) in CONTEXTS.into_iter().zip(samples) {
        let note = format!(
            "frames of {LEN} bytes to {count} addresses in turn, written into a TAP flat out by one thread; one thread reads \
             all: {count} ports with a filter for their address, or as many TAPs on a bridge that knows these addresses"
        );
        let figure = |name: String, unit, ours, peer, note| Figure {
            name,
            unit,
            ours,
            peer: Some(("TAPs on a bridge".to_owned(), peer)),
            limit: None,
            note,
        };
        figures.push(figure(
            format!("context-rx-{count}"),
            "packets/s",
            pps,
            of_taps,
            note.clone(),
        ));
        figures.push(figure(
            format!("context-rx-{count}-cpu"),
            "us CPU/packet",
            cost,
            tap_cost,
            format!(
                "{note}; all that the CPUs did, the writer included, by the packets that were read"
            ),
        ));
    }
    Ok(figures)
}

/// The address of a context.
fn address(context: usize) -> [u8; 6] {
    [2, 0, 0, 0, 1, context as u8]
}

fn text(context: usize) -> String {
    let [.., one, other] = address(context);
    format!("02:00:00:00:{one:02x}:{other:02x}")
}

fn by_rings(time: Duration, count: usize) -> Result<Came> {
    let (lab, netns) = (Lab::new()?, Netns::new()?);
    let wire = wire(&netns)?;
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", WIRE])?;
    let mut bundle = Bundle::new()?;
    for context in 0..count {
        let filter = format!("ether dst {}", text(context));
        bundle.open(daemon.port(WIRE).ring_bytes(RING).filter(&filter))?;
    }
    measure(time, count, wire, || {
        bundle.wait(Some(Duration::from_millis(10)))?;
        let mut taken = 0;
        while let Some(at) = bundle.next_ready() {
            let port = &mut bundle.ports()[at];
            let batch = port.batch(TURN);
            for packet in batch {
                std::hint::black_box(packet?.bytes);
                taken += 1;
            }
        }
        Ok(taken)
    })
}

fn by_taps(time: Duration, count: usize) -> Result<Came> {
    let netns = Netns::new()?;
    let wire = wire(&netns)?;
    let names: Vec<String> = (0..count).map(|it| format!("context{it}")).collect();
    let mut taps = Vec::new();
    for name in &names {
        let tap = netns.enter(|| sys::tap(name, 0))??;
        rustix::io::ioctl_fionbio(&tap, true)?;
        up(&netns, name)?;
        taps.push(tap);
    }
    let ports: Vec<&str> = names.iter().map(String::as_str).chain([WIRE]).collect();
    netns.bridge("bridge0", &ports)?;
    for (context, name) in names.iter().enumerate() {
        netns.exec(&[
            "bridge",
            "fdb",
            "add",
            &text(context),
            "dev",
            name,
            "master",
            "static",
        ])?;
    }
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    for (at, tap) in taps.iter().enumerate() {
        epoll::add(&epoll, tap, EventData::new_u64(at as u64), EventFlags::IN)?;
    }
    let soon = Timespec {
        tv_sec: 0,
        tv_nsec: 10_000_000,
    };
    let mut events = [Event {
        flags: EventFlags::empty(),
        data: EventData::new_u64(0),
    }; 64];
    let mut frame = vec![0; 2 * LEN];
    measure(time, count, wire, || {
        let found = epoll::wait(&epoll, &mut events, Some(&soon))?;
        let mut taken = 0;
        for event in &events[..found] {
            let mut tap = &taps[event.data.u64() as usize];
            for _ in 0..TURN {
                match tap.read(&mut frame) {
                    Ok(len) => taken += u64::from(len >= LEN),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(taken)
    })
}

/// Has frames written, and counts what `read` takes meanwhile.
fn measure(
    time: Duration,
    count: usize,
    mut wire: File,
    mut read: impl FnMut() -> Result<u64>,
) -> Result<Came> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let frames: Vec<Vec<u8>> = (0..count)
                .map(|context| {
                    let mut frame = vec![7; LEN];
                    frame[..6].copy_from_slice(&address(context));
                    // An experimental EtherType: nobody answers.
                    frame[6..14].copy_from_slice(&[2, 0, 0, 0, 2, 0, 0x88, 0xb5]);
                    frame
                })
                .collect();
            while !over.load(Ordering::Relaxed) {
                for frame in &frames {
                    wire.write_all(frame)?;
                }
            }
            Ok::<_, std::io::Error>(())
        });
        let counted = (|| {
            let mut count = |time: Duration| -> Result<(u64, f64)> {
                let (begin, mut taken) = (Instant::now(), 0);
                while begin.elapsed() < time {
                    taken += read()?;
                }
                Ok((taken, begin.elapsed().as_secs_f64()))
            };
            count(time / 4)?;
            let before = busy()?;
            let (taken, seconds) = count(time)?;
            Ok(Came {
                pps: taken as f64 / seconds,
                cost: (busy()? - before) * 1e6 / taken.max(1) as f64,
            })
        })();
        over.store(true, Ordering::Relaxed);
        writer.join().map_err(|_| "the writer panicked")??;
        counted
    })
}

/// Seconds that all CPUs were busy since the machine started.
fn busy() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().ok_or("an empty /proc/stat")?;
    let ticks: Vec<f64> = line
        .split_whitespace()
        .skip(1)
        .map(str::parse)
        .collect::<std::result::Result<_, _>>()?;
    // user, nice, system, idle, iowait, irq, softirq, steal: a tick is 10 ms to programs.
    let busy = [0, 1, 2, 5, 6].map(|at| ticks.get(at).copied().unwrap_or(0.0));
    Ok(busy.iter().sum::<f64>() / 100.0)
}

fn wire(netns: &Netns) -> Result<File> {
    let wire = netns.enter(|| sys::tap(WIRE, 0))??;
    up(netns, WIRE)?;
    Ok(wire)
}

fn up(netns: &Netns, name: &str) -> Result<()> {
    netns.ip(&["link", "set", name, "arp", "off", "multicast", "off", "up"])?;
    Ok(())
}
