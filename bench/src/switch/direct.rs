//! From member to member of a trust group: one CPU sends, the other receives, and the switch does nothing.
//!
//! The peer is the forwarder of the row `switch-ring` ([`ring::memif`]): what a switch between processes
//! costs where it does not look at a frame. Beside the rate stands the CPU time of the daemon while
//! frames go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug::Port;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};

use super::ring::{self, FROM, PEER, RING, TO, burst, frame, take};
use crate::dpdk::patiently;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// CPUs of the thread that sends and of the one that receives.
const SENDER_CPU: usize = 0;
const READER_CPU: usize = 1;

/// Frames handed over per microsecond, and the daemon's share of a CPU meanwhile.
pub(crate) fn against_memif(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    let [mut ours, mut peer, mut cpu] = [(); 3].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let (rate, used) = measure(plan.time, len)?;
        let memif = patiently(|| ring::memif(plan, len))?;
        eprintln!(
            "  round {round}: ours {rate:.2}, memif io {memif:.2} Mpps; the daemon {used:.2} % of a CPU"
        );
        ours.push(rate);
        peer.push(memif);
        cpu.push(used);
    }
    Ok(vec![
        Figure {
            name: format!("switch-direct-{len}"),
            unit: "Mpps",
            ours,
            peer: Some((PEER.to_owned(), peer)),
            limit: None,
            note: format!(
                "{len}-byte frames from one port of a switch to another in direct mode, by a ring of \
                 {RING} B: a thread on CPU {SENDER_CPU} sends, one on CPU {READER_CPU} receives. The peer \
                 forwards between two memif interfaces without looking at a frame on CPU {SENDER_CPU}; a \
                 testpmd on CPU {READER_CPU} sends back what it gets"
            ),
        },
        Figure {
            name: format!("switch-direct-{len}-cpu"),
            unit: "% CPU",
            ours: cpu,
            peer: None,
            limit: None,
            note: "processor time of all threads of the daemon while those frames go".to_owned(),
        },
    ])
}

fn measure(time: Duration, len: usize) -> Result<(f64, f64)> {
    let lab = Lab::new()?;
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"])?;
    let open = || daemon.port("lan0").direct().transmit(RING).open();
    let (mut from, mut to) = (open()?, open()?);
    let sent = frame(len, TO, FROM);
    become_direct(&daemon, &mut from, &mut to, &sent)?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut sending = || -> Result<()> {
            sys::pin(sys::cpu(SENDER_CPU))?;
            while !is_over.load(Ordering::Relaxed) {
                burst(&mut from, &sent)?;
            }
            Ok(())
        };
        // What fails there is seen here: nothing comes.
        scope.spawn(move || sending().map_err(|error| eprintln!("  {error}")));
        sys::pin(sys::cpu(READER_CPU))?;
        receive(&mut to, time / 8)?;
        let (begin, cpu) = (Instant::now(), daemon.cpu_time());
        let came = receive(&mut to, time)?;
        let (took, cpu) = (begin.elapsed().as_secs_f64(), daemon.cpu_time() - cpu);
        is_over.store(true, Ordering::Relaxed);
        Ok((came as f64 / took / 1e6, cpu.as_secs_f64() / took * 100.0))
    })
}

/// Sends until the switch sees no frame of it any more.
fn become_direct(daemon: &Daemon, from: &mut Port, to: &mut Port, sent: &[u8]) -> Result<()> {
    to.send(&frame(sent.len(), 0xff, TO))?;
    let entered = || value(counted(&daemon.counters(), "source"), "entered");
    let begin = Instant::now();
    loop {
        let before = entered();
        from.send(sent)?;
        std::thread::sleep(Duration::from_millis(20));
        for port in [&mut *from, &mut *to] {
            take(port)?;
        }
        if entered() == before {
            return Ok(());
        }
        if begin.elapsed() > Duration::from_secs(10) {
            return Err("frames do not go directly".into());
        }
    }
}

/// How many frames come in some time.
fn receive(to: &mut Port, time: Duration) -> Result<u64> {
    let (begin, mut came) = (Instant::now(), 0);
    while begin.elapsed() < time {
        for _ in 0..16 {
            came += take(to)?;
        }
    }
    Ok(came)
}
