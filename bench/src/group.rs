//! One source to the members of one group: what a further reader costs the source's thread.
//!
//! As the fan-out rows, and beside them in the same rounds: a daemon's generator on one CPU, one
//! thread on the other that takes all packets, here as descriptors of one arena.
//!
//! A further reader's cost is what it adds to the source's processor time per packet: the time with
//! all readers less that with one, shared by the others. It is measured at a rate at which the one
//! thread keeps up with all of them. Flat out it does not, from 8 members on: 40 % of what the source
//! offers finds a full ring, and what is delivered tells that thread's speed and not the source's.

use std::time::Duration;

use crate::fanout::{self, COST, Measured, Pace, RATE, Sharing};
use crate::handoff::Sizes;
use crate::limit;
use crate::row::{Figure, Limit, Plan, Result, Samples};

/// Rate, cost per packet and port, and cost of a further reader, with `ports` members.
pub(crate) fn against_copies(plan: &Plan, sizes: Sizes, ports: usize) -> Result<Vec<Figure>> {
    let mut groups = Series::default();
    let (mut privates, mut bares) = (Series::default(), Series::default());
    // Six measurements a round, and two bare ones.
    let time = plan.time / 3;
    for round in 1..=plan.rounds {
        groups.push(time, sizes, ports, Sharing::Group)?;
        privates.push(time, sizes, ports, Sharing::Private)?;
        bares.push_bare(ports, |ports| {
            fanout::bare(time / 2, sizes, ports, Sharing::Group)
        })?;
        let [group, private, bare] = [&groups, &privates, &bares].map(|it| it.rates.last());
        eprintln!(
            "  round {round}: a group {group:.2}, private rings {private:.2}, bare transfer \
             {bare:.2} Mpps"
        );
        if ports > 1 {
            let [group, private] = [&groups, &privates].map(|it| it.further.last());
            let full = groups.paced_full.last() * 100.0;
            eprintln!("    a further one {group:.2}, private {private:.2} ns; {full:.1} % full");
        }
    }
    let full = |samples: &Samples| samples.median() * 100.0;
    let note = format!(
        "as fanout-{ports}-{sizes}, {ports} members of one group; what is counted are descriptors \
         written, whether or not their reader was in time; {:.1} % of them found a full ring. The \
         peer: as many private rings. The limit: each packet written once and 16 bytes for each \
         reader, bare",
        full(&groups.full)
    );
    let figure = |suffix: &str, unit, samples: fn(&Series) -> &Samples| Figure {
        name: format!("group-{ports}-{sizes}{suffix}"),
        unit,
        ours: samples(&groups).clone(),
        peer: Some((PEER.to_owned(), samples(&privates).clone())),
        limit: Some(Limit::new(limit::BARE, samples(&bares).clone())),
        note: match suffix {
            "-further" => format!(
                "{note}. A further reader: processor time of the daemon at a rate at which the one \
                 thread keeps up with all readers ({:.1} % found a full ring there), of the limit \
                 the time of both CPUs",
                full(&groups.paced_full)
            ),
            _ => note.clone(),
        },
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
    /// Shares that found a full ring, flat out and where `further` was measured.
    full: Samples,
    paced_full: Samples,
}

impl Series {
    fn push(&mut self, time: Duration, sizes: Sizes, ports: usize, sharing: Sharing) -> Result<()> {
        let flat_out = fanout::measure(time, sizes, ports, sharing, Pace::FlatOut)?;
        self.full.push(flat_out.full);
        self.push_rate(ports, flat_out.rate);
        if ports > 1 {
            let pace = Pace::Packets(pace(sizes, ports, sharing));
            let measure = |ports| fanout::measure(time, sizes, ports, sharing, pace);
            let (many, one): (Measured, Measured) = (measure(ports)?, measure(1)?);
            let more = many.spent_ns - one.spent_ns;
            self.further.push(more / (ports - 1) as f64);
            self.paced_full.push(many.full);
        }
        Ok(())
    }

    fn push_bare(&mut self, ports: usize, measure: impl Fn(usize) -> Result<f64>) -> Result<()> {
        let cost = |rate: f64| 1e3 / rate;
        let rate = measure(ports)?;
        self.push_rate(ports, rate);
        if ports > 1 {
            let more = cost(rate) - cost(measure(1)?);
            self.further.push(more / (ports - 1) as f64);
        }
        Ok(())
    }

    fn push_rate(&mut self, ports: usize, rate: f64) {
        self.rates.push(rate);
        self.costs.push(1e3 / rate / ports as f64);
    }
}

/// Packets per second at which one thread keeps up with so many readers.
fn pace(sizes: Sizes, ports: usize, sharing: Sharing) -> u64 {
    let bytes = match sharing {
        Sharing::Group => DESCRIPTOR_BYTES,
        Sharing::Private => sizes.mean() as u64,
    };
    (MOST_PACKETS.min(MOST_BYTES / bytes) / ports as u64).min(MOST_OF_ONE)
}

/// What that thread can take from all readers together, in a second, and what the source makes.
const MOST_PACKETS: u64 = 48_000_000;
const MOST_BYTES: u64 = 3_000_000_000;
const MOST_OF_ONE: u64 = 6_000_000;
/// What a reader of a group takes of each packet at least.
const DESCRIPTOR_BYTES: u64 = 16;

/// The peer's name in the table.
const PEER: &str = "private rings";
const FURTHER: &str = "ns per packet and further port";
