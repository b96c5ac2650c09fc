//! Where mirrors end, and where packets go out: the kernel's tunnels as sources; `vnplug dump --listen`, to programs that
//! nobody here wrote and to clients that do not read.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::net::TcpStream;
use std::num::NonZeroU64;
use std::ops::Range;
use std::process::Command;

use vnplug::{Balance, Next};
use vnplug_e2e::daemon::{Daemon, counted, program, value};
use vnplug_e2e::station::Running;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_e2e::{Lab, Netns};
use vnplug_frame::witness::{Parsed, parse};
use vnplug_ring::control::Counted;
use vnplug_testing::{eventually, until};

/// Starts it, and gives its address.
fn listening(wire: &Wire, more: &[&str]) -> (Running, String) {
    listening_by(Command::new(program("vnplug").unwrap()), wire, more)
}

/// The same with such a program.
fn listening_by(mut command: Command, wire: &Wire, more: &[&str]) -> (Running, String) {
    command.arg("--socket").arg(wire.daemon.socket());
    command
        .args(["dump", "host:wire1", "--listen", "0"])
        .args(more);
    let running = Running::start(command, &wire.lab, "dump").unwrap();
    let address = running.listens_at();
    (running, address)
}

fn ports(wire: &Wire) -> Vec<Counted> {
    let mut all = wire.daemon.counters();
    all.retain(|it| it.kind == "port");
    all
}

#[test]
fn tshark_reads_every_packet_beside_a_client_that_reads_none() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let (mut running, address) = listening(&wire, &["--ring", "1M"]);
    let lazy = TcpStream::connect(&address).unwrap();
    eventually("it has a port", || ports(&wire).len() == 1);
    let lazy_port = ports(&wire)[0].name.clone();
    let count = 20_000;
    let mut tshark = Command::new("tshark");
    tshark.args([
        "-n",
        "-i",
        &format!("TCP@{address}"),
        "-T",
        "fields",
        "-e",
        "frame.len",
    ]);
    tshark.args(["-c", &count.to_string()]);
    let mut tshark = Running::start(tshark, &wire.lab, "tshark").unwrap();
    eventually("tshark has one, too", || ports(&wire).len() == 2);
    wire.send(&Stream {
        len_bytes: 1400,
        ..Stream::new("wire0", count)
    });
    let ended = until("tshark has all", || tshark.status(), Option::is_some);
    assert!(ended.unwrap().success(), "{}", tshark.errors());
    let lines: Vec<String> = tshark.output().lines().map(str::to_owned).collect();
    assert_eq!(lines.len() as u64, count);
    assert!(
        lines.iter().all(|line| line == "1400"),
        "{:?}",
        lines.first()
    );
    eventually("its port is closed", || ports(&wire).len() == 1);
    // That the lazy one does not read was felt, and by nobody else.
    let of_lazy = ports(&wire).remove(0);
    assert_eq!(of_lazy.name, lazy_port);
    assert!(value(&of_lazy, "dropped_full") > 0, "{of_lazy:?}");
    assert_eq!(
        value(counted(&wire.daemon.counters(), "source"), "kernel_dropped"),
        0
    );
    drop(lazy);
    eventually("nobody has a port", || ports(&wire).is_empty());
    // Not without its server that waits for room.
    let stuck = TcpStream::connect(&address).unwrap();
    eventually("it has a port", || ports(&wire).len() == 1);
    wire.send(&Stream {
        len_bytes: 1400,
        ..Stream::new("wire0", count)
    });
    assert!(running.finish().success(), "{}", running.errors());
    eventually("nobody has a port", || ports(&wire).is_empty());
    drop(stuck);
}

#[test]
fn who_connects_is_served_also_after_the_program_was_replaced() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let copy = wire.lab.dir().join("vnplug");
    std::fs::copy(program("vnplug").unwrap(), &copy).unwrap();
    let (_running, address) = listening_by(Command::new(&copy), &wire, &[]);
    for _ in 0..2 {
        let mut reader = TcpStream::connect(&address).unwrap();
        eventually("it has a port", || ports(&wire).len() == 1);
        // A capture file begins there.
        reader.read_exact(&mut [0; 24]).unwrap();
        drop(reader);
        eventually("nobody has a port", || ports(&wire).is_empty());
        // As a package manager does.
        let new = wire.lab.dir().join("vnplug.new");
        std::fs::write(&new, "").unwrap();
        std::fs::rename(&new, &copy).unwrap();
    }
}

#[test]
fn what_cannot_be_served_is_said() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let (_running, address) = listening(&wire, &["-f", "udp", "--allow-remote"]);
    let refused = |words: &[&str]| {
        let mut command = Command::new(program("vnplug").unwrap());
        command
            .arg("--socket")
            .arg(wire.daemon.socket())
            .arg("dump");
        let output = command.args(words).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let taken = refused(&["host:wire1", "--listen", &address]);
    assert!(taken.contains("in use"), "{taken}");
    let nothing = refused(&["host:nothing", "--listen", "0"]);
    assert!(nothing.contains("host:nothing"), "{nothing}");
    let both = refused(&["host:wire1", "--listen", "0", "-w", "file"]);
    assert!(both.contains("--write"), "{both}");
    let open = refused(&["host:wire1", "--listen", "0.0.0.0:0"]);
    assert!(open.contains("--allow-remote"), "{open}");

    // Sixteen read; one more is not let in, until one leaves.
    let all: Vec<TcpStream> = (0..16)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    eventually("all have a port", || ports(&wire).len() == 16);
    let mut more = TcpStream::connect(&address).unwrap();
    assert_eq!(more.read(&mut [0; 24]).unwrap(), 0);
    drop(all);
    eventually("nobody has a port", || ports(&wire).is_empty());
    let mut header = [0; 24];
    TcpStream::connect(&address)
        .unwrap()
        .read_exact(&mut header)
        .unwrap();
    assert_eq!(header[..4], 0xa1b2_3c4d_u32.to_ne_bytes());
}

/// Two namespaces, far and near, that a wire from `wire0` to `wire1` joins, and a tunnel of such a device `mirror` through it.
fn tunnel(kind: &str) -> (Netns, Netns) {
    let (near, far) = (Netns::new().unwrap(), Netns::new().unwrap());
    far.veth("wire0", "wire1").unwrap();
    far.ip(&["link", "set", "wire1", "netns", near.name()])
        .unwrap();
    for (netns, end, local, remote) in [
        (&far, "wire0", "192.0.2.1", "192.0.2.2"),
        (&near, "wire1", "192.0.2.2", "192.0.2.1"),
    ] {
        let address = format!("{local}/24");
        netns.ip(&["addr", "add", &address, "dev", end]).unwrap();
        netns
            .ip(&["link", "set", end, "arp", "on", "mtu", "1700", "up"])
            .unwrap();
        let words = format!("link add mirror mtu 1600 type {kind} local {local} remote {remote}");
        netns.ip(&words.split(' ').collect::<Vec<_>>()).unwrap();
        netns.ip(&["link", "set", "mirror", "up"]).unwrap();
    }
    // The kernel keeps few frames for a neighbour that it does not know yet.
    let ping = ["ping", "-c", "1", "-W", "9", "192.0.2.2"];
    far.exec(&ping).unwrap();
    (far, near)
}

/// Flat out, and with an eye on every frame; `mirror_ends.rs` has the other kinds of tunnels.
#[test]
fn a_tunnel_of_the_kernel_is_a_source() {
    let lab = Lab::new().unwrap();
    let (far, near) = tunnel("vxlan id 7 dstport 4789");
    let sources = ["--source", "mirror", "--source", PATIENT];
    let daemon = Daemon::start(&lab, Some(&near), &sources).unwrap();
    let mut count = Command::new(program("vnplug").unwrap());
    count.arg("--socket").arg(daemon.socket());
    count.args([
        "count",
        "host:mirror",
        "-f",
        "udp",
        "--packets",
        "500",
        "--witness",
        "--json",
    ]);
    let mut count = Running::start(count, &lab, "count").unwrap();
    let ports = || {
        daemon
            .counters()
            .iter()
            .filter(|it| it.kind == "port")
            .count()
    };
    eventually("it has a port", || ports() == 1);
    // Flat out, 1,514 bytes that are 1,564 outside.
    let stream = Stream {
        len_bytes: 1514,
        flows: 9,
        ..Stream::new("mirror", 500)
    };
    far.enter(|| stream.send()).unwrap().unwrap();
    let ended = until("it has all", || count.status(), Option::is_some);
    assert!(ended.unwrap().success(), "{}", count.errors());
    let witness = &count.last()["witness"];
    assert_eq!(witness["perfect"], true, "{}", count.output());
    assert_eq!(witness["received"], 500, "{}", count.output());
}

/// What two members of a cluster on the wire have of each flow within a tunnel, all of whose packets are of one flow on the wire.
fn shared(dstport: u16) -> Vec<[u64; 2]> {
    let (lab, flows, each) = (Lab::new().unwrap(), 32, 20);
    // Of such a range the kernel takes the first port alone.
    let (far, near) = tunnel(&format!("vxlan id 7 srcport 40000 40001 dstport {dstport}"));
    let daemon = Daemon::start(&lab, Some(&near), &["--source", PATIENT]).unwrap();
    let member = || {
        let port = daemon.port("wire1").cluster("ids", Balance::Flow);
        port.filter(&format!("udp dst port {dstport}")).open()
    };
    let mut members = [member().unwrap(), member().unwrap()];
    let stream = Stream {
        len_bytes: 100,
        flows,
        pps: NonZeroU64::new(20_000),
        ..Stream::new("mirror", u64::from(flows) * each)
    };
    far.enter(|| stream.send()).unwrap().unwrap();
    let (mut outside, mut inside) = (HashSet::new(), HashMap::<Vec<u8>, [u64; 2]>::new());
    eventually("all packets are read", || {
        for (number, port) in members.iter_mut().enumerate() {
            while let Next::Packet(packet) = port.next().unwrap() {
                let (outer, inner) = packet.bytes.split_at(VXLAN_BYTES);
                if let Parsed::Witness(_) = parse(inner) {
                    outside.insert(outer[ADDRESSES_AND_PORTS].to_vec());
                    inside
                        .entry(inner[ADDRESSES_AND_PORTS].to_vec())
                        .or_default()[number] += 1;
                }
            }
            port.release();
        }
        inside.values().flatten().sum::<u64>() == stream.count
    });
    assert_eq!(outside.len(), 1, "{outside:?}");
    assert_eq!(inside.len(), flows as usize);
    assert!(inside.values().all(|it| it.iter().sum::<u64>() == each));
    daemon.audit();
    inside.into_values().collect()
}

#[test]
fn a_cluster_on_the_wire_shares_a_tunnel_by_the_flows_within() {
    let has_all =
        |of: &[[u64; 2]], member: usize| of.iter().filter(|it| it[1 - member] == 0).count();
    let flows = shared(4789);
    let [first, second] = [0, 1].map(|member| has_all(&flows, member));
    // Each flow is whole with one member, and both have some.
    assert_eq!(first + second, flows.len(), "{flows:?}");
    assert!(first > 0 && second > 0, "{flows:?}");
    // The control: at a port by which nobody knows a tunnel it is one flow.
    let flows = shared(8472);
    let [first, second] = [0, 1].map(|member| has_all(&flows, member));
    assert_eq!(first.max(second), flows.len(), "{flows:?}");
}

/// Before the frame within: Ethernet, IPv4, UDP, VXLAN.
const VXLAN_BYTES: usize = 14 + 20 + 8 + 8;
/// Of a frame with UDP over IPv4.
const ADDRESSES_AND_PORTS: Range<usize> = 26..38;
