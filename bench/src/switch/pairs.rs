//! Guests in pairs, as a thesis on VDE measured them: TCP one way, then UDP both ways, in all pairs at
//! once; `vde_switch` beside the three ways into ours.
//!
//! ```text
//!   each guest of User-mode Linux   eth0 ── sockets ── vde_switch            the peer
//!                                   eth1 ── sockets ───────────── lan0 ┐
//!                                   eth2 ── vde_plug ── rings ─── lan1 ├ one daemon
//!                                   eth3 ── vde_plug ── direct ── lan3 │
//!                                   eth4 ── vhost-user ────────── lan2 ┘
//! ```
//!
//! All guests have all five interfaces, and speak over one kind of them at a time, in turns. Nothing has
//! a CPU of its own: guests and switches share what there is, so that ratios count and not the rates.

use std::time::Duration;

use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::station::{Running, module_environment};
use vnplug_e2e::{Lab, UmlConfig};

use super::arm::PEER;
use super::guests::{Bulk, Datagrams, Guests, Lan};
use super::talk::Pace;
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};

/// The guests, and the switches that they are on.
pub(super) struct Site {
    pub(super) guests: Guests,
    daemon: Daemon,
    switch: Running,
    _lab: Lab,
}

/// A way into a switch: its name in the figures, what it is, and the network that goes over it.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) lan: Lan,
}

/// The peer's first.
pub(super) const WAYS: [Way; 5] = [
    way("vde_switch", "its sockets", "eth0", 1),
    way("sockets", "our sockets of VDE", "eth1", 2),
    way("module", "vnplug:// by a vde_plug of each guest", "eth2", 3),
    way(
        "direct",
        "vnplug:// in direct mode by a vde_plug of each guest",
        "eth3",
        5,
    ),
    way("vhost", "vhost-user", "eth4", 4),
];

pub(super) const fn way(
    name: &'static str,
    what: &'static str,
    interface: &'static str,
    net: u8,
) -> Way {
    let lan = Lan { interface, net };
    Way { name, what, lan }
}

impl Site {
    /// Boots this number of guests on all of it.
    fn new(guests: usize) -> Result<Self> {
        Self::with(guests, &[])
    }

    /// As [`new`](Self::new), with further ways: each with an address of `vnplug://`.
    pub(super) fn with(guests: usize, more: &[(Way, &str)]) -> Result<Self> {
        let lab = Lab::new()?;
        let path = |name: &str| lab.dir().join(name);
        let [theirs, ours, vhost] = ["vde.ctl", "lan0.ctl", "lan2.sock"].map(path);
        let switch = Running::vde_switch(&lab, None, &theirs, &[])?;
        let sockets = format!("lan0,vde={}", ours.display());
        let by_vhost = format!("lan2,vhost={}", vhost.display());
        let args = [
            "--switch", &sockets, "--switch", "lan1", "--switch", &by_vhost, "--switch", "lan3",
        ];
        let daemon = Daemon::start(&lab, None, &args)?;
        let env = module_environment(&lab, &daemon)?;
        let mut kernel_args = vec![
            format!("eth0=vde,{}", theirs.display()),
            format!("eth1=vde,{}", ours.display()),
            "eth2=vde,vnplug://lan1".to_owned(),
            "eth3=vde,vnplug://lan3[direct=yes]".to_owned(),
            format!("virtio_uml.device={}:1", vhost.display()),
        ];
        let by_module = more
            .iter()
            .map(|(way, address)| (way.lan.interface, address));
        kernel_args
            .extend(by_module.map(|(interface, address)| format!("{interface}=vde,{address}")));
        let guests = Guests::boot(&lab, guests, |_| UmlConfig {
            kernel_args: kernel_args.clone(),
            env: env.clone(),
            ..UmlConfig::default()
        })?;
        for way in WAYS.iter().chain(more.iter().map(|(way, _)| way)) {
            guests.join(way.lan)?;
        }
        Ok(Self {
            guests,
            daemon,
            switch,
            _lab: lab,
        })
    }

    /// One stream of TCP in each pair, by this way.
    pub(super) fn tcp(&self, pairs: usize, way: Way, time: Duration) -> Result<Bulk> {
        let pid = match way.name {
            PEER => self.switch.pid(),
            _ => self.daemon.pid(),
        };
        self.guests.tcp(pairs, way.lan, time, || cpu_time(pid))
    }

    /// Datagrams both ways in each pair, by this way.
    pub(super) fn udp(
        &self,
        pairs: usize,
        way: Way,
        pace: Pace,
        time: Duration,
    ) -> Result<Datagrams> {
        let before = self.dropped();
        let datagrams = self.guests.udp(pairs, way.lan, pace, time)?;
        let dropped = self.dropped() - before;
        Ok(Datagrams {
            dropped,
            ..datagrams
        })
    }

    /// Frames for which a port of our switches, or its ring, had no room.
    fn dropped(&self) -> u64 {
        let counters = self.daemon.counters();
        let full = counters.iter().map(|it| match it.kind.as_str() {
            "source" => value(it, "out_dropped_full"),
            "port" => value(it, "dropped_full"),
            _ => 0,
        });
        full.sum()
    }
}

/// Samples of one way.
#[derive(Default)]
struct Series {
    rate: Samples,
    cost: Samples,
    lost: Samples,
}

/// How many guests there are, in pairs.
pub(crate) fn pairs(plan: &Plan, guests: usize) -> Result<Vec<Figure>> {
    let site = Site::new(guests)?;
    let pairs = guests / 2;
    let pace = Pace {
        mbps: published_mbps(guests),
        tick: Duration::from_millis(1),
    };
    let mut series = WAYS.map(|_| Series::default());
    for round in 1..=plan.rounds {
        for (way, series) in WAYS.into_iter().zip(&mut series) {
            let bulk = site.tcp(pairs, way, plan.time)?;
            let datagrams = site.udp(pairs, way, pace, plan.time)?;
            series.rate.push(bulk.gbps);
            series.cost.push(bulk.cpu_s);
            series.lost.push(datagrams.lost_percent());
            eprintln!(
                "  round {round}, {guests} guests: {} {:.3} Gb/s, {:.2} CPU s per GB, {datagrams}",
                way.name, bulk.gbps, bulk.cpu_s
            );
        }
    }
    let [theirs, ours @ ..] = &series;
    let mut figures = Vec::new();
    for (way, ours) in WAYS[1..].iter().zip(ours) {
        let kinds = [
            ("", "Gb/s", &ours.rate, &theirs.rate),
            ("-cpu", "CPU s per GB", &ours.cost, &theirs.cost),
            ("-udp", "% lost", &ours.lost, &theirs.lost),
        ];
        for (suffix, unit, ours, theirs) in kinds {
            figures.push(Figure {
                name: format!("switch-pairs-{guests}-{}{suffix}", way.name),
                unit,
                ours: ours.clone(),
                peer: Some((PEER.to_owned(), theirs.clone())),
                limit: None,
                note: note(guests, *way, pace.mbps, plan.time),
            });
        }
    }
    Ok(figures)
}

fn note(guests: usize, way: Way, mbps: f64, time: Duration) -> String {
    format!(
        "{guests} guests of User-mode Linux in pairs, {} s each: one stream of TCP in each pair, all pairs \
         together; then datagrams of {} bytes both ways at {mbps} Mb/s each, into sockets with room for 8 MiB. Ours by {}, the peer by \
         sockets; processor time of all threads of the switch, without what guests and their vde_plug \
         spend",
        time.as_secs_f64(),
        crate::streams::DATAGRAM,
        way.what
    )
}

/// Mb/s of each flow of datagrams in the thesis' measurement with as many machines: half of what a
/// machine had by TCP over shared memory, the faster of its two ways.
fn published_mbps(guests: usize) -> f64 {
    match guests {
        ..=2 => 105.0,
        3..=4 => 70.0,
        5..=6 => 60.0,
        _ => 45.0,
    }
}
