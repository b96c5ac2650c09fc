//! The daemon and its readers, as processes on one machine.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::time::Duration;

use vnplug::{Counted, Next, Port, Tuning};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, label, program, value};
use vnplug_frame::witness::{Checker, Parsed, View, parse};
use vnplug_ring::control::{Balance, FilterSpec};
use vnplug_ring::layout::flags;
use vnplug_testing::{Deadline, until};

/// Reads until the port ended or `limit` packets came; gives the checker and the packets lost.
fn read(port: &mut Port, view: View, limit: u64) -> (Checker, u64, u64) {
    let mut checker = Checker::new(view);
    let (mut packets, mut lost) = (0, 0);
    let deadline = Deadline::new("all packets come");
    while packets < limit {
        deadline.check_seen(&packets);
        match port.next().unwrap() {
            Next::Packet(packet) => {
                checker.feed(packet.bytes);
                lost += u64::from(packet.meta.lost);
                packets += 1;
                if packets % 64 == 0 {
                    port.release();
                }
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_secs(1))).unwrap();
            }
            Next::Ended => break,
        }
    }
    port.release();
    (checker, packets, lost)
}

#[test]
fn a_counted_run_arrives_whole_and_ends() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(
        &lab,
        None,
        &["--source", "lab=gen,pps=200000,count=100000,run=7"],
    )
    .unwrap();
    // Room for all of it: a machine that is busy with others loses nothing then.
    let mut port = daemon.port("lab").ring_bytes(16 << 20).open().unwrap();
    let (checker, packets, lost) = read(&mut port, View::Whole, u64::MAX);
    assert_eq!((packets, lost), (100_000, 0));
    let report = checker.report(7).unwrap();
    assert!(report.is_perfect(), "{report:?}");
    daemon.audit();
}

#[test]
fn what_a_slow_reader_loses_is_told_in_its_stream_and_costs_the_others_nothing() {
    let lab = Lab::new().unwrap();
    // As much in the larger ring as comes in a quarter of a minute.
    let source = "lab=gen,pps=20000,start=attach,run=1";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let mut port = daemon.port("lab").ring_bytes(32 << 20).open().unwrap();
    let mut stalled = daemon.port("lab").ring_bytes(1 << 16).open().unwrap();
    let (number, stalled_number) = (port.number().to_string(), stalled.number().to_string());
    let of = |counters: &[Counted], number: &str, name: &str| {
        let mut ports = counters.iter().filter(|it| it.kind == "port");
        value(ports.find(|it| it.name == number).unwrap(), name)
    };
    let mut checker = Checker::new(View::Whole);
    let (mut packets, mut lost) = (0, 0);
    let deadline = Deadline::new("the small ring is full");
    while of(&daemon.audit(), &stalled_number, "dropped_full") == 0 {
        deadline.check();
        read_on(&mut port, &mut checker, &mut packets, &mut lost);
    }
    // Nothing comes any more: what is in the rings is all.
    let paused = Tuning {
        enabled: false,
        ..Tuning::default()
    };
    port.tune(paused).unwrap();
    stalled.tune(paused).unwrap();
    read_on(&mut port, &mut checker, &mut packets, &mut lost);
    let counters = daemon.audit();
    // The reader that kept up lost nothing.
    let offered = of(&counters, &number, "offered") - of(&counters, &number, "paused");
    assert_eq!((lost, port.dropped(), offered), (0, 0, packets));
    assert!(checker.report(1).unwrap().is_perfect());
    // The other one has what fits its ring, and knows the exact rest.
    let (mut kept, mut told) = (0, 0);
    read_on(
        &mut stalled,
        &mut Checker::new(View::Whole),
        &mut kept,
        &mut told,
    );
    let of = |name: &str| of(&counters, &stalled_number, name);
    assert_eq!(of("delivered"), kept);
    assert_eq!(stalled.dropped(), of("dropped_full"));
    assert_eq!(of("dropped_full"), of("offered") - of("paused") - kept);
}

/// Reads what is there.
fn read_on(port: &mut Port, checker: &mut Checker, packets: &mut u64, lost: &mut u64) {
    while let Next::Packet(packet) = port.next().unwrap() {
        checker.feed(packet.bytes);
        *lost += u64::from(packet.meta.lost);
        *packets += 1;
    }
    port.release();
}

#[test]
fn filters_run_in_the_daemon_and_are_replaced_between_two_packets() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=100000,flows=16,size=128,protocols=udp4+tcp4+icmp4,run=3";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let options = daemon.port("lab").filter("udp");
    let mut port = options.open().unwrap();
    read(&mut port, View::Part, 1000);
    for round in 0..50 {
        let filter = if round % 2 == 0 { "tcp" } else { "icmp" };
        port.set_filter(FilterSpec::Expression(filter.into()))
            .unwrap();
        let refused = port
            .set_filter(FilterSpec::Expression("tcp prot 80".into()))
            .unwrap_err();
        assert!(refused.to_string().contains("syntax error"), "{refused}");
        // What was published before the change drains first; then only the new kind comes.
        let wanted = if filter == "tcp" { 6 } else { 1 };
        let mut seen = 0;
        while seen < 200 {
            match port.next().unwrap() {
                Next::Packet(packet) if packet.bytes[23] == wanted => seen += 1,
                Next::Packet(_) => assert_eq!(seen, 0, "a packet of the old filter after the new"),
                Next::Nothing => {
                    port.release();
                    port.wait(Some(Duration::from_secs(1))).unwrap();
                }
                Next::Ended => panic!("ended"),
            }
        }
        port.release();
    }
    daemon.audit();
}

#[test]
fn a_cluster_shares_by_flow_beside_a_full_copy_and_the_union_is_complete() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=8000,count=100000,flows=500,run=9";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let ring = 32 << 20;
    let member = || {
        daemon
            .port("lab")
            .cluster("ids", Balance::Flow)
            .ring_bytes(ring)
    };
    // The first port starts the run, which is long enough for the others to join on a busy machine.
    let first = member().open().unwrap();
    let second = member().open().unwrap();
    let mut full = daemon.port("lab").ring_bytes(ring).open().unwrap();
    let (whole, packets, lost) = read(&mut full, View::Part, u64::MAX);
    assert!(packets > 0 && lost == 0);
    let mut union = None;
    let mut flows: HashMap<u32, usize> = HashMap::new();
    let (mut sum, mut joined) = (0, None);
    for (at, mut port) in [second, first].into_iter().enumerate() {
        let mut checker = Checker::new(View::Part);
        loop {
            match port.next().unwrap() {
                Next::Packet(packet) => {
                    checker.feed(packet.bytes);
                    sum += 1;
                    let Parsed::Witness(witness) = parse(packet.bytes) else {
                        panic!("not of the run");
                    };
                    // The first member had every flow until the second one joined.
                    if witness.seq >= *joined.get_or_insert(witness.seq) {
                        let before = flows.insert(packet.meta.flow_hash, at);
                        assert!(before.is_none_or(|before| before == at), "a flow moved");
                    }
                }
                Next::Nothing => {
                    port.wait(Some(Duration::from_secs(1))).unwrap();
                }
                Next::Ended => break,
            }
        }
        let set = checker.set(9).unwrap().clone();
        match &mut union {
            None => union = Some(set),
            Some(union) => assert_eq!(union.merge(&set), 0, "a packet went to both"),
        }
    }
    // Both had their share, and nothing is missing.
    assert!((0..2).all(|at| flows.values().any(|&of| of == at)));
    assert_eq!(
        union.unwrap().ranges().len(),
        1,
        "the union of the members has holes"
    );
    assert_eq!(sum, 100_000);
    drop(whole);
    daemon.audit();
}

#[test]
fn a_reader_survives_a_killed_daemon_and_sees_the_gap() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=50000,run=4"]).unwrap();
    let mut port = daemon.port("lab").open().unwrap();
    for _ in 0..3 {
        read(&mut port, View::Whole, 5_000);
        daemon.kill();
        // What was published is still there; then nothing, until the next daemon.
        let deadline = Deadline::new("the reader notices");
        loop {
            deadline.check();
            if let Next::Nothing = port.next().unwrap() {
                if port.is_away() {
                    break;
                }
                port.wait(Some(Duration::from_millis(20))).unwrap();
            }
        }
        daemon.launch().unwrap();
        let deadline = Deadline::new("the reader comes back");
        let gap = loop {
            deadline.check();
            match port.next().unwrap() {
                Next::Packet(packet) => break packet.meta.flags & flags::GAP,
                Next::Nothing => {
                    port.wait(Some(Duration::from_millis(100))).unwrap();
                }
                Next::Ended => panic!("ended"),
            }
        };
        assert_ne!(gap, 0, "the first packet of the new ring is marked");
    }
    daemon.audit();
}

#[test]
fn lists_and_counters_name_what_is_there() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000,queues=2"]).unwrap();
    let port = daemon.port("host:lab@1").open().unwrap();
    assert_eq!((port.device(), port.ring_count()), ("host:lab", 1));
    let both = daemon.port("lab").open().unwrap();
    assert_eq!(both.ring_count(), 2);
    for (device, part) in [
        ("lab@7", "queues are 0 to 1"),
        ("eth9", "no source \"eth9\""),
    ] {
        let error = daemon.port(device).open().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let counters = daemon.audit();
    let source = counted(&counters, "source");
    assert_eq!(
        (source.name.as_str(), label(source, "kind")),
        ("lab", "gen")
    );
    assert_eq!(
        counters
            .iter()
            .filter(|counted| counted.kind == "port")
            .count(),
        2
    );
}

#[test]
fn the_witness_judges_several_queues_together() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,pps=40000,queues=4,run=5,flows=16";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let count = |limit: &[&str]| {
        let output = std::process::Command::new(program("vnplug").unwrap())
            .arg("--socket")
            .arg(daemon.socket())
            .args(["count", "host:lab", "--witness", "--ring", "16M"])
            .args(limit)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{limit:?}: {said}");
        assert!(said.contains("witness: perfect"), "{limit:?}: {said}");
    };
    count(&["-t", "2s"]);
    count(&["-c", "30000"]);
    count(&["-c", "5"]);
}

#[test]
fn a_grant_of_a_source_that_is_not_there_is_refused_at_once() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let output = std::process::Command::new(program("vnplug").unwrap())
        .arg("--socket")
        .arg(daemon.socket())
        .args([
            "attach", "uml", "--name", "vm", "--allow", "bal", "--", "true",
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("no source \"bal\"") && said.contains("lab"),
        "{said}"
    );
    assert!(daemon.audit().iter().all(|counted| counted.kind != "vm"));
}

#[test]
fn cpus_wake_as_soon_as_the_operator_asks_while_a_port_is_open() {
    const DEVICE: &str = "/dev/cpu_dma_latency";
    let lab = Lab::new().unwrap();
    let args = ["--source", "lab=gen,pps=100", "--wake-us", "7"];
    let started = Daemon::start(&lab, None, &args);
    if !std::path::Path::new(DEVICE).exists() {
        // A kernel without it: the wish cannot be granted, and the daemon says so.
        let error = started.unwrap_err().to_string();
        assert!(error.contains(DEVICE), "{error}");
        return;
    }
    let daemon = started.unwrap();
    // What holds now, of all who wish; other programs of the machine may wish for less.
    let holds = || {
        let mut word = [0; 4];
        let mut device = std::fs::File::open(DEVICE).unwrap();
        std::io::Read::read_exact(&mut device, &mut word).unwrap();
        i32::from_ne_bytes(word)
    };
    let others = holds();
    let port = daemon.port("lab").open().unwrap();
    until("it holds while it reads", holds, |it| *it == others.min(7));
    drop(port);
    until("it is as it was", holds, |it| *it == others);
}
