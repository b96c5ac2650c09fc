//! A switch of the daemon whose uplink is an end of a wire, the other end of which is another machine's.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use vnplug::{Next, Port};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::{Station, content, pings, transfer};
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::{eventually, until};

/// The machine with the daemon, and another one, far away: `up0` and `far0` are a wire.
struct Site {
    lab: Lab,
    here: Netns,
    far: Netns,
}

const FAR: &str = "10.9.0.2";

impl Site {
    fn new() -> Self {
        Self {
            lab: Lab::new().unwrap(),
            here: Netns::new().unwrap(),
            far: Netns::new().unwrap(),
        }
    }

    /// Puts the wire there.
    fn wire(&self) {
        let peer = ["peer", "name", "far0", "netns", self.far.name()];
        let veth = ["link", "add", "up0", "type", "veth"];
        self.here.ip(&[&veth[..], &peer].concat()).unwrap();
        let address = format!("{FAR}/24");
        self.far
            .ip(&["addr", "add", &address, "dev", "far0"])
            .unwrap();
        self.far.ip(&["link", "set", "far0", "up"]).unwrap();
        self.here.ip(&["link", "set", "up0", "up"]).unwrap();
    }

    fn daemon(&self, switch: &str) -> Daemon {
        Daemon::start(&self.lab, Some(&self.here), &["--switch", switch]).unwrap()
    }

    /// A statistic of an interface of the wire, as `tx_packets`.
    fn statistic(&self, interface: &str, name: &str) -> u64 {
        let netns = if interface == "up0" {
            &self.here
        } else {
            &self.far
        };
        number(netns, interface, name)
    }

    /// Bytes of a frame on average that went through an interface since `before`.
    fn mean(&self, interface: &str, way: &str, before: (u64, u64)) -> u64 {
        let (packets, bytes) = self.traffic(interface, way);
        (bytes - before.1) / (packets - before.0).max(1)
    }

    fn traffic(&self, interface: &str, way: &str) -> (u64, u64) {
        let of = |what: &str| self.statistic(interface, &format!("{way}_{what}"));
        (of("packets"), of("bytes"))
    }
}

fn number(netns: &Netns, interface: &str, name: &str) -> u64 {
    let file = format!("/sys/class/net/{interface}/statistics/{name}");
    let text = netns.exec(&["cat", &file]).unwrap();
    text.trim().parse().unwrap()
}

fn offloads(netns: &Netns, interface: &str, words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    let command = [&["ethtool", "-K", interface], &words[..]].concat();
    netns.exec(&command).unwrap();
}

/// TCP segments that a namespace dropped for their checksum.
fn bad_checksums(netns: &Netns) -> u64 {
    let text = netns.exec(&["nstat", "-asz", "TcpInCsumErrors"]).unwrap();
    let line = text
        .lines()
        .find(|line| line.starts_with("TcpInCsumErrors"));
    let count = line.and_then(|line| line.split_whitespace().nth(1));
    count.unwrap().parse().unwrap()
}

fn of_switch(daemon: &Daemon, name: &str) -> u64 {
    value(counted(&daemon.counters(), "source"), name)
}

#[test]
fn both_ends_have_what_the_other_sends_whatever_is_left_to_a_nic() {
    let site = Site::new();
    site.wire();
    let dir = site.lab.dir().join("lan0.ctl");
    let daemon = site.daemon(&format!("lan0,vde={},uplink=up0", dir.display()));
    let socket = Station::by_vde(&site.lab, &dir, "10.9.0.3").unwrap();
    let nic = Station::by_nic(&site.lab, &daemon, "lan0", "10.9.0.4", &[]).unwrap();
    let bytes = content(8 << 20);
    for (far, here) in [
        ("tx on tso on gso on", "gro on"),
        ("tx on tso on gso on", "gro off"),
        ("tx off gso on", "gro on"),
        ("tx off gso off", "gro on"),
        ("tx off gso off", "gro off"),
    ] {
        offloads(&site.far, "far0", far);
        offloads(&site.here, "up0", here);
        // Merging and its counters are the kernel's business; without it each frame is seen once.
        let exact = here == "gro off";
        let seen = || {
            let sent = site.statistic("far0", "tx_packets");
            (sent, of_switch(&daemon, "uplink_seen"))
        };
        let before = seen();
        for station in [&socket, &nic] {
            let about = format!("{} with {far}, {here}", station.address);
            assert!(station.pings(FAR), "{about}");
            let came = transfer(&station.netns, &site.far, FAR, &bytes).unwrap();
            assert!(came == bytes, "out: {about}");
            let came = transfer(&site.far, &station.netns, &station.address, &bytes).unwrap();
            assert!(came == bytes, "in: {about}");
        }
        if exact {
            let came = |now: &(u64, u64)| (now.0 - before.0, now.1 - before.1);
            let now = until("all that came is seen", seen, |now| {
                came(now).0 == came(now).1
            });
            assert!(came(&now).0 > 0);
        }
    }
    for netns in [&socket.netns, &nic.netns, &site.far] {
        assert_eq!(bad_checksums(netns), 0);
    }
    let counters = daemon.audit();
    let lan0 = counted(&counters, "source");
    assert_eq!(value(lan0, "uplink_seen"), value(lan0, "uplink_entered"));
    assert_eq!((value(lan0, "uplinks_up"), value(lan0, "moves")), (1, 0));
}

#[test]
fn super_frames_of_an_interface_leave_and_come_uncut() {
    let site = Site::new();
    site.wire();
    let daemon = site.daemon("lan0,uplink=up0");
    let nic = Station::by_nic(&site.lab, &daemon, "lan0", "10.9.0.4", &[]).unwrap();
    assert!(nic.pings(FAR));
    let bytes = content(32 << 20);
    let before = site.traffic("up0", "tx");
    assert!(transfer(&nic.netns, &site.far, FAR, &bytes).unwrap() == bytes);
    let out = site.mean("up0", "tx", before);
    let (before, inner) = (site.traffic("up0", "rx"), || {
        (nic.statistic("rx_packets"), nic.statistic("rx_bytes"))
    });
    let first = inner();
    assert!(transfer(&site.far, &nic.netns, &nic.address, &bytes).unwrap() == bytes);
    let hop = site.mean("up0", "rx", before);
    let (packets, all) = inner();
    let at_nic = (all - first.1) / (packets - first.0).max(1);
    // Far above 1514, which is what each would be if somebody on the way cut.
    assert!(
        out > 6000 && hop > 6000 && at_nic > 6000,
        "{out} {hop} {at_nic}"
    );
    assert_eq!(bad_checksums(&nic.netns) + bad_checksums(&site.far), 0);
    // Nobody had to cut for a port.
    assert_eq!(value(counted(&daemon.audit(), "source"), "out_cut"), 0);
}

/// The kinds of uplinks. By AF_XDP a frame of 9,000 bytes is in five pieces, or in three.
const KINDS: [&str; 4] = [
    "",
    "/af_xdp",
    "/af_xdp/frame_size=4096",
    "/af_xdp/mode=generic",
];

#[test]
fn jumbo_frames_pass_and_what_the_interface_cannot_carry_is_counted() {
    let mtu = "9000";
    for kind in KINDS {
        let site = Site::new();
        site.wire();
        if !kind.is_empty() {
            // What XDP sees is what a wire carries.
            offloads(&site.far, "far0", "tx off gso off");
        }
        let daemon = site.daemon(&format!("lan0,uplink=up0{kind}"));
        let nic = Station::by_nic(&site.lab, &daemon, "lan0", "10.9.0.4", &[]).unwrap();
        assert!(nic.pings(FAR));
        nic.netns.ip(&["link", "set", "vn0", "mtu", mtu]).unwrap();
        site.far.ip(&["link", "set", "far0", "mtu", mtu]).unwrap();
        // The uplink itself still carries 1500.
        let large = ["-M", "do", "-s", "8900"];
        let few = [&["-c", "1", "-W", "1"], &large[..]].concat();
        assert!(!pings(&nic.netns, FAR, &few), "{kind}");
        eventually("it is counted", || {
            of_switch(&daemon, "out_dropped_long") > 0
        });
        site.here.ip(&["link", "set", "up0", "mtu", mtu]).unwrap();
        eventually("jumbo frames pass", || pings(&nic.netns, FAR, &large));
        let bytes = content(4 << 20);
        for (from, to, address) in [
            (&nic.netns, &site.far, FAR),
            (&site.far, &nic.netns, nic.address.as_str()),
        ] {
            let came = transfer(from, to, address, &bytes).unwrap();
            assert!(came == bytes, "{kind}: to {address}");
        }
        assert_eq!(bad_checksums(&nic.netns) + bad_checksums(&site.far), 0);
        daemon.audit();
    }
}

/// A tag of VLAN 7, priority 5, alone and within one of a provider (IEEE 802.1ad).
const TAGS: [&[u8]; 2] = [
    &[0x81, 0, 0xa0, 7],
    &[0x88, 0xa8, 0x60, 9, 0x81, 0, 0xa0, 7],
];

/// A frame with tags.
fn tagged(tags: &[u8], to: u8, from: u8, len: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from];
    frame.extend(tags);
    frame.extend([0x88, 0xb5]);
    frame.extend(content(len - frame.len()));
    frame
}

/// The next packet of a port, within the patience of a test.
fn next(port: &mut Port) -> Vec<u8> {
    let mut found = None;
    eventually("a packet is there", || {
        if let Next::Packet(packet) = port.next().unwrap() {
            found = Some(packet.bytes.to_vec());
        }
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn tags_stay_and_nothing_that_left_comes_back() {
    for kind in KINDS {
        let site = Site::new();
        site.wire();
        let daemon = site.daemon(&format!("lan0,uplink=up0{kind}"));
        // The far machine sends and hears raw frames.
        let there = Daemon::start(&site.lab, Some(&site.far), &["--source", "far0"]).unwrap();
        let options = there.port("far0").filter("vlan");
        let mut far = options.transmit(1 << 20).open().unwrap();
        let mut here = daemon.port("host:lan0").join().open().unwrap();
        // Linux sends a tag beyond the MTU, if it is an 802.1Q one.
        for (len, number) in [(60, 1), (1518, 2), (60, 3), (1514, 4)] {
            let tags = TAGS[usize::from(number > 2)];
            let frame = tagged(tags, 0xee, number, len);
            assert!(far.send(&frame).unwrap());
            assert_eq!(next(&mut here), frame, "{kind}: in");
            let frame = tagged(tags, 0xef, number + 10, len);
            assert!(here.send(&frame).unwrap());
            assert_eq!(next(&mut far), frame, "{kind}: out");
        }
        // Each entered once: four by the uplink, four by the ring.
        let counters = daemon.audit();
        let lan0 = counted(&counters, "source");
        let counts = ["uplink_entered", "entered", "flooded", "moves"].map(|it| value(lan0, it));
        assert_eq!(counts, [4, 8, 8, 0], "{kind}");
    }
}

#[test]
fn the_port_waits_for_its_interface_and_survives_it() {
    let site = Site::new();
    let daemon = site.daemon("lan0,uplink=up0");
    let log = daemon.log();
    assert!(
        log.contains("uplink up0: there is no such interface yet"),
        "{log}"
    );
    let nic = Station::by_nic(&site.lab, &daemon, "lan0", "10.9.0.4", &[]).unwrap();
    eventually("both ports are there", || {
        of_switch(&daemon, "switch_ports") == 2
    });
    assert!(!pings(&nic.netns, FAR, &["-c", "1", "-W", "1"]));
    assert!(of_switch(&daemon, "out_dropped_gone") > 0);
    assert_eq!(of_switch(&daemon, "uplinks_up"), 0);
    comes_and_goes(&site, &daemon, &nic, &[true, false, true, false]);
    assert!(of_switch(&daemon, "uplink_rebinds") >= 3);
}

/// The uplink's interface is deleted and made again, or goes down and up; each time the far end answers, and the port stays.
fn comes_and_goes(site: &Site, daemon: &Daemon, nic: &Station, deleted: &[bool]) {
    let is_up = |number: u64| {
        eventually("its state is told", || {
            of_switch(daemon, "uplinks_up") == number
        })
    };
    for deleted in deleted {
        if *deleted {
            let _ = site.here.ip(&["link", "delete", "up0"]);
            is_up(0);
            site.wire();
        } else {
            site.here.ip(&["link", "set", "up0", "down"]).unwrap();
            is_up(0);
            site.here.ip(&["link", "set", "up0", "up"]).unwrap();
        }
        is_up(1);
        // The far end's address is another one's by now, and the neighbour is asked again.
        let _ = nic.netns.ip(&["neigh", "flush", "dev", "vn0"]);
        eventually("the far end answers", || nic.pings(FAR));
    }
    assert_eq!(of_switch(daemon, "switch_ports"), 2);
    daemon.audit();
}

#[test]
fn an_uplink_by_xdp_survives_its_interface_and_is_refused_without_one() {
    let site = Site::new();
    let switch = ["--switch", "lan0,uplink=up0/af_xdp"];
    let refused = Daemon::start(&site.lab, Some(&site.here), &switch).err();
    let said = refused.map(|error| error.to_string()).unwrap_or_default();
    assert!(said.contains("no interface \"up0\" here"), "{said}");
    site.wire();
    let daemon = site.daemon("lan0,uplink=up0/af_xdp");
    let nic = Station::by_nic(&site.lab, &daemon, "lan0", "10.9.0.4", &[]).unwrap();
    assert!(nic.pings(FAR));
    comes_and_goes(&site, &daemon, &nic, &[false, true, false]);
}

#[test]
fn nothing_is_merged_for_an_uplink_and_who_asks_is_told_why() {
    let site = Site::new();
    site.wire();
    let daemon = site.daemon("lan0,uplink=up0");
    for setting in ["gro=20", "acks=expand"] {
        let (code, said) = daemon.vnplug(&["switch", "set", "lan0/port1", setting]);
        assert!(code != Some(0) && said.contains("is an uplink"), "{said}");
    }
    // The controls: it takes others, and so does a port that is none.
    for (port, setting) in [("lan0/port1", "tso=off"), ("lan0/port2", "gro=20")] {
        let (code, said) = daemon.vnplug(&["switch", "set", port, setting]);
        assert_eq!(code, Some(0), "{said}");
    }
    drop(daemon);
    let netns = Some(&site.here);
    let switch = ["--switch", "lan0,uplink=up0,port.1.gro=20"];
    let refused = Daemon::start(&site.lab, netns, &switch).err();
    let said = refused.map(|error| error.to_string()).unwrap_or_default();
    assert!(said.contains("is an uplink"), "{said}");
}

#[test]
fn an_uplink_by_xdp_gets_what_it_cannot_take_cut() {
    let site = Site::new();
    site.wire();
    offloads(&site.far, "far0", "tx off gso off");
    let daemon = site.daemon("lan0,uplink=up0/af_xdp");
    let nic = Station::by_nic(&site.lab, &daemon, "lan0", "10.9.0.4", &[]).unwrap();
    let bytes = content(8 << 20);
    assert!(nic.pings(FAR));
    assert!(transfer(&nic.netns, &site.far, FAR, &bytes).unwrap() == bytes);
    assert!(transfer(&site.far, &nic.netns, &nic.address, &bytes).unwrap() == bytes);
    assert_eq!(bad_checksums(&nic.netns) + bad_checksums(&site.far), 0);
    let counters = daemon.audit();
    let lan0 = counted(&counters, "source");
    assert!(value(lan0, "out_cut") > 1000, "{lan0:?}");
    assert_eq!(value(lan0, "moves"), 0);
}
