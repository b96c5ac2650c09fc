//! Ports that share a connection and a doorbell: woken, closed one by one, and back after a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use vnplug::{Bundle, Client, Grant, Next, Port, Ready, VmKind, VmSpec, code};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::raw::{Holdings, Raw, hello, open};
use vnplug_ring::control::{Counted, Message, Role, Tuning};
use vnplug_testing::{Deadline, PATIENCE};

fn bundle_of(daemon: &Daemon, ports: usize) -> Bundle {
    let mut bundle = Bundle::new().expect("descriptors");
    for _ in 0..ports {
        let options = daemon.port("lab").ring_bytes(1 << 14);
        bundle.open(options).expect("a port");
    }
    bundle
}

fn take(port: &mut Port) -> u64 {
    let mut taken = 0;
    while let Next::Packet(_) = port.next().expect("the port lives") {
        taken += 1;
    }
    taken
}

/// Waits until every port got packets.
fn until_all_have_packets(bundle: &mut Bundle) {
    let deadline = Deadline::new("every port has packets");
    let mut taken = vec![0; bundle.ports().len()];
    while taken.contains(&0) {
        deadline.check_seen(&taken);
        bundle.wait(Some(Duration::from_secs(1))).expect("wait");
        for (port, taken) in bundle.ports().iter_mut().zip(&mut taken) {
            *taken += take(port);
        }
    }
}

fn vm() -> VmSpec {
    VmSpec {
        name: "guest".into(),
        kind: VmKind::Qemu,
        pool_bytes: 32 << 20,
        vectors: 0,
        allow: vec![Grant {
            source: "lab".into(),
            filter: String::new(),
        }],
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    }
}

fn ports_of(daemon: &Daemon) -> u64 {
    value(&daemon.audit()[0], "ports")
}

#[test]
fn its_ports_are_woken_and_closed_one_by_one_and_cost_no_descriptors() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=2000"]).unwrap();
    let before = Holdings::at_rest(daemon.pid()).fds;
    let mut bundle = bundle_of(&daemon, 50);
    assert!(Holdings::at_rest(daemon.pid()).fds <= before + 2);
    until_all_have_packets(&mut bundle);
    // A port of it can be waited for by itself, too.
    let port = &mut bundle.ports()[7];
    take(port);
    assert_eq!(port.wait(Some(PATIENCE)), Ok(Ready::Now));
    assert!(take(port) > 0);
    // The first one, with which the doorbell came, is no different from the others.
    bundle.close(0);
    bundle.close(30);
    assert_eq!(ports_of(&daemon), 48);
    until_all_have_packets(&mut bundle);
    drop(bundle);
    daemon.await_no_ports();
    assert_eq!(Holdings::at_rest(daemon.pid()).fds, before);
}

/// Those that are told of until each of these has been, with a packet.
fn told(bundle: &mut Bundle, wanted: &[usize]) -> BTreeSet<usize> {
    let deadline = Deadline::new("all that get packets are told of");
    let (mut told, mut taken) = (BTreeSet::new(), BTreeMap::new());
    while !wanted.iter().all(|at| taken.contains_key(at)) {
        deadline.check_seen(&taken);
        bundle.wait(Some(Duration::from_secs(1))).expect("wait");
        while let Some(at) = bundle.next_ready() {
            told.insert(at);
            match take(&mut bundle.ports()[at]) {
                0 => {}
                packets => *taken.entry(at).or_insert(0) += packets,
            }
        }
    }
    told
}

#[test]
fn of_many_only_those_that_have_news_are_told_of() {
    const PORTS: usize = 300;
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let mut bundle = Bundle::new().unwrap();
    let some = [3, 4, 70, PORTS - 1];
    for at in 0..PORTS {
        let options = daemon.port("lab").ring_bytes(1 << 14);
        bundle.open(options.enabled(some.contains(&at))).unwrap();
    }
    for _ in 0..20 {
        assert_eq!(told(&mut bundle, &some), some.into());
    }
    // One that slept is told of as soon as it has something, and one that has nothing any more is not.
    let on = |enabled| Tuning {
        enabled,
        ..Tuning::default()
    };
    bundle.ports()[200].tune(on(true)).unwrap();
    bundle.ports()[4].tune(on(false)).unwrap();
    told(&mut bundle, &[3]);
    for _ in 0..20 {
        let now = told(&mut bundle, &[3, 70, 200, PORTS - 1]);
        assert_eq!(now, [3, 70, 200, PORTS - 1].into());
    }
    // The last takes the place of one that is closed, also if that is told of.
    bundle.close(70);
    for _ in 0..20 {
        assert_eq!(told(&mut bundle, &[3, 70, 200]), [3, 70, 200].into());
    }
    // A port that waits by itself leaves the others what is theirs.
    for _ in 0..20 {
        take(&mut bundle.ports()[3]);
        assert_eq!(bundle.ports()[3].wait(Some(PATIENCE)), Ok(Ready::Now));
    }
    assert_eq!(told(&mut bundle, &[3, 70, 200]), [3, 70, 200].into());
    // Another has its seat.
    let options = daemon.port("lab").ring_bytes(1 << 14).enabled(false);
    bundle.open(options).unwrap();
    assert_eq!(told(&mut bundle, &[3, 70, 200]), [3, 70, 200].into());
    // All have something to say when the daemon goes, and are back by themselves.
    daemon.kill();
    daemon.launch().unwrap();
    let deadline = Deadline::new("all are back");
    while bundle
        .ports()
        .iter()
        .any(|port| port.counts().reopened == 0)
    {
        deadline.check();
        bundle.wait(Some(Duration::from_secs(1))).unwrap();
        while let Some(at) = bundle.next_ready() {
            take(&mut bundle.ports()[at]);
        }
    }
    told(&mut bundle, &[3]);
    for _ in 0..20 {
        assert_eq!(told(&mut bundle, &[3, 70, 200]), [3, 70, 200].into());
    }
}

#[test]
fn several_of_it_send() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let mut bundle = Bundle::new().unwrap();
    for _ in 0..3 {
        let options = daemon.port("lab").ring_bytes(1 << 14).enabled(false);
        bundle.open(options.transmit(1 << 14)).unwrap();
    }
    for port in bundle.ports() {
        let outbox = port.outbox().unwrap();
        assert!(outbox.push(&[7; 60]).unwrap());
        outbox.flush();
    }
    let deadline = Deadline::new("each has sent");
    let sent = |port: &Counted| value(port, "send_taken");
    loop {
        let counters = daemon.counters();
        let ports = counters.iter().filter(|it| it.kind == "port");
        if ports.map(sent).eq([1, 1, 1]) {
            break;
        }
        deadline.check_seen(&counters);
    }
}

#[test]
fn a_silent_source_lets_it_sleep_as_long_as_it_asks() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000,count=1"]).unwrap();
    let mut bundle = Bundle::new().unwrap();
    for _ in 0..3 {
        let options = daemon.port("lab").enabled(false).ring_bytes(1 << 14);
        bundle.open(options).unwrap();
    }
    let begin = Instant::now();
    let time = Duration::from_millis(50);
    assert_eq!(bundle.wait(Some(time)), Ok(Ready::TimedOut));
    assert!(begin.elapsed() >= time);
}

#[test]
fn all_of_it_is_back_when_the_daemon_is() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=2000"]).unwrap();
    let mut bundle = bundle_of(&daemon, 20);
    until_all_have_packets(&mut bundle);
    daemon.kill();
    // Nobody is there: it waits, and does not spin.
    let (begin, deadline) = (Instant::now(), Deadline::new("all have noticed"));
    while begin.elapsed() < Duration::from_millis(300) || !bundle.ports().iter().all(Port::is_away)
    {
        deadline.check();
        bundle.wait(Some(Duration::from_millis(100))).unwrap();
        bundle.ports().iter_mut().for_each(|port| {
            take(port);
        });
    }
    daemon.launch().unwrap();
    let deadline = Deadline::new("all are back");
    while bundle
        .ports()
        .iter()
        .any(|port| port.counts().reopened == 0)
    {
        deadline.check();
        bundle.wait(Some(Duration::from_secs(1))).unwrap();
        bundle.ports().iter_mut().for_each(|port| {
            take(port);
        });
    }
    until_all_have_packets(&mut bundle);
    assert_eq!(ports_of(&daemon), 20);
    // Again on one connection.
    let connections = Holdings::at_rest(daemon.pid()).fds;
    drop(bundle);
    daemon.await_no_ports();
    assert_eq!(Holdings::at_rest(daemon.pid()).fds, connections - 2);
}

#[test]
fn a_client_without_a_descriptor_in_the_daemon_is_told_what_to_do() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let held = Holdings::at_rest(daemon.pid()).fds;
    let set = Command::new("prlimit")
        .args(["--pid", &daemon.pid().to_string()])
        .arg(format!("--nofile={}", held + 5))
        .status();
    assert!(set.unwrap().success());
    let mut ports = Vec::new();
    let error = loop {
        match daemon.port("lab").ring_bytes(4096).open() {
            Ok(port) => ports.push(port),
            Err(error) => break error,
        }
        assert!(ports.len() < 5);
    };
    assert!(
        matches!(&error, vnplug::Error::Refused { code, text }
            if [code::LIMIT, code::NO_MEMORY].contains(code) && text.contains("LimitNOFILE")),
        "{error:?}"
    );
}

/// Closing all in one go took the daemon's control thread 0.2 s for 2,000, in which it answered nobody:
/// who asked was told of all of them or of none.
#[test]
fn others_are_answered_while_a_large_one_is_closed() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut ports_now = || value(&client.stats().unwrap()[0], "ports");
    // On a busy machine this process may not run while the daemon closes them.
    let is_seen = (0..10).any(|_| {
        drop(bundle_of(&daemon, 2_000));
        let deadline = Deadline::new("all are closed");
        let mut is_seen = false;
        loop {
            match ports_now() {
                0 => return is_seen,
                ports => is_seen |= ports < 2_000,
            }
            deadline.check();
        }
    });
    assert!(is_seen, "nobody is answered while a bundle is closed");
}

/// The same behind a channel, where the agent goes on in the same pool: what it says next waits until
/// all is free again, and nobody else does.
#[test]
fn others_are_answered_while_the_ports_of_a_guest_are_closed() {
    const PORTS: u64 = 1_000;
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let ready = client.attach_vm(vm()).unwrap();
    let mut free = || {
        let counters = client.stats().unwrap();
        let vm = counted(&counters, "vm");
        (value(&counters[0], "ports"), value(vm, "pool_free"))
    };
    let mut agent = Raw::connect(Path::new(&ready.control_path));
    agent.hello(Role::Agent);
    let mut agent = Some(agent);
    let before = free();
    let hello = hello(Role::Agent).encode(1, 0);
    let ends: [(&str, &dyn Fn(Raw) -> Raw); 3] = [
        ("an application", &|mut agent| {
            agent.send(&Message::AppGone.encode(1, 9)).unwrap();
            agent
        }),
        ("an agent", &|mut agent| {
            agent.send(&hello).unwrap();
            agent
        }),
        ("a channel", &|agent| {
            drop(agent);
            let mut agent = Raw::connect(Path::new(&ready.control_path));
            agent.send(&hello).unwrap();
            agent
        }),
    ];
    for (what, end) in ends {
        // On a busy machine this process may not run while the daemon closes them.
        let is_seen = (0..10).any(|_| {
            let it = agent.as_mut().unwrap();
            for _ in 0..PORTS {
                let opened = it.ask(&Message::Open(open("host:lab", 4096)), 9);
                assert!(matches!(opened, Message::Opened(_)), "{what}: {opened:?}");
            }
            assert_eq!(free().0, PORTS);
            let mut it = end(agent.take().unwrap());
            let deadline = Deadline::new(format!("{what}: all are closed"));
            let mut is_seen = false;
            loop {
                match free().0 {
                    0 => break,
                    ports => is_seen |= ports < PORTS,
                }
                deadline.check();
            }
            while it.next().expect("an answer").0 != 1 {}
            agent = Some(it);
            assert_eq!(free(), before, "{what}");
            is_seen
        });
        assert!(is_seen, "nobody is answered while {what} goes");
    }
    // What is left when the VM goes is not in the next one's way.
    let mut agent = agent.unwrap();
    for _ in 0..PORTS {
        agent.ask(&Message::Open(open("host:lab", 4096)), 9);
    }
    drop(agent);
    client.detach_vm("guest").unwrap();
    assert_eq!(ports_of(&daemon), 0);
    client.attach_vm(vm()).unwrap();
}

/// Only ports that are back are read: a reader that waits for all to be reopened loses what they get.
#[test]
fn a_short_wait_is_short_also_while_it_comes_back() {
    const PORTS: usize = 2_000;
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let mut bundle = bundle_of(&daemon, PORTS);
    daemon.kill();
    daemon.launch().unwrap();
    let deadline = Deadline::new("all are back");
    let mut is_seen = false;
    loop {
        bundle.wait(Some(Duration::from_millis(1))).unwrap();
        let away = bundle.ports().iter().filter(|port| port.is_away()).count();
        let back = bundle.ports().iter();
        let back = back.filter(|port| port.counts().reopened > 0).count();
        // One wait reopened all of them before.
        is_seen |= away > 0 && back > 0;
        if back == PORTS {
            break;
        }
        deadline.check_seen(&back);
        for port in bundle.ports() {
            port.batch(64).for_each(drop);
        }
    }
    assert!(is_seen, "one wait reopened all of them");
}
