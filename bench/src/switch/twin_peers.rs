//! The twin beside other ways between two containers: Open vSwitch, vde_switch and testpmd; and beside a guest on a
//! TAP, whose network is the longer way of Menon's figures 4.4 and 4.5.

use std::thread::sleep;
use std::time::Duration;

use vnplug_e2e::containers::{address, wire};
use vnplug_e2e::station::{Running, Station, pings};
use vnplug_e2e::{Lab, Netns, UmlConfig};

use super::guests::{Guests, Lan};
use super::lans::{Lans, pair};
use super::ovs::Ovs;
use super::talk::Talk;
use super::twin::{Site, round_trip, tcp};
use crate::dpdk::{Testpmd, WorkerCpu};
use crate::row::{Figure, Plan, Result, Samples};

/// Two containers, and what is between them.
struct Pair<'a> {
    name: &'static str,
    peer: &'static str,
    containers: [&'a Netns; 2],
}

/// Two namespaces, wired to a third by veths.
struct Wired {
    here: Netns,
    all: [Netns; 2],
}

impl Wired {
    fn new() -> Result<Self> {
        let (here, all) = (Netns::new()?, [Netns::new()?, Netns::new()?]);
        for (netns, number) in all.iter().zip(1..) {
            wire(&here, netns, number)?;
        }
        Ok(Self { here, all })
    }

    /// Nothing that a packet socket with buffers of a page cannot take.
    fn only_plain_frames(&self) -> Result<()> {
        for netns in &self.all {
            let off = ["tx", "off", "tso", "off", "gso", "off"];
            netns.exec(&[&["ethtool", "-K", "eth0"][..], &off].concat())?;
        }
        Ok(())
    }
}

/// One stream and requests between two containers, by each of them in turn.
pub(crate) fn peers(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new(1, "/twin=on")?;
    let (lab, by_ovs, by_pmd) = (Lab::new()?, Wired::new()?, Wired::new()?);
    let ovs = Ovs::between_taps(&lab, &by_ovs.here)?;
    for port in ["c1", "c2"] {
        ovs.interface(port)?;
    }
    by_pmd.only_plain_frames()?;
    let dir = lab.dir().join("vde.ctl");
    let _vde_switch = Running::vde_switch(&lab, None, &dir, &[])?;
    let one = Station::by_vde(&lab, &dir, &address(1))?;
    let two = Station::by_vde(&lab, &dir, &address(2))?;
    let arms = [
        Pair {
            name: "",
            peer: "twin",
            containers: [&site.ours.all[0], &site.ours.all[1]],
        },
        Pair {
            name: "bridge",
            peer: "Linux bridge, veths",
            containers: [&site.bridged[0], &site.bridged[1]],
        },
        Pair {
            name: "ovs",
            peer: "Open vSwitch in user space, veths",
            containers: [&by_ovs.all[0], &by_ovs.all[1]],
        },
        Pair {
            name: "vde",
            peer: "vde_switch, vde_plug2tap",
            containers: [&one.netns, &two.netns],
        },
        Pair {
            name: "testpmd",
            peer: "testpmd io, net_af_packet, veths",
            containers: [&by_pmd.all[0], &by_pmd.all[1]],
        },
    ];
    let [mut rates, mut trips] = [(); 2].map(|()| arms.each_ref().map(|_| Samples::default()));
    for round in 1..=plan.rounds {
        for (at, arm) in arms.iter().enumerate() {
            // It never sleeps, so it runs only while it is measured.
            let _testpmd = match arm.name {
                "testpmd" => Some(testpmd(&by_pmd.here)?),
                _ => None,
            };
            if !pings(arm.containers[0], &address(2), &["-c", "5", "-i", "0.2"]) {
                return Err(
                    format!("{}: its two containers do not reach each other", arm.peer).into(),
                );
            }
            rates[at].push(tcp(&arm.containers, plan.time)?);
            trips[at].push(round_trip(&arm.containers, plan.time)?);
        }
        let told = |all: &[Samples; 5]| all.each_ref().map(Samples::last);
        eprintln!(
            "  round {round}, twin, bridge, OVS, vde_switch, testpmd: {:.2?} Gb/s, {:.1?} us",
            told(&rates),
            told(&trips)
        );
    }
    if site.forwarded() < 1000 {
        return Err("the kernel instance forwarded nothing".into());
    }
    let mut figures = Vec::new();
    for (at, arm) in arms.iter().enumerate().skip(1) {
        let kinds = [
            ("", "Gb/s", &rates, "one stream of TCP"),
            (
                "-rtt",
                "us",
                &trips,
                "requests of one byte by TCP, one after the other",
            ),
        ];
        figures.extend(kinds.map(|(suffix, unit, samples, what)| Figure {
            name: format!("twin-peers-{}{suffix}", arm.name),
            unit,
            ours: samples[0].clone(),
            peer: Some((arm.peer.to_owned(), samples[at].clone())),
            limit: None,
            note: format!(
                "{what} between two network namespaces for {} s, by the kernel instance",
                plan.time.as_secs_f64()
            ),
        }));
    }
    Ok(figures)
}

/// Hands on whatever comes at either wire.
fn testpmd(here: &Netns) -> Result<Testpmd> {
    let devices: Vec<String> = (1..=2)
        .map(|number| format!("--vdev=net_af_packet{number},iface=c{number}"))
        .collect();
    let mut testpmd = Testpmd::within(here, WorkerCpu::First, &devices, &["--forward-mode=io"])?;
    testpmd.tell("start\n")?;
    sleep(STARTS);
    Ok(testpmd)
}

/// Two containers by the twin, beside a container and a guest of User-mode Linux with its TAP on a bridge, each way.
pub(crate) fn guest(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new(1, "/twin=on")?;
    let ours = [&site.ours.all[0], &site.ours.all[1]];
    let lans = Lans::new(1)?;
    let inner = Netns::new()?;
    pair(&lans.netns, "ct0", &inner, "in0", &LAN.address(ASKER))?;
    lans.netns.ip(&["link", "set", "ct0", "master", "br0"])?;
    let guests = Guests::boot(&lans.lab, 1, |guest| UmlConfig {
        kernel_args: lans.cards(guest).to_vec(),
        netns: Some(lans.netns.name().to_owned()),
        ..UmlConfig::default()
    })?;
    guests.join(LAN)?;
    let none = || Ok(Duration::ZERO);
    let mut rates = [(); 3].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let [twin, takes, gives] = &mut rates;
        twin.push(tcp(&ours, plan.time)?);
        takes.push(guests.takes(&inner, LAN, None, plan.time, none)?.gbps);
        let send = Talk::Send(LAN.address(ASKER));
        gives.push(guests.gives(&send, &inner, plan.time, none)?.gbps);
        let told = rates.each_ref().map(Samples::last);
        eprintln!("  round {round}, twin, to and from a guest on a TAP: {told:.2?} Gb/s");
    }
    let [twin, takes, gives] = &rates;
    let figure = |name: &str, peer: &str, samples: &Samples| Figure {
        name: name.to_owned(),
        unit: "Gb/s",
        ours: twin.clone(),
        peer: Some((peer.to_owned(), samples.clone())),
        limit: None,
        note: format!(
            "one stream of TCP for {} s; between two containers by the kernel instance, without an upcall; the peer's \
             is between a container and a guest of User-mode Linux by the vector driver's TAP on a Linux bridge",
            plan.time.as_secs_f64()
        ),
    };
    Ok(vec![
        figure("twin-guest-receives", "to a guest, TAP on a bridge", takes),
        figure("twin-guest-sends", "from a guest, TAP on a bridge", gives),
    ])
}

const LAN: Lan = Lan {
    interface: "vec0",
    net: 2,
};
/// The number of the container on the network of the guest.
const ASKER: usize = 49;
/// How long testpmd takes until it forwards.
const STARTS: Duration = Duration::from_secs(2);
