//! What is answered is what is in the segments.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::lab::{Lab, SECOND, START_NS, Sample, mix, tcp, udp};

/// What another program prints.
fn program(program: &str, arguments: &[&str], file: &Path) -> String {
    let output = Command::new(program)
        .args(arguments)
        .arg(file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn nothing_is_left_out_and_capinfos_counts_the_same() {
    let lab = Lab::new("whole");
    let segment = lab.segment(0, &mix(1, 5000));
    let table = program("capinfos", &["-T", "-r", "-M", "-c", "-d"], &segment);
    let fields: Vec<&str> = table.trim_end().split('\t').collect();
    let expected = format!("{},{}", fields[1], fields[2]);
    let sums = lab.lines("select sum(packets), sum(bytes) from flows", &[]);
    assert_eq!(sums, std::slice::from_ref(&expected));
    let told = lab.lines("select packets, bytes from segments", &[]);
    assert_eq!(told, [expected]);
}

#[test]
fn sums_between_addresses_are_those_of_tshark() {
    let lab = Lab::new("tshark");
    let segment = lab.segment(0, &mix(2, 3000));
    let mut expected: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    let fields = [
        "-T",
        "fields",
        "-e",
        "ip.src",
        "-e",
        "ip.dst",
        "-e",
        "frame.len",
        "-r",
    ];
    for line in program("tshark", &fields, &segment).lines() {
        let parts: Vec<&str> = line.split('\t').collect();
        if parts[0].is_empty() || parts[1].is_empty() || parts[0].contains(',') {
            continue;
        }
        let sum = expected
            .entry((parts[0].into(), parts[1].into()))
            .or_default();
        sum.0 += 1;
        sum.1 += parts[2].parse::<u64>().unwrap();
    }
    let sql = "select src, dst, sum(packets), sum(bytes) from flows \
               where ethertype = 2048 and src is not null group by src, dst";
    let mut answered = BTreeMap::new();
    for line in lab.lines(sql, &[]) {
        let parts: Vec<&str> = line.split(',').collect();
        let sums = (parts[2].parse().unwrap(), parts[3].parse().unwrap());
        answered.insert((parts[0].to_owned(), parts[1].to_owned()), sums);
    }
    assert!(expected.len() > 1000);
    assert_eq!(answered, expected);
}

#[test]
fn community_ids_are_those_of_wireshark() {
    let lab = Lab::new("community");
    let mut packets = mix(7, 2000);
    // Of a packet that was cut Wireshark takes for a port what there is of it.
    packets.retain(|packet| packet.bytes.len() >= 46);
    let segment = lab.segment(0, &packets);
    let words =
        "-n --enable-protocol communityid -Y tcp||udp||icmp||icmpv6 -T fields -e communityid -r";
    let words: Vec<&str> = words.split(' ').collect();
    let mut expected: BTreeMap<String, u64> = BTreeMap::new();
    for id in program("tshark", &words, &segment).lines() {
        *expected.entry(id.to_owned()).or_default() += 1;
    }
    let sql = "select community_id, sum(packets) from flows where community_id is not null \
               and dst_port is not null group by 1";
    let mut answered = BTreeMap::new();
    for line in lab.lines(sql, &[]) {
        let (id, packets) = line.split_once(',').unwrap();
        answered.insert(id.to_owned(), packets.parse::<u64>().unwrap());
    }
    expected.remove("");
    assert!(expected.len() > 100, "{expected:?}");
    assert_eq!(answered, expected);
    // Made of other columns.
    let swapped = "select count(*) from flows where proto not in ('icmp', 'icmp6') and community_id <> \
                   community_id(protocol, dst, src, dst_port, src_port)";
    assert_eq!(lab.number(swapped, &[]), 0);
}

#[test]
fn bytes_by_port_and_minute_are_exact() {
    let lab = Lab::new("minutes");
    let packets = mix(3, 4000);
    // Two segments, and a minute that reaches from one into the other.
    lab.segment(0, &packets[..1777]);
    lab.segment(1, &packets[1777..]);
    let mut expected: BTreeMap<(u64, u16), (u64, u64)> = BTreeMap::new();
    for packet in &packets {
        let tag = if packet.bytes.get(12..14) == Some(&[0x81, 0]) {
            4
        } else {
            0
        };
        let at = |at: usize| packet.bytes.get(at + tag).copied();
        let is_udp = at(12).zip(at(13)) == Some((8, 0)) && at(23) == Some(17);
        let (Some(high), Some(low), Some(_)) = (at(36), at(37), at(33)) else {
            continue;
        };
        if is_udp {
            let minute = packet.ts_ns / (60 * SECOND) * 60;
            let sum = expected
                .entry((minute, u16::from_be_bytes([high, low])))
                .or_default();
            sum.0 += 1;
            sum.1 += u64::from(packet.wire_len);
        }
    }
    let sql = "select extract(epoch from minute)::bigint, dst_port, sum(packets), sum(bytes) \
               from flows where proto = 'udp' and dst_port is not null group by 1, 2 order by 1, 2";
    let expected: Vec<String> = expected
        .iter()
        .map(|((minute, port), (packets, bytes))| format!("{minute},{port},{packets},{bytes}"))
        .collect();
    assert!(expected.len() > 12, "{expected:?}");
    assert_eq!(lab.lines(sql, &[]), expected);
}

#[test]
fn a_row_says_all_that_is_known_of_a_flow() {
    let lab = Lab::new("row");
    let at = |seconds: u64| START_NS + seconds * SECOND + 5;
    let mut tagged = tcp([10, 0, 0, 1], [192, 0, 2, 7], [443, 50_000], 0x02);
    tagged.splice(12..12, [0x81, 0, 0xe0, 9]);
    let mut first = Sample::new(at(1), tagged.clone());
    first.flags = 2;
    let mut last = Sample::new(at(59), tagged);
    last.bytes[18 + 20 + 13] = 0x10;
    last.flags = 2;
    last.wire_len = 1400;
    let arp = [vec![0xff; 6], vec![2, 0, 0, 0, 0, 9, 8, 6, 0, 1]].concat();
    let other = Sample::new(at(61), arp);
    lab.segment(0, &[first, last, other]);
    let sql = "select minute, first, last, protocol, proto, src, dst, src_port, dst_port, packets, \
               bytes, captured, tcp_flags, vlan, inner_vlan, ethertype, src_mac, dst_mac, link_type, \
               direction, interface from flows order by minute";
    assert_eq!(
        lab.lines(sql, &[]),
        [
            "2026-11-21T13:45:00Z,2026-11-21T13:45:01.000000005Z,2026-11-21T13:45:59.000000005Z,6,tcp,\
             10.0.0.1,192.0.2.7,443,50000,2,1458,116,18,9,,2048,,,1,out,eth7",
            "2026-11-21T13:46:00Z,2026-11-21T13:46:01.000000005Z,2026-11-21T13:46:01.000000005Z,,,,,,,1,\
             16,16,,,,2054,02:00:00:00:00:09,ff:ff:ff:ff:ff:ff,1,,eth7",
        ]
    );
    let columns = lab.lines(
        "select column_name from information_schema.columns \
                             where table_name = 'flows'",
        &[],
    );
    assert_eq!(columns.len(), 23);
}

#[test]
fn networks_are_asked_for_by_in_net() {
    let lab = Lab::new("net");
    let from = |a: u8, b: u8| udp([a, b, 3, 4], [192, 0, 2, 1], [1000, 53], 100);
    let frames = [from(10, 1), from(10, 2), from(11, 1)];
    let packet = |frame: &Vec<u8>| Sample::new(START_NS, frame.clone());
    lab.segment(0, &frames.iter().map(packet).collect::<Vec<_>>());
    let count = |test: &str| lab.number(&format!("select count(*) from flows where {test}"), &[]);
    assert_eq!(count("in_net(src, '10.0.0.0/8')"), 2);
    assert_eq!(count("in_net(src, '10.2.0.0/16') or src = '11.1.3.4'"), 2);
    assert_eq!(count("not in_net(dst, '192.0.2.1')"), 0);
    assert_eq!(count("in_net('10.1.1.1', '10.0.0.0/8')"), 3);
    assert_eq!(count("in_net('192.0.2.1', dst)"), 3);
    let text = lab.refusal("select * from flows where in_net(src, '10.0.0.0/99')", &[]);
    assert!(text.contains("'10.0.0.0/99' is no network"), "{text}");
}

#[test]
fn times_choose_rows_that_overlap_and_segments() {
    let lab = Lab::new("times");
    let frame = |port: u16| udp([10, 0, 0, 1], [10, 0, 0, 2], [port, 53], 100);
    let packet = |second: u64, port: u16| Sample::new(START_NS + second * SECOND, frame(port));
    lab.segment(0, &[packet(0, 1), packet(50, 1), packet(70, 1)]);
    lab.segment(1, &[packet(200, 1), packet(201, 2)]);
    let ask = |more: &[&str]| {
        let flows = lab.number("select sum(packets) from flows", more);
        (flows, lab.number("select count(*) from segments", more))
    };
    assert_eq!(ask(&[]), (5, 2));
    // The row of the first minute lasts from 0 to 50 seconds.
    assert_eq!(
        ask(&[
            "--from",
            "2026-11-21T13:45:30Z",
            "--to",
            "2026-11-21T13:46:00Z"
        ]),
        (2, 1)
    );
    assert_eq!(ask(&["--from", "2026-11-21T13:46:00Z"]), (3, 2));
    assert_eq!(ask(&["--from", "2026-11-21T13:48:21Z"]), (1, 1));
    assert_eq!(ask(&["--to", "2026-11-21T13:48:20Z"]), (3, 1));
}

#[test]
fn losses_are_those_of_the_state() {
    let lab = Lab::new("losses");
    let directory = lab.0.to_str().unwrap().to_owned();
    let ledger = vnplug_store::record::Ledger::new("t", &[directory]);
    ledger.lost_in_ring(START_NS, START_NS + SECOND, 7, "the ring was full", false);
    ledger.lost_at_source(START_NS + 90 * SECOND, START_NS + 91 * SECOND, 3);
    ledger.gap(START_NS + 95 * SECOND, START_NS + 97 * SECOND, true);
    std::fs::write(lab.path("t.state"), ledger.status().to_json(1)).unwrap();
    let sql = "select recording, first, packets, kind, reason from losses order by first";
    let ring = "t,2026-11-21T13:45:00Z,7,ring,the ring was full";
    let source = "t,2026-11-21T13:46:30Z,3,source,lost by the kernel or the NIC";
    let gap = "t,2026-11-21T13:46:35Z,,gap,the daemon was started again";
    assert_eq!(lab.lines(sql, &[]), [ring, source, gap]);
    assert_eq!(
        lab.lines(sql, &["--from", "2026-11-21T13:46:00Z"]),
        [source, gap]
    );
}

#[test]
fn the_examples_of_the_document_run() {
    let lab = Lab::new("examples");
    lab.segment(0, &mix(13, 2000));
    let document = include_str!("../../../docs/query.md");
    let examples = document.split("## Examples").nth(1).unwrap();
    let examples = examples.split("\n## ").next().unwrap();
    let mut count = 0;
    for paragraph in examples.split("\n\n") {
        let Some(sql) = paragraph.strip_prefix("    ") else {
            continue;
        };
        let answer = lab.ask(sql, &[]);
        assert!(answer.starts_with("+-"), "{sql}: {answer}");
        count += 1;
    }
    assert!(count >= 6, "{count}");
}
