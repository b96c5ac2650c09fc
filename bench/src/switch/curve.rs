//! One to seven pairs of guests: how the total grows, by vhost-user through our switch and by TAPs through
//! a Linux bridge.
//!
//! All guests have both interfaces: `eth0` is a virtio card of the switch's, `vec0` the vector driver's on
//! a TAP of the bridge. Both cut and sum nothing on the way. A bridge forwards in the time of whoever
//! sends, so that only the processor time of everything together can be compared.

use std::time::Duration;

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::{Lab, Netns, UmlConfig};

use super::guests::{Bulk, Guests, Lan};
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};

/// The most pairs.
const MOST: usize = 7;
const PEER: &str = "Linux bridge, TAPs";
/// Ours, and the bridge's.
const LANS: [Lan; 2] = [
    Lan {
        interface: "eth0",
        net: 1,
    },
    Lan {
        interface: "vec0",
        net: 2,
    },
];

struct Site {
    guests: Guests,
    daemon: Daemon,
    _netns: Netns,
    _lab: Lab,
}

impl Site {
    fn new() -> Result<Self> {
        let (lab, netns) = (Lab::new()?, Netns::new()?);
        let socket = lab.dir().join("lan0.sock");
        let spec = format!("lan0,vhost={}", socket.display());
        let daemon = Daemon::start(&lab, None, &["--switch", &spec])?;
        let taps: Vec<String> = (0..2 * MOST).map(|guest| format!("tap{guest}")).collect();
        for tap in &taps {
            netns.tap(tap)?;
        }
        let ports: Vec<&str> = taps.iter().map(String::as_str).collect();
        netns.bridge("br0", &ports)?;
        let guests = Guests::boot(&lab, 2 * MOST, |guest| UmlConfig {
            kernel_args: vec![
                format!("virtio_uml.device={}:1", socket.display()),
                format!("vec0:transport=tap,ifname=tap{guest},depth=128,gro=1"),
            ],
            netns: Some(netns.name().to_owned()),
            ..UmlConfig::default()
        })?;
        for lan in LANS {
            guests.join(lan)?;
        }
        Ok(Self {
            guests,
            daemon,
            _netns: netns,
            _lab: lab,
        })
    }

    fn tcp(&self, pairs: usize, lan: Lan, time: Duration) -> Result<Bulk> {
        self.guests.tcp(pairs, lan, time, || {
            Ok(cpu_time(self.daemon.pid())? + self.guests.cpu_time())
        })
    }
}

/// Total rate and processor time by the number of pairs.
pub(crate) fn curve(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut rates: Vec<[Samples; 2]> = vec![Default::default(); MOST];
    let mut costs = rates.clone();
    for round in 1..=plan.rounds {
        for pairs in 1..=MOST {
            let mut told = Vec::new();
            for (at, lan) in LANS.into_iter().enumerate() {
                let bulk = site.tcp(pairs, lan, plan.time);
                let bulk =
                    bulk.map_err(|why| format!("{pairs} pairs on {}: {why}", lan.interface))?;
                rates[pairs - 1][at].push(bulk.gbps);
                costs[pairs - 1][at].push(bulk.cpu_s);
                told.push(format!(
                    "{:.3} Gb/s, {:.2} CPU s per GB",
                    bulk.gbps, bulk.cpu_s
                ));
            }
            let [ours, bridge] = &told[..] else { continue };
            eprintln!("  round {round}, {pairs} pairs: vNPlug {ours}; bridge {bridge}");
        }
    }
    let mut figures = Vec::new();
    for (at, (rates, costs)) in rates.into_iter().zip(costs).enumerate() {
        let pairs = at + 1;
        for (suffix, unit, [ours, theirs]) in [("", "Gb/s", rates), ("-cpu", "CPU s per GB", costs)]
        {
            figures.push(Figure {
                name: format!("switch-curve-{pairs}{suffix}"),
                unit,
                ours,
                peer: Some((PEER.to_owned(), theirs)),
                limit: None,
                note: format!(
                    "{pairs} pairs of User-mode Linux, one stream of TCP in each for {} s, all pairs \
                     together: ours by vhost-user, the peer by the vector driver's TAPs on a bridge, both \
                     with super-frames; processor time of all {} guests and the switch",
                    plan.time.as_secs_f64(),
                    2 * MOST
                ),
            });
        }
    }
    Ok(figures)
}
