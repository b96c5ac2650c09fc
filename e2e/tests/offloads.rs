//! Whatever is cut, merged, summed or added on the way: programs that nobody here wrote have what the others
//! sent, and a capture has nothing but right frames of the wire.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;

use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::ends::{End, files, keep_window, ran};
use vnplug_e2e::station::{Running, Station};
use vnplug_e2e::sums::Capture;
use vnplug_e2e::{Guest, Image, Lab, Netns, Uml, UmlConfig};
use vnplug_testing::eventually;

/// What all of them serve; the sums of the large file, and of many of the small one.
fn www(lab: &Lab, bulk: usize) -> (PathBuf, String, String) {
    let dir = files(lab, bulk).unwrap();
    let sum = |command: String| {
        let output = Command::new("sh").args(["-c", &command]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let dir_name = dir.display();
    let bulk = sum(format!("sha256sum <{dir_name}/bulk"));
    let small = sum(format!(
        "for at in $(seq {MANY}); do cat {dir_name}/small; done | sha256sum"
    ));
    (dir, bulk, small)
}

/// Connections of a guest, or to it, one after the other.
const MANY: u32 = 40;

/// A guest most of whose ACKs may be expanded.
fn boot(lab: &Lab, socket: &Path, address: &str) -> Guest {
    let config = UmlConfig::vhost_user(socket, Image::default().program("/usr/sbin/ethtool"));
    let guest = Uml::boot(lab, config).unwrap();
    ran(
        &guest,
        &format!("ip addr add {address}/32 dev eth0 && ip link set eth0 up"),
    );
    keep_window(&guest, address);
    guest
}

/// The far end of the wire whose other end is an uplink.
fn far(here: &Netns, address: &str) -> Netns {
    let far = Netns::new().unwrap();
    let peer = ["peer", "name", "far0", "netns", far.name()];
    let veth = ["link", "add", "up0", "type", "veth"];
    here.ip(&[&veth[..], &peer].concat()).unwrap();
    far.ip(&["addr", "add", &format!("{address}/24"), "dev", "far0"])
        .unwrap();
    far.ip(&["link", "set", "far0", "up"]).unwrap();
    here.ip(&["link", "set", "up0", "up"]).unwrap();
    far
}

fn set(daemon: &Daemon, what: &str, text: &str) {
    let (code, said) = daemon.vnplug(&["switch", "set", what, text]);
    assert_eq!(code, Some(0), "{what} {text}: {said}");
}

fn count(daemon: &Daemon, switch: &str, name: &str) -> u64 {
    let counters = daemon.counters();
    value(counters.iter().find(|it| it.name == switch).unwrap(), name)
}

/// How the cards of the wire are, the uplink's and the far end's: what they do, and what is set.
const CARDS: [(&str, [&str; 8]); 2] = [
    (
        "none",
        ["tx", "off", "sg", "off", "tso", "off", "gso", "off"],
    ),
    ("all", ["tx", "on", "sg", "on", "tso", "on", "gso", "on"]),
];

/// Of the guest's port.
const SETTINGS: [&str; 6] = [
    "gro=off",
    "gro=20",
    "gro=20 acks=expand",
    "tso=off gro=20",
    "csum=off",
    "tso=off csum=off gro=44 acks=expand",
];

#[test]
fn what_programs_fetch_is_whole_and_all_checksums_are_right_with_each_set_of_offloads() {
    let lab = Lab::new().unwrap();
    let here = Netns::new().unwrap();
    let far = far(&here, "10.77.8.1");
    let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!(
        "lan0,uplink=up0,vhost={},vde={}",
        socket.display(),
        dir.display()
    );
    let daemon = Daemon::start(&lab, Some(&here), &["--switch", &spec]).unwrap();
    // The port behind the uplink's.
    let guest = boot(&lab, &socket, "10.77.8.2");
    let vde = Station::by_vde(&lab, &dir, "10.77.8.3").unwrap();
    let nics = [
        ("10.77.8.4", &["--gro", "off"][..]),
        ("10.77.8.5", &["--gro", "44"]),
        ("10.77.8.6", &["--acks", "expand"]),
    ]
    .map(|(address, more)| Station::by_nic(&lab, &daemon, "lan0", address, more).unwrap());
    let (www, sum, _) = www(&lab, 1 << 20);
    let host = |netns| End::host(netns, &lab, &www).unwrap();
    let guest = (End::guest(&guest, &www).unwrap(), "10.77.8.2");
    let far_end = (host(&far), "10.77.8.1");
    let vde = (host(&vde.netns), vde.address.as_str());
    let nics = [0, 1, 2].map(|at| (host(&nics[at].netns), nics[at].address.as_str()));
    let fetches = |one: &(End<'_>, &str), other: &(End<'_>, &str), about: &str| {
        for (by, from) in [(one, other), (other, one)] {
            let about = format!("{about}: {} from {}", by.1, from.1);
            assert_eq!(by.0.sum_from(from.1), sum, "{about}");
        }
    };
    for (card, words) in CARDS {
        for (netns, name) in [(&here, "up0"), (&far, "far0")] {
            let ethtool = [&["ethtool", "-K", name], &words[..]].concat();
            netns.exec(&ethtool).unwrap();
        }
        for own in ["on", "off"] {
            guest
                .0
                .runs(&format!("ethtool -K eth0 tx {own} tso {own} gso {own}"));
            // The guest's card does what its own driver lets it, whatever those of the wire do.
            let features = guest.0.runs("ethtool -k eth0");
            for (name, state) in [
                ("scatter-gather", "on"),
                ("tx-checksumming", own),
                ("tcp-segmentation-offload", own),
            ] {
                let due = format!("{name}: {state}");
                assert!(features.contains(&due), "{card}: {due}: {features}");
            }
            for settings in SETTINGS {
                let about = format!("{card} of the wire's cards, {own} in the guest, {settings}");
                set(&daemon, "lan0/port2", "default");
                set(&daemon, "lan0/port2", settings);
                let capture = Capture::start(&lab, &daemon, "lan0", "guest").unwrap();
                let before = count(&daemon, "lan0", "out_super_frames");
                for other in [&far_end, &vde, &nics[2]] {
                    fetches(&guest, other, &about);
                }
                let merged = count(&daemon, "lan0", "out_super_frames") - before;
                assert_eq!(
                    merged > 0,
                    settings.starts_with("gro=20"),
                    "{about}: {merged}"
                );
                // A segment has 1,448 bytes, and each crosses one capture.
                let (frames, _) = capture.check(&about).unwrap();
                assert!(frames > 6 * (1 << 20) / 1448, "{about}: {frames}");
            }
        }
        let capture = Capture::start(&lab, &daemon, "lan0", "nics").unwrap();
        for nic in &nics {
            for other in [&far_end, &vde] {
                fetches(nic, other, card);
            }
        }
        let (frames, _) = capture.check(card).unwrap();
        assert!(frames > 12 * (1 << 20) / 1448, "{card}: {frames}");
    }
    assert!(count(&daemon, "lan0", "acks_expanded") > 0);
    daemon.audit();
}

#[test]
fn what_programs_fetch_is_whole_when_frames_are_lost_and_come_in_another_order() {
    let lab = Lab::new().unwrap();
    let here = Netns::new().unwrap();
    let far = far(&here, "10.77.9.1");
    let [near, remote] = ["lan0.ctl", "lan1.ctl"].map(|name| lab.dir().join(name));
    let socket = lab.dir().join("lan1.sock");
    let specs = [
        format!("lan0,uplink=up0,vde={}", near.display()),
        format!(
            "lan1,vde={},vhost={},default.gro=20",
            remote.display(),
            socket.display()
        ),
    ];
    let args = ["--switch", &specs[0], "--switch", &specs[1]];
    let daemon = Daemon::start(&lab, Some(&here), &args).unwrap();
    // A wire between both, a port of each, which loses: a port that loses merges nothing, but those behind it do.
    let mut wire = Command::new("dpipe");
    for (at, dir) in [&near, &remote].into_iter().enumerate() {
        wire.args([&["="][..at], &["vde_plug"]].concat()).arg(dir);
    }
    let _wire = Running::start(wire, &lab, "dpipe").unwrap();
    let ports = |switch: &str| count(&daemon, switch, "switch_ports");
    eventually("the wire is there", || {
        (ports("lan0"), ports("lan1")) == (2, 1)
    });
    let guest = boot(&lab, &socket, "10.77.9.2");
    let nic = ["--acks", "expand"];
    let nic = Station::by_nic(&lab, &daemon, "lan1", "10.77.9.3", &nic).unwrap();
    far.exec(&[
        "ethtool", "-K", "far0", "tx", "off", "tso", "off", "gso", "off",
    ])
    .unwrap();
    // Who asks for ECN and who is asked.
    for netns in [&far, &nic.netns] {
        netns
            .exec(&["sysctl", "-qw", "net.ipv4.tcp_ecn=1"])
            .unwrap();
    }
    ran(&guest, "echo 1 >/proc/sys/net/ipv4/tcp_ecn");
    let (www, sum, small) = www(&lab, 1 << 20);
    let guest_end = (End::guest(&guest, &www).unwrap(), "10.77.9.2");
    let far_end = (End::host(&far, &lab, &www).unwrap(), "10.77.9.1");
    let nic_end = (End::host(&nic.netns, &lab, &www).unwrap(), "10.77.9.3");
    let lossy = [
        "loss=1% seed=1",
        "delay=1ms jitter=1ms reorder=yes seed=2",
        "delay=2ms loss=0.5% jitter=2ms reorder=yes seed=3",
    ];
    for settings in ["", lossy[0], lossy[1], lossy[2]] {
        for port in ["lan0/port2", "lan1/port1"] {
            set(&daemon, port, "default");
            if !settings.is_empty() {
                set(&daemon, port, settings);
            }
        }
        for acks in ["as-is", "expand"] {
            let about = format!("{settings}, acks={acks}");
            set(&daemon, "lan1/port2", &format!("acks={acks}"));
            let captures =
                ["lan0", "lan1"].map(|lan| Capture::start(&lab, &daemon, lan, lan).unwrap());
            let before = ["lan0", "lan1"].map(|lan| count(&daemon, lan, "out_dropped_loss"));
            for end in [&guest_end, &nic_end] {
                assert_eq!(
                    end.0.sum_from(far_end.1),
                    sum,
                    "{about}: from afar to {}",
                    end.1
                );
                assert_eq!(
                    far_end.0.sum_from(end.1),
                    sum,
                    "{about}: from {} to afar",
                    end.1
                );
            }
            assert_eq!(guest_end.0.sum_of_small(far_end.1, MANY), small, "{about}");
            assert_eq!(far_end.0.sum_of_small(guest_end.1, MANY), small, "{about}");
            for (at, lan) in ["lan0", "lan1"].into_iter().enumerate() {
                let lost = count(&daemon, lan, "out_dropped_loss") - before[at];
                assert_eq!(
                    lost > 0,
                    settings.contains("loss"),
                    "{about}: {lan}: {lost}"
                );
            }
            for capture in captures {
                let (frames, with_ecn) = capture.check(&about).unwrap();
                assert!(with_ecn > frames / 4, "{about}: {with_ecn} of {frames}");
            }
        }
    }
    for name in ["out_super_frames", "acks_expanded"] {
        let count = count(&daemon, "lan1", name);
        println!("{name}: {count}");
        assert!(count > 0, "{name}");
    }
    daemon.audit();
}
