//! From ring to ring through a switch: one CPU forwards, the other sends and receives.
//!
//! One thread of ours holds two ports of a switch; it writes frames for the second into the first one's
//! ring, and takes what comes. The peer is testpmd, which forwards between two memif interfaces without
//! looking at a frame (`io`); a second testpmd at their other ends sends back what it gets, so that it
//! does for each frame what our thread does: it takes one and sends one. The switch reads addresses,
//! learns and looks up for each frame, and copies it twice.

use std::time::{Duration, Instant};

use vnplug::Port;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;

use crate::dpdk::{Socket, Testpmd, WorkerCpu, patiently};
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// CPU of the switch's thread, and of the peer that forwards.
const SWITCH_CPU: usize = 0;
/// CPU of the thread that sends and receives.
const ENDS_CPU: usize = 1;
/// Bytes of each ring.
pub(super) const RING: u64 = 1 << 19;
/// Frames between two looks at the clock.
const BURST: usize = 64;
/// The peer's name in the table.
pub(super) const PEER: &str = "DPDK memif (testpmd io)";
/// Frames that go round in the peer, in bursts of 64 per interface: more are dropped by full rings.
const PEER_BURSTS: usize = 8;

/// Frames forwarded per microsecond.
pub(crate) fn against_memif(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    let [mut ours, mut peer] = [(); 2].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let rate = measure(plan.time, len)?;
        let memif = patiently(|| memif(plan, len))?;
        eprintln!("  round {round}: ours {rate:.2}, memif io {memif:.2} Mpps");
        ours.push(rate);
        peer.push(memif);
    }
    Ok(vec![Figure {
        name: format!("switch-ring-{len}"),
        unit: "Mpps",
        ours,
        peer: Some((PEER.to_owned(), peer)),
        limit: None,
        note: format!(
            "{len}-byte frames from one port of a switch to another by rings of {RING} B, the \
             switch's thread on CPU {SWITCH_CPU}, one thread on CPU {ENDS_CPU} that sends and \
             receives. The peer forwards between two memif interfaces without looking at a frame, \
             on CPU {SWITCH_CPU}; a testpmd on CPU {ENDS_CPU} sends back what it gets"
        ),
    }])
}

fn measure(time: Duration, len: usize) -> Result<f64> {
    let lab = Lab::new()?;
    let switch = format!("lan0,cpus={}", sys::cpu(SWITCH_CPU));
    let daemon = Daemon::start(&lab, None, &["--switch", &switch])?;
    let open = || {
        let options = daemon.port("lan0").join();
        options.transmit(RING).ring_bytes(RING).open()
    };
    let (mut from, mut to) = (open()?, open()?);
    // The switch learns where the receiver is.
    to.send(&frame(len, FROM, TO))?;
    std::thread::sleep(Duration::from_millis(50));
    sys::pin(sys::cpu(ENDS_CPU))?;
    let frame = frame(len, TO, FROM);
    carry(&mut from, &mut to, &frame, time / 8)?;
    let begin = Instant::now();
    let came = carry(&mut from, &mut to, &frame, time)?;
    Ok(came as f64 / begin.elapsed().as_secs_f64() / 1e6)
}

/// Sends and receives for some time; how many frames came.
fn carry(from: &mut Port, to: &mut Port, frame: &[u8], time: Duration) -> Result<u64> {
    let (begin, mut came) = (Instant::now(), 0);
    while begin.elapsed() < time {
        for _ in 0..16 {
            burst(from, frame)?;
            came += take(to)?;
        }
    }
    Ok(came)
}

/// Sends as many frames as come between two looks at the clock, or as there is room for.
pub(super) fn burst(from: &mut Port, frame: &[u8]) -> Result<()> {
    let outbox = from.outbox()?;
    for _ in 0..BURST {
        if !outbox.push(frame)? {
            break;
        }
    }
    outbox.flush();
    Ok(())
}

/// Takes all frames that are there, and looks at the first byte of each; how many.
pub(super) fn take(to: &mut Port) -> Result<u64> {
    let mut came = 0;
    for packet in to.batch(usize::MAX) {
        std::hint::black_box(packet?.bytes.first());
        came += 1;
    }
    to.release();
    Ok(came)
}

pub(super) fn memif(plan: &Plan, len: usize) -> Result<f64> {
    let socket = Socket::new("memif-io");
    let devices = |role| -> Vec<String> {
        let device = |id| {
            format!(
                "--vdev=net_memif{id},role={role},socket={socket},socket-abstract=no,bsize=1600,\
                 rsize=10,id={id}"
            )
        };
        (0..2).map(device).collect()
    };
    let io = ["--forward-mode=io"];
    let mut forwarder = Testpmd::start(WorkerCpu::First, &devices("server"), &io)?;
    socket.awaited()?;
    let sends = format!("set txpkts {len}\nstart tx_first {PEER_BURSTS}\n");
    let _ends = Testpmd::told(WorkerCpu::Second, &devices("client"), &io, &sends)?;
    forwarder.received(plan, 2)
}

pub(super) fn frame(len: usize, to: u8, from: u8) -> Vec<u8> {
    let mut frame = vec![0x5a; len];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5]);
    frame
}

/// The last byte of two addresses.
pub(super) const FROM: u8 = 1;
pub(super) const TO: u8 = 2;
