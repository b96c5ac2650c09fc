//! The wire: two talking ends in namespaces of their own, joined by a bridge that copies every
//! frame to every port, so a guest's NIC sees what passes, as on a mirror port.
//!
//! ```text
//!   near end: wire0 ──── wire1 ┐                ┌ far1 ──── far0 : far end
//!                        (here)└ bridge, no ARP ┘
//!                                    └ a guest's tap
//! ```
//!
//! Captures on the host listen on `wire1`.

use std::num::NonZeroU64;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::LIMIT;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::netns::Netns;
use crate::patience;
use crate::traffic::Stream;

/// The interface on the host where everything passes.
pub(super) const TAPPED: &str = "wire1";
/// The near end's address.
pub(super) const NEAR: &str = "10.77.0.2";
/// The far end's address.
pub(super) const FAR: &str = "10.77.0.1";

/// Three namespaces: here, and the two ends.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) here: Netns,
    pub(super) near: Netns,
    pub(super) far: Netns,
    _janitor: Janitor,
}

/// Small frames that passed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed {
    /// Frames that reached `wire1`.
    pub(super) frames: u64,
    /// How long it took.
    pub(super) elapsed: Duration,
}

impl Wire {
    pub(super) fn new(lab: &Lab) -> Result<Self> {
        let (here, near, far) = (Netns::new()?, Netns::new()?, Netns::new()?);
        let _janitor = Janitor::start(lab, &[&here, &near, &far])?;
        here.veth("wire0", TAPPED)?;
        here.veth("far0", "far1")?;
        here.ip(&["link", "set", "wire0", "netns", near.name()])?;
        here.ip(&["link", "set", "far0", "netns", far.name()])?;
        here.bridge("br0", &[TAPPED, "far1"])?;
        // A bridge that forgets addresses at once sends every frame to every port.
        here.ip(&["link", "set", "br0", "type", "bridge", "ageing_time", "0"])?;
        end(&near, "wire0", (NEAR, NEAR_MAC), (FAR, FAR_MAC))?;
        end(&far, "far0", (FAR, FAR_MAC), (NEAR, NEAR_MAC))?;
        Ok(Self {
            here,
            near,
            far,
            _janitor,
        })
    }

    /// Sends `count` small frames of run `run`, `pps` in a second or as fast as the generator can.
    pub(super) fn send(&self, pps: Option<u64>, count: u64, run: u32) -> Result<Passed> {
        let before = self.received()?;
        let stream = Stream {
            run,
            pps: pps.and_then(NonZeroU64::new),
            ..Stream::new("wire0", count)
        };
        let sent = self.near.enter(|| stream.send())??;
        Ok(Passed {
            frames: self.received()? - before,
            elapsed: sent.elapsed,
        })
    }

    /// Takes the far end off the bridge, or puts it back: generated frames need no listener.
    pub(super) fn far_end(&self, up: bool) -> Result<()> {
        self.set("far1", up)
    }

    /// Sets an interface of this side up or down.
    pub(super) fn set(&self, interface: &str, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        self.here.ip(&["link", "set", interface, state]).map(drop)
    }

    fn received(&self) -> Result<u64> {
        let path = format!("/sys/class/net/{TAPPED}/statistics/rx_packets");
        let text = self.here.exec(&["cat", &path])?;
        let number = text.trim().parse();
        number.map_err(|_| LabError::Protocol(format!("{path}: {text}")))
    }
}

/// Makes a talking end: an address, the other's address known for good, and frames as a real wire
/// has them, no larger than its MTU and with their checksums.
fn end(netns: &Netns, interface: &str, own: (&str, &str), other: (&str, &str)) -> Result<()> {
    netns.ip(&["link", "set", interface, "address", own.1])?;
    netns.ip(&["link", "set", interface, "arp", "on", "up"])?;
    netns.ip(&["addr", "add", &format!("{}/24", own.0), "dev", interface])?;
    let neighbour = ["neigh", "replace", other.0, "lladdr", other.1];
    netns.ip(&[&neighbour[..], &["dev", interface, "nud", "permanent"]].concat())?;
    let offloads = ["tx", "off", "tso", "off", "gso", "off", "gro", "off"];
    netns.exec(&[&["/usr/sbin/ethtool", "-K", interface], &offloads[..]].concat())?;
    Ok(())
}

/// Waits until `ready` says yes.
pub(super) fn until(what: &str, ready: impl FnMut() -> Result<bool>) -> Result<()> {
    patience::until(|| what.to_owned(), LIMIT, ready)
}

/// Removes namespaces, the lab's directory and the pools when we end without doing it ourselves: a shell that
/// waits for the end of a pipe whose other end is ours.
#[derive(Debug)]
struct Janitor(Child);

impl Janitor {
    fn start(lab: &Lab, namespaces: &[&Netns]) -> Result<Self> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", SWEEP, "sweep"]).arg(lab.dir());
        shell.args(namespaces.iter().map(|netns| netns.name()));
        shell.stdin(Stdio::piped());
        shell.stdout(Stdio::null()).stderr(Stdio::null());
        std::os::unix::process::CommandExt::process_group(&mut shell, 0);
        let child = shell.spawn().map_err(LabError::io("start the janitor"))?;
        Ok(Self(child))
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        // NB: the orderly end is the owner's; nothing is left for the janitor to say or do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The pause lets the guests' watchdogs kill first, so nothing is in use any more. Pools lie in
/// directories that are named as the lab's, with another last number.
const SWEEP: &str = r#"read -r _; sleep 1; dir=$1; shift
for netns; do ip netns delete "$netns"; done
owner=${dir##*/}; owner=${owner%-*}
rm -rf "$dir" /dev/shm/"$owner"-*"#;
const NEAR_MAC: &str = "02:00:00:00:77:02";
const FAR_MAC: &str = "02:00:00:00:77:01";
