//! One source to the members of one group: what a further reader costs the source's thread.
//!
//! As the fan-out rows, and beside them in the same rounds: a daemon's generator on one CPU, one
//! thread on the other that takes all packets, here as descriptors of one arena. A further reader's
//! cost is what the last one added: the time per packet with all readers less that with one, shared
//! by the others.

use crate::fanout::{self, Sharing};
use crate::row::{Figure, Plan, Result, Samples};

/// Rate, cost per packet and port, and cost of a further reader, with `ports` members.
pub(crate) fn against_copies(plan: &Plan, len: usize, ports: usize) -> Result<Vec<Figure>> {
    let (mut rates, mut costs, mut further) =
        (Samples::default(), Samples::default(), Samples::default());
    let (mut peer_rates, mut peer_costs, mut peer_further) =
        (Samples::default(), Samples::default(), Samples::default());
    let cost = |rate: f64| 1e3 / rate;
    let more = |all: f64, one: f64| (cost(all) - cost(one)) / (ports as f64 - 1.0);
    for round in 1..=plan.rounds {
        let measure = |ports, sharing| fanout::measure(plan.time, len, ports, sharing);
        let (rate, lost) = measure(ports, Sharing::Group)?;
        let (peer, _) = measure(ports, Sharing::Private)?;
        eprintln!(
            "  round {round}: a group {rate:.2}, private rings {peer:.2} Mpps, lost {lost:.3}"
        );
        if ports > 1 {
            further.push(more(rate, measure(1, Sharing::Group)?.0));
            peer_further.push(more(peer, measure(1, Sharing::Private)?.0));
        }
        rates.push(rate);
        costs.push(cost(rate) / ports as f64);
        peer_rates.push(peer);
        peer_costs.push(cost(peer) / ports as f64);
    }
    let peer = |samples| Some((PEER.to_owned(), samples));
    let note = format!(
        "as fanout-{ports}-{len}, {ports} members of one group; what is counted are descriptors \
         written, whether or not their reader was in time. The peer: as many private rings, in the \
         same rounds."
    );
    let mut figures = vec![
        Figure {
            name: format!("group-{ports}-{len}"),
            unit: "Mpps to each port",
            ours: rates,
            peer: peer(peer_rates),
            note: note.clone(),
        },
        Figure {
            name: format!("group-{ports}-{len}-cost"),
            unit: "ns per packet and port",
            ours: costs,
            peer: peer(peer_costs),
            note: note.clone(),
        },
    ];
    if ports > 1 {
        figures.push(Figure {
            name: format!("group-{ports}-{len}-further"),
            unit: "ns per packet and further port",
            ours: further,
            peer: peer(peer_further),
            note,
        });
    }
    Ok(figures)
}

/// The peer's name in the table.
const PEER: &str = "private rings";
