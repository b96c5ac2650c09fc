//! `vnplug tap`: what is on the wire is on the interface, and every packet is accounted for.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::num::NonZeroU64;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;
use vnplug_e2e::attached::{self, AttachedUml, everything};
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{Guest, Image, Lab, Machine, Netns, Qemu, QemuConfig};
use vnplug_testing::{PATIENCE, eventually, until};

/// A program in a namespace; killed when dropped.
struct Running(Child);

impl Running {
    fn start(netns: &Netns, program: impl AsRef<Path>, args: &[&str], files: &Path) -> Self {
        let mut command = netns.command(program.as_ref());
        let file = |name: &str| File::create(files.with_extension(name)).unwrap();
        let child = command
            .args(args)
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .unwrap();
        Self(child)
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(sent.unwrap().success());
    }

    fn wait(&mut self) -> ExitStatus {
        let wait = || self.0.try_wait().unwrap();
        until("it ends", wait, Option::is_some).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A TAP under test, fed by `vnplug tap`, and what it printed.
struct Tap<'a> {
    lab: &'a Lab,
    netns: &'a Netns,
    process: Running,
}

impl<'a> Tap<'a> {
    fn start(lab: &'a Lab, netns: &'a Netns, daemon: &Daemon, args: &[&str]) -> Self {
        let socket = daemon.socket();
        let all = [
            &["--socket", socket.to_str().unwrap(), "tap", "--json"],
            args,
        ]
        .concat();
        let program = program("vnplug").unwrap();
        let mut process = Running::start(netns, program, &all, &lab.dir().join("tap"));
        let errors = lab.dir().join("tap.err");
        eventually("the interface is there", || {
            let text = fs::read_to_string(&errors).unwrap();
            if let Some(status) = process.0.try_wait().unwrap() {
                panic!("vnplug tap ended: {status}: {text}");
            }
            text.contains("receives")
        });
        Self {
            lab,
            netns,
            process,
        }
    }

    /// The last line it printed.
    fn last(&self) -> Option<Value> {
        let text = fs::read_to_string(self.lab.dir().join("tap.out")).unwrap();
        let line = text.lines().next_back()?;
        Some(serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
    }

    /// Waits for a line that says this many received packets, and more.
    fn received(&self, packets: u64) -> Value {
        let mut last = Value::Null;
        eventually(&format!("{packets} packets are received"), || {
            last = self.last().unwrap_or_default();
            last["received"].as_u64().is_some_and(|n| n >= packets)
        });
        last
    }

    /// Ends it by SIGTERM; gives the summary, whose identity it checks.
    fn finish(mut self) -> Value {
        self.process.signal("TERM");
        let status = self.process.wait();
        let summary = self.last().unwrap();
        assert!(status.success() && summary["summary"] == true, "{summary}");
        closes(&summary);
        assert!(!exists(self.netns, "vn0"), "the interface stayed");
        summary
    }
}

/// `received = injected + Σ dropped by reason`, and the kernel has what was injected.
fn closes(summary: &Value) {
    let number = |name: &str| summary[name].as_u64().unwrap();
    let reasons = summary["dropped_by_reason"].as_object().unwrap();
    let dropped: u64 = reasons.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(number("dropped"), dropped, "{summary}");
    assert_eq!(
        number("received"),
        number("injected") + dropped,
        "{summary}"
    );
    assert_eq!(
        number("interface_received"),
        number("injected"),
        "{summary}"
    );
}

fn exists(netns: &Netns, interface: &str) -> bool {
    netns.ip(&["link", "show", interface]).is_ok()
}

/// tcpdump on an interface, listening; ends after this many frames.
fn tcpdump(lab: &Lab, netns: &Netns, interface: &str, frames: u64) -> Running {
    let base = lab.dir().join(interface);
    let file = base.with_extension("pcap");
    let count = frames.to_string();
    let args = [
        "-Z", "root", "-n", "-B", "65536", "-s", "0", "-i", interface, "-c", &count, "-w",
    ];
    let args = [&args[..], &[file.to_str().unwrap()]].concat();
    let process = Running::start(netns, "tcpdump", &args, &base);
    eventually("tcpdump listens", || {
        let text = fs::read_to_string(base.with_extension("err")).unwrap();
        text.contains("listening on")
    });
    process
}

/// The frames of a pcap file and their lengths on the wire; the times differ by nature.
fn frames(lab: &Lab, interface: &str) -> Vec<(u32, Vec<u8>)> {
    let bytes = fs::read(lab.dir().join(interface).with_extension("pcap")).unwrap();
    let mut rest = &bytes[24..];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
        let (captured, wire) = (word(8) as usize, word(12));
        frames.push((wire, rest[16..16 + captured].to_vec()));
        rest = &rest[16 + captured..];
    }
    frames
}

/// Sends frames that no generator of ours makes: tagged, above 1500 bytes, of unknown type.
fn send_odd_frames(netns: &Netns) -> u64 {
    const SCRIPT: &str = "
import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(('wire0', 0))
macs = bytes.fromhex('020000000001020000000002')
ip = bytes.fromhex('4500001c000000004011000001020304050607080035003500080000')
s.send(macs + bytes.fromhex('8100a0070800') + ip + bytes(20))
s.send(macs + bytes.fromhex('88a8000581000007 0800'.replace(' ', '')) + ip + bytes(20))
s.send(macs + bytes.fromhex('88b5') + bytes(range(50)))
s.send(b'\\xff' * 12 + bytes.fromhex('0806') + bytes(46))
s.send(macs + bytes.fromhex('0800') + ip + bytes(3000))
s.send(macs + bytes.fromhex('0800') + ip + bytes(8000))
";
    netns.exec(&["python3", "-c", SCRIPT]).unwrap();
    6
}

#[test]
fn an_interface_reader_sees_the_wire_packet_for_packet() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    for wire in ["wire0", "wire1"] {
        netns.ip(&["link", "set", wire, "mtu", "9000"]).unwrap();
    }
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let args = [
        "host:wire1",
        "--name",
        "vn0",
        "--ring",
        "16M",
        "--stats",
        "--mtu",
        "1500",
    ];
    let tap = Tap::start(&lab, &netns, &daemon, &args);
    let count = 5000 + 6;
    let mut dumps = ["wire1", "vn0"].map(|name| tcpdump(&lab, &netns, name, count));
    for (len_bytes, flows) in [(60, 7), (700, 5), (1514, 3)] {
        let stream = Stream {
            len_bytes,
            flows,
            pps: NonZeroU64::new(20_000),
            ..Stream::new("wire0", 1000)
        };
        netns.enter(|| stream.send()).unwrap().unwrap();
    }
    send_odd_frames(&netns);
    let rest = Stream {
        run: 2,
        ..Stream::new("wire0", 2000)
    };
    netns.enter(|| rest.send()).unwrap().unwrap();
    for dump in &mut dumps {
        assert!(dump.wait().success());
    }
    let (wire, seen) = (frames(&lab, "wire1"), frames(&lab, "vn0"));
    assert_eq!(wire.len() as u64, count);
    for (index, (wire, seen)) in wire.iter().zip(&seen).enumerate() {
        assert_eq!(wire, seen, "frame {index}");
    }
    tap.received(count);
    let link = netns.ip(&["-s", "link", "show", "vn0"]).unwrap();
    assert!(
        link.contains("NOARP") && link.contains("mtu 1500"),
        "{link}"
    );
    // The kernel sent nothing: no answer to the ARP request, no neighbour discovery.
    let sent = netns.exec(&["cat", "/sys/class/net/vn0/statistics/tx_packets"]);
    assert_eq!(sent.unwrap().trim(), "0");
    let addresses = netns.ip(&["addr", "show", "vn0"]).unwrap();
    assert!(!addresses.contains("inet"), "{addresses}");
    let summary = tap.finish();
    assert_eq!(summary["injected"], count, "{summary}");
    assert_eq!(summary["above_mtu"], 2, "{summary}");
    assert_eq!(summary["lost"], 0, "{summary}");
    daemon.audit();
}

#[test]
fn a_flow_stays_in_one_of_several_queues() {
    const FRAMES: u64 = 4000;
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    netns.ip(&["link", "set", "wire1", "mtu", "4321"]).unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let args = ["host:wire1", "--name", "vn0", "--queues", "4"];
    let tap = Tap::start(&lab, &netns, &daemon, &args);
    let detail = netns.ip(&["-d", "link", "show", "vn0"]).unwrap();
    assert!(detail.contains("multi_queue"), "{detail}");
    assert!(detail.contains("mtu 4321"), "as the source's: {detail}");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tap/fanout.py");
    let mut reader = netns
        .command("python3")
        .args([script, "vn0", "4", &FRAMES.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .map(Running)
        .unwrap();
    let mut lines = BufReader::new(reader.0.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let stream = Stream {
        flows: 64,
        pps: NonZeroU64::new(20_000),
        ..Stream::new("wire0", FRAMES)
    };
    netns.enter(|| stream.send()).unwrap().unwrap();
    let mut text = String::new();
    lines.read_to_string(&mut text).unwrap();
    assert!(reader.wait().success());
    let mut queues: HashMap<&str, BTreeSet<&str>> = HashMap::new();
    for line in text.lines() {
        let (queue, flow) = line.split_once(' ').unwrap();
        queues.entry(flow).or_default().insert(queue);
    }
    assert_eq!(queues.len(), 64, "flows");
    assert!(
        queues.values().all(|queues| queues.len() == 1),
        "{queues:?}"
    );
    let used: BTreeSet<_> = queues.values().flatten().collect();
    assert_eq!(used.len(), 4, "queues in use");
    assert_eq!(tap.finish()["injected"], FRAMES);
}

#[test]
fn what_a_link_that_is_down_refuses_is_counted() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let source = "lab=gen,pps=20000,flows=4";
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", source]).unwrap();
    let args = ["lab", "--name", "vn0", "--stats", "--ring", "16M", "--down"];
    let tap = Tap::start(&lab, &netns, &daemon, &args);
    let down = tap.received(1000);
    assert_eq!(down["dropped_by_reason"]["link_down"], down["received"]);
    netns.ip(&["link", "set", "vn0", "up"]).unwrap();
    let up = tap.received(down["received"].as_u64().unwrap() + 40_000);
    assert!(up["injected"].as_u64().unwrap() > 1000, "{up}");
    netns.ip(&["link", "set", "vn0", "down"]).unwrap();
    tap.received(up["received"].as_u64().unwrap() + 40_000);
    let summary = tap.finish();
    assert!(
        summary["dropped_by_reason"]["link_down"].as_u64() > up["dropped"].as_u64(),
        "{summary}"
    );
    assert_eq!(
        summary["dropped"],
        summary["dropped_by_reason"]["link_down"]
    );
    daemon.audit();
}

#[test]
fn it_outlives_the_daemon_and_leaves_nothing_when_killed() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let mut daemon = Daemon::start(&lab, Some(&netns), &["--source", "lab=gen,pps=20000"]).unwrap();
    let mut tap = Tap::start(&lab, &netns, &daemon, &["lab", "--name", "vn0", "--stats"]);
    let before = tap.received(1000)["received"].as_u64().unwrap();
    daemon.kill();
    eventually("it waits for the daemon", || {
        tap.last().unwrap_or_default()["away"] == true
    });
    assert!(exists(&netns, "vn0"));
    daemon.launch().unwrap();
    let after = tap.received(before + 60_000);
    assert_eq!(after["reopened"], 1, "{after}");
    // A second one of that name is refused, with the remedy.
    let socket = daemon.socket();
    let mut second = netns.command(program("vnplug").unwrap());
    second.arg("--socket").arg(&socket);
    let output = second.args(["tap", "lab", "--name", "vn0"]).output();
    let output = output.unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && text.contains("exists") && text.contains("--name"),
        "{text}"
    );
    tap.process.signal("KILL");
    tap.process.wait();
    eventually("the interface is gone", || !exists(&netns, "vn0"));
    // Somebody removes it: said, with the totals.
    let mut tap = Tap::start(&lab, &netns, &daemon, &["lab", "--name", "vn0", "--stats"]);
    tap.received(100);
    netns.ip(&["link", "delete", "vn0"]).unwrap();
    assert_eq!(tap.process.wait().code(), Some(1));
    assert_eq!(tap.last().unwrap()["summary"], true);
    let errors = fs::read_to_string(lab.dir().join("tap.err")).unwrap();
    assert!(errors.contains("removed"), "{errors}");
}

#[test]
fn the_end_of_a_source_ends_it_and_cut_frames_are_told() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let source = "lab=gen,pps=20000,count=3000,size=200";
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", source]).unwrap();
    let args = ["lab", "--name", "vn0", "--ring", "16M", "--snaplen", "96"];
    let mut tap = Tap::start(&lab, &netns, &daemon, &args);
    assert!(tap.process.wait().success());
    let summary = tap.last().unwrap();
    closes(&summary);
    assert_eq!(
        (&summary["injected"], &summary["cut"]),
        (&3000.into(), &3000.into())
    );
    assert!(!exists(&netns, "vn0"));
}

#[test]
fn a_checksum_that_was_left_to_the_nic_is_filled_or_keeps_its_mark() {
    // Sends from a socket, so that the kernel leaves the checksum to the (virtual) NIC.
    const SCRIPT: &str = "
import socket, struct
def reader(name):
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    s.bind((name, 3))
    s.setsockopt(263, 8, 1)
    s.settimeout(60)
    return s
readers = [reader(name) for name in ('wire1', 'vn0')]
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.sendto(b'hello', ('10.9.9.2', 7))
for s in readers:
    frame, extra, _, _ = s.recvmsg(2048, 256)
    status = struct.unpack_from('I', extra[0][2])[0]
    print(status & 8, frame[-5:].decode())
";
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    netns
        .ip(&["addr", "add", "10.9.9.1/24", "dev", "wire0"])
        .unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let args = ["host:wire1", "--name", "vn0", "--direction", "rx"];
    for (segments, its) in [("merged", 8), ("wire", 0)] {
        let args = [&args[..], &["--segments", segments]].concat();
        let tap = Tap::start(&lab, &netns, &daemon, &args);
        let seen = netns.exec(&["python3", "-c", SCRIPT]).unwrap();
        assert_eq!(
            seen,
            format!("8 hello\n{its} hello\n"),
            "CSUMNOTREADY on the wire and on vn0"
        );
        tap.finish();
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_remedy() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    // A capture file of bare IP packets (LINKTYPE_RAW), empty, and an interface of Ethernet.
    let file = lab.dir().join("raw.pcap");
    let header = [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65535, 101];
    fs::write(&file, header.map(u32::to_le_bytes).concat()).unwrap();
    let raw = format!("raw=pcap:{}", file.display());
    let sources = ["--source", "lab=gen,pps=1000", "--source", &raw];
    let daemon = Daemon::start(&lab, Some(&netns), &sources).unwrap();
    let vnplug = program("vnplug").unwrap();
    let without_power = ["--bounding-set", "-net_admin"];
    let tap = |device: &str, options: &[&str], more: &[&str]| {
        let mut command = netns.command("setpriv");
        command.args(options).arg(&vnplug).arg("--socket");
        let command = command.arg(daemon.socket()).args(["tap", device]);
        let output = command.args(more).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), text)
    };
    let long = "a-name-that-is-too-long";
    for (device, options, more, code, words) in [
        ("raw", &[][..], &["--name", "vn0"][..], 1, "link type 101"),
        (
            "lab",
            &without_power,
            &["--name", "vn0"],
            1,
            "CAP_NET_ADMIN",
        ),
        ("lab", &[], &["--name", "lo"], 1, "lo"),
        ("lab", &[], &["--name", long], 2, "15 characters"),
        (
            "lab",
            &[],
            &["--mac", "ff:ff:ff:ff:ff:ff"],
            2,
            "group address",
        ),
        ("eth9", &[], &[], 1, "no source"),
    ] {
        let (status, text) = tap(device, options, more);
        assert_eq!(status, Some(code), "{device} {more:?}: {text}");
        assert!(text.contains(words), "{device} {more:?}: {text}");
        eprintln!("{text}");
    }
}

/// In a guest whose agent serves: the TAP and an unmodified tcpdump, which sees numbered frames.
fn an_interface_in_a_guest(guest: &Guest) {
    let run = |command: &str| {
        let output = guest.run(command, PATIENCE).unwrap();
        assert_eq!(output.status, 0, "{command}: {}", output.text());
        output.text()
    };
    eventually("the agent serves", || {
        guest.run("vnplug list", PATIENCE).unwrap().status == 0
    });
    let tap = guest
        .spawn("exec vnplug tap host:lab --name vn0 --ring 4M --json 2>/tmp/tap.err")
        .unwrap();
    eventually("the interface is up", || {
        let shown = guest.run("ip link show vn0", PATIENCE).unwrap();
        shown.status == 0 && shown.text().contains("UP")
    });
    run("tcpdump -Z root -B 16384 -i vn0 -c 1000 -w /tmp/vn0.pcap 2>/tmp/dump.err");
    let link = run("cat /sys/class/net/vn0/statistics/rx_packets");
    assert!(link.trim().parse::<u64>().unwrap() >= 1000, "{link}");
    tap.signal("TERM").unwrap();
    let output = tap.wait(PATIENCE).unwrap();
    let text = output.text();
    assert_eq!(output.status, 0, "{text}");
    closes(&serde_json::from_str(text.trim()).unwrap());
    assert_ne!(guest.run("ip link show vn0", PATIENCE).unwrap().status, 0);
    let file = guest.dir().join("vn0.pcap");
    guest.pull("/tmp/vn0.pcap", &file, PATIENCE).unwrap();
    let bytes = fs::read(&file).unwrap();
    let mut checker = vnplug_frame::witness::Checker::new(vnplug_frame::witness::View::Part);
    let mut rest = &bytes[24..];
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        checker.feed(&rest[16..16 + len]);
        rest = &rest[16 + len..];
    }
    let report = checker.report(9).unwrap();
    assert_eq!(
        (
            report.received,
            report.duplicates,
            report.reordered,
            report.missing.count
        ),
        (1000, 0, 0, 0),
        "{report:?}"
    );
}

const SOURCE: &str = "lab=gen,pps=2000,flows=4,run=9";

fn image() -> Image {
    attached::image()
        .unwrap()
        .program("/usr/bin/tcpdump")
        .module("tun")
}

#[test]
fn uml_guests_have_the_interface() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", SOURCE]).unwrap();
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = uml.guest.spawn("exec vnplug agent 2>&1").unwrap();
    an_interface_in_a_guest(&uml.guest);
}

#[test]
fn qemu_guests_have_the_interface() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", SOURCE]).unwrap();
    let config = QemuConfig {
        machine: Machine::Pc,
        image: image(),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    attached::plug(&daemon, &guest, "pc", &[]).unwrap();
    let _agent = guest.spawn("exec vnplug agent 2>&1").unwrap();
    an_interface_in_a_guest(&guest);
}
