//! Containers that talk through the kernel instance of a switch, and what the daemon has of it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use vnplug::Next;
use vnplug_e2e::containers::{Containers, address, wire};
use vnplug_e2e::daemon::{Daemon, counted, program, value};
use vnplug_e2e::ends::{End, files, ran};
use vnplug_e2e::station::{Station, answered, content, pings, transfer};
use vnplug_e2e::{Image, Uml, UmlConfig};
use vnplug_testing::{eventually, until};

const TWIN: &str = "/twin=on";

fn daemon(site: &Containers, options: &str, more: &str) -> Daemon {
    let switch = site.switch(options, more);
    Daemon::start(&site.lab, Some(&site.here), &["--switch", &switch]).unwrap()
}

fn of_switch(daemon: &Daemon, name: &str) -> u64 {
    value(counted(&daemon.counters(), "source"), name)
}

#[test]
fn containers_talk_through_the_kernel_and_machines_through_the_daemon() {
    let site = Containers::new(3).unwrap();
    let daemon = daemon(&site, TWIN, "");
    let nic = Station::by_nic(&site.lab, &daemon, site.here.name(), "10.9.0.9", &[]).unwrap();
    let [one, two] = [&site.all[0], &site.all[1]];
    // Whatever the kernel merged would be one frame here, and many there.
    let bytes = content(32 << 20);
    assert!(pings(one, &address(2), &[]) && pings(one, "10.9.0.9", &[]));
    let forwarded = || of_switch(&daemon, "twin_forwarded");
    let before = forwarded();
    assert!(before > 0);
    assert!(transfer(one, two, &address(2), &bytes).unwrap() == bytes);
    let by_kernel = forwarded() - before;
    // Super-frames stay whole: far fewer frames than segments.
    assert!((500..12_000).contains(&by_kernel), "{by_kernel}");
    let before = forwarded();
    assert!(transfer(one, &nic.netns, "10.9.0.9", &bytes).unwrap() == bytes);
    assert!(transfer(&nic.netns, two, &address(2), &bytes).unwrap() == bytes);
    // But for ARP none of these is the kernel's.
    assert!(forwarded() - before < 10);
    // What entered is what the wires brought; each was counted by one of both.
    let entered = || {
        let wires = (1..=3).map(|number| site.statistic(number, "rx_packets"));
        let all = wires.sum::<u64>() + nic.statistic("tx_packets");
        (all, of_switch(&daemon, "entered"))
    };
    until("all that came is counted", entered, |(all, entered)| {
        all == entered
    });
    let left = || {
        let wires = (1..=3).map(|number| site.statistic(number, "tx_packets"));
        let by_links = of_switch(&daemon, "out_enqueued");
        (wires.sum::<u64>(), by_links)
    };
    until("all that left is counted", left, |(all, out)| all == out);
    let counters = daemon.audit();
    let switch = counted(&counters, "source");
    assert_eq!(
        (value(switch, "twin_ports"), value(switch, "twin_lost")),
        (3, 0)
    );
    assert_eq!(value(switch, "moves"), 0);
}

#[test]
fn a_virtual_machine_talks_to_containers_through_the_daemon_beside_those_that_the_kernel_serves() {
    let site = Containers::new(2).unwrap();
    let vhost = site.lab.dir().join("vhost");
    let daemon = daemon(&site, TWIN, &format!(",vhost={}", vhost.display()));
    let config = UmlConfig {
        kernel_args: vec![format!("virtio_uml.device={}:1", vhost.display())],
        image: Image::default().module("virtio_net"),
        ..UmlConfig::default()
    };
    let guest = Uml::boot(&site.lab, config).unwrap();
    let own = "10.9.0.8";
    ran(
        &guest,
        &format!("ip addr add {own}/24 dev eth0 && ip link set eth0 up"),
    );
    let www = files(&site.lab, 8 << 20).unwrap();
    let bytes = std::fs::read(www.join("bulk")).unwrap();
    let served = End::guest(&guest, &www).unwrap();
    let [one, two] = [&site.all[0], &site.all[1]];
    let host = End::host(one, &site.lab, &www).unwrap();
    assert!(pings(one, &address(2), &[]) && pings(one, own, &[]));
    let forwarded = || of_switch(&daemon, "twin_forwarded");
    // Two containers meanwhile: those are the kernel's.
    let before = forwarded();
    assert!(transfer(one, two, &address(2), &bytes).unwrap() == bytes);
    assert!(forwarded() - before > 100);
    let before = forwarded();
    let sum = host.runs(&format!("sha256sum <{}", www.join("bulk").display()));
    assert_eq!(served.sum_from(&address(1)), sum.trim());
    assert_eq!(host.sum_from(own), sum.trim());
    // But for ARP none of these is the kernel's.
    assert!(forwarded() - before < 10);
    let counters = daemon.audit();
    let switch = counted(&counters, "source");
    let values = [
        "twin_ports",
        "twin_lost",
        "switch_ports",
        "stations",
        "moves",
    ];
    assert_eq!(values.map(|name| value(switch, name)), [2, 0, 3, 3, 0]);
}

#[test]
fn the_hosts_stack_gets_none_of_it() {
    for (options, hears) in [("", true), (TWIN, false)] {
        let site = Containers::new(2).unwrap();
        site.here
            .ip(&["addr", "add", "10.9.0.100/24", "dev", "c1"])
            .unwrap();
        let _daemon = daemon(&site, options, "");
        assert!(pings(&site.all[0], &address(2), &[]));
        let heard = pings(&site.all[0], "10.9.0.100", &["-c", "1", "-W", "1"]);
        assert_eq!(heard, hears, "{options}");
    }
}

#[test]
fn who_captures_sees_every_frame_and_the_kernel_goes_on_afterwards() {
    let site = Containers::new(2).unwrap();
    let daemon = daemon(&site, TWIN, "");
    let one = &site.all[0];
    assert!(pings(one, &address(2), &[]));
    let forwarded = || of_switch(&daemon, "twin_forwarded");
    for device in ["", "/port1"] {
        let before = forwarded();
        assert_eq!(answered(one, &address(2), 50), 50);
        assert!(forwarded() - before >= 100);
        let name = format!("host:{}{device}", site.here.name());
        let mut port = daemon.port(&name).filter("icmp").open().unwrap();
        // The thread that forwards knows of it before the port is open, and says so in its next turn.
        sleep(Duration::from_millis(20));
        let before = forwarded();
        assert_eq!(answered(one, &address(2), 50), 50);
        assert_eq!(forwarded(), before, "{name}");
        let mut seen = 0;
        eventually("all of them are seen", || {
            while let Next::Packet(_) = port.next().unwrap() {
                seen += 1;
            }
            seen == 100
        });
        drop(port);
        let before = forwarded();
        eventually("the kernel goes on", || {
            let _ = answered(one, &address(2), 5);
            forwarded() > before
        });
    }
    daemon.audit();
}

#[test]
fn settings_of_a_port_that_only_the_daemon_knows_hold() {
    let site = Containers::new(3).unwrap();
    let daemon = daemon(&site, TWIN, "");
    let [one, two] = [&site.all[0], &site.all[1]];
    let reaches = |to: usize| pings(one, &address(to), &["-c", "1", "-W", "1"]);
    assert!(reaches(2) && reaches(3));
    let set = |port: usize, setting: &str| {
        let port = format!("{}/port{port}", site.here.name());
        let (code, said) = daemon.vnplug(&["switch", "set", &port, setting]);
        assert_eq!(code, Some(0), "{said}");
    };
    set(2, "link=down");
    eventually("its link is down", || !reaches(2));
    assert!(reaches(3));
    set(2, "link=up");
    eventually("its link is up", || reaches(2));
    for port in [1, 2] {
        set(port, "isolated=yes");
    }
    eventually("they are isolated", || !reaches(2));
    assert!(reaches(3) && pings(two, &address(3), &[]));
    for port in [1, 2] {
        set(port, "isolated=no");
    }
    eventually("they are not", || reaches(2));
    // And by the kernel, which was not asked meanwhile.
    let before = of_switch(&daemon, "twin_forwarded");
    assert_eq!(answered(one, &address(2), 50), 50);
    assert!(of_switch(&daemon, "twin_forwarded") - before >= 100);
    daemon.audit();
}

#[test]
fn when_the_daemon_is_killed_the_kernel_goes_on_and_the_next_one_knows_all() {
    let site = Containers::new(3).unwrap();
    let mut daemon = daemon(&site, TWIN, "");
    let one = &site.all[0];
    for number in [2, 3] {
        assert!(pings(one, &address(number), &[]));
    }
    // The third is forgotten: nobody but the daemon would find it.
    let before = of_switch(&daemon, "twin_forwarded");
    let lost = scope(|threads| {
        let stream = threads.spawn(|| answered(one, &address(2), 1000));
        sleep(Duration::from_millis(700));
        daemon.kill();
        1000 - stream.join().unwrap()
    });
    assert_eq!(lost, 0, "while the daemon was killed");
    assert_eq!(answered(one, &address(3), 50), 50);
    // A stranger is not found, as nobody asks for it. The other one knows nobody either, or it would look whether
    // this one is still there, by a frame that finds its way.
    for netns in [&site.all[1], one] {
        let _ = netns.ip(&["neigh", "flush", "dev", "eth0"]);
    }
    assert_eq!(answered(one, &address(2), 1), 0);
    for (netns, other) in [(0, 1), (1, 0)] {
        let mac = site.all[other]
            .exec(&["cat", "/sys/class/net/eth0/address"])
            .unwrap();
        let to = address(other + 1);
        let neighbour = ["neigh", "replace", &to, "lladdr", mac.trim(), "dev", "eth0"];
        site.all[netns].ip(&neighbour).unwrap();
    }
    assert_eq!(answered(one, &address(2), 50), 50);
    daemon.launch().unwrap();
    let log = daemon.log();
    assert!(log.contains("knows 3 stations already"), "{log}");
    let now = of_switch(&daemon, "twin_forwarded");
    assert!(now >= before + 2000, "{before} {now}");
    assert!(of_switch(&daemon, "twin_lost") > 0);
    let flooded = of_switch(&daemon, "flooded");
    assert_eq!(answered(one, &address(2), 200), 200);
    let counters = daemon.audit();
    let switch = counted(&counters, "source");
    assert_eq!(value(switch, "flooded"), flooded);
    assert!(value(switch, "twin_forwarded") >= now + 400);
    // What is new is found again.
    assert!(pings(&site.all[2], &address(2), &[]));
}

#[test]
fn a_daemon_that_is_another_user_has_the_same_twin() {
    let site = Containers::new(3).unwrap();
    let pools = site.lab.dir().join("pools");
    std::fs::create_dir(&pools).unwrap();
    std::os::unix::fs::chown(&pools, Some(65534), None).unwrap();
    let switch = site.switch(TWIN, "");
    let pool_dir = pools.to_str().unwrap();
    let args = [
        "--switch",
        &switch,
        "--user",
        "nobody",
        "--pool-dir",
        pool_dir,
    ];
    let mut daemon = Daemon::start(&site.lab, Some(&site.here), &args).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    assert!(status.contains("\nUid:\t65534\t65534"), "{status}");
    let one = &site.all[0];
    for number in [2, 3] {
        assert!(pings(one, &address(number), &[]));
    }
    let before = of_switch(&daemon, "twin_forwarded");
    assert_eq!(answered(one, &address(2), 100), 100);
    assert!(of_switch(&daemon, "twin_forwarded") >= before + 200);
    // What the daemon alone does, it may without root: a capture, and a setting that is written into the maps.
    let name = format!("host:{}", site.here.name());
    let mut port = daemon.port(&name).filter("icmp").open().unwrap();
    sleep(Duration::from_millis(20));
    assert_eq!(answered(one, &address(3), 10), 10);
    assert!(matches!(port.next().unwrap(), Next::Packet(_)));
    drop(port);
    daemon.kill();
    assert_eq!(answered(one, &address(2), 50), 50);
    daemon.launch().unwrap();
    let log = daemon.log();
    assert!(log.contains("knows 3 stations already"), "{log}");
    let before = of_switch(&daemon, "twin_forwarded");
    assert_eq!(answered(one, &address(2), 100), 100);
    assert!(of_switch(&daemon, "twin_forwarded") >= before + 200);
    // Its names are its own, so that it can take them away.
    let pid = rustix::process::Pid::from_raw(daemon.pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let names = || std::fs::read_dir(site.names()).map_or(0, Iterator::count);
    eventually("its names are gone", || names() == 0);
}

#[test]
fn an_orderly_end_leaves_nothing_and_a_second_daemon_has_no_such_switch() {
    let site = Containers::new(2).unwrap();
    let mut first = daemon(&site, TWIN, "");
    assert!(pings(&site.all[0], &address(2), &[]));
    let names = || std::fs::read_dir(site.names()).map_or(0, Iterator::count);
    assert_eq!(names(), 4);
    let switch = site.switch(TWIN, "");
    let second = Daemon::start(&site.lab, Some(&site.here), &["--switch", &switch]).err();
    let said = second.map(|error| error.to_string()).unwrap_or_default();
    assert!(
        said.contains("another daemon has a switch of this name"),
        "{said}"
    );
    let pid = rustix::process::Pid::from_raw(first.pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    eventually("its names are gone", || names() == 0);
    first.kill();
    assert_eq!(answered(&site.all[0], &address(2), 3), 0);
}

#[test]
fn without_a_bpf_filesystem_the_daemon_says_what_to_do() {
    let site = Containers::new(1).unwrap();
    let vnplugd = program("vnplugd").unwrap();
    let socket = site.lab.dir().join("s");
    let command = format!(
        "umount /sys/fs/bpf; exec {} --socket {} --switch {}",
        vnplugd.display(),
        socket.display(),
        site.switch(TWIN, "")
    );
    let mut unshared = site.here.command("unshare");
    unshared.args(["--mount", "sh", "-c", &command]);
    unshared.stdin(Stdio::null());
    let output = unshared.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("mount -t bpf bpf /sys/fs/bpf"),
        "{said}"
    );
}

/// Frames that one sends to another while something is done; how many were sent, lost, and came twice.
fn numbered(site: &Containers, meanwhile: impl Fn()) -> (u64, u64, u64) {
    numbered_of(site, 8, meanwhile)
}

/// The same with so many bytes in each.
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

#[test]
fn what_a_stranger_put_in_the_place_of_its_names_is_not_followed_and_not_emptied() {
    use std::os::unix::fs::{chown, symlink};
    let site = Containers::new(2).unwrap();
    let victim = site.lab.dir().join("victim");
    std::fs::create_dir(&victim).unwrap();
    std::fs::write(victim.join("kept"), "kept").unwrap();
    let said = || {
        let switch = site.switch(TWIN, "");
        let error = Daemon::start(&site.lab, Some(&site.here), &["--switch", &switch]).err();
        error.map(|error| error.to_string()).unwrap_or_default()
    };
    // A daemon makes the directory above; when it has ended, names are free.
    drop(daemon(&site, TWIN, ""));
    let names = site.names();
    let _ = std::fs::remove_dir_all(names);
    symlink(&victim, names).unwrap();
    let followed = said();
    std::fs::remove_file(names).unwrap();
    assert!(
        followed.contains("Not a directory") || followed.contains("symbolic"),
        "{followed}"
    );
    assert!(victim.join("kept").exists());
    std::fs::create_dir(names).unwrap();
    chown(names, Some(65_534), None).unwrap();
    let taken = said();
    std::fs::remove_dir(names).unwrap();
    assert!(taken.contains("belongs to user 65534"), "{taken}");
    // The control: without either it starts, and is a twin.
    let daemon = daemon(&site, TWIN, "");
    assert!(pings(&site.all[0], &address(2), &[]));
    assert!(of_switch(&daemon, "twin_ports") == 2);
}

#[test]
fn a_killed_twin_is_gone_when_the_next_daemon_has_none() {
    let site = Containers::new(2).unwrap();
    let mut first = daemon(&site, TWIN, "");
    assert!(pings(&site.all[0], &address(2), &[]));
    first.kill();
    // The control: the kernel goes on.
    assert_eq!(answered(&site.all[0], &address(2), 3), 3);
    let _plain = daemon(&site, "", "");
    let gone = || !site.names().exists();
    eventually("its names are gone", gone);
    let (_, lost, twice) = numbered(&site, || sleep(Duration::from_millis(300)));
    assert_eq!((lost, twice), (0, 0));
}
