//! Ports that send: every frame accounted for, no kick lost, and senders that lie or may not.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vnplug::{Client, Error, Next, Port, code};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, label, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{Counted, Grant, Message, Open, Role, VmKind, VmSpec};
use vnplug_ring::layout::{HEAD, Life};
use vnplug_ring::{Producer, Region};
use vnplug_testing::{Deadline, until};

/// Sends back what comes until `enough` frames went back.
fn echo(port: &mut Port, enough: u64) {
    let deadline = Deadline::new(format!("{enough} are echoed"));
    let mut echoed = 0;
    while echoed < enough {
        deadline.check_seen(&echoed);
        let (batch, outbox) = port.batch_and_outbox(64).unwrap();
        for packet in batch {
            assert!(outbox.push(packet.unwrap().bytes).unwrap(), "a full ring");
            echoed += 1;
        }
        outbox.flush();
        port.wait(Some(Duration::from_millis(100))).unwrap();
    }
}

/// Waits until the daemon's counters say so.
fn until_counted(daemon: &Daemon, what: &str, holds: impl Fn(&[Counted]) -> bool) -> Vec<Counted> {
    until(what, || daemon.audit(), |counters| holds(counters))
}

#[test]
fn every_frame_that_comes_back_is_counted_and_timed() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=20000,count=6000,size=60-1514";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let port = daemon.port("lab").transmit(1 << 24);
    // Room for all of it, both ways.
    let mut port = port.ring_bytes(1 << 24).open().unwrap();
    echo(&mut port, 6000);
    let all = until_counted(&daemon, "all are sent", |all| {
        value(counted(all, "port"), "sent") == 6000
    });
    let source = counted(&all, "source");
    assert_eq!(value(source, "sent"), 6000);
    assert_eq!(value(source, "echoes"), 6000);
    let (p50, max) = (value(source, "echo_p50_ns"), value(source, "echo_max_ns"));
    assert!(0 < p50 && p50 <= max, "{p50} {max}");
    // What a port sent stays counted when it is gone.
    drop(port);
    let all = until_counted(&daemon, "the port is gone", |all| {
        all.iter().all(|counted| counted.kind != "port")
    });
    assert_eq!(value(counted(&all, "source"), "sent"), 6000);
}

#[test]
fn a_sleeping_host_takes_every_frame_that_kicks_it() {
    let lab = Lab::new().unwrap();
    // Nothing is generated, and nothing else wakes the thread: the port is not enabled.
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,count=1"]).unwrap();
    let options = daemon.port("lab").transmit(1 << 16).enabled(false);
    let mut port = options.open().unwrap();
    for number in 0..2_000_u64 {
        assert!(port.send(&[number as u8; 60]).unwrap());
        // NB: without a pause, as the next kick is to meet the thread before it sleeps.
        let deadline = Deadline::new(format!("kick {number} is heard"));
        while port.outbox().unwrap().waiting_bytes() > 0 {
            deadline.check();
            std::thread::yield_now();
        }
        // The thread goes back to sleep at times, and at times is met before it does.
        if number % 7 == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    let all = daemon.audit();
    assert_eq!(value(counted(&all, "port"), "sent"), 2_000);
    assert_eq!(value(counted(&all, "port"), "send_bytes"), 120_000);
}

#[test]
fn a_sender_outlives_its_daemon() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,count=1"]).unwrap();
    let options = daemon.port("lab").transmit(1 << 14).enabled(false);
    let mut port = options.open().unwrap();
    assert!(port.send(&[1; 60]).unwrap());
    daemon.kill();
    // The ring fills up, for nobody takes anything; then the socket tells.
    let deadline = Deadline::new("the ring fills, the socket tells, and the port reopens");
    let gone = loop {
        deadline.check();
        match port.send(&[2; 60]) {
            Ok(true) => {}
            Ok(false) => match port.wait_for_room(60, Duration::from_millis(50)) {
                Ok(_) => {}
                Err(error) => break error,
            },
            Err(error) => break error,
        }
    };
    assert_eq!(gone, Error::Disconnected);
    daemon.launch().unwrap();
    while port.send(&[3; 60]) != Ok(true) {
        deadline.check();
        port.wait(Some(Duration::from_millis(20))).unwrap();
    }
    until_counted(&daemon, "the new daemon sends", |all| {
        value(counted(all, "port"), "sent") == 1
    });
    assert_eq!(port.counts().reopened, 1);
}

fn sending(device: &str) -> Message {
    Message::Open(Open {
        transmit_bytes: 1 << 16,
        group: String::new(),
        arena_bytes: 0,
        shares_wake: false,
        ..open(device, 1 << 16)
    })
}

#[test]
fn who_lies_in_the_ring_is_not_served_any_more_and_others_are() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=500"]).unwrap();
    let mut honest = daemon.port("lab").transmit(1 << 20).open().unwrap();
    let mut raw = Raw::connect(&daemon.socket());
    raw.hello(Role::Client);
    let Message::Opened(opened) = raw.ask(&sending("lab"), 0) else {
        panic!("refused");
    };
    let fds = raw.take_fds();
    assert_eq!(fds.len(), 4);
    let memory: Region = vnplug::map_apart(fds[0].as_fd(), fds[1].as_fd(), &opened).unwrap();
    let place = opened.transmit;
    let ring = memory.part(place.offset, place.len).unwrap();
    let liar = Producer::attach(ring.clone()).unwrap();
    // A flood of kicks for nothing costs nobody anything.
    for _ in 0..10_000 {
        let _ = kick(&fds[3]);
    }
    echo(&mut honest, 50);
    ring.store_u64(HEAD, 1 << 40, Ordering::Release);
    until_counted(&daemon, "the liar is in quarantine", |all| {
        let number = opened.port.to_string();
        let port = all.iter().find(|it| it.kind == "port" && it.name == number);
        label(port.unwrap(), "state").contains("sender's head")
    });
    assert_eq!(liar.life(), Life::Quarantined);
    echo(&mut honest, 50);
    // It closes its end of the kick and goes; the others do not notice.
    drop((fds, raw));
    echo(&mut honest, 50);
    daemon.audit();
}

fn kick(fd: &std::os::fd::OwnedFd) -> std::io::Result<usize> {
    use std::io::Write;
    let mut socket = UnixStream::from(fd.try_clone()?);
    socket.write(&[1; 100])
}

#[test]
fn sending_needs_a_grant_of_its_own_and_a_source_that_sends() {
    let lab = Lab::new().unwrap();
    let args = [
        "--source",
        "lab=gen,count=1",
        "--source",
        "mute=gen,count=1",
        "--allow-send",
        "vm:probe=lab",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let spec = VmSpec {
        name: "probe".into(),
        kind: VmKind::Uml,
        pool_bytes: 1 << 22,
        vectors: 0,
        allow: vec![Grant {
            source: "*".into(),
            filter: String::new(),
        }],
        owner: 5,
        groups: Vec::new(),
        stays_for: None,
    };
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let ready = client.attach_vm(spec).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    client.adopt("probe", theirs.as_fd()).unwrap();
    let mut agent = Raw::over(ours);
    agent.hello(Role::Agent);
    let refused = refusal(agent.ask(&sending("mute"), 1));
    assert_eq!(refused.0, code::DENIED, "{}", refused.1);
    let Message::Opened(opened) = agent.ask(&sending("lab"), 1) else {
        panic!("refused");
    };
    // A VM kicks by a message, for ports of its own only.
    let pool = std::fs::File::options()
        .read(true)
        .write(true)
        .open(ready.pool_path)
        .unwrap();
    let memory = vnplug::map_memory(pool.as_fd(), opened.map_len).unwrap();
    let place = opened.transmit;
    let ring = memory.part(place.offset, place.len).unwrap();
    let mut producer = Producer::attach(ring).unwrap();
    for number in 1..=20 {
        producer.push(&vnplug::Meta::default(), &[7; 60]).unwrap();
        producer.publish();
        let kick = Message::Kick(vec![opened.port, 4711]).encode(0, 1);
        agent.send(&kick).unwrap();
        let used = || producer.used();
        until(&format!("kick {number} is heard"), used, |used| *used == 0);
    }
    let all = until_counted(&daemon, "all are sent", |all| {
        value(counted(all, "port"), "sent") == 20
    });
    drop(all);
    // Nobody can send through a file.
    let error = daemon.port("nowhere").transmit(1).open().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Refused {
                code: code::NOT_FOUND,
                ..
            }
        ),
        "{error}"
    );
}

/// Source and target of a UDP frame over IPv4.
fn flow(frame: &[u8]) -> [u8; 12] {
    frame[26..38].try_into().unwrap()
}

#[test]
fn ports_that_are_spread_have_flows_of_their_own_and_all_of_them() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=1200,count=10000,flows=97,queues=2";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let ports = daemon.port("lab").spread(3).unwrap();
    let read = |mut port: Port| {
        let (mut flows, mut packets) = (BTreeSet::new(), 0_u64);
        loop {
            match port.next().unwrap() {
                Next::Packet(packet) => {
                    assert_eq!(packet.meta.lost, 0);
                    flows.insert(flow(packet.bytes));
                    packets += 1;
                }
                Next::Nothing => {
                    port.wait(Some(Duration::from_secs(1))).unwrap();
                }
                Next::Ended => return (flows, packets, port),
            }
        }
    };
    let parts: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = ports
            .into_iter()
            .map(|port| scope.spawn(move || read(port)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.collect()
    });
    let all: BTreeSet<_> = parts.iter().flat_map(|(flows, ..)| flows).collect();
    let each: usize = parts.iter().map(|(flows, ..)| flows.len()).sum();
    assert_eq!(all.len(), each, "a flow is one port's");
    assert!(
        parts.iter().all(|(flows, ..)| flows.len() > 10),
        "each has its share"
    );
    // The source began when the first port was enabled, and the others were not yet.
    let counters = daemon.audit();
    let ports = || counters.iter().filter(|counted| counted.kind == "port");
    let sum = |name: &str| ports().map(|port| value(port, name)).sum::<u64>();
    let packets: u64 = parts.iter().map(|(_, packets, _)| packets).sum();
    assert_eq!((sum("delivered"), ports().count()), (packets, 3));
    assert_eq!(sum("delivered") + sum("paused"), 10_000);
}
