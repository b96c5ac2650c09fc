//! Datagrams in parts, and peers that were allowed by name.

use super::*;
use crate::wire::hello::tests::hello;
use crate::wire::initial::tests::{crypto, packet};

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
