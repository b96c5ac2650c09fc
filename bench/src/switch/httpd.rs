//! Many short connections: a container asks a guest for pages, each by a connection of its own.
//!
//! ```text
//!   container ── vnplug nic ────── our switch ── eth1 ┐ one guest of
//!   container ── veth ──────────── bridge ────── vec0 ┤ User-mode Linux
//!   container ── vde_plug2tap ──── vde_switch ── eth0 ┘
//! ```
//!
//! The server is this program, one process, so that the network's part is not hidden behind a process that is made
//! for each request.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::scope;
use std::time::{Duration, Instant};

use vnplug_e2e::daemon::{counted, value};
use vnplug_e2e::station::{Running, Station};
use vnplug_e2e::{Netns, UmlConfig};

use super::guests::{Guests, Lan};
use super::lans::{Lans, pair};
use super::talk::{PAGE, Talk, WARM_UP, WEB_PORT};
use crate::row::{Figure, Plan, Result, Samples};

const OURS: Lan = Lan {
    interface: "eth1",
    net: 1,
};
const BRIDGE: Lan = Lan {
    interface: "vec0",
    net: 2,
};
const VDE: Lan = Lan {
    interface: "eth0",
    net: 3,
};

struct Site {
    guests: Guests,
    ours: Station,
    inner: Netns,
    vde: Station,
    lans: Lans,
    _vde_switch: Running,
}

impl Site {
    fn new() -> Result<Self> {
        let lans = Lans::new(1)?;
        let dir = lans.lab.dir().join("vde.ctl");
        let vde_switch = Running::vde_switch(&lans.lab, None, &dir, &[])?;
        let inner = Netns::new()?;
        pair(&lans.netns, "ct0", &inner, "in0", &BRIDGE.address(ASKER))?;
        lans.netns.ip(&["link", "set", "ct0", "master", "br0"])?;
        let guests = Guests::boot(&lans.lab, 1, |guest| UmlConfig {
            kernel_args: [format!("eth0=vde,{}", dir.display())]
                .into_iter()
                .chain(lans.cards(guest))
                .collect(),
            netns: Some(lans.netns.name().to_owned()),
            ..UmlConfig::default()
        })?;
        for lan in [OURS, BRIDGE, VDE] {
            guests.join(lan)?;
        }
        let (lab, daemon) = (&lans.lab, &lans.daemon);
        Ok(Self {
            ours: Station::by_nic(lab, daemon, "lan0", &OURS.address(ASKER), &[])?,
            vde: Station::by_vde(lab, &dir, &VDE.address(ASKER))?,
            guests,
            inner,
            lans,
            _vde_switch: vde_switch,
        })
    }

    fn set(&self, setting: &str) -> Result<()> {
        let set = ["switch", "set", "lan0/port1", setting];
        match self.lans.daemon.vnplug(&set) {
            (Some(0), _) => Ok(()),
            (_, said) => Err(said.into()),
        }
    }

    /// Pages a second that a namespace gets by a network.
    fn pages(&self, from: &Netns, lan: Lan, time: Duration) -> Result<f64> {
        let to = format!("{}:{WEB_PORT}", lan.address(0)).parse()?;
        let asked = self.guests.serves(&Talk::Serve, time, |begin, end| {
            let ask = || ask(to, begin, end).map_err(|error| error.to_string());
            Ok(from.enter(ask)??)
        })?;
        Ok(asked as f64 / time.as_secs_f64())
    }

    /// Frames that entered our switch, and segments that it merged.
    fn counted(&self) -> [u64; 2] {
        let counters = self.lans.daemon.counters();
        let lan0 = counted(&counters, "source");
        ["entered", "out_merged"].map(|name| value(lan0, name))
    }
}

/// Asks with several connections at once, from [`WARM_UP`] before an instant until another; how many pages came
/// between both.
fn ask(to: SocketAddr, begin: Instant, end: Instant) -> Result<u64> {
    std::thread::sleep((begin - WARM_UP).saturating_duration_since(Instant::now()));
    let one = || -> Result<u64> {
        let (mut count, mut page) = (0, Vec::new());
        while Instant::now() < end {
            let mut stream = TcpStream::connect_timeout(&to, LIMIT)?;
            stream.set_read_timeout(Some(LIMIT))?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            page.clear();
            stream.read_to_end(&mut page)?;
            if page.len() < PAGE {
                return Err(format!("a page of {} bytes", page.len()).into());
            }
            let now = Instant::now();
            count += u64::from(now >= begin && now < end);
        }
        Ok(count)
    };
    scope(|threads| {
        let askers =
            [(); ASKERS].map(|()| threads.spawn(|| one().map_err(|error| error.to_string())));
        let mut all = 0;
        for asker in askers {
            all += asker.join().map_err(|_| "an asker panicked")??;
        }
        Ok(all)
    })
}

/// Pages a second beside the peers, and what of it was merged.
pub(crate) fn httpd(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new()?;
    let mut rates = [(); 4].map(|()| Samples::default());
    let [mut frames, mut merged] = [(); 2].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let [ours, with_gro, bridge, vde] = &mut rates;
        for (is_on, rate) in [(false, ours), (true, with_gro)] {
            site.set(if is_on { "gro=20" } else { "gro=off" })?;
            let before = site.counted();
            let pages = site.pages(&site.ours.netns, OURS, plan.time)?;
            let after = site.counted();
            // Those of the warm-up are among both.
            let asked = pages * (plan.time + WARM_UP).as_secs_f64();
            let [came, joined] = [0, 1].map(|at| (after[at] - before[at]) as f64 / asked);
            if is_on {
                merged.push(joined);
            } else {
                frames.push(came);
            }
            rate.push(pages);
        }
        bridge.push(site.pages(&site.inner, BRIDGE, plan.time)?);
        vde.push(site.pages(&site.vde.netns, VDE, plan.time)?);
        let told = rates.each_ref().map(|it| it.last().round());
        eprintln!(
            "  round {round}: ours, gro=20, bridge, vde_switch {told:?} pages/s; {:.1} frames, {:.2} merged for a page",
            frames.last(),
            merged.last()
        );
    }
    let [ours, with_gro, bridge, vde] = rates;
    let figure = |name: &str, unit, ours: &Samples, peer: Option<(&str, &Samples)>| Figure {
        name: name.to_owned(),
        unit,
        ours: ours.clone(),
        peer: peer.map(|(peer, samples)| (peer.to_owned(), samples.clone())),
        limit: None,
        note: format!(
            "a container gets pages of {PAGE} bytes from a guest of User-mode Linux, a connection for each, {ASKERS} at \
             once; ours by vnplug nic and vhost-user, the peers by a veth and the vector driver's TAP on a Linux bridge, \
             and by vde_plug2tap and the guest's own driver of VDE"
        ),
    };
    Ok(vec![
        figure("httpd", PER_S, &ours, Some(("Linux bridge, TAP", &bridge))),
        figure("httpd-vde", PER_S, &ours, Some(("vde_switch", &vde))),
        figure(
            "httpd-gro20",
            PER_S,
            &with_gro,
            Some(("ours, gro=off", &ours)),
        ),
        figure("httpd-frames", "frames a page", &frames, None),
        figure("httpd-merged", "merged a page", &merged, None),
    ])
}

const PER_S: &str = "requests/s";
/// Connections at once.
const ASKERS: usize = 8;
/// The number of the container on a network of guests.
const ASKER: usize = 49;
/// The longest that a page may take.
const LIMIT: Duration = Duration::from_secs(5);
