//! One stream of TCP from a wire to a guest and to a container: single segments, merged by ours or by the kernel.

mod asleep;
mod fit;
mod loss;
mod requests;
mod senders;
mod site;

pub(crate) use asleep::asleep;
pub(crate) use loss::loss;
pub(crate) use senders::senders;

use fit::fit;
use requests::Requests;
use site::{KERNELS, OURS, Site, Stream};

use crate::row::{Figure, Plan, Result, Samples};

/// The most segments of a super-frame; 1: none are merged.
const LIMITS: [usize; 9] = [1, 2, 4, 8, 12, 16, 20, 28, 44];
/// The limit of Menon's measurements.
const MENONS: usize = 20;

/// Settings of the port of a guest that merges, too; what is compared with comes first.
const OWN: [&str; 3] = [
    "acks=as-is gro=off",
    "acks=as-is gro=20",
    "acks=expand gro=20",
];

/// What is measured of streams to one receiver.
#[derive(Default, Clone)]
struct Streams {
    rates: Samples,
    costs: Samples,
    acks: Samples,
    again: Samples,
}

impl Streams {
    fn push(&mut self, stream: &Stream) -> String {
        self.rates.push(stream.bulk.gbps);
        self.costs.push(stream.bulk.cpu_s);
        self.acks.push(stream.acks);
        self.again.push(stream.again);
        let Stream { bulk, acks, .. } = stream;
        format!("{:.2} Gb/s, {:.2} s, {acks:.2} ACKs", bulk.gbps, bulk.cpu_s)
    }
}

/// Rates, processor time and ACKs by the limit.
pub(crate) fn aggregate(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut guest = vec![Streams::default(); LIMITS.len()];
    let (mut container, mut own) = (guest.clone(), OWN.map(|_| Streams::default()));
    let mut expanded = [(); 2].map(|()| Streams::default());
    let mut bare = Streams::default();
    let mut kernels = [(); 4].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        site.guest_merges(false)?;
        let mut limits: Vec<_> = LIMITS.into_iter().enumerate().collect();
        // What drifts within a round is not always for the same ones.
        if round % 2 == 0 {
            limits.reverse();
        }
        for (at, limit) in limits {
            site.set(&format!("acks=as-is gro={}", word(limit)))?;
            let to_guest = guest[at].push(&site.to_guest(OURS, plan)?);
            let nic = site.container(&["--gro", &word(limit)])?;
            let to_container = container[at].push(&site.to_container(&nic, 1, plan)?);
            eprintln!("  round {round}, {limit}: guest {to_guest}; container {to_container}");
        }
        site.wire_offers(false)?;
        site.set(&format!("acks=as-is gro={MENONS}"))?;
        let told = bare.push(&site.to_guest(OURS, plan)?);
        site.wire_offers(true)?;
        eprintln!("  round {round}, {MENONS}, a wire that offers nothing: guest {told}");
        site.set(&format!("acks=expand gro={MENONS}"))?;
        let to_guest = expanded[0].push(&site.to_guest(OURS, plan)?);
        let nic = site.container(&["--gro", &word(MENONS), "--acks", "expand"])?;
        let to_container = expanded[1].push(&site.to_container(&nic, 1, plan)?);
        eprintln!("  round {round}, expanded: guest {to_guest}; container {to_container}");
        for (at, is) in [(0, false), (1, true)] {
            site.kernel_merges(is)?;
            kernels[at].push(site.to_guest(KERNELS, plan)?.bulk.gbps);
            kernels[2 + at].push(site.to_inner(plan)?);
        }
        let told = kernels.each_ref().map(|it| format!("{:.2}", it.last()));
        eprintln!("  round {round}, bridge without and with GRO: guest, container {told:?} Gb/s");
        site.guest_merges(true)?;
        for (settings, own) in OWN.into_iter().zip(&mut own) {
            site.set(settings)?;
            let told = own.push(&site.to_guest(OURS, plan)?);
            eprintln!("  round {round}, {settings}, the guest merges, too: {told}");
        }
    }
    let mut figures = Vec::new();
    let at = LIMITS
        .iter()
        .position(|it| *it == MENONS)
        .unwrap_or_default();
    let [without_guest, with_guest, without_container, with_container] = &kernels;
    for (who, all, expanded, peers) in [
        ("guest", &guest, &expanded[0], [without_guest, with_guest]),
        (
            "container",
            &container,
            &expanded[1],
            [without_container, with_container],
        ),
    ] {
        for (at, limit) in LIMITS.into_iter().enumerate().skip(1) {
            figures.extend(beside(
                &format!("aggregate-{who}-{limit}"),
                &all[at],
                &all[0],
                OFF,
            ));
        }
        let points: Vec<_> = LIMITS
            .into_iter()
            .zip(all.iter().map(|it| it.costs.median()))
            .collect();
        let curve = fit(&points);
        eprintln!(
            "  {who}: CPU s per GB = {:.3} + {:.3} / segments, error {:.1} %",
            curve.x,
            curve.y,
            curve.error * 100.0
        );
        let peers = [
            ("bridge", "bridge, no GRO"),
            ("kernel", "bridge, kernel's GRO"),
        ]
        .into_iter()
        .zip(peers);
        for ((short, peer), theirs) in peers {
            let name = format!("aggregate-{who}-{MENONS}-{short}");
            figures.push(figure(name, "Gb/s", &all[at].rates, (peer, theirs)));
        }
        figures.extend(beside(&format!("acks-{who}"), expanded, &all[0], OFF));
        let alone = ("ours, acks=as-is", &all[at].costs);
        figures.push(figure(
            format!("acks-{who}-price"),
            "CPU s per GB",
            &expanded.costs,
            alone,
        ));
        let single = ("ours, gro=off", &all[0].acks);
        figures.push(figure(
            format!("acks-{who}-count"),
            PER_SEGMENT,
            &expanded.acks,
            single,
        ));
        figures.push(figure(
            format!("acks-{who}-as-is"),
            PER_SEGMENT,
            &all[at].acks,
            single,
        ));
    }
    figures.extend(beside(
        &format!("aggregate-guest-{MENONS}-bare"),
        &bare,
        &guest[at],
        "ours, the wire's card as it is",
    ));
    figures.extend(of_merging_guest(&own));
    Ok(figures)
}

/// A guest as it is, whose kernel merges: with segments merged before it, and with ACKs expanded.
fn of_merging_guest([off, merged, expanded]: &[Streams; OWN.len()]) -> Vec<Figure> {
    let mut figures = Vec::new();
    figures.extend(beside("aggregate-merging-guest-20", merged, off, OFF));
    figures.extend(beside("acks-merging-guest", expanded, off, OFF));
    let alone = ("ours, acks=as-is", &merged.costs);
    let name = "acks-merging-guest-price".to_owned();
    figures.push(figure(name, "CPU s per GB", &expanded.costs, alone));
    for (name, ours) in [("count", expanded), ("as-is", merged)] {
        let name = format!("acks-merging-guest-{name}");
        figures.push(figure(name, PER_SEGMENT, &ours.acks, (OFF, &off.acks)));
    }
    figures
}

/// Requests by TCP to a guest, alone and beside a stream, with aggregation and without.
pub(crate) fn requests(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let from = site.plain()?;
    let mut all = [(); 4].map(|()| (Samples::default(), Samples::default()));
    for round in 1..=plan.rounds {
        for (is_beside, name) in [(false, "alone"), (true, "beside a stream")] {
            let mut told = Vec::new();
            let mut both = [(false, "gro=off"), (true, "gro=20")];
            // What drifts within a round is not always for the same one.
            if round % 2 == 0 {
                both.reverse();
            }
            for (is_on, text) in both {
                site.set(text)?;
                let Requests { per_s, p99_us, .. } = site.requests(&from, plan, is_beside)?;
                let (rates, slow) = &mut all[2 * usize::from(is_beside) + usize::from(is_on)];
                rates.push(per_s);
                slow.push(p99_us);
                told.push(format!("{text} {per_s:.0}/s, p99 {p99_us:.0} us"));
            }
            eprintln!("  round {round}, {name}: {}", told.join("; "));
        }
    }
    let [(off, _), (on, _), (_, slow_off), (_, slow_on)] = &all;
    let figures = [
        figure("tcp-rr".into(), "requests/s", on, (OFF, off)),
        figure("tcp-rr-beside-p99".into(), "us", slow_on, (OFF, slow_off)),
    ];
    let note = "requests of 64 bytes and answers, one after the other, from a container by vnplug nic, whose card does \
                nothing, to a stock guest of User-mode Linux by vhost-user; beside: while a stream of single segments, 1 Gb/s, goes the same way";
    let noted = |figure| Figure {
        note: note.to_owned(),
        ..figure
    };
    Ok(figures.map(noted).to_vec())
}

fn word(limit: usize) -> String {
    match limit {
        1 => "off".to_owned(),
        limit => limit.to_string(),
    }
}

/// Rate and processor time beside those of another.
fn beside(name: &str, ours: &Streams, theirs: &Streams, peer: &str) -> [Figure; 2] {
    [
        figure(name.to_owned(), "Gb/s", &ours.rates, (peer, &theirs.rates)),
        figure(
            format!("{name}-cpu"),
            "CPU s per GB",
            &ours.costs,
            (peer, &theirs.costs),
        ),
    ]
}

fn figure(name: String, unit: &'static str, ours: &Samples, peer: (&str, &Samples)) -> Figure {
    Figure {
        name,
        unit,
        ours: ours.clone(),
        peer: Some((peer.0.to_owned(), peer.1.clone())),
        limit: None,
        note: NOTE.to_owned(),
    }
}

/// The peer's name where it is ours without merging.
const OFF: &str = "ours, gro=off";
const PER_SEGMENT: &str = "ACKs per segment";
const NOTE: &str = "one stream of TCP of single segments of 1,448 bytes from a veth (its sender leaves nothing to a \
     card) by an uplink to a guest of User-mode Linux by vhost-user, whose own kernel merges nothing (but \
     where the name says so), or to a container by vnplug nic; processor time of the switch and of the guest or \
     vnplug nic; -bare: the wire's card offers nothing at all, neither sums (rx, tx) nor pieces nor segmentation; the bridge gives it to the same guest by a TAP, and to a container by a veth";
