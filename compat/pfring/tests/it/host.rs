//! Programs for PF_RING on the host: against a generator, and against a wire.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::support::{Library, Running, compile, number};
use vnplug::Counted;
use vnplug_e2e::daemon::{Daemon, label, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::until;

/// A daemon with these sources, and a program.
struct Bench {
    _lab: Lab,
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
            _lab: lab,
            daemon,
            program,
        }
    }

    fn start(&self, args: &[&str]) -> Running {
        Running::start(&self.program, &self.daemon.socket(), args)
    }

    /// Waits until the daemon's counters say so.
    fn until(&self, what: &str, holds: impl Fn(&[Counted]) -> bool) -> Vec<Counted> {
        until(what, || self.daemon.audit(), |counters| holds(counters))
    }

    /// Runs `count` to its line of results.
    fn count(&self, args: &[&str]) -> String {
        let running = self.start(args);
        running.expect("ready");
        let line = running.line();
        running.finish();
        assert!(line.starts_with("rc 0 "), "{line}");
        assert_eq!(number(&line, "bad"), 0, "{line}");
        // Several sources or queues are each in order, and several threads look at packets as they come.
        let is_one = !args[1].contains([',', '-']);
        if is_one && !args.contains(&"-t") {
            assert_eq!(number(&line, "backwards"), 0, "{line}");
        }
        line
    }
}

fn ports(counters: &[Counted]) -> impl Iterator<Item = &Counted> {
    counters.iter().filter(|one| one.kind == "port")
}

fn source<'a>(counters: &'a [Counted], name: &str) -> &'a Counted {
    let mut sources = counters.iter().filter(|one| one.kind == "source");
    sources.find(|one| one.name == name).unwrap()
}

/// A third each of TCP, UDP and UDP over IPv6.
const MIXED: &str = "g=gen,pps=20000,flows=12,protocols=udp4+tcp4+udp6,size=100-200";

#[test]
fn every_way_of_receiving_gets_every_packet_it_asks_for() {
    // One source for each, of as many packets as a ring holds: nobody loses any, however late.
    let sources: Vec<String> = (0..13)
        .map(|at| MIXED.replace("g=gen", &format!("g{at}=gen,count=5000")))
        .collect();
    let bench = Bench::new(
        "count",
        &sources.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let ways = ["recv", "copy", "parsed", "burst", "loop", "poll"];
    for (at, how) in ways.into_iter().enumerate() {
        for device in [format!("g{at}"), format!("host:g{}@0", at + ways.len())] {
            let line = bench.count(&["-i", &device, "-n", "5000", "-r", how]);
            assert_eq!((number(&line, "packets"), number(&line, "drop")), (5000, 0));
            assert!(number(&line, "recv") >= 5000, "{how}: {line}");
        }
    }
    let line = bench.count(&["-i", "vnplug:g12", "-n", "5000", "-a"]);
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
fn a_sleep_ends_at_the_watermark_or_at_its_time() {
    let bench = Bench::new("sleep", &["g=gen,pps=200"]);
    let running = Running::start(&bench.program, &bench.daemon.socket(), &["g"]);
    running.expect("ok");
    running.finish();
}

#[test]
fn several_devices_are_read_as_one() {
    let bench = Bench::new(
        "count",
        &[
            "a=gen,count=1000,pps=2000,size=100,protocols=tcp4",
            "b=gen,count=1000,pps=2000,size=100,protocols=udp4",
            "c=gen,queues=2,pps=1000",
        ],
    );
    // Both to their ends, whichever began first.
    let line = bench.count(&["-i", "a,host:b", "-n", "2000", "-m", "-r", "copy"]);
    let (tcp, udp) = (number(&line, "tcp"), number(&line, "udp"));
    assert_eq!((tcp, udp), (1000, 1000), "{line}");
    bench.count(&["-i", "c@0-1", "-n", "100"]);
    let none = bench.start(&["-i", "c@2", "-n", "1"]);
    assert!(none.line().starts_with("open: "));
}

/// One that has much to give keeps the others from nothing: they take turns.
#[test]
fn several_devices_with_a_backlog_have_their_turns() {
    let bench = Bench::new(
        "count",
        &[
            "a=gen,count=1000,size=100,protocols=tcp4",
            "b=gen,count=1000,size=100,protocols=udp4",
        ],
    );
    let mut running = bench.start(&["-i", "a,host:b", "-n", "640", "-m", "-r", "copy", "-g"]);
    running.expect("ready");
    bench.until("all packets wait in both rings", |counters| {
        ports(counters).all(|port| value(port, "delivered") == 1000)
    });
    running.go();
    let line = running.line();
    running.finish();
    let (tcp, udp) = (number(&line, "tcp"), number(&line, "udp"));
    // A turn has at most 64 packets.
    assert_eq!(tcp + udp, 640, "{line}");
    assert!(tcp.abs_diff(udp) <= 64, "{line}");
}

#[test]
fn several_threads_share_a_reentrant_ring() {
    let bench = Bench::new("count", &[MIXED]);
    let line = bench.count(&["-i", "g", "-n", "5000", "-t", "4"]);
    assert!(number(&line, "packets") >= 5000, "{line}");
}

#[test]
fn a_cluster_shares_flows_between_processes() {
    let sources = ["g=gen,pps=2000,flows=64,size=60", "end=gen,count=100"];
    let bench = Bench::new("count", &sources);
    let both: Vec<Running> = (0..2)
        .map(|_| bench.start(&["-i", "g", "-c", "7", "-m"]))
        .collect();
    for one in &both {
        one.expect("ready");
    }
    let delivered = |counters: &[Counted]| -> BTreeMap<String, u64> {
        let all = ports(counters).map(|port| (port.name.clone(), value(port, "delivered")));
        all.collect()
    };
    let first = bench.until("both are there", |counters| ports(counters).count() == 2);
    let before = delivered(&first);
    let last = bench.until("both have their share", |counters| {
        let now = delivered(counters);
        now.iter().all(|(port, count)| *count >= before[port] + 200)
    });
    // Each packet was one's duty, and nobody's else.
    let of = |name: &str| value(source(&last, "g"), name) - value(source(&first, "g"), name);
    assert_eq!(of("duties"), of("read"), "{last:?}");
    for one in both {
        one.signal("INT");
        let line = one.line();
        assert!(line.starts_with("rc 0 "), "{line}");
        assert!(number(&line, "packets") > 0, "{line}");
        one.finish();
    }
    // The ring ends with the source: -1, as documented.
    let ended = bench.start(&["-i", "end", "-c", "7", "-m"]);
    ended.expect("ready");
    let line = ended.line();
    assert!(line.starts_with("rc -1 packets 100 "), "{line}");
}

#[test]
fn the_members_of_a_group_share_one_copy() {
    // So slow that an arena holds the packets of several seconds: who is late loses none.
    let bench = Bench::new("count", &[&MIXED.replace("20000", "4000")]);
    let all = bench.start(&["-i", "g/ids", "-n", "30000000", "-r", "burst"]);
    all.expect("ready");
    for how in ["recv", "copy", "parsed", "burst", "loop", "poll"] {
        let args = ["-i", "host:g@0/other", "-n", "1000", "-f", "tcp"];
        let line = bench.count(&[&args[..], &["-r", how]].concat());
        assert_eq!((number(&line, "packets"), number(&line, "drop")), (1000, 0));
    }
    let tcp = bench.start(&["-i", "vnplug:g/ids", "-n", "1000", "-m", "-f", "tcp"]);
    tcp.expect("ready");
    let line = tcp.line();
    assert_eq!((number(&line, "tcp"), number(&line, "bad")), (1000, 0));
    tcp.finish();
    // The second member's packets were there already. What an arena holds is counted a moment after its
    // members: so an earlier look and a later one.
    let looks = [bench.daemon.audit(), bench.daemon.audit()];
    let [before, after] = looks.each_ref().map(|look| ports(look).next().unwrap());
    assert_eq!(label(before, "group"), "ids");
    let most = value(after, "delivered") + value(after, "dropped_full");
    assert!(value(before, "arena_copies") <= most, "{looks:?}");
    assert!(
        value(after, "arena_copies") >= value(before, "delivered"),
        "{looks:?}"
    );
    all.signal("INT");
    let line = all.line();
    assert!(number(&line, "packets") > 2000, "{line}");
    all.finish();
    let refused = bench.start(&["-i", "g/", "-n", "1"]);
    assert!(refused.line().starts_with("open: "));
}

#[test]
fn a_signal_ends_a_loop_that_waits_with_a_watermark() {
    let bench = Bench::new("count", &["g=gen,pps=10"]);
    let args = ["-i", "g", "-r", "loop", "-w", "4000", "-p", "300", "-b"];
    let running = bench.start(&args);
    running.expect("ready");
    // The watermark is not reached in minutes; the poll duration bounds the wait.
    running.expect("begun");
    running.signal("INT");
    let line = running.line();
    running.finish();
    assert!(
        line.starts_with("rc 0 packets ") && number(&line, "packets") > 0,
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
fn without_a_daemon_opening_fails_at_once() {
    let lab = Lab::new().unwrap();
    let program = compile(lab.dir(), "count", Library::Static);
    let running = Running::start(&program, &lab.dir().join("nobody"), &["-i", "eth0"]);
    running.expect("open: No such file or directory");
}
