//! Guests on a switch by vhost-user, with front-ends that nobody here wrote.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vnplug::Next;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::Station;
use vnplug_e2e::{Guest, Image, Job, Lab, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, eventually};

fn ran(guest: &Guest, command: &str) -> String {
    let done = guest.run(command, PATIENCE).unwrap();
    assert!(done.success(), "{command}: {}", done.text());
    done.text().to_owned()
}

fn uml(lab: &Lab, socket: &Path) -> Guest {
    let config = UmlConfig::vhost_user(socket, Image::default().program("/usr/sbin/ethtool"));
    Uml::boot(lab, config).unwrap()
}

fn qemu(lab: &Lab, socket: &Path, mac: u8) -> Guest {
    let chardev = format!("{},reconnect=1", socket.display());
    let mac = format!("52:54:00:77:02:{mac:02x}");
    let config = QemuConfig {
        image: Image::default()
            .program("/usr/sbin/ethtool")
            .module("virtio_net"),
        qemu_args: QemuConfig::vhost_user(&chardev, 1, &mac),
        ..QemuConfig::default()
    };
    Qemu::boot(lab, config).unwrap()
}

fn bring_up(guest: &Guest, address: &str) {
    let up = format!("ip addr add {address}/24 dev eth0 && ip link set eth0 up");
    ran(guest, &up);
}

/// Moves bytes from one guest, which has this address, to another, in large pieces as `sendfile(2)` has
/// them; all of them must come.
fn moves(from: &Guest, to: &Guest, address: &str, mib: u32) {
    let fill = format!(
        "mkdir -p /tmp/www && head -c {} /dev/urandom >/tmp/www/bulk && sha256sum </tmp/www/bulk",
        mib << 20
    );
    let sent = ran(from, &fill);
    // It stays there, for the next time.
    ran(from, "pidof httpd || httpd -p 7000 -h /tmp/www");
    let get = format!("wget -q -O - http://{address}:7000/bulk | sha256sum");
    assert_eq!(ran(to, &get).trim(), sent.trim());
}

#[test]
fn guests_of_user_mode_linux_have_offloads_and_move_super_frames_whole() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("lan0.sock");
    let spec = format!("lan0,vhost={}", socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let guests = [(); 2].map(|()| uml(&lab, &socket));
    let addresses = ["10.77.2.1", "10.77.2.2"];
    for (guest, address) in guests.iter().zip(addresses) {
        let features = ran(guest, "ethtool -k eth0");
        for on in [
            "scatter-gather: on",
            "tcp-segmentation-offload: on",
            "tx-checksumming: on",
            "rx-checksumming: on",
        ] {
            assert!(features.contains(on), "{features}");
        }
        bring_up(guest, address);
    }
    let [one, two] = &guests;
    ran(one, "ping -c 3 10.77.2.2");
    ran(two, "ping -c 3 10.77.2.1");
    let before = daemon.counters();
    let of = |name: &str| {
        let now = value(counted(&daemon.counters(), "source"), name);
        now - value(counted(&before, "source"), name)
    };
    moves(one, two, addresses[0], 16);
    // A frame of the wire has 1,448 bytes; acknowledgements are counted, too.
    let frames = of("entered");
    assert!(frames < (16 << 20) / 8_000, "{frames} frames");
    assert_eq!(of("out_cut"), 0);

    // Offloads change live, and the switch cuts for who wants that.
    ran(two, "ethtool -K eth0 rx-gro-hw off");
    let features = ran(two, "ethtool -k eth0");
    assert!(features.contains("rx-gro-hw: off"), "{features}");
    moves(one, two, addresses[0], 4);
    // One less for each super-frame than it became.
    assert!(of("out_cut") > (2 << 20) / 1448);
    daemon.audit();
    guests.iter().for_each(Guest::kill);
    eventually("their ports are free", || {
        value(counted(&daemon.counters(), "source"), "switch_ports") == 0
    });
}

/// What `vnplug switch show` counts of a port.
fn counts(daemon: &Daemon, port: usize) -> impl Fn(&str) -> f64 {
    let (code, text) = daemon.vnplug(&["switch", "show", "lan0", "--json"]);
    assert_eq!(code, Some(0), "{text}");
    let shown: Value = serde_json::from_str(&text).unwrap();
    let ports = shown["ports"].as_array().unwrap().clone();
    let mut ports = ports.into_iter();
    let it = ports.find(|it| it["number"] == port).unwrap();
    move |name| it["counters"][name].as_f64().unwrap()
}

/// Streams from one guest, which has this address, to another, one after the other until the guests end, in
/// large pieces as `sendfile(2)` has them.
fn streams(from: &Guest, to: &Guest, address: &str) -> Job {
    let serve = format!(
        "mkdir -p /tmp/www && head -c {} /dev/zero >/tmp/www/bulk && httpd -p 7000 -h /tmp/www",
        32 << 20
    );
    ran(from, &serve);
    let take = "while :; do wget -q -O /dev/null http://ADDRESS:7000/bulk || sleep 0.1; done";
    to.spawn(&take.replace("ADDRESS", address)).unwrap()
}

/// What a stream moves in a while, by the ports of its ends.
#[derive(Debug)]
struct Moved {
    /// Bytes that the receiver's port was given.
    bytes: f64,
    /// Mean bytes of a frame from the sender, and of a frame to the receiver.
    sent: f64,
    given: f64,
}

/// What streams between these ports move at once, the middle one of three whiles by its bytes.
fn moved<const N: usize>(daemon: &Daemon, ends: [(usize, usize); N]) -> [Moved; N] {
    let read = || {
        ends.map(|(from, to)| {
            let (from, to) = (counts(daemon, from), counts(daemon, to));
            [
                from("in_bytes"),
                from("in_frames"),
                to("out_bytes"),
                to("out_frames"),
            ]
        })
    };
    let mut all: [Vec<Moved>; N] = [(); N].map(|()| Vec::new());
    for _ in 0..3 {
        let before = read();
        std::thread::sleep(Duration::from_millis(700));
        for ((all, before), after) in all.iter_mut().zip(before).zip(read()) {
            let of = |at: usize| after[at] - before[at];
            all.push(Moved {
                bytes: of(2),
                sent: of(0) / of(1),
                given: of(2) / of(3),
            });
        }
    }
    all.map(|mut all| {
        all.sort_by(|one, other| one.bytes.total_cmp(&other.bytes));
        all.swap_remove(1)
    })
}

#[test]
fn offloads_of_a_port_are_the_operators_live_for_what_it_is_given_and_for_its_card_from_its_next_start()
 {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("lan0.sock");
    let spec = format!("lan0,vhost={}", socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let one = uml(&lab, &socket);
    let two = uml(&lab, &socket);
    bring_up(&one, "10.77.6.1");
    bring_up(&two, "10.77.6.2");
    let set = |what: &str, text: &str| {
        let (code, said) = daemon.vnplug(&["switch", "set", what, text]);
        assert_eq!(code, Some(0), "{said}");
    };
    let cut = || value(counted(&daemon.counters(), "source"), "out_cut");
    moves(&one, &two, "10.77.6.1", 4);
    assert_eq!(cut(), 0);
    set("lan0/port2", "tso=off");
    moves(&one, &two, "10.77.6.1", 4);
    assert!(cut() > (2 << 20) / 1448);
    let shown = daemon.vnplug(&["switch", "show", "lan0/port2"]).1;
    assert!(shown.contains("tso=off"), "{shown}");
    set("lan0/port2", "default");
    let before = cut();
    moves(&one, &two, "10.77.6.1", 4);
    assert_eq!(cut(), before);

    for (text, sums) in [("default.tso=off", "on"), ("default.csum=off", "off")] {
        set("lan0", text);
        let three = uml(&lab, &socket);
        let features = ran(&three, "ethtool -k eth0");
        let has = |what: &str| features.contains(what);
        assert!(has("tcp-segmentation-offload: off"), "{features}");
        assert!(has(&format!("tx-checksumming: {sums}")), "{features}");
        bring_up(&three, "10.77.6.3");
        // Both ways: what it sends is single and summed, and what it is given, too.
        moves(&three, &one, "10.77.6.3", 4);
        moves(&one, &three, "10.77.6.1", 4);
        let of = counts(&daemon, 3);
        let means = [("in_bytes", "in_frames"), ("out_bytes", "out_frames")];
        let means = means.map(|(bytes, frames)| of(bytes) / of(frames));
        assert!(means.iter().all(|mean| *mean <= 1514.0), "{means:?}");
        three.kill();
        eventually("its port is free", || {
            value(counted(&daemon.counters(), "source"), "switch_ports") == 2
        });
    }
    daemon.audit();
}

#[test]
fn a_guest_without_segmentation_offload_slows_nobody_and_others_frames_stay_large() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("lan0.sock");
    let spec = format!("lan0,lanes=2,vhost={}", socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    // Each is the port of its number: 1 sends to 2, and 3 to 4.
    let guests = [1, 2, 3, 4].map(|number| {
        let guest = uml(&lab, &socket);
        bring_up(&guest, &format!("10.77.2.{number}"));
        guest
    });
    let [one, two, three, four] = &guests;
    let _streams = [
        streams(one, two, "10.77.2.1"),
        streams(three, four, "10.77.2.3"),
    ];
    eventually("both streams run", || {
        [2, 4].map(|port| counts(&daemon, port)("out_bytes") > 1e6) == [true; 2]
    });
    let set = |guest: &Guest, word: &str| {
        // What merges what comes goes with it.
        ran(
            guest,
            &format!("ethtool -K eth0 tso {word} gso {word} rx-gro-hw {word}"),
        );
    };
    let ends = [(1, 2), (3, 4)];
    let [first, second] = moved(&daemon, ends);
    for stream in [&first, &second] {
        // A frame of the wire has 1,514 bytes at most; both hops have the same ones.
        assert!(stream.sent > 8_000.0, "{stream:?}");
        assert!(
            (stream.given - stream.sent).abs() < 0.2 * stream.sent,
            "{stream:?}"
        );
    }

    // One pair without on both sides, beside one with: what its slower end can.
    set(one, "off");
    set(two, "off");
    let [slow, beside_slow] = moved(&daemon, ends);
    assert!(slow.sent <= 1514.0 && slow.given <= 1514.0, "{slow:?}");
    assert!(beside_slow.sent > 8_000.0, "{beside_slow:?}");
    for (sender, receiver) in [("off", "on"), ("on", "off")] {
        set(one, sender);
        set(two, receiver);
        let [mixed, beside] = moved(&daemon, ends);
        println!("{sender} to {receiver}: {mixed:?} beside {beside:?}");
        // Two CPUs are shared with whatever else runs; a switch that is slowed is 25 times slower.
        assert!(
            mixed.bytes > 0.3 * slow.bytes,
            "{sender} to {receiver}: {mixed:?} {slow:?}"
        );
        assert!(
            beside.bytes > 0.3 * beside_slow.bytes,
            "{beside:?} {beside_slow:?}"
        );
        assert!(beside.sent > 8_000.0, "{beside:?}");
        let cut = if sender == "off" {
            mixed.sent
        } else {
            mixed.given
        };
        assert!(cut <= 1514.0, "{mixed:?}");
    }
    daemon.audit();
}

#[test]
fn a_guest_of_qemu_is_on_the_wire_and_survives_the_daemon() {
    let lab = Lab::new().unwrap();
    let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!("lan0,vhost={},vde={}", socket.display(), dir.display());
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let guest = qemu(&lab, &socket, 1);
    bring_up(&guest, "10.77.3.1");
    {
        let station = Station::by_vde(&lab, &dir, "10.77.3.9").unwrap();
        assert!(station.pings("10.77.3.1"));
        ran(&guest, "ping -c 3 10.77.3.9");
    }
    daemon.audit();
    daemon.kill();
    daemon.launch().unwrap();
    let station = Station::by_vde(&lab, &dir, "10.77.3.9").unwrap();
    eventually("it is back", || {
        value(counted(&daemon.counters(), "source"), "switch_ports") == 2
    });
    assert!(station.pings("10.77.3.1"));
    daemon.audit();
}

#[test]
fn lanes_forward_what_guests_send_each_other_and_who_captures_sees_every_frame() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("lan0.sock");
    let spec = format!("lan0,lanes=2,vhost={}", socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let [one, two] = [1, 2].map(|number| {
        let guest = uml(&lab, &socket);
        bring_up(&guest, &format!("10.77.3.{number}"));
        guest
    });
    let of_switch = |name: &str| value(counted(&daemon.counters(), "source"), name);
    let forwarded = || of_switch("lane_forwarded");
    moves(&one, &two, "10.77.3.1", 32);
    let (lanes, all) = (forwarded(), of_switch("entered"));
    // But for the first ones, and where the guests look for each other again.
    assert!(lanes > all / 2, "{lanes} of {all}");
    let pings = |count: u32| {
        let text = ran(&one, &format!("ping -c {count} -i 0.01 10.77.3.2"));
        assert!(
            text.contains(&format!(" {count} packets received")),
            "{text}"
        );
    };
    for device in ["", "/port1"] {
        let port = daemon.port(&format!("host:lan0{device}"));
        let mut port = port.filter("icmp").open().unwrap();
        // The thread of the switch knows of it before the port is open, and takes all ports back in its next turn.
        std::thread::sleep(Duration::from_millis(20));
        let before = forwarded();
        pings(50);
        assert_eq!(forwarded(), before, "{device}");
        let mut seen = 0;
        eventually("all of them are seen", || {
            while let Next::Packet(_) = port.next().unwrap() {
                seen += 1;
            }
            seen == 100
        });
        drop(port);
        eventually("lanes go on", || {
            pings(5);
            forwarded() > before
        });
    }
    // What a setting says of a port holds, and no longer than it is said.
    for (setting, reaches) in [("isolated=yes", false), ("isolated=no", true)] {
        for port in [1, 2] {
            let (code, said) =
                daemon.vnplug(&["switch", "set", &format!("lan0/port{port}"), setting]);
            assert_eq!(code, Some(0), "{said}");
        }
        let ping = one.run("ping -c 1 -W 1 10.77.3.2", PATIENCE).unwrap();
        assert_eq!(ping.success(), reaches, "{}", ping.text());
    }
    moves(&one, &two, "10.77.3.1", 8);
    daemon.audit();
}
