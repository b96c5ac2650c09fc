//! Programs for PF_RING that send: onto wires of their own, and where they may not.

use std::path::PathBuf;
use std::time::Duration;

use crate::support::{Library, Running, compile, number};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};

/// A daemon in a namespace with wires `a0`–`a1` and `b0`–`b1`, of which it serves all four ends.
struct Wires {
    lab: Lab,
    netns: Netns,
    daemon: Daemon,
}

impl Wires {
    fn new() -> Self {
        let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
        let mut args = Vec::new();
        for (one, other) in [("a0", "a1"), ("b0", "b1")] {
            netns.veth(one, other).unwrap();
            args.extend(["--source", one, "--source", other]);
        }
        let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
        Self { lab, netns, daemon }
    }

    fn program(&self, name: &str) -> PathBuf {
        compile(self.lab.dir(), name, Library::Shared)
    }

    /// Programs run where the interfaces are, as their numbers are looked for.
    fn start(&self, program: &PathBuf, args: &[&str]) -> Running {
        Running::of(self.netns.command(program), &self.daemon.socket(), args)
    }

    fn value(&self, source: &str, name: &str) -> u64 {
        let counters = self.daemon.audit();
        let of = |one: &&vnplug::Counted| one.kind == "source" && one.name == source;
        value(counters.iter().find(of).unwrap(), name)
    }
}

/// The line of results of `count`, which got this many packets and lost none.
fn got(count: Running, packets: u64) {
    let line = count.line();
    let found = (number(&line, "packets"), number(&line, "drop"));
    assert_eq!(found, (packets, 0), "{line}");
    count.finish();
}

#[test]
fn what_is_sent_is_received_at_the_other_end() {
    let wires = Wires::new();
    let (send, count) = (wires.program("send"), wires.program("count"));
    let ways: [(&[&str], u64); 4] = [
        (&["-n", "20000"], 20_000),
        (&["-n", "2000", "-f", "-l", "1514"], 2000),
        // Without a mode, and the last frames are handed over by the flush at the end.
        (&["-n", "1001", "-b", "-w", "64"], 1001),
        (&["-n", "3000", "-t", "4"], 12_000),
    ];
    for (args, frames) in ways {
        let text = frames.to_string();
        let counting = ["-i", "a1", "-f", "udp", "-e", "1", "-n", &text];
        let receiver = wires.start(&count, &counting);
        receiver.expect("ready");
        let sender = wires.start(&send, &[&["-i", "a0"], args].concat());
        sender.expect("ready");
        let line = sender.line();
        let done = ["flush", "sent", "given_up"].map(|name| number(&line, name));
        assert_eq!(done, [0, frames, 0], "{args:?}: {line}");
        sender.finish();
        got(receiver, frames);
    }
    let all: u64 = ways.iter().map(|way| way.1).sum();
    assert_eq!(wires.value("a0", "sent"), all);
}

#[test]
fn a_bridge_sends_on_what_it_receives() {
    let wires = Wires::new();
    let (bridge, count) = (wires.program("bridge"), wires.program("count"));
    let counting = ["-i", "b0", "-f", "udp", "-e", "1", "-n", "10000"];
    for way in ["-p", "-r", ""] {
        let receiver = wires.start(&count, &counting);
        receiver.expect("ready");
        let args = ["-a", "a1", "-b", "b1", "-n", "10000", way];
        let args: Vec<&str> = args.into_iter().filter(|arg| !arg.is_empty()).collect();
        let between = wires.start(&bridge, &args);
        between.expect("ready");
        let stream = Stream::new("a0", 10_000);
        wires.netns.enter(|| stream.send()).unwrap().unwrap();
        got(receiver, 10_000);
        // Before the first packet there is none to send, and none goes back where it came from.
        let (none, back) = if way.is_empty() { (-3, -2) } else { (0, 0) };
        between.expect(&format!("packets 10000 failed 0 none {none} back {back}"));
        between.finish();
    }
}

#[test]
fn a_frame_arrives_without_anybody_waiting_for_more() {
    let wires = Wires::new();
    let bridge = wires.program("bridge");
    let both = wires.start(&bridge, &["-l", "-a", "a1", "-b", "a0", "-n", "200"]);
    let line = both.line();
    assert_eq!(number(&line, "packets"), 200, "{line}");
    // Nobody waits for a watermark or a timer: on an idle machine tens of microseconds.
    assert!(number(&line, "mean_us") < 20_000, "{line}");
    both.finish();
}

#[test]
fn a_refused_sender_comes_to_an_end() {
    let lab = Lab::new().unwrap();
    let file = lab.dir().join("empty.pcap");
    let header: [u32; 6] = [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, 1];
    let bytes: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
    std::fs::write(&file, bytes).unwrap();
    let source = format!("file=pcap:{}", file.display());
    let daemon = Daemon::start(&lab, None, &["--source", &source]).unwrap();
    let program = compile(lab.dir(), "send", Library::Static);
    let start = |args: &[&str]| Running::start(&program, &daemon.socket(), args);

    let asked = start(&["-i", "file", "-n", "5"]);
    asked.expect("mode -7: Operation not supported");
    asked.expect("enable -7: Operation not supported");
    asked.expect("ready");
    asked.expect("flush 0 sent 0 given_up 5 again 16 last -7: Operation not supported");
    asked.finish();
    // A program that says nothing of sending may receive, and is refused when it sends.
    let unasked = start(&["-i", "file", "-n", "5", "-b"]);
    unasked.expect("ready");
    unasked.expect("flush 0 sent 0 given_up 5 again 16 last -7: Operation not supported");
    unasked.finish();
    let device = start(&["-i", "none", "-n", "1"]);
    device.expect("mode -7: No such device");
    device.expect("enable -7: No such device");
    device.expect("ready");
    device.expect("flush 0 sent 0 given_up 1 again 16 last -7: No such device");
    device.finish();
}

#[test]
fn sending_goes_on_after_a_restart_and_ends_without_a_daemon() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "g=gen,pps=10"]).unwrap();
    let program = compile(lab.dir(), "send", Library::Shared);
    let args = ["-i", "g", "-n", "1500", "-s", "1"];
    let sender = Running::start(&program, &daemon.socket(), &args);
    sender.expect("ready");
    std::thread::sleep(Duration::from_millis(300));
    daemon.kill();
    std::thread::sleep(Duration::from_millis(300));
    daemon.launch().unwrap();
    let line = sender.line();
    assert_eq!(number(&line, "sent"), 1500, "{line}");
    sender.finish();

    let mut deaf = Running::start(&program, &daemon.socket(), &["-i", "g", "-n", "2", "-g"]);
    deaf.expect("ready");
    daemon.kill();
    deaf.go();
    let line = deaf.line();
    // The first frame found room in a ring that nobody reads any more.
    assert_eq!(number(&line, "given_up"), 1, "{line}");
    assert_eq!(number(&line, "again"), 1024, "{line}");
    deaf.finish();
}
