//! One source to the members of one group: what a further reader costs the source's thread.
//!
//! As the fan-out rows, and beside them in the same rounds: a daemon's generator on one CPU, one
//! thread on the other that takes all packets, here as descriptors of one arena.
//!
//! A further reader's cost is what it adds to the source's processor time per packet: the time with
//! all readers less that with one, shared by the others. It is measured at a part of the rate that the
//! source reaches flat out, so that few packets find a full ring: those cost the source nothing. The one
//! thread need not keep up: the arena waits for nobody, and what the source overwrites before the
//! thread comes is lost, flat out up to nine tenths with 8 members. Nor is the rate low: a source that
//! sleeps much spends its time on waking, whose cost varies by more than a descriptor costs.

use crate::fanout::{self, COST, Pace, RATE, Sharing};
use crate::handoff::Sizes;
use crate::limit;
use crate::row::{Figure, Limit, Plan, Result, Samples};

/// Rate, cost per packet and port, and cost of a further reader, with `ports` members.
pub(crate) fn against_copies(plan: &Plan, sizes: Sizes, ports: usize) -> Result<Vec<Figure>> {
    let mut groups = Series::default();
    let (mut privates, mut bares) = (Series::default(), Series::default());
    for round in 1..=plan.rounds {
        groups.push(plan, sizes, ports, Sharing::Group)?;
        privates.push(plan, sizes, ports, Sharing::Private)?;
        bares.push_rate(
            ports,
            fanout::bare(plan.time / 6, sizes, ports, Sharing::Group)?,
        );
        let [group, private, bare] = [&groups, &privates, &bares].map(|it| it.rates.last());
        let [had, private_had] = [&groups, &privates].map(|it| it.taken.last());
        eprintln!(
            "  round {round}: a group {group:.2}, taken {had:.2}, private rings {private:.2}, taken \
             {private_had:.2}, bare transfer {bare:.2} Mpps"
        );
        if ports > 1 {
            let [group, private] = [&groups, &privates].map(|it| it.further.last());
            let lost = groups.paced_lost.last() * 100.0;
            eprintln!("    a further one {group:.2}, private {private:.2} ns; {lost:.1} % lost");
        }
    }
    let lost = |samples: &Samples| samples.median() * 100.0;
    let note = format!(
        "as fanout-{ports}-{sizes}, {ports} members of one group; what is \
         counted are descriptors written; {:.1} % of the packets found a full ring, or were \
         overwritten before the reader came (-taken: the others). The peer: as many private rings. The limit: each packet written once and 16 bytes for each \
         reader, bare",
        lost(&groups.lost)
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
        figure("-taken", RATE, |series| &series.taken),
    ];
    if ports > 1 {
        figures.push(Figure {
            // Bare transfers are rates of two CPUs, and tell nothing of one at some other rate.
            limit: None,
            note: format!(
                "as fanout-{ports}-{sizes}, {ports} members of one group, beside as many private \
                 rings: what each after the first adds to the daemon's processor time per packet, \
                 at {:.0} % of the source's rate flat out ({:.1} % of the packets found a full ring, or \
                 were overwritten before the reader came). One daemon has one reader and all in \
                 turns of {:.2} s; a round's figure is the middle one of its differences",
                PART * 100.0,
                lost(&groups.paced_lost),
                (plan.time / TURN).as_secs_f64()
            ),
            ..figure("-further", FURTHER, |series| &series.further)
        });
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
    /// What the reader of each had in time.
    taken: Samples,
    /// Shares that were lost, flat out and where `further` was measured.
    lost: Samples,
    paced_lost: Samples,
}

impl Series {
    fn push(&mut self, plan: &Plan, sizes: Sizes, ports: usize, sharing: Sharing) -> Result<()> {
        let flat_out = fanout::measure(plan.time / 3, sizes, ports, sharing, Pace::FlatOut)?;
        self.lost.push(flat_out.lost);
        self.push_rate(ports, flat_out.rate);
        self.taken.push(flat_out.taken);
        if ports > 1 {
            let pps = (flat_out.rate * 1e6 * PART).max(1.0) as u64;
            let further = fanout::further(plan.time / TURN, sizes, ports, sharing, pps)?;
            self.further.push(further.ns);
            self.paced_lost.push(further.lost);
        }
        Ok(())
    }

    fn push_rate(&mut self, ports: usize, rate: f64) {
        self.rates.push(rate);
        self.costs.push(1e3 / rate / ports as f64);
    }
}

/// The part of its rate flat out that a source has where a further reader is measured.
const PART: f64 = 0.6;
/// Part of a measurement's time that a turn of one reader or all lasts.
const TURN: u32 = 5;
/// The peer's name in the table.
const PEER: &str = "private rings";
const FURTHER: &str = "ns per packet and further port";
