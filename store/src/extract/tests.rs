use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
use crate::filter::tests::expression;
use crate::index::{Sidecar, rebuild};
use crate::read::tests::Maker;
use crate::read::{Cause, Reader};
use vnplug_testing::{Dice, TestDir};

use crate::testing::Traffic;

type Found = Vec<(u64, Vec<u8>)>;

/// Two disks with segments of 20 MB that overlap in time; packets stand up to 40 places from theirs.
fn recording(place: &TestDir, seed: u64) -> Vec<PathBuf> {
    let mut random = Dice(seed);
    let mut traffic = Traffic::new(seed);
    let mut dirs = Vec::new();
    for disk in 0..2_u64 {
        let dir = place.0.join(format!("disk{disk}"));
        fs::create_dir_all(&dir).unwrap();
        for segment in 0..2_u64 {
            let mut maker = Maker::ng(random.below(4) == 0);
            maker.interface(1, 9);
            let start = 1_000_000 * segment + 700 * disk;
            for n in 0..1200_u64 {
                let mut frame = traffic.frame();
                let len = frame.len() + random.below(30_000) as usize;
                frame.resize(len, 0x55);
                let ts = NS * 1000 + (start + n * 1000 + random.below(40_000)) * 1000;
                if n == 600 {
                    maker.interface(1, 9);
                }
                maker.packet(u32::from(n > 600 && n % 3 == 0), ts, &frame);
            }
            let time = crate::name::time(NS * 1000 + start * 1000);
            let name = format!("r-{:010}-{time}.pcapng", segment * 2 + disk);
            fs::write(dir.join(name), &maker.bytes).unwrap();
        }
        dirs.push(dir);
    }
    dirs
}

fn segments(dirs: &[PathBuf]) -> Vec<PathBuf> {
    find(dirs).unwrap().map(|found| found.path).collect()
}

/// What a query must find: everything is read and asked.
fn scan(segments: &[PathBuf], query: &mut Query) -> Found {
    let mut list = Vec::new();
    for segment in segments {
        let mut reader = Reader::open(segment).unwrap();
        while let Some(packet) = reader.read().unwrap() {
            if (query.from_ns..query.to_ns).contains(&packet.ts_ns)
                && query
                    .filter
                    .matches(packet.link_type, packet.bytes, packet.wire_len)
                    .unwrap()
            {
                list.push((packet.ts_ns, packet.bytes.to_vec()));
            }
        }
    }
    list.sort();
    list
}

fn extract(dirs: &[PathBuf], query: Query) -> (Found, Tally) {
    let mut extract = Extract::open(dirs, query).unwrap();
    let mut list = Vec::new();
    while let Some(packet) = extract.read().unwrap() {
        list.push((packet.ts_ns, packet.bytes.to_vec()));
    }
    assert!(extract.problems().is_empty());
    assert!(list.is_sorted_by_key(|&(ts_ns, _)| ts_ns));
    list.sort();
    (list, extract.tally())
}

fn query(from_ns: u64, to_ns: u64, expression: &str) -> Query {
    Query {
        from_ns,
        to_ns,
        filter: Filter::new(expression).unwrap(),
    }
}

#[test]
fn extracts_equal_scans() {
    let place = TestDir::new("extract");
    let dirs = recording(&place, 21);
    let list = segments(&dirs);
    for segment in &list[..3] {
        rebuild(segment).unwrap(); // the fourth has no index
    }
    let torn = Sidecar::path_of(&list[1]);
    let whole = fs::read(&torn).unwrap();
    let mut random = Dice(22);
    let (mut found, mut skipped) = (0, 0);
    for round in 0..30 {
        fs::write(
            &torn,
            &whole[..random.below(whole.len() as u64 + 1) as usize],
        )
        .unwrap();
        let expression = expression(&mut random);
        if Filter::new(&expression).is_err() {
            continue;
        }
        let from = NS * 1000 + random.below(2_000_000_000);
        let (from, to) = match round % 3 {
            0 => (0, u64::MAX),
            1 => (from, from + random.below(500_000_000)),
            _ => (from, u64::MAX),
        };
        let expected = scan(&list, &mut query(from, to, &expression));
        let (got, tally) = extract(&dirs, query(from, to, &expression));
        assert!(
            got == expected,
            "{expression}: {} of {}",
            got.len(),
            expected.len()
        );
        assert_eq!((tally.packets, tally.late), (expected.len() as u64, 0));
        found += got.len();
        skipped += tally.chunks_skipped;
    }
    println!("{found} packets found, {skipped} chunks skipped");
    assert!(found > 3000 && skipped > 300);
}

#[test]
fn tcpdump_finds_the_same() {
    let place = TestDir::new("tcpdump");
    let dirs = recording(&place, 31);
    let list = segments(&dirs);
    rebuild(&list[0]).unwrap();
    for expression in [
        "host 10.1.2.3 and port 443",
        "ip6 and udp",
        "vlan 5 and ip",
        "arp",
        "",
    ] {
        for format in [Format::Pcapng, Format::Pcap] {
            let mut extract = Extract::open(&dirs, query(0, u64::MAX, expression)).unwrap();
            let mut output = Output::new(Vec::new(), format);
            while let Some(packet) = extract.read().unwrap() {
                output.write(&packet).unwrap();
            }
            assert_eq!(extract.tally().late, 0);
            let file = place.0.join("out");
            fs::write(&file, output.finish().unwrap()).unwrap();
            let mut expected = Vec::new();
            for segment in &list {
                expected.extend(tcpdump(segment, expression));
            }
            expected.sort();
            let mut got = tcpdump(&file, "");
            let time = |line: &String| line.split(' ').next().map(str::to_owned);
            if let Some(n) = (1..got.len()).find(|&n| time(&got[n - 1]) > time(&got[n])) {
                panic!("{expression}: {:?} {:?}", got[n - 1], got[n]);
            }
            got.sort();
            assert!(
                got == expected,
                "{expression}: {} of {}",
                got.len(),
                expected.len()
            );
        }
    }
}

/// The packets of a file in tcpdump's words, times first.
fn tcpdump(file: &Path, expression: &str) -> Vec<String> {
    let output = Command::new("tcpdump")
        .args(["--nano", "-tt", "-n", "-q", "-s", "200", "-r"])
        .arg(file)
        .args(["--", expression])
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    let text = String::from_utf8_lossy(&output.stdout);
    // Some packets take several lines; the first has the time.
    let first = |line: &&str| line.starts_with(|c: char| c.is_ascii_digit()) && line.contains('.');
    text.lines().filter(first).map(str::to_owned).collect()
}

#[test]
fn other_programs_open_what_is_written() {
    let place = TestDir::new("open");
    let dirs = recording(&place, 41);
    for (format, kind) in [(Format::Pcapng, "pcapng"), (Format::Pcap, "nanosecond")] {
        let mut extract = Extract::open(&dirs, query(0, u64::MAX, "tcp")).unwrap();
        let mut output = Output::new(Vec::new(), format);
        while let Some(packet) = extract.read().unwrap() {
            output.write(&packet).unwrap();
        }
        let file = place.0.join("out");
        fs::write(&file, output.finish().unwrap()).unwrap();
        let info = Command::new("capinfos")
            .args(["-t", "-c", "-o"])
            .arg(&file)
            .output()
            .unwrap();
        let info = String::from_utf8_lossy(&info.stdout).into_owned();
        assert!(info.contains(kind) && info.contains("True"), "{info}");
        let count = Command::new("tshark")
            .args(["-n", "-r"])
            .arg(&file)
            .output()
            .unwrap();
        let lines = String::from_utf8_lossy(&count.stdout).lines().count();
        assert_eq!(lines as u64, extract.tally().packets);
    }
}

#[test]
fn what_grows_is_read_to_where_it_was() {
    let place = TestDir::new("grows");
    let dirs = recording(&place, 51);
    let segment = &segments(&dirs[..1])[0];
    let bytes = fs::read(segment).unwrap();
    let dir = place.0.join("live");
    fs::create_dir(&dir).unwrap();
    let live = dir.join("live.pcapng");
    fs::write(&live, &bytes[..9_000_000]).unwrap();
    rebuild(&live).unwrap();
    let index = fs::read(Sidecar::path_of(&live)).unwrap();
    let dirs = [dir];
    let before = extract(&dirs, query(0, u64::MAX, "")).0.len();
    for len in [9_000_001, 12_000_000, bytes.len()] {
        fs::write(&live, &bytes[..len]).unwrap();
        let got = extract(&dirs, query(0, u64::MAX, "")).0;
        assert_eq!(
            got,
            scan(std::slice::from_ref(&live), &mut query(0, u64::MAX, ""))
        );
        assert!(got.len() >= before);
    }
    // An index that says more than there is.
    fs::write(&live, &bytes[..5_000_000]).unwrap();
    fs::write(Sidecar::path_of(&live), index).unwrap();
    let mut extract = Extract::open(&dirs, query(0, u64::MAX, "")).unwrap();
    let mut got = 0;
    while extract.read().unwrap().is_some() {
        got += 1;
    }
    assert_eq!(got, scan(&[live], &mut query(0, u64::MAX, "")).len());
    assert!(matches!(
        extract.problems()[..],
        [ReadError {
            cause: Cause::Cut(9_000_000),
            ..
        }]
    ));
}

#[test]
fn what_is_written_since_the_query_began_is_not_part_of_it() {
    let place = TestDir::new("since");
    let dirs = recording(&place, 55);
    let segment = &segments(&dirs[..1])[0];
    let bytes = fs::read(segment).unwrap();
    let dir = place.0.join("live");
    fs::create_dir(&dir).unwrap();
    let live = dir.join("live.pcapng");
    for len in [600_000, 9_000_000, 17_000_000] {
        fs::write(&live, &bytes[..len]).unwrap();
        let mut extract =
            Extract::open(std::slice::from_ref(&dir), query(0, u64::MAX, "")).unwrap();
        fs::write(&live, &bytes).unwrap();
        rebuild(&live).unwrap();
        let mut got = 0;
        while extract.read().unwrap().is_some() {
            got += 1;
        }
        assert!(extract.problems().is_empty());
        fs::remove_file(Sidecar::path_of(&live)).unwrap();
        let mut reader = Reader::open(&live).unwrap();
        let mut expected = 0;
        while reader.read_until(len as u64).unwrap().is_some() {
            expected += 1;
        }
        assert_eq!(got, expected, "{len}");
    }
}

#[test]
fn what_is_whole_in_damaged_files_is_found() {
    let place = TestDir::new("damage");
    let mut maker = Maker::ng(false);
    maker.interface(1, 9);
    for n in 0..100 {
        maker.packet(0, n, &[n as u8; 100]);
    }
    let at = maker.packet(7, 0, &[0; 60]);
    fs::write(place.0.join("a.pcapng"), &maker.bytes).unwrap();
    fs::write(place.0.join("b.pcap"), "no capture file").unwrap();
    let mut legacy = Maker::legacy(true, 0xa1b2_c3d4, 1);
    legacy.legacy_packet(0, 0, &[1; 60]);
    fs::write(place.0.join("c.pcap"), &legacy.bytes).unwrap();
    let mut extract =
        Extract::open(std::slice::from_ref(&place.0), query(0, u64::MAX, "")).unwrap();
    let mut count = 0;
    while extract.read().unwrap().is_some() {
        count += 1;
    }
    assert_eq!(count, 101);
    let mut problems: Vec<String> = extract.problems().iter().map(ToString::to_string).collect();
    problems.sort();
    assert_eq!(problems.len(), 2, "{problems:?}");
    let place = format!("a.pcapng: byte {at}: packet of an interface that was not described");
    assert!(problems[0].ends_with(&place), "{problems:?}");
    assert!(
        problems[1].contains("b.pcap: byte 0: neither pcapng nor pcap"),
        "{problems:?}"
    );
}

#[test]
fn a_closed_segment_that_was_cut_off_is_told() {
    let place = TestDir::new("cut-off");
    let dirs = recording(&place, 72);
    let segment = &segments(&dirs)[0];
    assert!(rebuild(segment).unwrap());
    let whole = fs::read(segment).unwrap();
    let problems = |of: Query| {
        let mut extract = Extract::open(std::slice::from_ref(segment), of).unwrap();
        let mut packets = 0;
        while extract.read().unwrap().is_some() {
            packets += 1;
        }
        (packets, extract.problems())
    };
    let everything = || query(0, u64::MAX, "");
    assert_eq!(problems(everything()).0, 1200);
    for len in [whole.len() / 2, 60, 0] {
        fs::write(segment, &whole[..len]).unwrap();
        let (packets, told) = problems(everything());
        let [problem] = &told[..] else {
            panic!("{len}: {told:?}");
        };
        let words = problem.to_string();
        assert!(problem.is_damage(), "{words}");
        assert!(words.contains(&format!("{len} bytes of the {}", whole.len())));
        assert_eq!(packets > 0, len > 60);
        // Not of times of which it had nothing.
        assert!(problems(query(0, 1, "")).1.is_empty());
    }
    // Another file of that name, shorter: its index is not believed.
    let mut other = Maker::ng(false);
    other.interface(1, 9);
    other.packet(0, 7, &[7; 60]);
    fs::write(segment, &other.bytes).unwrap();
    let (packets, told) = problems(everything());
    assert_eq!((packets, told.len()), (1, 0));
    // A file that no recorder named may have been begun again.
    let file = place.0.join("old.pcapng");
    fs::rename(Sidecar::path_of(segment), Sidecar::path_of(&file)).unwrap();
    for (len, problems) in [(whole.len() / 2, 1), (60, 0)] {
        fs::write(&file, &whole[..len]).unwrap();
        let mut extract = Extract::open(std::slice::from_ref(&file), everything()).unwrap();
        assert_eq!(extract.problems().len(), problems, "{len}");
    }
}

#[test]
fn a_file_without_packets_is_a_capture_file() {
    let place = TestDir::new("empty");
    for format in [Format::Pcapng, Format::Pcap] {
        let file = place.0.join("out");
        fs::write(&file, Output::new(Vec::new(), format).finish().unwrap()).unwrap();
        assert!(tcpdump(&file, "").is_empty());
    }
}

#[test]
fn flows_add_up() {
    let place = TestDir::new("flows");
    let dirs = recording(&place, 61);
    let mut extract = Extract::open(&dirs, query(0, u64::MAX, "")).unwrap();
    let mut flows = Flows::default();
    let mut bytes = 0;
    while let Some(packet) = extract.read().unwrap() {
        flows.add(&packet);
        bytes += u64::from(packet.wire_len);
    }
    let list = flows.sorted(false);
    assert!(list.is_sorted_by_key(|(_, sum)| std::cmp::Reverse(sum.bytes)) && list.len() > 100);
    let other = flows.other();
    let sums = list.iter().map(|(_, sum)| sum).chain([&other]);
    let all = sums.fold((0, 0), |all, sum| (all.0 + sum.packets, all.1 + sum.bytes));
    assert_eq!(all, (extract.tally().packets, bytes));
    let udp = Traffic::udp(0x0a00_0001, 0x0a00_0002, 5, 53, 100);
    let flow = Flow::of(&udp).unwrap();
    assert_eq!((flow.protocol, flow.ports), (17, (5, 53)));
    assert_eq!(
        (flow.from.to_string(), flow.to.to_string()),
        ("10.0.0.1".into(), "10.0.0.2".into())
    );
}

#[test]
fn tcpdump_reads_interfaces_that_were_cut_differently() {
    let place = TestDir::new("snaplens");
    let mut output = Output::new(Vec::new(), Format::Pcapng);
    for (snaplen, name) in [(262_144, "eth0"), (2008, "eth1"), (0, "eth2")] {
        let mut interface = Interface::ethernet();
        (interface.snaplen, interface.name) = (snaplen, name.to_owned());
        let packet = Packet {
            ts_ns: NS,
            bytes: &Traffic::udp(1, 2, 3, 4, 60),
            wire_len: 60,
            flags: 0,
            lost: 0,
            comment: "",
            interface: &interface,
        };
        output.write(&packet).unwrap();
    }
    let file = place.0.join("out");
    fs::write(&file, output.finish().unwrap()).unwrap();
    assert_eq!(tcpdump(&file, "").len(), 3);
}

#[test]
fn link_types_that_differ_do_not_fit_into_pcap() {
    let place = TestDir::new("links");
    let mut maker = Maker::ng(false);
    maker.interface(1, 9);
    maker.interface(101, 9);
    maker.packet(0, 1, &[0; 60]);
    maker.packet(1, 2, &[0x45; 60]);
    fs::write(place.0.join("a.pcapng"), &maker.bytes).unwrap();
    for (format, fits) in [(Format::Pcapng, true), (Format::Pcap, false)] {
        let mut extract =
            Extract::open(std::slice::from_ref(&place.0), query(0, u64::MAX, "")).unwrap();
        let mut output = Output::new(Vec::new(), format);
        let mut good = true;
        while let Some(packet) = extract.read().unwrap() {
            good &= output.write(&packet).is_ok();
        }
        assert_eq!(good, fits);
    }
}

const NS: u64 = 1_000_000_000;

/// Prints how long it takes to the first packet, beside tcpdump over the same files; 3 GB in `/var/tmp`:
/// `cargo test --release -p vnplug-store -- --ignored --nocapture first_packet`.
#[test]
#[ignore = "a measurement"]
fn first_packet() {
    let place = PathBuf::from(format!("/var/tmp/vnplug-first-{}", std::process::id()));
    fs::create_dir(&place).unwrap();
    let interface = Interface::ethernet();
    let mut traffic = Traffic::new(61);
    let frames: Vec<Vec<u8>> = (0..200_000).map(|_| traffic.busy()).collect();
    let wanted = Traffic::udp(0xc000_024d, 0x0a00_0001, 5000, 443, 1400);
    let (mut ts_ns, mut bytes, mut index) = (NS * 1000, 0, 0);
    let mut segments = Vec::new();
    for number in 0..3_u64 {
        let name = format!("r-{number:010}-{}.pcapng", crate::name::time(ts_ns));
        let path = place.join(name);
        let mut output = Output::new(fs::File::create(&path).unwrap(), Format::Pcapng);
        for n in 0..1_000_000 {
            let rare = number == 2 && n % 40_000 == 20_000;
            let bytes = if rare {
                &wanted
            } else {
                &frames[n * 7 % frames.len()]
            };
            ts_ns += 1000;
            let packet = Packet {
                ts_ns,
                bytes,
                wire_len: bytes.len() as u32,
                flags: 0,
                lost: 0,
                comment: "",
                interface: &interface,
            };
            output.write(&packet).unwrap();
        }
        output.finish().unwrap();
        let start = std::time::Instant::now();
        rebuild(&path).unwrap();
        println!("index made in {:?}", start.elapsed());
        bytes += fs::metadata(&path).unwrap().len();
        index += fs::metadata(Sidecar::path_of(&path)).unwrap().len();
        segments.push(path);
    }
    println!(
        "{bytes} bytes, index {index}: {:.3} %",
        index as f64 * 100.0 / bytes as f64
    );
    for expression in [
        "host 192.0.2.77",
        "src host 192.0.2.77 and udp port 443",
        "port 443",
        "tcp[13] = 2",
    ] {
        for _ in 0..3 {
            let start = std::time::Instant::now();
            let mut found =
                Extract::open(std::slice::from_ref(&place), query(0, u64::MAX, expression))
                    .unwrap();
            let any = found.read().unwrap().is_some();
            let first = start.elapsed();
            while found.read().unwrap().is_some() {}
            let (all, tally) = (start.elapsed(), found.tally());
            let start = std::time::Instant::now();
            let theirs = |args: &[&str]| {
                segments.iter().any(|segment| {
                    let output = Command::new("tcpdump")
                        .args(args)
                        .arg("-r")
                        .arg(segment)
                        .arg(expression)
                        .output();
                    !output.unwrap().stdout.is_empty()
                })
            };
            assert_eq!(theirs(&["-n", "-c", "1"]), any);
            let tcpdump = start.elapsed();
            println!(
                "{expression}: first {first:?}, all {} {all:?}, {} bytes read; tcpdump's first {tcpdump:?}",
                tally.packets, tally.bytes_read
            );
        }
    }
    fs::remove_dir_all(&place).unwrap();
}
