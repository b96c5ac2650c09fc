//! Two readers in a group on the source `af_xdp`, in its packet memory and in an arena with copies.
//!
//! A third wire has a bare loop over an AF_XDP socket, for what receiving costs by itself.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vnplug::Port;
use vnplug_e2e::daemon::Daemon;

use super::{Ends, WARM_UP, Way, frames};
use crate::attached::cpu_time;
use crate::pcap::BARE;
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::sys;
use crate::wire::{Load, Wire};

/// The daemon's processor time per packet on the wire, at a rate that readers keep up with.
pub(crate) fn group(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let wire = Wire::new()?;
        [1, 2].into_iter().try_for_each(|number| wire.add(number))?;
        let netns = Some(&wire.netns);
        let sides = [
            "wire0=af_xdp,fallback=no,arena=umem",
            "wire1=af_xdp,fallback=no",
        ];
        let sides = sides.map(|source| Daemon::start(&wire.lab, netns, &["--source", source]));
        let [umem, copies] = sides;
        let sides = [(umem?, "wire0", "far0"), (copies?, "wire1", "far1")];
        let bare = Command::new(std::env::current_exe()?);
        let mut bare = Way::new("far2", None).on_host(netns, bare, &format!("{BARE}wire2"))?;
        bare.turn(&wire, WARM_UP, 64, Load::Steady(WARM_UP))?;
        let over = AtomicBool::new(false);
        let mut members = Vec::new();
        for (daemon, source, _) in &sides {
            for _ in 0..MEMBERS {
                let options = daemon.port(source).group("bench").arena_bytes(ARENA);
                members.push((options.open()?, AtomicU64::new(0)));
            }
        }
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            let mut read = Vec::new();
            for (port, count) in &mut members {
                let count = &*count;
                read.push(count);
                scope.spawn(|| take(port, count, &over));
            }
            let turn = |side: usize, count, size, load| -> Result<f64> {
                let (daemon, _, far) = &sides[side];
                let read = || -> u64 {
                    let own = read.chunks(MEMBERS).nth(side).unwrap_or_default();
                    own.iter().map(|it| it.load(Ordering::Relaxed)).sum()
                };
                let (cpu, before) = (cpu_time(daemon.pid())?, read());
                wire.send_from(Some(sys::cpu(0)), far, count, size, load)?;
                let deadline = Instant::now() + SETTLED;
                while read() - before < count * MEMBERS as u64 && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(10));
                }
                let cpu = cpu_time(daemon.pid())?.saturating_sub(cpu);
                Ok(cpu.as_secs_f64() * 1e6 / count as f64)
            };
            for side in [0, 1] {
                turn(side, WARM_UP, 64, Load::Steady(WARM_UP))?;
            }
            let mut figures = Vec::new();
            for size in [64, 1514] {
                let mut costs = [Samples::default(), Samples::default()];
                let mut limit = Samples::default();
                let count = frames(plan, size).min(PPS);
                for round in 1..=plan.rounds {
                    for (side, costs) in costs.iter_mut().enumerate() {
                        costs.push(turn(side, count, size, Load::Steady(PPS))?);
                    }
                    let turn = bare.turn(&wire, count, size, Load::Steady(PPS))?;
                    limit.push(turn.cost());
                    let [lent, copied, bare] =
                        [&costs[0], &costs[1], &limit].map(|it| it.last() * 1e3);
                    eprintln!(
                        "  round {round}, {size} B: {lent:.0} ns, with copies {copied:.0} ns, a bare \
                         loop {bare:.0} ns"
                    );
                }
                let [ours, theirs] = costs;
                figures.push(Figure {
                    name: format!("afxdp-group-{size}-daemon"),
                    unit: "CPU s/Mpkt",
                    ours,
                    peer: Some(("an arena with copies".into(), theirs)),
                    limit: Some(Limit::new("a bare AF_XDP loop", limit)),
                    note: format!(
                        "{size}-byte frames, {PPS} per second on a veth, to {MEMBERS} members of a \
                         group that want everything: processor time of the daemon per million \
                         frames, with arena=umem and without; the limit: of a process that forgets \
                         each frame"
                    ),
                });
            }
            Ok(figures)
        })
    })
}

/// Takes what comes and counts it, with what was lost.
fn take(port: &mut Port, count: &AtomicU64, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        let packets = port.batch(256).filter(|packet| packet.is_ok()).count();
        let lost = port.dropped();
        count.store(port.counts().received + lost, Ordering::Relaxed);
        if packets == 0 && port.wait(Some(Duration::from_millis(50))).is_err() {
            return;
        }
    }
}

const MEMBERS: usize = 2;
/// The packet memory of a queue has as much for readers.
const ARENA: u64 = 32 << 20;
/// Frames per second, which readers keep up with beside the sender.
const PPS: u64 = 200_000;
/// Longest wait for readers.
const SETTLED: Duration = Duration::from_secs(5);
