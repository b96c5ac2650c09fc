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
