//! One to seven pairs of guests: how the total grows, by vhost-user through our switch, through one of ours with
//! lanes, and by TAPs through a Linux bridge and through Open vSwitch, where it is unpacked.
//!
//! All guests have all interfaces: `eth0` and `eth1` are virtio cards of our switches, `vec0` and `vec1` the vector
//! driver's on TAPs of the two others. None cuts or sums on the way. A bridge forwards in the time of whoever
//! sends, so that only the processor time of everything together can be compared. Open vSwitch forwards in
//! its process (`datapath_type=netdev`), and takes super-frames (`userspace-tso-enable`).

use std::thread::available_parallelism;
use std::time::Duration;

use vnplug_e2e::UmlConfig;

use super::guests::{Bulk, Guests, Lan};
use super::lans::Lans;
use super::ovs::Ovs;
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};

/// The most pairs.
const MOST: usize = 7;
/// What is appended to the row's name, whose figure is ours there, and whose the peer's, and what that is called.
const ROWS: [(&str, usize, usize, &str); 3] = [
    ("", 0, 2, "Linux bridge, TAPs"),
    ("-ovs", 0, 3, "Open vSwitch, TAPs"),
    ("-lanes", 1, 2, "Linux bridge, TAPs"),
];
/// Ours, ours with lanes, the bridge's, and Open vSwitch's.
const LANS: [Lan; 4] = [
    Lan {
        interface: "eth0",
        net: 1,
    },
    Lan {
        interface: "eth1",
        net: 4,
    },
    Lan {
        interface: "vec0",
        net: 2,
    },
    Lan {
        interface: "vec1",
        net: 3,
    },
];

struct Site {
    guests: Guests,
    ovs: Option<Ovs>,
    lans: Lans,
    lanes: usize,
}

impl Site {
    fn new() -> Result<Self> {
        // A pair of guests for each, at most; the guests need processors, too.
        let lanes = (available_parallelism()?.get() / 2).clamp(1, MOST);
        let lans = Lans::with_lanes(2 * MOST, Some(lanes))?;
        let (lab, netns) = (&lans.lab, &lans.netns);
        let ovs = match Ovs::is_here() {
            true => Some(Ovs::between_taps(lab, netns)?),
            false => {
                eprintln!("  without Open vSwitch: run bench/get-ovs.sh");
                None
            }
        };
        if let Some(ovs) = &ovs {
            for guest in 0..2 * MOST {
                let tap = format!("otap{guest}");
                netns.tap(&tap)?;
                ovs.interface(&tap)?;
            }
        }
        let guests = Guests::boot(lab, 2 * MOST, |guest| UmlConfig {
            kernel_args: lans
                .cards(guest)
                .into_iter()
                .chain([lans.laned_card()])
                .chain(
                    ovs.as_ref()
                        .map(|_| format!("vec1:transport=tap,ifname=otap{guest},depth=128,gro=1")),
                )
                .collect(),
            netns: Some(netns.name().to_owned()),
            ..UmlConfig::default()
        })?;
        let site = Self {
            guests,
            ovs,
            lans,
            lanes,
        };
        for lan in site.networks() {
            site.guests.join(*lan)?;
        }
        Ok(site)
    }

    fn networks(&self) -> &'static [Lan] {
        &LANS[..3 + usize::from(self.ovs.is_some())]
    }

    fn tcp(&self, pairs: usize, lan: Lan, time: Duration) -> Result<Bulk> {
        self.guests.tcp(pairs, lan, time, || {
            let ovs = self.ovs.as_ref().map(|ovs| cpu_time(ovs.pid()));
            let switches = cpu_time(self.lans.daemon.pid())? + ovs.transpose()?.unwrap_or_default();
            Ok(switches + self.guests.cpu_time())
        })
    }
}

/// Total rate and processor time by the number of pairs.
pub(crate) fn curve(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut rates: Vec<[Samples; 4]> = vec![Default::default(); MOST];
    let mut costs = rates.clone();
    for round in 1..=plan.rounds {
        for pairs in 1..=MOST {
            let mut told = Vec::new();
            for (at, lan) in site.networks().iter().enumerate() {
                let bulk = site.tcp(pairs, *lan, plan.time);
                let bulk =
                    bulk.map_err(|why| format!("{pairs} pairs on {}: {why}", lan.interface))?;
                rates[pairs - 1][at].push(bulk.gbps);
                costs[pairs - 1][at].push(bulk.cpu_s);
                told.push(format!(
                    "{:.3} Gb/s, {:.2} CPU s per GB",
                    bulk.gbps, bulk.cpu_s
                ));
            }
            let told = told.join("; ");
            eprintln!(
                "  round {round}, {pairs} pairs, ours, with lanes, bridge, Open vSwitch: {told}"
            );
        }
    }
    let mut figures = Vec::new();
    for (at, (rates, costs)) in rates.into_iter().zip(costs).enumerate() {
        let pairs = at + 1;
        let of_unit = [("", "Gb/s", rates), ("-cpu", "CPU s per GB", costs)];
        for (suffix, unit, all) in of_unit {
            for (whose, ours, theirs, peer) in ROWS {
                let [ours, theirs] = [ours, theirs].map(|at| all[at].clone());
                if theirs.all().is_empty() {
                    continue;
                }
                let lanes = match whose {
                    "-lanes" => format!(" with {} lanes", site.lanes),
                    _ => String::new(),
                };
                figures.push(Figure {
                    name: format!("switch-curve-{pairs}{suffix}{whose}"),
                    unit,
                    ours,
                    peer: Some((peer.to_owned(), theirs)),
                    limit: None,
                    note: format!(
                        "{pairs} pairs of User-mode Linux, one stream of TCP in each for {} s, all pairs \
                         together: ours by vhost-user{lanes}, the peer by the vector driver's TAPs, both \
                         with super-frames; processor time of all {} guests and the switches",
                        plan.time.as_secs_f64(),
                        2 * MOST
                    ),
                });
            }
        }
    }
    Ok(figures)
}
