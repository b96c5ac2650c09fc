//! The packet-socket source on real interfaces; needs root, `ip` and veth.
//!
//! Every test has a network namespace of its own, so they run side by side and leave nothing.

mod counters;
mod early;
mod link;
mod net;
mod offload;
mod reserve;
mod shown;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use net::{
    Got, Sender, config, frame, ip, isolated, open, read, read_all, read_shared, rx, udp,
    until_received, veth,
};
use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig, Direction, interfaces};
use vnplug_path::source::wait;
use vnplug_ring::layout::flags;
use vnplug_testing::PATIENCE;

fn error_of(config: AfPacketConfig) -> String {
    AfPacket::open(config)
        .map(|_| ())
        .expect_err("must not open")
        .to_string()
}

#[test]
fn frames_of_every_size_arrive_byte_for_byte() {
    isolated(|| {
        veth();
        ip("link set va mtu 9000");
        ip("link set vb mtu 9000");
        let mut queue = open(rx("va"));
        let sender = Sender::new("vb");
        let sent: Vec<Vec<u8>> = (14..=1514)
            .chain([9014])
            .map(|len| frame(len, len as u32))
            .collect();
        sent.iter().for_each(|frame| assert!(sender.send(frame)));
        let got = read_all(queue.as_mut(), sent.len());
        assert_eq!(got.len(), sent.len());
        for (got, sent) in got.iter().zip(&sent) {
            assert_eq!(&got.bytes, sent);
            assert_eq!((got.wire_len, got.flags), (sent.len() as u32, 0));
        }
    });
}

#[test]
fn long_frame_is_cut_at_the_snaplen_and_keeps_its_length() {
    isolated(|| {
        veth();
        let mut queue = open(AfPacketConfig {
            snaplen: 64,
            ..rx("va")
        });
        let sent = frame(1514, 1);
        Sender::new("vb").send(&sent);
        let got = read(queue.as_mut(), 1, PATIENCE).remove(0);
        assert_eq!((&got.bytes[..], got.wire_len), (&sent[..64], 1514));
    });
}

#[test]
fn vlan_tags_are_as_on_the_wire_both_ways() {
    isolated(|| {
        veth();
        // The receiving kernel takes the outer tag into metadata; the sending one leaves it.
        let mut received = open(rx("va"));
        let mut sent_side = open(AfPacketConfig {
            direction: Direction::Tx,
            ..config("vb")
        });
        let sender = Sender::new("vb");
        let tagged = |tags: &[u8]| {
            let mut tagged = frame(200, 7);
            tagged.splice(12..12, tags.iter().copied());
            tagged
        };
        let sent = [
            tagged(&[0x81, 0x00, 0x60, 0x2a]),
            tagged(&[0x81, 0x00, 0x00, 0x00]),
            tagged(&[0x88, 0xa8, 0x01, 0x02]),
            tagged(&[0x88, 0xa8, 0x01, 0x02, 0x81, 0x00, 0x00, 0x63]),
        ];
        sent.iter().for_each(|frame| assert!(sender.send(frame)));
        for (queue, bits) in [(&mut received, 0), (&mut sent_side, flags::OUTBOUND)] {
            let got = read_all(queue.as_mut(), sent.len());
            assert_eq!(got.len(), sent.len());
            for (got, sent) in got.iter().zip(&sent) {
                assert_eq!(&got.bytes, sent);
                assert_eq!(got.wire_len, sent.len() as u32);
                assert_eq!(got.flags, flags::VLAN | bits);
                assert_eq!(got.vlan_tci, u16::from_be_bytes([sent[14], sent[15]]));
            }
        }
    });
}

#[test]
fn each_direction_brings_its_frames_and_counts_no_others() {
    isolated(|| {
        veth();
        let (inward, outward) = (Sender::new("vb"), Sender::new("va"));
        for (direction, wanted) in [
            (Direction::Rx, &[0][..]),
            (Direction::Tx, &[1]),
            (Direction::Both, &[0, 1]),
        ] {
            let mut queue = open(AfPacketConfig {
                direction,
                ..config("va")
            });
            assert!(inward.send(&frame(60, 0)) && outward.send(&frame(60, 1)));
            let got = read_all(queue.as_mut(), wanted.len());
            let expected: Vec<_> = wanted.iter().map(|&seq| frame(60, seq)).collect();
            assert_eq!(got.iter().map(|got| &got.bytes).collect::<Vec<_>>(), {
                expected.iter().collect::<Vec<_>>()
            });
            for got in &got {
                assert_eq!(got.flags & flags::OUTBOUND != 0, got.bytes == frame(60, 1));
            }
            let counters = queue.counters();
            assert_eq!((counters.seen, counters.dropped), (wanted.len() as u64, 0));
        }
    });
}

#[test]
fn loopback_frames_come_once_and_super_frames_whole() {
    isolated(|| {
        ip("link set lo up");
        // Nothing is read meanwhile, so blocks must not be used up by their time.
        let mut queue = open(AfPacketConfig {
            block_timeout_ms: 1000,
            ..config("lo")
        });
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        let mut client =
            std::net::TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
        let (mut server, _) = listener.accept().expect("accept");
        let data: Vec<u8> = (0..2_000_000u32).map(|i| (i / 7) as u8).collect();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            server.read_to_end(&mut all).map(|_| all).expect("read")
        });
        client.write_all(&data).expect("write");
        drop(client);
        assert!(reader.join().expect("reader") == data);
        // The kernel has counted every frame by now; those in unfinished blocks are to come.
        let seen = queue.counters().seen;
        let got = read_all(queue.as_mut(), seen as usize);
        assert!(got.iter().all(|got| got.flags & flags::OUTBOUND == 0));
        assert!(
            got.iter()
                .all(|got| got.bytes.len() == got.wire_len as usize)
        );
        assert!(
            got.iter().any(|got| got.bytes.len() > 60_000),
            "no super-frame"
        );
        assert!(got.iter().any(|got| got.flags & flags::CSUM_NOT_READY != 0));
        let payload: usize = got.iter().map(tcp_payload).sum();
        assert!(payload >= data.len(), "{payload}");
        // What TCP sends again has another IP identification.
        let mut distinct: Vec<_> = got.iter().map(|got| &got.bytes).collect();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), got.len(), "a frame came twice");
        let counters = queue.counters();
        assert_eq!((counters.seen, counters.dropped), (got.len() as u64, 0));
    });
}

fn tcp_payload(got: &Got) -> usize {
    let ip = &got.bytes[14..];
    let (ip_header, total) = (
        usize::from(ip[0] & 15) * 4,
        u16::from_be_bytes([ip[2], ip[3]]),
    );
    usize::from(total) - ip_header - usize::from(ip[ip_header + 12] >> 4) * 4
}

#[test]
fn queues_share_frames_each_once_and_flows_stay_together() {
    isolated(|| {
        veth();
        let mut queues = AfPacket::open(AfPacketConfig {
            queues: 2,
            ..rx("va")
        })
        .expect("open");
        let sender = Sender::new("vb");
        for port in 1000..2000 {
            assert!(sender.send(&udp(port, 53)) && sender.send(&udp(53, port)));
        }
        let mut all = Vec::new();
        for got in read_shared(&mut queues, 2000) {
            assert!(got.len() > 500, "{} frames of 2000", got.len());
            // Request and reply follow each other, so both are here.
            for pair in got.chunks(2) {
                assert_eq!(pair[0].bytes[34..36], pair[1].bytes[36..38]);
            }
            all.extend(got.into_iter().map(|got| got.bytes[34..38].to_vec()));
        }
        assert_eq!(all.len(), 2000);
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 2000);
    });
}

#[test]
fn timestamps_rise_and_are_of_now() {
    isolated(|| {
        veth();
        let now = || {
            let since = SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .expect("clock");
            since.as_nanos() as u64
        };
        let mut queue = open(rx("va"));
        let sender = Sender::new("vb");
        let before = now();
        (0..1000).for_each(|seq| assert!(sender.send(&frame(60, seq))));
        let after = now();
        let got = read_all(queue.as_mut(), 1000);
        assert_eq!(got.len(), 1000);
        assert!(got.is_sorted_by_key(|got| got.ts_ns));
        let slack = 1_000_000_000;
        assert!(got[0].ts_ns + slack >= before && got[999].ts_ns <= after + slack);
        assert!(got.iter().any(|got| got.ts_ns % 1000 != 0), "nanoseconds");
    });
}

#[test]
fn lone_frame_is_handed_over_soon() {
    isolated(|| {
        veth();
        let mut queue = open(rx("va"));
        let sender = Sender::new("vb");
        let mut took: Vec<_> = (0..50)
            .map(|seq| {
                let start = Instant::now();
                assert!(sender.send(&frame(60, seq)));
                assert_eq!(read(queue.as_mut(), 1, PATIENCE).len(), 1);
                start.elapsed()
            })
            .collect();
        took.sort();
        assert!(
            // A few milliseconds on an idle machine; a block that had to fill would take for ever.
            took[25] < Duration::from_secs(1),
            "median {:?}",
            took[25]
        );
        println!("lone frame: median {:?}, worst {:?}", took[25], took[49]);
    });
}

#[test]
fn waker_ends_the_wait() {
    isolated(|| {
        veth();
        let mut queue = open(rx("va"));
        let waker = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).expect("fd");
        let start = Instant::now();
        wait(&mut *queue, waker.as_fd(), None);
        assert!(start.elapsed() < PATIENCE);
    });
}

#[test]
fn promiscuous_mode_is_held_while_open() {
    isolated(|| {
        veth();
        let promiscuity = || {
            let show = Command::new("ip")
                .args(["-d", "link", "show", "va"])
                .output();
            let text = String::from_utf8(show.expect("run ip").stdout).expect("text");
            text.contains("promiscuity 1")
        };
        let queue = open(config("va"));
        assert!(promiscuity());
        drop(queue);
        assert!(!promiscuity());
        let _queue = open(AfPacketConfig {
            promiscuous: false,
            ..config("va")
        });
        assert!(!promiscuity());
    });
}

#[test]
fn interface_without_hardware_timestamps_is_captured_all_the_same() {
    isolated(|| {
        veth();
        let mut queue = open(AfPacketConfig {
            hardware_timestamps: true,
            ..rx("va")
        });
        let got = until_received(&Sender::new("vb"), queue.as_mut());
        assert_eq!(got.flags, 0);
        assert!(got.ts_ns > 1_700_000_000_000_000_000);
    });
}

#[test]
fn errors_say_what_to_do() {
    isolated(|| {
        assert_eq!(
            error_of(config("nope")),
            "no interface \"nope\" here; list them with: ip link"
        );
        assert!(error_of(config("a\nvery long name indeed")).contains("a\\nvery long"));
        let error = error_of(AfPacketConfig {
            queues: 65,
            ..config("lo")
        });
        assert_eq!(error, "queues is 65; it must be 1 to 64");
        ip("tuntap add mode tun name t0");
        let error = error_of(config("t0"));
        assert!(
            error.starts_with("interface \"t0\" is not Ethernet but a device"),
            "{error}"
        );
        let huge = AfPacketConfig {
            block_size: 1 << 30,
            blocks: 4,
            ..config("lo")
        };
        assert!(error_of(huge).contains("less than 4 GiB"));

        let mut sets = rustix::thread::capabilities(None).expect("capabilities");
        sets.effective = rustix::thread::CapabilitySet::empty();
        rustix::thread::set_capabilities(None, sets).expect("drop capabilities");
        let error = error_of(config("lo"));
        assert!(error.contains("CAP_NET_RAW"), "{error}");
    });
}

#[test]
fn interfaces_are_listed() {
    isolated(|| {
        veth();
        ip("link set va mtu 1400");
        ip("link set va address 02:00:00:00:00:17");
        ip("link set vb down");
        let all = interfaces().expect("interfaces");
        let named = |name: &str| all.iter().find(|info| info.name == name).expect("listed");
        let va = named("va");
        assert_eq!(
            (va.up, va.mtu, va.mac),
            (true, 1400, Some([2, 0, 0, 0, 0, 0x17]))
        );
        assert!(!named("vb").up && named("vb").capturable);
        assert!(named("lo").capturable && named("lo").mac.is_none());
    });
}
