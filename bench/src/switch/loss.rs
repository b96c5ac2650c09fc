//! Datagrams lost, by the rate of a flow, how it is paced, the number of flows, and the length of rings.
//!
//! A thesis on VDE lost most with two machines, by sockets and by shared memory: the fewer machines, the
//! faster each flow was. Here the rate of a flow, its bursts and the number of flows are held apart, and with one pair
//! the length of the module's rings: its guests have further interfaces for that. What was
//! lost is told apart, too: a guest's driver drops a frame that the switch's socket does not take, and
//! what arrives at a guest may find no room there; only the rest is lost between the two sockets.

use std::time::Duration;

use super::arm::PEER;
use super::guests::Datagrams;
use super::pairs::{Site, WAYS, Way, way};
use super::talk::Pace;
use crate::row::{Figure, Plan, Result, Samples};

/// Guests, and what each flow has, in Mb/s: a fast flow of few pairs, and the same total from four.
const CELLS: [(usize, f64); 5] = [(1, 25.0), (1, 100.0), (1, 200.0), (4, 25.0), (4, 50.0)];
/// Most pairs.
const PAIRS: usize = 4;
/// Between two looks at what is due: a datagram or two at a time, or what 20 ms have.
const PACES: [(&str, Duration); 2] = [
    ("even", Duration::from_millis(1)),
    ("bursts", Duration::from_millis(20)),
];
/// Lengths of the module's rings, each way one, with their addresses. That of [`WAYS`] has the usual ones: 4 MiB to
/// receive, 1 MiB to send.
const RINGS: [(Way, &str); 3] = [
    (
        way("ring-64K", "vnplug:// with rings of 64 KiB", "eth5", 6),
        "vnplug://lan1[ring=64K]",
    ),
    (
        way("ring-256K", "vnplug:// with rings of 256 KiB", "eth6", 7),
        "vnplug://lan1[ring=256K]",
    ),
    (
        way("ring-1M", "vnplug:// with rings of 1 MiB", "eth7", 8),
        "vnplug://lan1[ring=1M]",
    ),
];

#[derive(Default)]
struct Series {
    lost: Samples,
    all: Datagrams,
}

/// The ways that are measured with this number of `pairs`.
fn ways(pairs: usize) -> Vec<Way> {
    let rings = RINGS.iter().filter(|_| pairs == 1);
    WAYS.iter()
        .chain(rings.map(|(way, _)| way))
        .copied()
        .collect()
}

/// Per cent lost in each cell, all ways in turns.
pub(crate) fn loss(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::with(2 * PAIRS, &RINGS)?;
    let cells: Vec<_> = CELLS
        .into_iter()
        .flat_map(|(pairs, mbps)| PACES.map(|(name, tick)| (pairs, name, Pace { mbps, tick })))
        .collect();
    let series = |pairs: usize| ways(pairs).into_iter().map(|way| (way, Series::default()));
    let mut all: Vec<Vec<_>> = cells.iter().map(|cell| series(cell.0).collect()).collect();
    for round in 1..=plan.rounds {
        for ((pairs, name, pace), series) in cells.iter().zip(&mut all) {
            let mut told = Vec::new();
            for (way, series) in series {
                let datagrams = site.udp(*pairs, *way, *pace, plan.time)?;
                series.lost.push(datagrams.lost_percent());
                series.all.add(&datagrams);
                told.push(format!("{} {datagrams}", way.name));
            }
            let (mbps, told) = (pace.mbps, told.join("; "));
            eprintln!("  round {round}, {pairs} pair(s), {mbps} Mb/s {name}: {told}");
        }
    }
    let mut figures = Vec::new();
    for ((pairs, name, pace), series) in cells.into_iter().zip(&all) {
        let Some(((_, theirs), ours)) = series.split_first() else {
            continue;
        };
        for (way, ours) in ours {
            figures.push(Figure {
                name: format!("switch-loss-{pairs}-{name}-{}-{}", pace.mbps, way.name),
                unit: "% lost",
                ours: ours.lost.clone(),
                peer: Some((PEER.to_owned(), theirs.lost.clone())),
                limit: None,
                note: format!(
                    "{pairs} pair(s) of guests of User-mode Linux, datagrams both ways at {} Mb/s each, \
                     looked at every {} ms, {} s, ours by {}; all rounds: ours {}; vde_switch {}",
                    pace.mbps,
                    pace.tick.as_millis(),
                    plan.time.as_secs_f64(),
                    way.what,
                    ours.all,
                    theirs.all
                ),
            });
        }
    }
    Ok(figures)
}
