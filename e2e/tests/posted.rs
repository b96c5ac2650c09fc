//! Ports that send on what they received from where it lies: every frame whole, none lost in silence, no place but their own.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vnplug::{
    Bundle, Client, Direction, Error, Next, Port, PortOptions, Ready, Revoke, Waiting, Whose, code,
};
use vnplug_e2e::daemon::{Daemon, counted, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::station::Running;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::Producer;
use vnplug_ring::control::{Counted, Message, Open};
use vnplug_ring::layout::{DATA_OFFSET, Life, Place};
use vnplug_testing::{Deadline, Dice, eventually, until};

/// The stations at the three ports: who sends, who sends on, who receives.
const FIRST: [u8; 6] = [2, 0, 0, 0, 0, 1];
const MIDDLE: [u8; 6] = [2, 0, 0, 0, 0, 2];
const LAST: [u8; 6] = [2, 0, 0, 0, 0, 3];
/// Of the second port of one program.
const SENDS: [u8; 6] = [2, 0, 0, 0, 0, 4];
const HEADER: usize = 14;
/// What only others have.
const SECRET: u8 = 0x5e;

/// A numbered frame whose every byte depends on its number.
fn frame(to: [u8; 6], from: [u8; 6], number: u32, len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    let rest = (frame.len()..len).map(|at| ((number as usize * 31) ^ (at * 7)) as u8);
    frame.extend(rest.collect::<Vec<_>>());
    frame
}

fn len_of(number: u32) -> usize {
    60 + (number as usize * 97) % 1455
}

fn ports(daemon: &Daemon, posts: PortOptions) -> [Port; 3] {
    let mut ports = [
        daemon
            .port("lan0")
            .join()
            .ring_bytes(1 << 20)
            .open()
            .unwrap(),
        posts.join().open().unwrap(),
        daemon
            .port("lan0")
            .join()
            .ring_bytes(1 << 22)
            .open()
            .unwrap(),
    ];
    for (port, station) in ports.iter_mut().zip([FIRST, MIDDLE, LAST]) {
        assert!(port.send(&frame(station, station, 0, 60)).unwrap());
    }
    eventually("all are known", || {
        value(counted(&daemon.counters(), "source"), "stations") == 3
    });
    ports
}

/// Sends on what is there, with another Ethernet header: how many frames.
fn forward(port: &mut Port) -> u64 {
    let mut forwarded = 0;
    let (batch, outbox) = port.batch_and_outbox(64).unwrap();
    let header = [&LAST[..], &MIDDLE, &[0x88, 0xb5]].concat();
    for packet in batch {
        let packet = packet.unwrap();
        // A switch shows frames for nobody's station to all.
        if packet.bytes[..6] != MIDDLE {
            continue;
        }
        if outbox.forward(&header, &packet.bytes[HEADER..]).unwrap() {
            forwarded += 1;
        }
    }
    forwarded
}

/// The numbers of the frames that are there, each of which is as it was sent.
fn numbers(port: &mut Port) -> Vec<u32> {
    let mut all = Vec::new();
    while let Next::Packet(packet) = port.next().unwrap() {
        if packet.bytes[..6] != LAST || packet.bytes[6..12] != MIDDLE {
            continue;
        }
        let number = packet.bytes[14..18].try_into().map(u32::from_be_bytes);
        let number = number.unwrap();
        let expected = frame(LAST, MIDDLE, number, len_of(number));
        assert!(packet.bytes == expected, "frame {number} is another one");
        all.push(number);
    }
    all
}

#[test]
fn what_is_sent_on_from_where_it_lies_arrives_whole_over_many_turns_of_the_ring() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    // Its ring holds some forty frames, and turns hundreds of times.
    let posts = daemon.port("lan0").ring_bytes(1 << 15).posts();
    let [mut first, mut middle, mut last] = ports(&daemon, posts);
    let (mut sent, mut forwarded, mut got) = (0_u32, 0, Vec::new());
    let deadline = Deadline::new("20,000 frames are sent on");
    while got.len() < 20_000 {
        deadline.check_seen(&got.len());
        for _ in 0..16 {
            let frame = frame(MIDDLE, FIRST, sent, len_of(sent));
            if !first.outbox().unwrap().push(&frame).unwrap() {
                break;
            }
            sent += 1;
        }
        first.outbox().unwrap().flush();
        forwarded += forward(&mut middle);
        got.extend(numbers(&mut last));
    }
    // What is still on its way.
    eventually("nothing is under way", || {
        forwarded += forward(&mut middle);
        got.extend(numbers(&mut last));
        got.len() as u64 == forwarded && first.outbox().unwrap().waiting_bytes() == 0
    });
    assert!(got.is_sorted(), "in order");
    let counters = daemon.audit();
    let number = middle.number().to_string();
    let port = counters
        .iter()
        .find(|it| it.kind == "port" && it.name == number);
    // The one by which it became known, and those.
    assert_eq!(value(port.unwrap(), "sent"), forwarded + 1);
    assert_eq!(value(port.unwrap(), "send_dropped_place"), 0);
    assert_eq!(middle.outbox().unwrap().posted(), forwarded);
    // Each was sent on, or the port says that it lost it.
    let received = middle.counts().received;
    assert!(received >= forwarded, "{received} {forwarded}");
    assert_eq!(u64::from(sent), forwarded + middle.dropped());
}

#[test]
fn who_posted_its_whole_ring_and_waits_has_its_room_back() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    for waiting in [Waiting::Spin, Waiting::BALANCED, Waiting::Sleep] {
        let posts = daemon.port("lan0").ring_bytes(1 << 16).posts();
        let [mut first, mut middle, _last] = ports(&daemon, posts);
        middle.set_waiting(waiting);
        let long = frame(MIDDLE, FIRST, 1, 1514);
        for _ in 0..100 {
            assert!(first.send(&long).unwrap());
        }
        eventually("its ring is full", || middle.dropped() > 0);
        let forwarded = forward(&mut middle);
        assert!(
            (30..64).contains(&forwarded),
            "all that is there: {forwarded}"
        );
        middle.outbox().unwrap().flush();
        let over = AtomicBool::new(false);
        let ready = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    first.send(&long).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let ready = middle.wait(Some(Duration::from_secs(10)));
            over.store(true, Ordering::Relaxed);
            ready
        });
        assert!(matches!(ready, Ok(Ready::Now)), "{waiting:?}: {ready:?}");
    }
}

#[test]
fn who_posts_has_rings_of_its_own() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    for options in [
        daemon.port("lan0").group("all").posts(),
        daemon.port("lan0").transmit(1 << 16).group("all").posts(),
    ] {
        let refused = options.open().unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Refused {
                    code: code::INVALID,
                    ..
                }
            ),
            "{refused}"
        );
    }
    let direct = daemon.port("lan0").direct().posts().open().unwrap_err();
    assert!(matches!(direct, Error::Invalid(_)), "{direct}");
}

#[test]
fn a_frame_that_is_no_packet_of_the_port_is_copied_and_one_of_a_port_that_does_not_post_too() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    for posts in [daemon.port("lan0"), daemon.port("lan0").posts()] {
        let [first, mut middle, mut last] = ports(&daemon, posts);
        let whole = frame(LAST, MIDDLE, 7, len_of(7));
        let outbox = middle.outbox().unwrap();
        assert!(outbox.forward(&whole[..HEADER], &whole[HEADER..]).unwrap());
        assert!(outbox.forward(&[], &whole).unwrap());
        assert!(outbox.forward(&whole, &[]).unwrap());
        let long = vec![0; outbox.max_frame()];
        assert!(matches!(
            outbox.forward(b"x", &long),
            Err(Error::Invalid(_))
        ));
        outbox.flush();
        let mut got = Vec::new();
        eventually("all are there", || {
            got.extend(numbers(&mut last));
            got == [7, 7, 7]
        });
        drop(first);
    }
}

#[test]
fn a_forwarder_outlives_its_daemon_and_posts_again() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=5000"]).unwrap();
    let options = daemon.port("lab").transmit(1 << 16).posts();
    let mut port = options.open().unwrap();
    let echo = |port: &mut Port, enough: usize| {
        let deadline = Deadline::new("frames are echoed");
        let mut echoed = 0;
        while echoed < enough {
            deadline.check_seen(&echoed);
            if let Ok((batch, outbox)) = port.batch_and_outbox(64) {
                for packet in batch {
                    echoed += usize::from(outbox.forward(&[], packet.unwrap().bytes).unwrap());
                }
            }
            port.wait(Some(Duration::from_millis(20))).unwrap();
        }
    };
    echo(&mut port, 500);
    daemon.kill();
    daemon.launch().unwrap();
    echo(&mut port, 500);
    assert_eq!(port.counts().reopened, 1);
    let sent = |all: &[Counted]| {
        let port = all.iter().find(|it| it.kind == "port");
        port.map_or((0, 0), |it| {
            (value(it, "sent"), value(it, "send_dropped_place"))
        })
    };
    let all = until(
        "all are sent",
        || daemon.counters(),
        |all| sent(all).0 >= 400,
    );
    assert_eq!(sent(&all).1, 0);
}

#[test]
fn who_may_not_send_any_more_goes_on_receiving_what_it_posted_before() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=20000"]).unwrap();
    let options = daemon.port("lab").ring_bytes(1 << 15).transmit(1 << 14);
    let mut port = options.posts().open().unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let (mut posted, mut is_over) = (0, false);
    let deadline = Deadline::new("sending is revoked");
    while !is_over {
        deadline.check_seen(&posted);
        match port.batch_and_outbox(64) {
            Ok((batch, outbox)) => {
                for packet in batch {
                    posted += u32::from(outbox.forward(&[], packet.unwrap().bytes).unwrap());
                }
            }
            Err(Error::Gone(_)) => is_over = true,
            Err(error) => panic!("{error}"),
        }
        if posted > 200 {
            let revoke = Revoke {
                whose: Whose::Port(port.number()),
                receiving: false,
                sending: true,
            };
            // Again and again.
            client.revoke(revoke).unwrap();
        }
        port.wait(Some(Duration::from_millis(5))).unwrap();
    }
    // Ten rings of it.
    let before = port.counts().received;
    while port.counts().received < before + 3000 {
        deadline.check_seen(&port.counts());
        assert!(port.batch(64).all(|it| it.is_ok()));
        port.wait(Some(Duration::from_millis(5))).unwrap();
    }
}

#[test]
fn places_that_are_not_its_own_are_refused_and_counted_and_the_port_lives() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut watches = daemon.port("lan0").ring_bytes(1 << 24).open().unwrap();
    // Others' rings, full of bytes that nobody else has.
    let [mut first, _, mut last] = ports(&daemon, daemon.port("lan0"));
    let mut secret = frame(LAST, FIRST, 0, 1500);
    secret[HEADER..].fill(SECRET);
    for _ in 0..500 {
        assert!(first.send(&secret).unwrap());
    }
    eventually("they have it", || {
        let _ = last.batch(64).count();
        last.counts().received >= 500
    });
    let mut raw = Raw::greeted(&daemon.socket());
    let request = |posts| {
        Message::Open(Open {
            transmit_bytes: 1 << 16,
            joins: true,
            posts,
            ..open("lan0", 1 << 16)
        })
    };
    let Message::Opened(opened) = raw.ask(&request(true), 0) else {
        panic!("refused");
    };
    let fds = raw.take_fds();
    let memory = vnplug::map_apart(fds[0].as_fd(), fds[1].as_fd(), &opened).unwrap();
    let place = opened.transmit;
    let mut ring = Producer::attach(memory.part(place.offset, place.len).unwrap()).unwrap();
    assert!(ring.takes_posted());
    let area = opened.rings[0].len - DATA_OFFSET;
    let mut kicks = UnixStream::from(fds[3].try_clone().unwrap());
    let mut dice = Dice(vnplug_frame::witness::seed("places"));
    let (mut posted, mut foreign) = (0_u64, 0);
    let head = frame(LAST, MIDDLE, 1, 60);
    let deadline = Deadline::new("20,000 places are posted");
    while posted < 20_000 {
        deadline.check_seen(&posted);
        if posted % 64 == 0 || !ring.has_room(head.len() as u32).unwrap() {
            // Its host may sleep, or be kicked already.
            let _ = kicks.write(&[1]);
        }
        if !ring.has_room(head.len() as u32).unwrap() {
            std::thread::yield_now();
            continue;
        }
        let (at, of) = match dice.below(4) {
            0 => (dice.below(area), 0),
            1 => (area + dice.below(1 << 20), 0),
            2 => (0_u64.wrapping_sub(dice.below(1 << 20)), 0),
            _ => (dice.below(area), 1 + dice.below(100) as u16),
        };
        let len = dice.below(1 << 11) as u32;
        let named = Place { ring: of, at, len };
        assert_eq!(ring.push_posted(0, &head, named), Ok(true));
        ring.publish();
        posted += 1;
        let end = at.checked_add(len.into());
        foreign += u64::from(of > 0 || end.is_none_or(|end| end > area));
    }
    let _ = kicks.write(&[1]);
    let number = opened.port.to_string();
    let of_port = |all: &[Counted]| {
        let port = all.iter().find(|it| it.kind == "port" && it.name == number);
        let port = port.unwrap();
        ["send_taken", "send_dropped_place", "sent"].map(|name| value(port, name))
    };
    let all = until(
        "all are taken",
        || daemon.counters(),
        |all| of_port(all)[0] == posted,
    );
    let mut seen = 0;
    eventually("what it sent is seen", || {
        while let Next::Packet(packet) = watches.next().unwrap() {
            if packet.bytes[6..12] == MIDDLE && packet.bytes[14..18] == head[14..18] {
                seen += 1;
                let is_foreign = packet.bytes.windows(4).any(|it| it == [SECRET; 4]);
                assert!(!is_foreign, "another's bytes were sent");
            }
        }
        seen + watches.dropped() >= of_port(&all)[2]
    });
    assert!(seen > 1000, "{seen}");
    assert_eq!(of_port(&all)[1], foreign, "{foreign} of {posted}");
    assert_eq!(ring.life(), Life::Open);
    drop((raw, fds));
    daemon.audit();
    // The flag of one that did not ask for it means nothing.
    let mut raw = Raw::greeted(&daemon.socket());
    let Message::Opened(opened) = raw.ask(&request(false), 0) else {
        panic!("refused");
    };
    let fds = raw.take_fds();
    let memory = vnplug::map_apart(fds[0].as_fd(), fds[1].as_fd(), &opened).unwrap();
    let place = opened.transmit;
    let ring = Producer::attach(memory.part(place.offset, place.len).unwrap()).unwrap();
    assert!(!ring.takes_posted());
    let no_group = Message::Open(Open {
        group: "all".into(),
        posts: true,
        transmit_bytes: 1 << 16,
        ..open("lan0", 1 << 16)
    });
    assert_eq!(refusal(raw.ask(&no_group, 0)).0, code::INVALID);
}

/// Two ports of a bundle, with these options, at a switch that knows all stations.
fn two(daemon: &Daemon) -> (Bundle, Port, Port) {
    let mut bundle = Bundle::new().unwrap();
    for _ in 0..2 {
        let options = daemon.port("lan0").join().ring_bytes(1 << 15);
        bundle.open(options.posts()).unwrap();
    }
    let mut first = daemon.port("lan0").join().open().unwrap();
    let last = daemon.port("lan0").join().ring_bytes(1 << 22);
    let mut last = last.open().unwrap();
    let [receives, sends] = bundle.ports() else {
        panic!("two ports");
    };
    for (port, station) in [
        (&mut first, FIRST),
        (receives, MIDDLE),
        (sends, SENDS),
        (&mut last, LAST),
    ] {
        assert!(port.send(&frame(station, station, 0, 60)).unwrap());
    }
    eventually("all are known", || {
        value(counted(&daemon.counters(), "source"), "stations") == 4
    });
    (bundle, first, last)
}

/// Sends so many frames, and sends on by the one port of the bundle what the other one has, until all arrived: how many.
fn carry(bundle: &mut Bundle, first: &mut Port, last: &mut Port, count: usize) {
    let [from, to] = bundle.ports() else {
        panic!("two ports");
    };
    let header = [&LAST[..], &MIDDLE, &[0x88, 0xb5]].concat();
    let (mut sent, mut got) = (0_u32, Vec::new());
    let lost = from.dropped();
    let deadline = Deadline::new("all arrive");
    while got.len() as u64 + (from.dropped() - lost) < count as u64 {
        deadline.check_seen(&got.len());
        // Fewer under way than its ring holds.
        let arrived = got.len() as u64 + (from.dropped() - lost);
        let more = (arrived + 20).min(count as u64) as u32;
        while sent < more {
            let frame = frame(MIDDLE, FIRST, sent, len_of(sent));
            if !first.outbox().unwrap().push(&frame).unwrap() {
                break;
            }
            sent += 1;
        }
        first.outbox().unwrap().flush();
        let outbox = to.outbox().unwrap();
        for packet in from.batch(64) {
            let packet = packet.unwrap();
            if packet.bytes[..6] == MIDDLE {
                assert!(outbox.forward(&header, &packet.bytes[HEADER..]).unwrap());
            }
        }
        outbox.flush();
        got.extend(numbers(last));
    }
    assert!(got.is_sorted() && got.len() * 2 > count, "{}", got.len());
}

#[test]
fn what_one_port_of_a_program_received_another_one_sends_from_where_it_lies() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let (mut bundle, mut first, mut last) = two(&daemon);
    // Copied, for it is not lent.
    carry(&mut bundle, &mut first, &mut last, 500);
    assert_eq!(bundle.ports()[1].outbox().unwrap().posted(), 0);
    let [from, to] = bundle.ports() else {
        panic!("two ports");
    };
    for _ in 0..3 {
        from.lend_to(to).unwrap();
        to.lend_to(from).unwrap();
    }
    carry(&mut bundle, &mut first, &mut last, 10_000);
    assert!(bundle.ports()[1].outbox().unwrap().posted() > 5000);
    let refused = |daemon: &Daemon| {
        let all = daemon.audit();
        let ports = all.iter().filter(|it| it.kind == "port");
        ports.map(|it| value(it, "send_dropped_place")).sum::<u64>()
    };
    assert_eq!(refused(&daemon), 0);
    // A lender that goes leaves the other as it was, and another one may be lent to it.
    bundle.close(0);
    let options = daemon.port("lan0").join().ring_bytes(1 << 15);
    bundle.open(options.posts()).unwrap();
    bundle.ports().swap(0, 1);
    let [from, to] = bundle.ports() else {
        panic!("two ports");
    };
    assert!(from.send(&frame(MIDDLE, MIDDLE, 0, 60)).unwrap());
    from.lend_to(to).unwrap();
    until(
        "it moved",
        || daemon.counters(),
        |all| {
            let of = all
                .iter()
                .find(|it| it.kind == "port" && it.name == from.number().to_string());
            of.is_some_and(|it| value(it, "sent") == 1)
        },
    );
    let before = to.outbox().unwrap().posted();
    carry(&mut bundle, &mut first, &mut last, 2000);
    assert!(bundle.ports()[1].outbox().unwrap().posted() > before + 1000);
    assert_eq!(refused(&daemon), 0);
}

#[test]
fn only_ports_of_one_bundle_that_post_are_lent() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,count=1"]).unwrap();
    let options = || daemon.port("lab").transmit(1 << 16);
    let mut apart = [
        options().posts().open().unwrap(),
        options().posts().open().unwrap(),
    ];
    let [one, other] = &mut apart;
    assert!(matches!(one.lend_to(other), Err(Error::Invalid(_))));
    let mut bundle = Bundle::new().unwrap();
    bundle.open(options().posts()).unwrap();
    bundle.open(options()).unwrap();
    bundle.open(daemon.port("lab").posts()).unwrap();
    let [posts, plain, mute] = bundle.ports() else {
        panic!("three ports");
    };
    assert!(matches!(posts.lend_to(plain), Err(Error::Invalid(_))));
    assert!(matches!(plain.lend_to(posts), Err(Error::Invalid(_))));
    assert!(matches!(posts.lend_to(mute), Err(Error::Invalid(_))));
    mute.lend_to(posts).unwrap();
    // And the daemon does not take a program's word for it.
    let mut raw = Raw::greeted(&daemon.socket());
    let [theirs, others] = [one.number(), other.number()];
    let open = |raw: &mut Raw, posts, transmit_bytes| {
        let request = Message::Open(Open {
            posts,
            transmit_bytes,
            ..open("lab", 1 << 16)
        });
        let Message::Opened(opened) = raw.ask(&request, 0) else {
            panic!("refused");
        };
        drop(raw.take_fds());
        opened.port
    };
    let own = open(&mut raw, true, 1 << 16);
    let mute = open(&mut raw, true, 0);
    let plain = open(&mut raw, false, 1 << 16);
    for (port, to, first, expected) in [
        (theirs, own, 1, code::NOT_FOUND),
        (own, theirs, 1, code::NOT_FOUND),
        (theirs, others, 1, code::NOT_FOUND),
        (own, own, 1, code::INVALID),
        (own, mute, 1, code::INVALID),
        (plain, own, 1, code::INVALID),
        (own, plain, 1, code::INVALID),
        (mute, own, 0, code::INVALID),
        (mute, own, 256, code::INVALID),
        (mute, own, u16::MAX, code::INVALID),
    ] {
        let refused = refusal(raw.ask(&Message::Lend { port, to, first }, 0));
        assert_eq!(
            refused.0, expected,
            "{port} to {to} at {first}: {}",
            refused.1
        );
    }
    let lend = Message::Lend {
        port: mute,
        to: own,
        first: 255,
    };
    assert_eq!(raw.ask(&lend, 0), Message::Done);
}

#[test]
fn the_forwarder_of_the_examples_carries_frames_both_ways_and_over_a_restart() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    netns.veth("back0", "back1").unwrap();
    let sources = ["wire0", "wire1", "back0", "back1"];
    let args = sources.iter().flat_map(|it| ["--source", *it]);
    let mut daemon = Daemon::start(&lab, Some(&netns), &args.collect::<Vec<_>>()).unwrap();
    let end = |name: &str| {
        let options = daemon.port(name).transmit(1 << 20).direction(Direction::Rx);
        options.filter("ether proto 0x88b5").open().unwrap()
    };
    let mut ends = [end("wire0"), end("back0")];
    // It ends with this thread, however that ends.
    let mut forwarder = Command::new("setpriv");
    forwarder
        .args(["--pdeathsig", "KILL"])
        .arg(example("forward"));
    forwarder
        .args(["wire1", "back1"])
        .env("VNPLUG_SOCKET", daemon.socket());
    let _forwarder = Running::start(forwarder, &lab, "forward").unwrap();
    until(
        "the forwarder is there",
        || daemon.counters(),
        |all| all.iter().filter(|it| it.kind == "port").count() == 4,
    );
    across(&mut ends, 0..500);
    let posted = daemon.counters();
    let ports = posted.iter().filter(|it| it.kind == "port");
    assert_eq!(
        ports.map(|it| value(it, "send_dropped_place")).sum::<u64>(),
        0
    );
    daemon.kill();
    daemon.launch().unwrap();
    across(&mut ends, 500..1000);
}

/// Each of these frames goes from either end to the other, or is sent again: a wire may lose some.
fn across(ends: &mut [Port; 2], numbers: std::ops::Range<u32>) {
    for way in 0..2 {
        if way == 1 {
            ends.swap(0, 1);
        }
        let [from, to] = &mut *ends;
        for number in numbers.clone() {
            let sent = frame(LAST, FIRST, number, len_of(number));
            let deadline = Deadline::new(format!("frame {number} crosses"));
            'again: loop {
                deadline.check();
                // Away, or full.
                let _ = from.send(&sent);
                let _ = from.wait(Some(Duration::ZERO));
                let _ = to.wait(Some(Duration::from_millis(20)));
                while let Ok(Next::Packet(packet)) = to.next() {
                    if packet.bytes == sent {
                        break 'again;
                    }
                }
            }
        }
    }
}

/// A program of `guest/examples`, which cargo builds with the tests.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(
        program.exists(),
        "{} is missing: cargo build -p libvnplug --example {name}",
        program.display()
    );
    program
}
