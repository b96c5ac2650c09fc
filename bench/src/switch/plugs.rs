//! Unmodified programs of libvdeplug on both switches: one stream of TCP between two TAPs of `vde_plug2tap`.
//!
//! A client takes and gives one frame at a time and sleeps between them, so that the switch often has one
//! frame only: other than in [`vde`](super::vde), what waiting and waking cost is part of it.

use vnplug_e2e::Lab;
use vnplug_e2e::station::Station;

use super::arm::{Arm, PEER};
use super::calls::Calls;
use crate::row::{Figure, Plan, Result, Samples};
use crate::uplink::traffic;

const PORTS: usize = 32;

/// Samples of one switch: Mb/s, seconds of its processor time per GB, its system calls per frame.
type Series = [Samples; 3];

/// Both switches in turns.
pub(crate) fn programs(plan: &Plan) -> Result<Vec<Figure>> {
    let lab = Lab::new()?;
    let arms = Arm::both(&lab, PORTS, None)?;
    let station = |arm: &Arm, net: usize, host: u8| {
        Station::by_vde(&lab, &arm.dir, &format!("10.82.{net}.{host}"))
    };
    let mut pairs = Vec::new();
    for (net, arm) in arms.iter().enumerate() {
        pairs.push([station(arm, net, 1)?, station(arm, net, 2)?]);
    }
    let mut series: [Series; 2] = Default::default();
    for round in 1..=plan.rounds {
        for ((arm, pair), series) in arms.iter().zip(&pairs).zip(&mut series) {
            measure(arm, pair, plan, series)?;
            let [mbps, cost, calls] = series.each_ref().map(Samples::last);
            eprintln!(
                "  round {round}: {} {mbps:.0} Mb/s, {cost:.2} CPU s per GB, {calls:.2} system calls per frame",
                arm.name
            );
        }
    }
    let [ours, theirs] = series;
    let kinds = [
        ("", "Mb/s"),
        ("-cpu", "CPU s per GB"),
        ("-calls", "calls per frame"),
    ];
    let both = ours.into_iter().zip(theirs);
    let figures = kinds
        .into_iter()
        .zip(both)
        .map(|((suffix, unit), (ours, theirs))| Figure {
            name: format!("switch-plugs{suffix}"),
            unit,
            ours,
            peer: Some((PEER.to_owned(), theirs)),
            limit: None,
            note: "one stream of TCP between two TAPs (MTU 1500) of vde_plug2tap, Debian's; switch and \
                   clients on all CPUs; processor time of all threads of the switch; its system calls by \
                   perf, in a measurement of their own, per frame that it gave, acknowledgements included"
                .to_owned(),
        });
    Ok(figures.collect())
}

fn measure(arm: &Arm, pair: &[Station; 2], plan: &Plan, series: &mut Series) -> Result<()> {
    let [from, to] = pair;
    let stream = |time| traffic::tcp(&from.netns, &to.netns, &to.address, time);
    let before = arm.cpu_time()?;
    let mbps = stream(plan.time)?;
    let spent = arm.cpu_time()? - before;
    let gigabytes = mbps * plan.time.as_secs_f64() / 8000.0;
    let frames = || from.statistic("rx_packets") + to.statistic("rx_packets");
    let before = frames();
    let calls = Calls::of(arm.pid())?;
    stream(plan.time / 2)?;
    let calls = calls.finish()? as f64 / (frames() - before).max(1) as f64;
    let values = [mbps, spent.as_secs_f64() / gigabytes.max(1e-6), calls];
    for (samples, value) in series.iter_mut().zip(values) {
        samples.push(value);
    }
    Ok(())
}
