//! Readers on an interface that the user names, with traffic that the user provides.
//!
//! `vnplug-bench --interface eth1`, or `IFACE=eth1`. Nothing is sent and nothing is changed on the
//! interface but what captures change (it listens to all stations). Sides take turns and are started
//! for each turn, as they would cost each other a copy of every packet.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::UmlConfig;
use vnplug_e2e::daemon::Daemon;

use super::guests::OVER_VNPLUG;
use super::host::vnplug;
use super::{Series, Turn, Way};
use crate::pcap::image;
use crate::row::{Figure, Limit, Plan, Result};
use crate::sys;
use crate::uml::AttachedUml;

/// The variable that names the interface.
pub(crate) const INTERFACE: &str = "IFACE";
/// The variable that may name another kind of source or options: `af_xdp:eth1,queues=2`.
const SOURCE: &str = "IFACE_SOURCE";

/// A reader on the host, and one in User-mode Linux, each beside libpcap.
pub(crate) fn on_interface(plan: &Plan) -> Result<Vec<Figure>> {
    let interface = plan.interface.as_deref();
    let interface = interface.ok_or("name an interface: vnplug-bench --interface eth1")?;
    passed(interface)?;
    sys::beside_sender(|| {
        let lab = Lab::new()?;
        let what = std::env::var(SOURCE).unwrap_or(format!("af_packet:{interface}"));
        let source = format!("nic={what}");
        let [mut host, mut uml, mut pcap] = [(); 3].map(|()| Series::default());
        for round in 1..=plan.rounds {
            let daemon = Daemon::start(&lab, None, &["--source", &source])?;
            let mut way = vnplug(&lab, None, &daemon, "", "nic")?;
            host.push(&turn(plan, interface, &mut way)?);
            drop(way);
            let config = UmlConfig {
                image: image(&lab)?,
                ..UmlConfig::default()
            };
            let guest = AttachedUml::boot_as(&lab, &daemon, "bench", config)?;
            let way = Way::new("", Some(&daemon));
            let mut way = way.in_guest(guest.guest(), OVER_VNPLUG, "host:nic")?;
            uml.push(&turn(plan, interface, &mut way)?);
            drop(way);
            drop((guest, daemon));
            let command = Command::new(std::env::current_exe()?);
            let mut way = Way::new("", None).on_host(None, command, interface)?;
            pcap.push(&turn(plan, interface, &mut way)?);
            let [host, uml, pcap] = [&host, &uml, &pcap].map(|side| side.rate.last());
            eprintln!("  round {round}: host {host:.3}, UML {uml:.3}, libpcap {pcap:.3} Mpps");
        }
        Ok([("host", host), ("uml", uml)]
            .into_iter()
            .flat_map(|(name, ours)| figures(name, &what, ours, &pcap))
            .collect())
    })
}

fn figures(name: &str, what: &str, ours: Series, pcap: &Series) -> Vec<Figure> {
    let offered = Some(Limit::new(
        "what the interface counted",
        ours.offered.clone(),
    ));
    let figure = |suffix: &str, unit, ours, peer: &crate::row::Samples| Figure {
        name: format!("interface-{name}{suffix}"),
        unit,
        ours,
        peer: Some(("libpcap".to_owned(), peer.clone())),
        limit: offered.clone().filter(|_| suffix.is_empty()),
        note: format!(
            "source {what}, traffic of the user's; lost is what the interface counted in both \
             directions and the reader did not get; pcap_dispatch over the drop-in and over libpcap, \
             16 MiB of buffer for each reader"
        ),
    };
    vec![
        figure("", "Mpps", ours.rate, &pcap.rate),
        figure("-loss", "% lost", ours.lost, &pcap.lost),
        figure("-idle", "% idle", ours.idle, &pcap.idle),
    ]
}

/// What one side gets in the plan's time.
fn turn(plan: &Plan, interface: &str, way: &mut Way<'_>) -> Result<Turn> {
    // What waits in rings from before is taken first.
    sleep(Duration::from_millis(300));
    let (begin, before, wire) = (way.mark()?, Instant::now(), passed(interface)?);
    sleep(plan.time);
    let wire = passed(interface)?.saturating_sub(wire);
    let elapsed = before.elapsed();
    way.since(&begin, wire, elapsed)
}

/// Packets that an interface has counted: both directions, and what it missed.
fn passed(interface: &str) -> Result<u64> {
    let counter = |name: &str| -> Result<u64> {
        let path = format!("/sys/class/net/{interface}/statistics/{name}");
        let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        Ok(text.trim().parse()?)
    };
    Ok(counter("rx_packets")? + counter("tx_packets")? + counter("rx_missed_errors")?)
}
