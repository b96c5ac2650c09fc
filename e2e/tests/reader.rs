//! What a reader learns of a wire and what it may turn: devices, timestamps, direction, pause.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::num::NonZeroU64;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vnplug::{Client, Device, Next, Port, flags};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::traffic::{Stream, sequence};
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{Direction, Tuning};
use vnplug_testing::{Deadline, until};

/// Reads `count` packets: their timestamps by their numbers.
fn read(port: &mut Port, count: usize, sent: bool) -> BTreeMap<u64, u64> {
    let deadline = Deadline::new(format!("{count} packets come"));
    let mut seen = BTreeMap::new();
    while seen.len() < count {
        deadline.check_seen(&seen.len());
        match port.next().unwrap() {
            Next::Packet(packet) => {
                assert_eq!(packet.meta.flags & flags::OUTBOUND != 0, sent);
                seen.insert(sequence(packet.bytes), packet.meta.ts_ns);
            }
            _ => {
                port.wait(Some(Duration::from_millis(100))).unwrap();
            }
        }
    }
    seen
}

/// tcpdump of `count` frames of an interface, with nanoseconds; it listens when this returns.
fn tcpdump(netns: &Netns, interface: &str, file: &Path, count: usize) -> Dump {
    let mut command = netns.command("tcpdump");
    command
        .args(["-Z", "root", "-i", interface, "-B", "16384", "-c"])
        .arg(count.to_string())
        .args(["--time-stamp-precision=nano", "-w"])
        .arg(file)
        .stderr(Stdio::piped());
    let mut dump = Dump(command.spawn().unwrap());
    let mut lines = BufReader::new(dump.0.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("listening on")));
    // Whoever closes its stderr now would end it.
    std::thread::spawn(move || lines.for_each(drop));
    dump
}

/// A tcpdump that does not outlive its test.
struct Dump(Child);

impl Drop for Dump {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a pcap file with nanoseconds holds.
fn recorded(file: &Path) -> BTreeMap<u64, u64> {
    let bytes = std::fs::read(file).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(word(0), 0xa1b2_3c4d);
    let mut seen = BTreeMap::new();
    let mut at = 24;
    while at < bytes.len() {
        let ts_ns = u64::from(word(at)) * 1_000_000_000 + u64::from(word(at + 4));
        let end = at + 16 + word(at + 8) as usize;
        seen.insert(sequence(&bytes[at + 16..end]), ts_ns);
        at = end;
    }
    seen
}

/// Ends a thread when it is dropped, also by a test that fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn stream(count: u64, pps: u64) -> Stream {
    Stream {
        pps: NonZeroU64::new(pps),
        ..Stream::new("wire0", count)
    }
}

#[test]
fn timestamps_are_those_of_tcpdump_on_the_same_wire() {
    const FRAMES: usize = 2000;
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    // The generator goes past the taps of its own interface, so that the sent side is a bridge's.
    netns.veth("wire0", "wire1").unwrap();
    netns.veth("wire2", "wire3").unwrap();
    netns.bridge("bridge0", &["wire1", "wire2"]).unwrap();
    let sources = ["--source", "wire1", "--source", "wire2"];
    let daemon = Daemon::start(&lab, Some(&netns), &sources).unwrap();
    let mut dumps = Vec::new();
    let mut ports = Vec::new();
    for (interface, sent) in [("wire1", false), ("wire2", true)] {
        let file = lab.dir().join(interface);
        dumps.push((tcpdump(&netns, interface, &file, FRAMES), file));
        ports.push((daemon.port(interface).open().unwrap(), sent));
    }
    let stream = stream(FRAMES as u64, 20_000);
    netns.enter(|| stream.send()).unwrap().unwrap();
    for ((mut dump, file), (mut port, sent)) in dumps.into_iter().zip(ports) {
        let ours = read(&mut port, FRAMES, sent);
        assert!(dump.0.wait().unwrap().success());
        let theirs = recorded(&file);
        assert_eq!(theirs.len(), FRAMES);
        let differ = ours.iter().filter(|(n, ts)| theirs[n] != **ts).count();
        assert_eq!(differ, 0, "{}: of {FRAMES} frames", port.device());
    }
}

#[test]
fn a_port_is_tuned_between_two_packets_and_its_accounts_close() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let mut daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let options = daemon.port("wire1").enabled(false).ring_bytes(16 << 20);
    let mut port = options.open().unwrap();
    assert!(!port.tuning().enabled);
    let counter = |daemon: &Daemon, port: &Port, name: &str| {
        let counters = daemon.audit();
        let number = port.number().to_string();
        let own = |c: &&vnplug::Counted| c.kind == "port" && c.name == number;
        value(counters.iter().find(own).unwrap(), name)
    };
    let until_offered = |daemon: &Daemon, port: &Port, count: u64| {
        let offered = || counter(daemon, port, "offered");
        until("all are offered", offered, |offered| *offered >= count);
    };
    let send = |stream: Stream| netns.enter(move || stream.send()).unwrap().unwrap();

    // Opened paused.
    send(stream(1000, 50_000));
    until_offered(&daemon, &port, 1000);
    assert_eq!(counter(&daemon, &port, "paused"), 1000);

    // Turned while frames pass, first as fast as the daemon answers, then each way until a frame was
    // judged so: the turns and the wire's blocks could keep step for ever. Whatever was judged
    // when, it is counted once.
    const QUICK: u32 = 200;
    const EACH_WAY: u32 = 2 * 3 * 5;
    let over = AtomicBool::new(false);
    let sent = netns
        .enter(|| {
            std::thread::scope(|scope| {
                let _ends = Ends(&over);
                let sender = scope.spawn(|| {
                    let mut sent = 0;
                    while !over.load(Ordering::Relaxed) {
                        sent += stream(2_000, 50_000).send().unwrap().frames;
                    }
                    sent
                });
                for round in 1..=QUICK + EACH_WAY {
                    port.tune(Tuning {
                        enabled: round % 2 == 0,
                        direction: if round % 3 == 0 {
                            Direction::Tx
                        } else {
                            Direction::Both
                        },
                        sample: round % 5,
                    })
                    .unwrap();
                    let offered = counter(&daemon, &port, "offered");
                    if round > QUICK {
                        until_offered(&daemon, &port, offered + 1);
                    }
                }
                over.store(true, Ordering::Relaxed);
                sender.join().unwrap()
            })
        })
        .unwrap();
    for reason in ["paused", "direction", "sampled_out", "delivered"] {
        assert!(counter(&daemon, &port, reason) > 0, "{reason}");
    }
    until_offered(&daemon, &port, 1000 + sent);
    assert_eq!(counter(&daemon, &port, "offered"), 1000 + sent);

    // It survives a restart of the daemon.
    let paused = Tuning {
        enabled: false,
        ..Tuning::default()
    };
    port.tune(paused).unwrap();
    daemon.kill();
    daemon.launch().unwrap();
    let deadline = Deadline::new("the port is reopened");
    while port.counts().reopened == 0 {
        deadline.check();
        while matches!(port.next().unwrap(), Next::Packet(_)) {}
        port.wait(Some(Duration::from_millis(20))).unwrap();
    }
    assert_eq!(port.tuning(), paused);
    send(stream(100, 50_000));
    until_offered(&daemon, &port, 100);
    assert_eq!(counter(&daemon, &port, "paused"), 100);
    port.tune(Tuning::default()).unwrap();
    send(stream(100, 50_000));
    assert_eq!(read(&mut port, 100, false).len(), 100);
}

#[test]
fn devices_tell_what_their_interface_is_like_now() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let make = |mac: &str, address: &str, mtu: &str| {
        netns.veth("wire0", "wire1").unwrap();
        netns.ip(&["link", "set", "wire1", "address", mac]).unwrap();
        netns.ip(&["link", "set", "wire1", "mtu", mtu]).unwrap();
        netns.ip(&["addr", "add", address, "dev", "wire1"]).unwrap();
    };
    make("02:00:00:00:00:07", "192.0.2.1/24", "1400");
    let args = ["--source", "wire1", "--source", "lab=gen,pps=1"];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut wire = || -> Device {
        let devices = client.devices().unwrap();
        assert_eq!(devices[1].mac, [0; 6]);
        assert_eq!((devices[1].mtu, devices[1].link_type), (0, 1));
        devices.into_iter().next().unwrap()
    };
    let first = wire();
    assert_eq!((first.link_type, first.mtu), (1, 1400));
    // What veth says of itself.
    assert_eq!(first.speed_mbps, 10_000);
    assert_eq!(first.mac, [2, 0, 0, 0, 0, 7]);
    assert_eq!(first.addresses, ["192.0.2.1/24"]);

    netns.ip(&["link", "delete", "wire1"]).unwrap();
    let gone = wire();
    assert_eq!((gone.mtu, gone.mac, gone.addresses), (0, [0; 6], vec![]));
    make("02:00:00:00:00:08", "198.51.100.1/30", "1500");
    let again = wire();
    assert_eq!((again.mtu, again.mac[5]), (1500, 8));
    assert_eq!(again.addresses, ["198.51.100.1/30"]);
}
