//! Groups on an AF_XDP source that lends its packet memory: what is received is read where the
//! kernel put it, by processes that lag, are killed or would like to write there.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::Write;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vnplug::{Next, NextView, Port, flags};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{program, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::Wire;
use vnplug_frame::witness::{Checker, Parsed, View, parse};
use vnplug_ring::control::{ArenaHome, Counted, Message, Open};
use vnplug_testing::{Deadline, eventually};

const LENT: &str = "wire1=af_xdp,fallback=no,arena=umem,frames=1024";

fn member(wire: &Wire, filter: &str) -> Port {
    let options = wire.daemon.port("wire1").group("probes").filter(filter);
    options.open().unwrap()
}

fn of_port<'a>(all: &'a [Counted], port: &Port) -> &'a Counted {
    let name = port.number().to_string();
    let mut ports = all.iter().filter(|it| it.kind == "port");
    ports.find(|it| it.name.contains(&name)).unwrap()
}

/// Reads what is there, until nothing came for a while and `enough` says so.
fn drain(
    port: &mut Port,
    mut see: impl FnMut(&[u8], u32),
    mut enough: impl FnMut() -> bool,
) -> u64 {
    let deadline = Deadline::new("enough comes");
    let mut received = 0;
    loop {
        deadline.check_seen(&received);
        // Asked first: what came before is read after.
        let last = enough();
        match port.next().unwrap() {
            Next::Packet(packet) => {
                received += 1;
                see(packet.bytes, packet.meta.lost);
            }
            Next::Nothing if last => return received,
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(20))).unwrap();
            }
            Next::Ended => panic!("the source ended"),
        }
    }
}

#[test]
fn members_read_each_frame_where_it_was_received() {
    let wire = Wire::new("1500", &["--source", LENT]);
    let mut all = member(&wire, "");
    let mut some = member(&wire, "udp and greater 1000");
    // Another group of the same source, and a ring of one's own beside them.
    let other = wire.daemon.port("wire1").group("other");
    let mut other = other.snaplen(100).open().unwrap();
    let mut own = wire.daemon.port("wire1").open().unwrap();
    let mut checkers: Vec<Checker> = (0..3).map(|_| Checker::new(View::Whole)).collect();
    let (mut counts, mut long) = ([0; 4], 0);
    for (run, len_bytes) in [(1, 60), (2, 1514), (3, 777)] {
        wire.send(&Stream {
            len_bytes,
            run,
            flows: 8,
            pps: NonZeroU64::new(2_000),
            ..Stream::new("wire0", 300)
        });
        wire.read(u64::from(run) * 300);
        long += 300 * u64::from(len_bytes > 1000);
        let ports = [&mut all, &mut some, &mut own];
        for ((port, checker), count) in ports.into_iter().zip(&mut checkers).zip(&mut counts) {
            let see = |bytes: &[u8], lost| {
                assert_eq!((bytes.len(), lost), (len_bytes, 0));
                checker.feed(bytes);
            };
            *count += drain(port, see, || true);
        }
        let see = |bytes: &[u8], _| assert_eq!(bytes.len(), len_bytes.min(100));
        counts[3] += drain(&mut other, see, || true);
    }
    assert_eq!(counts, [900, long, 900, 900]);
    assert!(checkers.iter().all(|checker| checker.corrupt() == 0));
    let counters = wire.daemon.audit();
    for port in [&all, &some, &other] {
        let host = of_port(&counters, port);
        assert_eq!(value(host, "arena_copies"), 0, "{host:?}");
        assert_eq!(value(host, "arena_lent"), 900, "{host:?}");
        assert_eq!(port.dropped(), 0);
    }
}

#[test]
fn a_reader_that_lags_loses_its_own_and_is_never_shown_another_frame() {
    const FRAMES: u64 = 60_000;
    let wire = Wire::new("1500", &["--source", LENT]);
    let (mut quick, mut slow) = (member(&wire, ""), member(&wire, ""));
    let (sent, ahead) = (AtomicBool::new(false), AtomicU64::new(0));
    let (received, lagging) = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut checker = Checker::new(View::Whole);
            let see = |bytes: &[u8], lost| {
                checker.feed(bytes);
                ahead.fetch_add(1 + u64::from(lost), Ordering::Relaxed);
            };
            let received = drain(&mut quick, see, || sent.load(Ordering::Acquire));
            assert_eq!(checker.corrupt(), 0);
            received
        });
        let lagging = scope.spawn(|| {
            let mut next = 0;
            let see = |bytes: &[u8], lost| {
                next += u64::from(lost);
                match parse(bytes) {
                    Parsed::Witness(witness) => assert_eq!(witness.seq, next),
                    other => panic!("{other:?}"),
                }
                next += 1;
                // It lags by more than the memory holds, however fast anybody is.
                let is_near = || ahead.load(Ordering::Relaxed) < next + 1_500;
                while next % 100 == 0 && is_near() && !sent.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            drain(&mut slow, see, || sent.load(Ordering::Acquire))
        });
        wire.send(&Stream {
            len_bytes: 300,
            ..Stream::new("wire0", FRAMES)
        });
        wire.read(FRAMES);
        sent.store(true, Ordering::Release);
        (reading.join().unwrap(), lagging.join().unwrap())
    });
    let counters = wire.daemon.audit();
    for (port, received) in [(&quick, received), (&slow, lagging)] {
        let host = of_port(&counters, port);
        assert_eq!(received + port.dropped(), FRAMES, "{host:?}");
        assert_eq!(value(host, "arena_copies"), 0);
    }
    // It had its part, and lost some after their descriptors were given to it.
    assert!(lagging > 1_000 && slow.dropped() > 10_000, "{lagging}");
    let dropped = value(of_port(&counters, &slow), "dropped_full");
    assert!(slow.dropped() > dropped, "none was recycled under it");
}

/// Also the control of the floor: the memory does hold another frame then.
#[test]
fn what_is_looked_at_in_place_is_told_to_be_recycled() {
    let wire = Wire::new("1500", &["--source", LENT]);
    let mut port = member(&wire, "");
    let (mut total, mut others) = (0, 0);
    for run in 1..=20 {
        let stream = |count| Stream {
            run,
            len_bytes: 200,
            ..Stream::new("wire0", count)
        };
        wire.send(&stream(1));
        total += 1;
        wire.read(total);
        let view = match port.next_view().unwrap() {
            NextView::Packet(view) => view,
            _ => panic!("nothing came"),
        };
        let mut before = [0; 200];
        assert_eq!(view.read(0, &mut before), 200);
        // More than are kept, and than the kernel has.
        wire.send(&stream(4000));
        total += 4000;
        wire.read(total);
        let mut after = [0; 200];
        view.read(0, &mut after);
        assert!(matches!(parse(&before), Parsed::Witness(it) if it.seq == 0));
        others += u32::from(matches!(parse(&after), Parsed::Witness(it) if it.seq != 0));
        assert!(!view.finish(), "it was believed");
        drain(&mut port, |_, _| {}, || true);
    }
    assert_eq!(others, 20, "the memory has another frame each time");
    assert!(port.dropped() >= 20);
}

#[test]
fn frames_of_several_chunks_are_copied_once_and_whole() {
    let wire = Wire::new("9000", &["--source", LENT]);
    let (mut one, mut two) = (member(&wire, ""), member(&wire, ""));
    let lens = [60, 9014, 1514, 3000];
    for (run, len_bytes) in (1..).zip(lens) {
        wire.send(&Stream {
            len_bytes,
            run,
            pps: NonZeroU64::new(2_000),
            ..Stream::new("wire0", 100)
        });
        wire.read(u64::from(run) * 100);
        for port in [&mut one, &mut two] {
            let mut checker = Checker::new(View::Whole);
            let see = |bytes: &[u8], lost| {
                assert_eq!((bytes.len(), lost), (len_bytes, 0));
                checker.feed(bytes);
            };
            assert_eq!(drain(port, see, || true), 100);
            assert_eq!(checker.corrupt(), 0);
        }
    }
    let counters = wire.daemon.audit();
    let host = of_port(&counters, &one);
    assert_eq!(value(host, "arena_copies"), 200, "two sizes are too long");
    assert_eq!(value(host, "arena_lent"), 200);
}

fn request() -> Open {
    Open {
        group: "probes".into(),
        ..open("wire1", 1 << 14)
    }
}

#[test]
fn nobody_can_write_the_packet_memory() {
    let wire = Wire::new("1500", &["--source", LENT]);
    let mut raw = Raw::greeted(&wire.daemon.socket());
    let Message::Opened(opened) = raw.ask(&Message::Open(request()), 0) else {
        panic!("not opened");
    };
    assert_eq!(opened.arenas.home, ArenaHome::Apart);
    let fds = raw.take_fds();
    let arenas = &fds[3];
    assert!(vnplug::map_memory(arenas.as_fd(), opened.arenas.map_len).is_err());
    let copy = arenas.try_clone().unwrap();
    assert!(File::from(copy).write_all(b"lies").is_err());
    assert!(rustix::fs::ftruncate(arenas, 4096).is_err());
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(arenas, hole, 0, 1 << 20).is_err());
    // Opened again by its path, it is as it was.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(arenas));
    if let Ok(mut again) = File::options().write(true).open(path) {
        assert!(again.write_all(b"lies").is_err());
    }
}

#[test]
fn a_member_that_is_killed_costs_the_others_nothing_and_the_memory_is_there_for_the_next() {
    let wire = Wire::new("1500", &["--source", LENT]);
    let mut other = member(&wire, "");
    let mut total = 0;
    for run in 1..=3 {
        let mut victim = wire.netns.command(program("vnplug").unwrap());
        victim
            .args(["count", "wire1", "--group", "probes"])
            .env("VNPLUG_SOCKET", wire.daemon.socket())
            .stdout(Stdio::null());
        let mut victim = victim.spawn().unwrap();
        eventually("it joins", || {
            let counters = wire.daemon.counters();
            counters.iter().filter(|it| it.kind == "port").count() >= 2
        });
        let mut checker = Checker::new(View::Whole);
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                wire.send(&Stream {
                    run,
                    pps: NonZeroU64::new(5_000),
                    ..Stream::new("wire0", 2000)
                });
            });
            std::thread::sleep(Duration::from_millis(100));
            victim.kill().unwrap();
            victim.wait().unwrap();
            let see = |bytes: &[u8], lost| {
                assert_eq!(lost, 0);
                checker.feed(bytes);
            };
            total += drain(&mut other, see, || sending.is_finished());
        });
        wire.read(u64::from(run) * 2000);
        total += drain(&mut other, |_, _| {}, || true);
        assert_eq!((total, checker.corrupt()), (u64::from(run) * 2000, 0));
    }
}

#[test]
fn members_come_back_after_the_daemon_was_killed_and_after_the_interface_was_made_anew() {
    let mut wire = Wire::new("1500", &["--source", LENT]);
    let mut port = member(&wire, "");
    wire.send(&Stream::new("wire0", 10));
    wire.read(10);
    wire.netns.ip(&["link", "del", "wire1"]).unwrap();
    // What was received before is read after.
    let mut checker = Checker::new(View::Whole);
    let see = |bytes: &[u8], _| {
        checker.feed(bytes);
    };
    assert_eq!((drain(&mut port, see, || true), checker.corrupt()), (10, 0));
    wire.netns.veth("wire0", "wire1").unwrap();
    let deadline = Deadline::new("the interface is found");
    let mut came = false;
    while !came {
        deadline.check();
        wire.send(&Stream::new("wire0", 1));
        port.wait(Some(Duration::from_millis(50))).unwrap();
        drain(
            &mut port,
            |bytes, _| came |= matches!(parse(bytes), Parsed::Witness(_)),
            || true,
        );
    }
    // Round and round, also with the chunks of the new socket.
    for run in 2..5 {
        let before = port.counts().received;
        let sent = AtomicBool::new(false);
        let mut checker = Checker::new(View::Whole);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                wire.send(&Stream {
                    run,
                    pps: NonZeroU64::new(20_000),
                    ..Stream::new("wire0", 5000)
                });
                sent.store(true, Ordering::Release);
            });
            let see = |bytes: &[u8], _| {
                checker.feed(bytes);
            };
            drain(&mut port, see, || sent.load(Ordering::Acquire));
        });
        assert_eq!(checker.corrupt(), 0);
        assert!(port.counts().received > before);
    }
    wire.daemon.kill();
    wire.daemon.launch().unwrap();
    let deadline = Deadline::new("it comes back");
    loop {
        deadline.check();
        wire.send(&Stream::new("wire0", 10));
        match port.next().unwrap() {
            Next::Packet(packet) if packet.meta.flags & flags::GAP != 0 => break,
            Next::Packet(_) => {}
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(50))).unwrap();
            }
            Next::Ended => panic!("the source ended"),
        }
    }
    assert_eq!(port.counts().reopened, 1);
}

/// What the operator hides from a user must not lie in memory that the user maps.
#[test]
fn who_may_not_see_every_frame_has_copies_of_those_that_it_may_see() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    std::fs::write(&config, "socket_mode = 0o666\n").unwrap();
    let config = config.to_str().unwrap().to_owned();
    let grant = "uid:65534=wire1:greater 1000";
    let args = ["--config", &config, "--source", LENT, "--allow", grant];
    let wire = Wire::new("1500", &args);
    let socket = wire.daemon.socket();
    for dir in [wire.lab.dir(), socket.parent().unwrap()] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir, mode).unwrap();
    }
    let options = wire
        .daemon
        .port("wire1")
        .group("probes")
        .arena_bytes(1 << 20);
    let open = || {
        rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(65534)).unwrap();
        options.ring_bytes(1 << 16).open().unwrap()
    };
    let mut guarded = std::thread::scope(|scope| scope.spawn(open).join().unwrap());
    let mut free = member(&wire, "");
    for (run, len_bytes) in [(1, 60), (2, 1514)] {
        wire.send(&Stream {
            len_bytes,
            run,
            ..Stream::new("wire0", 100)
        });
        wire.read(u64::from(run) * 100);
    }
    assert_eq!(drain(&mut guarded, |_, _| {}, || true), 100);
    assert_eq!(drain(&mut free, |_, _| {}, || true), 200);
    let counters = wire.daemon.audit();
    let of = |port| {
        let host = of_port(&counters, port);
        (value(host, "arena_copies"), value(host, "arena_lent"))
    };
    assert_eq!((of(&guarded), of(&free)), ((100, 0), (0, 200)));
}
