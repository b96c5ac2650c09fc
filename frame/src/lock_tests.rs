//! Frames of others, in every way that they can say whose they are.

use super::*;

const OWN: Address = [2, 0, 0, 0, 0, 1];
const OTHER: Address = [2, 0, 0, 0, 0, 9];

fn lock(macs: &[Address], vlans: &str, networks: &str) -> SourceLock {
    SourceLock {
        stations: macs.to_vec(),
        vlans: (!vlans.is_empty()).then(|| vlans.parse().unwrap()),
        networks: match networks {
            "" => Networks::ANY,
            text => text.parse().unwrap(),
        },
    }
}

fn ethernet(from: Address, tags: &[u16], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [[0xff; 6], from].concat();
    for tci in tags {
        frame.extend([0x81, 0]);
        frame.extend(tci.to_be_bytes());
    }
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame
}

fn four(from: [u8; 4]) -> Vec<u8> {
    let mut packet = vec![0x45; 40];
    packet[12..16].copy_from_slice(&from);
    packet
}

fn arp(station: Address, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let head: &[u8] = &[0, 1, 8, 0, 6, 4, 0, 1];
    [head, &station, &sender, &[0; 6], &target].concat()
}

fn six(from: &str, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 40];
    (packet[0], packet[6]) = (0x60, protocol);
    packet[8..24].copy_from_slice(&from.parse::<Ipv6Addr>().unwrap().octets());
    packet.extend(payload);
    packet
}

/// A message of neighbour discovery with a link-layer option.
fn neighbour(kind: u8, target: &str, option: u8, station: Address) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    message.extend(target.parse::<Ipv6Addr>().unwrap().octets());
    message.extend([option, 1]);
    message.extend(station);
    message
}

#[test]
fn who_may_send_as_some_stations_sends_as_no_other() {
    let lock = lock(&[OWN, [2, 0, 0, 0, 0, 2]], "", "");
    let packet = four([10, 0, 0, 1]);
    assert_eq!(lock.judge(&ethernet(OWN, &[], IPV4, &packet)), Ok(()));
    for frame in [
        ethernet(OTHER, &[], IPV4, &packet),
        ethernet([0; 6], &[], IPV4, &packet),
        // What it says in ARP and neighbour discovery is what others believe.
        ethernet(OWN, &[], ARP, &arp(OTHER, [10, 0, 0, 1], [10, 0, 0, 2])),
        ethernet(OWN, &[5], ARP, &arp(OTHER, [10, 0, 0, 1], [10, 0, 0, 2])),
        ethernet(OWN, &[], ARP, &[0; 27]),
        ethernet(
            OWN,
            &[],
            IPV6,
            &six("fe80::1", 58, &neighbour(136, "fe80::1", 2, OTHER)),
        ),
        ethernet(
            OWN,
            &[],
            IPV6,
            &six("fe80::1", 58, &neighbour(135, "fe80::2", 1, OTHER)),
        ),
    ] {
        assert_eq!(lock.judge(&frame), Err(Against::Station), "{frame:?}");
    }
    for frame in [
        ethernet(OWN, &[], ARP, &arp(OWN, [10, 0, 0, 1], [10, 0, 0, 2])),
        ethernet(
            OWN,
            &[],
            IPV6,
            &six("fe80::1", 58, &neighbour(136, "fe80::1", 2, OWN)),
        ),
        // Other options have no address.
        ethernet(
            OWN,
            &[],
            IPV6,
            &six("fe80::1", 58, &neighbour(135, "fe80::2", 14, OTHER)),
        ),
    ] {
        assert_eq!(lock.judge(&frame), Ok(()), "{frame:?}");
    }
}

#[test]
fn a_second_option_and_headers_before_them_hide_nothing() {
    let lock = lock(&[OWN], "", "");
    let mut message = neighbour(136, "fe80::1", 2, OWN);
    message.extend([2, 1]);
    message.extend(OTHER);
    let plain = six("fe80::1", 58, &message);
    assert_eq!(
        lock.judge(&ethernet(OWN, &[], IPV6, &plain)),
        Err(Against::Station)
    );
    // Behind a header of destination options.
    let behind = [
        &[58, 0, 0, 0, 0, 0, 0, 0],
        &neighbour(136, "fe80::1", 2, OTHER)[..],
    ]
    .concat();
    let behind = six("fe80::1", 60, &behind);
    assert_eq!(
        lock.judge(&ethernet(OWN, &[], IPV6, &behind)),
        Err(Against::Station)
    );
    // An option whose length leads nowhere.
    let mut broken = neighbour(136, "fe80::1", 2, OWN);
    broken[25] = 0;
    let broken = six("fe80::1", 58, &broken);
    assert_eq!(
        lock.judge(&ethernet(OWN, &[], IPV6, &broken)),
        Err(Against::Station)
    );
}

#[test]
fn a_frame_is_of_a_vlan_that_is_named_and_has_one_tag_at_most() {
    let packet = four([10, 0, 0, 1]);
    let judge = |vlans: &str, tags: &[u16]| {
        lock(&[], vlans, "")
            .judge(&ethernet(OWN, tags, IPV4, &packet))
            .is_ok()
    };
    for (vlans, tags, may) in [
        ("no", &[][..], true),
        ("no", &[0xe000], true),
        ("no", &[10], false),
        ("10", &[], false),
        ("10+20-22", &[0xe000 | 21], true),
        ("10+20-22", &[23], false),
        ("no+10", &[], true),
        ("10", &[10, 20], false),
        ("10", &[10, 10], false),
        ("no", &[0, 10], false),
    ] {
        assert_eq!(judge(vlans, tags), may, "{vlans} {tags:?}");
    }
    for bad in ["", "0", "4095", "x", "5-3"] {
        assert!(bad.parse::<Vlans>().is_err(), "{bad}");
    }
    for text in ["no", "no+10", "10+20-22"] {
        assert_eq!(text.parse::<Vlans>().unwrap().to_string(), text);
    }
}

#[test]
fn what_comes_from_a_network_that_is_not_named_is_refused_and_what_cannot_be_judged_too() {
    let lock = lock(&[], "", "10.0.0.0/8+192.168.7.9+fe80::/10+2001:db8::5");
    let judge = |ethertype, packet: &[u8]| lock.judge(&ethernet(OTHER, &[], ethertype, packet));
    for from in [[10, 0, 0, 1], [10, 255, 255, 255], [192, 168, 7, 9]] {
        assert_eq!(judge(IPV4, &four(from)), Ok(()), "{from:?}");
        assert_eq!(judge(ARP, &arp(OTHER, from, [8, 8, 8, 8])), Ok(()));
    }
    for from in [[11, 0, 0, 1], [9, 255, 255, 255], [192, 168, 7, 8], [0; 4]] {
        assert_eq!(judge(IPV4, &four(from)), Err(Against::Network), "{from:?}");
        let told = arp(OTHER, from, [8, 8, 8, 8]);
        assert_eq!(judge(ARP, &told), Err(Against::Network), "{from:?}");
    }
    // Whether an address of its own is free.
    assert_eq!(judge(ARP, &arp(OTHER, [0; 4], [10, 0, 0, 7])), Ok(()));
    for from in ["fe80::1", "febf::1", "2001:db8::5"] {
        assert_eq!(judge(IPV6, &six(from, 17, &[0; 8])), Ok(()), "{from}");
    }
    for from in ["fec0::1", "2001:db8::6", "::"] {
        let refused = Err(Against::Network);
        assert_eq!(judge(IPV6, &six(from, 17, &[0; 8])), refused, "{from}");
    }
    let announces = |from: &str, kind, target: &str| {
        judge(IPV6, &six(from, 58, &neighbour(kind, target, 2, OTHER)))
    };
    assert_eq!(announces("fe80::1", 136, "fe80::1"), Ok(()));
    assert_eq!(
        announces("fe80::1", 136, "2001:db8::1"),
        Err(Against::Network)
    );
    assert_eq!(announces("fe80::1", 135, "2001:db8::1"), Ok(()));
    assert_eq!(announces("::", 135, "fe80::1"), Ok(()));
    assert_eq!(announces("::", 135, "2001:db8::1"), Err(Against::Network));
    // Not IP, cut, of another version, and more headers than are understood.
    let refused = Err(Against::Network);
    assert_eq!(judge(0x88cc, &[0; 46]), refused);
    assert_eq!(judge(46, &[0; 46]), refused);
    assert_eq!(judge(IPV4, &four([10, 0, 0, 1])[..19]), refused);
    assert_eq!(judge(IPV4, &six("fe80::1", 17, &[0; 8])), refused);
    assert_eq!(judge(IPV6, &four([10, 0, 0, 1])), refused);
    let many = [[60, 0, 0, 0, 0, 0, 0, 0]; 20].concat();
    assert_eq!(judge(IPV6, &six("fe80::1", 60, &many)), refused);
    assert_eq!(judge(ARP, &[0; 28]), refused);
}

#[test]
fn tags_hide_no_network() {
    let lock = lock(&[], "", "10.0.0.0/8");
    for tags in [&[][..], &[5], &[5, 6], &[5, 6, 7, 8, 9, 10, 11, 12]] {
        let own = ethernet(OWN, tags, IPV4, &four([10, 0, 0, 1]));
        let foreign = ethernet(OWN, tags, IPV4, &four([11, 0, 0, 1]));
        assert_eq!(lock.judge(&own), Ok(()), "{tags:?}");
        assert_eq!(lock.judge(&foreign), Err(Against::Network), "{tags:?}");
    }
    let hidden = ethernet(OWN, &[1; 9], IPV4, &four([10, 0, 0, 1]));
    assert_eq!(lock.judge(&hidden), Err(Against::Network));
}

#[test]
fn networks_are_read_and_said() {
    for text in [
        "10.0.0.0/8+192.168.7.9+fe80::/10+2001:db8::5",
        "0.0.0.0/0",
        "::/0",
    ] {
        assert_eq!(text.parse::<Networks>().unwrap().to_string(), text);
    }
    let masked: Networks = "10.1.2.3/8".parse().unwrap();
    assert_eq!(masked.to_string(), "10.0.0.0/8");
    for bad in [
        "",
        "10.0.0.0/33",
        "10.0.0/8",
        "fe80::/129",
        "a",
        "10.0.0.1/x",
    ] {
        assert!(bad.parse::<Networks>().is_err(), "{bad}");
    }
}

#[test]
fn any_bytes_are_judged_and_a_frame_of_nobody_is_left_alone() {
    let lock = lock(&[OWN], "no", "10.0.0.0/8+fe80::/10");
    let mut state = 7_u64;
    for len in 0..200 {
        for _ in 0..500 {
            let mut frame: Vec<u8> = (0..len)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state as u8
                })
                .collect();
            let kinds = [IPV4, IPV6, ARP, 0x8100];
            if len >= 14 {
                let kind = kinds[state as usize % 4];
                frame[12..14].copy_from_slice(&kind.to_be_bytes());
                if state & 64 == 0 {
                    frame[6..12].copy_from_slice(&OWN);
                }
            }
            let may = lock.judge(&frame).is_ok();
            assert!(may || len >= 14);
            if !may || len < 14 {
                continue;
            }
            // Where it is right by chance, it is right where it is looked for.
            assert_eq!(frame[6..12], OWN);
            let is_own = match u16::from_be_bytes([frame[12], frame[13]]) {
                IPV4 => frame[26] == 10,
                IPV6 => frame[22] == 0xfe && frame[23] >> 6 == 2,
                ARP => frame[28] == 10,
                _ => true,
            };
            assert!(is_own, "{frame:?}");
        }
    }
}
