//! Frames on their way while ports, interfaces and who captures change.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use vnplug_e2e::containers::{Containers, address, wire};
use vnplug_e2e::daemon::{counted, value};
use vnplug_e2e::station::{answered, content, pings, transfer};
use vnplug_testing::eventually;

use super::{TWIN, daemon, of_switch};

/// Frames that one sends to another while something is done; how many were sent, lost, and came twice.
pub(super) fn numbered(site: &Containers, meanwhile: impl Fn()) -> (u64, u64, u64) {
    numbered_of(site, 8, meanwhile)
}

/// The same with `len` bytes in each.
fn numbered_of(site: &Containers, len: usize, meanwhile: impl Fn()) -> (u64, u64, u64) {
    let [one, two] = [&site.all[0], &site.all[1]];
    let to = format!("{}:9000", address(2));
    let receiver = two.enter(|| UdpSocket::bind(&to).unwrap()).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, 64 << 20).unwrap();
    receiver
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let sender = one.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    sender.connect(&to).unwrap();
    let over = AtomicBool::new(false);
    let (sent, came) = scope(|threads| {
        let came = threads.spawn(|| {
            let mut came: Vec<u8> = Vec::new();
            let mut bytes = [0; 2048];
            while receiver.recv(&mut bytes).is_ok() {
                let number = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
                if came.len() <= number {
                    came.resize(number + 1, 0);
                }
                came[number] += 1;
            }
            came
        });
        let sent = threads.spawn(|| {
            let (mut number, mut bytes) = (0_u64, vec![0; len]);
            while !over.load(Ordering::Relaxed) {
                for _ in 0..20 {
                    bytes[..8].copy_from_slice(&number.to_le_bytes());
                    sender.send(&bytes).unwrap();
                    number += 1;
                }
                sleep(Duration::from_millis(1));
            }
            number
        });
        meanwhile();
        over.store(true, Ordering::Relaxed);
        (sent.join().unwrap(), came.join().unwrap())
    });
    let twice = came.iter().filter(|count| **count > 1).count() as u64;
    let once = came.iter().filter(|count| **count > 0).count() as u64;
    (sent, sent - once, twice)
}

#[test]
fn each_frame_goes_one_way_whatever_changes_meanwhile() {
    let site = Containers::new(3).unwrap();
    let daemon = daemon(&site, TWIN, "");
    assert!(pings(&site.all[0], &address(2), &[]));
    let name = format!("host:{}", site.here.name());
    let set = |setting: &str| {
        let port = format!("{}/port2", site.here.name());
        let (code, said) = daemon.vnplug(&["switch", "set", &port, setting]);
        assert_eq!(code, Some(0), "{said}");
    };
    let (sent, lost, twice) = numbered(&site, || {
        let until = Instant::now() + Duration::from_secs(4);
        while Instant::now() < until {
            // Who captures comes and goes, and so do settings of the port and stations of others.
            let port = daemon.port(&name).open().unwrap();
            sleep(Duration::from_millis(10));
            drop(port);
            set("isolated=yes");
            set("isolated=no");
            let _ = pings(&site.all[2], &address(1), &["-c", "1", "-i", "0.01"]);
        }
    });
    assert!(sent > 20_000, "{sent}");
    assert_eq!((lost, twice), (0, 0), "of {sent}");
    let counters = daemon.audit();
    let switch = counted(&counters, "source");
    let by_kernel = value(switch, "twin_forwarded");
    // Both instances had their part.
    let by_daemon = value(switch, "unicast") - by_kernel;
    assert!(
        by_kernel > 2000 && by_daemon > 2000,
        "{by_kernel} {by_daemon}"
    );
    println!("{sent} frames, {by_kernel} by the kernel, {by_daemon} by the daemon");
}

#[test]
fn an_uplink_is_taken_away_while_others_are_forwarded_by_the_kernel() {
    let site = Containers::new(3).unwrap();
    let daemon = daemon(&site, TWIN, "");
    let [one, third] = [&site.all[0], &site.all[2]];
    assert!(pings(one, &address(2), &[]) && pings(one, &address(3), &[]));
    let statistics = || {
        let all = daemon.audit();
        let it = counted(&all, "source");
        ["twin_forwarded", "entered", "out_enqueued"].map(|name| value(it, name))
    };
    // Of the machine itself, which hears nothing of a port.
    site.here
        .ip(&["addr", "add", "10.9.0.99/24", "dev", "c3"])
        .unwrap();
    let host_hears = || pings(third, "10.9.0.99", &["-c", "1", "-W", "1"]);
    assert!(!host_hears());
    let before = statistics();
    let set = |uplinks: &str| {
        let words = ["switch", "set", site.here.name(), uplinks];
        daemon.vnplug(&words)
    };
    let (sent, lost, twice) = numbered(&site, || {
        sleep(Duration::from_millis(300));
        let (code, said) = set("uplink=c1/twin=on+c2/twin=on");
        assert_eq!(code, Some(0), "{said}");
        sleep(Duration::from_millis(300));
    });
    assert!(sent > 2000, "{sent}");
    assert_eq!((lost, twice), (0, 0), "of {sent}");
    // Its program is gone, and so is its name.
    eventually("the machine hears it", host_hears);
    let names = std::fs::read_dir(site.names()).unwrap().flatten();
    let links = names.filter(|it| it.file_name().to_string_lossy().starts_with("link-"));
    assert_eq!(links.count(), 2);
    assert_eq!(of_switch(&daemon, "twin_ports"), 2);
    assert!(!pings(one, &address(3), &["-c", "1", "-W", "1"]));
    // What the kernel had forwarded of it stays counted.
    let now = statistics();
    assert!(
        before.iter().zip(&now).all(|(before, now)| before <= now),
        "{before:?} {now:?}"
    );
    assert!(now[0] - before[0] > sent / 2, "{before:?} {now:?}");
    // It comes back without a twin, whose rights are gone, and as the same port, whose counters are its own.
    let (code, said) = set("uplink=c1/twin=on+c2/twin=on+c3/twin=on");
    assert!(code != Some(0) && said.contains("twin"), "{said}");
    site.here
        .ip(&["addr", "del", "10.9.0.99/24", "dev", "c3"])
        .unwrap();
    let (code, said) = set("uplink=c1/twin=on+c2/twin=on+c3");
    assert_eq!(code, Some(0), "{said}");
    eventually("it is reached", || {
        pings(one, &address(3), &["-c", "1", "-W", "1"])
    });
    assert!(statistics()[0] >= now[0]);
}

#[test]
fn a_port_sends_no_more_than_it_may_by_whichever_instance() {
    let site = Containers::new(2).unwrap();
    let daemon = daemon(&site, TWIN, "");
    assert!(pings(&site.all[0], &address(2), &[]));
    let port = format!("{}/port1", site.here.name());
    let (code, said) = daemon.vnplug(&["switch", "set", &port, "police=8000000"]);
    assert_eq!(code, Some(0), "{said}");
    sleep(Duration::from_millis(100));
    let capture = || {
        daemon
            .port(&format!("host:{}", site.here.name()))
            .open()
            .unwrap()
    };
    // 20,000 frames of 50 bytes a second are 8 Mbit/s; longer ones are too many.
    for watched in [false, true] {
        let captured = watched.then(capture);
        sleep(Duration::from_millis(50));
        let before = of_switch(&daemon, "in_dropped_police");
        let (sent, lost, _) = numbered_of(&site, 200, || sleep(Duration::from_secs(3)));
        let passed = (sent - lost) as f64 * 242.0 * 8.0 / 3.0;
        assert!(
            lost > 1000 && (5.6e6..9.6e6).contains(&passed),
            "{watched}: {sent} {lost} {passed}"
        );
        let policed = of_switch(&daemon, "in_dropped_police") - before;
        assert!(policed >= lost, "{policed} {lost}");
        drop(captured);
    }
    daemon.audit();
    let (code, said) = daemon.vnplug(&["switch", "set", &port, "police=no"]);
    assert_eq!(code, Some(0), "{said}");
    sleep(Duration::from_millis(100));
    let (_, lost, _) = numbered_of(&site, 200, || sleep(Duration::from_secs(1)));
    assert_eq!(lost, 0);
}

/// What is to be cut is as long as its packets: those of 9,000 bytes are too long for a switch of 1,514.
#[test]
fn super_frames_whose_packets_are_too_long_pass_by_neither_instance() {
    const BYTES: usize = 32 << 10;
    for (longest, arrives) in [("", true), (",longest=1514", false)] {
        let site = Containers::new(2).unwrap();
        let [one, two] = [&site.all[0], &site.all[1]];
        let daemon = daemon(&site, TWIN, longest);
        assert!(pings(one, &address(2), &[]));
        let ends = [
            (&site.here, "c1"),
            (&site.here, "c2"),
            (one, "eth0"),
            (two, "eth0"),
        ];
        for (netns, interface) in ends {
            netns
                .ip(&["link", "set", interface, "mtu", "9000"])
                .unwrap();
        }
        let to = format!("{}:9000", address(2));
        let listener = two.enter(|| TcpListener::bind(&to).unwrap()).unwrap();
        let mut sender = one.enter(|| TcpStream::connect(&to).unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let wait = Some(Duration::from_secs(1));
        sender.set_write_timeout(wait).unwrap();
        receiver.set_read_timeout(wait).unwrap();
        let before = of_switch(&daemon, "twin_forwarded");
        let written = sender.write(&[7; BYTES]).unwrap();
        let mut came = vec![0; written];
        let result = receiver.read_exact(&mut came);
        let counters = daemon.audit();
        let switch = counted(&counters, "source");
        let [forwarded, long] =
            ["twin_forwarded", "in_dropped_long"].map(|name| value(switch, name));
        println!("{written} bytes: {result:?}, {forwarded} by the kernel, {long} too long");
        assert_eq!(result.is_ok(), arrives);
        assert_eq!(long > 0, !arrives);
        // The control: nothing but their length keeps them from the kernel instance.
        assert!(!arrives || forwarded > before);
        assert!(arrives || came.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn what_is_done_to_the_interfaces_under_traffic_leaves_nothing_stuck() {
    let site = Containers::new(2).unwrap();
    let daemon = daemon(&site, TWIN, "");
    let [one, two] = [&site.all[0], &site.all[1]];
    assert!(pings(one, &address(2), &[]));
    let works = |what: &str| {
        eventually(what, || pings(one, &address(2), &["-c", "1", "-W", "1"]));
        let before = of_switch(&daemon, "twin_forwarded");
        eventually(what, || answered(one, &address(2), 50) == 50);
        let forwarded = of_switch(&daemon, "twin_forwarded") - before;
        println!("{what}: {forwarded} frames by the kernel");
        assert!(forwarded >= 100, "{what}: {forwarded}");
    };
    let over = AtomicBool::new(false);
    let sender = two.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    scope(|threads| {
        let traffic = threads.spawn(|| {
            // Nobody takes them; of a link that is down the system says so.
            for len in [1000, 1400, 8000].into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let _ = sender.send_to(&[0; 8000][..len], (address(1), 9000));
                sleep(Duration::from_millis(1));
            }
        });
        for (netns, words) in [
            (&site.here, "ethtool -S c1"),
            // An interface with a program must not receive by fewer queues than the other end sends by.
            (one, "ethtool -L eth0 rx 1 tx 1"),
            (&site.here, "ethtool -L c1 rx 1 tx 1"),
            (&site.here, "ethtool -L c1 rx 2 tx 2"),
            (one, "ethtool -L eth0 rx 2 tx 2"),
            (&site.here, "ethtool -K c1 gro on"),
            (&site.here, "ethtool -K c2 tso off"),
            (one, "ethtool -K eth0 tx off"),
            (two, "ethtool -K eth0 tso off gso off"),
            (two, "ethtool -K eth0 tso on gso on"),
            (&site.here, "ip link set c1 mtu 9000"),
            (one, "ip link set eth0 mtu 9000"),
            (&site.here, "ip link set c2 mtu 9000"),
            (two, "ip link set eth0 mtu 9000"),
            (&site.here, "ip link set c1 mtu 1500"),
            (one, "ip link set eth0 mtu 1500"),
            (
                &site.here,
                "ip link set c2 down; sleep 0.2; ip link set c2 up",
            ),
            (one, "ip link set eth0 down; sleep 0.2; ip link set eth0 up"),
        ] {
            let done = netns.exec(&["sh", "-ec", words]);
            done.unwrap_or_else(|error| panic!("{words}: {error}"));
            works(words);
        }
        // Deleted, and made again: another interface of the same name.
        site.here.ip(&["link", "delete", "c2"]).unwrap();
        sleep(Duration::from_millis(300));
        wire(&site.here, two, 2).unwrap();
        eventually("the kernel has the new one", || {
            of_switch(&daemon, "twin_ports") == 2
        });
        let _ = one.ip(&["neigh", "flush", "dev", "eth0"]);
        works("made again");
        over.store(true, Ordering::Relaxed);
        traffic.join().unwrap();
    });
    let bytes = content(8 << 20);
    assert!(transfer(one, two, &address(2), &bytes).unwrap() == bytes);
    daemon.audit();
}
