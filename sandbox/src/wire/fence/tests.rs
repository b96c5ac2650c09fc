//! The fence, frame by frame.

mod kernel;
mod named;

use std::net::{Ipv4Addr, SocketAddr};

use super::*;

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
