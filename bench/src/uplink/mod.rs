//! A switch's uplink, beside Debian's `vde_switch` with `vde_pcapplug`.
//!
//! Both ways have a wire of their own to the same far machine, and the same kind of guest: a namespace
//! with the TAP of `vde_plug2tap`. They are measured in turns. [`engines()`] is beside no switch.

mod engines;
mod site;
pub(crate) mod traffic;

pub(crate) use engines::engines;

use std::time::Duration;

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::Station;

use crate::row::{Figure, Limit, Plan, Result, Samples};
use site::{Peer, Site, Told};

/// What the far machine leaves to its NIC, and whether the kernel merges what arrives.
const CELLS: [(&str, bool, bool); 4] = [
    ("gso-gro", true, true),
    ("gso-nogro", true, false),
    ("cut-gro", false, true),
    ("cut-nogro", false, false),
];
/// Which way: from the far machine to the guest, or from the guest.
const WAYS: [&str; 4] = ["in", "out", "both-in", "both-out"];

/// Samples of one way in one cell.
#[derive(Default)]
struct Cell {
    /// By way, of TCP in Mb/s.
    tcp: [Samples; 4],
    /// By way, of UDP in per cent lost.
    udp: [Samples; 4],
    /// What was counted beside, while TCP came in.
    told: Told,
}

/// On a wire of 100 Mbit/s, in every cell.
pub(crate) fn puzzle(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    site.shape()?;
    let (ours, peer) = (site.ours()?, site.peer()?);
    let mut cells: [[Cell; 2]; 4] = Default::default();
    for round in 1..=plan.rounds {
        for ((name, gso, gro), cells) in CELLS.into_iter().zip(&mut cells) {
            site.offloads(gso, gro)?;
            for (cell, (station, wire, who)) in cells.iter_mut().zip([
                (&ours.station, 0, "vNPlug"),
                (&peer.station, 1, "vde_pcapplug"),
            ]) {
                measure(&site, station, wire, plan.time, cell)?;
                let tcp = cell.tcp.each_ref().map(Samples::last);
                let udp = cell.udp.each_ref().map(Samples::last);
                eprintln!(
                    "  round {round}, {name}: {who} {tcp:.2?} Mb/s, lost {udp:.2?} %, {}",
                    cell.told
                );
            }
        }
    }
    let mut figures = Vec::new();
    for ((name, ..), [ours, theirs]) in CELLS.into_iter().zip(&cells) {
        let kinds = [
            ("tcp", "Mb/s", &ours.tcp, &theirs.tcp),
            ("udp", "% of packets", &ours.udp, &theirs.udp),
        ];
        for (kind, unit, ours_by, theirs_by) in kinds {
            for (at, way) in WAYS.into_iter().enumerate() {
                let beside = match (kind, way) {
                    ("tcp", "in") => format!(
                        "; while TCP came in, all rounds: vNPlug {}; vde_pcapplug {}",
                        ours.told, theirs.told
                    ),
                    _ => String::new(),
                };
                figures.push(Figure {
                    name: format!("uplink-puzzle-{name}-{kind}-{way}"),
                    unit,
                    ours: ours_by[at].clone(),
                    peer: Some((PEER.into(), theirs_by[at].clone())),
                    limit: None,
                    note: format!("{}{beside}", note(name, plan.time)),
                });
            }
        }
    }
    Ok(figures)
}

fn note(cell: &str, time: Duration) -> String {
    let (sender, receiver) = cell.split_once('-').unwrap_or_default();
    let sender = match sender {
        "gso" => "super-frames, cut as it sends",
        _ => "single frames",
    };
    let receiver = match receiver {
        "gro" => "merges what arrives (GRO)",
        _ => "does not merge",
    };
    format!(
        "veth with a token bucket of 100 Mbit/s and 16 KB each way; the far machine's stack makes {sender} \
         and fills checksums; the switch's kernel {receiver}; guests are TAPs of vde_plug2tap; {} s each; \
         UDP at 95 Mb/s; vde_pcapplug with a read time-out of 1 ms, without which nothing comes in",
        time.as_secs_f64()
    )
}

/// One round of one way.
fn measure(
    site: &Site,
    station: &Station,
    wire: usize,
    time: Duration,
    cell: &mut Cell,
) -> Result<()> {
    let (guest, far) = (&station.netns, &site.far);
    let [here, there] = [&station.address, &site::far_address(wire)];
    let before = site.told(station)?;
    let long = site.watch_long(wire)?;
    let into = traffic::tcp(far, guest, here, time)?;
    let counted = site.told(station)?.since(&before);
    cell.told.add(&counted, site::long_frames(long));
    let out = traffic::tcp(guest, far, there, time)?;
    let both = traffic::both(
        || traffic::tcp(far, guest, here, time),
        || traffic::tcp(guest, far, there, time),
    )?;
    for (samples, value) in cell.tcp.iter_mut().zip([into, out, both.0, both.1]) {
        samples.push(value);
    }
    let into = traffic::udp(far, guest, here, time)?;
    let out = traffic::udp(guest, far, there, time)?;
    let both = traffic::both(
        || traffic::udp(far, guest, here, time),
        || traffic::udp(guest, far, there, time),
    )?;
    for (samples, value) in cell.udp.iter_mut().zip([into, out, both.0, both.1]) {
        samples.push(value);
    }
    Ok(())
}

/// A guest, its wire, and the processor time that moving its frames has taken.
type Arm<'a> = (&'a Station, usize, &'a dyn Fn() -> Result<Duration>);

/// Without a limit: as fast as the machine can.
pub(crate) fn speed(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let (ours, peer) = (site.ours()?, site.peer()?);
    // As a NIC does it, and without what breaks the peer.
    site.offloads(true, false)?;
    let rings = Station::by_nic(&site.lab, &ours.daemon, "lan0", "10.9.0.8", &[])?;
    let bridged = site.bridged()?;
    let mut of = [(); 3].map(|()| [(); 2].map(|()| [(); 2].map(|()| Samples::default())));
    let mut bridge = [(); 2].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let arms: [Arm<'_>; 3] = [
            (&ours.station, 0, &|| Ok(daemon_time(&ours.daemon))),
            (&peer.station, 1, &|| peer.cpu_time()),
            (&rings, 0, &|| {
                Ok(daemon_time(&ours.daemon) + crate::attached::cpu_time(rings.cable.pid())?)
            }),
        ];
        for ((station, wire, spent), samples) in arms.into_iter().zip(&mut of) {
            let (guest, far) = (&station.netns, &site.far);
            let there = site::far_address(wire);
            let ends = [(far, guest, &station.address), (guest, far, &there)];
            for ((from, to, address), samples) in ends.into_iter().zip(samples.iter_mut()) {
                let before = spent()?;
                let mbps = traffic::tcp(from, to, address, plan.time)?;
                let gigabytes = mbps * plan.time.as_secs_f64() / 8000.0;
                samples[0].push(mbps / 1000.0);
                samples[1].push((spent()? - before).as_secs_f64() / gigabytes.max(1e-6));
            }
        }
        let (guest, far) = (&bridged, &site.far);
        let there = site::far_address(2);
        bridge[0].push(traffic::tcp(far, guest, site::BRIDGED, plan.time)? / 1000.0);
        bridge[1].push(traffic::tcp(guest, far, &there, plan.time)? / 1000.0);
        let last = of.each_ref().map(|of| of.each_ref().map(|it| it[0].last()));
        eprintln!("  round {round}: Gb/s in and out: vNPlug, vde_pcapplug, rings {last:.2?}");
    }
    let [vde, theirs, nic] = &of;
    let mut figures = Vec::new();
    for (name, ours, what) in [
        ("vde", vde, "the guest is a TAP of vde_plug2tap"),
        (
            "rings",
            nic,
            "ours is an interface of vnplug nic, the peer's a TAP of vde_plug2tap",
        ),
    ] {
        for (at, way) in ["in", "out"].into_iter().enumerate() {
            let kinds = [("", "Gb/s"), ("-cpu", "CPU s per GB")];
            for (kind, (suffix, unit)) in kinds.into_iter().enumerate() {
                let limit = (kind == 0).then(|| Limit::new("bridge and veth", bridge[at].clone()));
                figures.push(Figure {
                    name: format!("uplink-speed-{name}-{way}{suffix}"),
                    unit,
                    ours: ours[at][kind].clone(),
                    peer: Some((PEER.into(), theirs[at][kind].clone())),
                    limit,
                    note: format!(
                        "one stream of TCP over a veth, checksums filled, GRO off at the switch; {what}; \
                         processor time of the switch and of what moves frames for it"
                    ),
                });
            }
        }
    }
    Ok(figures)
}

fn daemon_time(daemon: &Daemon) -> Duration {
    crate::attached::cpu_time(daemon.pid()).unwrap_or_default()
}

impl Peer {
    fn cpu_time(&self) -> Result<Duration> {
        let mut all = Duration::ZERO;
        for it in [&self.switch, &self.plug] {
            all += crate::attached::cpu_time(it.pid())?;
        }
        Ok(all)
    }
}

const PEER: &str = "vde_pcapplug";
