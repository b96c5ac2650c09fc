//! Ports that share a connection and a doorbell: woken, closed one by one, and back after a restart.

use std::process::Command;
use std::time::{Duration, Instant};

use vnplug::{Bundle, Client, Next, Port, Ready, code};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::Holdings;

const LIMIT: Duration = Duration::from_secs(60);

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
    let deadline = Instant::now() + LIMIT;
    let mut taken = vec![0; bundle.ports().len()];
    while taken.contains(&0) {
        assert!(Instant::now() < deadline, "{taken:?}");
        bundle.wait(Some(Duration::from_secs(1))).expect("wait");
        for (port, taken) in bundle.ports().iter_mut().zip(&mut taken) {
            *taken += take(port);
        }
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
    assert_eq!(port.wait(Some(LIMIT)), Ok(Ready::Now));
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
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(300) {
        bundle.wait(Some(Duration::from_millis(100))).unwrap();
        bundle.ports().iter_mut().for_each(|port| {
            take(port);
        });
    }
    assert!(bundle.ports().iter().all(Port::is_away));
    daemon.launch().unwrap();
    let deadline = Instant::now() + LIMIT;
    while bundle
        .ports()
        .iter()
        .any(|port| port.counts().reopened == 0)
    {
        assert!(Instant::now() < deadline, "not all are back");
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
        let deadline = Instant::now() + LIMIT;
        let mut is_seen = false;
        loop {
            match ports_now() {
                0 => return is_seen,
                ports => is_seen |= ports < 2_000,
            }
            assert!(Instant::now() < deadline, "not all are closed");
        }
    });
    assert!(is_seen, "nobody is answered while a bundle is closed");
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
    let deadline = Instant::now() + LIMIT;
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
        assert!(Instant::now() < deadline, "{back} are back");
        for port in bundle.ports() {
            port.batch(64).for_each(drop);
        }
    }
    assert!(is_seen, "one wait reopened all of them");
}
