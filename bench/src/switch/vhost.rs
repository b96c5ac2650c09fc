//! From guest to guest through a switch, by vhost-user: one CPU forwards, the other is both guests.
//!
//! A testpmd with two interfaces of virtio-user is both: it sends by one what comes by the other (`io`), so
//! that as many frames as it began with go round for ever, both ways. The switch takes each out of one
//! guest's memory and puts it into the other's; it reads addresses, learns and looks up. The peer is a
//! testpmd with two interfaces of `net_vhost` in the switch's place, which forwards without looking at a frame.

use std::time::Instant;

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};

use crate::dpdk::{Socket, Testpmd, WorkerCpu, patiently};
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// CPU that forwards, ours and the peer's. The guests have the other one.
const SWITCH_CPU: usize = 0;
/// The peer's name in the table.
const PEER: &str = "DPDK vhost-user (testpmd io)";
/// Frames that go round each way, in bursts of 64: a quarter of a ring, so that none is dropped.
const BURSTS: usize = 4;
/// What both guests have: a split ring, the kind that both the switch and the peer know.
const CARD: &str = "queues=1,queue_size=1024,mrg_rxbuf=0,in_order=1";

/// Frames forwarded per microsecond, both ways together.
pub(crate) fn against_testpmd(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    let [mut ours, mut peer] = [(); 2].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let rate = patiently(|| switch(plan, len))?;
        let io = patiently(|| testpmd(plan, len))?;
        eprintln!("  round {round}: ours {rate:.2}, testpmd io {io:.2} Mpps");
        ours.push(rate);
        peer.push(io);
    }
    Ok(vec![Figure {
        name: format!("switch-vhost-{len}"),
        unit: "Mpps",
        ours,
        peer: Some((PEER.to_owned(), peer)),
        limit: None,
        note: format!(
            "{len}-byte frames between two guests of vhost-user, both ways, {} each way on their way; the \
             switch's thread on CPU {SWITCH_CPU}, one testpmd on the other CPU is both guests (virtio-user, \
             {CARD}) and sends by one what comes by the other. The peer forwards between two net_vhost \
             without looking at a frame, on CPU {SWITCH_CPU}, for the same guests",
            BURSTS * 64
        ),
    }])
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
    let count = || value(counted(&daemon.counters(), "source"), "out_enqueued");
    let begin = Instant::now();
    while count() == 0 {
        if begin.elapsed() > plan.time * 4 + PATIENCE {
            return Err("no frame comes".into());
        }
        std::thread::sleep(PATIENCE / 100);
    }
    // The first part of traffic is not whole.
    std::thread::sleep(plan.time / 4);
    let (begin, before) = (Instant::now(), count());
    std::thread::sleep(plan.time);
    Ok((count() - before) as f64 / begin.elapsed().as_secs_f64() / 1e6)
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

/// Both guests, which begin to send.
fn guests(len: usize, paths: &[String; 2]) -> Result<Testpmd> {
    let mac = |end: usize| format!("02:00:00:00:00:0{}", end + 1);
    let device = |(id, path): (usize, &String)| {
        let mac = mac(id);
        format!("--vdev=net_virtio_user{id},path={path},{CARD},mac={mac}")
    };
    let devices: Vec<String> = paths.iter().enumerate().map(device).collect();
    let peers = [0, 1].map(|id| format!("--eth-peer={id},{}", mac(1 - id)));
    let arguments = ["--forward-mode=io", &peers[0], &peers[1]];
    let begin = format!("set txpkts {len}\nstart tx_first {BURSTS}\n");
    Testpmd::told(WorkerCpu::Second, &devices, &arguments, &begin)
}

/// Longest time until guests have started.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
