use super::*;
use crate::index::{Block, Builder};
use crate::testing::Traffic;
use vnplug_testing::Dice;

/// Filters of all kinds over what [`Traffic::frame`] makes.
pub(crate) fn expression(random: &mut Dice) -> String {
    let mut parts = Vec::new();
    for _ in 0..1 + random.below(3) {
        let host = format!("10.1.2.{}", random.below(16));
        let port = random.one_of(&[443, 80, 53, 1000, 7]);
        let six = format!("2001:db8::{}", 1 + random.below(8));
        let simple = match random.below(20) {
            0 => format!("host {host}"),
            1 => format!("src host {host}"),
            2 => format!("net 10.1.2.{}/30", 4 * random.below(4)),
            3 => format!("port {port}"),
            4 => format!("tcp dst port {port}"),
            5 => format!("portrange {port}-{}", port + random.below(500)),
            6 => format!("ip6 host {six}"),
            7 => "ip6 net 2001:db8::/64".to_owned(),
            8 => format!("vlan {}", random.one_of(&[1, 5, 6])),
            9 => format!("vlan and vlan and host {host}"),
            10 => random
                .one_of(&["tcp", "udp", "sctp", "icmp6", "arp", "ip", "ip6", "rarp"])
                .to_owned(),
            11 => format!("greater {}", random.below(120)),
            12 => "ip[6:2] & 0x1fff != 0".to_owned(),
            13 => format!("tcp[0:2] = {port}"),
            14 => "tcp[tcpflags] & tcp-syn != 0".to_owned(),
            15 => format!(
                "ether proto {:#x}",
                random.one_of(&[0x88cc, 0x8847, 0x0800])
            ),
            16 => format!("ether[26:4] = 0x0a01020{:x}", random.below(16)),
            17 => format!("arp host {host}"),
            18 => "ip6 proto 6".to_owned(),
            _ => "vlan and ip".to_owned(),
        };
        let not = if random.below(5) == 0 { "not " } else { "" };
        parts.push(format!("{not}({simple})"));
    }
    parts.join(random.one_of(&[" and ", " or "]))
}

/// The block of an index of these frames, and in which chunk each is.
fn index(frames: &[Vec<u8>], per_chunk: usize) -> Block {
    let mut builder = Builder::new();
    for (n, frame) in frames.iter().enumerate() {
        builder.packet(
            (n / per_chunk * (256 << 10) + n % per_chunk) as u64,
            1,
            0,
            frame,
        );
    }
    let bytes = builder.finish(1 << 40);
    Block::first(&bytes)
}

#[test]
fn the_index_never_misses_what_a_filter_accepts() {
    let mut random = Dice(11);
    let mut traffic = Traffic::new(12);
    let (mut compiled, mut asked, mut left_out, mut matched) = (0, 0, 0_u32, 0);
    for _ in 0..40 {
        let per_chunk = 1 + random.below(6) as usize;
        let frames: Vec<Vec<u8>> = (0..60 * per_chunk).map(|_| traffic.frame()).collect();
        let block = index(&frames, per_chunk);
        for _ in 0..50 {
            let expression = expression(&mut random);
            let Ok(mut filter) = Filter::new(&expression) else {
                continue; // libpcap knows that nothing can match
            };
            compiled += 1;
            let set = filter.plan().ask(&block);
            asked += 60;
            left_out += 60 - set.count_ones();
            for (n, frame) in frames.iter().enumerate() {
                if filter.matches(1, frame, frame.len() as u32).unwrap() {
                    matched += 1;
                    let chunk = n / per_chunk;
                    assert!(set >> chunk & 1 == 1, "{expression}: {frame:02x?}");
                }
            }
        }
    }
    println!("{compiled} filters, {left_out} of {asked} chunks left out, {matched} matches");
    assert!(compiled > 1500 && left_out > 20_000 && matched > 10_000);
}

#[test]
fn questions_are_as_narrow_as_they_can_be() {
    let host = |n: u32| Traffic::udp(0x0a01_0200 + n, 0x0a01_0300 + n, 1000 + n as u16, 53, 100);
    let frames: Vec<Vec<u8>> = (0..60).map(host).collect();
    let block = index(&frames, 1);
    for (expression, expected) in [
        ("host 10.1.2.7", 1 << 7),
        ("host 10.1.2.7 or dst host 10.1.3.9", 1 << 7 | 1 << 9),
        ("net 10.1.2.8/29 and udp", 0xff << 8),
        ("udp port 1011", 1 << 11),
        ("portrange 1004-1007", 0xf << 4),
        ("host 10.1.2.7 and port 1008", 0),
        ("tcp", 0),
        ("tcp port 53", 0),
        ("port 53 and host 10.1.2.3", 1 << 3),
        ("ip6", 0),
        ("vlan 5", 0),
        ("ip6 host 2001:db8::1", 0),
        (
            "src host 10.1.2.1 and dst host 10.1.3.1 and src port 1001 and dst port 53",
            1 << 1,
        ),
        ("not host 10.1.2.7", block.all()),
        ("", block.all()),
    ] {
        let filter = Filter::new(expression).unwrap();
        assert_eq!(filter.plan().ask(&block), expected, "{expression}");
    }
}

#[test]
fn tcpdump_compiles_as_libpcap_does() {
    for expression in ["host 10.1.2.3 and port 443", "vlan 5", "ip6"] {
        assert_eq!(
            compile::by_tcpdump(expression, ETHERNET).unwrap(),
            compile::by_libpcap(expression, ETHERNET).unwrap()
        );
    }
    let error = Filter::new("port http and and").unwrap_err();
    assert!(error.to_string().contains("syntax error"), "{error}");
}

#[test]
fn other_link_types_have_programs_of_their_own() {
    let mut filter = Filter::new("host 10.1.2.3").unwrap();
    let frame = Traffic::udp(0x0a01_0203, 1, 2, 3, 60);
    assert!(filter.matches(1, &frame, 60).unwrap());
    assert!(filter.matches(101, &frame[14..], 46).unwrap());
    assert!(!filter.matches(101, &frame, 60).unwrap());
}

#[test]
fn a_list_of_a_thousand_hosts_is_a_filter() {
    let hosts: Vec<String> = (0..1000).map(|n| format!("ether[26:4] = {n:#x}")).collect();
    let mut filter = Filter::new(&hosts.join(" or ")).unwrap();
    let frame = |source| Traffic::udp(source, 1, 2, 3, 60);
    assert!(filter.matches(1, &frame(999), 60).unwrap());
    assert!(!filter.matches(1, &frame(1000), 60).unwrap());
}

#[test]
fn directions_are_refused_for_what_they_are() {
    let error = Filter::new("inbound").unwrap_err();
    assert!(error.to_string().contains("(inbound, outbound)"), "{error}");
}
