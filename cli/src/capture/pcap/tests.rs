use std::process::Command;

use vnplug::{Meta, flags};
use vnplug_frame::capfile::ng::{INTERFACE, SECTION, STATISTICS};

use super::*;

fn origin() -> Interface {
    Interface {
        name: "host:eth1".to_owned(),
        link_type: 1,
        snaplen: 0,
        filter: "udp".to_owned(),
    }
}

/// 2026-11-21 00:00:00.123456789 UTC.
const MOMENT: u64 = 1_795_219_200_123_456_789;

fn meta(lost: u32, flags: u16) -> Meta {
    Meta {
        ts_ns: MOMENT,
        wire_len: 64,
        lost,
        flags,
        ..Meta::default()
    }
}

fn file(format: Format, packets: &[(Meta, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut writer = Writer::new(&mut out, format, origin());
    for (meta, bytes) in packets {
        let packet = Packet { meta: *meta, bytes };
        writer.packet(&packet).unwrap();
    }
    let totals = Totals {
        from_ns: MOMENT,
        to_ns: MOMENT + 5,
        delivered: packets.len() as u64,
        lost: 7,
    };
    writer.finish(&totals).unwrap();
    assert_eq!(writer.written(), packets.len() as u64);
    out
}

fn frames() -> Vec<(Meta, Vec<u8>)> {
    let mut frame = vec![0xff; 12];
    frame.extend([0x88, 0xb5]);
    frame.resize(61, 0);
    vec![
        (meta(0, 0), frame.clone()),
        (meta(7, flags::OUTBOUND), frame[..33].to_vec()),
        (meta(0, flags::GAP), frame),
    ]
}

#[test]
fn a_pcap_file_has_these_bytes() {
    let bytes = file(Format::Pcap, &[(meta(0, 0), vec![1, 2, 3])]);
    let expected = [
        0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0, //
        0x00, 0xdf, 0x00, 0x6b, 0x15, 0xcd, 0x5b, 0x07, 3, 0, 0, 0, 64, 0, 0, 0, 1, 2, 3,
    ];
    assert_eq!(bytes, expected);
}

#[test]
fn an_enhanced_packet_block_has_these_bytes() {
    let meta = Meta {
        ts_ns: 0x1_0000_0002,
        ..meta(3, flags::OUTBOUND)
    };
    let packet = Packet {
        meta,
        bytes: &[9, 8, 7, 6, 5],
    };
    let mut out = [0; 64];
    let end = pcapng::packet_with_direction(&mut out, 0, 0, &packet);
    assert_eq!(end, Some(64));
    let expected = [
        6, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 64, 0, 0,
        0, //
        9, 8, 7, 6, 5, 0, 0, 0, // the bytes, padded
        2, 0, 4, 0, 2, 0, 0, 0, // outbound
        4, 0, 8, 0, 3, 0, 0, 0, 0, 0, 0, 0, // three lost before
        0, 0, 0, 0, 64, 0, 0, 0,
    ];
    assert_eq!(out, expected);
}

#[test]
fn every_block_of_a_pcapng_file_is_walkable_from_both_ends() {
    let bytes = file(Format::Pcapng, &frames());
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (mut at, mut kinds) = (0, Vec::new());
    while at < bytes.len() {
        let len = word(at + 4) as usize;
        assert_eq!(len % 4, 0);
        assert_eq!(word(at + len - 4) as usize, len);
        kinds.push(word(at));
        at += len;
    }
    let expected = [SECTION, INTERFACE, 6, 6, 6, STATISTICS];
    assert_eq!(kinds, expected);
}

#[test]
fn a_failed_write_is_told_and_its_packets_not_counted() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut writer = Writer::new(Full, Format::Pcap, origin());
    let bytes = vec![0; 1000];
    let packet = Packet {
        meta: meta(0, 0),
        bytes: &bytes,
    };
    let error = (0..1000).find_map(|_| writer.packet(&packet).err());
    assert_eq!(error.unwrap().kind(), io::ErrorKind::StorageFull);
    assert_eq!(writer.written(), 0);
}

#[test]
fn tcpdump_and_tshark_read_both_formats() {
    for format in [Format::Pcap, Format::Pcapng] {
        let name = format!("vnplug-{format:?}-{}.cap", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, file(format, &frames())).unwrap();
        let tcpdump = read("tcpdump", &["-nn", "-tt", "--nano", "-r"], &path);
        assert_eq!(
            tcpdump.matches("1795219200.123456789").count(),
            3,
            "{tcpdump}"
        );
        let fields = [
            "frame.time_epoch",
            "frame.cap_len",
            "frame.len",
            "frame.drop_count",
        ];
        let fields: Vec<&str> = fields.iter().flat_map(|field| ["-e", field]).collect();
        let arguments = [&["-T", "fields"], &fields[..], &["-r"]].concat();
        let tshark = read("tshark", &arguments, &path);
        let lines: Vec<Vec<&str>> = tshark.lines().map(|l| l.split('\t').collect()).collect();
        let lens: Vec<&[&str]> = lines.iter().map(|line| &line[1..3]).collect();
        assert_eq!(lens, [["61", "64"], ["33", "64"], ["61", "64"]], "{tshark}");
        if format == Format::Pcapng {
            assert_eq!(lines[1][3], "7", "{tshark}");
            let infos = read("capinfos", &[], &path);
            assert!(infos.contains("Name = host:eth1"), "{infos}");
            assert!(infos.contains("Filter string = udp"), "{infos}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}

fn read(program: &str, arguments: &[&str], path: &std::path::Path) -> String {
    let output = Command::new(program).args(arguments).arg(path).output();
    let output = output.unwrap_or_else(|error| panic!("{program} is installed: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}
