//! Early drop: the kernel refuses what no port wants, before it costs the daemon anything.
//!
//! 1,000 flows in turn, flat out, and one reader that wants one of them, or half of them. Ours lets
//! the kernel apply the filter (the default), beside the same filter in the daemon alone, beside
//! libpcap, which attaches its filter to its socket too, and beside the source `af_xdp`, which asks an
//! XDP program. The kernel's filter runs in the sender's time, so that what the sender reaches stands
//! beside the processor time.

use std::process::Command;

use vnplug_e2e::daemon::Daemon;

use super::host::vnplug_filtered;
use super::{Turn, UNHEARD, WARM_UP, Way, frames, line_rate, unheard};
use crate::handoff::{Reading, Sizes};
use crate::limit::{self, Bare};
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::sys;
use crate::wire::{Load, Wire};

/// What the reader wants: a word for names, the filter, and how many of the flows it takes.
const WANTED: [(&str, &str, u64); 2] = [
    ("thousandth", "udp src port 49152", 1),
    ("half", "udp src portrange 49152-49651", 500),
];

/// Processor time, rate of the sender and share of the wanted packets, of all four.
pub(crate) fn early(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let mut figures = Vec::new();
        for (word, filter, flows) in WANTED {
            figures.extend(wanting(plan, word, filter, flows)?);
        }
        Ok(figures)
    })
}

fn wanting(plan: &Plan, word: &str, filter: &'static str, flows: u64) -> Result<Vec<Figure>> {
    let wire = Wire::new()?;
    for number in [1, 2, 3, UNHEARD] {
        wire.add(number)?;
    }
    let netns = Some(&wire.netns);
    let daemon = |source| Daemon::start(&wire.lab, netns, &["--source", source]);
    let early = daemon("wire0")?;
    let late = daemon("wire1=af_packet:wire1,early=no")?;
    let xdp = daemon("wire2=af_xdp:wire2,fallback=no,early=yes")?;
    let ours = |daemon, far, source| vnplug_filtered(&wire.lab, netns, daemon, far, source, filter);
    let libpcap = Way::new("far3", None).filtered(filter);
    let mut ways = [
        ours(&early, "far0", "wire0")?,
        ours(&late, "far1", "wire1")?,
        ours(&xdp, "far2", "wire2")?,
        libpcap.on_host(netns, Command::new(std::env::current_exe()?), "wire3")?,
    ];
    for way in &mut ways {
        way.turn(&wire, WARM_UP, LEN, Load::Flows(WARM_UP, FLOWS))?;
    }
    let load = Load::Flows(line_rate(LEN), FLOWS);
    // Whole rounds over the flows.
    let frames = frames(plan, LEN).next_multiple_of(u64::from(FLOWS));
    let mut series: [Series; 4] = Default::default();
    let (mut alone, mut bare) = (Samples::default(), Samples::default());
    for round in 1..=plan.rounds {
        for (way, (series, name)) in ways.iter_mut().zip(series.iter_mut().zip(NAMES)) {
            let turn = way.turn(&wire, frames, LEN, load)?;
            series.push(&turn, flows);
            let [cpu, sent, kept] = [&series.cpu, &series.sent, &series.kept].map(Samples::last);
            eprintln!(
                "  round {round}, {word}: {name} {cpu:.4} CPU s/M on the wire, {sent:.3} Mpps sent, \
                 {kept:.2} % of the wanted"
            );
        }
        alone.push(unheard(&wire, frames, LEN, load)?);
        let passed = Bare::one(Sizes::One(LEN), 1 << 19, Reading::Header).mpps(plan.time / 8)?;
        // Both CPUs' microseconds for what is wanted are seconds per million.
        bare.push(2.0 / passed * flows as f64 / f64::from(FLOWS));
    }
    let [early, late, xdp, pcap] = &series;
    let figure = |suffix: &str, unit, ours: &Samples, peer: (&str, &Samples), limit| Figure {
        name: format!("early-{word}{suffix}"),
        unit,
        ours: ours.clone(),
        peer: Some((peer.0.to_owned(), peer.1.clone())),
        limit,
        note: format!(
            "{LEN}-byte frames of {FLOWS} flows in turn, flat out on a veth, of which {filter:?} \
             wants {flows}; pcap_dispatch over the drop-in and over libpcap; processor time of \
             daemon and reader per million packets on the wire, without what the kernel does in the \
             sender's time, for which `-sent` stands"
        ),
    };
    let cpu = Some(Limit::new("bare transfer of the wanted", bare));
    let sent = Some(Limit::new(limit::SENDER, alone));
    let [_, off, _, libpcap] = NAMES;
    Ok(vec![
        figure("-cpu", COST, &early.cpu, (libpcap, &pcap.cpu), cpu.clone()),
        figure("-cpu-off", COST, &early.cpu, (off, &late.cpu), cpu.clone()),
        figure("-cpu-afxdp", COST, &xdp.cpu, (libpcap, &pcap.cpu), cpu),
        figure(
            "-sent",
            "Mpps",
            &early.sent,
            (libpcap, &pcap.sent),
            sent.clone(),
        ),
        figure(
            "-sent-off",
            "Mpps",
            &early.sent,
            (off, &late.sent),
            sent.clone(),
        ),
        figure(
            "-sent-afxdp",
            "Mpps",
            &xdp.sent,
            (libpcap, &pcap.sent),
            sent,
        ),
        figure("-kept", KEPT, &early.kept, (libpcap, &pcap.kept), None),
        figure("-kept-off", KEPT, &early.kept, (off, &late.kept), None),
        figure("-kept-afxdp", KEPT, &xdp.kept, (libpcap, &pcap.kept), None),
    ])
}

/// The turns of one way.
#[derive(Default)]
struct Series {
    cpu: Samples,
    sent: Samples,
    kept: Samples,
}

impl Series {
    fn push(&mut self, turn: &Turn, flows: u64) {
        self.cpu.push(turn.cost_on_wire());
        self.sent.push(turn.sent_mpps());
        let wanted = flows as f64 / f64::from(FLOWS);
        self.kept.push(turn.kept() / wanted * 100.0);
    }
}

const NAMES: [&str; 4] = [
    "early in the kernel",
    "early=no",
    "af_xdp, early",
    "libpcap",
];
const LEN: usize = 60;
const FLOWS: u32 = 1000;
const COST: &str = "CPU s/M on wire";
const KEPT: &str = "% of the wanted";
