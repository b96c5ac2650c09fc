//! `vnplug feed`: what other machines capture is received on a switch, as it was on their wire.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use vnplug::{Next, Port};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::raw::children;
use vnplug_e2e::station::Running;
use vnplug_frame::witness::{Checker, Protocol, Shape, View, make};
use vnplug_testing::{Deadline, eventually, until};

const RUN: u32 = 5;

/// A daemon with a switch, and a reader of it.
struct Mirror {
    daemon: Daemon,
    port: Port,
    checker: Checker,
    lab: Lab,
}

impl Mirror {
    fn new() -> Self {
        let lab = Lab::new().unwrap();
        let daemon = Daemon::start(&lab, None, &["--switch", "mirror"]).unwrap();
        let port = daemon.port("mirror").ring_bytes(32 << 20).open().unwrap();
        let checker = Checker::new(View::Whole);
        Self {
            daemon,
            port,
            checker,
            lab,
        }
    }

    fn command(&self, from: &str, more: &[&str]) -> Command {
        let mut command = Command::new(program("vnplug").unwrap());
        command.arg("--socket").arg(self.daemon.socket());
        command
            .args(["feed", from, "--to", "port:mirror", "--json"])
            .args(more);
        command
    }

    fn feed(&self, from: &str, more: &[&str]) -> Running {
        Running::start(self.command(from, more), &self.lab, "feed").unwrap()
    }

    /// Reads until there were `count` frames.
    fn reads(&mut self, count: u64) {
        let deadline = Deadline::new("the frames are read");
        let mut left = count;
        while left > 0 {
            deadline.check();
            match self.port.next().unwrap() {
                Next::Packet(packet) => {
                    self.checker.feed(packet.bytes);
                    left -= 1;
                }
                Next::Nothing => drop(self.port.wait(Some(Duration::from_millis(50))).unwrap()),
                Next::Ended => panic!("the source ended"),
            }
        }
    }

    /// That all of them were there, once and whole.
    fn had(&mut self, count: u64) {
        self.checker.expect(RUN, 0..count);
        let report = self.checker.report(RUN).unwrap();
        assert!(report.is_perfect(), "{report:?}");
        assert_eq!((self.checker.corrupt(), self.checker.foreign()), (0, 0));
    }
}

fn frame(seq: u64) -> Vec<u8> {
    let shape = Shape {
        len_bytes: 60 + (seq as usize * 37) % 1400,
        flow: seq as u32 % 16,
        protocol: Protocol::Udp4,
        vlan_tci: None,
    };
    make(shape, RUN, seq).unwrap()
}

/// Classic pcap of these frames.
fn pcap(link_type: u32, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = 0xa1b2_c3d4_u32.to_be_bytes().to_vec();
    bytes.extend([0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0]);
    bytes.extend(link_type.to_be_bytes());
    for frame in frames {
        for word in [1, 2, frame.len() as u32, frame.len() as u32] {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(frame);
    }
    bytes
}

fn summary(feed: &mut Running) -> Value {
    let _ = feed.finish();
    serde_json::from_str(feed.output().lines().last().unwrap()).unwrap()
}

/// A server that ends, speaks nonsense, ends within a packet and is there again costs nothing but what it did not send.
#[test]
fn a_server_of_pcap_over_ip_is_followed_over_its_ends() {
    let mut mirror = Mirror::new();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let mut feed = mirror.feed(&format!("tcp://{address}"), &[]);
    let all: Vec<_> = (0..3000).map(frame).collect();
    let client = || server.accept().unwrap().0;
    client().write_all(&pcap(1, &all[..1000])).unwrap();
    client()
        .write_all(b"GET / HTTP/1.1\r\n\r\nnot a capture at all, and long enough")
        .unwrap();
    let torn = pcap(1, &all[1000..1501]);
    client().write_all(&torn[..torn.len() - 7]).unwrap();
    let mut last = client();
    last.write_all(&pcap(1, &all[1500..])).unwrap();
    mirror.reads(3000);
    mirror.had(3000);
    let told = summary(&mut feed);
    assert_eq!(
        (&told["frames"], &told["connections"], &told["broken"]),
        (&3000.into(), &4.into(), &2.into()),
        "{told}"
    );
    assert!(feed.errors().contains("trying again"), "{}", feed.errors());
    drop(last);
    // What is no Ethernet is not sent, and said.
    let mut once = mirror.feed(&format!("tcp://{address}"), &["--once"]);
    client().write_all(&pcap(113, &all[..7])).unwrap();
    until("it ends", || once.status(), Option::is_some);
    let told = summary(&mut once);
    assert_eq!(
        (&told["frames"], &told["refused"]["link_type"]["113"]),
        (&0.into(), &7.into()),
        "{told}"
    );
}

/// The way out of one daemon is the way into another.
#[test]
fn what_dump_listens_with_is_fed() {
    let mut mirror = Mirror::new();
    let lab = Lab::new().unwrap();
    let other = Daemon::start(&lab, None, &["--switch", "far"]).unwrap();
    let mut dump = Command::new(program("vnplug").unwrap());
    dump.arg("--socket").arg(other.socket());
    dump.args(["dump", "host:far", "--listen", "0"]);
    let dump = Running::start(dump, &lab, "dump").unwrap();
    let address = dump.listens_at();
    let mut feed = mirror.feed(&format!("tcp://{address}"), &[]);
    let ports = || {
        other
            .counters()
            .iter()
            .filter(|it| it.kind == "port")
            .count()
    };
    until("it reads", ports, |ports| *ports == 1);
    let capture = lab.dir().join("capture");
    let all: Vec<_> = (0..5000).map(frame).collect();
    std::fs::write(&capture, pcap(1, &all)).unwrap();
    let words = [
        "replay",
        capture.to_str().unwrap(),
        "--to",
        "port:far",
        "--rate",
        "20kpps",
    ];
    let (code, said) = other.vnplug(&words);
    assert_eq!(code, Some(0), "{said}");
    mirror.reads(5000);
    mirror.had(5000);
    assert_eq!(summary(&mut feed)["frames"], 5000);
}

#[test]
fn what_serves_a_client_ends_with_the_one_that_listens_also_if_that_is_killed() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--switch", "far"]).unwrap();
    let mut dump = Command::new(program("vnplug").unwrap());
    dump.arg("--socket").arg(daemon.socket());
    dump.args(["dump", "--listen", "0", "--", "host:far"]);
    let dump = Running::start(dump, &lab, "dump").unwrap();
    let address = dump.listens_at();
    let clients = [(); 2].map(|()| TcpStream::connect(&address).unwrap());
    let servers = until(
        "both are served",
        || children(dump.pid()),
        |servers| servers.len() == 2,
    );
    let ports = || {
        let counters = daemon.counters();
        counters.iter().filter(|it| it.kind == "port").count()
    };
    until("they read", ports, |ports| *ports == 2);
    // Nor does one begin whose listener has ended before.
    let late = ["dump", "host:far", "-t", "10s", "--served-by", "1"];
    assert_eq!(daemon.vnplug(&late).0, Some(1));
    daemon.kill();
    // The control: they wait for a daemon.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(children(dump.pid()), servers);
    drop(dump);
    for server in servers {
        let there = format!("/proc/{server}");
        eventually("no process is left", || !Path::new(&there).exists());
    }
    drop(clients);
}

#[test]
fn a_mirror_that_speaks_tzsp_is_received() {
    let mut mirror = Mirror::new();
    let mut feed = mirror.feed("tzsp://127.0.0.1:0", &["--from", "127.0.0.0/30"]);
    let address: SocketAddr = feed.listens_at().parse().unwrap();
    let router = UdpSocket::bind("127.0.0.1:0").unwrap();
    let send = |parts: &[&[u8]]| assert!(router.send_to(&parts.concat(), address).is_ok());
    for seq in 0..2000 {
        // Also with what an access point says of a frame.
        let head: &[u8] = match seq % 2 {
            0 => &[1, 0, 0, 1, 1],
            _ => &[1, 0, 0, 1, 0, 10, 1, 0xd0, 18, 1, 6, 1],
        };
        send(&[head, &frame(seq)]);
        if seq % 100 == 99 {
            mirror.reads(100);
        }
    }
    // As good as the others, but for its sender.
    let stranger = UdpSocket::bind("127.0.0.7:0").unwrap();
    let sent = stranger.send_to(&[&[1, 0, 0, 1, 1][..], &frame(2000)].concat(), address);
    assert!(sent.is_ok());
    send(&[b"hello"]);
    send(&[&[1, 0, 0, 18, 1], &frame(0)]);
    send(&[&[1, 4, 0, 0]]);
    send(&[&[1, 0, 0, 1, 1], &frame(2000)]);
    mirror.reads(1);
    mirror.had(2001);
    let told = summary(&mut feed);
    assert_eq!(told["frames"], 2001, "{told}");
    assert_eq!(
        told["unread"],
        serde_json::json!({"strangers": 1, "malformed": 1, "foreign": 1, "empty": 1})
    );
    assert_eq!(told["overrun"], 0);
}

#[test]
fn a_pipe_is_fed_and_what_cannot_be_is_said() {
    let mut mirror = Mirror::new();
    let all: Vec<_> = (0..100).map(frame).collect();
    let fed = |input: &[u8], more: &[&str]| {
        let mut child = mirror
            .command("-", more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        (
            output.status.code(),
            String::from_utf8([output.stdout, output.stderr].concat()).unwrap(),
        )
    };
    let (code, said) = fed(&pcap(1, &all), &[]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = fed(b"this is no capture", &[]);
    assert!(code != Some(0) && said.contains("standard input"), "{said}");
    mirror.reads(100);
    mirror.had(100);
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert!(TcpStream::connect(free).is_err());
    for (from, why) in [
        (format!("tcp://{free}"), "refused"),
        ("tzsp://192.0.2.77".into(), "192.0.2.77"),
    ] {
        let output = mirror.command(&from, &["--once"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.contains(why),
            "{from}: {said}"
        );
    }
}
