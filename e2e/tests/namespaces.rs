//! Sources in other network namespaces, which come and go while the daemon runs.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;

use vnplug::{Client, Next, Port, SourceRequest};
use vnplug_e2e::Lab;
use vnplug_e2e::Netns;
use vnplug_e2e::daemon::{Daemon, label};
use vnplug_e2e::reading::reads_on;
use vnplug_e2e::traffic::Stream;
use vnplug_testing::{eventually, until};

fn state(daemon: &Daemon, name: &str) -> String {
    let all = daemon.audit();
    let mut sources = all.iter().filter(|it| it.kind == "source");
    let source = sources.find(|it| it.name == name).unwrap();
    label(source, "state").to_owned()
}

/// Sends 1,000 frames there, which a port has then; they carry the mark of a gap if there is one.
fn passes(netns: &Netns, port: &mut Port) {
    let sent = netns.enter(|| Stream::new("out0", 1000).send());
    assert_eq!(sent.unwrap().unwrap().frames, 1000);
    let mut read = 0;
    eventually("the frames come", || {
        while let Next::Packet(_) = port.next().unwrap() {
            read += 1;
        }
        read == 1000
    });
}

/// The threads of the daemon that may enter namespaces, and those that are not in its own.
fn threads(daemon: &Daemon) -> (Vec<String>, Vec<String>) {
    const SYS_ADMIN: u64 = 1 << 21;
    let (mut may, mut away) = (Vec::new(), Vec::new());
    let dir = format!("/proc/{}", daemon.pid());
    let own = fs::read_link(format!("{dir}/ns/net")).unwrap();
    for task in fs::read_dir(format!("{dir}/task")).unwrap().flatten() {
        // One may end meanwhile.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else {
            continue;
        };
        let field = |name: &str| {
            let mut lines = status.lines();
            let found = lines.find_map(|line| line.strip_prefix(name));
            found.unwrap().trim().to_owned()
        };
        let name = field("Name:");
        if u64::from_str_radix(&field("CapPrm:"), 16).unwrap() & SYS_ADMIN != 0 {
            may.push(name.clone());
        }
        if fs::read_link(task.path().join("ns/net")).is_ok_and(|it| it != own) {
            away.push(name);
        }
    }
    (may, away)
}

#[test]
fn a_source_follows_its_namespace_which_ends_without_it() {
    let lab = Lab::new().unwrap();
    let (netns, other) = (Netns::new().unwrap(), Netns::new().unwrap());
    // The far end shows whether the namespace is really gone.
    let wire = || {
        let name = netns.name();
        let words = [
            "link", "add", "out0", "type", "veth", "peer", "name", "in0", "netns", name,
        ];
        other.ip(&words).unwrap();
        other.ip(&["link", "set", "out0", "up"]).unwrap();
        netns.ip(&["link", "set", "in0", "up"]).unwrap();
    };
    wire();
    let source = format!("c1=af_packet:in0,netns={}", netns.name());
    let args = ["--source", &source, "--source", "kept=gen,pps=20000"];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut kept = daemon.port("kept").open().unwrap();
    let mut port = daemon.port("c1").open().unwrap();
    until(
        "it is received",
        || state(&daemon, "c1"),
        |state| state == "up",
    );
    passes(&other, &mut port);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let devices = client.devices().unwrap();
    let device = devices.iter().find(|it| it.name == "host:c1").unwrap();
    let place = format!("interface in0 in network namespace {}", netns.name());
    assert_eq!((&device.description, device.mtu), (&place, 1500));
    assert_eq!(threads(&daemon), (vec!["vnplug-netns".to_owned()], vec![]));

    let mut lost = 0;
    for _ in 0..3 {
        netns.remove().unwrap();
        until(
            "it is gone",
            || state(&daemon, "c1"),
            |state| state == "gone",
        );
        // Whatever has a socket in it keeps it alive: the daemon has none.
        eventually("it has ended", || {
            !other.ip(&["-br", "link"]).unwrap().contains("out0")
        });
        netns.make().unwrap();
        wire();
        until(
            "another one is there",
            || state(&daemon, "c1"),
            |state| state == "up",
        );
        passes(&other, &mut port);
        lost += port.counts().lost;
    }
    assert_eq!(lost, 0);
    assert_eq!(threads(&daemon), (vec!["vnplug-netns".to_owned()], vec![]));
    reads_on(&mut kept);
    assert_eq!(kept.counts().lost, 0);
    assert!(daemon.log().contains("is gone, and with it interface"));
    daemon.audit();
}

#[test]
fn a_namespace_may_come_later_and_is_not_taken_for_another_one() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.remove().unwrap();
    let source = format!("c1=af_packet:in0,netns={},wait=yes", netns.name());
    let daemon = Daemon::start(&lab, None, &["--source", &source]).unwrap();
    let mut port = daemon.port("c1").open().unwrap();
    assert_eq!(state(&daemon, "c1"), "missing");
    netns.make().unwrap();
    assert_eq!(state(&daemon, "c1"), "missing");
    netns.veth("in0", "out0").unwrap();
    until(
        "it is received",
        || state(&daemon, "c1"),
        |state| state == "up",
    );
    passes(&netns, &mut port);
    // At run time, too.
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut add = |text: String| {
        let added = client.change_sources(SourceRequest::Add { text, keep: false });
        added.map(drop).map_err(|error| error.to_string())
    };
    add(format!("c2=af_packet:out0,netns={}", netns.name())).unwrap();
    for (netns, why) in [
        ("vnplug-none", "there is no /run/netns/vnplug-none"),
        (
            "/proc/self/status",
            "/proc/self/status is no network namespace",
        ),
        ("/dev/null", "/dev/null is no network namespace"),
        ("../x", "is no network namespace: write"),
    ] {
        let error = add(format!("bad=af_packet:in0,netns={netns}")).unwrap_err();
        assert!(error.contains(why), "{netns}: {error}");
    }
    // A daemon that needed none when it started gave up the right.
    let without = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let text = format!("c1=af_packet:in0,netns={}", netns.name());
    let mut client = Client::connect_to(&without.socket()).unwrap();
    let error = client.change_sources(SourceRequest::Add { text, keep: false });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("no permission to enter network namespace"),
        "{error}"
    );
    assert_eq!(threads(&without).0, Vec::<String>::new());
}
