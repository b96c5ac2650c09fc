//! The fence, frame by frame.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::*;
use crate::wire::hello::tests::hello;
use crate::wire::initial::tests::{crypto, packet};

const OWN_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OWN: [u8; 4] = [10, 0, 0, 9];
const PEER: [u8; 4] = [10, 0, 0, 2];
/// What the kernel made.
const OWN6: &str = "fe80::9";
const OWN_GLOBAL: &str = "fd00::9";
const STRANGER: [u8; 4] = [10, 0, 0, 3];
const ROUTER: [u8; 4] = [10, 0, 0, 1];

fn fence() -> Fence {
    let fence = Fence::new(OWN_MAC, &[OWN.into()], &[ROUTER.into()]);
    let made = || Some(vec![OWN6.parse().unwrap(), OWN_GLOBAL.parse().unwrap()]);
    fence.ask_addresses(Box::new(made));
    fence
}

fn ruled(rules: impl Fn(Transport, SocketAddr) -> bool + Send + Sync + 'static) -> Fence {
    let fence = fence();
    fence.ask_rules(Box::new(rules));
    fence
}

/// A frame from one hardware address to the other.
fn ethernet(from: [u8; 6], to: [u8; 6], kind: u16, body: &[u8]) -> Vec<u8> {
    [&to[..], &from, &kind.to_be_bytes(), body].concat()
}

fn ipv4_packet(protocol: u8, from: [u8; 4], to: [u8; 4], fragment: u16, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 7, 0, 0, 64, protocol, 0, 0];
    packet[6..8].copy_from_slice(&fragment.to_be_bytes());
    packet.extend(from);
    packet.extend(to);
    packet.extend(body);
    packet
}

fn ports(from: u16, to: u16) -> Vec<u8> {
    let mut body = [from.to_be_bytes(), to.to_be_bytes()].concat();
    body.resize(20, 0);
    body
}

fn out(protocol: u8, to: [u8; 4], body: &[u8]) -> Vec<u8> {
    let packet = ipv4_packet(protocol, OWN, to, 0, body);
    ethernet(OWN_MAC, OTHER_MAC, 0x0800, &packet)
}

fn back(protocol: u8, from: [u8; 4], body: &[u8]) -> Vec<u8> {
    let packet = ipv4_packet(protocol, from, OWN, 0, body);
    ethernet(OTHER_MAC, OWN_MAC, 0x0800, &packet)
}

fn arp_request(sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let mut body = vec![0, 1, 8, 0, 6, 4, 0, 1];
    body.extend(OWN_MAC);
    body.extend(sender);
    body.extend([0; 6]);
    body.extend(target);
    ethernet(OWN_MAC, [0xff; 6], 0x0806, &body)
}

fn at(address: [u8; 4], port: u16) -> SocketAddr {
    SocketAddr::new(address.into(), port)
}

/// The identity: every frame has one fate.
fn closes(fence: &Fence) {
    let Counts { sent, received } = fence.counts();
    for passed in [sent, received] {
        assert_eq!(passed.all, passed.passed() + passed.dropped(), "{passed:?}");
    }
}

#[test]
fn what_no_call_permitted_does_not_leave_and_what_one_did_leaves_to_that_port_alone() {
    let fence = fence();
    let tcp = |to, port| out(TCP, to, &ports(40_000, port));
    for frame in [
        tcp(PEER, 443),
        out(UDP, PEER, &ports(40_000, 443)),
        out(ICMP, PEER, &[8, 0, 0, 0, 0, 1, 0, 1]),
        out(47, PEER, &[0; 20]),
        arp_request(OWN, PEER),
    ] {
        assert!(!fence.leaves(&frame), "{frame:02x?}");
        assert!(!fence.enters(&back(TCP, PEER, &ports(443, 40_000))));
    }
    assert_eq!(fence.counts().sent.denied, 5);
    fence.permit(Transport::Tcp, at(PEER, 443));
    assert!(fence.leaves(&arp_request(OWN, PEER)));
    assert!(fence.leaves(&tcp(PEER, 443)));
    assert!(fence.enters(&back(TCP, PEER, &ports(443, 40_000))));
    for frame in [
        tcp(PEER, 80),
        tcp(STRANGER, 443),
        out(UDP, PEER, &ports(40_000, 443)),
        out(ICMP, PEER, &[8, 0, 0, 0, 0, 1, 0, 1]),
        arp_request(OWN, STRANGER),
    ] {
        assert!(!fence.leaves(&frame), "{frame:02x?}");
    }
    closes(&fence);
}

#[test]
fn an_address_of_ipv4_is_the_same_however_it_is_written() {
    let fence = fence();
    let mapped = Ipv4Addr::from(PEER).to_ipv6_mapped();
    fence.permit(Transport::Udp, (mapped, 53).into());
    assert!(fence.leaves(&out(UDP, PEER, &ports(1, 53))));
}

#[test]
fn who_comes_to_a_port_that_listens_is_answered_and_nobody_else() {
    let fence = fence();
    let comes = |from, port| back(TCP, from, &ports(50_000, port));
    let answer = |to, port| out(TCP, to, &ports(port, 50_000));
    assert!(!fence.enters(&comes(PEER, 80)) && !fence.leaves(&answer(PEER, 80)));
    fence.listen(Transport::Tcp, 80);
    assert!(!fence.enters(&comes(PEER, 81)));
    assert!(!fence.leaves(&answer(PEER, 80)), "nobody came");
    assert!(fence.enters(&comes(PEER, 80)));
    assert!(fence.leaves(&answer(PEER, 80)));
    // Not from another port, nor to another one, nor to somebody else.
    // A port that the kernel chose is one of those from which it does.
    let chosen = back(TCP, STRANGER, &ports(50_000, 40_000));
    assert!(!fence.enters(&chosen));
    fence.listen(Transport::Tcp, 0);
    assert!(fence.enters(&chosen) && !fence.enters(&comes(STRANGER, 8080)));
    for frame in [
        answer(PEER, 81),
        out(TCP, PEER, &ports(80, 50_001)),
        answer(STRANGER, 80),
        out(UDP, PEER, &ports(80, 50_000)),
    ] {
        assert!(!fence.leaves(&frame), "{frame:02x?}");
    }
    closes(&fence);
}

#[test]
fn a_socket_of_our_own_speaks_and_no_other_one_to_the_same_place() {
    let fence = fence();
    fence.permit_port(Transport::Udp, at(PEER, 53), 2053);
    assert!(fence.leaves(&out(UDP, PEER, &ports(2053, 53))));
    assert!(fence.enters(&back(UDP, PEER, &ports(53, 2053))));
    assert!(!fence.leaves(&out(UDP, PEER, &ports(2054, 53))));
    assert!(!fence.enters(&back(UDP, PEER, &ports(53, 2054))));
    assert!(fence.leaves(&arp_request(OWN, PEER)));
    // It is closed, and another socket gets its port.
    fence.revoke_port(Transport::Udp, at(PEER, 53), 2053);
    assert!(!fence.leaves(&out(UDP, PEER, &ports(2053, 53))));
    assert!(!fence.enters(&back(UDP, PEER, &ports(53, 2053))));
    assert!(!fence.leaves(&arp_request(OWN, PEER)));
    // A connection's last words.
    fence.permit_port(Transport::Tcp, at(PEER, 53), 2053);
    fence.revoke_port(Transport::Tcp, at(PEER, 53), 2053);
    assert!(fence.leaves(&out(TCP, PEER, &ports(2053, 53))));
    std::thread::sleep(CLOSING);
    assert!(!fence.leaves(&out(TCP, PEER, &ports(2053, 53))));
    closes(&fence);
}

#[test]
fn a_rule_that_asks_for_no_program_lets_packets_pass() {
    let fence = ruled(|transport, to| (transport, to) == (Transport::Udp, at(PEER, 123)));
    assert!(fence.leaves(&out(UDP, PEER, &ports(1, 123))));
    assert!(!fence.leaves(&out(UDP, PEER, &ports(1, 124))));
    let sent = fence.counts().sent;
    assert_eq!((sent.ruled, sent.denied, sent.permitted), (1, 1, 0));
}

#[test]
fn only_the_parts_of_a_datagram_follow_its_first_one() {
    let fence = fence();
    fence.permit(Transport::Udp, at(PEER, 53));
    let part = |to, fragment: u16, body: &[u8]| {
        let packet = ipv4_packet(UDP, OWN, to, fragment, body);
        ethernet(OWN_MAC, OTHER_MAC, 0x0800, &packet)
    };
    // Bytes that look like permitted ports are none in a later part.
    assert!(!fence.leaves(&part(PEER, 185, &ports(1, 53))));
    assert!(!fence.leaves(&part(PEER, 0x2000, &ports(1, 54))));
    assert!(!fence.leaves(&part(PEER, 185, &[0; 40])));
    assert!(fence.leaves(&part(PEER, 0x2000, &ports(1, 53))));
    assert!(fence.leaves(&part(PEER, 185, &[0; 40])));
    assert!(!fence.leaves(&part(STRANGER, 185, &[0; 40])));
    // Another first part with the same number does not pass: nothing follows it.
    assert!(!fence.leaves(&part(PEER, 0x2000, &ports(1, 54))));
    assert!(!fence.leaves(&part(PEER, 185, &[0; 40])));
    // Nor follows anything long after.
    assert!(fence.leaves(&part(PEER, 0x2000, &ports(1, 53))));
    let parts = (OWN.into(), PEER.into(), UDP, 7);
    let now = Instant::now();
    assert!(fence.lock().parts.lives(&parts, now));
    assert!(!fence.lock().parts.lives(&parts, now + PARTS_LAST));
    closes(&fence);
}

#[test]
fn what_is_in_parts_has_no_name_and_none_of_it_leaves() {
    let shared = Arc::new(fence());
    let fence: &Fence = &shared;
    let part = |identity: u8, fragment: u16, body: &[u8]| {
        let mut packet = ipv4_packet(TCP, OWN, PEER, fragment, body);
        packet[5] = identity;
        ethernet(OWN_MAC, OTHER_MAC, 0x0800, &packet)
    };
    let mut body = ports(40_000, 443);
    body[12] = 0x50;
    fence.permit(Transport::Tcp, at(PEER, 443));
    // The control: nothing is compared.
    assert!(fence.leaves(&part(1, 0x2000, &body)) && fence.leaves(&part(1, 3, &[0; 40])));
    let names = Some(vec![Name::new("a.org").unwrap()]);
    let begins = shared
        .connects(&Arc::default(), at(PEER, 443), names)
        .unwrap();
    begins.tell(Some(at(OWN, 40_000)));
    assert!(!fence.leaves(&part(2, 0x2000, &body)));
    assert!(!fence.leaves(&part(2, 3, &[0; 40])));
    closes(fence);
}

#[test]
fn a_socket_of_our_own_and_who_comes_speak_with_a_peer_that_was_allowed_by_name() {
    let shared = Arc::new(fence());
    let fence: &Fence = &shared;
    let names = Some(vec![Name::new("a.org").unwrap()]);
    drop(shared.connects(&Arc::default(), at(PEER, 53), names));
    let segment = |flags: u8, from, to, data: &[u8]| {
        let mut body = ports(from, to);
        (body[12], body[13]) = (0x50, flags);
        [&body[..], data].concat()
    };
    let speaks =
        |own, flags, data: &[u8]| fence.leaves(&out(TCP, PEER, &segment(flags, own, 53, data)));
    let hears = |own, flags| fence.enters(&back(TCP, PEER, &segment(flags, 53, own, &[])));
    let (syn, ack, words) = (2, 0x10, b"words");
    fence.permit_port(Transport::Tcp, at(PEER, 53), 2053);
    assert!(speaks(2053, syn, &[]) && hears(2053, syn | ack) && speaks(2053, ack, words));
    // Who comes from there to a port that listens.
    fence.listen(Transport::Tcp, 80);
    assert!(hears(80, syn) && speaks(80, syn | ack, &[]) && speaks(80, ack, words));
    // The control: one that no call has begun.
    fence.permit(Transport::Tcp, at(PEER, 53));
    assert!(speaks(2054, syn, &[]) && hears(2054, syn | ack) && !speaks(2054, ack, words));
    closes(fence);
}

#[test]
fn each_datagram_of_quic_is_looked_at_and_none_in_parts_leaves() {
    let fence = fence();
    fence.permit(Transport::Udp, at(PEER, 443));
    let datagram = |own: u16, content: &[u8]| {
        let length = (8 + content.len()) as u16;
        let head = [own, 443, length, 0].map(u16::to_be_bytes);
        [&head.concat()[..], content].concat()
    };
    let first = |id: u8, name: &str| {
        let id = [id; 8];
        let mut text = crypto(0, &hello(&[name], 9000)[5..]);
        text.resize(300, 0);
        packet(&id, &id, 0, &text)
    };
    let leaves = |own, content: &[u8]| fence.leaves(&out(UDP, PEER, &datagram(own, content)));
    // The control: nothing is compared.
    assert!(leaves(1, &first(1, "c.org")));
    let names = Some(vec![Name::new("a.org").unwrap()]);
    assert!(fence.speaks(&Arc::default(), at(PEER, 443), names));
    assert!(leaves(1, &first(2, "a.org")) && !leaves(1, &first(3, "c.org")));
    // The second datagram of a super-frame. The control: as one, it would be what fills the first one up.
    let (good, bad) = (
        [&first(4, "a.org")[..], &[0; 9]].concat(),
        first(5, "c.org"),
    );
    let both = out(UDP, PEER, &datagram(1, &[&good[..], &bad].concat()));
    assert!(fence.leaves(&both) && !fence.leaves_cut(&both, good.len()));
    // In parts, of which the second has the rest.
    let part = |content: &[u8]| {
        let packet = ipv4_packet(UDP, OWN, PEER, 0x2000, &datagram(1, content));
        fence.leaves(&ethernet(OWN_MAC, OTHER_MAC, 0x0800, &packet))
    };
    assert!(!part(&bad[..80]) && part(&[7; 80]));
    // The supervisor's own.
    fence.permit_port(Transport::Udp, at(PEER, 443), 2053);
    assert!(leaves(2053, &first(6, "c.org")));
    closes(&fence);
}

#[test]
fn a_call_that_ends_untold_has_made_no_connection() {
    let fence = Arc::new(fence());
    let names = || Some(vec![Name::new("a.org").unwrap()]);
    let connects = || fence.connects(&Arc::default(), at(PEER, 443), names());
    let first = connects().unwrap();
    drop(connects());
    first.tell(Some("[::ffff:10.0.0.9]:40000".parse().unwrap()));
    let served = format!("{:?}", fence.lock().served);
    assert!(served.contains("calls: {}"), "{served}");
    assert!(
        served.contains("10.0.0.9:40000") && !served.contains("ffff"),
        "{served}"
    );
}

#[test]
fn errors_come_in_only_about_what_was_permitted() {
    let fence = fence();
    fence.permit(Transport::Udp, at(PEER, 53));
    let about = |to| {
        let inner = ipv4_packet(UDP, OWN, to, 0, &ports(1, 53));
        back(
            ICMP,
            ROUTER,
            &[&[3, 4, 0, 0, 0, 0, 0, 0][..], &inner].concat(),
        )
    };
    assert!(fence.enters(&about(PEER)));
    assert!(!fence.enters(&about(STRANGER)));
    assert!(!fence.enters(&back(ICMP, ROUTER, &[3, 4, 0, 0])));
    // A ping that nobody expects is not answered, since it does not come in.
    assert!(!fence.enters(&back(ICMP, PEER, &[8, 0, 0, 0, 0, 0, 0, 0])));
    fence.permit(Transport::Icmp, at(PEER, 0));
    assert!(fence.leaves(&out(ICMP, PEER, &[8, 0, 0, 0, 0, 0, 0, 0])));
    assert!(fence.enters(&back(ICMP, PEER, &[0, 0, 0, 0, 0, 0, 0, 0])));
}

#[test]
fn frames_of_others_tags_and_ways_in_the_header_never_leave() {
    let fence = fence();
    fence.permit(Transport::Tcp, at(PEER, 443));
    fence.permit(Transport::Raw, at(PEER, 0));
    let tcp = ipv4_packet(TCP, OWN, PEER, 0, &ports(1, 443));
    let forged = ipv4_packet(TCP, STRANGER, PEER, 0, &ports(1, 443));
    // A loose source route: the packet goes by way of the permitted one to another.
    let mut routed = ipv4_packet(TCP, OWN, PEER, 0, &[131, 7, 4, 10, 0, 0, 3, 0]);
    routed[0] = 0x47;
    routed.extend(ports(1, 443));
    for (frame, is_foreign) in [
        (ethernet(OTHER_MAC, OTHER_MAC, 0x0800, &tcp), true),
        (ethernet(OWN_MAC, OTHER_MAC, 0x0800, &forged), true),
        (arp_request(STRANGER, PEER), true),
        (ethernet(OWN_MAC, OTHER_MAC, 0x0800, &routed), false),
        (
            ethernet(
                OWN_MAC,
                OTHER_MAC,
                0x8100,
                &[&[0, 5, 8, 0], &tcp[..]].concat(),
            ),
            false,
        ),
        (ethernet(OWN_MAC, OTHER_MAC, 0x86dd, &tcp), false),
        (ethernet(OWN_MAC, OTHER_MAC, 0x88cc, &tcp), false),
        (ethernet(OWN_MAC, OTHER_MAC, 0x0800, &tcp[..19]), false),
        (OWN_MAC.to_vec(), true),
        (Vec::new(), true),
    ] {
        let before = fence.counts().sent;
        assert!(!fence.leaves(&frame), "{frame:02x?}");
        let after = fence.counts().sent;
        let grew = (after.foreign - before.foreign, after.odd - before.odd);
        assert_eq!(
            grew,
            (u64::from(is_foreign), u64::from(!is_foreign)),
            "{frame:02x?}"
        );
    }
    assert!(fence.leaves(&ethernet(OWN_MAC, OTHER_MAC, 0x0800, &tcp)));
    assert!(fence.leaves(&out(47, PEER, &[0; 8])), "a raw socket may");
    closes(&fence);
}

fn ipv6_out(from: &str, to: &str, protocol: u8, hops: u8, body: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, 0, protocol, hops];
    for address in [from, to] {
        let address: std::net::Ipv6Addr = address.parse().unwrap();
        packet.extend(address.octets());
    }
    packet.extend(body);
    packet
}

#[test]
fn neighbours_are_looked_for_only_where_they_were_permitted_and_routers_are_learnt() {
    let fence = fence();
    let ask = |from, target: &str| {
        let target: std::net::Ipv6Addr = target.parse().unwrap();
        let body = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat();
        let [.., last] = target.octets();
        let group = format!("ff02::1:ff00:{last:x}");
        let packet = ipv6_out(from, &group, ICMPV6, 255, &body);
        ethernet(OWN_MAC, [0x33, 0x33, 0xff, 0, 0, last], 0x86dd, &packet)
    };
    // Is the address that the kernel made itself still free?
    assert!(fence.leaves(&ask("::", "fe80::9")));
    assert!(!fence.leaves(&ask("fe80::9", "fd00::2")));
    assert!(!fence.leaves(&ask("fe80::9", "fe80::1")));
    let advertisement = ipv6_out("fe80::1", "ff02::1", ICMPV6, 255, &[134, 0, 0, 0]);
    let group = [0x33, 0x33, 0, 0, 0, 1];
    assert!(fence.enters(&ethernet(OTHER_MAC, group, 0x86dd, &advertisement)));
    assert!(fence.leaves(&ask("fe80::9", "fe80::1")));
    let peer: IpAddr = "fd00::2".parse().unwrap();
    fence.permit(Transport::Tcp, (peer, 443).into());
    assert!(fence.leaves(&ask("fe80::9", "fd00::2")));
    let tcp = ipv6_out("fd00::9", "fd00::2", TCP, 64, &ports(1, 443));
    assert!(fence.leaves(&ethernet(OWN_MAC, OTHER_MAC, 0x86dd, &tcp)));
    // By a routing header it would go elsewhere.
    let mut routed = ipv6_out("fd00::9", "fd00::2", 43, 64, &[TCP, 2, 0, 1, 0, 0, 0, 0]);
    routed.extend([0; 16]);
    routed.extend(ports(1, 443));
    assert!(!fence.leaves(&ethernet(OWN_MAC, OTHER_MAC, 0x86dd, &routed)));
    closes(&fence);
}

#[test]
fn an_open_fence_and_a_packet_socket_let_all_pass() {
    for opened in [true, false] {
        let fence = fence();
        match opened {
            true => fence.open(),
            false => fence.permit(Transport::Packet, at([0; 4], 0)),
        }
        assert!(fence.leaves(&out(TCP, STRANGER, &ports(1, 80))));
        assert!(fence.enters(&back(TCP, STRANGER, &ports(80, 1))));
        closes(&fence);
    }
}

/// A frame of IPv6 with these extension headers.
fn out6(from: &str, to: &str, mac: [u8; 6], hops: u8, between: &[u8], body: &[u8]) -> Vec<u8> {
    let first = if between.is_empty() { ICMPV6 } else { 0 };
    let packet = ipv6_out(from, to, first, hops, &[between, body].concat());
    ethernet(OWN_MAC, mac, 0x86dd, &packet)
}

/// Which frames leave, and that they leave no longer with any byte more, with another hop count or to another station.
fn leaves_in_this_form_only(fence: &Fence, frame: &[u8], hops_at: usize) {
    assert!(fence.leaves(frame), "{frame:02x?}");
    let mut longer = frame.to_vec();
    longer.extend(b"a secret");
    assert!(!fence.leaves(&longer), "{longer:02x?}");
    let mut hops = frame.to_vec();
    hops[hops_at] = 64;
    assert!(!fence.leaves(&hops), "{hops:02x?}");
    if frame[0] & 1 == 1 {
        let unicast = [&OTHER_MAC[..], &frame[6..]].concat();
        assert!(!fence.leaves(&unicast), "{unicast:02x?}");
    }
}

#[test]
fn groups_are_reported_in_their_form_to_groups_alone() {
    let fence = fence();
    let igmp = |to: [u8; 4], options: &[u8], body: &[u8]| {
        let mut packet = ipv4_packet(IGMP, OWN, to, 0, &[options, body].concat());
        packet[0] = 0x45 + (options.len() / 4) as u8;
        packet[8] = 1;
        let mac = [1, 0, 0x5e, to[1] & 0x7f, to[2], to[3]];
        ethernet(OWN_MAC, mac, 0x0800, &packet)
    };
    let alert = [148, 4, 0, 0];
    let two = [
        &[0x22, 0, 9, 9, 0, 0, 0, 2][..],
        &[4, 0, 0, 0, 224, 0, 0, 251],
        &[1, 0, 0, 1, 239, 1, 1, 1, 10, 0, 0, 2],
    ]
    .concat();
    leaves_in_this_form_only(&fence, &igmp([224, 0, 0, 22], &alert, &two), 22);
    let one = [0x16, 0, 9, 9, 239, 1, 1, 1];
    leaves_in_this_form_only(&fence, &igmp([239, 1, 1, 1], &alert, &one), 22);
    let leave = [0x17, 0, 9, 9, 239, 1, 1, 1];
    leaves_in_this_form_only(&fence, &igmp([224, 0, 0, 2], &alert, &leave), 22);
    let many = [
        &[0x22, 0, 9, 9, 0, 0, 1, 0][..],
        &[4, 0, 0, 0, 239, 0, 0, 1].repeat(256),
    ]
    .concat();
    for frame in [
        igmp(STRANGER, &alert, &one),
        igmp([224, 0, 0, 22], &alert, b"any bytes"),
        igmp([224, 0, 0, 22], &[], &two),
        igmp([239, 1, 1, 2], &alert, &one),
        igmp([224, 0, 0, 22], &alert, &many),
    ] {
        assert!(!fence.leaves(&frame), "{frame:02x?}");
    }
    let alert = [58, 0, 5, 2, 0, 0, 1, 0];
    let group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 9];
    let record = [&[143, 0, 9, 9, 0, 0, 0, 1, 4, 0, 0, 0][..], &group].concat();
    let to = [0x33, 0x33, 0, 0, 0, 0x16];
    for from in ["::", OWN6] {
        let frame = out6(from, "ff02::16", to, 1, &alert, &record);
        leaves_in_this_form_only(&fence, &frame, 21);
    }
    for frame in [
        out6(OWN6, "fd00::2", OTHER_MAC, 1, &alert, &record),
        out6(OWN6, "ff02::16", to, 1, &[], &record),
        out6(
            OWN6,
            "ff02::16",
            to,
            1,
            &alert,
            &[&[143, 0, 9, 9, 0, 0, 0, 2][..], &record[8..]].concat(),
        ),
        out6(OWN6, "ff02::16", to, 1, &alert, &[130, 0, 0, 0]),
    ] {
        assert!(!fence.leaves(&frame), "{frame:02x?}");
    }
    assert_eq!(fence.counts().sent.kept, 5);
    closes(&fence);
}

#[test]
fn neighbours_and_routers_are_told_who_we_are_and_no_more() {
    let fence = fence();
    let routers = [0x33, 0x33, 0, 0, 0, 2];
    let link = |kind: u8| [&[kind, 1][..], &OWN_MAC].concat();
    let solicitation = [&[133, 0, 9, 9, 0, 0, 0, 0][..], &link(1)].concat();
    let frame = out6(OWN6, "ff02::2", routers, 255, &[], &solicitation);
    leaves_in_this_form_only(&fence, &frame, 21);
    assert!(!fence.leaves(&out6(OWN6, "fd00::2", OTHER_MAC, 255, &[], &solicitation)));

    let own: std::net::Ipv6Addr = OWN6.parse().unwrap();
    let free = [&[135, 0, 9, 9, 0, 0, 0, 0][..], &own.octets()].concat();
    let nonce = [&free[..], &[14, 1, 1, 2, 3, 4, 5, 6]].concat();
    let node = [0x33, 0x33, 0xff, 0, 0, 9];
    let frame = out6("::", "ff02::1:ff00:9", node, 255, &[], &nonce);
    leaves_in_this_form_only(&fence, &frame, 21);
    assert!(!fence.leaves(&out6("::", "fd00::2", OTHER_MAC, 255, &[], &free)));
    assert!(!fence.leaves(&out6("::", "ff02::1:ff00:8", node, 255, &[], &free)));

    let tell = |target: std::net::Ipv6Addr| {
        [
            &[136, 0, 9, 9, 0x60, 0, 0, 0][..],
            &target.octets(),
            &link(2),
        ]
        .concat()
    };
    let answer = out6(OWN6, "fd00::2", OTHER_MAC, 255, &[], &tell(own));
    assert!(!fence.leaves(&answer), "nobody asked");
    let asks = ipv6_out("fd00::2", OWN6, ICMPV6, 255, &free);
    assert!(fence.enters(&ethernet(OTHER_MAC, OWN_MAC, 0x86dd, &asks)));
    leaves_in_this_form_only(&fence, &answer, 21);
    let other = tell("fe80::8".parse().unwrap());
    assert!(!fence.leaves(&out6(OWN6, "fd00::2", OTHER_MAC, 255, &[], &other)));
    closes(&fence);
}

#[test]
fn arp_has_its_length_and_answers_who_asked() {
    let fence = fence();
    let request = arp_request(OWN, ROUTER);
    assert!(fence.leaves(&request));
    assert!(fence.leaves(&[&request[..], &[0; 18]].concat()));
    for more in [&[0; 1][..], &[0; 19], &[1; 18]] {
        assert!(!fence.leaves(&[&request[..], more].concat()), "{more:?}");
    }
    let mut answer = arp_request(OWN, STRANGER);
    answer[..6].copy_from_slice(&OTHER_MAC);
    answer[21] = 2;
    answer[32..38].copy_from_slice(&OTHER_MAC);
    assert!(!fence.leaves(&answer), "nobody asked");
    let mut asks = arp_request(STRANGER, OWN);
    asks[6..12].copy_from_slice(&OTHER_MAC);
    asks[..6].copy_from_slice(&[0xff; 6]);
    assert!(fence.enters(&asks));
    assert!(fence.leaves(&answer));
    answer[32..38].copy_from_slice(b"secret");
    assert!(!fence.leaves(&answer));
    closes(&fence);
}

#[test]
fn a_sender_of_ipv6_is_one_that_the_kernel_has() {
    let fence = fence();
    let peer: IpAddr = "fd00::2".parse().unwrap();
    fence.permit(Transport::Raw, (peer, 0).into());
    let packet = |from| {
        let packet = ipv6_out(from, "fd00::2", UDP, 64, &ports(1, 443));
        ethernet(OWN_MAC, OTHER_MAC, 0x86dd, &packet)
    };
    assert!(fence.leaves(&packet(OWN_GLOBAL)));
    for from in ["fd00::8", "::", "fe80::8", "::ffff:10.0.0.9"] {
        assert!(!fence.leaves(&packet(from)), "{from}");
    }
    assert_eq!(fence.counts().sent.foreign, 4);
    closes(&fence);
}

#[test]
fn what_is_permitted_once_passes_for_one_connection_and_not_for_another() {
    let fence = fence();
    let act = crate::ask::tests::connect(7, &at(PEER, 443).to_string());
    let segment = |flags: u8, from, to| {
        let mut body = ports(from, to);
        (body[12], body[13]) = (0x50, flags);
        body
    };
    let sends = |own, flags| fence.leaves(&out(TCP, PEER, &segment(flags, own, 443)));
    let comes = |own, flags| fence.enters(&back(TCP, PEER, &segment(flags, 443, own)));
    const SYN: u8 = 2;
    const ACK: u8 = 0x10;
    assert!(!sends(40_000, SYN) && !fence.leaves(&arp_request(OWN, PEER)));
    fence.allow_briefly(&act);
    assert!(fence.leaves(&arp_request(OWN, PEER)));
    assert!(sends(40_000, SYN) && comes(40_000, SYN | ACK) && sends(40_000, ACK));
    // Nobody else speaks in its shadow.
    assert!(!sends(40_001, ACK) && !comes(40_001, ACK));
    // The control: what is permitted for good.
    fence.allow(&act);
    assert!(sends(40_001, ACK) && comes(40_001, ACK));
    closes(&fence);
}

#[test]
fn any_number_of_permissions_takes_bounded_memory_and_who_is_spoken_with_stays() {
    let fence = fence();
    let tcp = out(TCP, PEER, &ports(40_000, 443));
    fence.permit(Transport::Tcp, at(PEER, 443));
    for number in 0..200_000_u32 {
        let [_, b, c, d] = number.to_be_bytes();
        fence.permit(Transport::Udp, at([11, b, c, d], 53));
        if number % 1000 == 0 {
            assert!(fence.leaves(&tcp), "{number}");
        }
    }
    assert!(fence.leaves(&arp_request(OWN, PEER)));
    let state = fence.lock();
    assert!(state.permitted.len() <= MOST_PERMITTED && state.known.len() <= MOST_PERMITTED);
}

/// Linux 6.x on an interface with an IPv4 and an IPv6 address: groups are joined and left, somebody asks for both
/// addresses, two others are looked for.
#[test]
fn what_fills_a_short_frame_is_no_data() {
    let carried = [0; 26];
    let mut packet = ipv6_out("fd00::2", "fd00::9", TCP, 64, &carried[..20]);
    packet[5] = 20;
    packet.extend([0; 6]);
    let seen = ipv6(&packet).unwrap();
    assert_eq!((seen.body.len(), seen.unpadded().len()), (26, 20));
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, TCP, 0, 0];
    packet.extend([10, 0, 0, 2, 10, 0, 0, 9]);
    packet.extend(carried);
    assert_eq!(ipv4(&packet).unwrap().unpadded().len(), 20);
    // A super-frame whose length the field cannot say; what an error quotes of a longer one.
    for len in [0, 200] {
        packet[3] = len;
        assert_eq!(ipv4(&packet).unwrap().unpadded().len(), 26, "{len}");
    }
}

#[test]
fn what_a_real_kernel_sends_by_itself_leaves() {
    let own: IpAddr = "fd00::9".parse().unwrap();
    let fence = Fence::new(OWN_MAC, &[OWN.into(), own], &[ROUTER.into()]);
    let made = || Some(vec!["fe80::ff:fe00:9".parse().unwrap()]);
    fence.ask_addresses(Box::new(made));
    let sought: IpAddr = "fd00::3".parse().unwrap();
    fence.permit(Transport::Udp, (sought, 9).into());
    let mut asks = arp_request(PEER, OWN);
    asks[..6].copy_from_slice(&[0xff; 6]);
    assert!(fence.enters(&asks));
    let mut asks = vec![135, 0, 0, 0, 0, 0, 0, 0];
    asks.extend("fd00::9".parse::<std::net::Ipv6Addr>().unwrap().octets());
    let asks = ipv6_out("fd00::2", "ff02::1:ff00:9", ICMPV6, 255, &asks);
    assert!(fence.enters(&ethernet(
        OTHER_MAC,
        [0x33, 0x33, 0xff, 0, 0, 9],
        0x86dd,
        &asks
    )));
    let frames = include_str!("kernel_frames.txt");
    for line in frames.lines() {
        let byte = |at: usize| u8::from_str_radix(&line[at..at + 2], 16).unwrap();
        let mut frame: Vec<u8> = (0..line.len()).step_by(2).map(byte).collect();
        assert!(fence.leaves(&frame), "{line}");
        frame.push(0);
        assert!(!fence.leaves(&frame), "{line}");
    }
    let sent = fence.counts().sent;
    assert_eq!(sent.kept, frames.lines().count() as u64);
    closes(&fence);
}
