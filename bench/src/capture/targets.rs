//! Ten thousand targets by address on a wire that a sender fills, each with a port of its own.
//!
//! ```text
//!   sender, CPU 0 ┬ far0 ── wire0 : the daemon ── 10,000 rings ── one thread     ours
//!                 └ far1 ── wire1 : one capture of everything by libpcap         the peer
//! ```
//!
//! The row `targets` has the same ports and a generator in memory. Here the kernel is in the way, and
//! daemon and reader share what CPUs the sender leaves. All ports are one bundle, which needs no
//! descriptors for each.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use vnplug::Bundle;
use vnplug_e2e::daemon::Daemon;

use super::{Ends, UNHEARD, WARM_UP, Way, frames, line_rate, unheard};
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};
use crate::wire::{Load, Wire};
use crate::{limit, sys};

/// What the ports get of a full wire, all together.
pub(crate) fn targets(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let wire = Wire::new()?;
        [1, UNHEARD]
            .into_iter()
            .try_for_each(|number| wire.add(number))?;
        let netns = Some(&wire.netns);
        let daemon = Daemon::start(&wire.lab, netns, &["--source", "wire0"])?;
        let mut bundle = Bundle::new()?;
        let begin = Instant::now();
        for target in 0..TARGETS {
            let [_, x, y, z] = target.to_be_bytes();
            let options = daemon.port("wire0").ring_bytes(RING);
            bundle.open(options.filter(&format!("host 10.{x}.{y}.{z}")))?;
        }
        let opened = begin.elapsed().as_secs_f64();
        eprintln!("  {TARGETS} ports open after {opened:.1} s");
        let command = Command::new(std::env::current_exe()?);
        let mut peer = Way::new("far1", None).on_host(netns, command, "wire1")?;
        let read = Read::default();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            let reader = scope.spawn(|| drain(bundle, &read, &over));
            let ours = |frames, size, load| turn(&wire, &daemon, &read, frames, size, load);
            ours(WARM_UP, 64, WARM)?;
            peer.turn(&wire, WARM_UP, 64, WARM)?;
            let mut figures = Vec::new();
            for size in [64, 1514] {
                let [mut one, mut all] = [(); 2].map(|()| [(); 3].map(|()| Samples::default()));
                let mut sender = Samples::default();
                let (frames, load) = (frames(plan, size), flows(line_rate(size)));
                for round in 1..=plan.rounds {
                    sender.push(unheard(&wire, frames, size, load)?);
                    let [rate, lost, cost] = ours(frames, size, load)?;
                    let theirs = peer.turn(&wire, frames, size, load)?;
                    eprintln!(
                        "  round {round}, {size} B: {rate:.3} Mpps, {lost:.2} % lost, {:.0} ns each; \
                         libpcap {theirs}",
                        cost * 1e3
                    );
                    all.iter_mut()
                        .zip([rate, lost, cost])
                        .for_each(|(to, it)| to.push(it));
                    let theirs = [theirs.mpps(), theirs.lost_percent(), theirs.cost()];
                    one.iter_mut().zip(theirs).for_each(|(to, it)| to.push(it));
                }
                figures.extend(compared(size, &all, &one, &sender));
            }
            daemon.audit();
            over.store(true, Ordering::Relaxed);
            let bundle = reader.join().map_err(|_| "the reader panicked")?;
            drop(bundle?);
            daemon.await_no_ports();
            Ok(figures)
        })
    })
}

fn compared(
    size: usize,
    [rate, lost, cost]: &[Samples; 3],
    [peer_rate, peer_lost, peer_cost]: &[Samples; 3],
    sender: &Samples,
) -> Vec<Figure> {
    let note = format!(
        "{size}-byte frames of {TARGETS} hosts in turn, flat out, at most 10 Gbit/s, on a veth, to \
         {TARGETS} ports with `host ADDRESS` and rings of {RING} B on an af_packet source; one thread \
         takes from all each {} ms. The peer is one capture that has everything, of 16 MiB",
        PASS.as_millis()
    );
    let figure = |suffix: &str, unit, ours: &Samples, theirs: &Samples| Figure {
        name: format!("targets-wire-{size}{suffix}"),
        unit,
        ours: ours.clone(),
        peer: Some(("libpcap, all in one buffer".to_owned(), theirs.clone())),
        limit: None,
        note: note.clone(),
    };
    vec![
        figure("", "Mpps", rate, peer_rate).limited(limit::SENDER, sender),
        figure("-loss", "% lost", lost, peer_lost),
        figure("-cpu", "CPU s/Mpkt", cost, peer_cost),
    ]
}

/// Packets per microsecond that ports got, percent that none got, and processor time of the daemon and
/// the reading thread in seconds per million packets.
fn turn(
    wire: &Wire,
    daemon: &Daemon,
    read: &Read,
    frames: u64,
    size: usize,
    load: Load,
) -> Result<[f64; 3]> {
    let spent = || -> Result<Duration> {
        let own = Duration::from_nanos(read.spent_ns.load(Ordering::Acquire));
        Ok(cpu_time(daemon.pid())? + own)
    };
    let before = (read.packets.load(Ordering::Acquire), spent()?);
    let begin = Instant::now();
    let sent = wire.send_from(Some(sys::cpu(0)), "far0", frames, size, load)?;
    let mut got = read.packets.load(Ordering::Acquire) - before.0;
    let deadline = begin + sent.elapsed + SETTLED;
    // What waits in the kernel comes within its block's time, and readers look each few ms.
    let mut last = (Instant::now(), got);
    while got < sent.frames && last.0.elapsed() < QUIET && Instant::now() < deadline {
        sleep(PASS);
        got = read.packets.load(Ordering::Acquire) - before.0;
        if got != last.1 {
            last = (Instant::now(), got);
        }
    }
    let seconds = match last.0.duration_since(begin).saturating_sub(LATE) {
        busy if busy > sent.elapsed => busy.as_secs_f64(),
        _ => sent.elapsed.as_secs_f64(),
    };
    let cost = spent()?.saturating_sub(before.1).as_secs_f64();
    let lost = sent.frames.saturating_sub(got) as f64 / sent.frames as f64 * 100.0;
    Ok([
        got as f64 / 1e6 / seconds,
        lost,
        cost * 1e6 / got.max(1) as f64,
    ])
}

/// What the reading thread tells.
#[derive(Default)]
struct Read {
    packets: AtomicU64,
    spent_ns: AtomicU64,
}

/// Takes all packets of all ports now and then, and hands the ports back.
fn drain(
    mut bundle: Bundle,
    read: &Read,
    over: &AtomicBool,
) -> std::result::Result<Bundle, vnplug::Error> {
    let mut packets = 0;
    while !over.load(Ordering::Relaxed) {
        for port in bundle.ports() {
            for packet in port.batch(usize::MAX) {
                std::hint::black_box(packet?.meta.wire_len);
                packets += 1;
            }
            port.release();
        }
        read.spent_ns.store(sys::thread_ns(), Ordering::Release);
        read.packets.store(packets, Ordering::Release);
        sleep(PASS);
    }
    Ok(bundle)
}

fn flows(pps: u64) -> Load {
    Load::Flows(pps, TARGETS)
}

/// How many.
const TARGETS: u32 = 10_000;
/// Bytes of each ring: a hundred packets of 64 bytes, ten of 1514.
const RING: u64 = 1 << 14;
const WARM: Load = Load::Flows(WARM_UP, TARGETS);
/// How often the reader looks.
const PASS: Duration = Duration::from_millis(50);
/// By how much the last packets may be later than the sender, at no fault of a port's: a block of the
/// kernel's, and a look.
const LATE: Duration = Duration::from_millis(100);
/// How long nothing must have come, and the longest wait for it.
const QUIET: Duration = Duration::from_millis(500);
const SETTLED: Duration = Duration::from_secs(10);
