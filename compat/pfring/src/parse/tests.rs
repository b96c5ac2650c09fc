//! Golden packets, and any bytes at all.

use super::*;
use crate::abi::packet::{IP_FRAG_OFFSET, IP_MORE_FRAG};

fn ethernet(eth_type: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    packet.extend(eth_type.to_be_bytes());
    packet.extend(payload);
    packet
}

fn ipv4(proto: u8, options: &[u8], fragment: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45 + (options.len() / 4) as u8, 0x2e, 0, 0, 0, 0];
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, proto, 0, 0, 10, 0, 0, 1, 192, 0, 2, 7]);
    packet.extend(options);
    packet.extend(payload);
    packet
}

fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x6a, 0xb0, 0, 0, 0, 0, next, 64];
    packet.extend([0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    packet.extend([0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    packet.extend(payload);
    packet
}

fn udp(source: u16, target: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = [source.to_be_bytes(), target.to_be_bytes(), [0, 8], [0, 0]].concat();
    packet.extend(payload);
    packet
}

fn tcp() -> Vec<u8> {
    let mut packet = [80u16.to_be_bytes(), 4000u16.to_be_bytes()].concat();
    packet.extend([
        0, 0, 1, 0, 0, 0, 2, 0, 0x60, 0x12, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1,
    ]);
    packet
}

fn parse(packet: &[u8]) -> Headers {
    headers(packet, u8::MAX)
}

#[test]
fn tcp_over_ipv4_with_options() {
    let found = parse(&ethernet(0x0800, &ipv4(6, &[1, 1, 1, 1], 0, &tcp())));
    let parsed = found.parsed;
    assert_eq!((found.level, found.flags), (4, 0));
    assert_eq!(
        (parsed.ip_version, parsed.l3_proto, parsed.ip_tos),
        (4, 6, 0x2e)
    );
    let addresses = (parsed.ip_src.as_v4(), parsed.ip_dst.as_v4());
    assert_eq!(addresses, (0x0a00_0001, 0xc000_0207));
    assert_eq!(({ parsed.l4_src_port }, { parsed.l4_dst_port }), (80, 4000));
    let tcp = parsed.tcp;
    assert_eq!((tcp.flags, tcp.seq_num, tcp.ack_num), (0x12, 0x100, 0x200));
    let offset = parsed.offset;
    assert_eq!(
        ({ offset.l3 }, { offset.l4 }, { offset.payload }),
        (14, 38, 62)
    );
    assert_eq!({ parsed.tunnel.id }, NO_TUNNEL_ID);
}

#[test]
fn udp_over_ipv6_behind_extension_headers_and_two_tags() {
    let options = [43, 0, 1, 4, 0, 0, 0, 0];
    let routing = [17, 0, 0, 0, 0, 0, 0, 0];
    let inner = ipv6(0, &[&options[..], &routing, &udp(53, 5000, b"x")].concat());
    let tags = [&[0x60, 5, 0x81, 0, 0, 9, 0x86, 0xdd][..], &inner].concat();
    let found = parse(&ethernet(0x88a8, &tags));
    let parsed = found.parsed;
    assert_eq!(
        (found.level, parsed.ip_version, parsed.l3_proto),
        (4, 6, 17)
    );
    assert_eq!(({ parsed.vlan_id }, { parsed.qinq_vlan_id }), (5, 9));
    assert_eq!(({ parsed.eth_type }, parsed.ip_tos), (0x86dd, 0xab));
    assert_eq!(parsed.ip_src.as_v6()[15], 1);
    assert_eq!(({ parsed.l4_src_port }, { parsed.l4_dst_port }), (53, 5000));
    let offset = parsed.offset;
    assert_eq!(
        ({ offset.vlan }, { offset.l3 }, { offset.l4 }),
        (18, 22, 78)
    );
}

#[test]
fn later_fragments_have_no_ports_and_say_so() {
    let first = parse(&ethernet(0x0800, &ipv4(17, &[], 0x2000, &udp(1, 2, b""))));
    assert_eq!((first.level, first.flags), (4, IP_MORE_FRAG));
    let later = parse(&ethernet(0x0800, &ipv4(17, &[], 0x2001, &udp(1, 2, b""))));
    assert_eq!(
        (later.level, later.flags),
        (3, IP_MORE_FRAG | IP_FRAG_OFFSET)
    );
    assert_eq!({ later.parsed.l4_src_port }, 0);
    let six = [&[17, 0, 0, 8, 0, 0, 0, 1][..], &udp(1, 2, b"")].concat();
    let six = parse(&ethernet(0x86dd, &ipv6(44, &six)));
    assert_eq!(
        (six.level, six.flags, six.parsed.l3_proto),
        (3, IP_FRAG_OFFSET, 17)
    );
}

#[test]
fn icmp_tells_type_and_code() {
    let found = parse(&ethernet(
        0x0800,
        &ipv4(1, &[], 0, &[3, 1, 0, 0, 0, 0, 0, 0]),
    ));
    let parsed = found.parsed;
    assert_eq!((found.level, parsed.icmp_type, parsed.icmp_code), (4, 3, 1));
}

#[test]
fn gtp_gre_vxlan_and_geneve_are_looked_into() {
    let inside = ipv4(17, &[], 0, &udp(7, 8, b""));
    let gtp = [&[0x36, 255, 0, 0, 0, 0, 0xab, 0xcd][..], &[0, 0, 0, 0x85]].concat();
    let gtp = [&gtp[..], &[1, 9, 9, 0], &inside].concat();
    let gtp = ethernet(0x0800, &ipv4(17, &[], 0, &udp(1000, 2152, &gtp)));
    let gre = [&[0x20, 0, 0x08, 0, 0, 0, 0xab, 0xcd][..], &inside].concat();
    let gre = ethernet(0x0800, &ipv4(47, &[], 0, &gre));
    let frame = ethernet(0x0800, &inside);
    let vxlan = [&[8, 0, 0, 0, 0, 0xab, 0xcd, 0][..], &frame].concat();
    let vxlan = ethernet(0x0800, &ipv4(17, &[], 0, &udp(1000, 4789, &vxlan)));
    let geneve = [
        &[1, 0, 0x65, 0x58, 0, 0xab, 0xcd, 0][..],
        &[9, 9, 1, 0],
        &frame,
    ]
    .concat();
    let geneve = ethernet(0x0800, &ipv4(17, &[], 0, &udp(1000, 6081, &geneve)));
    let all = [
        ("gtp", gtp),
        ("gre", gre),
        ("vxlan", vxlan),
        ("geneve", geneve),
    ];
    for (name, packet) in all {
        let found = parse(&packet);
        let tunnel = found.parsed.tunnel;
        assert_eq!((found.level, { tunnel.id }), (6, 0xabcd), "{name}");
        assert_eq!((tunnel.ip_version, tunnel.proto), (4, 17), "{name}");
        assert_eq!(
            ({ tunnel.l4_src_port }, { tunnel.l4_dst_port }),
            (7, 8),
            "{name}"
        );
        assert_eq!(headers(&packet, 4).level, 4, "{name}");
    }
}

#[test]
fn both_directions_hash_alike() {
    let there = parse(&ethernet(0x0800, &ipv4(17, &[], 0, &udp(1, 2, b"")))).parsed;
    let mut back = there;
    (back.ip_src, back.ip_dst) = (there.ip_dst, there.ip_src);
    (back.l4_src_port, back.l4_dst_port) = (there.l4_dst_port, there.l4_src_port);
    assert_eq!(symmetric_hash(&there), symmetric_hash(&back));
}

/// Every prefix of honest packets, and honest packets with noise in them.
#[test]
fn any_bytes_have_an_answer() {
    let inside = ipv4(17, &[], 0, &udp(7, 8, b"payload"));
    let gtp = [
        &[0x34, 255, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0x85, 1, 9, 9, 0][..],
        &inside,
    ]
    .concat();
    let seeds = [
        ethernet(
            0x8100,
            &[&[0, 5, 0x08, 0][..], &ipv4(6, &[1; 40], 0, &tcp())].concat(),
        ),
        ethernet(
            0x86dd,
            &ipv6(0, &[43, 1, 1, 4, 0, 0, 0, 0, 44, 0, 0, 0, 0, 0, 0, 0]),
        ),
        ethernet(0x0800, &ipv4(17, &[], 0, &udp(2152, 2152, &gtp))),
        ethernet(
            0x0800,
            &ipv4(47, &[], 0, &[0xf0, 0, 0x65, 0x58, 1, 2, 3, 4]),
        ),
        ethernet(
            0x0800,
            &ipv4(17, &[], 0, &udp(1, 4789, &[8, 0, 0, 0, 0, 0, 1, 0, 9])),
        ),
    ];
    let mut noise = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        noise
    };
    for seed in &seeds {
        for len in 0..=seed.len() {
            check(&seed[..len]);
        }
        for _ in 0..20_000 {
            let mut packet = seed.clone();
            for _ in 0..1 + random() % 4 {
                let at = random() as usize % packet.len();
                packet[at] = random() as u8;
            }
            packet.truncate(random() as usize % (packet.len() + 1));
            check(&packet);
        }
    }
}

fn check(packet: &[u8]) {
    let mut before = 0;
    for level in 0..=6 {
        let found = headers(packet, level);
        assert!(
            (1..=6).contains(&found.level) && found.level >= before,
            "{packet:02x?}"
        );
        before = found.level;
        let offset = found.parsed.offset;
        assert!({ offset.l3 } as usize <= packet.len(), "{packet:02x?}");
        crate::print::line(&found.parsed, symmetric_hash(&found.parsed), packet, 0);
    }
}
