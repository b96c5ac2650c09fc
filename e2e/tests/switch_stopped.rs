//! Programs on a switch that are stopped (SIGSTOP) while others talk: of VDE, by rings, and a front-end of vhost-user.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::raw::status;
use vnplug_e2e::station::{Station, module_environment, pings};
use vnplug_e2e::stopped::Stopped;
use vnplug_e2e::streamer::{Streamer, frame};
use vnplug_e2e::{Image, Lab, Netns, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, eventually};

/// KiB of memory that nobody shares.
fn anonymous_kib(daemon: &Daemon) -> u64 {
    let text = status(daemon.pid(), "RssAnon");
    text.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn who_is_stopped_has_a_bounded_queue_costs_others_nothing_and_goes_on() {
    let lab = Lab::new().unwrap();
    let here = Netns::new().unwrap();
    let [vde, vhost, stream] = ["ctl", "vhost", "stream"].map(|it| lab.dir().join(it));
    let spec = format!(
        "lan0,vde={},vhost={},stream={}",
        vde.display(),
        vhost.display(),
        stream.display()
    );
    let daemon = Daemon::start(&lab, Some(&here), &["--switch", &spec]).unwrap();
    let plug = Station::by_vde(&lab, &vde, "10.77.5.1").unwrap();
    let env = module_environment(&lab, &daemon).unwrap();
    let module = Station::by_plug(&lab, "vnplug://lan0", &env, "10.77.5.2").unwrap();
    let nic = Station::by_nic(&lab, &daemon, "lan0", "10.77.5.3", &[]).unwrap();
    let config = UmlConfig::vhost_user(&vhost, Image::default());
    let guest = Uml::boot(&lab, config).unwrap();
    let up = "ip addr add 10.77.5.4/24 dev eth0 && ip link set eth0 up";
    assert!(guest.run(up, PATIENCE).unwrap().success());
    // Who looks on, and is not stopped.
    let other = Station::by_vde(&lab, &vde, "10.77.5.9").unwrap();
    let addresses = ["10.77.5.1", "10.77.5.2", "10.77.5.3", "10.77.5.4"];
    let answers = |what: &str| {
        for address in addresses {
            eventually(&format!("{address} answers {what}"), || {
                pings(&other.netns, address, &[])
            });
        }
    };
    answers("first");
    let received = || {
        let of_guest = guest.run("cat /sys/class/net/eth0/statistics/rx_packets", PATIENCE);
        let of_guest: u64 = of_guest.unwrap().text().trim().parse().unwrap();
        let [one, two, three] = [&plug, &module, &nic].map(|it| it.statistic("rx_packets"));
        [one, two, three, of_guest]
    };
    let count = |name: &str| value(counted(&daemon.counters(), "source"), name);
    let mut speakers = [(); 2].map(|()| Streamer::join(&stream));
    eventually("they have joined", || count("switch_ports") == 7);
    let mut number = 0;
    // To all, in lots that a reader's socket holds: whoever reads misses none.
    let mut speak = |lots: u32| {
        for lot in 0..lots {
            let (from, to) = ((lot % 2) as usize, 1 - (lot % 2) as usize);
            for at in 1..=LOT {
                let said = frame(from as u8 + 1, 0xfe, number + at, 1000);
                speakers[from].put(&said).unwrap();
            }
            for at in 1..=LOT {
                assert_eq!(speakers[to].heard(), Some(number + at), "a frame is lost");
            }
            number += LOT;
        }
    };
    // The control: who is not stopped is given them, most at least.
    let before = received();
    speak(20);
    eventually("they are given what is for all", || {
        let now = received();
        now.iter().zip(before).all(|(now, then)| *now > then + 100)
    });
    let before = received();
    let anonymous = anonymous_kib(&daemon);
    let stopped = Stopped::new(&[
        plug.cable.pid(),
        module.cable.pid(),
        nic.cable.pid(),
        guest.pid(),
    ]);
    speak(LOTS);
    let grown = anonymous_kib(&daemon).saturating_sub(anonymous);
    assert!(
        count("out_dropped_full") > u64::from(LOTS * LOT),
        "{:?}",
        daemon.counters()
    );
    // Of two with 1 MiB each at most, where 80 MB were for the four of them.
    assert!(grown < 16 << 10, "{grown} KiB");
    drop(stopped);
    answers("when it goes on");
    for (at, (now, then)) in received().into_iter().zip(before).enumerate() {
        let late = now - then;
        eprintln!("{}: {late} of {} frames", addresses[at], LOTS * LOT);
        assert!((1..u64::from(LOTS * LOT) / 2).contains(&late), "{late}");
    }
    speak(20);
    daemon.audit();
}

/// Frames at a time, and how often, while somebody is stopped: 20,000 of 1,000 bytes.
const LOT: u32 = 50;
const LOTS: u32 = 400;
