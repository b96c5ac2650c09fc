//! Segments of senders that cut themselves, merged for a guest that takes super-frames, and its ACKs expanded:
//! the settings `gro` and `acks` of a port.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use vnplug::{Next, Port, Segments};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::ends::{keep_window, ran};
use vnplug_e2e::{Guest, Image, Lab, Uml, UmlConfig};

/// A guest with this card, and this address.
fn uml(lab: &Lab, card: String, address: &str) -> Guest {
    let config = UmlConfig {
        kernel_args: vec![card],
        image: Image::default()
            .program("/usr/sbin/ethtool")
            .module("virtio_net"),
        ..UmlConfig::default()
    };
    let guest = Uml::boot(lab, config).unwrap();
    let up = format!("ip addr add {address}/24 dev eth0 && ip link set eth0 up");
    ran(&guest, &up);
    guest
}

fn by_vhost(socket: &Path) -> String {
    format!("virtio_uml.device={}:1", socket.display())
}

/// A counter of a guest's interface.
fn statistic(guest: &Guest, name: &str) -> f64 {
    let text = ran(guest, &format!("cat /sys/class/net/eth0/statistics/{name}"));
    text.trim().parse().unwrap()
}

/// What transfers were like.
#[derive(Debug)]
struct Seen {
    /// Mean bytes of a frame that the receiver had.
    mean: f64,
    /// Frames that the sender had, nearly all of them ACKs, for each segment of 1,448 bytes.
    acks: f64,
}

/// Moves bytes from one guest, which has this address, to another, all of which must come; and a few times
/// more to where nothing is done with them, so that the receiver is as fast as it can be.
fn moves(from: &Guest, to: &Guest, address: &str, mib: u32) -> Seen {
    let fill = format!(
        "mkdir -p /tmp/www && head -c {} /dev/urandom >/tmp/www/bulk && sha256sum </tmp/www/bulk",
        mib << 20
    );
    let sent = ran(from, &fill);
    ran(from, "pidof httpd || httpd -p 7000 -h /tmp/www");
    let get = |into: &str| ran(to, &format!("wget -q -O {into} http://{address}:7000/bulk"));
    get("/tmp/bulk");
    assert_eq!(ran(to, "sha256sum </tmp/bulk && rm /tmp/bulk"), sent);
    let read = || {
        let of_receiver = ["rx_bytes", "rx_packets"].map(|name| statistic(to, name));
        (of_receiver, statistic(from, "rx_packets"))
    };
    let before = read();
    (0..TIMES).for_each(|_| drop(get("/dev/null")));
    let after = read();
    let [bytes, frames] = [0, 1].map(|at| after.0[at] - before.0[at]);
    Seen {
        mean: bytes / frames,
        acks: (after.1 - before.1) / (f64::from(TIMES * (mib << 20)) / 1448.0),
    }
}

const TIMES: u32 = 3;

/// Reads what is there of a capture; the longest frame's bytes, and how many there were.
fn longest(capture: &mut Port) -> (usize, usize) {
    let (mut longest, mut count) = (0, 0);
    while let Next::Packet(packet) = capture.next().unwrap() {
        longest = longest.max(packet.bytes.len());
        count += 1;
    }
    (longest, count)
}

#[test]
fn a_guest_has_few_long_frames_of_senders_that_cut_themselves() {
    let lab = Lab::new().unwrap();
    let (dir, socket) = (lab.dir().join("lan0.ctl"), lab.dir().join("lan0.sock"));
    let spec = format!("lan0,vde={},vhost={}", dir.display(), socket.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    // Each is the port of its number.
    let vde = uml(&lab, format!("eth0=vde,{}", dir.display()), "10.77.4.1");
    let virtio = uml(&lab, by_vhost(&socket), "10.77.4.2");
    let receiver = uml(&lab, by_vhost(&socket), "10.77.4.3");
    ran(&virtio, "ethtool -K eth0 tso off gso off");
    // What its own kernel merges is not asked here. A window that does not change, as that of a receiver
    // which reads as fast as data comes: ACKs that change it are not expanded.
    ran(&receiver, "ethtool -K eth0 gro off");
    ran(&receiver, "ip route del 10.77.4.0/24 dev eth0");
    keep_window(&receiver, "10.77.4.3");
    let set = |text: &str| {
        let set = ["switch", "set", "lan0/port3", text];
        let (code, said) = daemon.vnplug(&set);
        assert_eq!(code, Some(0), "{said}");
    };
    let show = || daemon.vnplug(&["switch", "show", "lan0/port3"]).1;
    let of = |name: &str| value(counted(&daemon.counters(), "source"), name);
    for (sender, address) in [(&vde, "10.77.4.1"), (&virtio, "10.77.4.2")] {
        set("gro=off acks=as-is");
        let before = of("out_super_frames");
        let single = moves(sender, &receiver, address, 8);
        assert_eq!(of("out_super_frames"), before);
        set("gro=20");
        let merged = moves(sender, &receiver, address, 8);
        let before = of("acks_expanded");
        assert!(before == 0 || address != "10.77.4.1");
        set("acks=expand");
        let shown = show();
        assert!(
            shown.contains("gro=20") && shown.contains("acks=expand"),
            "{shown}"
        );
        let expanded = moves(sender, &receiver, address, 8);
        println!("{address}: {single:?} {merged:?} {expanded:?}");
        assert!(single.mean <= 1514.0, "{single:?}");
        assert!(merged.mean > 2000.0 && expanded.mean > 2000.0, "{merged:?}");
        // One for two segments, and what else a few connections need.
        assert!(expanded.acks < 0.55, "{expanded:?}");
        // The other one's segments come in fewer, longer frames, and its ACKs seldom without another window.
        if address == "10.77.4.1" {
            assert!(of("acks_expanded") > before);
            assert!(expanded.acks > 2.0 * merged.acks, "{expanded:?}");
        }
        set("acks=as-is");
        daemon.audit();
    }

    // A capture has what was sent.
    let mut capture = daemon
        .port("host:lan0")
        .segments(Segments::Merged)
        .open()
        .unwrap();
    let before = of("out_super_frames");
    moves(&virtio, &receiver, "10.77.4.2", 1);
    assert!(of("out_super_frames") > before);
    let (longest, count) = longest(&mut capture);
    assert!(longest == 1514 && count > 500, "{longest} {count}");
    let shown = show();
    assert!(
        shown.contains("gro=20") && !shown.contains("acks=expand"),
        "{shown}"
    );
    daemon.audit();
}
