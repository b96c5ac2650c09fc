//! `vnplug nic`: interfaces of the kernel as ports of a switch, in namespaces and in guests.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use vnplug::{Next, Segments};
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::{Station, content};
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::{PATIENCE, eventually, until};

/// Ends it and checks its accounts.
fn finish(mut station: Station) {
    assert!(
        station.cable.finish().success(),
        "{}",
        station.cable.errors()
    );
    let told = station.cable.last();
    let number = |name: &str| told[name].as_u64().unwrap();
    assert_eq!(told["summary"], true);
    let received = number("injected") + number("merged") + number("dropped");
    assert_eq!(number("received"), received, "{told}");
    assert_eq!(
        number("taken"),
        number("sent") + number("send_dropped"),
        "{told}"
    );
    let gone = station.netns.ip(&["link", "show", "vn0"]).is_err();
    assert!(gone, "the interface stayed");
}

#[test]
fn interfaces_of_namespaces_speak_and_their_super_frames_are_cut_for_whom_they_must() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let nic = |address: &str, more: &[&str]| {
        Station::by_nic(&lab, &daemon, "lan0", address, more).unwrap()
    };
    let one = nic("10.0.4.1", &[]);
    let two = nic("10.0.4.2", &["--mac", "02:00:00:00:04:02", "--queues", "4"]);
    let plain = nic("10.0.4.3", &["--segments", "wire"]);
    let old = Station::by_vde(&lab, &dir, "10.0.4.4").unwrap();
    let all = [&one, &two, &plain, &old];
    let switch_ports = || value(counted(&daemon.counters(), "source"), "switch_ports");
    eventually("all have joined", || switch_ports() == 4);
    for station in all {
        for other in all {
            let (from, to) = (&station.address, &other.address);
            assert!(station.pings(to), "{from} {to}");
        }
    }
    let link = two.netns.ip(&["-d", "link", "show", "vn0"]).unwrap();
    for part in [
        "02:00:00:00:04:02",
        "mtu 1500",
        "multi_queue",
        "numqueues 4",
    ] {
        assert!(link.contains(part), "{part}: {link}");
    }

    // Its card offers the kernel what the switch, or who takes frames whole, does for it.
    for (station, state) in [(&one, "on"), (&two, "on"), (&plain, "off")] {
        let features = station.netns.exec(&["ethtool", "-k", "vn0"]).unwrap();
        // NB: pieces (`sg`) a TAP's card offers in any case.
        for name in ["tcp-segmentation-offload", "tx-checksumming"] {
            let due = format!("{name}: {state}");
            assert!(features.contains(&due), "{due}: {features}");
        }
    }

    // What the wire would have carried, and what went.
    let capture = |segments| {
        let port = daemon.port("host:lan0").filter("tcp").ring_bytes(64 << 20);
        port.segments(segments).open().unwrap()
    };
    let bytes = content(4 << 20);
    for (from, to) in [
        (&one, &two),
        (&one, &plain),
        (&plain, &two),
        (&two, &old),
        (&old, &one),
    ] {
        let mut wire = capture(Segments::Wire);
        let mut merged = capture(Segments::Merged);
        let between = format!("{} {}", from.address, to.address);
        assert!(from.sends(to, &bytes).unwrap() == bytes, "{between}");
        let lens = [&mut wire, &mut merged].map(|port| {
            let mut lens = Vec::new();
            eventually("the end is captured", || {
                while let Next::Packet(packet) = port.next().unwrap() {
                    lens.push(packet.bytes.len());
                }
                lens.iter().sum::<usize>() > bytes.len()
            });
            assert_eq!(port.dropped(), 0);
            lens
        });
        let [longest_wire, longest] = [0, 1].map(|at| lens[at].iter().max().unwrap());
        assert_eq!(*longest_wire, 1514, "{between}");
        // The frames of a bulk stream were not cut before they had to be.
        let cuts_itself = [&plain, &old].iter().any(|it| it.address == from.address);
        assert_eq!(*longest > 10_000, !cuts_itself, "{between}: {longest}");
    }
    daemon.audit();
    for station in [one, two, plain] {
        finish(station);
    }
    eventually("their ports are free", || switch_ports() == 1);
}

#[test]
fn segments_of_senders_that_cut_themselves_are_merged_and_acks_for_them_come_back() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let old = Station::by_vde(&lab, &dir, "10.0.7.1").unwrap();
    let bytes = content(32 << 20);
    // What one of these segments more cost: frames to the receiver, and ACKs of it.
    let seen = [
        ("10.0.7.2", &["--gro", "off"][..]),
        ("10.0.7.3", &[]),
        ("10.0.7.4", &["--acks", "expand"]),
    ]
    .map(|(address, more)| {
        let nic = Station::by_nic(&lab, &daemon, "lan0", address, more).unwrap();
        assert!(nic.pings(&old.address));
        assert!(old.sends(&nic, &bytes).unwrap() == bytes, "{more:?}");
        let (frames, mut cable) = (nic.statistic("rx_packets"), nic.cable);
        assert!(cable.finish().success());
        let told = cable.last();
        let number = |name: &str| told[name].as_u64().unwrap();
        let received = number("injected") + number("merged") + number("dropped");
        assert_eq!(number("received"), received, "{told}");
        assert!(number("received") > 23_000, "{told}");
        println!("{more:?}: {told}");
        (
            frames,
            number("merged"),
            number("acks_added"),
            number("sent"),
        )
    });
    let [single, merged, expanded] = seen;
    assert_eq!((single.1, single.2), (0, 0));
    assert!(
        merged.1 > 0 && merged.0 < single.0 && merged.2 == 0,
        "{seen:?}"
    );
    // One for two segments at most.
    assert!(
        expanded.2 > 0 && 2 * expanded.2 <= expanded.1 + expanded.0,
        "{seen:?}"
    );
    daemon.audit();

    for (words, status, why) in [
        (&["--gro", "45"][..], 2, "1 to 44, or off"),
        (
            &["--gro", "20", "--segments", "wire"],
            1,
            "needs --segments merged",
        ),
        (&["--gro", "off", "--acks", "expand"], 1, "needs --gro"),
    ] {
        let (code, said) = daemon.vnplug(&[&["nic", "lan0"], words].concat());
        assert!(
            code == Some(status) && said.contains(why),
            "{code:?}: {said}"
        );
    }
}

#[test]
fn without_a_daemon_the_cable_is_out_and_with_the_next_one_it_is_in() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let nic = |address: &str| Station::by_nic(&lab, &daemon, "host:lan0", address, &[]).unwrap();
    let [one, two] = ["10.0.5.1", "10.0.5.2"].map(nic);
    assert!(one.pings(&two.address));
    let carrier = |station: &Station| {
        let link = station.netns.ip(&["link", "show", "vn0"]).unwrap();
        !link.contains("NO-CARRIER")
    };
    assert!(carrier(&one));
    daemon.kill();
    eventually("the cable is out", || !carrier(&one) && !carrier(&two));
    daemon.launch().unwrap();
    eventually("the cable is in", || carrier(&one) && carrier(&two));
    assert!(one.pings(&two.address) && two.pings(&one.address));
    daemon.audit();
    // Somebody else's hand.
    two.netns.ip(&["link", "del", "vn0"]).unwrap();
    let mut cable = two.cable;
    assert_eq!(cable.finish().code(), Some(1));
    assert!(
        cable.errors().contains("somebody removed"),
        "{}",
        cable.errors()
    );
    finish(one);
}

#[test]
fn a_guest_has_an_interface_by_its_agent() {
    let lab = Lab::new().unwrap();
    let args = ["--switch", "lan0", "--allow-send", "vm:uml=lan0"];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let station = Station::by_nic(&lab, &daemon, "lan0", "10.0.6.1", &[]).unwrap();
    let image = image().unwrap().module("tun");
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image);
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let guest = &uml.guest;
    let _agent = agent(guest).unwrap();
    let nic = guest.spawn("exec vnplug nic lan0 --name vn0 2>&1").unwrap();
    let up = || {
        let up = "ip addr add 10.0.6.2/24 dev vn0 2>&1 && ip link set vn0 up";
        let done = guest.run(up, PATIENCE).unwrap();
        (done.success(), nic.peek(4096).unwrap_or_default())
    };
    until("the interface is there", up, |(done, _)| *done);
    assert!(station.pings("10.0.6.2"));
    let done = guest.run("ping -c 3 10.0.6.1", PATIENCE).unwrap();
    assert!(done.success(), "{}", done.text());
    daemon.audit();
}

#[test]
fn what_cannot_be_an_interface_of_a_switch_is_refused_by_name() {
    let lab = Lab::new().unwrap();
    let args = ["--switch", "lan0", "--source", "lab=gen,pps=1"];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let file = lab.dir().join("no-namespace");
    std::fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    for (args, part) in [
        (&["lab"][..], "no switch"),
        (&["lan1"], "lan1"),
        (&["lan0", "--netns", "of-nobody"], "/run/netns/of-nobody"),
        (&["lan0", "--netns", file], "no network namespace"),
        (
            &["lan0", "--netns", netns.name(), "--name", "wire0"],
            "exists",
        ),
        (&["lan0", "--mac", "01:00:00:00:00:01"], "group address"),
    ] {
        let (code, text) = daemon.vnplug(&[&["nic"], args].concat());
        assert!(
            code != Some(0) && text.contains(part),
            "{args:?}: {code:?}: {text}"
        );
    }
    let counters = daemon.counters();
    let lan0 = counters.iter().find(|it| it.name == "lan0").unwrap();
    assert_eq!(value(lan0, "switch_ports"), 0);
}
