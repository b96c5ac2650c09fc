//! Sending out of guests, and a ring for each of their processors.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use vnplug::Client;
use vnplug_e2e::daemon::{Daemon, guest_program, program, value};
use vnplug_e2e::{Guest, Image, Job, Lab, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_ring::control::{Counted, Grant, VmKind, VmSpec};

const LIMIT: Duration = Duration::from_secs(180);

fn image() -> Image {
    Image::default().file(guest_program().unwrap(), "/bin/vnplug", 0o755)
}

/// Starts the agent in a guest and waits until its applications can list devices.
fn agent(guest: &Guest) -> Job {
    let job = guest.spawn("exec vnplug agent 2>&1").unwrap();
    let deadline = Instant::now() + LIMIT;
    while guest.run("vnplug list 2>&1", LIMIT).unwrap().status != 0 {
        let said = job.peek(4096).unwrap_or_default();
        assert!(Instant::now() < deadline, "no agent: {said}");
        std::thread::sleep(Duration::from_millis(100));
    }
    job
}

fn source(counters: &[Counted]) -> &Counted {
    let mut sources = counters.iter().filter(|counted| counted.kind == "source");
    sources.next().unwrap()
}

/// Runs `vnplug echo` in a guest, and asks the host what came back and how fast.
fn echo(daemon: &Daemon, guest: &Guest) {
    for wait in ["cpu", "balanced", "latency"] {
        let before = value(source(&daemon.counters()), "sent");
        let command = format!("vnplug echo host:lab -c 300 --wait {wait} --transmit 64K 2>&1");
        let output = guest.run(&command, LIMIT).unwrap();
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
    let spec = VmSpec {
        name: "uml".into(),
        kind: VmKind::Uml,
        pool_bytes: 64 << 20,
        vectors: 0,
        allow: vec![Grant {
            source: "*".into(),
            filter: String::new(),
        }],
        owner: 77,
        groups: Vec::new(),
    };
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let ready = client.attach_vm(spec).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    client.adopt("uml", ours.as_fd()).unwrap();
    let guest = Uml::boot(
        &lab,
        UmlConfig {
            pool: Some(ready.pool_path.into()),
            lines: vec![(0, OwnedFd::from(theirs))],
            kernel_args: vec!["vnplug=ttyS0".into()],
            image: image(),
            ..UmlConfig::default()
        },
    )
    .unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&guest);
    echo(&daemon, &guest);
    // Nothing but kicks wakes this source's thread.
    let send = "vnplug send host:quiet -c 50 --pps 200 --ring 64K 2>&1";
    let output = guest.run(send, LIMIT).unwrap();
    assert!(
        output.text().contains("50 sent, 0 dropped"),
        "{}",
        output.text()
    );
    daemon.audit();
}

#[test]
fn each_processor_of_a_guest_has_a_ring_and_flows_of_its_own() {
    let lab = Lab::new().unwrap();
    let args = [
        "--source",
        "lab=gen,pps=2000,flows=64",
        "--allow-send",
        "vm:qemu=lab",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let config = QemuConfig {
        cpus: 2,
        image: image(),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    let qmp = guest.qmp_path().unwrap();
    let attached = Command::new(program("vnplug").unwrap())
        .arg("--socket")
        .arg(daemon.socket())
        .args(["attach", "qemu", "--name", "qemu", "--allow", "*", "--qmp"])
        .arg(qmp)
        .output()
        .unwrap();
    assert!(attached.status.success(), "{attached:?}");
    let _agent = agent(&guest);
    assert_eq!(guest.run("nproc", LIMIT).unwrap().text(), "2");
    let count = "vnplug count host:lab --threads 2 --seconds 3 --json 2>&1";
    let output = guest.run(count, LIMIT).unwrap();
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
    echo(&daemon, &guest);
    daemon.audit();
}
