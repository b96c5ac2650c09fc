//! Early drop, over a real wire: what the kernel drops is counted to the packet, and a reader gets
//! every frame that it may have, whatever the other readers do meanwhile.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use vnplug::{FilterSpec, Next, Port};
use vnplug_e2e::daemon::{Daemon, audit, label, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{Lab, Netns};
use vnplug_frame::witness::{Checker, Parsed, View, parse};
use vnplug_ring::control::Counted;
use vnplug_testing::{Deadline, eventually, until};

struct Wire {
    _lab: Lab,
    netns: Netns,
    daemon: Daemon,
}

impl Wire {
    /// A daemon that receives what is sent on `wire0`.
    fn new(source: &str) -> Self {
        let lab = Lab::new().unwrap();
        let netns = Netns::new().unwrap();
        netns.veth("wire0", "wire1").unwrap();
        let daemon = Daemon::start(&lab, Some(&netns), &["--source", source]).unwrap();
        Self {
            _lab: lab,
            netns,
            daemon,
        }
    }

    fn open(&self, filter: &str) -> Port {
        let options = self.daemon.port("wire1").ring_bytes(4 << 20);
        options.filter(filter).open().unwrap()
    }

    fn send(&self, stream: &Stream) {
        let sent = self.netns.enter(|| stream.send()).unwrap().unwrap();
        assert_eq!(sent.frames, stream.count);
    }

    fn source(&self) -> Counted {
        let counters = self.daemon.counters();
        audit(&counters);
        let mut sources = counters.into_iter().filter(|it| it.kind == "source");
        sources.next().expect("the source is counted")
    }

    /// Waits until early drop stands so.
    fn until(&self, standing: &str) -> Counted {
        until(
            standing,
            || self.source(),
            |source| label(source, "early_drop").starts_with(standing),
        )
    }

    /// Waits until nothing is under way, and checks point K.
    fn at_rest(&self, seen: u64) -> Counted {
        let look = || self.source();
        let source = until("nothing is under way", look, |source| {
            value(source, "in_kernel") == 0 && value(source, "seen") >= seen
        });
        let of = |name: &str| value(&source, name);
        let parts = of("read") + of("kernel_dropped") + of("early");
        assert_eq!((of("seen"), of("kernel_dropped")), (parts, 0), "{source:?}");
        assert_eq!(of("seen"), seen, "{source:?}");
        source
    }
}

#[test]
fn who_only_sends_does_not_bring_everything() {
    let wire = Wire::new(PATIENT);
    wire.until("on: no port");
    let mut sender = wire.daemon.command().unwrap();
    sender.args(["send", "wire1", "--pps", "10", "-t", "300s"]);
    let mut sender = sender.stdout(Stdio::null()).spawn().unwrap();
    eventually("somebody sends", || {
        value(&wire.daemon.counters()[0], "ports") > 0
    });
    let early = value(&wire.until("on: "), "early");
    wire.send(&Stream::new("wire0", 1_000));
    let source = || wire.source();
    until("all are dropped early", source, |source| {
        value(source, "early") >= early + 1_000
    });
    sender.kill().unwrap();
    sender.wait().unwrap();
}

/// Reads until this many packets came.
fn read(port: &mut Port, count: u64, checker: &mut Checker) {
    let deadline = Deadline::new(format!("{count} packets come"));
    let mut packets = 0;
    while packets < count {
        deadline.check_seen(&packets);
        match port.next().unwrap() {
            Next::Packet(packet) => {
                assert_eq!(packet.meta.lost, 0);
                checker.feed(packet.bytes);
                packets += 1;
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(100))).unwrap();
            }
            Next::Ended => panic!("ended after {packets}"),
        }
    }
}

/// Tells threads to end when it is dropped.
struct Ends<'a>([&'a AtomicBool; 2]);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0
            .iter()
            .for_each(|end| end.store(true, Ordering::Relaxed));
    }
}

/// The filter for the frames of one flow of a stream.
fn flow(number: u32) -> String {
    format!("src host 10.0.0.{number}")
}

#[test]
fn a_reader_of_one_flow_in_a_hundred_makes_the_kernel_drop_the_others() {
    const FRAMES: u64 = 50_000;
    let mut delivered = Vec::new();
    for early in [true, false] {
        let option = if early { "yes" } else { "no" };
        let wire = Wire::new(&format!("{PATIENT},early={option}"));
        if early {
            // Nobody is there: nothing comes to the daemon, and all of it is counted.
            wire.until("on: no port");
            wire.send(&Stream::new("wire0", 1_000));
            let idle = wire.at_rest(1_000);
            assert_eq!((value(&idle, "early"), value(&idle, "read")), (1_000, 0));
        }
        let mut port = wire.open(&flow(42));
        let before = wire.until(if early {
            "on: 1 filter"
        } else {
            "off: as configured"
        });
        let stream = Stream {
            flows: 100,
            ..Stream::new("wire0", FRAMES)
        };
        wire.send(&stream);
        let mut checker = Checker::new(View::Part);
        read(&mut port, FRAMES / 100, &mut checker);
        let after = wire.at_rest(value(&before, "seen") + FRAMES);
        let during = |name: &str| value(&after, name) - value(&before, name);
        // The control brings everything to the daemon, which drops the same.
        let dropped = if early { FRAMES - FRAMES / 100 } else { 0 };
        assert_eq!(
            (during("early"), during("read")),
            (dropped, FRAMES - dropped)
        );
        delivered.push(checker.set(1).expect("frames of the run").ranges());
    }
    assert_eq!(delivered[0], delivered[1]);
}

#[test]
fn changes_under_traffic_lose_nothing_that_a_reader_may_have() {
    const ROUNDS: u32 = 25;
    const BURST: u64 = 100;
    let wire = Wire::new(PATIENT);
    let mut steady = wire.open(&flow(1));
    wire.until("on: 1 filter");
    let (over, late) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        // A failure must not leave the other threads running for ever.
        let _ends = Ends([&over, &late]);
        // Traffic of 50 flows, of which the steady reader has one; in runs, to end when told.
        let background = scope.spawn(|| {
            let mut runs = 0;
            while !over.load(Ordering::Relaxed) {
                runs += 1;
                wire.send(&Stream {
                    flows: 50,
                    run: runs,
                    pps: NonZeroU64::new(25_000),
                    ..Stream::new("wire0", 5_000)
                });
            }
            runs
        });
        let reader = scope.spawn(|| read_until(&late, &mut steady));
        // A burst, sent when a request is answered, comes whole.
        let burst = |port: &mut Port, run: u32| {
            let flow = 60;
            wire.send(&Stream {
                run,
                flows: flow + 1,
                ..Stream::new("wire0", BURST * u64::from(flow + 1))
            });
            let mut checker = Checker::new(View::Part);
            let deadline = Deadline::new("the burst comes whole");
            while checker.set(run).map_or(0, |set| set.len()) < BURST {
                deadline.check();
                read(port, 1, &mut checker);
            }
        };
        for round in 0..ROUNDS {
            let run = 1_000_000 + round * 10;
            // A new reader with a filter, one without, and an old one that changes its mind.
            let mut narrow = wire.open(&flow(60));
            burst(&mut narrow, run);
            let changed = FilterSpec::Expression(flow(59));
            narrow.set_filter(changed).unwrap();
            let wide = wire.open("");
            let back = FilterSpec::Expression(flow(60));
            drop(wide);
            narrow.set_filter(back).unwrap();
            burst(&mut narrow, run + 1);
            if round % 2 == 0 {
                wire.until("on: 2 filters");
                burst(&mut narrow, run + 2);
            }
        }
        over.store(true, Ordering::Relaxed);
        let runs = background.join().unwrap();
        let source = wire.at_rest(value(&wire.source(), "seen"));
        late.store(true, Ordering::Release);
        let got = reader.join().unwrap();
        let all: BTreeSet<u64> = (1..5_000).step_by(50).collect();
        for run in 1..=runs {
            assert_eq!(
                got.get(&run),
                Some(&all),
                "run {run}: frames of the steady reader"
            );
        }
        // The test is about something: the kernel dropped a good part meanwhile.
        let early = value(&source, "early");
        assert!(early > 5_000, "{early} of {source:?}");
    });
}

/// Frames that a reader of one flow has, by run.
type Got = BTreeMap<u32, BTreeSet<u64>>;

/// Takes what is there into `got`; true if anything was.
fn collect(port: &mut Port, got: &mut Got) -> bool {
    let mut any = false;
    while let Next::Packet(packet) = port.next().unwrap() {
        assert_eq!(packet.meta.lost, 0);
        let Parsed::Witness(frame) = parse(packet.bytes) else {
            panic!("not a witness frame: {:02x?}", packet.bytes);
        };
        let fresh = got.entry(frame.run).or_default().insert(frame.seq);
        assert!(fresh, "a frame came twice");
        any = true;
    }
    any
}

/// Reads until there is nothing more when it was told that all is there.
fn read_until(late: &AtomicBool, port: &mut Port) -> Got {
    let mut got = Got::new();
    loop {
        // Asked first: what came before is read after.
        let last = late.load(Ordering::Acquire);
        if !collect(port, &mut got) {
            if last {
                return got;
            }
            port.wait(Some(Duration::from_millis(20))).unwrap();
        }
    }
}

/// The runs of which not both frames of this flow are there.
fn missing(got: &Got, flow: u32, runs: Range<u32>) -> Vec<u32> {
    let both = BTreeSet::from([u64::from(flow), u64::from(flow) + 50]);
    runs.filter(|run| got.get(run) != Some(&both)).collect()
}

/// Sends runs of 100 frames of 50 flows, each when the last one is counted: a veth holds 256.
struct Paced<'a> {
    wire: &'a Wire,
    /// Runs that were begun, and that the daemon has counted.
    begun: AtomicU32,
    over: AtomicU32,
}

impl Paced<'_> {
    fn run(&self) {
        let run = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        self.wire.send(&Stream {
            flows: 50,
            run,
            ..Stream::new("wire0", 100)
        });
        let source = || self.wire.source();
        until("the run is seen", source, |source| {
            value(source, "seen") >= u64::from(run) * 100
        });
        self.over.store(run, Ordering::SeqCst);
    }

    /// The first run that begins after this.
    fn next(&self) -> u32 {
        self.begun.load(Ordering::SeqCst) + 1
    }

    /// Waits for this many more runs; gives the first that may not have been whole before this.
    fn pass(&self, runs: u32) -> u32 {
        let last = self.next() + runs;
        eventually("the runs are over", || {
            self.over.load(Ordering::SeqCst) >= last
        });
        last
    }
}

#[test]
fn changes_under_traffic_lose_nothing_at_the_hook_of_xdp_either() {
    const ROUNDS: u32 = 20;
    let wire = Wire::new("wire1=af_xdp,early=yes,fallback=no");
    let mut steady = wire.open(&flow(1));
    wire.until("on: 1 filter");
    let traffic = Paced {
        wire: &wire,
        begun: AtomicU32::new(0),
        over: AtomicU32::new(0),
    };
    let (over, late) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut seen_by_steady = thread::scope(|scope| {
        let _ends = Ends([&over, &late]);
        let sender = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                traffic.run();
            }
        });
        let reader = scope.spawn(|| read_until(&late, &mut steady));
        // Every run that begins when a request is answered, until the next one is made, is whole.
        let whole = |port: &mut Port, flow: u32, runs: Range<u32>| {
            let deadline = Deadline::new(format!("nothing of {runs:?} is missing"));
            let mut got = Got::new();
            while !missing(&got, flow, runs.clone()).is_empty() {
                deadline.check_seen(&missing(&got, flow, runs.clone()));
                if !collect(port, &mut got) {
                    port.wait(Some(Duration::from_millis(20))).unwrap();
                }
            }
        };
        for round in 0..ROUNDS {
            let mut newcomer = wire.open(&flow(7));
            let first = traffic.next();
            if round % 2 == 0 {
                wire.until("on: 2 filters");
            }
            whole(&mut newcomer, 7, first..traffic.pass(3));
            newcomer
                .set_filter(FilterSpec::Expression(flow(9)))
                .unwrap();
            let first = traffic.next();
            // One that wants everything comes and goes.
            let mut wide = wire.open("");
            let all = traffic.next();
            let last = traffic.pass(2);
            whole_of_every_flow(&mut wide, all..last);
            drop(wide);
            if round % 3 == 0 {
                wire.until("on: 2 filters");
            }
            whole(&mut newcomer, 9, first..traffic.pass(2));
        }
        over.store(true, Ordering::Relaxed);
        sender.join().unwrap();
        wire.at_rest(u64::from(traffic.next() - 1) * 100);
        late.store(true, Ordering::Release);
        reader.join().unwrap()
    });
    let runs = 1..traffic.next();
    assert_eq!(missing(&seen_by_steady, 1, runs.clone()), [0; 0]);
    // The test is about something: the hook dropped a good part meanwhile.
    let early = value(&wire.until("on: 1 filter"), "early");
    assert!(early > u64::from(runs.end) * 20, "{early} of {runs:?}");
    // The control: what is not wanted any more is dropped at the hook, and the same look finds it.
    steady.set_filter(FilterSpec::Expression(flow(2))).unwrap();
    wire.until("on: 1 filter");
    let deadline = Deadline::new("what is wanted now comes, and nothing else");
    loop {
        let before = wire.source();
        let (begun, lost) = (traffic.next(), value(&before, "early"));
        traffic.run();
        let after = wire.at_rest(u64::from(begun) * 100);
        while !missing(&seen_by_steady, 2, begun..begun + 1).is_empty() {
            deadline.check();
            collect(&mut steady, &mut seen_by_steady);
        }
        assert_eq!(missing(&seen_by_steady, 1, begun..begun + 1), [begun]);
        match value(&after, "early") - lost {
            98 => break,
            // The new filter is on its way to the kernel.
            fewer => {
                assert!(fewer < 98, "{after:?}");
                deadline.check_seen(&after);
            }
        }
    }
}

/// Reads runs of all 50 flows, each of them whole.
fn whole_of_every_flow(port: &mut Port, runs: Range<u32>) {
    let deadline = Deadline::new(format!("all frames of {runs:?} come"));
    let mut got = Got::new();
    let is_whole = |got: &Got, run| got.get(&run).map_or(0, BTreeSet::len) == 100;
    while !runs.clone().all(|run| is_whole(&got, run)) {
        deadline.check();
        if !collect(port, &mut got) {
            port.wait(Some(Duration::from_millis(20))).unwrap();
        }
    }
}

#[test]
fn more_filters_than_the_kernel_is_given_bring_everything() {
    let wire = Wire::new(PATIENT);
    wire.until("on: no port");
    let mut ports: Vec<Port> = (0..70).map(|number| wire.open(&flow(number))).collect();
    let full = wire.until("off: 70 filters");
    wire.send(&Stream {
        flows: 100,
        ..Stream::new("wire0", 10_000)
    });
    let after = wire.at_rest(value(&full, "seen") + 10_000);
    assert_eq!(value(&after, "early"), value(&full, "early"));
    for port in &mut ports {
        read(port, 100, &mut Checker::new(View::Part));
    }
    // Equal filters are one.
    ports.truncate(60);
    ports.extend((0..20).map(|_| wire.open(&flow(7))));
    let few = wire.until("on: 60 filters");
    wire.send(&Stream {
        flows: 100,
        ..Stream::new("wire0", 10_000)
    });
    let after = wire.at_rest(value(&few, "seen") + 10_000);
    assert_eq!(value(&after, "early") - value(&few, "early"), 4_000);
    // One without a filter.
    let mut wide = wire.open("");
    let before = wire.until("off: a port wants everything");
    wire.send(&Stream::new("wire0", 1_000));
    read(&mut wide, 1_000, &mut Checker::new(View::Part));
    let after = wire.at_rest(value(&before, "seen") + 1_000);
    assert_eq!(value(&after, "early"), value(&before, "early"));
}

#[test]
fn the_kernel_and_the_daemon_have_one_book() {
    let wire = Wire::new(PATIENT);
    let mut stays = wire.open(&flow(1));
    let goes = wire.open(&flow(2));
    let before = wire.until("on: 2 filters");
    let programs = || held(&wire, "prog_id:");
    let loaded = programs();
    let stream = Stream {
        flows: 10,
        ..Stream::new("wire0", 1_000)
    };
    wire.send(&stream);
    let after = wire.at_rest(value(&before, "seen") + 1_000);
    assert_eq!(value(&after, "early") - value(&before, "early"), 800);
    // A filter goes, and comes again, by a bit: the kernel has the same program as before.
    drop(goes);
    let before = wire.until("on: 1 filter");
    wire.send(&stream);
    let after = wire.at_rest(value(&before, "seen") + 1_000);
    assert_eq!(value(&after, "early") - value(&before, "early"), 900);
    let mut back = wire.open(&flow(2));
    assert!(label(&wire.source(), "early_drop").starts_with("on: 2 filters"));
    wire.send(&Stream {
        run: 2,
        ..Stream { ..stream }
    });
    read(&mut back, 100, &mut Checker::new(View::Part));
    let after = wire.at_rest(value(&after, "seen") + 1_000);
    read(&mut stays, 300, &mut Checker::new(View::Part));
    assert_eq!(programs(), loaded);
    // Its map, as bpftool shows it: two filters are on in a word with the generation, and the counts of all
    // processors are what the daemon tells.
    let maps = held(&wire, "map_id:");
    let [id] = &maps[..] else {
        panic!("the maps are {maps:?}");
    };
    let words = ["-j", "map", "dump", "id", id];
    let output = Command::new("bpftool").args(words).output().unwrap();
    let dump: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let bytes: Vec<u8> = match &dump[0]["value"] {
        Value::Array(bytes) => bytes.iter().map(hexadecimal).collect(),
        other => panic!("bpftool says {other}"),
    };
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
        .collect();
    assert_eq!(words[0] as u32, 0b11, "{words:?}");
    assert!(words[0] >> 32 > 0 && words[1] == words[0] >> 32 << 32);
    assert_eq!(words[16..].iter().sum::<u64>(), value(&after, "early"));
}

fn hexadecimal(byte: &Value) -> u8 {
    let text = byte.as_str().unwrap().trim_start_matches("0x");
    u8::from_str_radix(text, 16).unwrap()
}

/// The numbers of the daemon's programs or maps in the kernel, by its descriptors.
fn held(wire: &Wire, what: &str) -> Vec<String> {
    let dir = format!("/proc/{}/fdinfo", wire.daemon.pid());
    let infos = std::fs::read_dir(dir).unwrap().flatten();
    let texts = infos.filter_map(|info| std::fs::read_to_string(info.path()).ok());
    let number = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix(what));
        line.map(|number| number.trim().to_owned())
    };
    let mut numbers: Vec<String> = texts.filter_map(number).collect();
    numbers.sort();
    numbers
}

#[test]
fn a_daemon_that_comes_back_drops_early_again() {
    let mut wire = Wire::new(PATIENT);
    let mut port = wire.open(&flow(3));
    for _ in 0..2 {
        let before = wire.until("on: 1 filter");
        wire.send(&Stream {
            flows: 10,
            ..Stream::new("wire0", 1_000)
        });
        let mut checker = Checker::new(View::Part);
        let deadline = Deadline::new("all of the flow comes");
        while checker.set(1).map_or(0, |set| set.len()) < 100 {
            deadline.check();
            match port.next().unwrap() {
                Next::Packet(packet) => drop(checker.feed(packet.bytes)),
                _ => drop(port.wait(Some(Duration::from_millis(50))).unwrap()),
            }
        }
        let after = wire.at_rest(value(&before, "seen") + 1_000);
        assert_eq!(value(&after, "early") - value(&before, "early"), 900);
        wire.daemon.kill();
        wire.daemon.launch().unwrap();
        // The library opens its port again when it reads.
        let deadline = Deadline::new("the port is back");
        while !label(&wire.source(), "early_drop").starts_with("on: 1 filter") {
            deadline.check();
            assert!(!matches!(port.next().unwrap(), Next::Packet(_)));
            port.wait(Some(Duration::from_millis(20))).unwrap();
        }
    }
}
