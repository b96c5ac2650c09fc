//! From guest to guest through a switch, by vhost-user: one CPU forwards, the other is both guests.
//!
//! A testpmd with two interfaces of virtio-user is both: it sends by one what comes by the other (`io`), so
//! that as many frames as it began with go round for ever, both ways. The switch takes each out of one
//! guest's memory and puts it into the other's; it reads addresses, learns and looks up. Its peers, in its
//! place: a testpmd with two interfaces of `net_vhost`, which forwards without looking at a frame; Open
//! vSwitch with DPDK, which learns as ours does; and a Linux bridge, to which both guests are TAPs.

use std::time::Instant;

use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::{Lab, Netns};

use super::ovs::Ovs;
use crate::dpdk::{Socket, Testpmd, WorkerCpu, patiently};
use crate::limit;
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::sys;

/// CPU that forwards, ours and the peer's. The guests have the other one.
const SWITCH_CPU: usize = 0;
/// What is appended to the row's name, the peer's name in the table, and what it does.
const PEERS: [(&str, &str, &str); 3] = [
    (
        "",
        "DPDK vhost-user (testpmd io)",
        "forwards between two net_vhost without looking at a frame",
    ),
    (
        "-ovs",
        "OVS-DPDK (NORMAL)",
        "is Open vSwitch with DPDK, two ports of vhost-user, one thread",
    ),
    (
        "-bridge",
        "Linux bridge, TAPs",
        "is a Linux bridge: the guests are two TAPs (net_tap), and whoever writes forwards",
    ),
];
/// Frames that go round each way, in bursts of 64: a quarter of a ring, so that none is dropped.
const BURSTS: usize = 4;
/// What both guests have: a split ring, the kind that both the switch and the peer know.
const CARD: &str = "queues=1,queue_size=1024,mrg_rxbuf=0,in_order=1";
/// Buffers of each of their rings.
const RING: usize = 1024;

/// Frames forwarded per microsecond, both ways together.
pub(crate) fn against_others(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    let mut ours = Samples::default();
    let mut peers = PEERS.map(|_| Samples::default());
    let mut bare = Samples::default();
    for round in 1..=plan.rounds {
        let rate = patiently(|| switch(plan, len))?;
        let rates = [
            patiently(|| testpmd(plan, len))?,
            patiently(|| ovs(plan, len))?,
            patiently(|| bridge(plan, len))?,
        ];
        let [io, ovs, bridge] = rates;
        let copies = limit::buffers_mpps(plan.time / 4, SWITCH_CPU, len, RING)?;
        eprintln!(
            "  round {round}: ours {rate:.2}, testpmd io {io:.2}, OVS {ovs:.2}, bridge {bridge:.2}, bare copies \
             {copies:.2} Mpps"
        );
        ours.push(rate);
        bare.push(copies);
        peers
            .iter_mut()
            .zip(rates)
            .for_each(|(peer, rate)| peer.push(rate));
    }
    let figure = |((suffix, name, what), peer): ((&str, &str, &str), Samples)| Figure {
        name: format!("switch-vhost-{len}{suffix}"),
        unit: "Mpps",
        ours: ours.clone(),
        peer: Some((name.to_owned(), peer)),
        limit: Some(Limit::new(limit::BUFFERS, bare.clone())),
        note: format!(
            "{len}-byte frames between two guests of vhost-user, both ways, {} each way on their way; the \
             switch's thread on CPU {SWITCH_CPU}, one testpmd on the other CPU is both guests (virtio-user, \
             {CARD}) and sends by one what comes by the other. The peer {what}, on CPU {SWITCH_CPU}, for the \
             same guests. The limit: one CPU that \
             does nothing but copy such frames, through as many buffers as these rings have",
            BURSTS * 64
        ),
    };
    Ok(PEERS.into_iter().zip(peers).map(figure).collect())
}

fn switch(plan: &Plan, len: usize) -> Result<f64> {
    let lab = Lab::new()?;
    let socket = lab.dir().join("lan0.sock");
    let spec = format!(
        "lan0,cpus={},vhost={}",
        sys::cpu(SWITCH_CPU),
        socket.display()
    );
    let daemon = Daemon::start(&lab, None, &["--switch", &spec])?;
    let path = socket.display().to_string();
    let _guests = guests(len, &[path.clone(), path])?;
    rate(plan, || {
        Ok(value(counted(&daemon.counters(), "source"), "out_enqueued"))
    })
}

/// Counted up per microsecond, once it is.
fn rate(plan: &Plan, count: impl Fn() -> Result<u64>) -> Result<f64> {
    let begin = Instant::now();
    while count()? == 0 {
        if begin.elapsed() > plan.time * 4 + PATIENCE {
            return Err("no frame comes".into());
        }
        std::thread::sleep(PATIENCE / 100);
    }
    // The first part of traffic is not whole.
    std::thread::sleep(plan.time / 4);
    let (begin, before) = (Instant::now(), count()?);
    std::thread::sleep(plan.time);
    Ok((count()? - before) as f64 / begin.elapsed().as_secs_f64() / 1e6)
}

fn testpmd(plan: &Plan, len: usize) -> Result<f64> {
    let sockets = ["a", "b"].map(|end| Socket::new(&format!("switch-{end}")));
    let devices: Vec<String> = (0..)
        .zip(&sockets)
        .map(|(id, path)| format!("--vdev=net_vhost{id},iface={path},queues=1"))
        .collect();
    let mut forwarder = Testpmd::start(WorkerCpu::First, &devices, &["--forward-mode=io"])?;
    for socket in &sockets {
        socket.awaited()?;
    }
    let _guests = guests(len, &sockets.each_ref().map(Socket::to_string))?;
    forwarder.received(plan, 2)
}

fn ovs(plan: &Plan, len: usize) -> Result<f64> {
    let lab = Lab::new()?;
    let ovs = Ovs::start(&lab, SWITCH_CPU)?;
    let paths = [ovs.vhost("a")?, ovs.vhost("b")?];
    let _guests = guests(len, &paths.map(|path| path.display().to_string()))?;
    rate(plan, || ovs.received())
}

fn bridge(plan: &Plan, len: usize) -> Result<f64> {
    let netns = Netns::new()?;
    let device = |id| format!("--vdev=net_tap{id},iface=dtap{id},mac={}", mac(id));
    let (devices, peers) = ([0, 1].map(device), [0, 1].map(peer));
    let io = ["--forward-mode=io", &peers[0], &peers[1]];
    let mut guests = Testpmd::within(&netns, WorkerCpu::Second, &devices, &io)?;
    let begin = Instant::now();
    let is_there = |tap: &str| netns.ip(&["link", "show", tap]).is_ok();
    while !(is_there("dtap0") && is_there("dtap1")) {
        if begin.elapsed() > PATIENCE {
            return Err("testpmd makes no TAPs".into());
        }
        std::thread::sleep(PATIENCE / 100);
    }
    netns.bridge("br0", &["dtap0", "dtap1"])?;
    // Until testpmd runs: at its start it sets addresses, and loses what would go round.
    std::thread::sleep(PATIENCE / 5);
    for (tap, own) in [
        ("dtap0", "02:00:00:00:01:01"),
        ("dtap1", "02:00:00:00:01:02"),
    ] {
        // The guest's address is the TAP's, too, and the bridge would take its frames for the host's.
        netns.ip(&["link", "set", tap, "address", own, "up"])?;
    }
    guests.tell(&begins(len))?;
    let counts =
        ["dtap0", "dtap1"].map(|tap| format!("/sys/class/net/{tap}/statistics/tx_packets"));
    let counts = counts.each_ref().map(String::as_str);
    rate(plan, || {
        let said = netns.exec(&[&["cat"], &counts[..]].concat())?;
        Ok(said
            .split_whitespace()
            .map_while(|it| it.parse::<u64>().ok())
            .sum())
    })
}

/// Both guests, which begin to send.
fn guests(len: usize, paths: &[String; 2]) -> Result<Testpmd> {
    let device = |(id, path): (usize, &String)| {
        let mac = mac(id);
        format!("--vdev=net_virtio_user{id},path={path},{CARD},mac={mac}")
    };
    let devices: Vec<String> = paths.iter().enumerate().map(device).collect();
    let peers = [0, 1].map(peer);
    let arguments = ["--forward-mode=io", &peers[0], &peers[1]];
    let mut guests = Testpmd::told(WorkerCpu::Second, &devices, &arguments, "")?;
    // Until the forwarder has both guests' rings: what it gets for one that is not there yet it drops, and
    // when all are dropped nothing goes round.
    std::thread::sleep(PATIENCE / 10);
    guests.tell(&begins(len))?;
    Ok(guests)
}

/// What makes them begin.
fn begins(len: usize) -> String {
    format!("set txpkts {len}\nstart tx_first {BURSTS}\n")
}

fn mac(guest: usize) -> String {
    format!("02:00:00:00:00:0{}", guest + 1)
}

/// To whom a guest sends.
fn peer(guest: usize) -> String {
    format!("--eth-peer={guest},{}", mac(1 - guest))
}

/// Longest time until guests have started.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
