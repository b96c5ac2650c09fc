//! Groups: one copy for all, each told exactly what it lost, and members that lag, lie and die.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vnplug::{Next, NextView, Port, flags};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, label, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_frame::witness::{Checker, View};
use vnplug_ring::control::{ArenaHome, Counted, Message, Open};
use vnplug_ring::layout::{Life, TAIL};
use vnplug_testing::{Deadline, PATIENCE, eventually};

/// Reads to the end of the source.
fn read_all(port: &mut Port, see: impl FnMut(&[u8])) -> u64 {
    read_waking(port, Duration::from_millis(100), see)
}

/// As `read_all`; it wakes by itself only after `patience`.
fn read_waking(port: &mut Port, patience: Duration, mut see: impl FnMut(&[u8])) -> u64 {
    let deadline = Deadline::new("the source ends");
    let mut received = 0;
    loop {
        deadline.check();
        match port.next().unwrap() {
            Next::Packet(packet) => {
                received += 1;
                see(packet.bytes);
            }
            Next::Nothing => {
                port.wait(Some(patience)).unwrap();
            }
            Next::Ended => return received,
        }
    }
}

fn counted(all: &[Counted], port: u32) -> &Counted {
    let name = port.to_string();
    all.iter()
        .find(|it| it.kind == "port" && it.name.contains(&name))
        .unwrap()
}

#[test]
fn members_share_one_copy_and_each_has_its_filter_and_its_account() {
    const LOTS: u64 = 20;
    const LOT: u64 = 300;
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let group = |filter: &str| wire.daemon.port("wire1").group("probes").filter(filter);
    let mut all = group("").arena_bytes(1 << 20).open().unwrap();
    let mut udp = group("udp").open().unwrap();
    let mut long = group("greater 1000").snaplen(100).open().unwrap();
    // It does not read before everything is over.
    let mut lazy = group("").open().unwrap();
    let mut checker = Checker::new(View::Whole);
    let mut received = [0; 4];
    for lot in 0..LOTS {
        let len_bytes = if lot % 2 == 0 { 200 } else { 1400 };
        wire.send(&Stream {
            len_bytes,
            first: lot * LOT,
            ..Stream::new("wire0", LOT)
        });
        // Half an arena at a time: who reads it before the next lot is sent keeps up.
        let so_far = (lot + 1) * LOT;
        read_until(&mut all, &mut received[0], so_far, |bytes| {
            checker.feed(bytes);
        });
        read_until(&mut udp, &mut received[1], so_far, |_| {});
        let so_far = lot.div_ceil(2) * LOT;
        read_until(&mut long, &mut received[2], so_far, |bytes| {
            assert_eq!(bytes.len(), 100);
        });
    }
    while let Next::Packet(_) = lazy.next().unwrap() {
        received[3] += 1;
    }
    let counters = wire.daemon.audit();
    let ports = [&all, &udp, &long, &lazy];
    let mut delivered = 0;
    for (port, received) in ports.into_iter().zip(&received) {
        let host = counted(&counters, port.number());
        assert_eq!(label(host, "group"), "probes");
        delivered += value(host, "delivered");
        // What passed its filter it had, or was told that it lost.
        let passed = value(host, "delivered") + value(host, "dropped_full");
        assert_eq!(received + port.dropped(), passed, "{host:?}");
        assert!(*received > 0);
    }
    let kept_up = [&all, &udp, &long].map(Port::dropped);
    assert_eq!((kept_up, checker.corrupt()), ([0; 3], 0));
    assert!(lazy.dropped() > 1_000, "it did not lag: {}", lazy.dropped());
    let copies = value(counted(&counters, all.number()), "arena_copies");
    assert_eq!((copies, received[0]), (LOTS * LOT, LOTS * LOT), "one copy");
    assert!(copies < delivered);
}

/// Reads until this many packets came in all.
fn read_until(port: &mut Port, received: &mut u64, enough: u64, mut see: impl FnMut(&[u8])) {
    let deadline = Deadline::new(format!("{enough} packets come"));
    while *received < enough {
        deadline.check_seen(received);
        match port.next().unwrap() {
            Next::Packet(packet) => {
                *received += 1;
                see(packet.bytes);
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(100))).unwrap();
            }
            Next::Ended => panic!("the source ended"),
        }
    }
}

#[test]
fn what_is_looked_at_in_place_is_whole_or_lost() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=200000,count=100000,size=300";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let options = daemon.port("lab").group("views").arena_bytes(1 << 16);
    let mut port = options.ring_bytes(1 << 21).open().unwrap();
    let deadline = Deadline::new("the source ends");
    let (mut whole, mut torn) = (0_u64, 0_u64);
    loop {
        deadline.check();
        match port.next_view().unwrap() {
            NextView::Packet(view) => {
                let mut copy = [0; 2000];
                let len = view.read(0, &mut copy);
                if (whole + torn) % 1000 == 0 {
                    // Long enough for the arena to turn.
                    std::thread::sleep(Duration::from_millis(20));
                    view.read(0, &mut copy);
                }
                match view.finish() {
                    true => {
                        assert_eq!(len, 300);
                        whole += 1;
                    }
                    false => torn += 1,
                }
            }
            NextView::Nothing => {
                port.wait(Some(Duration::from_millis(100))).unwrap();
            }
            NextView::Ended => break,
        }
    }
    let counters = daemon.audit();
    let host = counted(&counters, port.number());
    let passed = value(host, "delivered") + value(host, "dropped_full");
    assert_eq!(whole, port.counts().received);
    assert_eq!(whole + port.dropped(), passed);
    assert!(torn > 0 && port.dropped() >= torn, "{torn} {whole}");
}

fn member(group: &str) -> Open {
    Open {
        group: group.into(),
        arena_bytes: 1 << 16,
        ..open("lab", 1 << 14)
    }
}

#[test]
fn nobody_can_write_the_arena_and_a_member_that_lies_goes_alone() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000"]).unwrap();
    let mut honest = daemon
        .port("lab")
        .group("g")
        .arena_bytes(1 << 20)
        .open()
        .unwrap();
    let mut liar = Raw::greeted(&daemon.socket());
    let Message::Opened(opened) = liar.ask(&Message::Open(member("g")), 0) else {
        panic!("not opened");
    };
    assert_eq!(opened.arenas.home, ArenaHome::Apart);
    let fds = liar.take_fds();
    assert_eq!(fds.len(), 4);
    let (words, records, arenas) = (&fds[0], &fds[1], &fds[3]);
    // Neither by a mapping nor by a call, nor opened again.
    assert!(vnplug::map_memory(arenas.as_fd(), opened.arenas.map_len).is_err());
    let copy = arenas.try_clone().unwrap();
    assert!(File::from(copy).write_all(b"lies").is_err());
    assert!(rustix::fs::ftruncate(arenas, 4096).is_err());
    // The control: its own ring it may write, and is found out.
    let region = vnplug::map_apart(words.as_fd(), records.as_fd(), &opened).unwrap();
    let place = opened.rings[0];
    let ring = region.part(place.offset, place.len).unwrap();
    ring.store_u64(TAIL, 0x1234_5678, Ordering::Release);
    eventually("the liar is in quarantine", || {
        let life = Life::from_word(ring.load_u64(vnplug_ring::layout::LIFE, Ordering::Acquire));
        ring.store_u64(TAIL, 0x1234_5678, Ordering::Release);
        life == Life::Quarantined
    });
    let before = honest.counts();
    eventually("the honest one goes on", || {
        honest
            .batch(1000)
            .for_each(|packet| assert!(packet.is_ok()));
        honest.counts().received > before.received + 5_000
    });
    daemon.audit();
}

#[test]
fn members_that_die_leave_nothing_and_the_last_takes_the_arena_with_it() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000"]).unwrap();
    let fds = || {
        std::fs::read_dir(format!("/proc/{}/fd", daemon.pid()))
            .unwrap()
            .count()
    };
    let arenas = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).unwrap();
        maps.lines()
            .filter(|line| line.contains("vnplug-arena"))
            .count()
    };
    let _counters = daemon.counters();
    let before = fds();
    for _ in 0..20 {
        let mut first = daemon.port("lab").group("g").open().unwrap();
        let others: Vec<Raw> = (0..3)
            .map(|_| {
                let mut other = Raw::greeted(&daemon.socket());
                let answer = other.ask(&Message::Open(member("g")), 0);
                assert!(matches!(answer, Message::Opened(_)), "{answer:?}");
                other
            })
            .collect();
        assert!(arenas() >= 1);
        let died = Instant::now();
        drop(others);
        let start = first.counts().received;
        eventually("the others' death costs it nothing", || {
            first.batch(1000).for_each(|packet| assert!(packet.is_ok()));
            first.counts().received > start + 500 && died.elapsed() > Duration::from_millis(20)
        });
        drop(first);
        eventually("nothing is left", || fds() <= before + 1 && arenas() == 0);
    }
    daemon.audit();
}

#[test]
fn a_member_comes_back_after_the_daemon_was_killed() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000"]).unwrap();
    let mut ports: Vec<Port> = (0..2)
        .map(|_| daemon.port("lab").group("g").open().unwrap())
        .collect();
    daemon.kill();
    daemon.launch().unwrap();
    for port in &mut ports {
        let deadline = Deadline::new("it comes back");
        loop {
            deadline.check();
            match port.next().unwrap() {
                Next::Packet(packet) if packet.meta.flags & flags::GAP != 0 => break,
                Next::Packet(_) => {}
                Next::Nothing => {
                    port.wait(Some(Duration::from_millis(100))).unwrap();
                }
                Next::Ended => panic!("the source does not end"),
            }
        }
        assert_eq!(port.counts().reopened, 1);
    }
    let counters = daemon.audit();
    for port in &ports {
        assert_eq!(label(counted(&counters, port.number()), "group"), "g");
    }
}

/// Reads 16,000 frames of 1,514 bytes with a watermark that is never reached; says how many came, how
/// many were lost, and how often the host rang.
fn read_by_watermark(group: Option<&str>, filter: &str) -> (u64, u64, u64) {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=1000,count=16000,size=1514,flows=3,protocols=udp4+tcp4+icmp4";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let sized = |group: Option<&str>| {
        let port = daemon.port("lab");
        match group {
            Some(group) => port.group(group).arena_bytes(1 << 24),
            None => port.ring_bytes(1 << 24),
        }
    };
    // It has the arena turn over, and reads nothing before the end.
    let mut other = group.map(|group| sized(Some(group)).open().unwrap());
    // The control: as the one below, but nothing wakes it.
    let mut late = group.map(|group| sized(Some(group)).filter(filter).open().unwrap());
    let port = sized(group).filter(filter).watermark(30_000);
    let mut port = port.max_delay(Duration::from_secs(60)).open().unwrap();
    let received = read_waking(&mut port, PATIENCE, |_| {});
    if let Some(other) = &mut other {
        read_all(other, |_| {});
    }
    if let Some(late) = &mut late {
        let (read, lost) = (read_all(late, |_| {}), late.dropped());
        assert!(
            lost > 1_000,
            "who wakes too late loses: {lost}, {read} read"
        );
    }
    let counters = daemon.audit();
    let host = counted(&counters, port.number());
    let passed = value(host, "delivered") + value(host, "dropped_full");
    assert_eq!(received + port.dropped(), passed, "{host:?}");
    (received, port.dropped(), value(host, "rings"))
}

#[test]
fn a_watermark_beyond_the_arena_loses_nothing() {
    // 5,400 frames are half of 16 MiB: a reader has five seconds to wake up.
    std::thread::scope(|scope| {
        for (group, filter) in [(None, ""), (Some("g"), ""), (Some("g"), "tcp")] {
            scope.spawn(move || {
                let (received, dropped, rings) = read_by_watermark(group, filter);
                assert_eq!(dropped, 0, "{group:?} {filter:?} {received} {rings}");
                assert!(received > 5_000, "{group:?} {filter:?} {received}");
                assert!((1..=60).contains(&rings), "{group:?} {filter:?} {rings}");
            });
        }
    });
}
