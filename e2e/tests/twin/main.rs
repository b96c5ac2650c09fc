//! Containers that talk through the kernel instance of a switch, and what the daemon has of it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod lives;
mod traffic;

use std::thread::sleep;
use std::time::Duration;

use vnplug::Next;
use vnplug_e2e::containers::{Containers, address};
use vnplug_e2e::daemon::{Daemon, counted, value};
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
    let config = UmlConfig::vhost_user(&vhost, Image::default());
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
