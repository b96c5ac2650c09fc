//! A wire with single segments, a guest and a container that receive them.
//!
//! ```text
//!   far0 ── up0 ── switch (uplink=) ──┬─ eth0 ┐ one guest of
//!                                     │       │ User-mode Linux
//!                                     └─ vn0  │      a container, by vnplug nic
//!   far1 ── up1 ── bridge ──────────┬── tap0 ─ vec0 ┘
//!                                   └── ct0 ── in0   another, by a veth
//! ```
//!
//! The far machine sends segments of the wire: its stack leaves nothing to a card.

use std::thread::scope;
use std::time::{Duration, Instant};

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::Station;
use vnplug_e2e::{Lab, Netns, UmlConfig};

use super::requests::{self, Requests};
use crate::attached::cpu_time;
use crate::row::{Plan, Result};
use crate::switch::guests::{Bulk, Guests, Lan};
use crate::switch::lans::pair;
use crate::switch::talk::{Tcp, WARM_UP, send, taken};

pub(super) const OURS: Lan = Lan {
    interface: "eth0",
    net: 1,
};
pub(super) const KERNELS: Lan = Lan {
    interface: "vec0",
    net: 2,
};

pub(super) struct Site {
    pub(super) guests: Guests,
    daemon: Daemon,
    here: Netns,
    far: Netns,
    /// The container on the bridge.
    inner: Netns,
    lab: Lab,
    /// How the far machine controls congestion, if not by default.
    pub(super) control: Option<&'static str>,
}

/// What a stream was like.
pub(super) struct Stream {
    pub(super) bulk: Bulk,
    /// ACKs that its sender had for each segment.
    pub(super) acks: f64,
    /// Segments that its sender sent again, of a thousand.
    pub(super) again: f64,
}

impl Site {
    pub(super) fn new() -> Result<Self> {
        let (lab, here, far) = (Lab::new()?, Netns::new()?, Netns::new()?);
        for (wire, lan) in [OURS, KERNELS].into_iter().enumerate() {
            let [up, there] = ["up", "far"].map(|it| format!("{it}{wire}"));
            pair(&here, &up, &far, &there, &lan.address(FAR))?;
            let whole = ["tx", "off", "tso", "off", "gso", "off"];
            far.exec(&[&["ethtool", "-K", &there], &whole[..]].concat())?;
        }
        here.exec(&["ethtool", "-K", "up0", "gro", "off"])?;
        here.tap("tap0")?;
        let inner = Netns::new()?;
        pair(&here, "ct0", &inner, "in0", &KERNELS.address(CONTAINER))?;
        here.bridge("br0", &["up1", "tap0", "ct0"])?;
        let socket = lab.dir().join("lan0.sock");
        let spec = format!("lan0,vhost={},uplink=up0", socket.display());
        let daemon = Daemon::start(&lab, Some(&here), &["--switch", &spec])?;
        let guests = Guests::boot(&lab, 1, |_| UmlConfig {
            kernel_args: vec![
                format!("virtio_uml.device={}:1", socket.display()),
                "vec0:transport=tap,ifname=tap0,depth=128,gro=1".to_owned(),
            ],
            netns: Some(here.name().to_owned()),
            // A kernel with less has smaller buffers for TCP, which would be what is measured.
            memory_mib: 512,
            ..UmlConfig::default()
        })?;
        for lan in [OURS, KERNELS] {
            guests.join(lan)?;
        }
        Ok(Self {
            guests,
            daemon,
            here,
            far,
            inner,
            lab,
            control: None,
        })
    }

    /// A stream to the guest.
    pub(super) fn to_guest(&self, lan: Lan, plan: &Plan) -> Result<Stream> {
        let wire = if lan.net == OURS.net { "far0" } else { "far1" };
        self.with_acks(wire, || {
            self.guests
                .takes(&self.far, lan, self.control, plan.time, || {
                    Ok(cpu_time(self.daemon.pid())? + self.guests.cpu_time())
                })
        })
    }

    /// A container by `vnplug nic` with these arguments.
    pub(super) fn container(&self, more: &[&str]) -> Result<Station> {
        let address = OURS.address(CONTAINER);
        let station = Station::by_nic(&self.lab, &self.daemon, "lan0", &address, more)?;
        match station.pings(&OURS.address(FAR)) {
            true => Ok(station),
            false => Err("the container does not reach the far machine".into()),
        }
    }

    /// `count` streams to it; their processor time is the switch's and that of `vnplug nic`.
    pub(super) fn to_container(&self, to: &Station, count: usize, plan: &Plan) -> Result<Stream> {
        self.with_acks("far0", || {
            self.streams(&to.netns, &to.address, count, plan, || {
                Ok(cpu_time(self.daemon.pid())? + cpu_time(to.cable.pid())?)
            })
        })
    }

    /// A stream to the container on the bridge; Gb/s.
    pub(super) fn to_inner(&self, plan: &Plan) -> Result<f64> {
        let address = KERNELS.address(CONTAINER);
        let bulk = self.streams(&self.inner, &address, 1, plan, || Ok(Duration::ZERO))?;
        Ok(bulk.gbps)
    }

    fn streams(
        &self,
        to: &Netns,
        address: &str,
        count: usize,
        plan: &Plan,
        spent: impl Fn() -> Result<Duration>,
    ) -> Result<Bulk> {
        let begin = Instant::now() + 2 * WARM_UP;
        let end = begin + plan.time;
        let control = self.control;
        let take = || taken(begin, end, count).map_err(|error| error.to_string());
        let give = || send(address, control, begin, end).map_err(|error| error.to_string());
        scope(|threads| {
            let taker = threads.spawn(|| to.enter(take));
            let senders: Vec<_> = (0..count)
                .map(|_| threads.spawn(|| self.far.enter(give)))
                .collect();
            std::thread::sleep(begin.saturating_duration_since(Instant::now()));
            let before = spent()?;
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
            let spent = spent()? - before;
            for sender in senders {
                sender.join().map_err(|_| "the sender panicked")???;
            }
            let bytes = taker.join().map_err(|_| "the taker panicked")???;
            Ok(Bulk::of(bytes, plan.time, spent))
        })
    }

    /// Frames that came back for each that went, by the far machine's counters.
    fn with_acks(&self, wire: &str, run: impl FnOnce() -> Result<Bulk>) -> Result<Stream> {
        let read = || -> Result<[f64; 2]> {
            let of = |name: &str| -> Result<f64> {
                let file = format!("/sys/class/net/{wire}/statistics/{name}");
                Ok(self.far.exec(&["cat", &file])?.trim().parse()?)
            };
            Ok([of("rx_packets")?, of("tx_packets")?])
        };
        let (before, sent) = (read()?, Tcp::of(&self.far)?);
        let bulk = run()?;
        let (after, again) = (read()?, Tcp::of(&self.far)?.again_since(sent));
        let [came, went] = [0, 1].map(|at| after[at] - before[at]);
        Ok(Stream {
            bulk,
            acks: came / went,
            again,
        })
    }

    /// A container whose card does nothing, so that it sends single segments.
    pub(super) fn plain(&self) -> Result<Station> {
        let station = self.container(&["--gro", "off"])?;
        let nothing = ["tx", "off", "tso", "off", "gso", "off"];
        station
            .netns
            .exec(&[&["ethtool", "-K", "vn0"], &nothing[..]].concat())?;
        Ok(station)
    }

    /// Requests from there to the guest, beside a stream or alone.
    pub(super) fn requests(
        &self,
        from: &Station,
        plan: &Plan,
        is_beside: bool,
    ) -> Result<Requests> {
        requests::to_guest(&self.guests, &from.netns, OURS, plan.time, is_beside, || 0)
    }

    /// Says something of the guest's port, which is the one behind the uplink's.
    pub(super) fn set(&self, text: &str) -> Result<()> {
        match self.daemon.vnplug(&["switch", "set", "lan0/port2", text]) {
            (Some(0), _) => Ok(()),
            (_, said) => Err(said.into()),
        }
    }

    /// Whether the guest's own kernel merges what its card of ours brings. NB: without it the vector driver has no
    /// buffers for super-frames, and loses those of a TAP.
    pub(super) fn guest_merges(&self, is: bool) -> Result<()> {
        let word = if is { "on" } else { "off" };
        let set = format!("ethtool -K {} gro {word}", OURS.interface);
        self.guests.ran(0, &set).map(drop)
    }

    /// Whether the card at our end of the wire offers sums, both ways, pieces and segmentation. The far end's offers none of that in any
    /// case, so that single segments come.
    pub(super) fn wire_offers(&self, is: bool) -> Result<()> {
        let word = if is { "on" } else { "off" };
        let words = ["rx", "tx", "sg", "tso", "gso"].map(|name| [name, word]);
        let words = words.as_flattened();
        self.here
            .exec(&[&["ethtool", "-K", "up0"], words].concat())?;
        Ok(())
    }

    /// Whether the kernel merges what comes to the bridge.
    pub(super) fn kernel_merges(&self, is: bool) -> Result<()> {
        let word = if is { "on" } else { "off" };
        self.here.exec(&["ethtool", "-K", "up1", "gro", word])?;
        Ok(())
    }
}

/// The number of the far machine, and of a container, on a network of guests.
const FAR: usize = 99;
const CONTAINER: usize = 49;
