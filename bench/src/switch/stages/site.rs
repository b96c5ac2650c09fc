//! One guest, one machine far away, and three ways between them.
//!
//! ```text
//!   far0 ── up0 ── switch (uplink=) ───────────── eth1 ┐
//!   far1 ── up1 ── bridge ── tap0 ─────────────── vec0 │ one guest of
//!   far2 ── up2 ── bridge ── tap1 ── vde_switch ─ eth0 ┘ User-mode Linux
//! ```
//!
//! And a fourth, if that is asked for: `far3 ── up3 ── switch (uplink=…/af_xdp) ── eth2`. The host itself has a wire of its
//! own: `far4 ── up4`.
//!
//! The wire is a veth. It takes super-frames as a card with TSO does; what comes from it are single
//! segments with checksums, since the far machine leaves nothing to a card.

use std::path::Path;
use std::thread::scope;
use std::time::{Duration, Instant};

use rustix::process::getpid;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::station::Running;
use vnplug_e2e::{Lab, Netns, UmlConfig};

use super::super::guests::{Bulk, Guests, Lan, ran};
use super::super::lans::pair;
use super::super::talk::{WARM_UP, send, taken};
use super::perf::Pids;
use super::symbols::Symbols;
use crate::row::Result;

/// A way from the guest to the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Way {
    /// Our switch, by vhost-user.
    Ours,
    /// A TAP on a Linux bridge.
    Bridge,
    /// `vde_switch`, with a TAP of its own on a bridge.
    Vde,
    /// Another switch of ours, by vhost-user, with an uplink by AF_XDP.
    Xdp,
}

impl Way {
    pub(super) fn lan(self) -> Lan {
        let (interface, net) = match self {
            Self::Ours => ("eth1", 1),
            Self::Bridge => ("vec0", 2),
            Self::Vde => ("eth0", 3),
            Self::Xdp => ("eth2", 4),
        };
        Lan { interface, net }
    }

    pub(in super::super) fn far_address(self) -> String {
        self.lan().address(FAR)
    }
}

/// All machines.
pub(in super::super) struct Site {
    pub(in super::super) guests: Guests,
    /// The kernel's symbols of the guest.
    pub(super) symbols: Symbols,
    daemon: Daemon,
    vde_switch: Running,
    here: Netns,
    pub(in super::super) far: Netns,
    pub(super) lab: Lab,
}

impl Site {
    pub(in super::super) fn new() -> Result<Self> {
        Self::by(&ALWAYS)
    }

    /// With the fourth way.
    pub(in super::super) fn with_xdp() -> Result<Self> {
        Self::by(&[&ALWAYS[..], &[Way::Xdp]].concat())
    }

    fn by(ways: &[Way]) -> Result<Self> {
        let (lab, here, far) = (Lab::new()?, Netns::new()?, Netns::new()?);
        for (wire, way) in ways.iter().copied().enumerate() {
            let [up, there] = ["up", "far"].map(|it| format!("{it}{wire}"));
            let peer = ["peer", "name", &there, "netns", far.name()];
            let veth = ["link", "add", &up, "type", "veth"];
            here.ip(&[&veth[..], &peer].concat())?;
            let address = format!("{}/24", way.far_address());
            far.ip(&["addr", "add", &address, "dev", &there])?;
            far.ip(&["link", "set", &there, "up"])?;
            here.ip(&["link", "set", &up, "up"])?;
            far.exec(&[&["ethtool", "-K", &there], &WHOLE[..]].concat())?;
            // The bridge's wire alone merges, as a kernel does by default.
            let gro = if way == Way::Bridge { "on" } else { "off" };
            here.exec(&["ethtool", "-K", &up, "gro", gro])?;
        }
        pair(&here, HOST.interface, &far, "far4", &HOST.address(FAR))?;
        let address = format!("{}/24", HOST.address(0));
        here.ip(&["addr", "add", &address, "dev", HOST.interface])?;
        far.exec(&[&["ethtool", "-K", "far4"], &WHOLE[..]].concat())?;
        here.exec(&["ethtool", "-K", HOST.interface, "gro", "on"])?;
        let [vde, vhost, by_xdp] =
            ["vde.ctl", "lan0.sock", "lan1.sock"].map(|name| lab.dir().join(name));
        let has_xdp = ways.contains(&Way::Xdp);
        let vde_switch = Running::vde_switch(&lab, Some(&here), &vde, &["-t", "tap1"])?;
        here.tap("tap0")?;
        here.bridge("br0", &["up1", "tap0"])?;
        here.ip(&["link", "set", "tap1", "up"])?;
        here.bridge("br1", &["up2", "tap1"])?;
        let mut specs = vec![format!("lan0,vhost={},uplink=up0", vhost.display())];
        let mut cards = vec![
            format!("eth0=vde,{}", vde.display()),
            format!("virtio_uml.device={}:1", vhost.display()),
            "vec0:transport=tap,ifname=tap0,depth=128,gro=1".to_owned(),
        ];
        if has_xdp {
            let by_xdp = by_xdp.display();
            specs.push(format!("lan1,vhost={by_xdp},uplink=up3/af_xdp"));
            cards.push(format!("virtio_uml.device={by_xdp}:1"));
        }
        let args: Vec<&str> = specs.iter().flat_map(|it| ["--switch", it]).collect();
        let daemon = Daemon::start(&lab, Some(&here), &args)?;
        let guests = Guests::boot(&lab, 1, |_| UmlConfig {
            kernel_args: cards.clone(),
            netns: Some(here.name().to_owned()),
            // A kernel with less has smaller buffers for TCP, which would be what is measured.
            memory_mib: 512,
            ..UmlConfig::default()
        })?;
        for way in ways {
            guests.join(way.lan())?;
            let ping = format!("ping -q -c 2 -i 0.2 -W 5 {}", way.far_address());
            ran(guests.first()?, &ping)?;
        }
        let file = lab.dir().join("kallsyms");
        ran(guests.first()?, "cat /proc/kallsyms >/kallsyms")?;
        guests.first()?.pull("/kallsyms", &file, LIMIT)?;
        let symbols = Symbols::parse(&std::fs::read_to_string(file)?)?;
        Ok(Self {
            guests,
            symbols,
            daemon,
            vde_switch,
            here,
            far,
            lab,
        })
    }

    /// What a port of ours merges for the guest, which is behind the uplink's.
    pub(super) fn merge(&self, gro: &str) -> Result<()> {
        match self.daemon.vnplug(&["switch", "set", "lan0/port2", gro]) {
            (Some(0), _) => Ok(()),
            (_, said) => Err(said.into()),
        }
    }

    /// What the guest's card on a switch of ours, and the wire's, do not offer senders: features as `ethtool -K` has
    /// them. All others they do. Of other ways nothing is changed.
    pub(in super::super) fn offers(
        &self,
        way: Way,
        guest: &[&'static str],
        wire: &[&'static str],
    ) -> Result<()> {
        let up = match way {
            Way::Ours => "up0",
            Way::Xdp => "up3",
            Way::Bridge | Way::Vde => return Ok(()),
        };
        let words = |lacks: &[&str]| {
            let word =
                |name: &&'static str| [*name, if lacks.contains(name) { "off" } else { "on" }];
            FEATURES.iter().flat_map(word).collect::<Vec<_>>()
        };
        let card = way.lan().interface;
        let command = format!("ethtool -K {card} {}", words(guest).join(" "));
        ran(self.guests.first()?, &command)?;
        let wire = words(wire);
        self.here
            .exec(&[&["ethtool", "-K", up], &wire[..]].concat())?;
        Ok(())
    }

    /// One stream between the host itself, without a guest, and the far machine; Mb/s.
    pub(super) fn of_the_host(&self, sends: bool, time: Duration) -> Result<f64> {
        let (from, to, address) = match sends {
            true => (&self.here, &self.far, HOST.address(FAR)),
            false => (&self.far, &self.here, HOST.address(0)),
        };
        let begin = Instant::now() + 2 * WARM_UP;
        let end = begin + time;
        let give = || send(&address, None, begin, end).map_err(|error| error.to_string());
        let take = || taken(begin, end, 1).map_err(|error| error.to_string());
        let bytes = scope(|threads| {
            let taker = threads.spawn(|| to.enter(take));
            let sender = threads.spawn(|| from.enter(give));
            sender.join().map_err(|_| "the sender panicked")???;
            let bytes = taker.join().map_err(|_| "the taker panicked")???;
            Ok::<_, Box<dyn std::error::Error>>(bytes)
        })?;
        Ok(Bulk::of(bytes, time, Duration::ZERO).gbps * 1e3)
    }

    /// The process of a way that is not the guest's.
    pub(in super::super) fn switch(&self, way: Way) -> Option<u32> {
        match way {
            Way::Ours | Way::Xdp => Some(self.daemon.pid()),
            Way::Bridge => None,
            Way::Vde => Some(self.vde_switch.pid()),
        }
    }

    /// Whether the guest's stack makes super-frames for our port.
    pub(super) fn super_frames(&self, on: bool) -> Result<()> {
        let word = if on { "on" } else { "off" };
        let card = Way::Ours.lan().interface;
        let command = format!("ethtool -K {card} tso {word} gso {word}");
        ran(self.guests.first()?, &command).map(drop)
    }

    /// Lets frames on bridges pass the hooks of IP, which have nothing to do.
    pub(super) fn filters_bridge(&self, on: bool) -> Result<()> {
        let digit = if on { "1" } else { "0" };
        for hooks in ["iptables", "ip6tables", "arptables"] {
            let file = format!("{BRIDGE_NETFILTER}/bridge-nf-call-{hooks}");
            self.here.enter(|| std::fs::write(&file, digit))??;
        }
        Ok(())
    }

    /// Who is who.
    pub(super) fn pids(&self) -> Result<Pids> {
        let group = self.guests.first()?.pid();
        Ok(Pids {
            guest: of_group(group)?,
            switches: [self.daemon.pid(), self.vde_switch.pid()],
            far: getpid().as_raw_nonzero().get().cast_unsigned(),
        })
    }
}

/// The ways of every site.
const ALWAYS: [Way; 3] = [Way::Ours, Way::Bridge, Way::Vde];

/// Whether the host has br_netfilter.
pub(super) fn has_bridge_netfilter() -> bool {
    Path::new(BRIDGE_NETFILTER).exists()
}

/// The processes of a group: those of User-mode Linux are one for each address space of the guest.
pub(super) fn of_group(group: u32) -> Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|it| it.parse().ok()) else {
            continue;
        };
        // Who ended meanwhile is not asked for.
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let is_of_group = fields.split_whitespace().nth(2) == Some(&group.to_string());
        if is_of_group {
            pids.push(pid);
        }
    }
    Ok(pids)
}

/// The host's own wire; its address is that of guest 0.
const HOST: Lan = Lan {
    interface: "up4",
    net: 5,
};

/// The far machine leaves nothing to a card.
const WHOLE: [&str; 6] = ["tx", "off", "tso", "off", "gso", "off"];
/// What cards may offer senders: checksums, pieces, segmentation.
const FEATURES: [&str; 4] = ["tx", "sg", "tso", "gso"];
/// The number of the far machine's address.
const FAR: usize = 98;
/// Longest time for the guest's symbols to come.
const LIMIT: Duration = Duration::from_secs(60);
const BRIDGE_NETFILTER: &str = "/proc/sys/net/bridge";
