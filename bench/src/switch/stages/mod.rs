//! Where the time goes: processor time of one stream of TCP by stage, of guest, switch and host kernel.
//!
//! All processors are sampled by their clock (`perf record -e cpu-clock -a`), so that one recording has the
//! guest's kernel, which is a process, its programs, the switch and the host's kernel. Each sample belongs
//! to somebody ([`mod@owner`]) and to a group of work ([`table`]), the groups of a thesis on Xen. The far machine
//! is a thread of this program; its work, in the kernel too, is kept apart. Idle processors do not count.

mod contexts;
mod crowd;
mod owner;
mod parts;
mod perf;
mod site;
mod symbols;
mod table;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use super::talk::Talk;
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;
pub(crate) use contexts::{CHILD as CONTEXT_CHILD, child as context_child, contexts};
pub(crate) use crowd::crowd;
use owner::{Owner, owner};
pub(crate) use parts::parts;
use perf::{HERTZ, Pids, Recording, now_s};
use site::has_bridge_netfilter;
pub(super) use site::{Site, Way};
use table::Group;

/// One way of a stream, with and without a mechanism.
struct Arm {
    name: &'static str,
    what: &'static str,
    way: Way,
    /// From the guest to the wire.
    sends: bool,
    set: fn(&Site) -> Result<()>,
}

const fn arm(
    name: &'static str,
    way: Way,
    sends: bool,
    what: &'static str,
    set: fn(&Site) -> Result<()>,
) -> Arm {
    Arm {
        name,
        what,
        way,
        sends,
        set,
    }
}

/// Those of one direction stand together, the peer's first.
const ARMS: [Arm; 11] = [
    arm(
        "tx-bridge",
        Way::Bridge,
        true,
        "a TAP on a Linux bridge, super-frames",
        |it| it.filters_bridge(false),
    ),
    arm(
        NETFILTER[0],
        Way::Bridge,
        true,
        "the same with br_netfilter, no rules",
        |it| it.filters_bridge(true),
    ),
    arm(
        "tx-vhost",
        Way::Ours,
        true,
        "our switch by vhost-user, super-frames",
        |it| it.super_frames(true),
    ),
    arm(
        "tx-vhost-no-tso",
        Way::Ours,
        true,
        "the same, the guest with tso off gso off",
        |it| it.super_frames(false),
    ),
    arm(
        "tx-vde",
        Way::Vde,
        true,
        "vde_switch and its TAP on a bridge",
        |it| it.filters_bridge(false),
    ),
    arm(
        "rx-bridge",
        Way::Bridge,
        false,
        "a TAP on a Linux bridge, the kernel's GRO",
        |it| it.filters_bridge(false),
    ),
    arm(
        NETFILTER[1],
        Way::Bridge,
        false,
        "the same with br_netfilter, no rules",
        |it| it.filters_bridge(true),
    ),
    arm(
        "rx-vhost",
        Way::Ours,
        false,
        "our switch by vhost-user, gro=off",
        |it| {
            it.super_frames(true)
                .and_then(|()| it.merge("gro=off acks=as-is"))
        },
    ),
    arm(
        "rx-vhost-gro20",
        Way::Ours,
        false,
        "our switch by vhost-user, gro=20",
        |it| {
            it.super_frames(true)
                .and_then(|()| it.merge("gro=20 acks=as-is"))
        },
    ),
    arm(
        "rx-vhost-gro20-acks",
        Way::Ours,
        false,
        "our switch by vhost-user, gro=20 acks=expand",
        |it| {
            it.super_frames(true)
                .and_then(|()| it.merge("gro=20 acks=expand"))
        },
    ),
    arm(
        "rx-vde",
        Way::Vde,
        false,
        "vde_switch and its TAP on a bridge",
        |it| it.filters_bridge(false),
    ),
];
const NETFILTER: [&str; 2] = ["tx-bridge-nf", "rx-bridge-nf"];

/// What one round of an arm told.
#[derive(Default)]
struct Told {
    mbps: f64,
    /// CPU s per GB of guest, switch, host's kernel and far machine.
    costs: [f64; 4],
    /// Per cent by group, of the first three together.
    shares: [f64; Group::ALL.len()],
    /// CPU s per GB by group, of each of the first three.
    parts: [[f64; Group::ALL.len()]; 3],
    /// Samples by function, where no group is known.
    unknown: HashMap<String, u32>,
    /// Seconds that were sampled on all processors, of those that passed.
    seen: f64,
    /// Processor time of guest and switch by samples, of what the kernel counted.
    agrees: f64,
}

/// Names of the costs.
const OWNERS: [&str; 4] = ["guest", "switch", "host", "far"];

/// Rates, CPU s per GB by process and shares by group, of all arms in turns.
pub(crate) fn stages(plan: &Plan) -> Result<Vec<Figure>> {
    perf::is_there()?;
    let filters = has_bridge_netfilter();
    if !filters {
        eprintln!("  this kernel has no br_netfilter: without the arms -nf");
    }
    let site = Site::new()?;
    let mut series: Vec<(&Arm, Vec<Told>)> = ARMS.iter().map(|arm| (arm, Vec::new())).collect();
    series.retain(|(arm, _)| filters || !NETFILTER.contains(&arm.name));
    let mut hosts = [(); 2].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        for (arm, told) in &mut series {
            if filters {
                site.filters_bridge(false)?;
            }
            (arm.set)(&site)?;
            let once =
                measure(&site, arm, plan.time).map_err(|why| format!("{}: {why}", arm.name))?;
            eprintln!("  round {round}: {:<16} {once}", arm.name);
            told.push(once);
        }
        for (rates, sends) in hosts.iter_mut().zip([true, false]) {
            rates.push(site.of_the_host(sends, plan.time)?);
        }
        let told = hosts.each_ref().map(Samples::last);
        eprintln!("  round {round}: the host itself, to the wire and from it: {told:.0?} Mb/s");
    }
    for (arm, told) in &series {
        tell_parts(arm, told);
        tell_unknown(arm, told);
    }
    let mut figures = figures(&series, plan);
    figures.extend(of_the_host(&series, &hosts, plan));
    Ok(figures)
}

/// The arms' peers are those of the same direction.
fn figures(series: &[(&Arm, Vec<Told>)], plan: &Plan) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (arm, told) in series {
        let note = note(arm, plan.time);
        let first = ARMS.iter().find(|it| it.sends == arm.sends);
        let first = first.filter(|it| it.name != arm.name);
        let peer = first.and_then(|it| series.iter().find(|(arm, _)| arm.name == it.name));
        let mut add = |suffix: &str, unit, of: &dyn Fn(&Told) -> f64, compares: bool| {
            let samples = |told: &[Told]| told.iter().map(of).collect::<Samples>();
            let peer = peer.filter(|_| compares);
            figures.push(Figure {
                name: format!("{NAME}{}{suffix}", arm.name),
                unit,
                ours: samples(told),
                peer: peer.map(|(_, theirs)| (PEER.to_owned(), samples(theirs))),
                limit: None,
                note: note.clone(),
            });
        };
        add("", "Mb/s", &|it| it.mbps, true);
        for (at, name) in OWNERS.into_iter().enumerate() {
            add(&format!("-{name}"), COST, &|it| it.costs[at], false);
        }
        add("-cpu", COST, &|it| it.costs[..3].iter().sum(), true);
        // Means: they add up to 100, as medians would not.
        for (at, group) in Group::ALL.into_iter().enumerate() {
            let sum: f64 = told.iter().map(|it| it.shares[at]).sum();
            let mean = sum / told.len().max(1) as f64;
            add(&format!("-{}", group.name()), SHARE, &|_| mean, false);
        }
    }
    figures
}

/// What Linux does by itself, both ways, beside the guest by a TAP on a bridge: Menon's figure 2.4.
fn of_the_host(series: &[(&Arm, Vec<Told>)], hosts: &[Samples; 2], plan: &Plan) -> Vec<Figure> {
    let ways = [("tx-bridge", "to"), ("rx-bridge", "from")];
    let figure = |((peer, way), rates): ((&str, &str), &Samples)| {
        let peer = series.iter().find(|(arm, _)| arm.name == peer);
        let peer = peer.map(|(_, told)| told.iter().map(|it| it.mbps).collect());
        Figure {
            name: format!("{NAME}{}-linux", if way == "to" { "tx" } else { "rx" }),
            unit: "Mb/s",
            ours: rates.clone(),
            peer: peer.map(|samples: Samples| (PEER.to_owned(), samples)),
            limit: None,
            note: format!(
                "one stream of TCP {way} a wire (a veth) for {} s by a program of the host itself, without a guest and \
                 without a bridge; whose processor time it is cannot be told, as both ends are the same kernel's",
                plan.time.as_secs_f64()
            ),
        }
    };
    ways.into_iter().zip(hosts).map(figure).collect()
}

fn note(arm: &Arm, time: Duration) -> String {
    let direction = if arm.sends {
        "from a guest of User-mode Linux to a wire"
    } else {
        "from a wire to a guest of User-mode Linux"
    };
    format!(
        "one stream of TCP {direction} (a veth) for {} s by {}; processors sampled {HERTZ} times a second; \
         -guest and -switch in user mode, -host the host's kernel for them and in softirqs, -far the other \
         end; -cpu is the first three together, and the groups are shares of it, means of the rounds",
        time.as_secs_f64(),
        arm.what
    )
}

fn measure(site: &Site, arm: &Arm, time: Duration) -> Result<Told> {
    // When the window began and ended, who was there, and what they had spent.
    let marks: RefCell<Vec<(f64, Pids, Duration)>> = RefCell::default();
    let spent = || {
        let pids = site.pids()?;
        let switches = pids.switches.iter().map(|&pid| cpu_time(pid));
        let spent = switches.sum::<Result<Duration>>()? + site.guests.cpu_time();
        marks.borrow_mut().push((now_s(), pids, spent));
        Ok(spent)
    };
    let recording = Recording::begin(site.lab.dir())?;
    let bulk = match arm.sends {
        true => site
            .guests
            .gives(&Talk::Send(arm.way.far_address()), &site.far, time, spent)?,
        false => site
            .guests
            .takes(&site.far, arm.way.lan(), None, time, spent)?,
    };
    let samples = recording.end()?;
    let mut marks = marks.into_inner();
    // A stream that was late was measured again: the last two count.
    let (Some((end, mut pids, after)), Some((begin, earlier, before))) = (marks.pop(), marks.pop())
    else {
        return Err("the stream was not measured".into());
    };
    // A program of the guest's may have ended with the stream.
    pids.guest.extend(earlier.guest);
    let gigabytes = bulk.gbps / 8.0 * time.as_secs_f64();
    let sample_s = 1.0 / f64::from(HERTZ);
    let (mut counts, mut groups) = ([0_u32; 4], [[0_u32; Group::ALL.len()]; 3]);
    let (mut all, mut of_pids, mut unknown) = (0_u32, 0_u32, HashMap::new());
    for sample in samples
        .iter()
        .filter(|it| (begin..end).contains(&it.time_s))
    {
        all += 1;
        of_pids +=
            u32::from(pids.guest.contains(&sample.pid) || pids.switches.contains(&sample.pid));
        let (owner, group, name) = owner(sample, &pids, &site.symbols);
        let at = match owner {
            Owner::Guest => 0,
            Owner::Switch => 1,
            Owner::Host => 2,
            Owner::Far => 3,
            Owner::Nobody => continue,
        };
        counts[at] += 1;
        if owner == Owner::Far {
            continue;
        }
        groups[at][Group::ALL.iter().position(|it| *it == group).unwrap_or(0)] += 1;
        if group == Group::Other {
            *unknown
                .entry(format!("{}: {name}", OWNERS[at]))
                .or_default() += 1;
        }
    }
    let own = f64::from(counts[..3].iter().sum::<u32>()).max(1.0);
    let cost = |count: u32| f64::from(count) * sample_s / gigabytes.max(1e-9);
    let of_group = |at| groups.iter().map(|owner| owner[at]).sum::<u32>();
    Ok(Told {
        mbps: bulk.gbps * 1e3,
        costs: counts.map(cost),
        shares: std::array::from_fn(|at| f64::from(of_group(at)) * 100.0 / own),
        parts: groups.map(|owner| owner.map(cost)),
        unknown,
        seen: f64::from(all) * sample_s / (end - begin) / sys::cpus().len().max(1) as f64,
        agrees: f64::from(of_pids) * sample_s / (after - before).as_secs_f64().max(1e-9),
    })
}

/// Whose each group of work is: CPU s per GB, means of the rounds.
fn tell_parts(arm: &Arm, told: &[Told]) {
    for (at, owner) in OWNERS.iter().take(3).enumerate() {
        let words = Group::ALL.into_iter().enumerate().map(|(group, it)| {
            let sum: f64 = told.iter().map(|told| told.parts[at][group]).sum();
            format!("{} {:.3}", it.name(), sum / told.len().max(1) as f64)
        });
        let words: Vec<_> = words.collect();
        eprintln!(
            "  {}, {owner}, CPU s per GB: {}",
            arm.name,
            words.join(", ")
        );
    }
}

/// What the tables lack, so that they can be completed.
fn tell_unknown(arm: &Arm, told: &[Told]) {
    let mut all: HashMap<&str, u32> = HashMap::new();
    for (name, count) in told.iter().flat_map(|it| &it.unknown) {
        *all.entry(name).or_default() += count;
    }
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let first = all.iter().take(LARGEST);
    let first: Vec<String> = first
        .map(|(name, count)| format!("{name} ({count})"))
        .collect();
    eprintln!("  {}: in no group: {}", arm.name, first.join(", "));
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} Mb/s; CPU s per GB", self.mbps)?;
        for (name, cost) in OWNERS.into_iter().zip(self.costs) {
            write!(f, " {name} {cost:.2}")?;
        }
        write!(f, "; %")?;
        for (group, share) in Group::ALL.into_iter().zip(self.shares) {
            write!(f, " {} {share:.1}", group.name())?;
        }
        let [seen, agrees] = [self.seen, self.agrees].map(|it| it * 100.0);
        write!(
            f,
            "; sampled {seen:.0} % of the time, {agrees:.0} % of what the kernel counted"
        )
    }
}

/// Beginning of the figures' names.
const NAME: &str = "tcp-stage-";
/// Unit of a cost.
const COST: &str = "CPU s per GB";
/// Unit of a share.
const SHARE: &str = "% of the time";
const PEER: &str = "TAP on a Linux bridge";
/// The most functions of no group that are told.
const LARGEST: usize = 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_an_arm_add_up() {
        // Medians of these would not.
        let round = |shares: [f64; 3]| {
            let mut told = Told::default();
            told.shares[..3].copy_from_slice(&shares);
            told
        };
        let rounds = [[10.0, 20.0, 70.0], [60.0, 30.0, 10.0], [80.0, 15.0, 5.0]];
        let series = [(&ARMS[0], rounds.map(round).into())];
        let plan = Plan::from_env().unwrap();
        let figures = figures(&series, &plan);
        let shares = figures.iter().filter(|figure| figure.unit == SHARE);
        let sum: f64 = shares.map(|figure| figure.ours.median()).sum();
        assert!((sum - 100.0).abs() < 1e-6, "{sum}");
    }
}
