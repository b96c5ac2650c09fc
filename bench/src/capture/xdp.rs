//! The source `af_xdp` beside libpcap and beside the source `af_packet`, each on a veth of its own.

use std::process::Command;

use vnplug_e2e::daemon::Daemon;

use super::host::vnplug;
use super::{Series, WARM_UP, Way, frames, line_rate};
use crate::handoff::{Reading, Sizes};
use crate::limit::{self, Bare};
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;
use crate::wire::{Load, Wire};

/// Rate, loss and processor time of the three, flat out.
pub(crate) fn af_xdp(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let wire = Wire::new()?;
        wire.add(1)?;
        wire.add(2)?;
        let netns = Some(&wire.netns);
        let source = "wire0=af_xdp:wire0,fallback=no";
        let xdp = Daemon::start(&wire.lab, netns, &["--source", source])?;
        let packet = Daemon::start(&wire.lab, netns, &["--source", "wire2"])?;
        let command = Command::new(std::env::current_exe()?);
        let mut ways = [
            vnplug(&wire.lab, netns, &xdp, "far0", "wire0")?,
            Way::new("far1", None).on_host(netns, command, "wire1")?,
            vnplug(&wire.lab, netns, &packet, "far2", "wire2")?,
        ];
        for way in &mut ways {
            way.turn(&wire, WARM_UP, 64, Load::Steady(WARM_UP))?;
        }
        let mut figures = Vec::new();
        for size in [64, 1514] {
            let mut series: [Series; 3] = Default::default();
            let mut bare = Samples::default();
            for round in 1..=plan.rounds {
                let load = Load::Steady(line_rate(size));
                for (way, (series, name)) in ways.iter_mut().zip(series.iter_mut().zip(NAMES)) {
                    let turn = way.turn(&wire, frames(plan, size), size, load)?;
                    eprintln!("  round {round}, {size} B: {name} {turn}");
                    series.push(&turn);
                }
                let one = Bare::one(Sizes::One(size), 1 << 19, Reading::Header);
                bare.push(one.mpps(plan.time / 8)?);
            }
            figures.extend(compared(size, &series, &bare));
        }
        Ok(figures)
    })
}

fn compared(size: usize, [xdp, pcap, packet]: &[Series; 3], bare: &Samples) -> Vec<Figure> {
    let note = format!(
        "{size}-byte frames flat out, at most 10 Gbit/s, on a veth (native XDP, the kernel copies \
         once); pcap_dispatch over the drop-in and over libpcap; processor time of daemon and reader, \
         without what the kernel does in the sender's time"
    );
    // Microseconds per packet are seconds per million packets, of one CPU and of both.
    let [daemon, both]: [Samples; 2] =
        [1.0, 2.0].map(|cpus| bare.all().iter().map(|mpps| cpus / mpps).collect());
    let figure = |suffix: &str, unit, ours: &Samples, peer: &str, theirs: &Samples| Figure {
        name: format!("afxdp-{size}{suffix}"),
        unit,
        ours: ours.clone(),
        peer: Some((peer.to_owned(), theirs.clone())),
        limit: None,
        note: note.clone(),
    };
    let [_, libpcap, af_packet] = NAMES;
    vec![
        figure("", "Mpps", &xdp.rate, libpcap, &pcap.rate).limited(limit::SENDER, &xdp.offered),
        figure("-loss", "% lost", &xdp.lost, libpcap, &pcap.lost),
        figure("-cpu", COST, &xdp.cost, libpcap, &pcap.cost).limited(limit::BARE, &both),
        figure("-daemon", COST, &xdp.daemon_cost, libpcap, &pcap.cost)
            .limited(limit::BARE, &daemon),
        figure("-packet", "Mpps", &xdp.rate, af_packet, &packet.rate)
            .limited(limit::SENDER, &xdp.offered),
        figure("-packet-cpu", COST, &xdp.cost, af_packet, &packet.cost).limited(limit::BARE, &both),
        figure(
            "-packet-daemon",
            COST,
            &xdp.daemon_cost,
            af_packet,
            &packet.daemon_cost,
        )
        .limited(limit::BARE, &daemon),
    ]
}

const NAMES: [&str; 3] = ["af_xdp", "libpcap", "source af_packet"];
const COST: &str = "CPU s/Mpkt";
