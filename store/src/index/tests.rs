use std::fs;

use super::*;
use crate::archive::Keys;
use crate::disk::Real;
use crate::name::Format;
use crate::read::Reader;
use crate::read::tests::Maker;
use vnplug_testing::{Dice, TestDir};

use crate::testing::Traffic;

/// All blocks of the index of a segment.
fn blocks(segment: &std::path::Path) -> (Vec<Block>, Sidecar) {
    let mut sidecar = Sidecar::open(segment);
    let mut probe = Reader::open(segment).unwrap();
    let list = std::iter::from_fn(|| sidecar.read(&mut probe)).collect();
    (list, sidecar)
}

/// A segment of three blocks, with few but large packets; the interface of half of them is described
/// late.
fn large_segment(seed: u64) -> Vec<u8> {
    let mut random = Dice(seed);
    let mut maker = Maker::ng(false);
    maker.interface(1, 9);
    let mut traffic = Traffic::new(seed);
    for n in 0..800_u64 {
        if n == 400 {
            maker.interface(1, 6);
        }
        let mut frame = traffic.frame();
        frame.resize(50_000 + random.below(10_000) as usize, 0);
        let late = u32::from(n >= 400 && n % 2 == 1);
        let units = if late == 1 {
            1_000_000 + n
        } else {
            1_000_000_000 + n * 1000
        };
        maker.packet(late, units, &frame);
    }
    maker.bytes
}

#[test]
fn every_packet_is_found_by_its_keys() {
    let mut random = Dice(3);
    let mut traffic = Traffic::new(4);
    let mut builder = Builder::new();
    let (mut sidecar, mut frames, mut at) = (Vec::new(), Vec::new(), 0);
    for n in 0..40_000_u64 {
        let frame = traffic.frame();
        builder.packet(at, 1, n, &frame);
        sidecar.extend(builder.take());
        frames.push((at, frame));
        at += 500 + random.below(3000);
    }
    sidecar.extend(builder.finish(at));
    let mut list = Vec::new();
    let mut rest = &sidecar[..];
    while rest[4] == 1 {
        let len = u32::from_le_bytes(*rest[8..].first_chunk().unwrap()) as usize;
        list.push(Block::decode(&rest[16..16 + len]).unwrap());
        rest = &rest[16 + len..];
    }
    assert!(list.len() > 3);
    let packets: u64 = list
        .iter()
        .flat_map(|b| b.chunks())
        .map(|c| c.packets)
        .sum();
    assert_eq!(packets, 40_000);
    for (n, (at, frame)) in frames.iter().enumerate() {
        let block = list.iter().find(|b| b.range().contains(at)).unwrap();
        let place = block
            .chunks()
            .iter()
            .position(|c| (c.start..c.end).contains(at))
            .unwrap();
        let chunk = block.chunks()[place];
        assert!((chunk.low_ns..=chunk.high_ns).contains(&(n as u64)));
        let has = |key, value: u32| block.with(key, value, value) >> place & 1 == 1;
        let mut ethers = Vec::new();
        let mut tags = Vec::new();
        let keys = keys::keys(frame, |e| ethers.push(e), |v| tags.push(v));
        assert!(ethers.iter().all(|&e| has(Key::Ethertype, e.into())));
        assert!(tags.iter().all(|&v| has(Key::Vlan, v.into())));
        let flow = keys.flow;
        for &port in &flow.ports[..flow.port_count.into()] {
            assert!(has(Key::Port, port.into()));
        }
        let key = match flow.family {
            keys::Family::Other => continue,
            keys::Family::V6 => Key::V6,
            _ => Key::V4,
        };
        assert!(flow.addresses.iter().all(|&address| has(key, address)));
    }
}

#[test]
fn an_index_torn_anywhere_loses_its_last_block_only_and_is_made_whole() {
    let place = TestDir::new("torn");
    let segment = place.0.join("a.pcapng");
    fs::write(&segment, large_segment(1)).unwrap();
    assert!(rebuild(&segment).unwrap());
    assert!(!rebuild(&segment).unwrap());
    let path = Sidecar::path_of(&segment);
    let whole = fs::read(&path).unwrap();
    let (good, sidecar) = blocks(&segment);
    assert!(sidecar.end().is_some() && good.len() == 3);
    let mut ends = vec![0];
    for block in &good {
        let mut frame = Vec::new();
        block::frame(&mut frame, block::BLOCK, |out| block.encode(out));
        ends.push(ends[ends.len() - 1] + frame.len());
    }
    for cut in 0..whole.len() {
        fs::write(&path, &whole[..cut]).unwrap();
        let (list, sidecar) = blocks(&segment);
        let expected = ends.iter().filter(|&&end| end <= cut).count() - 1;
        assert_eq!(list, good[..expected], "cut at {cut}");
        assert!(sidecar.end().is_none());
        if cut % 97 == 0 || ends.contains(&cut) {
            assert!(rebuild(&segment).unwrap());
            assert_eq!(fs::read(&path).unwrap(), whole, "cut at {cut}");
        }
    }
    for place in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x10;
        fs::write(&path, &bytes).unwrap();
        let (list, sidecar) = blocks(&segment);
        assert!(
            list.len() < 3 || sidecar.end().is_none(),
            "flipped at {place}"
        );
        assert_eq!(list, good[..list.len()]);
    }
}

#[test]
fn an_index_of_another_segment_is_not_believed() {
    let place = TestDir::new("other");
    let [a, b] = ["a", "b"].map(|name| place.0.join(format!("{name}.pcapng")));
    fs::write(&a, large_segment(1)).unwrap();
    fs::write(&b, large_segment(2)).unwrap();
    rebuild(&a).unwrap();
    fs::copy(Sidecar::path_of(&a), Sidecar::path_of(&b)).unwrap();
    assert_eq!(blocks(&b).0, []);
    // A segment that lost its end keeps what is still there.
    let bytes = fs::read(&a).unwrap();
    fs::write(&a, &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(blocks(&a).0.len(), 1);
    let trailer = |len| Sidecar::trailer(&a, len, &Keys::default());
    assert!(trailer(bytes.len() as u64 / 2).is_none());
    assert!(trailer(bytes.len() as u64).is_some());
}

#[test]
fn an_index_takes_less_than_a_hundredth() {
    // A mix of flows, then frames that have nothing in common.
    for name in ["mix", "all different"] {
        let mut traffic = Traffic::new(9);
        let mut random = Dice(5);
        let mut builder = Builder::new();
        let (mut at, mut index, mut packets) = (0, 0, 0_u64);
        while at < 100 << 20 {
            let frame = match name {
                "mix" => traffic.busy(),
                _ => {
                    let [a, b, ports] = [(); 3].map(|()| random.roll() as u32);
                    Traffic::udp(a, b, (ports >> 16) as u16, ports as u16, 1400)
                }
            };
            builder.packet(at, 1, packets, &frame);
            index += builder.take().len();
            at += 32 + frame.len().next_multiple_of(4) as u64;
            packets += 1;
        }
        index += builder.finish(at).len();
        let percent = index as f64 * 100.0 / at as f64;
        println!(
            "{name}: {packets} packets of {} bytes, index {percent:.3} %",
            at / packets
        );
        assert!(percent < 1.0, "{name}: {percent}");
    }
}

/// Prints what the builder takes per packet: `cargo test --release -- --ignored --nocapture builder_cost`.
#[test]
#[ignore = "a measurement"]
fn builder_cost() {
    for (name, small) in [
        ("busy mix", false),
        ("64-byte frames of 100,000 flows", true),
    ] {
        let mut traffic = Traffic::new(1);
        let frames: Vec<Vec<u8>> = (0..100_000)
            .map(|_| match small {
                true => traffic.frame_of(64),
                false => traffic.busy(),
            })
            .collect();
        let bytes: usize = frames.iter().map(|frame| frame.len() + 32).sum();
        let mut builder = Builder::new();
        let (mut at, mut size) = (0, 0);
        // Time of the processor: the machine may have other things to do.
        let now = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
        };
        // As the recorder does: packets are copied into a buffer, then looked through there.
        let (rounds, mut spent, mut buffer) = (20, 0.0, Vec::new());
        for round in 0..rounds {
            for group in frames.chunks(2000) {
                buffer.clear();
                group
                    .iter()
                    .for_each(|frame| buffer.extend_from_slice(frame));
                let (start, mut rest) = (now(), &buffer[..]);
                for frame in group {
                    let (bytes, next) = rest.split_at(frame.len());
                    builder.packet(at, 1, round, bytes);
                    (at, rest) = (at + frame.len() as u64 + 32, next);
                }
                size += builder.take().len();
                spent += now() - start;
            }
        }
        let ns = spent / (rounds * 100_000) as f64;
        let gb = bytes as f64 / 100_000.0 / ns;
        println!("{name}: {ns:.1} ns per packet, {gb:.2} GB/s, {size} bytes of index");
    }
}

#[test]
fn the_index_made_while_writing_is_the_one_made_afterwards() {
    let place = TestDir::new("live");
    let mut legacy = Maker::legacy(false, 0xa1b2_3c4d, 1);
    let mut traffic = Traffic::new(71);
    for n in 0..800 {
        let mut frame = traffic.frame();
        frame.resize(50_000, 0);
        legacy.legacy_packet(n, 7, &frame);
    }
    for (format, bytes) in [
        (Format::Pcapng, large_segment_in_ns(3)),
        (Format::Pcap, legacy.bytes),
    ] {
        let segment = place.0.join(format!("a.{}", format.extension()));
        fs::write(&segment, &bytes).unwrap();
        let mut reader = Reader::open(&segment).unwrap();
        let (mut disk, _) = Real::new(false);
        let mut live = Live::default();
        live.begin(&segment, format);
        let mut at = 0;
        let mut n = 0;
        while let Some(packet) = reader.read().unwrap() {
            let begins = packet.offset as usize;
            n += 1;
            if n % 30 == 0 {
                live.written(&mut disk, at as u64, &bytes[at..begins]);
                at = begins;
            }
        }
        live.written(&mut disk, at as u64, &bytes[at..]);
        live.finish(&mut disk, bytes.len() as u64);
        let path = Sidecar::path_of(&segment);
        let made = fs::read(&path).unwrap();
        assert!(!rebuild(&segment).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(rebuild(&segment).unwrap());
        assert!(made == fs::read(&path).unwrap(), "{format:?}");
        fs::remove_file(&path).unwrap();
    }
}

/// As [`large_segment`], with nanoseconds everywhere, as this crate writes them.
fn large_segment_in_ns(seed: u64) -> Vec<u8> {
    let mut maker = Maker::ng(false);
    maker.interface(1, 9);
    let mut traffic = Traffic::new(seed);
    for n in 0..800 {
        if n == 400 {
            maker.interface(101, 9);
        }
        let mut frame = traffic.frame();
        frame.resize(50_000, 0);
        maker.packet(u32::from(n > 400 && n % 5 == 0), n, &frame);
    }
    maker.bytes
}

#[test]
fn a_chunk_says_what_was_on_the_wire_and_what_was_lost() {
    use vnplug::{Meta, Packet};
    use vnplug_frame::capfile::write::{Interface, pcapng};
    let place = TestDir::new("amounts");
    let segment = place.0.join("a.pcapng");
    let interface = Interface {
        name: "lab".into(),
        link_type: 1,
        snaplen: 64,
        filter: String::new(),
    };
    let mut bytes = pcapng::header(&[interface], "");
    let (mut memory, mut at) = (vec![0; 100_000], 0);
    for n in 0..100_u32 {
        let packet = Packet {
            meta: Meta {
                ts_ns: u64::from(n),
                wire_len: 1000 + n,
                flow_hash: 0,
                lost: if n % 10 == 3 { n } else { 0 },
                // With a comment in front of the number, too.
                flags: if n == 13 { vnplug::flags::GAP } else { 0 },
                vlan_tci: 0,
                source: 0,
                queue: 0,
                ..Meta::default()
            },
            bytes: &[7; 61],
        };
        at = pcapng::packet(&mut memory, at, 0, &packet).unwrap();
    }
    bytes.extend_from_slice(&memory[..at]);
    fs::write(&segment, &bytes).unwrap();
    let (wire_bytes, lost) = ((1000..1100).sum(), (0..10).map(|n| n * 10 + 3).sum());
    let amounts = |segment: &std::path::Path| {
        let chunk = blocks(segment).0[0].chunks()[0];
        assert_eq!(chunk.packets, 100);
        (chunk.wire_bytes, chunk.lost)
    };
    // As it is read, then as it is written.
    rebuild(&segment).unwrap();
    assert_eq!(amounts(&segment), (wire_bytes, lost));
    fs::remove_file(Sidecar::path_of(&segment)).unwrap();
    let (mut disk, _) = Real::new(false);
    let mut live = Live::default();
    live.begin(&segment, Format::Pcapng);
    live.written(&mut disk, 0, &bytes);
    live.finish(&mut disk, bytes.len() as u64);
    assert_eq!(amounts(&segment), (wire_bytes, lost));
}

#[test]
fn an_index_without_amounts_is_read_and_they_are_estimated() {
    let mut builder = Builder::new();
    for n in 0..10 {
        builder.packet(100 * n, 1, n, &[0; 60]);
        builder.amount(60, 1);
    }
    let index = builder.finish(1000);
    let len = u32::from_le_bytes(*index[8..].first_chunk().unwrap()) as usize;
    let payload = &index[16..16 + len];
    assert_eq!(Block::decode(payload).unwrap().chunks()[0].wire_bytes, 600);
    // Two numbers, 600 and 10, make three bytes.
    let chunk = Block::decode(&payload[..len - 3]).unwrap().chunks()[0];
    assert_eq!((chunk.wire_bytes, chunk.lost), (1000 - 320, 0));
    for cut in [1, 2] {
        assert!(Block::decode(&payload[..len - cut]).is_none());
    }
}
