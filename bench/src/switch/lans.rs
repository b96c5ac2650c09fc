//! Two networks in one namespace: our switch, which guests join by vhost-user, and a Linux bridge with TAPs. And a
//! third if that is asked for: a second switch of ours, with lanes.

use std::path::PathBuf;

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::{Lab, Netns};

use crate::row::Result;

/// Both, for a number of guests.
pub(super) struct Lans {
    pub(super) daemon: Daemon,
    pub(super) netns: Netns,
    socket: PathBuf,
    /// Of the switch that has lanes.
    laned: PathBuf,
    // NB: last, since its directory has all of that.
    pub(super) lab: Lab,
}

impl Lans {
    pub(super) fn new(guests: usize) -> Result<Self> {
        Self::with_lanes(guests, None)
    }

    /// With a second switch of this number of `lanes`.
    pub(super) fn with_lanes(guests: usize, lanes: Option<usize>) -> Result<Self> {
        let (lab, netns) = (Lab::new()?, Netns::new()?);
        let [socket, laned] = ["lan0", "lan1"].map(|lan| lab.dir().join(format!("{lan}.sock")));
        let mut switches = vec![format!("lan0,vhost={}", socket.display())];
        switches.extend(lanes.map(|it| format!("lan1,lanes={it},vhost={}", laned.display())));
        let args: Vec<&str> = switches.iter().flat_map(|it| ["--switch", it]).collect();
        let daemon = Daemon::start(&lab, None, &args)?;
        let taps: Vec<String> = (0..guests).map(tap).collect();
        for tap in &taps {
            netns.tap(tap)?;
        }
        let ports: Vec<&str> = taps.iter().map(String::as_str).collect();
        netns.bridge("br0", &ports)?;
        Ok(Self {
            daemon,
            netns,
            socket,
            laned,
            lab,
        })
    }

    /// The cards of a guest of User-mode Linux: `eth0` on the switch, `vec0` on the bridge.
    pub(super) fn cards(&self, guest: usize) -> [String; 2] {
        [
            format!("virtio_uml.device={}:1", self.socket.display()),
            format!("vec0:transport=tap,ifname={},depth=128,gro=1", tap(guest)),
        ]
    }

    /// Another card, behind `eth0`, on the switch that has lanes.
    pub(super) fn laned_card(&self) -> String {
        format!("virtio_uml.device={}:1", self.laned.display())
    }
}

/// The TAP of a guest on the bridge.
pub(super) fn tap(guest: usize) -> String {
    format!("tap{guest}")
}

/// A veth between two namespaces, both ends up; the second has this address.
pub(super) fn pair(
    one: &Netns,
    name: &str,
    other: &Netns,
    there: &str,
    address: &str,
) -> Result<()> {
    let veth = ["link", "add", name, "type", "veth"];
    let peer = ["peer", "name", there, "netns", other.name()];
    one.ip(&[&veth[..], &peer].concat())?;
    other.ip(&["addr", "add", &format!("{address}/24"), "dev", there])?;
    other.ip(&["link", "set", there, "up"])?;
    one.ip(&["link", "set", name, "up"])?;
    Ok(())
}
