//! What services tell the manager that started them: that they are ready, once they are, and that they end.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::fs;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;

use vnplug::Client;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::recorder::{packets_by_capinfos, segments};
use vnplug_e2e::station::Running;
use vnplug_e2e::stopped::Stopped;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::eventually;

/// A manager that hears.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    said: RefCell<Vec<String>>,
}

impl Manager {
    fn new(lab: &Lab, name: &str) -> Self {
        let path = lab.dir().join(format!("{name}.notify"));
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self {
            socket,
            path,
            said: RefCell::default(),
        }
    }

    /// All that was said so far.
    fn said(&self) -> Vec<String> {
        let mut bytes = [0; 4096];
        let mut said = self.said.borrow_mut();
        while let Ok(len) = self.socket.recv(&mut bytes) {
            said.push(String::from_utf8(bytes[..len].to_vec()).unwrap());
        }
        said.clone()
    }

    fn start(&self, lab: &Lab, mut command: Command, name: &str) -> Running {
        command.env("NOTIFY_SOCKET", &self.path);
        Running::start(command, lab, name).unwrap()
    }

    /// Waits until the service says that it is ready; with which status.
    fn hears_ready(&self, service: &mut Running) -> String {
        let mut status = None;
        eventually("it is ready", || {
            let said = self.said();
            let ended = service.status();
            assert!(ended.is_none(), "{ended:?}: {}", service.errors());
            let ready = |it: &String| it.strip_prefix("READY=1\nSTATUS=").map(str::to_owned);
            status = said.iter().find_map(ready);
            status.is_some()
        });
        status.unwrap()
    }

    /// Ends a service that is ready; it says so.
    fn ends(&self, service: &mut Running) {
        let ended = service.finish();
        assert!(ended.success(), "{ended}: {}", service.errors());
        let said = self.said();
        let count = |what: &str| said.iter().filter(|it| it.starts_with(what)).count();
        assert_eq!((count("READY=1"), count("STOPPING=1")), (1, 1), "{said:?}");
        assert_eq!(said.last().unwrap(), "STOPPING=1", "{said:?}");
    }

    /// The control: a service that cannot serve ends, and is never ready.
    fn hears_nothing(&self, lab: &Lab, command: Command, why: &str) {
        let mut service = self.start(lab, command, "refused");
        eventually("it ends", || service.status().is_some());
        assert!(!service.status().unwrap().success());
        assert!(service.errors().contains(why), "{}", service.errors());
        let said = self.said();
        assert!(said.iter().all(|it| !it.contains("READY")), "{said:?}");
    }
}

#[test]
fn a_recorder_is_ready_when_it_records() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let to = wire.lab.dir().join("rec");
    let record = |source: &str| {
        let mut command = wire.daemon.command().unwrap();
        command.args(["record", source, "--to"]).arg(&to);
        command
    };
    let manager = Manager::new(&wire.lab, "record");
    manager.hears_nothing(&wire.lab, record("none"), "none");
    let mut service = manager.start(&wire.lab, record("wire1"), "record");
    let status = manager.hears_ready(&mut service);
    // Not sooner: what comes from now on is on the disk.
    let frames = 500;
    wire.send(&Stream::new("wire0", frames));
    assert!(status.starts_with("Recording wire1 to "), "{status}");
    wire.read(frames);
    manager.ends(&mut service);
    let recorded: u64 = segments(&to).iter().map(|it| packets_by_capinfos(it)).sum();
    assert_eq!(recorded, frames);
}

#[test]
fn interfaces_are_ready_when_they_are_there() {
    let lab = Lab::new().unwrap();
    let sources = ["--source", "lab=gen,pps=100", "--switch", "lan0"];
    let daemon = Daemon::start(&lab, None, &sources).unwrap();
    let netns = Netns::new().unwrap();
    for (name, words, wrong, status) in [
        (
            "tap0",
            ["tap", "lab"],
            ["tap", "none"],
            "tap0 receives host:lab",
        ),
        (
            "nic0",
            ["nic", "lan0"],
            ["nic", "lan1"],
            "nic0 is a port of host:lan0/port1",
        ),
    ] {
        let named = |words: [&str; 2]| {
            let mut command = netns.command(program("vnplug").unwrap());
            command.arg("--socket").arg(daemon.socket()).args(words);
            command.args(["--name", name]);
            command
        };
        let manager = Manager::new(&lab, name);
        manager.hears_nothing(&lab, named(wrong), wrong[1]);
        let mut service = manager.start(&lab, named(words), name);
        assert_eq!(manager.hears_ready(&mut service), status);
        netns.ip(&["link", "show", name]).unwrap();
        manager.ends(&mut service);
        netns.ip(&["link", "show", name]).unwrap_err();
    }
}

#[test]
fn an_agent_is_ready_when_applications_can_connect_and_has_no_host() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("agent");
    let agent = || {
        let mut command = Command::new(program("vnplug").unwrap());
        command.arg("--socket").arg(&socket);
        // No host ever comes by these.
        let nowhere = lab.dir().join("nowhere");
        command.arg("agent").arg("--memory").arg(&nowhere);
        command.arg("--channel").arg(&nowhere);
        command
    };
    let manager = Manager::new(&lab, "agent");
    let other = UnixListener::bind(&socket).unwrap();
    manager.hears_nothing(&lab, agent(), "another agent or daemon listens");
    drop(other);
    let mut service = manager.start(&lab, agent(), "agent");
    let status = manager.hears_ready(&mut service);
    UnixStream::connect(&socket).unwrap();
    assert!(status.starts_with("Waiting for the host"), "{status}");
    manager.ends(&mut service);
}

#[test]
fn a_daemon_is_ready_when_it_answers() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("s");
    let daemon = |source: &str| {
        let mut command = Command::new(program("vnplugd").unwrap());
        command.arg("--socket").arg(&socket);
        command.arg("--pool-dir").arg(lab.dir());
        command.args(["--source", source]);
        command
    };
    let manager = Manager::new(&lab, "vnplugd");
    manager.hears_nothing(&lab, daemon("vnp-none,wait=no"), "vnp-none");
    let mut service = manager.start(&lab, daemon("lab=gen,pps=100"), "vnplugd");
    let status = manager.hears_ready(&mut service);
    let devices = Client::connect_to(&socket).unwrap().devices().unwrap();
    assert!(devices.iter().any(|it| it.name == "host:lab"));
    assert_eq!(status, "Serving");
    manager.ends(&mut service);
}

/// A program whose standard error is the journal's, as its environment says.
fn in_journal(name: &str) -> Command {
    let script = "export JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2); exec \"$@\"";
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "sh"])
        .arg(program(name).unwrap());
    command
}

/// What a command says that fails.
fn says(mut command: Command, lab: &Lab, words: &[&str]) -> String {
    command.args(words);
    let mut running = Running::start(command, lab, "fails").unwrap();
    eventually("it ends", || running.status().is_some());
    assert!(!running.status().unwrap().success());
    running.errors()
}

#[test]
fn in_the_journal_what_services_say_has_its_priority() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let socket = wire.daemon.socket();
    let none = wire.lab.dir().join("none");
    let none = none.to_str().unwrap();
    let remote = ["--listen", "0.0.0.0:0"];
    for (name, words) in [
        ("vnplugd", &["--config", none][..]),
        ("vnplug", &["--socket", none, "tap", "host:none"]),
        ("vnplug-web", &remote),
        ("vnplug-metrics", &remote),
    ] {
        let marked = says(in_journal(name), &wire.lab, words);
        let error = format!("<3>{name}: ");
        assert!(marked.starts_with(&error), "{marked}");
        // The control: elsewhere nothing is marked.
        let plain = says(Command::new(program(name).unwrap()), &wire.lab, words);
        assert!(plain.starts_with(&error[3..]), "{plain}");
    }

    // A recorder that loses packets warns, though it was not asked to report.
    let mut command = in_journal("vnplug");
    command
        .arg("--socket")
        .arg(socket)
        .args(["record", "wire1"]);
    command.args(["--ring", "64K", "--to"]);
    command.arg(wire.lab.dir().join("rec"));
    let recorder = Running::start(command, &wire.lab, "record").unwrap();
    eventually("it records", || recorder.errors().contains("recording"));
    let stopped = Stopped::new(&[recorder.pid()]);
    let frames = 5_000;
    wire.send(&Stream::new("wire0", frames));
    wire.read(frames);
    drop(stopped);
    // Which lost it is told with the next packet.
    wire.send(&Stream::new("wire0", 1));
    let marks = |of: &str| -> Vec<String> {
        let said = recorder.errors();
        let lines = said.lines().filter(|line| line.contains(of));
        lines.map(|line| line[..3].to_owned()).collect()
    };
    eventually("it warns", || marks(" lost").contains(&"<4>".to_owned()));
    assert_eq!(marks("recording since"), ["<6>"]);
}

#[test]
fn each_unit_waits_for_what_its_service_says() {
    let dist = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist");
    let entries = fs::read_dir(dist).unwrap().flatten();
    let files = entries.map(|entry| entry.path());
    let units: Vec<_> = files
        .filter(|file| file.extension().is_some_and(|it| it == "service"))
        .collect();
    assert!(units.len() >= 7, "{units:?}");
    for unit in units {
        let text = fs::read_to_string(&unit).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines.contains(&"Type=notify"), "{unit:?}");
        let takes_long = unit.ends_with("vnplug-record@.service");
        let waits = lines.contains(&"TimeoutStartSec=30min");
        assert_eq!(waits, takes_long, "{unit:?}");
    }
}
