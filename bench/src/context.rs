//! Contexts: ports that send through one wire, one to thirty-two of them (tables 5.1 to 5.3 of Menon's
//! dissertation had one).
//!
//! One thread fills the transmit rings of all ports in turn, so that each always has more than the wire takes; the
//! wire is a pair of veth interfaces, which nobody reads at the other end.

mod copies;
mod news;
mod posted;
mod receive;
mod zero_copy;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};

use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};

pub(crate) use copies::copies;
pub(crate) use news::news;
pub(crate) use posted::posted;
pub(crate) use receive::receive;
pub(crate) use zero_copy::zero_copy;

const CONTEXTS: [usize; 5] = [1, 2, 8, 16, 32];

/// What ports sent in a while.
struct Sent {
    /// Bytes of each.
    bytes: Vec<f64>,
    /// Megabits a second, all together.
    mbits: f64,
    /// Of one processor, by the daemon.
    cpu: f64,
}

/// How equal the parts of contexts are, by bytes, if all always have more to send.
pub(crate) fn fair(plan: &Plan) -> Result<Vec<Figure>> {
    let arms = [("equal", &[500][..]), ("mixed", &[60, 1514])];
    let mut figures = Vec::new();
    for (name, lengths) in arms {
        for count in CONTEXTS.into_iter().skip(1) {
            let mut ours = Samples::default();
            for _ in 0..plan.rounds {
                // Rings that the one thread fills before they are empty.
                ours.push(jain(&send(plan.time / 2, (count, 1 << 17), lengths)?.bytes));
            }
            eprintln!("  {name}, {count} contexts: {:.4}", ours.median());
            let all: Vec<String> = lengths.iter().map(usize::to_string).collect();
            figures.push(Figure {
                name: format!("context-fair-{name}-{count}"),
                unit: "Jain's index",
                ours,
                peer: None,
                limit: None,
                note: format!(
                    "{count} ports send frames of {} bytes through one wire; 1: all sent as many bytes",
                    all.join(" and ")
                ),
            });
        }
    }
    Ok(figures)
}

/// What contexts send together, against one packet socket, and the daemon's processor time.
pub(crate) fn transmit(plan: &Plan) -> Result<Vec<Figure>> {
    let mut rates = vec![Samples::default(); CONTEXTS.len()];
    let mut costs = rates.clone();
    let mut peer = Samples::default();
    for round in 1..=plan.rounds {
        for (at, count) in CONTEXTS.into_iter().enumerate() {
            let sent = send(plan.time, (count, 1 << 20), &[1514])?;
            rates[at].push(sent.mbits);
            costs[at].push(sent.cpu * 1e3 / sent.mbits);
        }
        peer.push(by_socket()?);
        let all: Vec<String> = rates.iter().map(|it| format!("{:.0}", it.last())).collect();
        eprintln!(
            "  round {round}: {} Mb/s, a socket {:.0}",
            all.join(", "),
            peer.last()
        );
    }
    let mut figures = Vec::new();
    for (count, (rate, cost)) in CONTEXTS.into_iter().zip(rates.into_iter().zip(costs)) {
        let note = format!(
            "{count} ports send frames of 1514 bytes through one end of a veth, filled by one thread"
        );
        figures.push(Figure {
            name: format!("context-tx-{count}"),
            unit: "Mb/s",
            ours: rate,
            peer: Some(("AF_PACKET, one sender".to_owned(), peer.clone())),
            limit: None,
            note: note.clone(),
        });
        figures.push(Figure {
            name: format!("context-tx-{count}-cpu"),
            unit: "% CPU per Gb/s",
            ours: cost.all().iter().map(|it| it * 100.0).collect(),
            peer: None,
            limit: None,
            note: format!("{note}; the daemon's, with what the kernel does for it"),
        });
    }
    Ok(figures)
}

fn send(time: Duration, (count, ring): (usize, u64), lengths: &[usize]) -> Result<Sent> {
    let (lab, netns) = wire()?;
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"])?;
    let mut ports = Vec::new();
    for _ in 0..count {
        let options = daemon.port("wire1").transmit(ring).enabled(false);
        ports.push(options.ring_bytes(1 << 12).open()?);
    }
    let frames: Vec<Vec<u8>> = (0..count)
        .map(|at| vec![7; lengths[at % lengths.len()]])
        .collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let filler = scope.spawn(|| {
            let mut ports = ports;
            while !over.load(Ordering::Relaxed) {
                for (port, frame) in ports.iter_mut().zip(&frames) {
                    let outbox = port.outbox().map_err(|error| error.to_string())?;
                    while outbox.push(frame).map_err(|error| error.to_string())? {}
                    outbox.flush();
                }
            }
            Ok::<_, String>(ports)
        });
        std::thread::sleep(time / 4);
        let (begin, before) = (Instant::now(), (bytes(&daemon), cpu_time(daemon.pid())?));
        std::thread::sleep(time);
        let after = (bytes(&daemon), cpu_time(daemon.pid())?);
        let seconds = begin.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        drop(filler.join().map_err(|_| "the sender panicked")??);
        let each = after
            .0
            .iter()
            .zip(&before.0)
            .map(|(after, before)| after - before);
        let each: Vec<f64> = each.collect();
        Ok(Sent {
            mbits: each.iter().sum::<f64>() * 8.0 / seconds / 1e6,
            cpu: (after.1.saturating_sub(before.1)).as_secs_f64() / seconds,
            bytes: each,
        })
    })
}

/// Bytes that each port has sent.
fn bytes(daemon: &Daemon) -> Vec<f64> {
    let all = daemon.counters();
    let ports = all.iter().filter(|it| it.kind == "port");
    ports.map(|port| value(port, "send_bytes") as f64).collect()
}

/// Megabits a second that one packet socket sends.
fn by_socket() -> Result<f64> {
    let (_lab, netns) = wire()?;
    let stream = Stream {
        len_bytes: 1514,
        ..Stream::new("wire1", 500_000)
    };
    let sent = netns.enter(|| stream.send())??;
    Ok(sent.pps() * 1514.0 * 8.0 / 1e6)
}

fn wire() -> Result<(Lab, Netns)> {
    let (lab, netns) = (Lab::new()?, Netns::new()?);
    netns.veth("wire0", "wire1")?;
    Ok((lab, netns))
}

/// Jain's index of fairness: 1 if all are equal, 1/n if one has all.
pub(crate) fn jain(parts: &[f64]) -> f64 {
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|it| it * it).sum();
    sum * sum / (parts.len() as f64 * squares).max(1.0)
}
