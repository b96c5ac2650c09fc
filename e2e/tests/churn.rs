//! Ports come and go ten thousand times, the daemon dies and returns, and nothing is left behind.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{Client, Next};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::raw::{Holdings, Raw, open, status};
use vnplug_ring::control::{Counted, FilterSpec, Grant, Message, Role, VmKind, VmReady, VmSpec};
use vnplug_ring::layout::flags;
use vnplug_testing::{Deadline, eventually, until};

/// Ring sizes, filters and applications in turn; every port is closed again.
fn cycle(raw: &mut Raw, device: &str, count: u32) {
    for turn in 0..count {
        let mut request = open(device, 4096 << (turn % 4));
        if turn % 8 == 0 {
            request.filter = FilterSpec::Expression(format!("udp and not port {}", turn % 7 + 1));
        }
        let opened = raw.ask(&Message::Open(request), 0);
        let Message::Opened(opened) = opened else {
            panic!("cycle {turn}: {opened:?}");
        };
        drop(raw.take_fds());
        let closed = raw.ask(&Message::Close { port: opened.port }, 0);
        assert_eq!(closed, Message::Done);
    }
}

fn vm(daemon: &Daemon, name: &str) -> VmReady {
    let mut operator = Client::connect_to(&daemon.socket()).expect("the daemon answers");
    let allow = vec![Grant {
        source: "lab".into(),
        filter: String::new(),
    }];
    let spec = VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes: 1 << 20,
        vectors: 0,
        allow,
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    };
    operator.attach_vm(spec).expect("a VM")
}

fn free_pool(counters: &[Counted]) -> u64 {
    value(counted(counters, "vm"), "pool_free")
}

#[test]
fn ten_thousand_ports_under_load_leave_nothing_behind() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(
        &lab,
        None,
        &[
            "--pool-dir",
            lab.dir().to_str().unwrap(),
            "--source",
            "lab=gen,pps=20000",
        ],
    )
    .unwrap();
    let ready = vm(&daemon, "churn");
    let mut agent = Raw::connect(Path::new(&ready.control_path));
    agent.hello(Role::Agent);
    let free = free_pool(&daemon.counters());
    let mut raws: Vec<Raw> = (0..3).map(|_| Raw::greeted(&daemon.socket())).collect();
    let mut round = |each: u32| {
        thread::scope(|scope| {
            for raw in &mut raws {
                scope.spawn(move || cycle(raw, "lab", each));
            }
            cycle(&mut agent, "host:lab", each);
        });
    };
    round(500);
    let before = Holdings::at_rest(daemon.pid());
    round(2_500);
    let after = Holdings::at_rest(daemon.pid());
    eprintln!("{before:?}\n{after:?}");
    assert_eq!((after.fds, after.threads), (before.fds, before.threads));
    assert!(after.maps <= before.maps + 4, "{before:?} {after:?}");
    assert!(
        after.anon_kib <= before.anon_kib + 1024,
        "{before:?} {after:?}"
    );
    let counters = daemon.audit();
    assert_eq!(free_pool(&counters), free, "places of the pool");
    assert_eq!(value(&counters[0], "ports_opened"), 12_000);
    assert_eq!(value(&counters[0], "ports"), 0);
    println!("figure: G-14 ports opened and closed = 12000");
    println!("figure: G-14 descriptors left = {}", after.fds - before.fds);
}

#[test]
fn a_thousand_ports_get_identical_streams() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=2000,count=4000,size=64,start=attach";
    let daemon = Daemon::start(
        &lab,
        None,
        &["--source", source, "--source", "idle=gen,pps=1"],
    )
    .unwrap();
    let begun = Instant::now();
    let mut raws = Vec::new();
    for turn in 0..1000_u32 {
        let mut raw = Raw::greeted(&daemon.socket());
        let mut request = open("lab", 1 << 19);
        if turn % 100 == 1 {
            request.filter = FilterSpec::Expression("udp or tcp or ip or ip6".into());
        }
        assert!(matches!(
            raw.ask(&Message::Open(request), 0),
            Message::Opened(_)
        ));
        raws.push(raw);
    }
    let took = begun.elapsed();
    eprintln!("1000 ports attached in {took:?}");
    assert!(took < Duration::from_secs(120), "{took:?}");
    println!(
        "figure: G-13 attach 1000 ports = {:.2} s",
        took.as_secs_f64()
    );
    let audit = || daemon.audit();
    let counters = until("the run ends", audit, |counters| {
        let mut all = counters.iter();
        all.any(|counted| label(counted, "state") == "ended")
    });
    // Who attached has everything from then on: no port lost a packet.
    let ports: Vec<&Counted> = counters
        .iter()
        .filter(|counted| counted.kind == "port")
        .collect();
    assert_eq!(ports.len(), 1000);
    assert_eq!(value(ports[0], "delivered"), 4000);
    for port in ports {
        assert_eq!(value(port, "delivered"), value(port, "offered"), "{port:?}");
    }
}

#[test]
fn twenty_times_killed_and_back_with_readers_and_a_vm() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(
        &lab,
        None,
        &[
            "--pool-dir",
            lab.dir().to_str().unwrap(),
            "--source",
            "lab=gen,pps=5000",
        ],
    )
    .unwrap();
    let ready = vm(&daemon, "phoenix");
    let mut readers: Vec<_> = (0..3)
        .map(|_| daemon.port("lab").ring_bytes(1 << 18).open().unwrap())
        .collect();
    let mut pool_id = None;
    for _ in 0..20 {
        // The VM's channel is opened again, as QEMU does, and finds the same pool.
        let mut agent = Raw::connect(Path::new(&ready.control_path));
        let id = agent.hello(Role::Agent);
        assert_eq!(*pool_id.get_or_insert(id), id);
        let opened = agent.ask(&Message::Open(open("host:lab", 1 << 16)), 1);
        assert!(matches!(opened, Message::Opened(_)), "{opened:?}");
        daemon.kill();
        daemon.launch().unwrap();
        assert!(agent.next().is_none(), "the old channel is closed");
        for reader in &mut readers {
            let deadline = Deadline::new("every reader comes back");
            loop {
                deadline.check();
                match reader.next().unwrap() {
                    Next::Packet(packet) if packet.meta.flags & flags::GAP != 0 => break,
                    Next::Packet(_) => {}
                    Next::Nothing => {
                        reader.wait(Some(Duration::from_millis(20))).unwrap();
                    }
                    Next::Ended => panic!("ended"),
                }
            }
        }
    }
    daemon.audit();
    println!("figure: G-15 kills of the daemon = 20");
}

#[test]
fn the_daemon_keeps_one_capability_and_ends_when_told() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    vm(&daemon, "kept");
    let pid = daemon.pid();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let text = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let net_raw = format!("{:016x}", 1 << 13);
        for (field, expected) in [
            ("CapEff", net_raw.as_str()),
            ("CapPrm", net_raw.as_str()),
            ("CapBnd", net_raw.as_str()),
            ("CapInh", "0000000000000000"),
            ("NoNewPrivs", "1"),
        ] {
            let line = text.lines().find(|line| line.starts_with(field)).unwrap();
            assert!(line.ends_with(expected), "{line}");
        }
    }
    let _reader = daemon.port("lab").open().unwrap();
    let process = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    eventually("it ends", || {
        !daemon.socket().exists() && status(pid, "State").starts_with('Z')
    });
    let record = daemon.socket().parent().unwrap().join("vms/kept.toml");
    assert!(record.is_file());
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
    // The pool stays for the next daemon; this one is told to forget it.
    let mut daemon = daemon;
    daemon.kill();
    daemon.launch().unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    operator.detach_vm("kept").unwrap();
}

#[test]
fn without_descriptors_it_refuses_and_does_not_spin() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let held = Holdings::at_rest(daemon.pid()).fds;
    let limit = format!("--nofile={}", held + 8);
    let pid = daemon.pid().to_string();
    let set = std::process::Command::new("prlimit")
        .args(["--pid", &pid, &limit])
        .status();
    assert!(set.unwrap().success());
    let mut first = Raw::greeted(&daemon.socket());
    // Many connect; most are closed at once, some ports are refused, with advice.
    let waiting: Vec<_> = (0..200)
        .map(|_| std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap())
        .collect();
    let little = Duration::from_millis(100);
    let spent = daemon.cpu_at_rest(Duration::from_secs(2), little);
    eprintln!("{spent:?} of 2 s without descriptors");
    assert!(spent <= little, "{spent:?}");
    let answer = first.ask(&Message::Open(open("lab", 4096)), 0);
    let (_, text) = vnplug_e2e::daemon::refusal(answer);
    assert!(text.contains("limit of open files"), "{text}");
    drop(waiting);
    let ask = || first.ask(&Message::Open(open("lab", 4096)), 0);
    until("it is opened", ask, |answer| {
        matches!(answer, Message::Opened(_))
    });
    daemon.audit();
}

#[test]
fn a_running_vm_is_its_owners_alone() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let spec = |owner, source: &str| VmSpec {
        name: "probe".into(),
        kind: VmKind::Uml,
        pool_bytes: 1 << 20,
        vectors: 0,
        allow: vec![Grant {
            source: source.into(),
            filter: String::new(),
        }],
        owner,
        groups: Vec::new(),
        stays_for: None,
    };
    let taken = |result: Result<VmReady, vnplug::Error>| {
        let text = result.expect_err("it is refused").to_string();
        assert!(text.contains("VM \"probe\" is running"), "{text}");
    };
    let pool =
        |path: &str| std::fs::metadata(path).map(|it| std::os::unix::fs::MetadataExt::ino(&it));
    let mut first = Client::connect_to(&daemon.socket()).unwrap();
    let mut second = Client::connect_to(&daemon.socket()).unwrap();
    let ready = first.attach_vm(spec(1, "lab")).unwrap();
    let file = pool(&ready.pool_path).unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    // Only who attached it hands over its channel.
    let refused = second.adopt("probe", std::os::fd::AsFd::as_fd(&ours));
    assert!(refused.is_err());
    first
        .adopt("probe", std::os::fd::AsFd::as_fd(&ours))
        .unwrap();
    let mut agent = Raw::over(theirs);
    agent.hello(Role::Agent);
    for owner in [2, 0] {
        taken(second.attach_vm(spec(owner, "*")));
        let (other, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(
            second
                .adopt("probe", std::os::fd::AsFd::as_fd(&other))
                .is_err()
        );
    }
    assert!(second.detach_own_vm("probe", 2).is_err());
    // Its channel is open and its grants are as they were.
    let opened = agent.ask(&Message::Open(open("host:lab", 1 << 16)), 1);
    assert!(matches!(opened, Message::Opened(_)), "{opened:?}");
    // The owner may, while it runs and after the daemon was restarted.
    assert_eq!(first.attach_vm(spec(1, "lab")).unwrap(), ready);
    daemon.kill();
    daemon.launch().unwrap();
    let mut first = Client::connect_to(&daemon.socket()).unwrap();
    assert_eq!(first.attach_vm(spec(1, "lab")).unwrap(), ready);
    assert_eq!(pool(&ready.pool_path).unwrap(), file, "the same pool");
    first
        .adopt("probe", std::os::fd::AsFd::as_fd(&ours))
        .unwrap();
    agent.hello(Role::Agent);
    // When its machine is gone the name is free, with a pool of its own; the first one's end is
    // not the second one's.
    drop((agent, ours));
    let mut second = Client::connect_to(&daemon.socket()).unwrap();
    let attach = || second.attach_vm(spec(2, "lab"));
    let other = until("the name is free", attach, Result::is_ok).unwrap();
    assert_ne!(other.pool_path, ready.pool_path, "another pool");
    assert!(pool(&ready.pool_path).is_err() && pool(&other.pool_path).is_ok());
    assert!(first.detach_own_vm("probe", 1).is_err());
    second.detach_own_vm("probe", 2).unwrap();
}
