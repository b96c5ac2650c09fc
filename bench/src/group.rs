//! One source to the members of one group: what a further reader costs the source's thread.
//!
//! As the fan-out rows, and beside them in the same rounds: a daemon's generator on one CPU, one
//! thread on the other that takes all packets, here as descriptors of one arena. A further reader's
//! cost is what the last one added: the time per packet with all readers less that with one, shared
//! by the others.

use crate::fanout::{self, COST, RATE, Sharing};
use crate::handoff::Sizes;
use crate::limit;
use crate::row::{Figure, Limit, Plan, Result, Samples};

/// Rate, cost per packet and port, and cost of a further reader, with `ports` members.
pub(crate) fn against_copies(plan: &Plan, sizes: Sizes, ports: usize) -> Result<Vec<Figure>> {
    let mut groups = Series::default();
    let (mut privates, mut bares) = (Series::default(), Series::default());
    // Four measurements a round, and two bare ones.
    let time = plan.time / 2;
    for round in 1..=plan.rounds {
        let measure = |ports, sharing| Ok(fanout::measure(time, sizes, ports, sharing)?.0);
        let private = |ports| measure(ports, Sharing::Private);
        groups.push(ports, |ports| measure(ports, Sharing::Group))?;
        privates.push(ports, private)?;
        bares.push(ports, |ports| {
            fanout::bare(time / 2, sizes, ports, Sharing::Group)
        })?;
        let [group, private, bare] = [&groups, &privates, &bares].map(|it| it.rates.last());
        eprintln!(
            "  round {round}: a group {group:.2}, private rings {private:.2}, bare transfer \
             {bare:.2} Mpps"
        );
    }
    let note = format!(
        "as fanout-{ports}-{sizes}, {ports} members of one group; what is counted are descriptors \
         written, whether or not their reader was in time. The peer: as many private rings. The \
         limit: each packet written once and 16 bytes for each reader, bare"
    );
    let figure = |suffix: &str, unit, samples: fn(&Series) -> &Samples| Figure {
        name: format!("group-{ports}-{sizes}{suffix}"),
        unit,
        ours: samples(&groups).clone(),
        peer: Some((PEER.to_owned(), samples(&privates).clone())),
        limit: Some(Limit::new(limit::BARE, samples(&bares).clone())),
        note: note.clone(),
    };
    let mut figures = vec![
        figure("", RATE, |series| &series.rates),
        figure("-cost", COST, |series| &series.costs),
    ];
    if ports > 1 {
        figures.push(figure("-further", FURTHER, |series| &series.further));
    }
    Ok(figures)
}

/// The rounds of one way to have packets.
#[derive(Default)]
struct Series {
    rates: Samples,
    costs: Samples,
    /// What each reader after the first adds.
    further: Samples,
}

impl Series {
    fn push(&mut self, ports: usize, measure: impl Fn(usize) -> Result<f64>) -> Result<()> {
        let cost = |rate: f64| 1e3 / rate;
        let rate = measure(ports)?;
        self.rates.push(rate);
        self.costs.push(cost(rate) / ports as f64);
        if ports > 1 {
            let more = cost(rate) - cost(measure(1)?);
            self.further.push(more / (ports - 1) as f64);
        }
        Ok(())
    }
}

/// The peer's name in the table.
const PEER: &str = "private rings";
const FURTHER: &str = "ns per packet and further port";
