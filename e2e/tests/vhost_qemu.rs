//! What a front-end of QEMU does beyond one ring of each kind: it listens, has several pairs of queues, and
//! moves its guest to another QEMU.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::{Running, Station};
use vnplug_e2e::{Guest, Image, Lab, Qemu, QemuConfig, Qmp};
use vnplug_testing::{PATIENCE, eventually};

fn ran(guest: &Guest, command: &str) -> String {
    let done = guest.run(command, PATIENCE).unwrap();
    assert!(done.success(), "{command}: {}", done.text());
    done.text().to_owned()
}

/// A guest with one card, which has this number of `pairs` of queues; `socket` is what follows its chardev's path.
fn boot(lab: &Lab, socket: &str, pairs: u32) -> Guest {
    let config = QemuConfig {
        cpus: pairs,
        image: Image::default()
            .program("/usr/sbin/ethtool")
            .module("virtio_net"),
        qemu_args: QemuConfig::vhost_user(socket, pairs, MAC),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(lab, config).unwrap();
    ran(
        &guest,
        "ip addr add 10.77.4.1/24 dev eth0 && ip link set eth0 up",
    );
    guest
}

/// What the card offers the guest, or does not.
fn offers(guest: &Guest, state: &str) {
    let features = ran(guest, "ethtool -k eth0");
    for name in [
        "tcp-segmentation-offload",
        "tx-checksumming",
        "scatter-gather",
    ] {
        let due = format!("{name}: {state}");
        assert!(features.contains(&due), "{due}: {features}");
    }
}

fn ports(daemon: &Daemon) -> u64 {
    value(counted(&daemon.counters(), "source"), "switch_ports")
}

#[test]
fn a_qemu_that_listens_is_connected_to_and_again_by_the_next_daemon() {
    let lab = Lab::new().unwrap();
    let (socket, dir) = (lab.dir().join("guest.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!(
        "lan0,vhostconnect={},vde={}",
        socket.display(),
        dir.display()
    );
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let listening = format!("{},server=on,wait=off", socket.display());
    let guest = boot(&lab, &listening, 1);
    for round in 0..3 {
        let station = Station::by_vde(&lab, &dir, "10.77.4.9").unwrap();
        eventually("it is there", || ports(&daemon) == 2);
        assert!(station.pings("10.77.4.1"), "{round}");
        ran(&guest, "ping -c 3 10.77.4.9");
        daemon.audit();
        daemon.kill();
        daemon.launch().unwrap();
    }
}

/// Bytes of each frame that a guest's card was given, or gave, while this ran; in the mean.
fn mean(guest: &Guest, direction: &str, run: impl FnOnce()) -> f64 {
    let read = |what: &str| -> f64 {
        let file = format!("/sys/class/net/eth0/statistics/{direction}_{what}");
        ran(guest, &format!("cat {file}")).trim().parse().unwrap()
    };
    let before = ["bytes", "packets"].map(read);
    run();
    let after = ["bytes", "packets"].map(read);
    (after[0] - before[0]) / (after[1] - before[1])
}

#[test]
fn a_guest_of_qemu_gives_and_is_given_super_frames_of_a_bulk_stream() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("lan0.sock");
    let spec = format!("lan0,vhost={}", socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let guest = boot(&lab, &format!("{},reconnect=1", socket.display()), 1);
    let station = Station::by_nic(&lab, &daemon, "lan0", "10.77.4.9", &[]).unwrap();
    assert!(station.pings("10.77.4.1"));
    let bytes = vnplug_e2e::station::content(8 << 20);
    let listen = || {
        let listener = station.netns.enter(|| TcpListener::bind("10.77.4.9:7000"));
        listener.unwrap().unwrap()
    };
    let given = || {
        let listener = listen();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                stream.write_all(&bytes).unwrap();
            });
            ran(&guest, "nc 10.77.4.9 7000 </dev/null >/tmp/bulk");
        });
    };
    let gives = || {
        let listener = listen();
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut all = Vec::new();
                stream.read_to_end(&mut all).unwrap();
                all
            });
            ran(&guest, "nc 10.77.4.9 7000 </tmp/bulk");
            assert!(taken.join().unwrap() == bytes);
        });
    };
    let means = [mean(&guest, "rx", given), mean(&guest, "tx", gives)];
    // Its program writes some kilobytes at a time.
    assert!(means.iter().all(|mean| *mean > 3_000.0), "{means:?}");
    // The control: the switch cuts for it, and it cuts itself.
    let set = ["switch", "set", "lan0/port1", "tso=off"];
    assert_eq!(daemon.vnplug(&set).0, Some(0));
    ran(&guest, "ethtool -K eth0 tso off gso off");
    let cut = [mean(&guest, "rx", given), mean(&guest, "tx", gives)];
    assert!(cut.iter().all(|mean| *mean <= 1514.0), "{cut:?}");
    println!("bytes of a frame, given and taken: {means:?}; cut: {cut:?}");
    daemon.audit();
}

#[test]
fn a_guest_of_qemu_with_two_pairs_of_queues_uses_both_each_way() {
    let lab = Lab::new().unwrap();
    let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!("lan0,vhost={},vde={}", socket.display(), dir.display());
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let guest = boot(&lab, &format!("{},reconnect=1", socket.display()), 2);
    let queues = ran(&guest, "ls /sys/class/net/eth0/queues");
    for queue in ["rx-0", "rx-1", "tx-0", "tx-1"] {
        assert!(queues.contains(queue), "{queues}");
    }
    let is_used = |direction: &str, queue: u32| {
        let statistics = ran(&guest, "ethtool -S eth0");
        let name = format!("{direction}_queue_{queue}_packets: ");
        let line = statistics.lines().find_map(|line| line.split_once(&name));
        let (_, count) = line.unwrap_or_else(|| panic!("no {name}: {statistics}"));
        count.trim().parse::<u64>().unwrap()
    };
    for _ in 0..2 {
        let station = Station::by_vde(&lab, &dir, "10.77.4.9").unwrap();
        assert!(station.pings("10.77.4.1"));
        let all = [("rx", 0), ("rx", 1), ("tx", 0), ("tx", 1)];
        let before = all.map(|(direction, queue)| is_used(direction, queue));
        // Each connection is a flow, and is sent by the queue of the processor that sends.
        ran(
            &guest,
            "mkdir -p /tmp/www && echo there >/tmp/www/it && (pidof httpd || httpd -p 7000 -h /tmp/www)",
        );
        eventually("all four move frames", || {
            let get = ["wget", "-q", "-O", "-", "http://10.77.4.1:7000/it"];
            let got = station.netns.exec(&get).unwrap();
            assert_eq!(got.trim(), "there");
            for processor in ["1", "2"] {
                ran(&guest, &format!("taskset {processor} ping -c 1 10.77.4.9"));
            }
            all.map(|(direction, queue)| is_used(direction, queue))
                .iter()
                .zip(before)
                .all(|(now, before)| *now > before)
        });
        daemon.audit();
        // The next one finds both pairs.
        daemon.kill();
        daemon.launch().unwrap();
        eventually("it is back", || ports(&daemon) >= 1);
    }
}

#[test]
fn a_guest_of_qemu_whose_port_does_without_offloads_comes_again_after_a_restart() {
    let lab = Lab::new().unwrap();
    let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!("lan0,vhost={},vde={}", socket.display(), dir.display());
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let chardev = format!("{},reconnect=1", socket.display());
    let guest = boot(&lab, &chardev, 1);
    offers(&guest, "on");
    let pings = || {
        let station = Station::by_vde(&lab, &dir, "10.77.4.9").unwrap();
        eventually("it answers", || station.pings("10.77.4.1"));
    };
    pings();
    // Its driver has agreed to what a card of then does not offer.
    let (code, said) = daemon.vnplug(&["switch", "set", "lan0", "default.csum=off"]);
    assert_eq!(code, Some(0), "{said}");
    pings();
    daemon.kill();
    daemon.launch().unwrap();
    let (_, shown) = daemon.vnplug(&["switch", "show", "lan0"]);
    assert!(shown.contains("default.csum"), "{shown}");
    pings();
    offers(&guest, "on");
    drop(guest);
    // The next one finds a card that offers nothing.
    let guest = boot(&lab, &chardev, 1);
    offers(&guest, "off");
    pings();
}

/// The command line of a running QEMU, for another one that waits for its guest at `incoming`: with sockets
/// of its own, in this directory, and nobody at the ends of its lab's channels.
fn twin(guest: &Guest, dir: &Path, incoming: &Path) -> Command {
    let line = std::fs::read_to_string(format!("/proc/{}/cmdline", guest.pid())).unwrap();
    let mut arguments = line.split_terminator('\0');
    let mut command = Command::new(arguments.next().unwrap());
    let (theirs, ours) = (guest.dir().to_str().unwrap(), dir.to_str().unwrap());
    for argument in arguments {
        let argument = match argument.split_once(",fd=") {
            Some((chardev, _)) => chardev.replacen("socket", "null", 1),
            None if argument.ends_with("initramfs") => argument.to_owned(),
            None => argument.replace(theirs, ours),
        };
        command.arg(argument);
    }
    command.args(["-incoming", &format!("unix:{}", incoming.display())]);
    command
}

#[test]
fn a_guest_of_qemu_that_migrates_under_traffic_has_all_that_was_written_to_it() {
    let lab = Lab::new().unwrap();
    let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!("lan0,vhost={},vde={}", socket.display(), dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let guest = boot(&lab, &format!("{},reconnect=1", socket.display()), 1);
    let station = Station::by_vde(&lab, &dir, "10.77.4.9").unwrap();

    // What the guest takes all the time it writes to its memory, and says what it has there.
    let content = lab.dir().join("www");
    std::fs::create_dir(&content).unwrap();
    let bytes = vnplug_e2e::station::content(2 << 20);
    std::fs::write(content.join("bulk"), bytes).unwrap();
    let mut server = station.netns.command("busybox");
    server
        .args(["httpd", "-f", "-p", "7000", "-h"])
        .arg(&content);
    let _server = Running::start(server, &lab, "httpd").unwrap();
    let sum = Command::new("sha256sum").arg(content.join("bulk")).output();
    let sum = String::from_utf8(sum.unwrap().stdout).unwrap();
    let sum = sum.split_whitespace().next().unwrap().to_owned();
    ran(&guest, "mkdir -p /tmp/www && httpd -p 7000 -h /tmp/www");
    let take = "at=0; while :; do \
        wget -q -O /tmp/take http://10.77.4.9:7000/bulk || echo failed >>/tmp/www/log; \
        mv /tmp/take /tmp/keep.$((at % 8)); at=$((at + 1)); \
        for it in /tmp/keep.*; do sha256sum <$it; done >>/tmp/www/log; done";
    let _taking = guest.spawn(take).unwrap();
    let log = || {
        let get = [
            "wget",
            "-q",
            "-T",
            "5",
            "-O",
            "-",
            "http://10.77.4.1:7000/log",
        ];
        station.netns.exec(&get).unwrap_or_default()
    };
    eventually("it takes", || log().lines().count() > 8);

    let target_dir = lab.dir().join("target");
    std::fs::create_dir(&target_dir).unwrap();
    let incoming = lab.dir().join("incoming");
    let target = twin(&guest, &target_dir, &incoming);
    let target = Running::start(target, &lab, "target").unwrap();
    eventually("the target waits", || incoming.exists());
    let mut qmp = guest.qmp().unwrap();
    let speed = json!({ "max-bandwidth": 1_u64 << 30, "downtime-limit": 2000 });
    qmp.execute("migrate-set-parameters", speed).unwrap();
    let to = format!("unix:{}", incoming.display());
    qmp.execute("migrate", json!({ "uri": to })).unwrap();
    let mut told = json!(null);
    eventually("it has migrated", || {
        told = qmp.execute("query-migrate", json!({})).unwrap();
        assert_ne!(told["status"], "failed", "{told} {}", target.errors());
        told["status"] == "completed"
    });
    println!("{told}");
    // What is left is not the guest any more.
    guest.kill();
    eventually("it runs there", || {
        let mut qmp = Qmp::connect(&target_dir.join("qmp-lab")).unwrap();
        let told = qmp.execute("query-status", json!({})).unwrap();
        told["status"] == "running"
    });
    assert!(station.pings("10.77.4.1"));
    let before = log().lines().count();
    eventually("it goes on to take", || log().lines().count() > before + 16);
    let log = log();
    let whole = &log[..log.rfind('\n').unwrap()];
    for (number, line) in whole.lines().enumerate() {
        assert!(line.starts_with(&sum), "{number}: {line}");
    }
    eventually("one port is left of two", || ports(&daemon) == 2);
    daemon.audit();
}

/// The card's address.
const MAC: &str = "52:54:00:77:04:01";
