//! The source `af_xdp` beside libpcap and beside the source `af_packet`, each on a veth of its own.

use std::process::Command;

use vnplug_e2e::daemon::Daemon;

use super::host::vnplug;
use super::{Series, WARM_UP, Way, frames, line_rate};
use crate::row::{Figure, Plan, Result};
use crate::wire::{Load, Wire};
use crate::{limit, sys};

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
            for round in 1..=plan.rounds {
                let load = Load::Steady(line_rate(size));
                for (way, (series, name)) in ways.iter_mut().zip(series.iter_mut().zip(NAMES)) {
                    let turn = way.turn(&wire, frames(plan, size), size, load)?;
                    eprintln!("  round {round}, {size} B: {name} {turn}");
                    series.push(&turn);
                }
            }
            figures.extend(compared(size, &series));
        }
        Ok(figures)
    })
}

fn compared(size: usize, [xdp, pcap, packet]: &[Series; 3]) -> Vec<Figure> {
    let note = format!(
        "{size}-byte frames flat out, at most 10 Gbit/s, on a veth (native XDP, the kernel copies \
         once); pcap_dispatch over the drop-in and over libpcap; processor time of daemon and reader, \
         without what the kernel does in the sender's time"
    );
    let figure = |suffix: &str,
                  unit,
                  ours: &crate::row::Samples,
                  peer: &str,
                  theirs: &crate::row::Samples| Figure {
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
        figure("-cpu", COST, &xdp.cost, libpcap, &pcap.cost),
        figure("-daemon", COST, &xdp.daemon_cost, libpcap, &pcap.cost),
        figure("-packet", "Mpps", &xdp.rate, af_packet, &packet.rate)
            .limited(limit::SENDER, &xdp.offered),
        figure("-packet-cpu", COST, &xdp.cost, af_packet, &packet.cost),
        figure(
            "-packet-daemon",
            COST,
            &xdp.daemon_cost,
            af_packet,
            &packet.daemon_cost,
        ),
    ]
}

const NAMES: [&str; 3] = ["af_xdp", "libpcap", "source af_packet"];
const COST: &str = "CPU s/Mpkt";
