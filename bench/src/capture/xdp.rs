//! The source `af_xdp` beside libpcap and beside the source `af_packet`, each on a veth of its own.
//!
//! The fourth is a bare loop over an AF_XDP socket, which forgets each frame as soon as it has seen
//! its header: what is left for ports between that and a goal. The fifth is a reader that looks at
//! frames where they were received (`arena=umem`). The last wire has no receiver: what the sender
//! takes longer for on the others is the kernel's work for a capture, in its time.

use std::process::Command;

use vnplug_e2e::Netns;
use vnplug_e2e::daemon::Daemon;

use super::host::vnplug;
use super::{Series, UNHEARD, WARM_UP, Way, frames, line_rate, unheard};
use crate::pcap::{BARE, IN_PLACE};
use crate::row::{Figure, Plan, Result, Samples};
use crate::wire::{Load, Wire};
use crate::{limit, sys};

/// Rate, loss and processor time of all, flat out.
pub(crate) fn af_xdp(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let wire = Wire::new()?;
        [1, 2, 3, 4, UNHEARD]
            .into_iter()
            .try_for_each(|number| wire.add(number))?;
        let netns = Some(&wire.netns);
        let source = "wire0=af_xdp:wire0,fallback=no";
        let xdp = Daemon::start(&wire.lab, netns, &["--source", source])?;
        let packet = Daemon::start(&wire.lab, netns, &["--source", "wire2"])?;
        let source = "wire4=af_xdp,fallback=no,arena=umem";
        let lent = Daemon::start(&wire.lab, netns, &["--source", source])?;
        let counter = |far, device: &str| {
            let command = Command::new(std::env::current_exe()?);
            Way::new(far, None).on_host(netns, command, device)
        };
        let mut ways = [
            vnplug(&wire.lab, netns, &xdp, "far0", "wire0")?,
            counter("far1", "wire1")?,
            vnplug(&wire.lab, netns, &packet, "far2", "wire2")?,
            counter("far3", &format!("{BARE}wire3"))?,
            in_place(netns, &lent, "far4", "wire4/bench")?,
        ];
        for way in &mut ways {
            way.turn(&wire, WARM_UP, 64, Load::Steady(WARM_UP))?;
        }
        let mut figures = Vec::new();
        for size in [64, 1514] {
            let (mut sides, mut sender): ([Side; 5], Samples) = Default::default();
            let load = Load::Steady(line_rate(size));
            let frames = frames(plan, size);
            for round in 1..=plan.rounds {
                sender.push(unheard(&wire, frames, size, load)?);
                let alone = 1.0 / sender.last();
                for (way, (side, name)) in ways.iter_mut().zip(sides.iter_mut().zip(NAMES)) {
                    let turn = way.turn(&wire, frames, size, load)?;
                    eprintln!("  round {round}, {size} B: {name} {turn}");
                    side.series.push(&turn);
                    // Microseconds per packet are seconds per million.
                    side.whole
                        .push(1.0 / turn.sent_mpps() - alone + turn.cost());
                }
            }
            figures.extend(compared(size, &sides, &sender));
        }
        Ok(figures)
    })
}

/// A reader of a group on the host that looks at packets where they lie.
fn in_place<'d>(
    netns: Option<&Netns>,
    daemon: &'d Daemon,
    far: &'static str,
    device: &str,
) -> Result<Way<'d>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env("VNPLUG_SOCKET", daemon.socket());
    let way = Way::new(far, Some(daemon));
    way.on_host(netns, command, &format!("{IN_PLACE}{device}"))
}

/// One way's turns.
#[derive(Default)]
struct Side {
    series: Series,
    /// Processor time per million packets that the machine has less because of this capture.
    whole: Samples,
}

fn compared(
    size: usize,
    [xdp, pcap, packet, bare, lent]: &[Side; 5],
    sender: &Samples,
) -> Vec<Figure> {
    let note = format!(
        "{size}-byte frames flat out, at most 10 Gbit/s, on a veth (native XDP, the kernel copies \
         twice); pcap_dispatch over the drop-in and over libpcap; processor time of daemon and reader, \
         without what the kernel does in the sender's time"
    );
    let figure = |suffix: &str, unit, ours: &Samples, peer: &str, theirs: &Samples| Figure {
        name: format!("afxdp-{size}{suffix}"),
        unit,
        ours: ours.clone(),
        peer: Some((peer.to_owned(), theirs.clone())),
        limit: None,
        note: note.clone(),
    };
    let cost = |suffix: &str, ours: &Samples, peer: &str, theirs: &Samples| {
        figure(suffix, COST, ours, peer, theirs).limited(NAMES[3], &bare.series.cost)
    };
    let [_, libpcap, af_packet, ..] = NAMES;
    let Side {
        series: xdp,
        whole: xdp_whole,
    } = xdp;
    let (pcap_whole, packet_whole) = (&pcap.whole, &packet.whole);
    let (pcap, packet) = (&pcap.series, &packet.series);
    let mut figures = vec![
        figure("", "Mpps", &xdp.rate, libpcap, &pcap.rate).limited(NAMES[3], &bare.series.rate),
        figure("-loss", "% lost", &xdp.lost, libpcap, &pcap.lost),
        cost("-cpu", &xdp.cost, libpcap, &pcap.cost),
        cost("-daemon", &xdp.daemon_cost, libpcap, &pcap.cost),
        figure("-packet", "Mpps", &xdp.rate, af_packet, &packet.rate)
            .limited(limit::SENDER, sender),
        cost("-packet-cpu", &xdp.cost, af_packet, &packet.cost),
        cost(
            "-packet-daemon",
            &xdp.daemon_cost,
            af_packet,
            &packet.daemon_cost,
        ),
    ];
    let lent = &lent.series;
    let in_place = [
        figure("-lent", "Mpps", &lent.rate, libpcap, &pcap.rate)
            .limited(NAMES[3], &bare.series.rate),
        cost("-lent-cpu", &lent.cost, libpcap, &pcap.cost),
        cost("-lent-daemon", &lent.daemon_cost, libpcap, &pcap.cost),
    ];
    figures.extend(in_place.map(|figure| Figure {
        note: format!("{}. {LENT}", figure.note),
        ..figure
    }));
    // With longer frames the sender may rest, and its time is not all work.
    if size == 64 {
        for (suffix, peer, theirs) in [
            ("-whole", libpcap, pcap_whole),
            ("-packet-whole", af_packet, packet_whole),
        ] {
            let note = format!(
                "{note}, and with that: what the sender takes longer for each packet than on a \
                 wire that nobody receives"
            );
            let figure = figure(suffix, COST, xdp_whole, peer, theirs);
            figures.push(Figure { note, ..figure }.limited(NAMES[3], &bare.whole));
        }
    }
    figures
}

const NAMES: [&str; 5] = [
    "af_xdp",
    "libpcap",
    "source af_packet",
    "a bare AF_XDP loop",
    "af_xdp, read in place",
];
const LENT: &str = "Ours is a reader of a group with arena=umem, which looks at the header and 16 bytes \
                    of each frame where it was received, by Port::next_view";
const COST: &str = "CPU s/Mpkt";
