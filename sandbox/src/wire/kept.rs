//! What the kernel sends by itself to keep an interface working. It passes without a permission, so it passes only in
//! the form that the kernel gives it and to where the kernel sends it: a raw socket could put anything into it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::seen::Packet;

/// Whether it is a report of groups (IGMP, MLD): it goes one hop, to a group, and says nothing but groups and senders.
pub(super) fn is_report(packet: &Packet<'_>, link: &[u8]) -> bool {
    let is_whole = !packet.more && !packet.later && packet.hops == 1;
    if !is_whole || packet.body.len() > MOST_REPORT || !is_of_group(packet.to, link) {
        return false;
    }
    match packet.to {
        IpAddr::V4(to) => packet.between == ALERT && is_report4(to, packet.body),
        IpAddr::V6(to) => packet.between == ALERT6 && is_report6(to, packet.body),
    }
}

/// Whether it asks the routers of the link who they are (RFC 4861, 4.1).
pub(super) fn is_router_solicitation(packet: &Packet<'_>, link: &[u8], mac: [u8; 6]) -> bool {
    let [133, 0, _, _, 0, 0, 0, 0, options @ ..] = packet.body else {
        return false;
    };
    is_neighbourly(packet)
        && packet.to == IpAddr::V6(ALL_ROUTERS)
        && is_of_group(packet.to, link)
        && (options.is_empty() || is_link(options, SOURCE_LINK, mac))
}

/// Whom a neighbour solicitation looks for, if it goes to whoever has that address (RFC 4861, 4.3).
pub(super) fn solicited(packet: &Packet<'_>, link: &[u8], mac: [u8; 6]) -> Option<IpAddr> {
    let (target, options) = about(packet, 135, 0)?;
    let is_free = packet.from.is_unspecified();
    let goes_there = packet.to == IpAddr::V6(solicited_node(target))
        && is_of_group(packet.to, link)
        || packet.to == IpAddr::V6(target) && !is_free;
    let is_formed = match options {
        [] => true,
        // A random number, by which it knows its own question (RFC 7527, 4).
        [NONCE, 1, _, _, _, _, _, _] => is_free,
        options => !is_free && is_link(options, SOURCE_LINK, mac),
    };
    (goes_there && is_formed).then_some(target.into())
}

/// Of which address a neighbour advertisement says that it has this hardware address (RFC 4861, 4.4).
pub(super) fn advertised(packet: &Packet<'_>, link: &[u8], mac: [u8; 6]) -> Option<IpAddr> {
    let (target, options) = about(packet, 136, 0xe0)?;
    let is_formed = options.is_empty() || is_link(options, TARGET_LINK, mac);
    let goes_there = match packet.to {
        IpAddr::V6(to) if to.is_multicast() => to == ALL_NODES && is_of_group(packet.to, link),
        _ => true,
    };
    (is_formed && goes_there).then_some(target.into())
}

/// The target and the options of a neighbour message that may have these flags.
fn about<'a>(packet: &Packet<'a>, kind: u8, flags: u8) -> Option<(Ipv6Addr, &'a [u8])> {
    let (head, rest) = packet.body.split_first_chunk::<8>()?;
    let (target, options) = rest.split_first_chunk::<16>()?;
    let [own_kind, 0, _, _, own_flags, 0, 0, 0] = *head else {
        return None;
    };
    let is_it = own_kind == kind && own_flags & !flags == 0 && is_neighbourly(packet);
    is_it.then_some((Ipv6Addr::from(*target), options))
}

/// Nobody beyond the link sends or gets it.
fn is_neighbourly(packet: &Packet<'_>) -> bool {
    packet.hops == 255 && !packet.more && !packet.later && packet.between.is_empty()
}

fn is_link(options: &[u8], kind: u8, mac: [u8; 6]) -> bool {
    matches!(options, [own, 1, rest @ ..] if *own == kind && *rest == mac)
}

/// Whether a frame for that hardware address goes to that group (RFC 1112, 6.4; RFC 2464, 7).
fn is_of_group(group: IpAddr, link: &[u8]) -> bool {
    match group {
        IpAddr::V4(group) => {
            let [_, b, c, d] = group.octets();
            group.is_multicast() && link == [1, 0, 0x5e, b & 0x7f, c, d]
        }
        IpAddr::V6(group) => {
            let [.., a, b, c, d] = group.octets();
            group.is_multicast() && link == [0x33, 0x33, a, b, c, d]
        }
    }
}

/// The group in which that address is looked for (RFC 4291, 2.7.1).
fn solicited_node(target: Ipv6Addr) -> Ipv6Addr {
    let [.., high, low] = target.segments();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | high & 0xff, low)
}

/// IGMP of versions 1 to 3 (RFC 2236, 2; RFC 3376, 4.2).
fn is_report4(to: Ipv4Addr, body: &[u8]) -> bool {
    match *body {
        [0x12 | 0x16, 0, _, _, a, b, c, d] => to == Ipv4Addr::new(a, b, c, d),
        [0x17, 0, _, _, a, ..] => body.len() == 8 && to == ALL_ROUTERS4 && a >> 4 == 0xe,
        [0x22, ..] => to == REPORTS4 && are_records(body, 4, |group| group >> 4 == 0xe),
        _ => false,
    }
}

/// MLD of versions 1 and 2 (RFC 2710, 3; RFC 3810, 5.2).
fn is_report6(to: Ipv6Addr, body: &[u8]) -> bool {
    match body {
        [131, 0, _, _, 0, 0, 0, 0, group @ ..] => to.octets() == *group,
        [132, 0, _, _, 0, 0, 0, 0, 0xff, ..] => body.len() == 24 && to == ALL_ROUTERS,
        [143, ..] => to == REPORTS6 && are_records(body, 16, |group| group == 0xff),
        _ => false,
    }
}

/// Whether these are as many records of groups as it says, and no more bytes.
fn are_records(body: &[u8], width: usize, is_group: impl Fn(u8) -> bool) -> bool {
    let [_, 0, _, _, 0, 0, high, low, rest @ ..] = body else {
        return false;
    };
    let mut rest = rest;
    for _ in 0..u16::from_be_bytes([*high, *low]) {
        let [1..=6, 0, high, low, tail @ ..] = rest else {
            return false;
        };
        let senders = usize::from(u16::from_be_bytes([*high, *low]));
        match tail.split_at_checked(width * (1 + senders)) {
            Some((addresses, after)) if is_group(addresses[0]) => rest = after,
            _ => return false,
        }
    }
    rest.is_empty()
}

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
const REPORTS6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
const ALL_ROUTERS4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 2);
const REPORTS4: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 22);
/// The option by which routers look at a packet (RFC 2113; RFC 2711, behind it padding).
const ALERT: [u8; 4] = [148, 4, 0, 0];
const ALERT6: [u8; 8] = [58, 0, 5, 2, 0, 0, 1, 0];
const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;
const NONCE: u8 = 14;
/// Bytes of a report: the kernel begins a new one where an Ethernet frame is full.
const MOST_REPORT: usize = 1480;
