//! What moves frames between a wire and a switch: rings that are mapped, AF_XDP, or a read and a write for each frame.
//!
//! A thesis on VDE replaced the last by the first. Each has a wire of its own to the same far machine, and frames of the
//! wire only: nothing is merged, or left to be cut. Ours are a switch with an uplink and a guest by `vnplug nic`, whose
//! own work is in the figures. The peer is a program of forty lines, without a switch, between the wire and a TAP.

use std::time::Duration;

use vnplug_e2e::Netns;
use vnplug_e2e::station::{Running, Station};

use super::site::{Ours, Site, far_address, far_frames};
use super::traffic;
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};
use crate::switch::Calls;

/// Name, what follows the interface in `uplink=`, and the wire.
const ENGINES: [(&str, &str, usize); 2] = [("rings", "", 0), ("xdp", "/af_xdp", 1)];
/// The peer's wire.
const PLAIN: usize = 2;
const WAYS: [&str; 2] = ["in", "out"];
const KINDS: [(&str, &str); 4] = [
    ("", "Gb/s"),
    ("-cpu", "CPU s per GB"),
    ("-calls", "calls per frame"),
    (DAEMON, "calls per frame"),
];
/// System calls of the first program alone, which is the daemon: the peer has none.
const DAEMON: &str = "-daemon-calls";

/// A guest, its address and its wire, and the programs that move frames between the two.
struct Arm<'a> {
    guest: &'a Netns,
    address: &'a str,
    wire: usize,
    programs: Vec<u32>,
}

/// By way, and by kind of figure.
type Series = [[Samples; 4]; 2];

/// All of them in turns.
pub(crate) fn engines(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    site.offloads(false, false)?;
    let mut ours = Vec::new();
    for (_, kind, wire) in ENGINES {
        ours.push(site.engine(wire, kind)?);
    }
    let (plain, guest) = site.read_and_write(PLAIN)?;
    let mut arms: Vec<_> = ours
        .iter()
        .zip(ENGINES)
        .map(|(it, (.., wire))| it.arm(wire))
        .collect();
    arms.push(Arm {
        guest: &guest,
        address: super::site::PLAIN,
        wire: PLAIN,
        programs: vec![plain.pid()],
    });
    let mut all: [Series; 3] = Default::default();
    for round in 1..=plan.rounds {
        for (arm, series) in arms.iter().zip(&mut all) {
            for (way, series) in WAYS.into_iter().zip(series) {
                measure(&site, arm, way, plan.time, series)?;
            }
        }
        let told = all
            .each_ref()
            .map(|of| of.each_ref().map(|it| it.each_ref().map(Samples::last)));
        eprintln!(
            "  round {round}: Gb/s, CPU s per GB, calls; in and out: rings, AF_XDP, read and write {told:.2?}"
        );
    }
    let [rings, xdp, theirs] = all;
    let mut figures = Vec::new();
    for ((engine, ..), ours) in ENGINES.into_iter().zip([rings, xdp]) {
        for ((way, ours), theirs) in WAYS.into_iter().zip(ours).zip(&theirs) {
            for (((suffix, unit), ours), theirs) in KINDS.into_iter().zip(ours).zip(theirs) {
                figures.push(Figure {
                    name: format!("uplink-engines-{engine}-{way}{suffix}"),
                    unit,
                    ours,
                    peer: (suffix != DAEMON).then(|| (PEER.to_owned(), theirs.clone())),
                    limit: None,
                    note: note(plan.time),
                });
            }
        }
    }
    Ok(figures)
}

/// One stream of a time, and half a one for its system calls.
fn measure(
    site: &Site,
    arm: &Arm<'_>,
    way: &str,
    time: Duration,
    series: &mut [Samples; 4],
) -> Result<()> {
    let there = far_address(arm.wire);
    let stream = |time| match way {
        "in" => traffic::tcp(&site.far, arm.guest, arm.address, time),
        _ => traffic::tcp(arm.guest, &site.far, &there, time),
    };
    let spent = || {
        arm.programs
            .iter()
            .map(|&pid| cpu_time(pid))
            .sum::<Result<Duration>>()
    };
    let before = spent()?;
    let mbps = stream(time)?;
    let gigabytes = mbps * time.as_secs_f64() / 8000.0;
    let cost = (spent()? - before).as_secs_f64() / gigabytes.max(1e-6);
    let frames = far_frames(&site.far, arm.wire)?;
    let calls: Result<Vec<_>> = arm.programs.iter().map(|&pid| Calls::of(pid)).collect();
    let calls = calls?;
    stream(time / 2)?;
    let frames = far_frames(&site.far, arm.wire)? - frames;
    let calls: Result<Vec<_>> = calls.into_iter().map(Calls::finish).collect();
    let calls = calls?;
    let per_frame = |calls: &[u64]| calls.iter().sum::<u64>() as f64 / frames.max(1) as f64;
    let values = [
        mbps / 1000.0,
        cost,
        per_frame(&calls),
        per_frame(&calls[..1]),
    ];
    for (samples, value) in series.iter_mut().zip(values) {
        samples.push(value);
    }
    Ok(())
}

impl Ours {
    fn arm(&self, wire: usize) -> Arm<'_> {
        let Station {
            netns,
            address,
            cable,
            ..
        } = &self.station;
        Arm {
            guest: netns,
            address,
            wire,
            programs: vec![self.daemon.pid(), Running::pid(cable)],
        }
    }
}

fn note(time: Duration) -> String {
    format!(
        "one stream of TCP over a veth to a guest and from it, {} s; frames of 1,514 bytes, checksums filled, \
         nothing merged or left to be cut; ours: the daemon with an uplink and vnplug nic --segments wire; the peer: \
         one thread that polls a packet socket and a TAP, and reads and writes each frame, without a switch; \
         processor time and system calls of all programs that move frames; calls by perf, in a measurement of \
         their own, per frame of the wire, acknowledgements included",
        time.as_secs_f64()
    )
}

const PEER: &str = "read and write";
