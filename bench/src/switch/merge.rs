//! One stream of TCP from a wire to a guest: single segments, merged by the switch (`gro=N`) or by the kernel.
//!
//! ```text
//!   far0 ── up0 ── switch (uplink=, gro=N) ── eth0 ┐ one guest of
//!   far1 ── up1 ── bridge ── tap0 ────────── vec0 ┘ User-mode Linux
//! ```
//!
//! The far machine sends segments of the wire: its stack leaves nothing to a card. Here nothing merges before
//! the switch; on the way through the bridge the kernel does (GRO of the veth).

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::{Lab, Netns, UmlConfig};

use super::guests::{Bulk, Guests, Lan};
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};

/// The most segments of a super-frame; 0: none are merged.
const LIMITS: [usize; 8] = [0, 2, 4, 8, 12, 20, 28, 44];
const OURS: Lan = Lan {
    interface: "eth0",
    net: 1,
};
const KERNELS: Lan = Lan {
    interface: "vec0",
    net: 2,
};

struct Site {
    guests: Guests,
    daemon: Daemon,
    _here: Netns,
    far: Netns,
    _lab: Lab,
}

impl Site {
    fn new() -> Result<Self> {
        let (lab, here, far) = (Lab::new()?, Netns::new()?, Netns::new()?);
        for (wire, lan) in [OURS, KERNELS].into_iter().enumerate() {
            let [up, there] = ["up", "far"].map(|it| format!("{it}{wire}"));
            let peer = ["peer", "name", &there, "netns", far.name()];
            let veth = ["link", "add", &up, "type", "veth"];
            here.ip(&[&veth[..], &peer].concat())?;
            let address = format!("{}/24", lan.address(99));
            far.ip(&["addr", "add", &address, "dev", &there])?;
            far.ip(&["link", "set", &there, "up"])?;
            here.ip(&["link", "set", &up, "up"])?;
            let whole = ["tx", "off", "tso", "off", "gso", "off"];
            far.exec(&[&["ethtool", "-K", &there], &whole[..]].concat())?;
        }
        here.exec(&["ethtool", "-K", "up0", "gro", "off"])?;
        here.exec(&["ethtool", "-K", "up1", "gro", "on"])?;
        here.tap("tap0")?;
        here.bridge("br0", &["up1", "tap0"])?;
        let socket = lab.dir().join("lan0.sock");
        let spec = format!("lan0,vhost={},uplink=up0", socket.display());
        let daemon = Daemon::start(&lab, Some(&here), &["--switch", &spec])?;
        let guests = Guests::boot(&lab, 1, |_| UmlConfig {
            kernel_args: vec![
                format!("virtio_uml.device={}:1", socket.display()),
                "vec0:transport=tap,ifname=tap0,depth=128,gro=1".to_owned(),
            ],
            netns: Some(here.name().to_owned()),
            ..UmlConfig::default()
        })?;
        for lan in [OURS, KERNELS] {
            guests.join(lan)?;
        }
        Ok(Self {
            guests,
            daemon,
            _here: here,
            far,
            _lab: lab,
        })
    }

    fn tcp(&self, lan: Lan, plan: &Plan) -> Result<Bulk> {
        self.guests.takes(&self.far, lan, plan.time, || {
            Ok(cpu_time(self.daemon.pid())? + self.guests.cpu_time())
        })
    }

    /// As many segments become one super-frame at most. The guest's is the port behind the uplink's.
    fn merge(&self, limit: usize) -> Result<()> {
        let text = match limit {
            0 => "gro=off".to_owned(),
            limit => format!("gro={limit}"),
        };
        match self.daemon.vnplug(&["switch", "set", "lan0/port2", &text]) {
            (Some(0), _) => Ok(()),
            (_, said) => Err(said.into()),
        }
    }
}

/// Rates, and processor time of the guest and the switch, by the limit.
pub(crate) fn merge(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut rates: Vec<Samples> = vec![Samples::default(); LIMITS.len()];
    let (mut costs, mut kernels) = (rates.clone(), Samples::default());
    for round in 1..=plan.rounds {
        let mut told = Vec::new();
        for (at, limit) in LIMITS.into_iter().enumerate() {
            site.merge(limit)?;
            let bulk = site.tcp(OURS, plan)?;
            rates[at].push(bulk.gbps);
            costs[at].push(bulk.cpu_s);
            told.push(format!("{limit}: {:.2}, {:.2}", bulk.gbps, bulk.cpu_s));
        }
        let bulk = site.tcp(KERNELS, plan)?;
        kernels.push(bulk.gbps);
        let told = told.join("; ");
        eprintln!(
            "  round {round}: {told} Gb/s, CPU s per GB; kernel's GRO, TAP: {:.2} Gb/s",
            bulk.gbps
        );
    }
    let note = "one stream of TCP of single segments of 1,448 bytes from a veth (its sender leaves nothing to \
                a card) by an uplink to a guest of User-mode Linux by vhost-user";
    let figure = |name: String, unit, ours: &Samples, peer: &str, theirs: &Samples| Figure {
        name,
        unit,
        ours: ours.clone(),
        peer: Some((peer.to_owned(), theirs.clone())),
        limit: None,
        note: note.to_owned(),
    };
    let mut figures = Vec::new();
    for (at, limit) in LIMITS.into_iter().enumerate().skip(1) {
        let name = format!("merge-{limit}");
        figures.push(figure(name, "Gb/s", &rates[at], WITHOUT, &rates[0]));
        let name = format!("merge-{limit}-cpu");
        figures.push(figure(name, "CPU s per GB", &costs[at], WITHOUT, &costs[0]));
        if limit == MENONS {
            let peer = "kernel's GRO, TAP on a bridge";
            figures.push(figure(
                "merge-kernel".into(),
                "Gb/s",
                &rates[at],
                peer,
                &kernels,
            ));
        }
    }
    Ok(figures)
}

/// The peer's name where it is ours without merging.
const WITHOUT: &str = "ours, gro=off";
/// The limit of Menon's measurements.
const MENONS: usize = 20;
