//! A stream over a path that loses segments and changes their order, merged or not: how fast it is, what is sent again, and
//! that all of it comes.
//!
//! ```text
//!   a guest of User-mode Linux, whose netem loses ── eth0 ── switch ── vnplug nic ── container, which compares
//! ```

use std::time::Duration;

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::Station;
use vnplug_e2e::{Image, Lab, UmlConfig};

use super::site::OURS;
use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};
use crate::switch::guests::Guests;
use crate::switch::talk::{AGAIN, SNMP, Talk, Tcp, taken_whole};

/// What netem does with the sender's segments; in a figure's name, too.
const PATHS: [(&str, &str); 5] = [
    ("none", ""),
    ("tenth", "loss 0.1%"),
    ("percent", "loss 1%"),
    ("reorder", "delay 1ms reorder 98%"),
    ("both", "delay 1ms reorder 98% loss 0.1%"),
];
/// How the container's interface merges; what is compared with comes first.
const ARMS: [(&str, &[&str]); 3] = [
    ("off", &["--gro", "off"]),
    ("", &["--gro", "20"]),
    ("-expand", &["--gro", "20", "--acks", "expand"]),
];

struct Site {
    guests: Guests,
    daemon: Daemon,
    lab: Lab,
}

/// Streams of one arm over one path.
#[derive(Default)]
struct Streams {
    rates: Samples,
    costs: Samples,
    again: Samples,
    /// Segments that netem lost.
    lost: u64,
}

impl Site {
    fn new() -> Result<Self> {
        let lab = Lab::new()?;
        let socket = lab.dir().join("lan0.sock");
        let spec = format!("lan0,vhost={}", socket.display());
        let daemon = Daemon::start(&lab, None, &["--switch", &spec])?;
        let guests = Guests::boot(&lab, 1, |_| UmlConfig {
            kernel_args: vec![format!("virtio_uml.device={}:1", socket.display())],
            image: Image::default()
                .program_at("/usr/sbin/tc", TC)
                .module("sch_netem"),
            memory_mib: 512,
            ..UmlConfig::default()
        })?;
        guests.join(OURS)?;
        // Each segment is lost by itself, and nobody merges what is single.
        let card = OURS.interface;
        guests.ran(
            0,
            &format!("ethtool -K {card} tx off sg off tso off gso off"),
        )?;
        Ok(Self {
            guests,
            daemon,
            lab,
        })
    }

    fn container(&self, arm: &[&str]) -> Result<Station> {
        let address = OURS.address(CONTAINER);
        let station = Station::by_nic(&self.lab, &self.daemon, "lan0", &address, arm)?;
        match station.pings(&OURS.address(0)) {
            true => Ok(station),
            false => Err("the container does not reach the guest".into()),
        }
    }

    fn set(&self, netem: &str) -> Result<()> {
        let card = OURS.interface;
        // Where there is none yet it cannot be removed.
        let mut set = format!("{TC} qdisc del dev {card} root 2>/dev/null");
        if !netem.is_empty() {
            set = format!("{set}; {TC} qdisc add dev {card} root netem limit 10000 {netem}");
        }
        self.guests.ran(0, &format!("{set}; true"))?;
        self.lost(netem).map(drop)
    }

    /// How many segments this netem has lost, which is there.
    fn lost(&self, netem: &str) -> Result<u64> {
        let card = OURS.interface;
        let shown = self
            .guests
            .ran(0, &format!("{TC} -s qdisc show dev {card}"))?;
        lost(&shown, netem)
    }

    fn stream(
        &self,
        to: &Station,
        netem: &str,
        time: Duration,
        streams: &mut Streams,
    ) -> Result<String> {
        let sent = || Tcp::parse(&self.guests.ran(0, &format!("cat {SNMP}"))?);
        let before = sent()?;
        let talk = Talk::SendContent(to.address.clone());
        let bulk = self
            .guests
            .gives_to(&talk, (&to.netns, taken_whole), time, || {
                Ok(cpu_time(self.daemon.pid())? + cpu_time(to.cable.pid())?)
            })?;
        let again = sent()?.again_since(before);
        streams.lost += self.lost(netem)?;
        streams.rates.push(bulk.gbps);
        streams.costs.push(bulk.cpu_s);
        streams.again.push(again);
        let (gbps, cpu_s) = (bulk.gbps, bulk.cpu_s);
        Ok(format!("{gbps:.3} Gb/s, {cpu_s:.2} s, {again:.2} again"))
    }
}

/// What netem lost, by what `tc -s qdisc show` shows, if that is as it was set.
fn lost(shown: &str, netem: &str) -> Result<u64> {
    let netems = shown.split("qdisc ").find(|it| it.starts_with("netem"));
    let of_netem = match (netems, netem.is_empty()) {
        (None, true) => return Ok(0),
        (Some(of_netem), false) => of_netem,
        _ => return Err(format!("{netem:?} was set: {shown}").into()),
    };
    let (_, dropped) = of_netem.split_once("(dropped ").ok_or("no drops")?;
    let (number, _) = dropped.split_once(',').ok_or("no drops")?;
    Ok(number.parse()?)
}

/// Rates, processor time and what was sent again.
pub(crate) fn loss(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut all = PATHS.map(|_| ARMS.map(|_| Streams::default()));
    for round in 1..=plan.rounds {
        let mut arms: Vec<_> = ARMS.into_iter().enumerate().collect();
        // What drifts within a round is not always for the same ones.
        if round % 2 == 0 {
            arms.reverse();
        }
        for (at, (arm, options)) in arms {
            let container = site.container(options)?;
            for ((path, netem), all) in PATHS.into_iter().zip(&mut all) {
                site.set(netem)?;
                let told = site.stream(&container, netem, plan.time, &mut all[at])?;
                eprintln!("  round {round}, {path}, merging{arm}: {told}");
            }
            site.set("")?;
        }
    }
    let mut figures = Vec::new();
    for ((path, netem), arms) in PATHS.into_iter().zip(&all) {
        // Of one stream that is slow, nothing may be lost by chance.
        if netem.contains("loss") && arms.iter().any(|arm| arm.lost == 0) {
            return Err(format!("{netem} lost nothing").into());
        }
        let [off, merged, expanded] = arms;
        for (suffix, ours) in [(ARMS[1].0, merged), (ARMS[2].0, expanded)] {
            let name = format!("aggregate-loss-{path}{suffix}");
            for (what, unit, ours, off) in [
                ("", "Gb/s", &ours.rates, &off.rates),
                ("-cpu", "CPU s per GB", &ours.costs, &off.costs),
                ("-again", AGAIN, &ours.again, &off.again),
            ] {
                figures.push(Figure {
                    name: format!("{name}{what}"),
                    unit,
                    ours: ours.clone(),
                    peer: Some((OFF.to_owned(), off.clone())),
                    limit: None,
                    note: NOTE.to_owned(),
                });
            }
        }
    }
    Ok(figures)
}

/// The number of the container on the guest's network.
const CONTAINER: usize = 49;
/// Where tc is in the guest. NB: busybox has one of its own, which its shell prefers.
const TC: &str = "/bin/tc-netem";
const OFF: &str = "ours, --gro off";
const NOTE: &str = "one stream of TCP of single segments from a guest of User-mode Linux by vhost-user to a container by \
     vnplug nic --gro 20, which compares every byte; the guest's netem loses 0.1 % (tenth) or 1 % (percent) of what it sends, holds \
     one of fifty segments for a millisecond, so that others overtake it (reorder), or both; processor time of the switch and \
     vnplug nic; -again: segments that the guest sent again";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_netem_lost_is_found_and_netem_that_is_missing_or_stayed_is_none() {
        let shown = "qdisc netem 8001: root refcnt 2 limit 10000 loss 1%\n \
            Sent 1514000 bytes 1000 pkt (dropped 11, overlimits 0 requeues 0) \n backlog 0b 0p requeues 0\n";
        assert_eq!(lost(shown, "loss 1%").unwrap(), 11);
        assert!(lost(shown, "").is_err());
        let none =
            "qdisc pfifo_fast 0: root\n Sent 0 bytes 0 pkt (dropped 3, overlimits 0 requeues 0)\n";
        assert_eq!(lost(none, "").unwrap(), 0);
        assert!(lost(none, "loss 1%").is_err());
    }
}
