//! Captured rate, loss and idle CPU by frame size, as the papers show them.
//!
//! ```text
//!                 ┌ far0 ── wire0 : the daemon ── rings ── counters     ours
//!   sender, CPU 0 ┤
//!                 └ far1 ── wire1 : the guests' own NICs, or libpcap    the peer
//! ```
//!
//! Both sides run the same counter of `pcap_dispatch` ([`crate::pcap`]), ours over the drop-in. They
//! are set up once and stay; in a turn frames go into one of the two wires only. The sender has the
//! first CPU for itself, everything that captures has the others, so that what they leave idle is
//! what a capturing machine has left for other work.

mod early;
mod guests;
mod host;
mod interface;
mod lent;
mod lent_guest;
mod targets;
mod way;
mod xdp;

use std::sync::atomic::{AtomicBool, Ordering};

use vnplug_e2e::traffic::Sent;

pub(crate) use early::early;
pub(crate) use guests::OVER_VNPLUG;
pub(crate) use guests::{one_uml, qemu, two_in_uml, two_umls};
pub(crate) use host::on_host;
pub(crate) use interface::{INTERFACE, on_interface};
pub(crate) use lent::group;
pub(crate) use lent_guest::lent_to_guest;
pub(crate) use targets::targets;
pub(crate) use way::Way;
use way::{Dropped, Turn};
pub(crate) use xdp::af_xdp;

use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::wire::{Load, Wire};
use crate::{limit, sys};

/// Frame lengths in bytes, without FCS.
pub(crate) const SIZES: [usize; 6] = [64, 128, 256, 512, 1024, 1514];

/// One side of a row, by its name in the table.
struct Side<'a, 'g> {
    name: &'static str,
    way: &'a mut Way<'g>,
}

/// The turns of one side with one size of frames.
#[derive(Default)]
struct Series {
    rate: Samples,
    /// What the sender offered.
    offered: Samples,
    lost: Samples,
    idle: Samples,
    /// Processor time in seconds per million packets captured, and the daemon's part of it.
    cost: Samples,
    daemon_cost: Samples,
    /// Packets lost in all turns, and where the daemon lost them.
    packets_lost: u64,
    dropped: Option<Dropped>,
}

impl Series {
    fn push(&mut self, turn: &Turn) {
        self.rate.push(turn.mpps());
        self.offered.push(turn.offered_mpps());
        self.lost.push(turn.lost_percent());
        self.idle.push(turn.idle_percent());
        self.cost.push(turn.cost());
        self.daemon_cost.push(turn.daemon_cost());
        self.packets_lost += turn.lost();
        if let Some(more) = turn.dropped() {
            let all = self.dropped.get_or_insert_default();
            all.kernel += more.kernel;
            all.ring += more.ring;
        }
    }

    /// At which stage packets were lost, for a note; nothing if none were, or nobody knows.
    fn stages(&self) -> String {
        let known = self.dropped.filter(|_| self.packets_lost > 0);
        known.map_or_else(String::new, |dropped| {
            format!("; ours in all rounds: {}", dropped.of(self.packets_lost))
        })
    }
}

/// All sizes in turns; the first side is ours, the second the peer. A third, if there is one, is
/// compared with ours by its rate alone.
fn by_size(
    plan: &Plan,
    wire: &Wire,
    row: &str,
    sides: &mut [Side<'_, '_>],
    how: &str,
) -> Result<Vec<Figure>> {
    wire.add(UNHEARD)?;
    for side in &mut *sides {
        // The first look at every page of a ring is not measured.
        side.way.turn(wire, WARM_UP, 64, Load::Steady(WARM_UP))?;
    }
    let readers = sides[0].way.readers() as f64;
    let mut series: Vec<([Series; 3], Samples)> =
        SIZES.iter().map(|_| Default::default()).collect();
    for round in 1..=plan.rounds {
        for (size, (series, alone)) in SIZES.into_iter().zip(&mut series) {
            let load = Load::Steady(line_rate(size));
            let frames = frames(plan, size);
            let mut told = Vec::new();
            for (side, series) in sides.iter_mut().zip(series) {
                let turn = side.way.turn(wire, frames, size, load)?;
                told.push(format!("{} {turn}", side.name));
                series.push(&turn);
            }
            alone.push(unheard(wire, frames, size, load)? * readers);
            eprintln!("  round {round}, {size} B: {}", told.join("; "));
        }
    }
    let mut figures = Vec::new();
    for (size, ([ours, peer, other], alone)) in SIZES.into_iter().zip(series) {
        let note = format!(
            "{size}-byte frames at up to 10 Gbit/s ({} packets/s) for {:.1} s on a veth; {how}",
            line_rate(size),
            plan.time.as_secs_f64(),
        );
        let figure = |suffix: &str, unit, ours, name: &str, peer| Figure {
            name: format!("{row}-{size}{suffix}"),
            unit,
            ours,
            peer: Some((name.to_owned(), peer)),
            limit: None,
            note: note.clone(),
        };
        let (peer_name, stages) = (sides[1].name, ours.stages());
        if let Some(side) = sides.get(2) {
            let rate = ours.rate.clone();
            let figure = figure("-host", "Mpps", rate, side.name, other.rate);
            figures.push(figure.limited(limit::SENDER, &alone));
        }
        figures.extend([
            figure("", "Mpps", ours.rate, peer_name, peer.rate).limited(limit::SENDER, &alone),
            Figure {
                note: format!("{note}{stages}"),
                ..figure("-loss", "% lost", ours.lost, peer_name, peer.lost)
            },
            figure("-idle", "% idle", ours.idle, peer_name, peer.idle),
        ]);
    }
    Ok(figures)
}

/// The highest rate of a short ladder that each side captures without any loss, as RFC 2544 asks.
fn lossless(plan: &Plan, wire: &Wire, row: &str, sides: &mut [Side<'_, '_>]) -> Result<Figure> {
    let mut samples = [Samples::default(), Samples::default()];
    let mut flat_out = Samples::default();
    for round in 1..=plan.rounds {
        for (side, samples) in sides.iter_mut().zip(&mut samples) {
            let mut rate = 0.0;
            for load in LADDER {
                let frames = load.pps().map_or(line_frames(plan, FLAT_OUT_PPS), |pps| {
                    line_frames(plan, pps.get())
                });
                let turn = side.way.turn(wire, frames, 64, load)?;
                if turn.lost_percent() == 0.0 {
                    rate = turn.sent_mpps();
                    break;
                }
            }
            eprintln!("  round {round}, lossless: {} {rate:.3} Mpps", side.name);
            samples.push(rate);
        }
        let frames = line_frames(plan, FLAT_OUT_PPS);
        flat_out.push(unheard(wire, frames, 64, Load::FlatOut)?);
    }
    let [ours, peer] = samples;
    Ok(Figure {
        name: format!("{row}-64-lossless"),
        unit: "Mpps",
        ours,
        peer: Some((sides[1].name.to_owned(), peer)),
        limit: Some(Limit::new(limit::SENDER, flat_out)),
        note: "64-byte frames: the highest of the rates flat out, 800,000, 400,000 … 3,125 \
               packets/s at which no packet was lost (RFC 2544's throughput); flat out is what the \
               sender reaches"
            .to_owned(),
    })
}

/// Rates for [`lossless`], the fastest first.
const LADDER: [Load; 10] = [
    Load::FlatOut,
    Load::Steady(800_000),
    Load::Steady(400_000),
    Load::Steady(200_000),
    Load::Steady(100_000),
    Load::Steady(50_000),
    Load::Steady(25_000),
    Load::Steady(12_500),
    Load::Steady(6_250),
    Load::Steady(3_125),
];

/// Packets per second of 10 Gbit/s Ethernet: 24 bytes of FCS, preamble and gap with each frame.
fn line_rate(size: usize) -> u64 {
    10_000_000_000 / (8 * (size as u64 + 24))
}

/// Frames of one turn of the plan's time.
fn frames(plan: &Plan, size: usize) -> u64 {
    line_frames(plan, line_rate(size).min(FLAT_OUT_PPS))
}

fn line_frames(plan: &Plan, pps: u64) -> u64 {
    ((pps as f64 * plan.time.as_secs_f64()) as u64).max(1)
}

/// Millions per second that the sender reaches on a wire where nobody listens: what a capture does in
/// the sender's time cannot lower this limit of it.
fn unheard(wire: &Wire, frames: u64, len: usize, load: Load) -> Result<f64> {
    let far = format!("far{UNHEARD}");
    let sent = wire.send_from(Some(sys::cpu(0)), &far, frames, len, load)?;
    Ok(sent_mpps(&sent))
}

/// Millions per second that the sender reached.
fn sent_mpps(sent: &Sent) -> f64 {
    sent.pps() / 1e6
}

/// Tells threads to end when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// About what the sender reaches; decides only how many frames a turn has.
const FLAT_OUT_PPS: u64 = 1_200_000;
/// The wire that nobody listens to.
const UNHEARD: usize = 9;
/// Frames of 64 bytes that fill every ring once.
const WARM_UP: u64 = 250_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_rates_are_those_of_the_standard() {
        // 64 and 1518 bytes with FCS.
        assert_eq!(line_rate(60), 14_880_952);
        assert_eq!(line_rate(1514), 812_743);
    }
}
