//! Machines without shared memory on a switch: a QEMU that gets its card while it runs, and a User-mode
//! Linux, beside an interface of the kernel.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::process::Command;

use vnplug_e2e::daemon::{Daemon, counted, program, value};
use vnplug_e2e::station::{Running, Station, content};
use vnplug_e2e::{Guest, Image, Lab, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, eventually};

fn ok(guest: &Guest, command: &str) {
    let done = guest.run(command, PATIENCE).unwrap();
    assert!(done.success(), "{command}: {}", done.text());
}

/// The switch with all entrances of this kind.
fn daemon(lab: &Lab) -> Daemon {
    let path = |name: &str| lab.dir().join(name).display().to_string();
    let [stream, bess, dgram] = ["lan0.stream", "lan0.bess", "lan0.dgram"].map(path);
    let spec = format!("lan0,stream={stream},bess={bess},dgram={dgram}");
    Daemon::start(lab, None, &["--switch", &spec]).unwrap()
}

fn vnplug(daemon: &Daemon, args: &[&str]) -> String {
    let (code, text) = daemon.vnplug(args);
    assert_eq!(code, Some(0), "{args:?}: {text}");
    text
}

fn ports(daemon: &Daemon, count: u64) {
    eventually("the ports are right", || {
        value(counted(&daemon.counters(), "source"), "switch_ports") == count
    });
}

/// Bytes go to the guest and come back, and are what they were.
fn bulk(guest: &Guest, station: &Station, bytes: &[u8]) {
    let address = format!("{}:7000", station.address);
    let listener = station.netns.enter(|| TcpListener::bind(&address));
    let listener = listener.unwrap().unwrap();
    std::thread::scope(|scope| {
        let far = scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(bytes).unwrap();
            drop(stream);
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut back = Vec::new();
            stream.read_to_end(&mut back).unwrap();
            back
        });
        ok(
            guest,
            &format!("nc {} 7000 </dev/null >/tmp/bulk", station.address),
        );
        ok(guest, &format!("nc {} 7000 </tmp/bulk", station.address));
        assert!(far.join().unwrap() == bytes, "what came back differs");
    });
}

#[test]
fn a_running_qemu_gets_a_card_on_a_switch_and_loses_it_again() {
    let lab = Lab::new().unwrap();
    let mut daemon = daemon(&lab);
    let station = Station::by_nic(&lab, &daemon, "lan0", "10.77.2.1", &[]).unwrap();
    let config = QemuConfig {
        image: Image::default().module("virtio_net"),
        ..QemuConfig::default()
    };
    let guest = Qemu::boot(&lab, config).unwrap();
    let qmp = guest.qmp_path().unwrap().display().to_string();
    let attach = ["attach", "qemu", "--name", "q", "--qmp", &qmp, "--nic"];
    let detach = ["detach", "qemu", "--name", "q", "--qmp", &qmp];
    let up = "ip addr add 10.77.2.2/24 dev eth0 && ip link set eth0 up";
    let card_is_there = |is_there: bool| {
        eventually("the card is right", || {
            let seen = guest.run("test -e /sys/class/net/eth0", PATIENCE).unwrap();
            seen.success() == is_there
        });
    };
    // What is not possible is said before anything is done.
    let refused = daemon.vnplug(&[&attach[..], &["lan7"]].concat());
    assert!(
        refused.0 == Some(1) && refused.1.contains("there are lan0"),
        "{refused:?}"
    );
    let refused = daemon.vnplug(&[&attach[..], &["lan0,via=vhost"]].concat());
    assert!(
        refused.0 == Some(1) && refused.1.contains("give it vhost=PATH"),
        "{refused:?}"
    );

    let said = vnplug(&daemon, &[&attach[..], &["lan0,via=dgram"]].concat());
    assert!(
        said.contains("virtio-net-pci 02:") && said.contains("by dgram"),
        "{said}"
    );
    let again = vnplug(&daemon, &[&attach[..], &["lan0"]].concat());
    assert!(again.contains("nothing to do"), "{again}");
    card_is_there(true);
    ok(&guest, up);
    ports(&daemon, 2);
    let hear_each_other = || {
        // First the guest: the station may remember another card's address.
        ok(&guest, "ping -c 3 10.77.2.1");
        assert!(station.pings("10.77.2.2"));
    };
    hear_each_other();
    let bytes = content(2 << 20);
    bulk(&guest, &station, &bytes);
    daemon.audit();
    // Datagrams find the next daemon by themselves.
    daemon.kill();
    daemon.launch().unwrap();
    ports(&daemon, 2);
    hear_each_other();
    bulk(&guest, &station, &bytes);

    let said = vnplug(&daemon, &[&detach[..], &["--nic", "lan0"]].concat());
    assert!(said.contains("unplugged the interface on lan0"), "{said}");
    card_is_there(false);
    ports(&daemon, 1);
    eventually("nothing is left of the pair", || {
        std::fs::read_dir(lab.dir().join("lan0.dgram"))
            .unwrap()
            .count()
            == 0
    });
    let (code, said) = daemon.vnplug(&[&detach[..], &["--nic"]].concat());
    assert!(
        code == Some(1) && said.contains("no such interface"),
        "{said}"
    );

    let said = vnplug(
        &daemon,
        &[&attach[..], &["lan0,via=stream,mac=52:54:00:77:02:02"]].concat(),
    );
    assert!(
        said.contains("52:54:00:77:02:02 on lan0 by stream"),
        "{said}"
    );
    card_is_there(true);
    ok(&guest, up);
    hear_each_other();
    bulk(&guest, &station, &bytes);
    daemon.audit();
    daemon.kill();
    daemon.launch().unwrap();
    if !said.contains("by itself") {
        // Before QEMU 8.0: a new card. Without --nic everything of that name goes.
        vnplug(&daemon, &detach);
        card_is_there(false);
        vnplug(&daemon, &[&attach[..], &["lan0,via=stream"]].concat());
        card_is_there(true);
        ok(&guest, up);
    }
    ports(&daemon, 2);
    hear_each_other();
    vnplug(&daemon, &[&detach[..], &["--nic"]].concat());
    card_is_there(false);
    ports(&daemon, 1);
    daemon.audit();
}

#[test]
fn a_running_qemu_whose_memory_is_shared_gets_a_card_by_vhost_user() {
    let lab = Lab::new().unwrap();
    let path = |name: &str| lab.dir().join(name).display().to_string();
    let (vhost, stream) = (path("lan0.vhost"), path("lan0.stream"));
    let spec = format!("lan0,vhost={vhost},stream={stream}");
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let station = Station::by_nic(&lab, &daemon, "lan0", "10.77.2.1", &[]).unwrap();
    let boot = |memory: &[&str]| {
        let config = QemuConfig {
            image: Image::default().module("virtio_net"),
            qemu_args: memory.iter().copied().map(str::to_owned).collect(),
            ..QemuConfig::default()
        };
        Qemu::boot(&lab, config).unwrap()
    };
    let qmp = |guest: &Guest| guest.qmp_path().unwrap().display().to_string();
    // The control: one whose memory is its own.
    let private = boot(&[]);
    let attach = ["attach", "qemu", "--name", "p", "--qmp", &qmp(&private)];
    let refused = daemon.vnplug(&[&attach[..], &["--nic", "lan0,via=vhost"]].concat());
    assert!(
        refused.0 == Some(1) && refused.1.contains("memory that is shared"),
        "{refused:?}"
    );
    private.kill();

    let memory = "memory-backend-memfd,id=ram,size=256M,share=on";
    let guest = boot(&["-object", memory, "-numa", "node,memdev=ram"]);
    let qmp = qmp(&guest);
    let attach = ["attach", "qemu", "--name", "q", "--qmp", &qmp, "--nic"];
    let detach = ["detach", "qemu", "--name", "q", "--qmp", &qmp, "--nic"];
    let card = "test -e /sys/class/net/eth0";
    for spec in ["lan0,via=vhost", "lan0"] {
        // By itself it is that way, too.
        let said = vnplug(&daemon, &[&attach[..], &[spec]].concat());
        assert!(said.contains("by vhost"), "{said}");
        eventually("the card is there", || {
            guest.run(card, PATIENCE).unwrap().success()
        });
        ok(
            &guest,
            "ip addr add 10.77.2.2/24 dev eth0 && ip link set eth0 up",
        );
        ports(&daemon, 2);
        let (_, shown) = daemon.vnplug(&["switch", "show", "lan0"]);
        assert!(shown.contains("vhost-user"), "{shown}");
        ok(&guest, "ping -c 3 10.77.2.1");
        assert!(station.pings("10.77.2.2"));
        bulk(&guest, &station, &content(2 << 20));
        daemon.audit();
        // Its chardev connects again.
        daemon.kill();
        daemon.launch().unwrap();
        ports(&daemon, 2);
        ok(&guest, "ping -c 3 10.77.2.1");
        bulk(&guest, &station, &content(2 << 20));
        daemon.audit();
        vnplug(&daemon, &[&detach[..], &["lan0"]].concat());
        eventually("the card is gone", || {
            !guest.run(card, PATIENCE).unwrap().success()
        });
        ports(&daemon, 1);
    }
}

#[test]
fn a_user_mode_linux_joins_by_packets_of_a_socket() {
    let lab = Lab::new().unwrap();
    let mut daemon = daemon(&lab);
    let station = Station::by_nic(&lab, &daemon, "lan0", "10.77.3.1", &[]).unwrap();
    // The argument is the one that the command would run it with.
    let attach = ["attach", "uml", "--name", "u", "--nic", "lan0", "--print"];
    let said = vnplug(&daemon, &[&attach[..], &["--", "linux.uml"]].concat());
    let word = said
        .split_whitespace()
        .find(|it| it.starts_with("vec0:transport=bess,"));
    let word = word.unwrap_or_else(|| panic!("{said}")).to_owned();
    let config = UmlConfig {
        kernel_args: vec![word],
        ..UmlConfig::default()
    };
    let guest = Uml::boot(&lab, config).unwrap();
    ok(
        &guest,
        "ip addr add 10.77.3.2/24 dev vec0 && ip link set vec0 up",
    );
    ports(&daemon, 2);
    assert!(station.pings("10.77.3.2"));
    ok(&guest, "ping -c 3 10.77.3.1");
    let bytes = content(2 << 20);
    bulk(&guest, &station, &bytes);
    daemon.audit();
    daemon.kill();
    daemon.launch().unwrap();
    // Its driver connects when it is set up, and only then.
    ok(&guest, "ip link set vec0 down && ip link set vec0 up");
    ports(&daemon, 2);
    assert!(station.pings("10.77.3.2"));
    bulk(&guest, &station, &bytes);
    daemon.audit();
}

#[test]
fn a_user_mode_linux_that_is_attached_has_a_card_on_each_switch() {
    let lab = Lab::new().unwrap();
    let path = |name: &str| lab.dir().join(name).display().to_string();
    let (bess, vhost) = (path("lan0.bess"), path("lan1.vhost"));
    let specs = [format!("lan0,bess={bess}"), format!("lan1,vhost={vhost}")];
    let args = ["--switch", &specs[0], "--switch", &specs[1]];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let [one, two] = [("lan0", "10.77.4.1"), ("lan1", "10.77.5.1")].map(|(switch, address)| {
        let station = Station::by_nic(&lab, &daemon, switch, address, &[]);
        station.unwrap()
    });
    // The command, and the guest with it, ends with the lab.
    let aside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let (vnplug, socket) = (program("vnplug").unwrap(), daemon.socket());
    let by = [vnplug, "--socket".into(), socket].map(|it| it.display().to_string());
    let attach = ["attach", "uml", "--name", "u"];
    let nics = ["--nic", "lan0", "--nic", "lan1", "--"];
    let words = aside.iter().copied().chain(by.iter().map(String::as_str));
    let config = UmlConfig {
        starter: words.chain(attach).chain(nics).map(str::to_owned).collect(),
        image: Image::default().module("virtio_net"),
        ..UmlConfig::default()
    };
    let guest = Uml::boot(&lab, config).unwrap();
    for (card, address, station) in [("vec0", "10.77.4.2", &one), ("eth0", "10.77.5.2", &two)] {
        let up = format!("ip addr add {address}/24 dev {card} && ip link set {card} up");
        ok(&guest, &up);
        ok(&guest, &format!("ping -c 3 {}", station.address));
        assert!(station.pings(address), "{card}");
        bulk(&guest, station, &content(2 << 20));
    }
    let (_, shown) = daemon.vnplug(&["switch", "show", "lan1"]);
    assert!(shown.contains("vhost-user"), "{shown}");
    daemon.audit();
}

#[test]
fn clients_of_another_pid_namespace_join_and_are_not_taken_for_each_other() {
    let lab = Lab::new().unwrap();
    let path = |name: &str| lab.dir().join(name);
    let [control, dir, stream, vhost] =
        ["socket", "lan0.ctl", "lan0.stream", "lan0.vhost"].map(path);
    let [dir_text, stream_text, vhost_text] = [&dir, &stream, &vhost].map(|it| it.display());
    let spec = format!("lan0,vde={dir_text},stream={stream_text},vhost={vhost_text}");
    // The daemon sees no number of a process out here.
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child"])
        .arg(program("vnplugd").unwrap())
        .arg("--socket")
        .arg(&control)
        .arg("--pool-dir")
        .arg(lab.dir())
        .args(["--switch", &spec]);
    let _daemon = Running::start(command, &lab, "vnplugd").unwrap();
    let vnplug = |args: &[&str]| {
        let mut command = Command::new(program("vnplug").unwrap());
        let output = command.arg("--socket").arg(&control).args(args).output();
        String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
    };
    let has = |count: usize, way: &str| {
        eventually("the ports are there", || {
            let shown = vnplug(&["switch", "show", "lan0"]);
            shown.matches("another PID namespace").count() == count && shown.contains(way)
        });
    };
    eventually("the switch is there", || vnplug(&["list"]).contains("lan0"));
    let _stream = UnixStream::connect(&stream).unwrap();
    has(1, "stream");
    // Get the features (vhost-user: request 1, version 1, no payload): who speaks has a port.
    let guests = [(); 2].map(|()| {
        let mut socket = UnixStream::connect(&vhost).unwrap();
        socket
            .write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
            .unwrap();
        socket
    });
    has(3, "vhost-user");
    drop(guests);
    has(1, "stream");
    let _station = Station::by_vde(&lab, &dir, "10.77.9.1").unwrap();
    let shown = vnplug(&["switch", "show", "lan0"]);
    assert!(shown.contains("vde_plug2tap"), "{shown}");
}
