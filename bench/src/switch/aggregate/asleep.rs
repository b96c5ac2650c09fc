//! Requests to a guest whose program sleeps until each comes, and so does the guest, which can lose what wakes it.
//!
//! ```text
//!   container by vnplug nic ── switch ── eth0 ┐ one guest of
//!   container by a veth ── bridge ── tap0 ─ vec0 ┘ User-mode Linux
//! ```

use vnplug_e2e::daemon::{counted, value};
use vnplug_e2e::station::{Station, pings};
use vnplug_e2e::{Netns, UmlConfig};

use super::requests::{Requests, to_guest};
use super::site::{KERNELS, OURS};
use crate::row::{Figure, Plan, Result, Samples};
use crate::switch::guests::{Guests, Lan};
use crate::switch::lans::{Lans, pair};

/// Where requests come from.
struct Site {
    guests: Guests,
    lans: Lans,
    nic: Station,
    inner: Netns,
}

impl Site {
    fn new() -> Result<Self> {
        let lans = Lans::new(1)?;
        let guests = Guests::boot(&lans.lab, 1, |guest| UmlConfig {
            kernel_args: lans.cards(guest).to_vec(),
            netns: Some(lans.netns.name().to_owned()),
            ..UmlConfig::default()
        })?;
        for lan in [OURS, KERNELS] {
            guests.join(lan)?;
        }
        let address = OURS.address(CONTAINER);
        let nic = Station::by_nic(&lans.lab, &lans.daemon, "lan0", &address, &[])?;
        let inner = Netns::new()?;
        let address = KERNELS.address(CONTAINER);
        pair(&lans.netns, "ct0", &inner, "in0", &address)?;
        lans.netns.ip(&["link", "set", "ct0", "master", "br0"])?;
        let site = Self {
            guests,
            lans,
            nic,
            inner,
        };
        for (lan, from) in site.ways() {
            if !pings(from, &lan.address(0), &[]) {
                return Err(format!("{} does not answer", lan.interface).into());
            }
        }
        Ok(site)
    }

    fn ways(&self) -> [(Lan, &Netns); 2] {
        [(OURS, &self.nic.netns), (KERNELS, &self.inner)]
    }

    /// Calls of the guest that were made again.
    fn again(&self) -> u64 {
        value(
            counted(&self.lans.daemon.counters(), "source"),
            "called_again",
        )
    }
}

/// Requests a second, the slowest of a hundred, and calls that were made again, beside a TAP on a Linux bridge.
pub(crate) fn asleep(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut all = [(); 2].map(|()| (Samples::default(), Samples::default()));
    let mut lost = Samples::default();
    for round in 1..=plan.rounds {
        let mut ways: Vec<_> = site.ways().into_iter().enumerate().collect();
        // What drifts within a round is not always for the same one.
        if round % 2 == 0 {
            ways.reverse();
        }
        let mut told = Vec::new();
        for (at, (lan, from)) in ways {
            let asked = to_guest(&site.guests, from, lan, plan.time, false, || site.again())?;
            let Requests {
                per_s,
                p99_us,
                counted,
            } = asked;
            let (rates, slow) = &mut all[at];
            rates.push(per_s);
            slow.push(p99_us);
            let interface = lan.interface;
            told.push(format!("{interface} {per_s:.0}/s, p99 {p99_us:.0} us"));
            if at == 0 {
                let per_thousand =
                    1e3 * counted as f64 / (per_s * plan.time.as_secs_f64()).max(1.0);
                lost.push(per_thousand);
                told.push(format!("{per_thousand:.1} calls again for 1,000"));
            }
        }
        eprintln!("  round {round}: {}", told.join("; "));
    }
    let [(rates, slow), (their_rates, their_slow)] = all;
    let figure = |name: &str, unit, ours, peer: Option<Samples>| Figure {
        name: name.to_owned(),
        unit,
        ours,
        peer: peer.map(|samples| (PEER.to_owned(), samples)),
        limit: None,
        note: NOTE.to_owned(),
    };
    Ok(vec![
        figure("tcp-rr-asleep", "requests/s", rates, Some(their_rates)),
        figure("tcp-rr-asleep-p99", "us", slow, Some(their_slow)),
        figure("tcp-rr-asleep-again", "for 1,000 requests", lost, None),
    ])
}

/// The number of a container on a network of guests.
const CONTAINER: usize = 49;
const PEER: &str = "Linux bridge, TAP";
const NOTE: &str = "requests of 64 bytes and answers, one after the other, to a program in a guest of User-mode Linux \
     that waits for each in a read, while the guest has nothing else to do; by vhost-user and our switch, from a container by \
     vnplug nic, or by a TAP of the same guest on a Linux bridge, from a container by a veth; both ways the \
     guest can lose the signal that wakes it, and by ours alone it is called again; -again: calls that were made again, as the guest \
     had not read them after half a millisecond";
