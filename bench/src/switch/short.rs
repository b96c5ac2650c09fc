//! What ACKs alone cost a switch, and a flood of flows of which each has one segment.
//!
//! Menon's ACKs cost what any short frame costs; ours are to, too, where the switch looks at each of them because its
//! port has `acks=expand`. And a port that merges what can be merged (`gro=20`) is to cost next to nothing where nothing
//! can.

use super::frames::{ANSWERED, Frames, MERGED};
use super::through::{Carried, ENDS_CPU, Path, SWITCH_CPU, Series, Way};
use crate::row::{Figure, Plan, Result, Samples};

/// Settings that look at each ACK and each segment, and those that look at none.
const SET: &str = "gro=20 acks=expand";
const UNSET: &str = "gro=off acks=as-is";

/// ACKs alone beside datagrams of 60 bytes.
pub(crate) fn acks_only(plan: &Plan) -> Result<Vec<Figure>> {
    let mut rings = [(); 2].map(|()| Series::default());
    let mut guests = [(); 4].map(|()| Series::default());
    for round in 1..=plan.rounds {
        let mut path = Path::new(Way::Ring, Way::Ring)?;
        let both = by_turns(&mut path, plan, round)?;
        told(round, "by rings", &mut rings, both);
        let mut path = Path::new(Way::Guest, Way::Guest)?;
        let mut all = [Carried::default(); 4];
        // What drifts within a round is not always for the same one.
        let order = if round.is_multiple_of(2) {
            [1, 0]
        } else {
            [0, 1]
        };
        for at in order {
            set(&path, at == 1)?;
            if at == 1 {
                merges(&mut path)?;
            }
            let both = by_turns(&mut path, plan, round)?;
            all[2 * at..2 * at + 2].copy_from_slice(&both);
        }
        told(
            round,
            "between guests; the same with settings",
            &mut guests,
            all,
        );
    }
    let [datagrams, acks] = &rings;
    let mut figures = beside("acks-only-ring", acks, datagrams, DATAGRAMS);
    let [datagrams, acks, looked_datagrams, looked] = &guests;
    figures.extend(beside("acks-only-guest", acks, datagrams, DATAGRAMS));
    let peer = "60-byte datagrams, the same settings";
    figures.extend(beside(
        "acks-only-guest-set",
        looked,
        looked_datagrams,
        peer,
    ));
    let name = "acks-only-guest-looked";
    figures.extend(beside(name, looked, acks, "ACKs, gro=off"));
    let note = format!(
        "frames of {ACK} bytes, ACKs of one connection with timestamps, from one port of a switch to another, by rings or \
         between two cards by vhost-user (1,024 buffers each way), beside datagrams of {DATAGRAM} bytes in turns; the \
         switch's thread on CPU {SWITCH_CPU}, one thread on CPU {ENDS_CPU} sends and receives. With settings: both ports have \
         {SET}, and the ACKs are of a connection that {MERGED} segments were merged of. Processor time is the daemon's, for a \
         frame that came"
    );
    Ok(noted(figures, &note))
}

/// A million flows with one segment each to a guest for which segments are merged, beside the same without.
pub(crate) fn flood(plan: &Plan) -> Result<Vec<Figure>> {
    let ways = [("ring", Way::Ring), ("guest", Way::Guest)];
    let cells: Vec<_> = ways
        .into_iter()
        .flat_map(|way| PAYLOADS.map(|payload| (way, payload)))
        .collect();
    let mut all = vec![[Series::default(), Series::default()]; cells.len()];
    let mut memory = Samples::default();
    for round in 1..=plan.rounds {
        let mut grown = 0;
        for (((name, way), payload), series) in cells.iter().zip(&mut all) {
            let mut path = Path::new(*way, Way::Guest)?;
            let mut frames = Frames::flows(*payload);
            let mut both = [Carried::default(); 2];
            // Four times a quarter: what drifts is for both.
            let order = if round.is_multiple_of(2) {
                [1, 0, 0, 1]
            } else {
                [0, 1, 1, 0]
            };
            for (nth, at) in order.into_iter().enumerate() {
                path.set(2, if at == 1 { "gro=20" } else { "gro=off" })?;
                let before = path.resident()?;
                both[at] = both[at].and(path.carry(&mut frames, plan.time / 2)?);
                // Buffers of the first frames are there from then on.
                if nth > 1 {
                    grown = grown.max(path.resident()?.saturating_sub(before));
                }
            }
            if path.count("out_merged") > 0 {
                return Err("segments of different flows were merged".into());
            }
            told(
                round,
                &format!("{name}, {} bytes", payload + HEADERS),
                series,
                both,
            );
        }
        memory.push(grown as f64 / 1024.0);
        eprintln!("  round {round}: {:.0} KiB more memory", memory.last());
    }
    let mut figures = Vec::new();
    for (((name, _), payload), [off, on]) in cells.into_iter().zip(&all) {
        let name = format!("aggregate-flood-{name}-{}", payload + HEADERS);
        figures.extend(beside(&name, on, off, "ours, gro=off"));
    }
    figures.push(Figure {
        name: "aggregate-flood-memory".to_owned(),
        unit: "KiB",
        ours: memory,
        peer: None,
        limit: None,
        note: String::new(),
    });
    let note = format!(
        "TCP segments of 1,048,576 connections, one of each, over and over, from a port by rings or by vhost-user to a card by \
         vhost-user that takes super-frames and has gro=20, beside gro=off in turns on the same switch; its thread on CPU \
         {SWITCH_CPU}, one thread on CPU {ENDS_CPU} sends and receives. Processor time is the daemon's, for a frame that came; \
         -memory: what the daemon's grew by while they came, at most"
    );
    Ok(noted(figures, &note))
}

/// Datagrams and ACKs, four times a quarter.
fn by_turns(path: &mut Path, plan: &Plan, round: usize) -> Result<[Carried; 2]> {
    let mut all = [Frames::datagrams(DATAGRAM), Frames::acks()];
    let mut both = [Carried::default(); 2];
    let order = if round.is_multiple_of(2) {
        [1, 0, 0, 1]
    } else {
        [0, 1, 1, 0]
    };
    for at in order {
        both[at] = both[at].and(path.carry(&mut all[at], plan.time / 2)?);
    }
    Ok(both)
}

fn set(path: &Path, is: bool) -> Result<()> {
    let text = if is { SET } else { UNSET };
    path.set(1, text)?;
    path.set(2, text)
}

/// The second port sends segments that are merged for the first, whose ACKs of them are expanded: from then on each of its
/// ACKs is of a flow that is known.
fn merges(path: &mut Path) -> Result<()> {
    for times in 0..ANSWERED {
        path.answers(&Frames::to_merge(times))?;
        path.says(&[Frames::ack_of(times + 1)])?;
    }
    match (path.count("out_merged"), path.count("acks_expanded")) {
        (0, _) => Err("nothing was merged".into()),
        (_, 0) => Err("no ACK was expanded".into()),
        _ => Ok(()),
    }
}

fn told<const N: usize>(round: usize, what: &str, series: &mut [Series; N], all: [Carried; N]) {
    let told: Vec<_> = series
        .iter_mut()
        .zip(all)
        .map(|(series, carried)| series.push(carried))
        .collect();
    eprintln!("  round {round}, {what}: {}", told.join("; "));
}

/// Processor time and rate beside those of another.
fn beside(name: &str, ours: &Series, theirs: &Series, peer: &str) -> Vec<Figure> {
    let figure = |name: String, unit, ours: &Samples, theirs: &Samples| Figure {
        name,
        unit,
        ours: ours.clone(),
        peer: Some((peer.to_owned(), theirs.clone())),
        limit: None,
        note: String::new(),
    };
    vec![
        figure(name.to_owned(), "ns per frame", &ours.cost, &theirs.cost),
        figure(format!("{name}-rate"), "Mpps", &ours.rate, &theirs.rate),
    ]
}

fn noted(mut figures: Vec<Figure>, note: &str) -> Vec<Figure> {
    for figure in &mut figures {
        note.clone_into(&mut figure.note);
    }
    figures
}

/// Bytes of the frames.
const DATAGRAM: usize = 60;
const ACK: usize = HEADERS;
/// Ethernet, IPv4, TCP with timestamps.
const HEADERS: usize = 66;
/// Of a flood's segments.
const PAYLOADS: [usize; 2] = [64, 1448];
const DATAGRAMS: &str = "60-byte datagrams";
