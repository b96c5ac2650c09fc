//! How the path's cost grows with flows, and its rate with CPUs.
//!
//! Growth with ports and with filters is in the rows `fanout` and `filters`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;

use crate::fanout::{self, SeenByReader, Sharing, Tally, drain};
use crate::handoff::Sizes;
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::{limit, sys};

/// One source and one reader, by number of flows.
pub(crate) fn flows(plan: &Plan) -> Result<Vec<Figure>> {
    const FLOWS: [u32; 4] = [1, 100, 10_000, 1_000_000];
    let cost = |rate: f64| 1e3 / rate;
    let mut samples = vec![Samples::default(); FLOWS.len()];
    let mut limit = Samples::default();
    for round in 1..=plan.rounds {
        for (samples, flows) in samples.iter_mut().zip(FLOWS) {
            samples.push(cost(rate(plan.time / 2, 1, flows)?));
        }
        limit.push(cost(bare(plan)?));
        let all: Vec<String> = samples
            .iter()
            .map(|it| format!("{:.1}", it.last()))
            .collect();
        eprintln!("  round {round}: {} ns", all.join(", "));
    }
    let one = samples[0].clone();
    let figure = |(flows, ours): (u32, Samples)| Figure {
        name: format!("scale-flows-{flows}"),
        unit: "ns per packet",
        ours,
        peer: Some(("one flow".to_owned(), one.clone())),
        limit: Some(Limit::new(limit::BARE, limit.clone())),
        note: format!(
            "60 B, {flows} flows in turn from the generator, which makes each frame's addresses and \
             ports anew, to one reader; the path keeps nothing for each flow"
        ),
    };
    Ok(FLOWS.into_iter().zip(samples).map(figure).collect())
}

/// A source's queues and as many readers, by number, as far as each thread has a CPU of its own: one
/// and one on two CPUs, as threads that spin on one CPU would wait for each other's time slices.
pub(crate) fn queues(plan: &Plan) -> Result<Vec<Figure>> {
    let most = (sys::cpus().len() / 2).max(1);
    let counts: Vec<usize> = (0..)
        .map(|power| 1 << power)
        .take_while(|&queues| queues <= most)
        .collect();
    let mut samples = vec![Samples::default(); counts.len()];
    let mut limit = Samples::default();
    for _ in 0..plan.rounds {
        for (samples, &queues) in samples.iter_mut().zip(&counts) {
            samples.push(rate(plan.time, queues, 1000)?);
        }
        limit.push(bare(plan)?);
    }
    let alone = samples[0].clone();
    let figure = |(&queues, ours): (&usize, Samples)| {
        eprintln!("  {queues} queues: {:.1} Mpps", ours.median());
        let times = |one: f64| one * queues as f64;
        Figure {
            name: format!("scale-queues-{queues}"),
            unit: "Mpps",
            ours,
            peer: Some(("one queue".to_owned(), alone.clone())),
            limit: Some(Limit::converted(limit::BARE, &limit, times)),
            note: format!(
                "60 B, {queues} queue(s) of the generator and as many readers, together, each on a CPU \
                 of its own; this machine has {}. The limit: one pair's bare transfer, times the \
                 number of pairs",
                sys::cpus().len()
            ),
        }
    };
    Ok(counts.iter().zip(samples).map(figure).collect())
}

/// Packets per microsecond that a pair of CPUs passes on, bare.
fn bare(plan: &Plan) -> Result<f64> {
    fanout::bare(plan.time / 4, Sizes::One(60), 1, Sharing::Private)
}

/// Packets per microsecond that all readers get together, each of a queue of its own.
fn rate(time: Duration, queues: usize, flows: u32) -> Result<f64> {
    let lab = Lab::new()?;
    let cpus: Vec<String> = (0..queues)
        .map(|queue| sys::cpu(queue).to_string())
        .collect();
    let cpus = cpus.join("+");
    let source = format!("lab=gen,size=60,flows={flows},queues={queues},cpus={cpus}");
    let daemon = Daemon::start(&lab, None, &["--source", &source])?;
    let mut ports = Vec::new();
    for queue in 0..queues {
        let device = format!("lab@{queue}");
        ports.push(daemon.port(&device).ring_bytes(1 << 19).open()?);
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = ports
            .into_iter()
            .enumerate()
            .map(|(queue, mut port)| {
                let (over, cpu) = (&over, sys::cpu(queues + queue));
                scope.spawn(move || {
                    let ports = std::slice::from_mut(&mut port);
                    drain(ports, over, &SeenByReader::default(), cpu)
                        .map_err(|error| error.to_string())
                })
            })
            .collect();
        std::thread::sleep(time / 8);
        let (begin, before) = (Instant::now(), Tally::of(&daemon));
        std::thread::sleep(time);
        let after = Tally::of(&daemon);
        let seconds = begin.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().map_err(|_| "a reader panicked")??;
        }
        Ok((after.delivered - before.delivered) as f64 / seconds / 1e6)
    })
}
