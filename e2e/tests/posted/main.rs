//! Ports that send on what they received from where it lies: every frame whole, none lost in silence, no place but their own.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod frames;
mod guests;
mod lent;
mod scribbles;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vnplug::{Client, Error, Next, Port, PortOptions, Ready, Revoke, Waiting, Whose, code};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::Producer;
use vnplug_ring::control::{Counted, Message, Open};
use vnplug_ring::layout::{DATA_OFFSET, Life, Place};
use vnplug_testing::{Deadline, Dice, eventually, until};

use self::frames::{FIRST, HEADER, LAST, MIDDLE, frame, len_of, numbers};

/// What only others have.
const SECRET: u8 = 0x5e;

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
fn who_waits_for_room_to_send_receives_meanwhile() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let posts = daemon.port("lan0").ring_bytes(1 << 16).posts();
    let [mut first, mut middle, _last] = ports(&daemon, posts);
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
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                first.send(&long).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // There never is that much room.
        let room = middle.wait_for_room(1 << 30, Duration::from_millis(500));
        over.store(true, Ordering::Relaxed);
        assert_eq!(room, Ok(false));
    });
    eventually("nothing is on its way", || {
        first.outbox().unwrap().waiting_bytes() == 0
    });
    // What is there came while it waited.
    let came = middle.batch(64).count();
    assert!(came > 10, "{came}");
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
