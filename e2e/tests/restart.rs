//! A daemon that is replaced: what the service manager kept for the next one, and what its readers have of it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroU64;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use vnplug::{Client, Next, Port, flags};
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::manager::Manager;
use vnplug_e2e::traffic::{Sending, Stream};
use vnplug_e2e::{Lab, Netns};
use vnplug_frame::witness::{Checker, Report, View};
use vnplug_testing::{Deadline, eventually, until};

const FRAMES: u64 = 60_000;
const RUN: u32 = 7;
/// A quarter of a second of the traffic.
const SMALL: u64 = 512 << 10;

struct Wire {
    netns: Netns,
    lab: Lab,
}

impl Wire {
    fn new() -> Self {
        let netns = Netns::new().unwrap();
        netns.veth("far0", "wire0").unwrap();
        Self {
            netns,
            lab: Lab::new().unwrap(),
        }
    }

    /// A daemon that a manager started and starts again.
    fn managed(&self, source: &str) -> (Arc<Manager>, Daemon) {
        let manager = Manager::new(&self.lab).unwrap();
        let args = ["--source", source];
        let daemon = Daemon::start_by(&manager, &self.lab, Some(&self.netns), &args).unwrap();
        (manager, daemon)
    }

    /// Three seconds of numbered frames, 16 flows.
    fn traffic(&self) -> Sending {
        let stream = Stream {
            pps: NonZeroU64::new(20_000),
            run: RUN,
            flows: 16,
            ..Stream::new("far0", FRAMES)
        };
        stream.start(&self.netns).unwrap()
    }
}

/// Reads until the last frame of each flow was there, or nothing comes for a while.
fn read_all(mut port: Port) -> Report {
    let mut checker = Checker::new(View::Whole);
    checker.expect(RUN, 0..FRAMES);
    let deadline = Deadline::new("all is read");
    let (mut count, mut quiet) = (0, 0);
    // While most is still to come, two daemons may start on a busy machine, each of which waits a second for readers.
    while quiet < if count + 1_000 > FRAMES { 30 } else { 100 } {
        deadline.check();
        match port.next().unwrap() {
            Next::Packet(packet) => {
                checker.feed(packet.bytes);
                (count, quiet) = (count + 1, 0);
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(100))).unwrap();
                quiet += 1;
            }
            Next::Ended => panic!("the source ended"),
        }
    }
    checker.report(RUN).unwrap()
}

/// Reads until it is back at the daemon after this one, and no more.
fn read_until_a_gap(mut port: Port) -> Port {
    let deadline = Deadline::new("there is a gap");
    loop {
        deadline.check();
        match port.next().unwrap() {
            Next::Packet(packet) if packet.meta.flags & flags::GAP != 0 => return port,
            Next::Packet(_) => {}
            _ => drop(port.wait(Some(Duration::from_millis(10))).unwrap()),
        }
    }
}

/// Replaces a daemon while frames come, twice; what the reader of a port had.
fn over_restarts(wire: &Wire, port: Port, daemon: &mut Daemon, end: fn(&mut Daemon)) -> Report {
    let reader = thread::spawn(move || read_all(port));
    let _sending = wire.traffic();
    for _ in 0..2 {
        thread::sleep(Duration::from_millis(700));
        end(daemon);
        // As long as an upgrade takes.
        thread::sleep(Duration::from_millis(200));
        daemon.launch().unwrap();
    }
    reader.join().unwrap()
}

/// Nothing came twice, and at each restart one frame may be missing: the kernel loses one when it goes over to the other ring in a burst.
fn is_whole(report: &Report) -> bool {
    report.received + 2 >= FRAMES && report.duplicates == 0
}

#[test]
fn a_daemon_that_is_replaced_loses_nothing() {
    // The last is of a pattern.
    for source in [
        "wire=af_packet:wire0",
        "wire=af_packet:wire0,queues=2",
        "wir*=af_packet:wir*0",
    ] {
        let wire = Wire::new();
        let (manager, mut daemon) = wire.managed(source);
        eventually("the source is there", || daemon.port("wire").open().is_ok());
        let port = daemon.port("wire").open().unwrap();
        let report = over_restarts(&wire, port, &mut daemon, Daemon::end);
        assert!(is_whole(&report), "{source}: {report:?}");
        assert!(daemon.log().contains("where an earlier daemon stopped"));
        daemon.audit();
        assert_eq!(manager.names().len(), 2, "{:?}", manager.names());
    }
}

/// Two megabytes wait when the daemon begins to hand out.
#[test]
fn what_was_held_comes_as_fast_as_a_small_ring_is_read_and_an_idle_reader_keeps_nothing_up() {
    let wire = Wire::new();
    let (_manager, mut daemon) = wire.managed("wire=af_packet:wire0");
    let [idle, port] = [(); 2].map(|()| daemon.port("wire").ring_bytes(SMALL).open().unwrap());
    let idle = thread::spawn(move || read_until_a_gap(idle));
    let report = over_restarts(&wire, port, &mut daemon, Daemon::end);
    assert!(is_whole(&report), "{report:?}");
    // It came back, and took no more.
    drop(idle.join().unwrap());
}

/// The control: without a manager they are lost.
#[test]
fn without_a_manager_what_passes_meanwhile_is_lost() {
    let wire = Wire::new();
    let args = ["--source", "wire=af_packet:wire0"];
    let mut daemon = Daemon::start(&wire.lab, Some(&wire.netns), &args).unwrap();
    let port = daemon.port("wire").open().unwrap();
    let report = over_restarts(&wire, port, &mut daemon, Daemon::end);
    assert!(report.received < FRAMES - 2_000, "{report:?}");
    assert_eq!(report.duplicates, 0);
}

/// What was being handed out may be lost, and nothing comes twice.
#[test]
fn a_daemon_that_is_killed_loses_a_batch_at_most() {
    let wire = Wire::new();
    let (_manager, mut daemon) = wire.managed("wire=af_packet:wire0");
    let port = daemon.port("wire").open().unwrap();
    let report = over_restarts(&wire, port, &mut daemon, Daemon::kill);
    assert_eq!(report.duplicates, 0, "{report:?}");
    assert!(report.received + 2 * 256 >= FRAMES, "{report:?}");
    daemon.audit();
}

#[test]
fn what_is_of_no_use_any_more_is_not_kept() {
    let wire = Wire::new();
    let (manager, mut daemon) = wire.managed("wire=af_packet:wire0");
    let first = manager.names();
    assert_eq!(first.len(), 2, "{first:?}");
    // The interface is another one, and so are the sockets.
    wire.netns.ip(&["link", "delete", "far0"]).unwrap();
    wire.netns.veth("far0", "wire0").unwrap();
    eventually(
        "the sockets of the new interface are kept, and no others",
        || {
            let names = manager.names();
            names.len() == 2 && !names.iter().any(|name| first.contains(name))
        },
    );
    // One that goes while there is no daemon.
    daemon.end();
    let second = manager.names();
    wire.netns.ip(&["link", "delete", "far0"]).unwrap();
    wire.netns.veth("far0", "wire0").unwrap();
    daemon.launch().unwrap();
    assert!(!daemon.log().contains("where an earlier daemon stopped"));
    eventually("those of the old one are let go", || {
        let names = manager.names();
        names.len() == 2 && !names.iter().any(|name| second.contains(name))
    });
    let (code, said) = daemon.vnplug(&["source", "add", "other=af_packet:far0"]);
    assert_eq!(code, Some(0), "{said}");
    eventually("its sockets are kept", || manager.names().len() == 4);
    let (code, said) = daemon.vnplug(&["source", "rm", "other"]);
    assert_eq!(code, Some(0), "{said}");
    eventually("and forgotten", || manager.names().len() == 2);
    // Nobody has that source at the next start.
    let (code, said) = daemon.vnplug(&["source", "add", "other=af_packet:far0"]);
    assert_eq!(code, Some(0), "{said}");
    eventually("its sockets are kept", || manager.names().len() == 4);
    daemon.end();
    daemon.launch().unwrap();
    assert!(daemon.log().contains("is let go"));
    eventually("it is forgotten", || manager.names().len() == 2);
    let all = daemon.audit();
    assert_eq!(all.iter().filter(|it| it.kind == "source").count(), 1);
}

/// Others would mix frames of one kind into a ring of another.
#[test]
fn a_ring_of_another_shape_is_made_anew() {
    let wire = Wire::new();
    let (manager, mut daemon) = wire.managed("wire=af_packet:wire0");
    let first = manager.names();
    daemon.end();
    drop(daemon);
    let args = ["--source", "wire=af_packet:wire0,blocks=128"];
    let mut daemon = Daemon::start_by(&manager, &wire.lab, Some(&wire.netns), &args).unwrap();
    assert!(!daemon.log().contains("where an earlier daemon stopped"));
    eventually("the old ones are forgotten", || {
        let names = manager.names();
        names.len() == 2 && !names.iter().any(|name| first.contains(name))
    });
    daemon.kill();
}

/// Of many the default timer is slower. Those that are there keep theirs, over a restart too.
#[test]
fn one_source_more_makes_no_other_anew() {
    let wire = Wire::new();
    let text = |n: usize| format!("s{n}=af_packet:wire0,block_size=4K,blocks=96,snaplen=1024");
    let args = |sources: usize| {
        let own = format!("own{},block_timeout_ms=2", &text(0)[2..]);
        let all = (0..sources).map(text).chain([own]);
        all.flat_map(|it| ["--source".to_owned(), it])
            .collect::<Vec<_>>()
    };
    let start = |manager: &Arc<Manager>, sources: usize| {
        let args = args(sources);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Daemon::start_by(manager, &wire.lab, Some(&wire.netns), &args).unwrap()
    };
    // How many sources have timers of 2 and 4 ms. The manager keeps two sockets of each.
    let timers = |manager: &Manager| {
        let names = manager.names();
        ["x96@2 ", "x96@4 "].map(|ms| names.iter().filter(|name| name.contains(ms)).count() / 2)
    };
    let manager = Manager::new(&wire.lab).unwrap();
    let mut daemon = start(&manager, 64);
    until("all are kept", || timers(&manager), |all| *all == [65, 0]);
    let first = manager.names();
    let (code, said) = daemon.vnplug(&["source", "add", &text(64)]);
    assert_eq!(code, Some(0), "{said}");
    until(
        "one more is kept",
        || timers(&manager),
        |all| *all == [65, 1],
    );
    daemon.end();
    drop(daemon);
    let daemon = start(&manager, 65);
    let resumed = daemon
        .log()
        .matches("where an earlier daemon stopped")
        .count();
    assert_eq!(resumed, 66);
    assert_eq!(timers(&manager), [65, 1]);
    assert!(first.iter().all(|name| manager.names().contains(name)));
    // The control: made anew each has the other one, but for the one that says it, and this is told.
    let lab = Lab::new().unwrap();
    let fresh = Manager::new(&lab).unwrap();
    let daemon = start(&fresh, 65);
    until("all are kept", || timers(&fresh), |all| *all == [1, 65]);
    let told = "65 sources do not say block_timeout_ms: it is 4 for each";
    assert!(daemon.log().contains(told), "{}", daemon.log());
    let mut check = Command::new(program("vnplugd").unwrap());
    let checked = check.arg("--check").args(args(65)).output().unwrap();
    let checked = String::from_utf8(checked.stderr).unwrap();
    assert!(checked.contains(told), "{checked}");
}

#[test]
fn a_socket_of_the_manager_serves_clients_that_came_before_the_daemon() {
    let wire = Wire::new();
    let manager = Manager::new(&wire.lab).unwrap();
    let args = ["--source", "wire=af_packet:wire0"];
    let mut daemon = Daemon::unstarted(&wire.lab, Some(&wire.netns), &args).unwrap();
    let path = daemon.socket();
    manager.pass("control", UnixListener::bind(&path).unwrap().into());
    daemon.set_manager(&manager);
    let early = path.clone();
    let client = thread::spawn(move || Client::connect_to(&early).and_then(|mut it| it.stats()));
    eventually("it waits", || !client.is_finished());
    daemon.launch().unwrap();
    client.join().unwrap().unwrap();
    daemon.end();
    // The manager has it still.
    assert!(path.exists());
    daemon.launch().unwrap();
    daemon.end();
    // Where nobody would find it, it is refused.
    let elsewhere = wire.lab.dir().join("elsewhere");
    let manager = Manager::new(&Lab::new().unwrap()).unwrap();
    manager.pass("control", UnixListener::bind(&elsewhere).unwrap().into());
    daemon.set_manager(&manager);
    let error = daemon.launch().unwrap_err().to_string();
    assert!(error.contains("must be one path"), "{error}");
}
