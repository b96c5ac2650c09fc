//! "The sensor sees nothing": `vnplug doctor` is asked once, and names the cause, wherever on the way it is.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroU64;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::{Daemon, counted, program, value};
use vnplug_e2e::traffic::{Sending, Stream};
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::Counted;
use vnplug_testing::{PATIENCE, eventually};

/// A process that ends with its test.
struct Reader(Child);

impl Reader {
    /// Counts for a long time, and has its port.
    fn start(daemon: &Daemon, args: &[&str]) -> Self {
        let mut command = daemon.command().unwrap();
        command.args(["count", "host:wire0"]).args(args);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let reader = Self(command.spawn().unwrap());
        let ports = || {
            daemon
                .counters()
                .iter()
                .filter(|it| it.kind == "port")
                .count()
        };
        eventually("it has a port", || ports() == 1);
        reader
    }

    fn signal(&self, name: &str) {
        let kill = Command::new("kill")
            .args([name, &self.0.id().to_string()])
            .status();
        assert!(kill.unwrap().success());
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the doctor says: all of it, and the check `traffic`.
fn ask(netns: &Netns, daemon: &Daemon) -> (Value, String) {
    let mut doctor = netns.command(program("vnplug").unwrap());
    doctor.arg("--socket").arg(daemon.socket());
    let said = doctor
        .args(["doctor", "--role", "host", "--json"])
        .output()
        .unwrap();
    let said: Value = serde_json::from_slice(&said.stdout).unwrap();
    let traffic = check(&said, "traffic");
    (said, traffic)
}

/// State and text of a check.
fn check(said: &Value, name: &str) -> String {
    let found = said["checks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["name"] == name);
    let found = found.unwrap_or_else(|| panic!("{name} is not in {said}"));
    format!(
        "{}: {}",
        found["state"].as_str().unwrap(),
        found["text"].as_str().unwrap()
    )
}

/// A minute of a thousand frames a second.
fn talk(netns: &Netns) -> Sending {
    let stream = Stream {
        pps: NonZeroU64::new(1000),
        len_bytes: 600,
        ..Stream::new("wire1", 60_000)
    };
    stream.start(netns).unwrap()
}

#[test]
fn one_call_says_why_a_sensor_sees_nothing() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire0"]).unwrap();
    let talk = talk(&netns);
    eventually("frames come", || {
        value(counted(&daemon.counters(), "source"), "seen") > 0
    });
    let (said, traffic) = ask(&netns, &daemon);
    assert!(
        traffic.starts_with("warn: no application has a port"),
        "{traffic}"
    );
    let verdict = said["verdict"].as_str().unwrap();
    assert!(verdict.contains("no application has a port"), "{verdict}");

    // The control: with a reader nothing is wrong.
    let reader = Reader::start(&daemon, &[]);
    let (_, traffic) = ask(&netns, &daemon);
    assert!(traffic.starts_with("ok: "), "{traffic}");
    drop(reader);

    let reader = Reader::start(&daemon, &["-f", "tcp port 9999"]);
    let (_, traffic) = ask(&netns, &daemon);
    assert!(
        traffic.contains("its filter takes none: tcp port 9999"),
        "{traffic}"
    );
    drop(reader);

    let reader = Reader::start(&daemon, &["--ring", "64K"]);
    reader.signal("-STOP");
    let is_full = |it: &Counted| value(it, "dropped_full") > 0;
    eventually("its ring is full", || daemon.counters().iter().any(is_full));
    let (_, traffic) = ask(&netns, &daemon);
    assert!(traffic.contains("its reader does not read"), "{traffic}");
    drop(reader);

    drop(talk);
    let _reader = Reader::start(&daemon, &[]);
    let (_, traffic) = ask(&netns, &daemon);
    assert!(
        traffic.starts_with("warn: nothing comes to wire0"),
        "{traffic}"
    );
    netns.ip(&["link", "set", "wire0", "down"]).unwrap();
    let (said, _) = ask(&netns, &daemon);
    assert!(
        check(&said, "link-wire0").starts_with("FAIL: wire0 is down"),
        "{said}"
    );
    let verdict = said["verdict"].as_str().unwrap();
    assert!(verdict.contains("wire0 is down"), "{verdict}");
}

#[test]
fn a_guest_tries_for_itself_and_is_told_of_what_its_grant_leaves_out() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire0"]).unwrap();
    let mut grants = everything();
    grants[0].filter = "udp".into();
    let uml = AttachedUml::boot(&lab, &daemon, "sensor", grants, image().unwrap()).unwrap();
    let _agent = agent(&uml.guest).unwrap();
    let _talk = talk(&netns);
    let told = |expected: &str| {
        let said = uml.guest.run("vnplug doctor --json", PATIENCE).unwrap();
        let said: Value = serde_json::from_slice(&said.bytes).unwrap();
        let traffic = check(&said, "traffic");
        assert!(traffic.starts_with(expected), "{traffic}");
    };
    told("ok: within 1 s a reader got packets of host:wire0");
    let (code, said) = daemon.vnplug(&["grant", "set", "vm:sensor=*:tcp"]);
    assert_eq!(code, Some(0), "{said}");
    told("warn: within 1 s a reader got no packet of host:wire0");
}
