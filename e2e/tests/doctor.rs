//! "The sensor sees nothing": `vnplug doctor` is asked once, and names the cause, wherever on the way it is.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroU64;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use vnplug::Client;
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

/// The names of all checks that were made.
fn names(said: &Value) -> Vec<&str> {
    let all = said["checks"].as_array().unwrap().iter();
    all.map(|it| it["name"].as_str().unwrap()).collect()
}

#[test]
fn an_interface_of_a_container_is_looked_at_from_its_namespace_alone() {
    let lab = Lab::new().unwrap();
    let (here, there) = (Netns::new().unwrap(), Netns::new().unwrap());
    // Both have an interface of this name, and frames come to that of the host.
    here.veth("wire0", "wire1").unwrap();
    there.veth("wire0", "wire1").unwrap();
    let source = format!("c1=af_packet:wire0,netns={}", there.name());
    let args = ["--source", &source, "--source", "wire1"];
    let daemon = Daemon::start(&lab, Some(&here), &args).unwrap();
    let _talk = talk(&here);
    let sends = |it: &Counted| it.name == "wire1" && value(it, "nic_tx_frames") > 0;
    eventually("frames go", || daemon.counters().iter().any(sends));
    let note = format!("netns-{}", there.name());
    let (said, traffic) = ask(&here, &daemon);
    assert!(!names(&said).contains(&"link-wire0"), "{said}");
    assert!(check(&said, "link-wire1").starts_with("ok"), "{said}");
    assert!(!traffic.contains("c1"), "{traffic}");
    let told = check(&said, &note);
    assert!(told.starts_with("skipped: not looked at"), "{told}");

    // The command that it names, with this build's program.
    let (_, command) = told.rsplit_once("as root: ").unwrap();
    let command = command.replace(
        "vnplug ",
        &format!("{} ", program("vnplug").unwrap().display()),
    );
    let command = format!("{command} --role host --json");
    let said = Command::new("sh").args(["-c", &command]).output().unwrap();
    let said: Value = serde_json::from_slice(&said.stdout).unwrap();
    assert!(check(&said, "link-wire0").starts_with("ok"), "{said}");
    assert!(!names(&said).contains(&note.as_str()), "{said}");
    let traffic = check(&said, "traffic");
    assert!(traffic.contains("nothing comes to wire0"), "{traffic}");
}

#[test]
fn the_interface_of_an_uplink_is_looked_at_also_when_it_is_gone() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("up0", "far0").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--switch", "lan0,uplink=up0"]).unwrap();
    let link = |expected: &str| {
        let (said, _) = ask(&netns, &daemon);
        let link = check(&said, "link-up0");
        assert!(link.starts_with(expected), "{link}");
        assert!(names(&said).contains(&"mtu-up0"), "{said}");
    };
    link("ok");
    netns.ip(&["link", "set", "up0", "down"]).unwrap();
    link("FAIL: up0 is down");
    netns.ip(&["link", "delete", "up0"]).unwrap();
    link("FAIL: there is no interface up0");
}

#[test]
fn a_generator_that_waits_or_falls_behind_is_no_fault() {
    let lab = Lab::new().unwrap();
    let sources = ["held=gen,pps=10,start=attach", "busy=gen,pps=100000000"];
    let args = ["--source", sources[0], "--source", sources[1]];
    let netns = Netns::new().unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let is = |state: &str| {
        let mut client = Client::connect_to(&daemon.socket()).unwrap();
        client.devices().unwrap().iter().any(|it| it.state == state)
    };
    eventually("one waits, one is behind", || is("waiting") && is("behind"));
    let (said, _) = ask(&netns, &daemon);
    let sources = check(&said, "sources");
    assert!(sources.starts_with("ok: "), "{sources}");
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
