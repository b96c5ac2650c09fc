//! Programs for PF_RING on the host: against a generator, and against a wire.

use std::path::PathBuf;

use crate::support::{Library, Running, compile, number};
use vnplug_e2e::daemon::{Daemon, label, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};

/// A daemon with these sources, and a program.
struct Bench {
    lab: Lab,
    daemon: Daemon,
    program: PathBuf,
}

impl Bench {
    fn new(program: &str, sources: &[&str]) -> Self {
        let lab = Lab::new().unwrap();
        let args: Vec<&str> = sources
            .iter()
            .flat_map(|source| ["--source", source])
            .collect();
        let daemon = Daemon::start(&lab, None, &args).unwrap();
        let program = compile(lab.dir(), program, Library::Shared);
        Self {
            lab,
            daemon,
            program,
        }
    }

    fn start(&self, args: &[&str]) -> Running {
        Running::start(&self.program, &self.daemon.socket(), args)
    }

    /// Runs `count` to its line of results.
    fn count(&self, args: &[&str]) -> String {
        let running = self.start(args);
        running.expect("ready");
        let line = running.line();
        running.finish();
        assert!(line.starts_with("rc 0 "), "{line}");
        assert_eq!(number(&line, "bad"), 0, "{line}");
        // Several sources are each in order, and several threads look at packets as they come.
        if !args[1].contains(',') && !args.contains(&"-t") {
            assert_eq!(number(&line, "backwards"), 0, "{line}");
        }
        line
    }
}

/// A third each of TCP, UDP and UDP over IPv6.
const MIXED: &str = "g=gen,pps=20000,flows=12,protocols=udp4+tcp4+udp6,size=100-200";

#[test]
fn every_way_of_receiving_gets_every_packet_it_asks_for() {
    let bench = Bench::new("count", &[MIXED]);
    for how in ["recv", "copy", "parsed", "burst", "loop", "poll"] {
        for device in ["g", "host:g@0"] {
            let line = bench.count(&["-i", device, "-n", "5000", "-r", how]);
            assert_eq!((number(&line, "packets"), number(&line, "drop")), (5000, 0));
            assert!(number(&line, "recv") >= 5000, "{how}: {line}");
        }
    }
    let line = bench.count(&["-i", "vnplug:g", "-n", "5000", "-a"]);
    assert_eq!(number(&line, "packets"), 5000);
}

#[test]
fn parsed_headers_say_what_the_generator_made() {
    let bench = Bench::new("count", &[MIXED]);
    let line = bench.count(&["-i", "g", "-n", "3000", "-m"]);
    assert_eq!(number(&line, "other"), 0, "{line}");
    // Sequence decides: any 3000 in a row hold a third of each, give or take what was lost.
    assert!((990..=1010).contains(&number(&line, "tcp")), "{line}");
    assert!((990..=1010).contains(&number(&line, "ipv6")), "{line}");
}

#[test]
fn filters_caplen_and_sampling_are_the_hosts_work() {
    let bench = Bench::new("count", &[MIXED]);
    let line = bench.count(&["-i", "g", "-n", "1000", "-m", "-f", "tcp", "-l", "64"]);
    assert_eq!(
        (number(&line, "tcp"), number(&line, "captured")),
        (1000, 64_000)
    );
    assert!(number(&line, "bytes") >= 100_000, "{line}");
    let line = bench.count(&["-i", "g", "-n", "100", "-s", "10"]);
    assert_eq!(number(&line, "packets"), 100);
    let refused = bench.start(&["-i", "g", "-n", "1", "-f", "udp and and"]);
    refused.expect("filter -2");
    refused.expect("ready");
}

#[test]
fn several_devices_are_read_as_one() {
    let bench = Bench::new(
        "count",
        &[
            "a=gen,pps=2000,size=100,protocols=tcp4",
            "b=gen,pps=2000,size=100,protocols=udp4",
            "c=gen,queues=2,pps=1000",
        ],
    );
    let line = bench.count(&["-i", "a,host:b", "-n", "2000", "-m", "-r", "copy"]);
    let (tcp, udp) = (number(&line, "tcp"), number(&line, "udp"));
    assert!(tcp > 100 && udp > 100 && tcp + udp == 2000, "{line}");
    bench.count(&["-i", "c@0-1", "-n", "100"]);
    let none = bench.start(&["-i", "c@2", "-n", "1"]);
    assert!(none.line().starts_with("open: "));
}

#[test]
fn several_threads_share_a_reentrant_ring() {
    let bench = Bench::new("count", &[MIXED]);
    let line = bench.count(&["-i", "g", "-n", "5000", "-t", "4"]);
    assert!(number(&line, "packets") >= 5000, "{line}");
}

#[test]
fn a_cluster_shares_flows_between_processes() {
    let bench = Bench::new(
        "count",
        &["g=gen,count=6000,pps=20000,flows=64,start=now,size=60"],
    );
    // Joined before anything flows: the source starts when a program that is no member says so.
    let both: Vec<Running> = (0..2)
        .map(|_| bench.start(&["-i", "g", "-c", "7", "-m"]))
        .collect();
    for one in &both {
        one.expect("ready");
    }
    let lines: Vec<String> = both.iter().map(Running::line).collect();
    let counts: Vec<u64> = lines.iter().map(|line| number(line, "packets")).collect();
    // The ring ends with the source: -1, as documented.
    assert!(
        lines.iter().all(|line| line.starts_with("rc -1 ")),
        "{lines:?}"
    );
    assert!(counts.iter().all(|count| *count < 6000), "{lines:?}");
}

#[test]
fn the_members_of_a_group_share_one_copy() {
    let bench = Bench::new("count", &[MIXED]);
    let all = bench.start(&["-i", "g/ids", "-n", "30000000", "-r", "burst"]);
    all.expect("ready");
    for how in ["recv", "copy", "parsed", "burst", "loop", "poll"] {
        let args = ["-i", "host:g@0/other", "-n", "2000", "-f", "tcp"];
        let line = bench.count(&[&args[..], &["-r", how]].concat());
        assert_eq!((number(&line, "packets"), number(&line, "drop")), (2000, 0));
    }
    let tcp = bench.start(&["-i", "vnplug:g/ids", "-n", "2000", "-m", "-f", "tcp"]);
    tcp.expect("ready");
    let line = tcp.line();
    assert_eq!((number(&line, "tcp"), number(&line, "bad")), (2000, 0));
    tcp.finish();
    let counters = bench.daemon.audit();
    let member = counters.iter().find(|one| one.kind == "port").unwrap();
    assert_eq!(label(member, "group"), "ids");
    // The second member's packets were there already.
    let delivered = value(member, "delivered");
    let most = delivered + value(member, "dropped_full");
    let copies = value(member, "arena_copies");
    assert!((delivered..=most).contains(&copies), "{member:?}");
    all.signal("INT");
    let line = all.line();
    assert!(number(&line, "packets") > 2000, "{line}");
    all.finish();
    let refused = bench.start(&["-i", "g/", "-n", "1"]);
    assert!(refused.line().starts_with("open: "));
}

#[test]
fn a_signal_ends_a_loop_that_waits_with_a_watermark() {
    let bench = Bench::new("count", &["g=gen,pps=100"]);
    let running = bench.start(&["-i", "g", "-r", "loop", "-w", "4000", "-p", "300"]);
    running.expect("ready");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    running.signal("INT");
    let line = running.line();
    running.finish();
    // The watermark is never reached; the poll duration bounds the wait.
    assert!(
        line.starts_with("rc 0 packets ") && number(&line, "packets") > 10,
        "{line}"
    );
}

#[test]
fn what_is_on_a_wire_is_counted_by_queue_and_direction() {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    netns.veth("wire0", "wire1").unwrap();
    let source = "wire1=af_packet:wire1,queues=2";
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", source]).unwrap();
    let program = |name| compile(lab.dir(), name, Library::Shared);
    let start = |program: &PathBuf, args: &[&str]| Running::start(program, &daemon.socket(), args);

    let channels = start(&program("channels"), &["wire1"]);
    channels.expect("channels 2");
    let count = program("count");
    let received = start(
        &count,
        &["-i", "host:wire1", "-f", "udp", "-e", "1", "-n", "20000"],
    );
    received.expect("ready");
    let sent = start(
        &count,
        &["-i", "host:wire1", "-f", "udp", "-e", "2", "-n", "1"],
    );
    sent.expect("ready");
    let stream = Stream {
        flows: 50,
        ..Stream::new("wire0", 20_000)
    };
    netns.enter(|| stream.send()).unwrap().unwrap();
    let line = received.line();
    received.finish();
    assert_eq!(
        (number(&line, "packets"), number(&line, "drop")),
        (20_000, 0),
        "{line}"
    );
    sent.signal("INT");
    assert_eq!(number(&sent.line(), "packets"), 0);
    sent.finish();
    drop(daemon);
    drop(channels);
}

#[test]
fn every_other_call_does_what_the_header_says() {
    let bench = Bench::new(
        "calls",
        &["g=gen,pps=5000,flows=3,size=100", "fin=gen,count=1000"],
    );
    let running = bench.start(&["g", "fin"]);
    running.expect("all calls");
    running.finish();
    bench.daemon.audit();
}

#[test]
fn rules_run_on_the_host_with_their_statistics() {
    let bench = Bench::new("rules", &[MIXED]);
    let running = bench.start(&["g"]);
    running.expect("rules");
    running.finish();
    bench.daemon.audit();
}

#[test]
fn a_sender_is_told_why_it_cannot() {
    let bench = Bench::new("send", &["g=gen,pps=10"]);
    let running = bench.start(&["g"]);
    running.expect("mode -7");
    running.expect("enable 0");
    running.expect("this device cannot transmit: Operation not supported");
    running.finish();
    assert!(bench.lab.dir().exists());
}

#[test]
fn without_a_daemon_opening_fails_at_once() {
    let lab = Lab::new().unwrap();
    let program = compile(lab.dir(), "count", Library::Static);
    let running = Running::start(&program, &lab.dir().join("nobody"), &["-i", "eth0"]);
    running.expect("open: No such file or directory");
}
