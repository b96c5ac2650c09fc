//! Capture files, well-formed, cut, hostile and mutated.

mod golden;
mod play;

use std::io::Read;

use golden::{Expected, Golden, Order};
use vnplug_frame::witness::seed;
use vnplug_path::source::pcap::reader::{BadFile, Peek, Reader};

/// Reads a file out, `step` bytes at a time at most.
fn read_out(file: &[u8], step: usize) -> (Vec<Expected>, Result<(), BadFile>) {
    struct Steps<'a>(&'a [u8], usize);
    impl Read for Steps<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = self.1.min(buffer.len());
            self.0.read(&mut buffer[..count])
        }
    }
    let mut reader = Reader::new(Steps(file, step));
    let mut packets = Vec::new();
    for _ in 0..4 * file.len() + 16 {
        match reader.peek() {
            Ok(Peek::Packet(packet)) => {
                packets.push(Expected {
                    bytes: reader.bytes(&packet).to_vec(),
                    wire_len: packet.wire_len,
                    ts_ns: packet.ts_ns,
                    outbound: packet.outbound,
                });
                reader.advance();
            }
            Ok(Peek::Starved(needed)) => {
                reader.fill(needed).expect("memory can be read");
            }
            Ok(Peek::End) => return (packets, Ok(())),
            Err(bad) => {
                assert_eq!(reader.peek(), Err(bad.clone()), "the error stays");
                assert!(bad.offset <= file.len() as u64, "{bad}");
                return (packets, Err(bad));
            }
        }
    }
    panic!(
        "no end after {} packets of {} bytes",
        packets.len(),
        file.len()
    );
}

#[test]
fn every_variant_reads_exactly() {
    for golden in golden::all() {
        for step in [1, 7, usize::MAX] {
            let (packets, result) = read_out(&golden.file(), step);
            assert_eq!(packets, golden.packets(), "{}", golden.name);
            assert_eq!(result, Ok(()), "{}", golden.name);
        }
    }
}

/// A file cut at every byte.
#[test]
fn cut_anywhere_gives_the_whole_packets_and_then_where_it_was_cut() {
    for Golden { name, records } in golden::all() {
        let file: Vec<u8> = records
            .iter()
            .flat_map(|record| record.bytes.clone())
            .collect();
        let mut start = 0;
        let mut before = Vec::new();
        for (n, record) in records.iter().enumerate() {
            let end = start + record.bytes.len();
            for cut in start..end {
                let (packets, result) = read_out(&file[..cut], usize::MAX);
                assert_eq!(packets, before, "{name} cut at {cut}");
                match result {
                    Ok(()) => assert!(cut == start && n > 0, "{name} cut at {cut}: no error"),
                    Err(bad) => {
                        assert_eq!(bad.offset, start as u64, "{name} cut at {cut}: {bad}");
                        let word = if cut == 0 { "empty" } else { "truncated" };
                        assert!(bad.what.contains(word), "{name} cut at {cut}: {bad}");
                        assert!(cut > start || n == 0, "{name} cut at {cut}: {bad}");
                    }
                }
            }
            before.extend(record.packet.clone());
            start = end;
        }
    }
}

/// What a file may claim.
#[test]
fn hostile_files_end_with_the_offset_of_the_lie() {
    let order = Order(false);
    let section = order.section();
    let ethernet = order.interface(1, 0, &[]);
    let good = order.enhanced(0, 1, 60, &[5; 60]);
    let prefix = [section.clone(), ethernet.clone(), good.clone()].concat();
    let after = prefix.len() as u64;
    let with = |tail: &[u8]| [prefix.as_slice(), tail].concat();
    let words = |words: &[u32]| order.u32s(words);
    let sized = |len| with(&[words(&[6, len]), vec![0; 64]].concat());
    let option = |code, value: &[u8]| with(&order.interface(1, 0, &order.option(code, value)));
    let mut long_trailer = order.block(5, &[0; 8]);
    long_trailer[16] += 4;
    let mut over = order.enhanced(0, 1, 60, &[5; 60]);
    over[20..24].copy_from_slice(&1_000_000u32.to_le_bytes());
    let mut over_simple = order.block(3, &words(&[64]));
    over_simple.truncate(16);
    let mut reaching = order.interface(1, 0, &order.option(2, b"eth0"));
    reaching[18] = 0xff;
    let legacy = order.legacy_header(0xa1b2_c3d4, (2, 4), 1);
    let link = |number| order.legacy_header(0xa1b2_c3d4, (2, 4), number);

    for (name, file, packets, offset, word) in [
        (
            "text",
            b"hello, this is not a capture".to_vec(),
            0,
            0,
            "neither",
        ),
        ("gzip", vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0], 0, 0, "gzip"),
        ("zeros", vec![0; 4096], 0, 0, "neither"),
        (
            "version",
            order.legacy_header(0xa1b2_c3d4, (9, 9), 1),
            0,
            4,
            "version 9.9",
        ),
        ("raw IP", link(101), 0, 20, "101 (RAW IP)"),
        ("Wi-Fi", link(105), 0, 20, "105 (IEEE802_11)"),
        ("unknown link", link(9999), 0, 20, "9999 (unknown)"),
        (
            "caplen",
            [legacy, words(&[0, 0, 262_145, 0])].concat(),
            0,
            32,
            "262145",
        ),
        ("length 0", sized(0), 1, after + 4, "length 0"),
        ("length 8", sized(8), 1, after + 4, "length 8"),
        ("length 33", sized(33), 1, after + 4, "multiple"),
        ("length 2^32-4", sized(u32::MAX - 3), 1, after + 4, "limit"),
        (
            "unknown of 2^32-4",
            with(&words(&[77, u32::MAX - 3, 0])),
            1,
            after,
            "truncated",
        ),
        (
            "trailing length",
            with(&long_trailer),
            1,
            after + 16,
            "20 at its beginning, 24",
        ),
        (
            "missing IDB",
            with(&order.enhanced(1, 0, 4, &[0; 4])),
            1,
            after + 8,
            "interface 1",
        ),
        (
            "IDB of the section before",
            with(&[section.clone(), good.clone()].concat()),
            1,
            after + 28 + 8,
            "interface 0",
        ),
        ("caplen over block", with(&over), 1, after + 20, "1000000"),
        (
            "simple over block",
            with(&over_simple),
            1,
            after + 8,
            "room for 0",
        ),
        (
            "byte-order magic",
            with(&words(&[0x0a0d_0d0a, 28, 5, 1, 0, 0, 28])),
            1,
            after + 8,
            "magic",
        ),
        ("tsresol 10^-20", option(9, &[20]), 1, after + 20, "0x14"),
        ("tsresol 10^-127", option(9, &[127]), 1, after + 20, "0x7f"),
        ("tsresol 2^-127", option(9, &[255]), 1, after + 20, "0xff"),
        (
            "tsresol of 2 bytes",
            option(9, &[6, 6]),
            1,
            after + 20,
            "2 bytes",
        ),
        (
            "option over block",
            with(&reaching),
            1,
            after + 16,
            "reaches over",
        ),
        (
            "second link type",
            with(&order.interface(113, 0, &[])),
            1,
            after + 8,
            "LINUX_SLL",
        ),
        (
            "interfaces",
            with(&ethernet.repeat(65_536)),
            1,
            after + 65_535 * 20,
            "65536 interfaces",
        ),
    ] {
        let (got, result) = read_out(&file, usize::MAX);
        let bad = result.expect_err(name);
        assert_eq!((got.len(), bad.offset), (packets, offset), "{name}: {bad}");
        assert!(bad.what.contains(word), "{name}: {bad}");
    }
}

/// Much of everything that is legal is read, in time that grows with the file only.
#[test]
fn many_options_interfaces_and_sections_are_read() {
    let order = Order(false);
    let options = order.option(2, &[0xff; 4]).repeat(1_000_000);
    let long = order.option(2, &vec![b'n'; 65_535]);
    let mut body = order.enhanced_body(1, 9, 60, &[5; 60]);
    body.extend(order.option(4, &[]).repeat(1_000_000));
    let mut file = order.section();
    file.extend(order.interface(1, 0, &options));
    file.extend(order.interface(1, 0, &long));
    file.extend(order.block(6, &body));
    file.extend(order.interface(1, 0, &[]).repeat(65_534));
    file.extend(
        [order.section(), order.interface(1, 0, &[])]
            .concat()
            .repeat(10_000),
    );
    file.extend(order.enhanced(0, 10, 60, &[5; 60]));
    let (packets, result) = read_out(&file, usize::MAX);
    assert_eq!((packets.len(), result), (2, Ok(())));
}

#[test]
fn frame_check_sequences_are_taken_off() {
    let order = Order(true);
    let mut file = order.legacy_header(0xa1b2_c3d4, (2, 4), 0x2400_0001);
    file.extend(order.u32s(&[1, 2, 64, 64]));
    file.extend([1; 64]);
    file.extend(order.u32s(&[1, 2, 62, 64]));
    file.extend([1; 62]);
    let (packets, result) = read_out(&file, usize::MAX);
    assert_eq!(result, Ok(()));
    let lengths: Vec<_> = packets
        .iter()
        .map(|p| (p.bytes.len(), p.wire_len))
        .collect();
    assert_eq!(lengths, [(60, 60), (60, 60)]);
}

/// 30,000 mutants of the golden files, in memory.
#[test]
fn mutants_neither_panic_nor_hang() {
    let files: Vec<Vec<u8>> = golden::all().iter().map(Golden::file).collect();
    let mut random = Random(seed("mutants"));
    let mut ended = [0, 0];
    for n in 0..30_000 {
        let mutant = random.mutant(&files[n % files.len()]);
        let (packets, result) = read_out(&mutant, 1 + random.below(8192));
        assert!(
            packets
                .iter()
                .all(|packet| packet.bytes.len() <= packet.wire_len as usize)
        );
        ended[usize::from(result.is_err())] += 1;
    }
    assert!(
        ended.iter().all(|count| *count > 1000),
        "both ends are met: {ended:?}"
    );
}

/// xorshift64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }

    pub(crate) fn mutant(&mut self, file: &[u8]) -> Vec<u8> {
        const WORDS: [u32; 10] = [
            0,
            1,
            4,
            8,
            0x7fff_ffff,
            0x8000_0000,
            u32::MAX,
            u32::MAX - 3,
            262_144,
            262_145,
        ];
        let mut mutant = file.to_vec();
        for _ in 0..=self.below(3) {
            let at = self.below(mutant.len());
            match self.below(6) {
                0 => mutant[at] ^= 1 << self.below(8),
                1 => mutant[at] = self.below(256) as u8,
                2 if at + 4 <= mutant.len() => {
                    let word = WORDS[self.below(WORDS.len())];
                    let aligned = at & !3;
                    mutant[aligned..aligned + 4].copy_from_slice(&word.to_le_bytes());
                }
                3 if at > 0 => mutant.truncate(at),
                4 => {
                    let end = (at + self.below(64)).min(mutant.len());
                    let part = mutant[at..end].to_vec();
                    let to = self.below(mutant.len());
                    mutant.splice(to..to, part);
                }
                _ => mutant.insert(at, self.below(256) as u8),
            }
        }
        mutant
    }
}
