//! What a kernel sends by itself: it looks for neighbours, and tells who it is and what groups it is in.

use std::net::IpAddr;

use super::*;

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

/// Linux 6.x on an interface with an IPv4 and an IPv6 address: groups are joined and left, somebody asks for both
/// addresses, two others are looked for.
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
    let frames = include_str!("../kernel_frames.txt");
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
