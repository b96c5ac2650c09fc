//! Readers on the host, over vNPlug and over the system's libpcap.

use std::process::Command;

use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::{Lab, Netns};

use super::{Side, Way, by_size, lossless};
use crate::pcap::drop_in;
use crate::row::{Figure, Plan, Result};
use crate::sys;
use crate::wire::Wire;

/// A reader on the host.
pub(crate) fn on_host(plan: &Plan) -> Result<Vec<Figure>> {
    sys::beside_sender(|| {
        let wire = Wire::new()?;
        wire.add(1)?;
        let daemon = Daemon::start(&wire.lab, Some(&wire.netns), &["--source", "wire0"])?;
        let mut ours = vnplug(&wire.lab, Some(&wire.netns), &daemon, "far0", "wire0")?;
        let command = Command::new(std::env::current_exe()?);
        let mut peer = Way::new("far1", None).on_host(Some(&wire.netns), command, "wire1")?;
        let mut sides = [
            Side {
                name: "vNPlug",
                way: &mut ours,
            },
            Side {
                name: "libpcap",
                way: &mut peer,
            },
        ];
        let how = "pcap_dispatch on the host over the drop-in and over the system's libpcap, 16 MiB \
                   of buffer for each reader; idle is of the CPUs beside the sender's";
        let mut figures = by_size(plan, &wire, "capture-host", &mut sides, how)?;
        figures.push(lossless(plan, &wire, "capture-host", &mut sides)?);
        Ok(figures)
    })
}

/// A counter on the host over a source of the daemon.
pub(super) fn vnplug<'d>(
    lab: &Lab,
    netns: Option<&Netns>,
    daemon: &'d Daemon,
    far: &'static str,
    source: &str,
) -> Result<Way<'d>> {
    vnplug_filtered(lab, netns, daemon, far, source, "")
}

/// The same with a filter.
pub(super) fn vnplug_filtered<'d>(
    lab: &Lab,
    netns: Option<&Netns>,
    daemon: &'d Daemon,
    far: &'static str,
    source: &str,
    filter: &'static str,
) -> Result<Way<'d>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env("LD_LIBRARY_PATH", drop_in(lab)?);
    command.env("VNPLUG_SOCKET", daemon.socket());
    let way = Way::new(far, Some(daemon)).filtered(filter);
    way.on_host(netns, command, &format!("vnplug:{source}"))
}
