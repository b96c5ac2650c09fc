//! Ports that are lent to others of one program: what the one received the other one sends from where it lies.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vnplug::{Bundle, Direction, Error, Next, Port, code};
use vnplug_e2e::daemon::{Daemon, counted, example, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::station::Running;
use vnplug_e2e::third_party::build_c;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{Message, Open};
use vnplug_testing::{Deadline, eventually, until};

use super::frames::{FIRST, HEADER, LAST, MIDDLE, SENDS, frame, len_of, numbers};

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

/// Sends `count` frames, and sends on by the one port of the bundle what the other one has, until all arrived.
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
fn who_lends_while_the_daemon_is_dead_is_told_and_may_again_when_it_is_back() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let mut bundle = Bundle::new().unwrap();
    for _ in 0..2 {
        let options = daemon.port("lab").transmit(1 << 16);
        bundle.open(options.posts()).unwrap();
    }
    let [from, to] = bundle.ports() else {
        panic!("two ports");
    };
    from.lend_to(to).unwrap();
    daemon.kill();
    // Nothing was read meanwhile: that the daemon is gone is seen now.
    assert_eq!(from.lend_to(to), Err(Error::Disconnected));
    assert_eq!(to.lend_to(from), Err(Error::Disconnected));
    daemon.launch().unwrap();
    let deadline = Deadline::new("both are back");
    loop {
        deadline.check();
        for port in [&mut *from, &mut *to] {
            let _ = port.next().unwrap();
            port.wait(Some(Duration::from_millis(10))).unwrap();
        }
        match from.lend_to(to) {
            Ok(()) => break,
            Err(error) => assert_eq!(error, Error::Disconnected),
        }
    }
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
    carries(|_| example("forward").unwrap());
}

#[test]
fn so_does_the_one_in_c() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/examples/forward.c");
    carries(|lab| build_c(&source, lab.dir(), &[]).unwrap());
}

fn carries(program: impl FnOnce(&Lab) -> PathBuf) {
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
    forwarder.args(["--pdeathsig", "KILL"]).arg(program(&lab));
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
pub(crate) fn across(ends: &mut [Port; 2], numbers: std::ops::Range<u32>) {
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
                // What came twice for it: a port that is away comes back when all of it is read.
                while let Next::Packet(_) = from.next().unwrap() {}
                to.wait(Some(Duration::from_millis(20))).unwrap();
                while let Next::Packet(packet) = to.next().unwrap() {
                    if packet.bytes == sent {
                        break 'again;
                    }
                }
            }
        }
    }
}
