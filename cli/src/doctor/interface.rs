//! Checks of a network interface that is, or may become, a source, or is an uplink.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

use serde_json::Value;
use vnplug_os::interface::{self, Link, Spreading};

use super::check::{Check, Finding};
use super::machine::Machine;

/// Asks the kernel about the interface with this name, by any socket, and judges the answer.
type Look = fn(&UnixDatagram, &str) -> Finding;

pub(super) fn checks(name: &str) -> Vec<Check> {
    let link_check = format!("link-{name}");
    let check = |what: &str, look: Look| {
        let interface = name.to_owned();
        Check::new(format!("{what}-{name}"), move |_: &Machine| {
            // Any socket asks; this one needs no address family of the network.
            match UnixDatagram::unbound() {
                Ok(socket) => look(&socket, &interface),
                Err(error) => Finding::skipped(error.to_string()),
            }
        })
    };
    let mut all = vec![check("link", |socket, name| {
        let speed = interface::speed_mbps(socket, name);
        link(name, interface::link(socket, name), speed)
    })];
    let more: [(&str, Look); 5] = [
        ("merging", |socket, name| {
            let lro = interface::merges_in_hardware(socket, name);
            merging(name, interface::merges(socket, name), lro)
        }),
        ("vlan-tags", |socket, name| {
            vlan_tags(name, interface::strips_vlan_tags(socket, name))
        }),
        ("ring-size", |socket, name| {
            ring_size(name, interface::receive_slots(socket, name))
        }),
        ("rss", rss),
        ("xdp", |_, name| xdp(name)),
    ];
    all.extend(more.map(|(what, look)| check(what, look).after(link_check.clone())));
    let interface = name.to_owned();
    let missed = move |machine: &Machine| missed(machine, &interface);
    all.push(Check::new(format!("missed-{name}"), missed).after(link_check.clone()));
    let interface = name.to_owned();
    let longest = move |machine: &Machine| longest(machine, &interface);
    all.push(Check::new(format!("mtu-{name}"), longest).after(link_check));
    all
}

/// Those of an uplink of a switch. Merged packets are welcome there, no reader has a queue of it, and a program of the switch's
/// own may be on it.
pub(super) fn checks_of_uplink(name: &str) -> Vec<Check> {
    let wanted = ["link", "ring-size", "missed", "mtu"].map(|what| format!("{what}-{name}"));
    let mut all = checks(name);
    all.retain(|it| wanted.contains(&it.name));
    all
}

pub(super) fn link(name: &str, told: io::Result<Link>, speed_mbps: Option<u32>) -> Finding {
    match told {
        Err(error) => Finding::fail(
            format!("there is no interface {name} here: {error}"),
            "ip link    (and: ip netns, if it is elsewhere)",
        ),
        Ok(link) if !link.up => {
            Finding::fail(format!("{name} is down"), format!("ip link set {name} up"))
        }
        Ok(link) if !link.running => Finding::fail(
            format!("{name} has no carrier"),
            "look at the cable, and at the other end",
        ),
        Ok(link) => {
            let speed = speed_mbps.map_or(String::new(), |mbps| format!(", {mbps} Mb/s"));
            Finding::ok(format!("up, MTU {}{speed}", link.mtu))
        }
    }
}

/// `gro`: whether the kernel merges packets; `lro`: whether the NIC does.
pub(super) fn merging(name: &str, gro: Option<bool>, lro: bool) -> Finding {
    if lro {
        return Finding::warn(
            format!("LRO on {name} merges packets and keeps no trace of how they came"),
            format!("ethtool -K {name} lro off"),
        );
    }
    match gro {
        Some(true) => Finding::warn(
            format!(
                "GRO on {name} merges packets: readers get them cut again, as far as GRO remembers"
            ),
            format!(
                "ethtool -K {name} gro off    (what is on the wire; the host's own TCP gets slower)"
            ),
        ),
        Some(false) => Finding::ok("packets come as they are on the wire"),
        None => Finding::skipped("the driver does not say"),
    }
}

pub(super) fn vlan_tags(name: &str, are_stripped: bool) -> Finding {
    match are_stripped {
        false => Finding::ok("VLAN tags stay in the packets"),
        true => Finding::warn(
            format!("{name} takes VLAN tags out: af_packet puts them back, af_xdp loses them"),
            format!("ethtool -K {name} rxvlan off    (for af_xdp)"),
        ),
    }
}

/// `slots`: how many the NIC's ring has, and could have.
pub(super) fn ring_size(name: &str, slots: Option<(u32, u32)>) -> Finding {
    match slots {
        None => Finding::skipped("the driver has no ring, or does not say"),
        Some((now, most)) if now < most => Finding::warn(
            format!(
                "the NIC's ring has {now} of {most} places: bursts are lost before the kernel sees them"
            ),
            format!("ethtool -G {name} rx {most}    (the link may go down for a moment)"),
        ),
        Some((now, _)) => Finding::ok(format!("the NIC's ring has all its {now} places")),
    }
}

/// Whether both directions of a flow come to the same queue.
fn rss(socket: &UnixDatagram, name: &str) -> Finding {
    match interface::receive_queues(socket, name) {
        None => return Finding::skipped("the driver does not say how many queues it has"),
        Some(1) => return Finding::ok("one queue: nothing is spread"),
        Some(_) => {}
    }
    match interface::spreading(socket, name) {
        None => Finding::skipped("the driver does not say how it spreads packets over its queues"),
        Some(how) => symmetry(name, &how, interface::hashed_fields(socket, name)),
    }
}

/// What its hash makes of a flow and its answers. `fields`: those of TCP, where they are known.
pub(super) fn symmetry(name: &str, how: &Spreading, fields: Option<u64>) -> Finding {
    const TOEPLITZ: u8 = 1;
    const XOR: u8 = 2;
    let half = format!(
        "the two directions of a connection come to different queues: a reader of one queue (host:{name}@0) sees half of \
         it, and af_xdp hands the halves over in any order"
    );
    let pairs = [
        (interface::FIELD_SOURCE, interface::FIELD_DESTINATION),
        (
            interface::FIELD_SOURCE_PORT,
            interface::FIELD_DESTINATION_PORT,
        ),
    ];
    let has = |field: u64| fields.is_none_or(|it| it & field != 0);
    if pairs.iter().any(|&(one, other)| has(one) != has(other)) {
        return Finding::warn(
            format!("{name} hashes a field of the sender and not that of the receiver: {half}"),
            format!("ethtool -N {name} rx-flow-hash tcp4 sdfn    (and udp4, tcp6, udp6)"),
        );
    }
    // Sender and receiver are 16 or 32 bits apart from each other, and the key is the same there.
    let repeats = how
        .key
        .iter()
        .zip(&how.key[2.min(how.key.len())..])
        .all(|(a, b)| a == b);
    if how.transform != 0 || how.function == XOR || (how.function == TOEPLITZ && repeats) {
        return Finding::ok("both directions of a connection come to the same queue (RSS)");
    }
    let key: Vec<_> = (0..how.key.len()).map(|at| ["6d", "5a"][at % 2]).collect();
    Finding::warn(
        format!("RSS of {name} is not symmetric: {half}"),
        format!(
            "ethtool -X {name} hkey {} hfunc toeplitz    (or, where the driver can: ethtool -X {name} xfrm symmetric-xor)",
            key.join(":")
        ),
    )
}

/// Another XDP program takes frames first, and AF_XDP refuses to share.
fn xdp(name: &str) -> Finding {
    let shown = Command::new("ip")
        .args(["-j", "-d", "link", "show", "dev", name])
        .stdin(Stdio::null())
        .output();
    let shown = match shown {
        Ok(shown) if shown.status.success() => shown.stdout,
        Ok(_) => return Finding::skipped("`ip link` does not show it"),
        Err(error) => return Finding::skipped(format!("ip: {error}")),
    };
    programs(name, &shown)
}

/// `shown`: what `ip -j -d link show` prints.
pub(super) fn programs(name: &str, shown: &[u8]) -> Finding {
    let links: Value = serde_json::from_slice(shown).unwrap_or_default();
    let program = &links[0]["xdp"]["prog"];
    match program["id"].as_u64() {
        None => Finding::ok("no XDP program is on it"),
        Some(id) => Finding::warn(
            format!(
                "an XDP program is on it (number {id}): if it is not that of an af_xdp source, what it takes is \
                 not seen, and af_xdp is refused"
            ),
            format!("bpftool prog show id {id}; if nobody needs it: ip link set {name} xdp off"),
        ),
    }
}

/// Whether what is on the wire is longer than what the NIC takes: mirrors add tags and headers.
pub(super) fn longest(machine: &Machine, name: &str) -> Finding {
    let figure = |what: &str| {
        let text = machine.read(&format!("/sys/class/net/{name}/{what}"));
        text.ok().and_then(|it| it.parse::<u64>().ok())
    };
    let Some(mtu) = figure("mtu") else {
        return Finding::skipped("the system does not say");
    };
    match figure("statistics/rx_length_errors") {
        Some(wrong @ 1..) => Finding::warn(
            format!("the NIC dropped {wrong} frames for their length, and its MTU is {mtu}"),
            format!("ip link set {name} mtu 9000    (or what the NIC can: ip -d link show {name})"),
        ),
        _ if mtu < ETHERNET_MTU => Finding::warn(
            format!("the MTU is {mtu}: frames of an ordinary Ethernet do not fit"),
            format!("ip link set {name} mtu 1500"),
        ),
        _ => Finding::ok(format!("MTU {mtu}, and no frame was too long")),
    }
}

/// Bytes after the header.
const ETHERNET_MTU: u64 = 1500;

/// What the NIC lost since it came up.
fn missed(machine: &Machine, name: &str) -> Finding {
    let figure = |what: &str| {
        let text = machine.read(&format!("/sys/class/net/{name}/statistics/{what}"));
        text.ok().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0)
    };
    let lost = figure("rx_missed_errors") + figure("rx_fifo_errors");
    match lost {
        0 => Finding::ok("the NIC has missed nothing"),
        lost => Finding::warn(
            format!("the NIC has missed {lost} packets before the kernel, since it came up"),
            format!("ethtool -S {name}; a larger ring, more queues, or a CPU that is not so busy"),
        ),
    }
}
