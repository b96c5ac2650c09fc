//! Containers on a switch, as far as a network namespace with one end of a wire is one.

use std::path::{Path, PathBuf};

use crate::{Lab, LabError, Netns, Result};

/// A machine with containers: `c1` and so on are the ends of their wires here, `eth0` is each one's own.
#[derive(Debug)]
pub struct Containers {
    /// Where a daemon's files lie.
    pub lab: Lab,
    /// The machine.
    pub here: Netns,
    /// The containers.
    pub all: Vec<Netns>,
    _names: Names,
}

/// What a daemon leaves that is killed, as those of tests are; removed when dropped.
#[derive(Debug)]
struct Names(PathBuf);

impl Drop for Names {
    fn drop(&mut self) {
        if let Ok(entries) = std::fs::read_dir(&self.0) {
            for entry in entries.flatten() {
                let _ = std::fs::remove_file(entry.path());
            }
            let _ = std::fs::remove_dir(&self.0);
        }
    }
}

impl Containers {
    /// `count` of them, with the addresses 10.9.0.1 and so on, joined to nothing.
    ///
    /// # Errors
    /// [`LabError::Missing`] without a bpf filesystem; the lab's.
    pub fn new(count: usize) -> Result<Self> {
        if !Path::new(ROOT).join("vnplug").exists()
            && std::fs::create_dir(format!("{ROOT}/vnplug")).is_err()
        {
            let what = format!("no bpf filesystem: mount -t bpf bpf {ROOT}");
            return Err(LabError::Missing(what));
        }
        let (lab, here) = (Lab::new()?, Netns::new()?);
        let names = Names(Path::new(ROOT).join("vnplug").join(here.name()));
        let mut all = Vec::new();
        for number in 1..=count {
            let netns = Netns::new()?;
            wire(&here, &netns, number)?;
            all.push(netns);
        }
        Ok(Self {
            lab,
            here,
            all,
            _names: names,
        })
    }

    /// A switch of a name that no other lab has, with all containers as uplinks of these options (`/twin=on`), and
    /// `more` of the switch.
    #[must_use]
    pub fn switch(&self, options: &str, more: &str) -> String {
        let uplinks = (1..=self.all.len()).map(|number| format!("c{number}{options}"));
        let uplinks: Vec<_> = uplinks.collect();
        format!("{},uplink={}{more}", self.here.name(), uplinks.join("+"))
    }

    /// Where the daemon has the names of what outlives it.
    #[must_use]
    pub fn names(&self) -> &Path {
        &self._names.0
    }

    /// A statistic of a container's wire at this end, as `rx_packets`.
    ///
    /// # Panics
    /// If the interface is gone.
    #[must_use]
    pub fn statistic(&self, number: usize, name: &str) -> u64 {
        let file = format!("/sys/class/net/c{number}/statistics/{name}");
        let text = self.here.exec(&["cat", &file]);
        let value = text.ok().and_then(|text| text.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{file}: no number"))
    }
}

/// The address of a container.
#[must_use]
pub fn address(number: usize) -> String {
    format!("10.9.0.{number}")
}

/// Puts a container's wire there.
///
/// # Errors
/// The lab's.
pub fn wire(here: &Netns, container: &Netns, number: usize) -> Result<()> {
    let name = format!("c{number}");
    // Two queues at each end, so that there is something to change (`ethtool -L`).
    let queues = ["numrxqueues", "2", "numtxqueues", "2"];
    let veth = ["link", "add", &name];
    let peer = ["peer", "name", "eth0", "netns", container.name()];
    here.ip(&[&veth[..], &queues, &["type", "veth"], &peer, &queues].concat())?;
    let with_prefix = format!("{}/24", address(number));
    container.ip(&["addr", "add", &with_prefix, "dev", "eth0"])?;
    container.ip(&["link", "set", "eth0", "up"])?;
    here.ip(&["link", "set", &name, "up"])?;
    Ok(())
}

/// Where bpf filesystems are.
const ROOT: &str = "/sys/fs/bpf";
