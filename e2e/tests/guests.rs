//! The whole product in real guests: stock QEMU, hot-plugged while it runs, and User-mode Linux.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use vnplug_e2e::attached::{self, AttachedUml, POOL_BYTES, everything, image, summary};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::traffic::sequence;
use vnplug_e2e::{Guest, Job, Lab, Machine, Qemu, QemuConfig};
use vnplug_ring::control::{Counted, Grant};
use vnplug_store::read::Reader;
use vnplug_testing::{PATIENCE, eventually};

fn boot(lab: &Lab, daemon: &Daemon, name: &str, allow: Vec<Grant>) -> AttachedUml {
    AttachedUml::boot(lab, daemon, name, allow, image().unwrap())
        .unwrap_or_else(|error| panic!("{error}"))
}

fn qemu(lab: &Lab, machine: Machine) -> Guest {
    let config = QemuConfig {
        machine,
        image: image().unwrap(),
        ..QemuConfig::default()
    };
    Qemu::boot(lab, config).unwrap_or_else(|error| panic!("{error}"))
}

fn plug(daemon: &Daemon, guest: &Guest, name: &str, more: &[&str]) {
    attached::plug(daemon, guest, name, more).unwrap_or_else(|error| panic!("{error}"));
}

fn agent(guest: &Guest) -> Job {
    attached::agent(guest).unwrap_or_else(|error| panic!("{error}"))
}

/// Counts packets in a guest; panics unless all arrived, once, in order, intact.
fn count_perfectly(guest: &Guest, device: &str, packets: u32) {
    // A ring that holds them all: a machine that is busy with other tests loses nothing then.
    let command =
        format!("vnplug count {device} --packets {packets} --ring 16M --witness --json 2>&1");
    let output = guest.run(&command, PATIENCE).unwrap();
    let text = output.text();
    assert_eq!(output.status, 0, "{text}");
    let summary = summary(&text).unwrap();
    assert_eq!(summary["lost"], 0, "{text}");
    assert_eq!(summary["witness"]["perfect"], true, "{text}");
    assert_eq!(summary["witness"]["received"], packets, "{text}");
}

fn ports(counters: &[Counted]) -> Vec<&Counted> {
    counters
        .iter()
        .filter(|counted| counted.kind == "port")
        .collect()
}

#[test]
fn uml_applications_read_the_hosts_wire_without_root_side_by_side() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=20000,run=5,size=200,flows=4,protocols=udp4+tcp4";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let uml = boot(&lab, &daemon, "uml", everything());
    let _agent = agent(&uml.guest);
    count_perfectly(&uml.guest, "host:lab", 40_000);

    // Two applications at once, not root, each with its own filter run on the host.
    let nobody = "su -s /bin/sh nobody -c";
    uml.guest
        .run(
            "echo nobody:x:65534:65534::/:/bin/sh >> /etc/passwd",
            PATIENCE,
        )
        .unwrap();
    let udp = format!("{nobody} 'vnplug count host:lab --filter udp --packets 10000 --json' 2>&1");
    let tcp = format!("{nobody} 'vnplug count host:lab --filter tcp --packets 10000 --json' 2>&1");
    let (udp, tcp) = (
        uml.guest.spawn(&udp).unwrap(),
        uml.guest.spawn(&tcp).unwrap(),
    );
    for output in [udp.wait(PATIENCE).unwrap(), tcp.wait(PATIENCE).unwrap()] {
        let text = output.text();
        assert_eq!(output.status, 0, "{text}");
        let summary = summary(&text).unwrap();
        assert_eq!(summary["packets"], 10_000, "{text}");
        assert_eq!(summary["lost"], 0, "{text}");
    }
    let bad = uml
        .guest
        .run("vnplug count host:lab --filter 'tcp prot 1' 2>&1", PATIENCE)
        .unwrap();
    assert!(
        bad.status == 1 && bad.text().contains("syntax error"),
        "{}",
        bad.text()
    );

    // An application that is killed frees its port.
    let reader = uml
        .guest
        .spawn("exec vnplug count host:lab --seconds 600")
        .unwrap();
    eventually("the port is there", || ports(&daemon.audit()).len() == 1);
    reader.signal("KILL").unwrap();
    eventually("the port is freed", || ports(&daemon.audit()).is_empty());
}

#[test]
fn a_guest_sees_what_the_operator_grants_and_nothing_else() {
    let lab = Lab::new().unwrap();
    let sources = [
        "--source",
        "lab=gen,pps=20000,size=200,flows=4,protocols=udp4+tcp4",
        "--source",
        "secret=gen,pps=10",
    ];
    let daemon = Daemon::start(&lab, None, &sources).unwrap();
    let grant = Grant {
        source: "lab".into(),
        filter: "udp".into(),
    };
    let uml = boot(&lab, &daemon, "uml", vec![grant]);
    let _agent = agent(&uml.guest);
    let list = uml.guest.run("vnplug list", PATIENCE).unwrap().text();
    assert!(
        list.contains("host:lab") && !list.contains("secret"),
        "{list}"
    );
    let refused = uml
        .guest
        .run("vnplug count host:secret 2>&1", PATIENCE)
        .unwrap();
    assert!(
        refused.status == 1 && refused.text().contains("no source"),
        "{}",
        refused.text()
    );
    let output = uml
        .guest
        .run("vnplug count host:lab --seconds 2 --json 2>&1", PATIENCE)
        .unwrap();
    let text = output.text();
    assert!(!text.contains("refused"), "{text}");
    let counted = &summary(&text).unwrap()["host"]["values"];
    assert_eq!(counted["filtered"], 0, "{text}");
    let tcp = "timeout 150 vnplug count host:lab --filter tcp --seconds 2 --json 2>&1";
    let text = uml.guest.run(tcp, PATIENCE).unwrap().text();
    assert_eq!(summary(&text).unwrap()["packets"], 0, "{text}");
    let attach = "vnplug detach uml --name uml 2>&1";
    assert_eq!(uml.guest.run(attach, PATIENCE).unwrap().status, 1);
    daemon.audit();
}

#[test]
fn a_killed_uml_frees_its_ports() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=5000"]).unwrap();
    let uml = boot(&lab, &daemon, "uml", everything());
    let _agent = agent(&uml.guest);
    let _reader = uml
        .guest
        .spawn("exec vnplug count host:lab --seconds 600")
        .unwrap();
    eventually("the port is there", || ports(&daemon.audit()).len() == 1);
    uml.guest.kill();
    drop(uml.channel);
    eventually("the port is freed", || ports(&daemon.audit()).is_empty());
    let counters = daemon.audit();
    let vm = counted(&counters, "vm");
    assert_eq!(
        (label(vm, "state"), value(vm, "pool_free")),
        ("waiting", POOL_BYTES - 4096)
    );
}

#[test]
fn a_uml_reader_survives_a_killed_daemon() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=5000"]).unwrap();
    let uml = boot(&lab, &daemon, "uml", everything());
    let _agent = agent(&uml.guest);
    let reader = uml
        .guest
        .spawn("exec vnplug count host:lab --json 2>&1")
        .unwrap();
    eventually("the port is there", || ports(&daemon.audit()).len() == 1);
    for _ in 0..2 {
        daemon.kill();
        daemon.launch().unwrap();
        uml.adopt_again(&daemon);
        eventually("the reader is back", || {
            let counters = daemon.audit();
            ports(&counters)
                .first()
                .is_some_and(|port| value(port, "delivered") > 100)
        });
    }
    reader.signal("INT").unwrap();
    let output = reader.wait(PATIENCE).unwrap();
    let text = output.text();
    assert_eq!(output.status, 0, "{text}");
    assert_eq!(summary(&text).unwrap()["reopened"], 2, "{text}");
}

#[test]
fn a_running_pc_is_plugged_read_from_and_unplugged() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=5000"]).unwrap();
    let guest = qemu(&lab, Machine::Pc);
    plug(&daemon, &guest, "pc", &[]);
    let agent_job = agent(&guest);
    count_perfectly(&guest, "host:lab", 20_000);

    let qmp = guest.qmp_path().unwrap();
    let detach = [
        "detach",
        "qemu",
        "--qmp",
        qmp.to_str().unwrap(),
        "--name",
        "pc",
    ];
    let (code, text) = daemon.vnplug(&detach);
    assert_eq!(code, Some(0), "{text}");
    assert!(daemon.audit().iter().all(|counted| counted.kind != "vm"));
    let gone = guest.run("vnplug list 2>&1", PATIENCE).unwrap();
    assert_ne!(gone.status, 0, "{}", gone.text());

    // Again, into the same running guest, with the same agent.
    plug(&daemon, &guest, "pc", &[]);
    eventually("the agent finds the devices again", || {
        guest
            .run("vnplug list", PATIENCE)
            .is_ok_and(|list| list.status == 0)
    });
    count_perfectly(&guest, "host:lab", 5_000);
    drop(agent_job);
}

#[test]
fn a_running_q35_is_plugged_and_survives_a_killed_daemon() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=3000"]).unwrap();
    let guest = qemu(&lab, Machine::Q35 { root_ports: 2 });
    plug(&daemon, &guest, "q35", &[]);
    let _agent = agent(&guest);
    count_perfectly(&guest, "host:lab", 5_000);
    let reader = guest
        .spawn("exec vnplug count host:lab --json 2>&1")
        .unwrap();
    eventually("the port is there", || ports(&daemon.audit()).len() == 1);
    daemon.kill();
    daemon.launch().unwrap();
    eventually("the reader is back", || {
        let counters = daemon.audit();
        ports(&counters)
            .first()
            .is_some_and(|port| value(port, "delivered") > 100)
    });
    reader.signal("INT").unwrap();
    let output = reader.wait(PATIENCE).unwrap();
    let text = output.text();
    assert_eq!(output.status, 0, "{text}");
    assert_eq!(summary(&text).unwrap()["reopened"], 1, "{text}");
}

/// Records the host's wire in a guest, and looks at what it found on the host.
fn record(lab: &Lab, daemon: &Daemon, guest: &Guest) {
    let recorder = "vnplug record host:lab --to /tmp/rec --ring 16M --buffer 16M 2>&1";
    let recorder = guest.spawn(recorder).unwrap();
    let mark = |counted: &&Counted| {
        let mut values = counted.values.iter();
        values.any(|(key, value)| key == "reader_durable_packets" && *value >= 10_000)
    };
    eventually("the host is told of the durable mark", || {
        recorder.is_done() || ports(&daemon.audit()).iter().any(mark)
    });
    // NB: one that ended says why below.
    let _ = recorder.signal("INT");
    let output = recorder.wait(PATIENCE).unwrap();
    assert_eq!(output.status, 0, "{}", output.text());
    let state = guest
        .run("vnplug record --json --status /tmp/rec", PATIENCE)
        .unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state.bytes).unwrap();
    let taken = state["taken"].as_u64().unwrap();
    assert_eq!(state["durable_mark"]["packets"], taken, "{state}");
    assert_eq!(state["lost"]["ring"], 0, "{state}");

    let found = lab.dir().join("found.pcapng");
    let extract = "vnplug extract /tmp/rec -w /tmp/found.pcapng 2>&1";
    let output = guest.run(extract, PATIENCE).unwrap();
    assert_eq!(output.status, 0, "{}", output.text());
    guest.pull("/tmp/found.pcapng", &found, PATIENCE).unwrap();
    let (mut reader, mut numbers) = (Reader::open(&found).unwrap(), Vec::new());
    while let Some(packet) = reader.read().unwrap() {
        numbers.push(sequence(packet.bytes));
    }
    let first = numbers[0];
    assert!(numbers.iter().copied().eq(first..first + taken));
}

#[test]
fn a_guest_records_the_hosts_wire() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=5000"]).unwrap();
    let uml = boot(&lab, &daemon, "uml", everything());
    let _agent = agent(&uml.guest);
    record(&lab, &daemon, &uml.guest);
    drop(uml);

    let guest = qemu(&lab, Machine::Pc);
    plug(&daemon, &guest, "pc", &[]);
    let _agent = agent(&guest);
    record(&lab, &daemon, &guest);
}

#[test]
fn a_q35_without_free_ports_is_told_so() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let guest = qemu(&lab, Machine::Q35 { root_ports: 1 });
    let qmp = guest.qmp_path().unwrap();
    let attach = [
        "attach",
        "qemu",
        "--qmp",
        qmp.to_str().unwrap(),
        "--name",
        "full",
    ];
    let (code, text) = daemon.vnplug(&attach);
    assert!(
        code == Some(1) && text.contains("pcie-root-port"),
        "{code:?} {text}"
    );
    assert!(daemon.audit().iter().all(|counted| counted.kind != "vm"));
    assert_eq!(guest.run("echo alive", PATIENCE).unwrap().text(), "alive");
}

#[test]
fn readers_of_one_guest_share_an_arena_that_only_this_guest_can_spoil() {
    let lab = Lab::new().unwrap();
    // The arena holds what comes in a few seconds, which a guest may be kept waiting.
    let source = "lab=gen,pps=8000,size=200,flows=4,protocols=udp4+tcp4";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let mut outside = daemon.port("lab").ring_bytes(1 << 24).open().unwrap();
    let uml = boot(&lab, &daemon, "uml", everything());
    let _agent = agent(&uml.guest);
    let group = "vnplug count host:lab --group probes --arena 16M --ring 4M --witness --json";
    let count = |filter: &str| {
        let command = format!("{group} --filter {filter} --packets 10000 2>&1");
        uml.guest.spawn(&command).unwrap()
    };
    let dying = uml.guest.spawn(&format!("exec {group}")).unwrap();
    let (udp, tcp) = (count("udp"), count("tcp"));
    let in_group = || {
        let counters = daemon.audit();
        let members = ports(&counters).into_iter().filter(|port| {
            let group = port.labels.iter().find(|(key, _)| key == "group");
            group.is_some_and(|(_, name)| name == "probes")
        });
        members.count()
    };
    eventually("three are in the group", || in_group() == 3);
    dying.signal("KILL").unwrap();
    for output in [udp.wait(PATIENCE).unwrap(), tcp.wait(PATIENCE).unwrap()] {
        let text = output.text();
        assert_eq!(output.status, 0, "{text}");
        let summary = summary(&text).unwrap();
        assert_eq!(summary["lost"], 0, "{text}");
        assert_eq!(summary["witness"]["received"], 10_000, "{text}");
        assert_eq!(summary["witness"]["corrupt"], 0, "{text}");
    }
    eventually("the dead one's port is freed", || in_group() == 0);

    // A program of the guest that writes wherever it can: the pool, arena, rings and all.
    let victim = uml
        .guest
        .spawn(&format!("{group} --seconds 170 2>&1"))
        .unwrap();
    eventually("the victim is there", || in_group() == 1);
    let scribble = "dd if=/dev/urandom of=/dev/mmapper bs=64k count=1000 conv=notrunc 2>&1";
    let scribbled = uml.guest.run(scribble, PATIENCE).unwrap();
    assert!(scribbled.success(), "{}", scribbled.text());
    let output = victim.wait(PATIENCE).unwrap();
    assert_ne!(output.status, 0, "it noticed nothing: {}", output.text());
    // The host and who reads there notice nothing.
    let before = outside.counts().received;
    let enough = before + 20_000;
    let mut checker = vnplug_frame::witness::Checker::new(vnplug_frame::witness::View::Part);
    eventually("the reader outside goes on", || {
        outside.batch(usize::MAX).for_each(|packet| {
            checker.feed(packet.unwrap().bytes);
        });
        outside.counts().received > enough
    });
    assert_eq!(checker.corrupt(), 0);
    daemon.audit();
}
