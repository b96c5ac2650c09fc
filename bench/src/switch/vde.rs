//! Sockets only: a frame is a datagram to the switch and a datagram from it, for ours and for the peer.
//!
//! Both switches have CPU 0, and one thread on CPU 1 is both clients of both. It offers frames while the
//! switch's socket takes them, many with a system call, and takes what comes, so that a client's own
//! system calls bound the rate of neither. A frame costs `vde_switch` three system calls: to wait, to take
//! it, to give it. Ours takes and gives what has come together with one call each; the system calls of both
//! are counted beside. What is left is the kernel's work for two datagrams, which a bare relay shows.

use std::time::Duration;

use vnplug_e2e::Lab;

use super::arm::{Arm, PEER};
use super::calls::Calls;
use super::client::{Client, FROM, TO, carry, frame, pair};
use super::relay::{RELAY, relay};
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// CPU of the switch.
const SWITCH_CPU: usize = 0;
/// CPU of the thread that is both clients.
const ENDS_CPU: usize = 1;
const PORTS: usize = 32;

/// Samples of one switch.
#[derive(Default)]
struct Series {
    /// Millions of frames a second that came out.
    rate: Samples,
    /// Seconds of the switch's processor time for a gigabyte of them.
    cost: Samples,
    /// System calls of the switch for a frame.
    calls: Samples,
}

/// Frames of one length through both switches.
pub(crate) fn against_vde_switch(plan: &Plan, len: usize) -> Result<Vec<Figure>> {
    let lab = Lab::new()?;
    let arms = Arm::both(&lab, PORTS, Some(sys::cpu(SWITCH_CPU)))?;
    let pairs = arms.each_ref().map(|arm| pair(&arm.dir));
    let mut series = [(); 2].map(|()| Series::default());
    let [mut bare, mut bare_cost] = [(); 2].map(|()| Samples::default());
    sys::pin(sys::cpu(ENDS_CPU))?;
    for round in 1..=plan.rounds {
        for ((arm, pair), series) in arms.iter().zip(&pairs).zip(&mut series) {
            let [from, to] = pair.as_ref().map_err(ToString::to_string)?;
            measure(arm, (from, to), len, plan.time, series)?;
            eprintln!(
                "  round {round}: {} {:.3} Mpps, {:.2} CPU s per GB, {:.2} system calls per frame",
                arm.name,
                series.rate.last(),
                series.cost.last(),
                series.calls.last()
            );
        }
        let (carried, ns) = relay(len, plan.time / 2, sys::cpu(SWITCH_CPU))?;
        bare.push(carried.mpps());
        bare_cost.push(ns / len as f64);
        eprintln!(
            "  round {round}: {RELAY} {:.3} Mpps, {:.2} CPU s per GB",
            bare.last(),
            bare_cost.last()
        );
    }
    let [ours, theirs] = series;
    let figure = |suffix: &str, unit, ours, theirs| Figure {
        name: format!("switch-vde-{len}{suffix}"),
        unit,
        ours,
        peer: Some((PEER.to_owned(), theirs)),
        limit: None,
        note: format!(
            "{len}-byte frames from one port to another by the sockets of VDE, the switch on CPU \
             {SWITCH_CPU}, one thread on CPU {ENDS_CPU} that sends and receives, many frames with a \
             system call; processor time of all threads of the switch; system calls by perf \
             (raw_syscalls:sys_enter), in a measurement of their own; the bare relay takes and \
             gives 64 datagrams with a system call and does not look at them"
        ),
    };
    Ok(vec![
        figure("", "Mpps", ours.rate, theirs.rate).limited(RELAY, &bare),
        figure("-cpu", "CPU s per GB", ours.cost, theirs.cost).limited(RELAY, &bare_cost),
        figure("-calls", "calls per frame", ours.calls, theirs.calls),
    ])
}

fn measure(
    arm: &Arm,
    pair: (&Client, &Client),
    len: usize,
    time: Duration,
    series: &mut Series,
) -> Result<()> {
    let frame = frame(len, TO, FROM);
    carry(pair, &frame, time / 8, None)?;
    let before = arm.cpu_time()?;
    let carried = carry(pair, &frame, time, None)?;
    let spent = arm.cpu_time()? - before;
    let gigabytes = (carried.came * len as u64) as f64 / 1e9;
    series.rate.push(carried.mpps());
    series.cost.push(spent.as_secs_f64() / gigabytes.max(1e-9));
    let calls = Calls::of(arm.pid())?;
    let carried = carry(pair, &frame, time / 4, None)?;
    let calls = calls.finish()? as f64;
    series.calls.push(calls / carried.came.max(1) as f64);
    Ok(())
}
