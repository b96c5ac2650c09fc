//! A switch of the daemon with programs of VDE that nobody here wrote.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use vnplug::offload::{self, Offload};
use vnplug::{Next, Port, PortOptions, Segments};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::ends::{all_fetch_files, all_ping, take_addresses};
use vnplug_e2e::station::{Running, Station, content};
use vnplug_e2e::user::{USER, as_member, open_to_all};
use vnplug_e2e::{Guest, Image, Lab, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_testing::{eventually, until};

#[test]
fn programs_of_vde_are_on_one_wire_which_captures_like_any_other() {
    let lab = Lab::new().unwrap();
    let path = |name: &str| lab.dir().join(name);
    let [ours, second, theirs] = ["lan0.ctl", "lan1.ctl", "vde.ctl"].map(path);
    let switches = [("lan0", &ours), ("lan1", &second)];
    let specs = switches.map(|(name, dir)| format!("{name},vde={}", dir.display()));
    let args = ["--switch", &specs[0], "--switch", &specs[1]];
    let daemon = Daemon::start(&lab, None, &args).unwrap();

    // A switch of VDE, and wires from ours to it and to our other one.
    let mut real = Command::new("vde_switch");
    real.arg("-s").arg(&theirs).arg("-x");
    let _real = Running::start(real, &lab, "vde_switch").unwrap();
    eventually("the other switch is there", || theirs.join("ctl").exists());
    let mut wire = Command::new("dpipe");
    wire.arg("vde_plug")
        .arg(&ours)
        .arg("=")
        .arg("vde_plug")
        .arg(&theirs);
    let _wire = Running::start(wire, &lab, "dpipe").unwrap();
    let mut filter = Command::new("wirefilter");
    let between = format!("{}:{}", ours.display(), second.display());
    filter.args(["--nofifo", "-v", &between, "-d", "5"]);
    let _filter = Running::start(filter, &lab, "wirefilter").unwrap();
    let mut slirp = Command::new("vde_plug");
    slirp
        .arg("slirp://")
        .arg(format!("vde://{}", ours.display()));
    let _slirp = Running::start(slirp, &lab, "slirp").unwrap();

    let one = Station::by_vde(&lab, &ours, "10.0.2.21").unwrap();
    let two = Station::by_vde(&lab, &ours, "10.0.2.22").unwrap();
    let three = Station::by_vde(&lab, &theirs, "10.0.2.23").unwrap();
    let four = Station::by_vde(&lab, &second, "10.0.2.24").unwrap();
    let joined = |name: &str| {
        let counters = daemon.counters();
        let of = counters
            .iter()
            .find(|it| it.kind == "source" && it.name == name);
        of.map_or(0, |it| value(it, "switch_ports"))
    };
    eventually("all have joined", || {
        joined("lan0") == 5 && joined("lan1") == 2
    });

    let mut reader = daemon.port("host:lan0").filter("icmp").open().unwrap();
    for station in [&one, &two, &three, &four] {
        for other in [&one, &two, &three, &four] {
            assert!(
                station.pings(&other.address),
                "{} {}",
                station.address,
                other.address
            );
        }
    }
    assert!(one.pings("10.0.2.2"), "slirp answers");
    // Each ping and its answer crossed lan0 once, but for those to oneself.
    let expected = (12 + 1) * 3 * 2;
    let mut captured = 0;
    eventually("all of it is captured", || {
        while let Next::Packet(_) = reader.next().unwrap() {
            captured += 1;
        }
        captured >= expected
    });
    assert_eq!(captured, expected);
    let bytes = content(10 << 20);
    for (from, to) in [(&one, &two), (&two, &three), (&three, &one), (&four, &one)] {
        assert!(
            from.sends(to, &bytes).unwrap() == bytes,
            "{} {}",
            from.address,
            to.address
        );
    }
    let counters = daemon.audit();
    let lan0 = counted(&counters, "source");
    assert!(value(lan0, "unicast") > 4 * (10 << 20) / 1514, "{lan0:?}");
}

#[test]
fn a_plug_that_tags_frames_itself_is_in_the_vlan_that_it_says() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    // What is untagged at the TAP has this tag on our switch.
    let tagging = |vlan: u32, address: &str| {
        let url = format!("vlan://{vlan}{{vde://{}}}", dir.display());
        Station::by_plug(&lab, url, &[], address).unwrap()
    };
    let (one, two) = (tagging(10, "10.77.7.1"), tagging(10, "10.77.7.2"));
    let other = tagging(20, "10.77.7.3");
    let plain = Station::by_vde(&lab, &dir, "10.77.7.4").unwrap();
    eventually("all have joined", || {
        value(counted(&daemon.counters(), "source"), "switch_ports") == 4
    });
    let filter = "vlan 10 and icmp";
    let mut reader = daemon.port("host:lan0").filter(filter).open().unwrap();
    // Tags pass a switch of which nothing is said.
    assert!(one.pings(&two.address));
    let mut tagged = 0;
    eventually("all of it is captured", || {
        while let Next::Packet(_) = reader.next().unwrap() {
            tagged += 1;
        }
        tagged >= 6
    });
    assert_eq!(tagged, 6);
    for station in [&other, &plain] {
        assert!(!one.pings(&station.address), "{}", station.address);
    }
    // Ports with VLANs: a trunk for each plug, and the plain one in VLAN 10 without a tag.
    for port in [1, 2, 3] {
        let args = ["switch", "set", &format!("lan0/port{port}"), "trunk=10+20"];
        assert_eq!(daemon.vnplug(&args).0, Some(0));
    }
    let args = ["switch", "set", "lan0/port4", "vlan=10"];
    assert_eq!(daemon.vnplug(&args).0, Some(0));
    for (from, to) in [(&one, &two), (&one, &plain), (&plain, &two)] {
        assert!(from.pings(&to.address), "{} {}", from.address, to.address);
    }
    let bytes = content(1 << 20);
    assert!(one.sends(&plain, &bytes).unwrap() == bytes);
    assert!(!other.pings(&plain.address));
    daemon.audit();
}

#[test]
fn guests_join_by_their_own_vde_drivers_and_have_what_each_end_serves() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let station = Station::by_vde(&lab, &dir, "10.77.1.1").unwrap();
    let uml = Uml::boot(
        &lab,
        UmlConfig {
            kernel_args: vec![format!("eth0=vde,{}", dir.display())],
            ..UmlConfig::default()
        },
    );
    let net = format!("vde,id=lan,sock={}", dir.display());
    let card = "virtio-net-pci,netdev=lan,mac=52:54:00:77:01:03";
    let qemu = Qemu::boot(
        &lab,
        QemuConfig {
            image: Image::default().module("virtio_net"),
            qemu_args: ["-netdev", &net, "-device", card]
                .map(str::to_owned)
                .to_vec(),
            ..QemuConfig::default()
        },
    );
    let guests: [(Guest, &str); 2] = [(uml.unwrap(), "10.77.1.2"), (qemu.unwrap(), "10.77.1.3")];
    take_addresses(&guests);
    all_ping(&station, &guests);
    all_fetch_files(&lab, &station, &guests, 10 << 20);
    // All of it was carried here: six transfers, in frames of 1,514 bytes at most.
    let counters = daemon.audit();
    let unicast = value(counted(&counters, "source"), "unicast");
    assert!(unicast > 6 * (10 << 20) / 1514, "{unicast}");
}

/// A TCP super-frame between two stations, as a guest leaves it to its NIC.
fn super_frame(to: u8, from: u8, payload: usize) -> (Vec<u8>, Offload) {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0];
    let len = (40 + payload) as u16;
    frame.extend([0x45, 0]);
    frame.extend(len.to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 3, from, 10, 0, 3, to]);
    frame.extend([
        0x1b, 0x58, 0x1b, 0x59, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 4, 0, 0, 0, 0, 0,
    ]);
    frame.extend(content(payload));
    let offload = Offload {
        flags: offload::flags::NEEDS_CSUM,
        gso_type: offload::gso::TCPV4,
        gso_size: 1460,
        csum_start: 34,
        csum_offset: 16,
    };
    (frame, offload)
}

/// The next packet of a port, within the patience of a test: its bytes and what is left to do with it.
fn next(port: &mut Port) -> (Vec<u8>, Offload) {
    let mut found = None;
    eventually("a packet is there", || {
        if let Next::Packet(packet) = port.next().unwrap() {
            found = Some((packet.bytes.to_vec(), packet.meta.offload));
        }
        found.is_some()
    });
    found.unwrap()
}

fn is_silent(port: &mut Port) -> bool {
    matches!(port.next().unwrap(), Next::Nothing)
}

fn send(port: &mut Port, frame: &[u8]) {
    assert!(port.send(frame).unwrap());
}

#[test]
fn rings_take_part_and_each_port_has_frames_as_it_can_take_them() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let station = Station::by_vde(&lab, &dir, "10.0.3.9").unwrap();
    let join = || daemon.port("host:lan0").join();
    let mut wire = join().open().unwrap();
    let mut merged = [0; 2].map(|_| join().segments(Segments::Merged).open().unwrap());
    let mut capture = daemon.port("host:lan0").open().unwrap();
    let plain = |to: u8, from: u8| {
        let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
        frame.resize(60, from);
        frame
    };
    // All hear a stranger, and who has spoken is found.
    send(&mut wire, &plain(0xff, 1));
    for port in merged.iter_mut().chain([&mut capture]) {
        assert_eq!(next(port).0, plain(0xff, 1));
    }
    let [one, two] = &mut merged;
    send(one, &plain(1, 2));
    assert_eq!(
        (next(&mut wire).0, next(&mut capture).0),
        (plain(1, 2), plain(1, 2))
    );
    send(two, &plain(2, 3));
    assert_eq!(
        (next(one).0, next(&mut capture).0),
        (plain(2, 3), plain(2, 3))
    );
    assert!(is_silent(&mut wire) && is_silent(two) && is_silent(one));

    // Whole from one that can to one that can; cut for one that cannot, and for captures.
    let (frame, offload) = super_frame(3, 2, 10_000);
    let outbox = one.outbox().unwrap();
    assert!(outbox.push_offloaded(&frame, &offload).unwrap());
    outbox.flush();
    assert_eq!(next(two), (frame, offload));
    let captured: Vec<usize> = (0..7).map(|_| next(&mut capture).0.len()).collect();
    assert_eq!(
        captured,
        [1514, 1514, 1514, 1514, 1514, 1514, 54 + 10_000 - 6 * 1460]
    );
    let (frame, offload) = super_frame(1, 2, 3000);
    let outbox = one.outbox().unwrap();
    assert!(outbox.push_offloaded(&frame, &offload).unwrap());
    outbox.flush();
    let cut: Vec<Vec<u8>> = (0..3).map(|_| next(&mut wire).0).collect();
    assert_eq!(
        cut,
        (0..3).map(|_| next(&mut capture).0).collect::<Vec<_>>()
    );
    let payload: Vec<u8> = cut.iter().flat_map(|frame| &frame[54..]).copied().collect();
    assert_eq!(payload, content(3000));
    // To a VDE client, which is a stranger yet: flooded.
    let before = station.statistic("rx_packets");
    let (frame, offload) = super_frame(0x77, 2, 3000);
    let outbox = one.outbox().unwrap();
    assert!(outbox.push_offloaded(&frame, &offload).unwrap());
    outbox.flush();
    eventually("the TAP has all three", || {
        station.statistic("rx_packets") - before >= 3
    });
    assert_eq!(station.statistic("rx_packets") - before, 3);

    let counters = daemon.audit();
    let lan0 = counted(&counters, "source");
    let values = ["switch_ports", "stations", "out_cut", "out_rings"].map(|it| value(lan0, it));
    // 2 of the first frame, 1 of each of four, 2 of the flooded one; the TAP is silent.
    assert_eq!(values, [4, 3, 2, 8]);
    drop(wire);
    eventually("its port is free", || {
        value(counted(&daemon.counters(), "source"), "switch_ports") == 3
    });
}

#[test]
fn a_port_with_rings_is_given_frames_of_the_wire_where_its_settings_say_so() {
    let lab = Lab::new().unwrap();
    let switch = "lan0,default.tso=off,port.7.lock=no";
    let daemon = Daemon::start(&lab, None, &["--switch", switch]).unwrap();
    let join = |what: &str| {
        let port = daemon.port(what).join().segments(Segments::Merged);
        port.open().unwrap()
    };
    let mut sender = join("host:lan0");
    let mut cut = join("host:lan0");
    // The control: of this number something is said, and so the default is not for it.
    let mut whole = join("host:lan0/port7");
    let (frame, offload) = super_frame(0xff, 1, 3000);
    let outbox = sender.outbox().unwrap();
    assert!(outbox.push_offloaded(&frame, &offload).unwrap());
    outbox.flush();
    assert_eq!(next(&mut whole), (frame, offload));
    let lens: Vec<usize> = (0..3).map(|_| next(&mut cut).0.len()).collect();
    assert_eq!(lens, [1514, 1514, 54 + 3000 - 2 * 1460]);
    assert!(is_silent(&mut cut));
    daemon.audit();
}

#[test]
fn the_console_answers_the_terminals_of_vde() {
    let lab = Lab::new().unwrap();
    let [dir, console] = ["lan0.ctl", "lan0.mgmt"].map(|it| lab.dir().join(it));
    let spec = format!("lan0,vde={},mgmt={}", dir.display(), console.display());
    let _daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let _station = Station::by_vde(&lab, &dir, "10.0.3.9").unwrap();
    let mut unixterm = Command::new("unixterm");
    unixterm.arg(&console);
    // It wants a terminal.
    let mut vdeterm = Command::new("script");
    let command = format!("vdeterm {}", console.display());
    vdeterm.args(["-q", "-c", &command, "/dev/null"]);
    for (name, command, enter) in [("unixterm", unixterm, "\n"), ("vdeterm", vdeterm, "\r")] {
        let mut terminal = Running::start(command, &lab, name).unwrap();
        let mut types = |line: &str| terminal.says(&format!("{line}{enter}")).unwrap();
        let out = lab.dir().join(format!("{name}.out"));
        let says = |words: &str, times: usize| {
            eventually(&format!("{name}: {words}, {times} times"), || {
                std::fs::read_to_string(&out).is_ok_and(|said| said.matches(words).count() >= times)
            });
        };
        says("VDE switch V.2", 1);
        // One after the other: vdeterm sends no ends of lines, and shows no numbers.
        for (line, answer, times) in [
            ("vlan/create 77", "Success", 1),
            ("vlan/print 77", "VLAN 0077", 1),
            ("port/print 1", "Port 0001 untagged_vlan=0000 ACTIVE", 1),
            ("port/print 55", "No such device or address", 1),
            ("vlan/remove 77", "Success", 4),
            ("vlan/print 77", "No such device or address", 2),
        ] {
            types(line);
            says(answer, times);
        }
        types("logout");
        eventually(&format!("{name} ends"), || terminal.status().is_some());
    }
}

/// As with `vde_switch`, which is the control. What the killed one left is the next one's, in the same place.
#[test]
fn a_program_of_vde_ends_with_a_switch_that_is_killed_under_traffic() {
    let lab = Lab::new().unwrap();
    let [ours, theirs] = ["lan0.ctl", "vde.ctl"].map(|name| lab.dir().join(name));
    let spec = format!("lan0,vde={}", ours.display());
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let mut real = Running::vde_switch(&lab, None, &theirs, &[]).unwrap();
    let join = |dir: &Path, net: u32| {
        [1, 2].map(|at| Station::by_vde(&lab, dir, &format!("10.77.{net}.{at}")).unwrap())
    };
    let mut all = [join(&ours, 1), join(&theirs, 2)];
    let _pings = all.each_ref().map(|[one, other]| {
        assert!(one.pings(&other.address));
        let mut ping = one.netns.command("ping");
        ping.args(["-q", "-i", "0.002", "-w", "60", &other.address]);
        Running::start(ping, &lab, &format!("ping-{}", one.address)).unwrap()
    });
    let entered = || value(counted(&daemon.counters(), "source"), "entered");
    let before = entered();
    eventually("frames come and go", || entered() > before + 100);
    real.kill();
    daemon.kill();
    for station in all.iter_mut().flatten() {
        let what = format!("{} has no switch any more", station.address);
        eventually(&what, || station.cable.status().is_some());
    }
    daemon.launch().unwrap();
    let [one, other] = join(&ours, 1);
    assert!(one.pings(&other.address));
    daemon.audit();
}

/// Owner's group and permission bits of a file.
fn access(path: &Path) -> (u32, u32) {
    let of = std::fs::metadata(path).unwrap();
    (of.gid(), of.mode() & 0o7777)
}

/// A user, of this group if one is said, connects to each of these sockets and makes one in the directory: whether he can.
fn joins(gid: Option<u32>, sockets: &[(PathBuf, SocketType)], dir: &Path) -> Vec<bool> {
    // Where a file of this name is already nobody makes one, whatever he may do.
    let own = dir.join(format!("own-{gid:?}"));
    let sockets = sockets.to_vec();
    as_member(USER, gid, move || {
        let connects = |(path, kind): &(PathBuf, SocketType)| {
            let socket = socket(AddressFamily::UNIX, *kind, None).unwrap();
            connect(&socket, &SocketAddrUnix::new(path).unwrap()).is_ok()
        };
        let mut can: Vec<bool> = sockets.iter().map(connects).collect();
        can.push(UnixDatagram::bind(&own).is_ok());
        can
    })
}

#[test]
fn files_of_all_entrances_are_for_the_group_that_is_said_and_for_nobody_else() {
    const GROUP: &str = "games";
    let groups = std::fs::read_to_string("/etc/group").unwrap();
    let line = groups.lines().find(|it| it.starts_with("games:x:"));
    let line = line.expect("/etc/group has a line that begins with games:x:");
    let gid: u32 = line.split(':').nth(2).unwrap().parse().unwrap();
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let path = |name: &str| lab.dir().join(name);
    let [vde, mgmt, stream, bess, vhost, dgram, theirs, console] = [
        "vde", "mgmt", "stream", "bess", "vhost", "dgram", "theirs", "console",
    ]
    .map(path);
    let mut spec = format!("lan0,mode=660,dirmode=1770,group={GROUP},mgmtmode=620");
    for (name, path) in [
        ("vde", &vde),
        ("mgmt", &mgmt),
        ("stream", &stream),
        ("bess", &bess),
        ("vhost", &vhost),
        ("dgram", &dgram),
    ] {
        spec = format!("{spec},{name}={}", path.display());
    }
    let args = ["--config", &config, "--switch", &spec];
    let _daemon = Daemon::start(&lab, None, &args).unwrap();
    let ctl = vde.join("ctl");
    for (path, mode) in [
        (&vde, 0o1770),
        (&dgram, 0o1770),
        (&ctl, 0o660),
        (&stream, 0o660),
        (&bess, 0o660),
        (&vhost, 0o660),
        (&mgmt, 0o620),
    ] {
        assert_eq!(access(path), (gid, mode), "{}", path.display());
    }
    // As the users of vde_switch are used to.
    let words = [
        "-m",
        "660",
        "--dirmode",
        "1770",
        "-g",
        GROUP,
        "--mgmtmode",
        "620",
        "-M",
    ];
    let words = [&words[..], &[console.to_str().unwrap()]].concat();
    let _real = Running::vde_switch(&lab, None, &theirs, &words).unwrap();
    // Its console is there before it has its mode.
    let theirs = || [access(&theirs.join("ctl")), access(&theirs)];
    until("vde_switch's files are as ours", theirs, |theirs| {
        *theirs == [access(&ctl), access(&vde)]
    });
    let console = || std::fs::metadata(&console).ok();
    until("its console is as ours", console, |console| {
        let mode = console.as_ref().map(|it| it.mode() & 0o7777);
        mode == Some(access(&mgmt).1)
    });
    let sockets = [
        (ctl, SocketType::STREAM),
        (stream, SocketType::STREAM),
        (vhost, SocketType::STREAM),
        (mgmt, SocketType::STREAM),
        (bess, SocketType::SEQPACKET),
    ];
    assert_eq!(joins(Some(gid), &sockets, &dgram), [true; 6]);
    assert_eq!(joins(None, &sockets, &dgram), [false; 6]);
}

#[test]
fn what_makes_no_sense_on_a_switch_is_refused_by_name() {
    let lab = Lab::new().unwrap();
    let args = [
        "--switch",
        "lan0,ports=2,ports_each=2",
        "--source",
        "lab=gen,pps=1",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let refused = |port: PortOptions| port.open().err().unwrap().to_string();
    for (port, part) in [
        (daemon.port("host:lab").join(), "no switch"),
        (daemon.port("host:lan0@0").join(), "whole switch"),
        (daemon.port("host:lan0").join().group("g"), "no group"),
        (daemon.port("host:lan0").join().transmit(0), "transmit ring"),
    ] {
        let error = refused(port);
        assert!(error.contains(part), "{error}");
    }
    let _held = [0; 2].map(|_| daemon.port("host:lan0").join().open().unwrap());
    let error = refused(daemon.port("host:lan0").join());
    assert!(error.contains("all 2 ports are taken"), "{error}");
}
