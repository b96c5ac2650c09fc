//! Unmodified tcpdump over the rings sees what tcpdump on the wire sees. Needs root.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::{DropIn, built, limited, said_ok, signal, text};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::eventually;

/// What fills a block of the kernel's ring slowly takes one each time this is over: long enough that a
/// daemon may be kept from the processor for some seconds.
const PATIENT: &str = "wire=af_packet:wire1,block_timeout_ms=50";

/// A wire, a daemon that captures at its end, the drop-in.
struct Bench {
    lab: Lab,
    netns: Netns,
    daemon: Daemon,
    drop_in: DropIn,
}

impl Bench {
    fn new() -> Self {
        let lab = Lab::new().unwrap();
        let netns = Netns::new().unwrap();
        netns.veth("wire0", "wire1").unwrap();
        let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
        let drop_in = DropIn::new(&lab);
        Self {
            lab,
            netns,
            daemon,
            drop_in,
        }
    }

    /// tcpdump in the wire's namespace, over the drop-in or not.
    fn tcpdump(&self, ours: bool, args: &[&str]) -> Command {
        let mut command = self.netns.command("timeout");
        command
            .args(["-s", "KILL", "120", "tcpdump", "-n", "-Z", "root"])
            .args(args);
        if ours {
            command.env("LD_LIBRARY_PATH", &self.drop_in.dir);
            command.env("VNPLUG_SOCKET", self.daemon.socket());
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn file(&self, name: &str) -> String {
        self.lab.dir().join(name).to_str().unwrap().to_owned()
    }

    fn send(&self, count: u64) {
        self.send_long(count, 200);
    }

    fn send_long(&self, count: u64, len_bytes: usize) {
        let stream = Stream {
            pps: std::num::NonZeroU64::new(20_000),
            flows: 7,
            len_bytes,
            ..Stream::new("wire0", count)
        };
        let sent = self.netns.enter(|| stream.send()).unwrap().unwrap();
        assert_eq!(sent.frames, count);
    }
}

/// Waits until tcpdump listens, by the head of the file it writes; `-U` wrote it.
fn listens(file: &str) {
    eventually("tcpdump listens", || {
        std::fs::metadata(file).is_ok_and(|file| file.len() >= 24)
    });
}

fn finish(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    said
}

/// (seconds, microseconds, wire length, bytes) of each packet of a pcap file. The last packet counts
/// when all its bytes are there: the kernel shows a write that crosses a page in two steps.
fn packets(path: &str) -> Vec<(u32, u32, u32, Vec<u8>)> {
    let bytes = std::fs::read(Path::new(path)).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(word(0), 0xa1b2_c3d4, "{path}");
    let (mut all, mut at) = (Vec::new(), 24);
    while at + 16 <= bytes.len() {
        let end = at + 16 + word(at + 8) as usize;
        let Some(data) = bytes.get(at + 16..end) else {
            break;
        };
        all.push((word(at), word(at + 4), word(at + 12), data.to_vec()));
        at = end;
    }
    all
}

#[test]
fn it_writes_the_packets_of_the_wire_in_their_order_and_time() {
    let bench = Bench::new();
    let (ours, real) = (bench.file("ours.pcap"), bench.file("real.pcap"));
    let write = |file: &str| ["-U", "-c", "5000", "-w", file].map(str::to_owned);
    let start = |is_ours: bool, device: &str, file: &str| {
        let args = write(file);
        let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
        args.extend(["-i", device, "udp and not port 1"]);
        let child = bench.tcpdump(is_ours, &args).spawn().unwrap();
        listens(file);
        child
    };
    let children = [
        start(true, "vnplug:wire", &ours),
        start(false, "wire1", &real),
    ];
    bench.send(5000);
    for child in children {
        let said = finish(child);
        assert!(said.contains("5000 packets captured"), "{said}");
        assert!(said.contains("\n0 packets dropped by kernel"), "{said}");
    }
    let (ours, real) = (packets(&ours), packets(&real));
    assert_eq!((ours.len(), real.len()), (5000, 5000));
    for (ours, real) in ours.iter().zip(&real) {
        assert_eq!((ours.2, &ours.3), (real.2, &real.3));
        let us = |packet: &(u32, u32, u32, Vec<u8>)| {
            i64::from(packet.0) * 1_000_000 + i64::from(packet.1)
        };
        // Two sockets of one kernel, which stamps each packet once for each of them.
        assert!((us(ours) - us(real)).abs() < 1_000_000, "{ours:?} {real:?}");
    }
}

#[test]
fn two_of_a_group_share_one_copy_and_each_has_its_filter() {
    let bench = Bench::new();
    let start = |device: &str, filter: &str, file: &str| {
        let args = ["-U", "-i", device, "-w", file, filter];
        let child = bench.tcpdump(true, &args).spawn().unwrap();
        listens(file);
        child
    };
    let files = ["short", "long", "alone"].map(|name| bench.file(&format!("{name}.pcap")));
    let children = [
        start("vnplug:wire/ids", "udp and less 300", &files[0]),
        start("host:wire/ids", "udp and greater 700", &files[1]),
        start("vnplug:wire", "udp", &files[2]),
    ];
    bench.send_long(2000, 200);
    bench.send_long(500, 500);
    bench.send_long(1000, 900);
    let counts = [2000, 1000, 3500];
    for (file, count) in files.iter().zip(counts) {
        eventually("they were written", || packets(file).len() == count);
    }
    let counters = bench.daemon.audit();
    let ports = || counters.iter().filter(|one| one.kind == "port");
    let members: Vec<_> = ports().filter(|one| label(one, "group") == "ids").collect();
    assert_eq!((members.len(), ports().count()), (2, 3), "{counters:?}");
    // What neither of them wants is not copied.
    assert_eq!(value(members[0], "arena_copies"), 3000, "{members:?}");
    for (child, count) in children.into_iter().zip(counts) {
        signal(child.id(), "INT");
        let said = finish(child);
        assert!(
            said.contains(&format!("{count} packets captured")),
            "{said}"
        );
        assert!(said.contains("\n0 packets dropped by kernel"), "{said}");
    }
    // Together they have what the third has, byte by byte.
    let [short, long, alone] = files.map(|file| packets(&file));
    let bytes = |all: &[(u32, u32, u32, Vec<u8>)]| -> Vec<Vec<u8>> {
        all.iter().map(|packet| packet.3.clone()).collect()
    };
    let of = |wanted: fn(u32) -> bool| -> Vec<_> {
        alone.iter().filter(|one| wanted(one.2)).cloned().collect()
    };
    assert!(bytes(&short) == bytes(&of(|len| len <= 300)));
    assert!(bytes(&long) == bytes(&of(|len| len >= 700)));
}

#[test]
fn interrupted_it_tells_its_statistics() {
    let bench = Bench::new();
    let file = bench.file("x.pcap");
    let child = bench
        .tcpdump(true, &["-U", "-i", "host:wire", "-w", &file, "udp"])
        .spawn()
        .unwrap();
    listens(&file);
    bench.send(1000);
    eventually("tcpdump wrote them", || packets(&file).len() == 1000);
    signal(child.id(), "INT");
    let said = finish(child);
    for part in [
        "1000 packets captured",
        "1000 packets received by filter",
        "0 packets dropped by kernel",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn without_its_rights_it_is_told_that_a_new_daemon_refuses_it() {
    let mut bench = Bench::new();
    let mut child = bench
        .tcpdump(true, &["-Z", "nobody", "-i", "host:wire"])
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    while !said.contains("listening on") {
        assert_ne!(errors.read_line(&mut said).unwrap(), 0, "{said}");
    }
    bench.daemon.kill();
    bench.daemon.launch().unwrap();
    errors.read_to_string(&mut said).unwrap();
    assert!(!child.wait().unwrap().success(), "{said}");
    assert!(said.contains("not permitted"), "{said}");
}

#[test]
fn filters_with_vlan_and_ip6_run_on_the_host() {
    for (filter, wanted) in [("vlan", 0), ("ip6", 0), ("vlan and ip6", 0), ("ip", 300)] {
        // Each begins with an empty wire: frames that the source has yet to read are nobody's.
        let bench = Bench::new();
        let file = bench.file(&format!("{}.pcap", filter.replace(' ', "-")));
        let child = bench
            .tcpdump(true, &["-U", "-i", "host:wire", "-w", &file, filter])
            .spawn()
            .unwrap();
        listens(&file);
        bench.send(300);
        if wanted > 0 {
            eventually("they were written", || packets(&file).len() == wanted);
        }
        signal(child.id(), "INT");
        let said = finish(child);
        assert!(
            said.contains(&format!("{wanted} packets received by filter")),
            "{said}"
        );
    }
    let said = Bench::new()
        .tcpdump(true, &["-i", "host:wire", "ip prot 5"])
        .output()
        .unwrap();
    assert!(!said.status.success() && text(&said).contains("syntax error"));
}

#[test]
fn vlan_and_ip6_filters_pass_what_tcpdump_passes_from_a_file() {
    let lab = Lab::new().unwrap();
    let drop_in = DropIn::new(&lab);
    let source = "lab=gen,pps=50000,count=20000,run=1,size=128,flows=6,vlan=5,\
                  protocols=udp4+tcp4+udp6+icmp6";
    let capture = |filter: &str| {
        let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
        let file = lab.dir().join("x.pcap");
        let output = Command::new("tcpdump")
            .args(["-n", "-Z", "root", "-i", "vnplug:lab", filter, "-w"])
            .arg(&file)
            .env("LD_LIBRARY_PATH", &drop_in.dir)
            .env("VNPLUG_SOCKET", daemon.socket())
            .output()
            .unwrap();
        // The generator has an end, which a live device does not have.
        assert!(text(&output).contains("the source ended"), "{output:?}");
        std::fs::read(&file).unwrap();
        file
    };
    let whole = lab.dir().join("whole.pcap");
    std::fs::rename(capture(""), &whole).unwrap();
    for filter in ["vlan 5 and ip6", "vlan and tcp", "vlan 6", "ip6"] {
        let ours = packets(capture(filter).to_str().unwrap());
        let cut = lab.dir().join("cut.pcap");
        let output = Command::new("tcpdump")
            .args(["-n", "-Z", "root", filter, "-r"])
            .arg(&whole)
            .arg("-w")
            .arg(&cut)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let real = packets(cut.to_str().unwrap());
        let bytes = |all: &[(u32, u32, u32, Vec<u8>)]| -> Vec<Vec<u8>> {
            all.iter().map(|packet| packet.3.clone()).collect()
        };
        // What came before the filter was set was judged by it all the same.
        assert!(bytes(&ours) == bytes(&real), "{filter}");
        assert_eq!(
            ours.is_empty(),
            ["vlan 6", "ip6"].contains(&filter),
            "{filter}"
        );
    }
}

#[test]
fn a_vanished_interface_ends_it_as_a_real_one_does() {
    let bench = Bench::new();
    let file = bench.file("gone.pcap");
    let args = ["-U", "-i", "vnplug:wire", "-w", &file];
    let child = bench.tcpdump(true, &args).spawn().unwrap();
    listens(&file);
    bench.send(10);
    eventually("they were written", || packets(&file).len() >= 10);
    let deleted = bench
        .netns
        .command("ip")
        .args(["link", "del", "wire0"])
        .status();
    assert!(deleted.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("The interface disappeared"), "{said}");
}

#[test]
fn who_waits_by_himself_or_not_at_all_is_told_of_a_vanished_interface() {
    let bench = Bench::new();
    let program = built(&bench.lab, "vanish.c");
    let mut children: Vec<_> = ["select", "poll", "edge", "next", "spin"]
        .into_iter()
        .map(|way| {
            let mut command = limited(&program);
            command.args(["vnplug:wire", way]).stdout(Stdio::piped());
            command.env("LD_LIBRARY_PATH", &bench.drop_in.dir);
            command.env("VNPLUG_SOCKET", bench.daemon.socket());
            let mut child = command.spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert_eq!(lines.next().unwrap().unwrap(), "listening");
            (way, child, lines)
        })
        .collect();
    // A quiet while before and after, in which they look and find it in its place.
    std::thread::sleep(Duration::from_millis(2500));
    bench.send(10);
    std::thread::sleep(Duration::from_millis(2500));
    let deleted = bench
        .netns
        .command("ip")
        .args(["link", "del", "wire0"])
        .status();
    assert!(deleted.unwrap().success());
    for (way, child, lines) in &mut children {
        let said: Vec<_> = lines.map(Result::unwrap).collect();
        assert!(child.wait().unwrap().success(), "{way}");
        assert_eq!(said, ["ok"], "{way}");
    }
}

#[test]
fn what_cannot_be_sent_is_refused() {
    let bench = Bench::new();
    let refuses = |what: &str| {
        let mut command = bench.netns.command("timeout");
        command
            .args(["-s", "KILL", "120"])
            .arg(&bench.drop_in.program);
        command.args(["refuse", "vnplug:wire", what]);
        command.env("LD_LIBRARY_PATH", &bench.drop_in.dir);
        said_ok(command.env("VNPLUG_SOCKET", bench.daemon.socket()));
    };
    refuses("lengths");
    let down = bench
        .netns
        .command("ip")
        .args(["link", "set", "wire1", "down"])
        .status();
    assert!(down.unwrap().success());
    refuses("down");
}

#[test]
fn what_one_handle_sends_others_see_as_on_a_real_interface() {
    let bench = Bench::new();
    let program = built(&bench.lab, "seen.c");
    let run = |ours: bool, way: &str, count: &str| {
        let mut command = bench.netns.command("timeout");
        let device = if ours { "vnplug:wire" } else { "wire1" };
        command.args(["-s", "KILL", "120"]).arg(&program);
        command.args([way, device, count]).stdout(Stdio::piped());
        if ours {
            command.env("LD_LIBRARY_PATH", &bench.drop_in.dir);
            command.env("VNPLUG_SOCKET", bench.daemon.socket());
        }
        command
    };
    for ours in [true, false] {
        // Another program sees those of both handles.
        let mut other = run(ours, "listen", "11").spawn().unwrap();
        let mut lines = BufReader::new(other.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "listening");
        said_ok(&mut run(ours, "inject", "10"));
        assert_eq!(lines.next().unwrap().unwrap(), "ok");
        assert!(other.wait().unwrap().success());
    }
    let counters = bench.daemon.audit();
    let source = counted(&counters, "source");
    // What the real library's handles sent came by the kernel.
    assert_eq!(value(source, "shown"), 11);
}

#[test]
fn it_rotates_its_files() {
    let bench = Bench::new();
    let file = bench.file("rotated");
    let args = [
        "-U",
        "-i",
        "host:wire",
        "-c",
        "9000",
        "-C",
        "1",
        "-w",
        &file,
    ];
    let child = bench.tcpdump(true, &args).spawn().unwrap();
    listens(&file);
    bench.send(12_000);
    finish(child);
    let parts: Vec<usize> = [file.clone(), format!("{file}1")]
        .iter()
        .map(|part| packets(part).len())
        .collect();
    assert_eq!(parts.iter().sum::<usize>(), 9000, "{parts:?}");
}

#[test]
fn it_lists_ours_and_still_captures_on_real_devices() {
    let bench = Bench::new();
    let listed = text(&bench.tcpdump(true, &["-D"]).output().unwrap());
    assert!(
        listed.contains("wire1 [") && listed.contains("vnplug:wire (vNPlug"),
        "{listed}"
    );
    let file = bench.file("real.pcap");
    let child = bench
        .tcpdump(true, &["-U", "-i", "wire1", "-c", "500", "-w", &file])
        .spawn()
        .unwrap();
    listens(&file);
    bench.send(500);
    let said = finish(child);
    assert!(
        said.contains("listening on wire1") && packets(&file).len() == 500,
        "{said}"
    );
    let said = bench.tcpdump(true, &["-r", &file]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout).lines().count(), 500);
}
