//! Sending out of guests, and a ring for each of their processors.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;

use vnplug::Ready;
use vnplug_e2e::attached::{AttachedUml, agent, everything, image, plug};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::groups::pull;
use vnplug_e2e::traffic::{Stream, sequence};
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_e2e::{Guest, Lab, Qemu, QemuConfig};
use vnplug_ring::control::Counted;
use vnplug_testing::{PATIENCE, eventually};

fn source(counters: &[Counted]) -> &Counted {
    let is_lab = |it: &&Counted| it.kind == "source" && it.name == "lab";
    counters.iter().find(is_lab).unwrap()
}

/// Runs `vnplug echo` in a guest, and asks the host what came back and how fast.
fn echo(daemon: &Daemon, guest: &Guest) {
    for wait in ["cpu", "balanced", "latency"] {
        let before = value(source(&daemon.counters()), "sent");
        let command = format!("vnplug echo host:lab -c 300 --wait {wait} --transmit 1M 2>&1");
        let output = guest.run(&command, PATIENCE).unwrap();
        assert_eq!(output.status, 0, "{}", output.text());
        assert!(output.text().contains("0 dropped"), "{}", output.text());
        let all = daemon.audit();
        let sent = value(source(&all), "sent") - before;
        assert!(sent >= 300, "{sent} sent, {}", output.text());
        let p50 = value(source(&all), "echo_p50_ns");
        assert!(p50 > 0);
        eprintln!("{wait}: half of the echoes within {} us", p50 / 1000);
    }
}

#[test]
fn an_application_in_a_uml_sends_and_its_kicks_are_heard() {
    let lab = Lab::new().unwrap();
    let args = [
        "--source",
        "lab=gen,pps=500",
        "--source",
        "quiet=gen,count=1",
        "--allow-send",
        "vm:uml=lab",
        "--allow-send",
        "vm:uml=quiet",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let guest = &uml.guest;
    let _agent = agent(guest).unwrap();
    echo(&daemon, guest);
    // Nothing but kicks wakes this source's thread.
    let send = "vnplug send host:quiet -c 50 --pps 200 --ring 64K 2>&1";
    let output = guest.run(send, PATIENCE).unwrap();
    assert!(
        output.text().contains("50 sent, 0 dropped"),
        "{}",
        output.text()
    );
    daemon.audit();
}

#[test]
fn what_a_guest_sends_other_readers_see() {
    let args = ["--source", "wire1", "--allow-send", "vm:uml=wire1"];
    let wire = Wire::new("1500", &args);
    let daemon = &wire.daemon;
    let uml = AttachedUml::boot(&wire.lab, daemon, "uml", everything(), image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let mut host = daemon.port("wire1").open().unwrap();
    let count = "vnplug count host:wire1 -c 10 --json 2>&1";
    let inside = uml.guest.spawn(count).unwrap();
    let port = |it: &Counted| it.kind == "port";
    eventually("both listen", || {
        daemon.counters().into_iter().filter(port).count() == 2
    });
    let send = "vnplug send host:wire1 -c 10 2>&1";
    let output = uml.guest.run(send, PATIENCE).unwrap();
    assert!(
        output.text().contains("10 sent, 0 dropped"),
        "{}",
        output.text()
    );
    let inside = inside.wait(PATIENCE).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&inside.text()).unwrap();
    assert_eq!(summary["packets"], 10, "{summary}");
    let mut seen = 0;
    while seen < 10 {
        assert_eq!(host.wait(Some(PATIENCE)), Ok(Ready::Now), "{seen} seen");
        for packet in host.batch(64) {
            assert_ne!(packet.unwrap().meta.flags & vnplug::flags::OUTBOUND, 0);
            seen += 1;
        }
    }
    assert_eq!(seen, 10);
    daemon.audit();
}

#[test]
fn each_processor_of_a_guest_has_a_ring_and_flows_of_its_own() {
    let args = [
        "--source",
        PATIENT,
        "--source",
        "lab=gen,pps=2000,flows=64",
        "--allow-send",
        "vm:qemu=lab",
    ];
    let wire = Wire::new("1500", &args);
    let daemon = &wire.daemon;
    let config = QemuConfig {
        cpus: 2,
        image: image().unwrap(),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&wire.lab, config).unwrap_or_else(|error| panic!("{error}"));
    plug(daemon, &guest, "qemu", &[]).unwrap();
    let _agent = agent(&guest).unwrap();
    assert_eq!(guest.run("nproc", PATIENCE).unwrap().text(), "2");
    let count = "vnplug count host:lab --threads 2 --seconds 6 --json 2>&1";
    let output = guest.run(count, PATIENCE).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&output.text()).unwrap();
    let packets = |part: &serde_json::Value| part["packets"].as_u64().unwrap();
    let threads = summary["threads"].as_array().unwrap();
    assert_eq!(threads.len(), 2);
    assert!(
        threads.iter().all(|thread| packets(thread) > 0),
        "{summary}"
    );
    assert_eq!(threads.iter().map(packets).sum::<u64>(), packets(&summary));
    assert_eq!(summary["lost"], 0, "{summary}");
    flows_stay(&wire, &guest);
    echo(daemon, &guest);
    daemon.audit();
}

/// A reader on each processor, both of one cluster: together they have every frame once, and no flow
/// has frames in the rings of both.
fn flows_stay(wire: &Wire, guest: &Guest) {
    let read = |cpu: u32| {
        let command = format!(
            "busybox taskset {:x} vnplug dump host:wire1 --cluster cpus -c {EACH} -w /tmp/{cpu}.pcap 2>&1",
            1 << cpu
        );
        guest.spawn(&command).unwrap()
    };
    let readers = [read(0), read(1)];
    let port = |it: &Counted| it.kind == "port" && value(it, "offered") == 0;
    eventually("both share", || {
        wire.daemon.counters().into_iter().filter(port).count() == 2
    });
    wire.send(&Stream {
        flows: FLOWS,
        ..Stream::new("wire0", FRAMES)
    });
    for reader in readers {
        let output = reader.wait(PATIENCE).unwrap();
        assert!(output.success(), "{}", output.text());
    }
    let rings = [0, 1].map(|cpu| pull(guest, &wire.lab, &format!("/tmp/{cpu}.pcap")).unwrap());
    // Each is the beginning of what its ring got; one of them leaves off earlier.
    let last = rings.iter().map(|frames| sequence(frames.last().unwrap()));
    let both = last.min().unwrap();
    let mut ring_of: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut seen = Vec::new();
    for (ring, frames) in rings.iter().enumerate() {
        for frame in frames.iter().filter(|frame| sequence(frame) <= both) {
            // Addresses and ports of UDP over IPv4.
            let flow = frame[26..38].to_vec();
            assert_eq!(*ring_of.entry(flow).or_insert(ring), ring, "a flow moved");
            seen.push(sequence(frame));
        }
    }
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..=both), "each frame is in one ring");
    assert!(both >= 2 * u64::from(FLOWS));
    assert_eq!(ring_of.len(), FLOWS as usize);
}

const FLOWS: u32 = 64;
/// Frames on the wire, and those that each reader takes: half of its half.
const FRAMES: u64 = 4_000;
const EACH: u64 = 1_000;
