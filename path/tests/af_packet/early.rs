//! What a filter below the queue refuses is dropped by the kernel and counted, and nothing else is.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vnplug_filter::ebpf::Wanted;
use vnplug_filter::libpcap::Library;
use vnplug_filter::{Program, Trust};
use vnplug_path::source::Queue;
use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig, Direction};
use vnplug_testing::PATIENCE;

use crate::net::{
    Sender, config, early, frame, ip, isolated, open, read, read_all, read_shared, rx, udp,
    until_queue_state, until_received, until_seen, veth,
};

fn programs(expressions: &[&str]) -> Vec<Arc<Program>> {
    let library = Library::load().expect("libpcap is there");
    let one = |text: &&str| {
        let expression = CString::new(*text).expect("no NUL");
        let list = library.compile(&expression, 262_144, 1).expect(text);
        Arc::new(Program::from_instructions(&list, Trust::Operator).expect(text))
    };
    expressions.iter().map(one).collect()
}

/// Has a queue let through only what one of these programs wants.
fn narrow(queue: &mut dyn Queue, programs: &[Arc<Program>]) {
    let wants: Vec<_> = programs
        .iter()
        .map(|it| Wanted::new(None, Some(it)))
        .collect();
    let seat = early(queue).seat().expect("early drop works here");
    // Another program than the one before, which passes everything from now on.
    static GENERATION: AtomicU32 = AtomicU32::new(1);
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    seat.set(generation, u64::MAX);
    let loaded = seat.load(generation, &wants).expect("the kernel takes it");
    early(queue).narrow(Box::new(loaded)).expect("narrow");
}

/// (seen, dropped, early)
fn counts(queue: &mut dyn Queue) -> (u64, u64, u64) {
    let counters = queue.counters();
    (counters.seen, counters.dropped, counters.early)
}

/// A frame with these bytes after its addresses.
fn tagged(frame: &[u8], tags: &[u8]) -> Vec<u8> {
    [&frame[..12], tags, &frame[12..]].concat()
}

#[test]
fn one_frame_in_a_hundred_passes_and_the_others_are_counted() {
    isolated(|| {
        veth();
        let mut queue = open(rx("va"));
        let sender = Sender::new("vb");
        // A hundred at a time: a block of the ring is used up each time its timeout is over.
        let send = |queue: &mut dyn Queue, wanted: usize| {
            let mut got = Vec::new();
            for _ in 0..100 {
                for port in 1_000..1_100 {
                    assert!(sender.send(&udp(port, 53)));
                }
                got.extend(read(queue, wanted, PATIENCE));
            }
            got.extend(read_all(queue, 0));
            got
        };
        narrow(queue.as_mut(), &programs(&["udp port 1042"]));
        let got = send(queue.as_mut(), 1);
        assert_eq!(got.len(), 100);
        assert!(got.iter().all(|got| got.bytes == udp(1_042, 53)));
        assert_eq!(counts(queue.as_mut()), (10_000, 0, 9_900));
        // Nobody wants anything.
        narrow(queue.as_mut(), &[]);
        assert!(send(queue.as_mut(), 0).is_empty());
        assert_eq!(counts(queue.as_mut()), (20_000, 0, 19_900));
        // The control: without a filter all of them come, and nothing is counted early.
        early(&mut *queue).seat().expect("a seat").set(0, 0);
        assert_eq!(send(queue.as_mut(), 100).len(), 10_000);
        assert_eq!(counts(queue.as_mut()), (30_000, 0, 19_900));
    });
}

#[test]
fn a_word_widens_where_the_kernel_takes_no_other_filter() {
    isolated(|| {
        veth();
        let mut queue = open(rx("va"));
        let sender = Sender::new("vb");
        narrow(queue.as_mut(), &programs(&["udp port 1042"]));
        assert!(sender.send(&udp(1, 53)));
        assert_eq!(counts(queue.as_mut()), (1, 0, 1));
        // Of this network namespace alone: no socket may have another filter any more.
        std::fs::write("/proc/sys/net/core/optmem_max", "1").expect("Linux 6.8 or later");
        let seat = early(&mut *queue).seat().expect("early drop works here");
        let loaded = seat.load(u32::MAX, &[]).expect("the kernel takes it");
        assert!(early(&mut *queue).narrow(Box::new(loaded)).is_err());
        // The control: the old one is still there.
        assert!(sender.send(&udp(1, 53)));
        assert_eq!(counts(queue.as_mut()), (2, 0, 2));
        seat.set(u32::MAX, 0);
        for port in 0..100 {
            assert!(sender.send(&udp(1_000 + port, 53)));
        }
        assert_eq!(read_all(queue.as_mut(), 100).len(), 100);
        assert_eq!(counts(queue.as_mut()), (102, 0, 2));
    });
}

#[test]
fn vlan_tags_count_wherever_the_kernel_keeps_them() {
    isolated(|| {
        veth();
        // The receiving kernel takes the outer tag out of the bytes; the sending one leaves it.
        let sides = [
            rx("va"),
            AfPacketConfig {
                direction: Direction::Tx,
                ..config("vb")
            },
        ];
        let sender = Sender::new("vb");
        let plain = [udp(1_000, 53), udp(2_000, 80), frame(200, 3), frame(60, 4)];
        let tags: [&[u8]; 6] = [
            &[],
            &[0x81, 0x00, 0x60, 0x2a],
            &[0x81, 0x00, 0x00, 0x00],
            &[0x88, 0xa8, 0x01, 0x02],
            &[0x88, 0xa8, 0x01, 0x02, 0x81, 0x00, 0x00, 0x63],
            &[0x81, 0x00, 0x00, 0x2a, 0x81, 0x00, 0x00, 0x2b],
        ];
        let sent: Vec<Vec<u8>> = plain
            .iter()
            .flat_map(|frame| tags.iter().map(|tags| tagged(frame, tags)))
            .collect();
        let expressions = [
            "udp port 53",
            "vlan",
            "vlan 42 and udp port 53",
            "vlan 42 and vlan 43",
            "not vlan 42",
            "ether[14:2] = 0x602a",
            "ether[15:2] & 0xff00 = 0x2a00",
            "vlan and ip and udp[2:2] = 80",
            "len > 100",
            "len = 64",
            "ether[70:4] = 0x01020304 or arp",
            "ether[199] >= 0 and len < 208",
        ];
        for side in sides {
            let mut queue = open(side);
            let mut dropped = 0;
            for (text, program) in expressions.iter().zip(programs(&expressions)) {
                narrow(queue.as_mut(), std::slice::from_ref(&program));
                sent.iter().for_each(|frame| assert!(sender.send(frame)));
                let wanted: Vec<_> = sent
                    .iter()
                    .filter(|frame| program.run(frame, frame.len() as u32) != 0)
                    .collect();
                let got = read_all(queue.as_mut(), wanted.len());
                let got: Vec<_> = got.iter().map(|got| &got.bytes).collect();
                assert_eq!(got, wanted, "{text}");
                dropped += (sent.len() - wanted.len()) as u64;
                assert_eq!(counts(queue.as_mut()).2, dropped, "{text}");
            }
            assert!(dropped > 0);
        }
    });
}

#[test]
fn a_variable_load_near_a_tag_beside_the_packet_leaves_the_frame_to_the_judge() {
    isolated(|| {
        veth();
        let mut queue = open(rx("va"));
        let sender = Sender::new("vb");
        // Loads at 12 to 15, by an offset that the kernel cannot know.
        let program = programs(&["ether[ether[15] & 3 + 11] = 0xee"]);
        narrow(queue.as_mut(), &program);
        assert!(sender.send(&tagged(&udp(1, 2), &[0x81, 0, 0, 0x01])));
        assert!(sender.send(&udp(1, 2)));
        let got = read_all(queue.as_mut(), 1);
        assert_eq!((got.len(), got[0].vlan_tci), (1, 1));
        // The judge refuses it; the plain one was refused before.
        assert_eq!(program[0].run(&got[0].bytes, got[0].wire_len), 0);
        assert_eq!(counts(queue.as_mut()), (2, 0, 1));
    });
}

#[test]
fn directions_that_are_not_captured_are_not_counted_either() {
    isolated(|| {
        veth();
        let (inward, outward) = (Sender::new("vb"), Sender::new("va"));
        for (direction, early) in [(Direction::Rx, 1), (Direction::Tx, 1), (Direction::Both, 2)] {
            let mut queue = open(AfPacketConfig {
                direction,
                ..config("va")
            });
            narrow(queue.as_mut(), &programs(&["udp port 7"]));
            assert!(inward.send(&udp(9, 53)) && outward.send(&udp(9, 53)));
            assert!(inward.send(&udp(9, 7)) && outward.send(&udp(9, 7)));
            assert_eq!(
                read_all(queue.as_mut(), early as usize).len(),
                early as usize
            );
            assert_eq!(
                counts(queue.as_mut()),
                (2 * early, 0, early),
                "{direction:?}"
            );
        }
    });
}

#[test]
fn a_snaplen_cuts_what_passes_and_drops_nothing_that_the_judge_would_take() {
    isolated(|| {
        veth();
        let mut queue = open(AfPacketConfig {
            snaplen: 64,
            ..rx("va")
        });
        let sender = Sender::new("vb");
        let wanted = programs(&["greater 1000 and ether[60] >= 0"]);
        narrow(queue.as_mut(), &wanted);
        assert!(sender.send(&frame(1514, 1)) && sender.send(&frame(999, 2)));
        let got = read_all(queue.as_mut(), 1);
        assert_eq!(
            (got.len(), got[0].bytes.len(), got[0].wire_len),
            (1, 64, 1514)
        );
        assert_eq!(counts(queue.as_mut()), (2, 0, 1));
    });
}

#[test]
fn merged_frames_are_judged_whole() {
    isolated(|| {
        ip("link set lo up");
        let mut queue = open(AfPacketConfig {
            block_timeout_ms: 1000,
            ..config("lo")
        });
        narrow(
            queue.as_mut(),
            &programs(&["greater 20000 and ether[19000] >= 0"]),
        );
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        let mut client = std::net::TcpStream::connect(address).expect("connect");
        let (mut server, _) = listener.accept().expect("accept");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            server.read_to_end(&mut all).expect("read")
        });
        client.write_all(&vec![7; 2_000_000]).expect("write");
        drop(client);
        assert_eq!(reader.join().expect("reader"), 2_000_000);
        let (seen, dropped, early) = counts(queue.as_mut());
        let got = read_all(queue.as_mut(), (seen - early) as usize);
        assert_eq!((got.len() as u64 + early, dropped), (seen, 0));
        assert!(
            !got.is_empty() && early > 0,
            "{} taken, {early} dropped",
            got.len()
        );
        assert!(got.iter().all(|got| got.wire_len >= 20_000));
    });
}

#[test]
fn queues_count_for_themselves_and_keep_their_filters_when_the_interface_comes_back() {
    isolated(|| {
        veth();
        let mut queues = AfPacket::open(AfPacketConfig {
            queues: 2,
            ..rx("va")
        })
        .expect("open");
        let wanted = programs(&["port 1007"]);
        for queue in &mut queues {
            narrow(queue.as_mut(), &wanted);
        }
        for round in 1..=2_u64 {
            let sender = Sender::new("vb");
            for port in 1_000..2_000 {
                assert!(sender.send(&udp(port, 53)));
            }
            until_seen(&mut queues, round * 1_000);
            let got = read_shared(&mut queues, 1);
            assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 1);
            let mut early = BTreeMap::new();
            for (at, queue) in queues.iter_mut().enumerate() {
                early.insert(at, counts(queue.as_mut()).2);
            }
            assert_eq!(early.values().sum::<u64>(), round * 999);
            assert!(
                early.values().all(|early| *early > round * 100),
                "{early:?}"
            );
            if round == 1 {
                ip("link del va");
                for queue in &mut queues {
                    until_queue_state(queue.as_mut(), "gone");
                }
                veth();
                for queue in &mut queues {
                    until_queue_state(queue.as_mut(), "up");
                }
            }
        }
    });
}

#[test]
fn without_the_right_to_use_ebpf_everything_comes() {
    isolated(|| {
        veth();
        let sender = Sender::new("vb");
        let mut sets = rustix::thread::capabilities(None).expect("capabilities");
        sets.effective = rustix::thread::CapabilitySet::NET_RAW;
        rustix::thread::set_capabilities(None, sets).expect("drop capabilities");
        let mut queue = open(rx("va"));
        // Where the kernel lets everybody use eBPF, there is nothing to fall back to.
        let everybody = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled")
            .is_ok_and(|text| text.trim() == "0");
        match early(&mut *queue).seat() {
            Ok(_) => assert!(everybody),
            Err(why) => assert!(why.starts_with("off: no permission"), "{why}"),
        }
        until_received(&sender, queue.as_mut());
        assert_eq!(queue.counters().early, 0);
    });
}

#[test]
fn an_operator_switches_it_off() {
    isolated(|| {
        veth();
        let mut queue = open(AfPacketConfig {
            early: false,
            ..rx("va")
        });
        assert_eq!(
            early(&mut *queue).seat().err().as_deref(),
            Some("off: as configured")
        );
        until_received(&Sender::new("vb"), queue.as_mut());
        assert_eq!(queue.counters().early, 0);
    });
}
