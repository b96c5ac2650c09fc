//! Network namespaces with wires in them, where no packet moves that a test did not send.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{LabError, Result};
use crate::owner;

/// A network namespace with a unique name; dropping it removes it and everything in it.
///
/// IPv6 is off and interfaces do no ARP, so an idle wire is silent. Needs root.
///
/// ```no_run
/// # fn main() -> vnplug_e2e::Result<()> {
/// let netns = vnplug_e2e::Netns::new()?;
/// netns.veth("wire0", "wire1")?;
/// let links = netns.exec(&["ip", "-br", "link"])?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Makes a namespace with only the loopback interface, up.
    ///
    /// # Errors
    /// [`LabError::Command`] with what `ip` says, for example without root.
    pub fn new() -> Result<Self> {
        let name = owner::unique_name();
        let netns = Self { name };
        netns.make()?;
        Ok(netns)
    }

    /// Removes it; its name stays for [`make`](Self::make).
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn remove(&self) -> Result<()> {
        ip(&["netns", "delete", &self.name]).map(drop)
    }

    /// Makes it after it was removed.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn make(&self) -> Result<()> {
        ip(&["netns", "add", &self.name])?;
        self.enter(|| {
            for scope in ["all", "default"] {
                let path = format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6");
                // A kernel without IPv6 has no such file, and no stray packets of it either.
                if Path::new(&path).exists() {
                    fs::write(&path, "1").map_err(LabError::io(format!("write {path}")))?;
                }
            }
            Ok(())
        })??;
        self.ip(&["link", "set", "lo", "up"]).map(drop)
    }

    /// The name, as `ip netns` knows it and guests' configurations want it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes a wire: two interfaces, both up; what enters one leaves the other.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn veth(&self, one: &str, other: &str) -> Result<()> {
        self.ip(&["link", "add", one, "type", "veth", "peer", "name", other])?;
        self.quiet_up(one)?;
        self.quiet_up(other)
    }

    /// Makes a bridge, up, of the given interfaces; no spanning tree, no multicast snooping.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn bridge(&self, name: &str, ports: &[&str]) -> Result<()> {
        self.ip(&[
            "link",
            "add",
            name,
            "type",
            "bridge",
            "stp_state",
            "0",
            "mcast_snooping",
            "0",
        ])?;
        for port in ports {
            self.ip(&["link", "set", port, "master", name])?;
        }
        self.quiet_up(name)
    }

    /// Makes a tap for [`crate::QemuConfig::taps`], up.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn tap(&self, name: &str) -> Result<()> {
        self.ip(&["tuntap", "add", name, "mode", "tap", "vnet_hdr"])?;
        self.quiet_up(name)
    }

    /// Runs `ip` in the namespace: `netns.ip(&["addr", "add", "10.0.0.1/24", "dev", "wire0"])`.
    ///
    /// # Errors
    /// [`LabError::Command`].
    pub fn ip(&self, args: &[&str]) -> Result<String> {
        ip(&[&["-n", self.name.as_str()], args].concat())
    }

    /// Runs a host command in the namespace and returns what it printed.
    ///
    /// # Errors
    /// [`LabError::Command`] if it fails.
    pub fn exec(&self, words: &[&str]) -> Result<String> {
        ip(&[&["netns", "exec", self.name.as_str()], words].concat())
    }

    /// A command that will run in the namespace; the caller adds arguments and starts it.
    #[must_use]
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.name])
            .arg(program.as_ref());
        command
    }

    /// Runs `work` on a thread that is in the namespace: sockets opened there stay there.
    ///
    /// # Errors
    /// [`LabError::Io`] if the thread cannot enter.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let netns = open(&self.name)?;
        thread::scope(|scope| {
            let entered = scope.spawn(move || {
                move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
                    .map_err(|errno| LabError::io("enter the network namespace")(errno.into()))?;
                Ok(work())
            });
            entered
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn quiet_up(&self, interface: &str) -> Result<()> {
        self.ip(&[
            "link",
            "set",
            interface,
            "arp",
            "off",
            "multicast",
            "off",
            "up",
        ])
        .map(drop)
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        // NB: a failure leaves the namespace to the next lab's sweep.
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

/// Opens a namespace by name.
pub(crate) fn open(name: &str) -> Result<OwnedFd> {
    let path = Path::new(DIR).join(name);
    File::open(&path)
        .map(OwnedFd::from)
        .map_err(LabError::io(format!("open {}", path.display())))
}

/// Removes the namespaces of dead owners.
pub(crate) fn sweep() {
    for entry in fs::read_dir(DIR).into_iter().flatten().flatten() {
        if let Some(name) = entry
            .file_name()
            .to_str()
            .filter(|name| owner::is_orphan(name))
        {
            // NB: another lab may be sweeping it, or we are not root: both are fine.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(args: &[&str]) -> Result<String> {
    let output = Command::new("ip")
        .args(args)
        .output()
        .map_err(LabError::io("run ip (package iproute2)"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(LabError::Command {
            command: format!("ip {}", args.join(" ")),
            text,
        })
    }
}

const DIR: &str = "/run/netns";
