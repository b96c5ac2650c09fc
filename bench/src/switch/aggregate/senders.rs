//! Streams by how their sender controls congestion, one and several at a time, with segments merged and ACKs expanded.

use super::site::{OURS, Site};
use super::{MENONS, OFF, PER_SEGMENT, Streams, figure, word};
use crate::row::{Figure, Plan, Result};
use crate::switch::slow_start::CONTROLS;
use crate::switch::talk::AGAIN;

/// How a receiver merges, and whether its ACKs are expanded; what is compared with comes first.
const ARMS: [(usize, bool); 3] = [(1, false), (MENONS, false), (MENONS, true)];
/// To whom, and how many streams at a time.
const TO: [(&str, usize); 3] = [("guest", 1), ("container", 1), ("container-x4", 4)];

/// Rates, processor time, ACKs and what was sent again.
pub(crate) fn senders(plan: &Plan) -> Result<Vec<Figure>> {
    let mut site = Site::new()?;
    site.guest_merges(false)?;
    let mut all = CONTROLS.map(|_| TO.map(|_| ARMS.map(|_| Streams::default())));
    for round in 1..=plan.rounds {
        for (arm, (limit, expands)) in ARMS.into_iter().enumerate() {
            let (limit, acks) = (word(limit), if expands { "expand" } else { "as-is" });
            site.set(&format!("gro={limit} acks={acks}"))?;
            let nic = site.container(&["--gro", &limit, "--acks", acks])?;
            for (control, all) in CONTROLS.into_iter().zip(&mut all) {
                site.control = Some(control);
                for ((name, count), all) in TO.into_iter().zip(all) {
                    let stream = match name {
                        "guest" => site.to_guest(OURS, plan)?,
                        _ => site.to_container(&nic, count, plan)?,
                    };
                    let told = all[arm].push(&stream);
                    let again = stream.again;
                    eprintln!(
                        "  round {round}, {control}, {name}, {limit} {acks}: {told}, {again:.2} again"
                    );
                }
            }
        }
    }
    let mut figures = Vec::new();
    for (control, all) in CONTROLS.into_iter().zip(&all) {
        for ((to, _), [off, as_is, expanded]) in TO.into_iter().zip(all) {
            for (suffix, ours) in [("", as_is), ("-expand", expanded)] {
                let name = format!("aggregate-{control}-{to}{suffix}");
                let rows = [
                    (String::new(), "Gb/s", &ours.rates, &off.rates),
                    ("-cpu".to_owned(), "CPU s per GB", &ours.costs, &off.costs),
                    ("-count".to_owned(), PER_SEGMENT, &ours.acks, &off.acks),
                    ("-again".to_owned(), AGAIN, &ours.again, &off.again),
                ];
                let rows = rows.map(|(what, unit, ours, off)| {
                    figure(format!("{name}{what}"), unit, ours, (OFF, off))
                });
                figures.extend(rows);
            }
        }
    }
    Ok(figures)
}
