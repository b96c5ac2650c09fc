//! All ways into one switch at once: each end fetches from each other, and who is killed in the middle of it costs the others
//! nothing.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vnplug_e2e::beside::Ends;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::ends::{End, all_fetch, files, ran, sum};
use vnplug_e2e::station::{Running, Station, module_environment};
use vnplug_e2e::{Guest, Image, Lab, Netns, Qemu, QemuConfig, Uml, UmlConfig};
use vnplug_testing::eventually;

/// Bytes that each end fetches from each other.
const LEN: usize = 10 << 20;
const FAR: &str = "10.77.6.1";

fn uml(lab: &Lab, argument: String) -> Guest {
    let config = UmlConfig {
        kernel_args: vec![argument],
        image: Image::default().module("virtio_net"),
        ..UmlConfig::default()
    };
    Uml::boot(lab, config).unwrap()
}

fn up(guest: &Guest, card: &str, address: &str) {
    ran(
        guest,
        &format!("ip addr add {address}/24 dev {card} && ip link set {card} up"),
    );
}

#[test]
fn each_end_has_what_each_other_serves_whichever_way_it_came_in_and_whoever_is_killed() {
    let lab = Lab::new().unwrap();
    let [here, far] = [(); 2].map(|()| Netns::new().unwrap());
    let peer = ["peer", "name", "far0", "netns", far.name()];
    let veth = ["link", "add", "up0", "type", "veth"];
    here.ip(&[&veth[..], &peer].concat()).unwrap();
    let with_prefix = format!("{FAR}/24");
    far.ip(&["addr", "add", &with_prefix, "dev", "far0"])
        .unwrap();
    far.ip(&["link", "set", "far0", "up"]).unwrap();
    here.ip(&["link", "set", "up0", "up"]).unwrap();
    let [vde, vhost, bess, dgram] = ["vde", "vhost", "bess", "dgram"].map(|it| lab.dir().join(it));
    let mut spec = "lan0,uplink=up0".to_owned();
    for (name, path) in [
        ("vde", &vde),
        ("vhost", &vhost),
        ("bess", &bess),
        ("dgram", &dgram),
    ] {
        spec = format!("{spec},{name}={}", path.display());
    }
    let daemon = Daemon::start(&lab, Some(&here), &["--switch", &spec]).unwrap();
    let count = |name: &str| value(counted(&daemon.counters(), "source"), name);
    let plug = Station::by_vde(&lab, &vde, "10.77.6.2").unwrap();
    let env = module_environment(&lab, &daemon).unwrap();
    let module = Station::by_plug(&lab, "vnplug://lan0", &env, "10.77.6.3").unwrap();
    let mut nic = Station::by_nic(&lab, &daemon, "lan0", "10.77.6.4", &[]).unwrap();
    let by_vhost = uml(&lab, format!("virtio_uml.device={}:1", vhost.display()));
    up(&by_vhost, "eth0", "10.77.6.5");
    let by_bess = uml(&lab, format!("vec0:transport=bess,dst={}", bess.display()));
    up(&by_bess, "vec0", "10.77.6.6");
    let config = QemuConfig {
        image: Image::default().module("virtio_net"),
        ..QemuConfig::default()
    };
    let by_dgram = Qemu::boot(&lab, config).unwrap();
    let qmp = by_dgram.qmp_path().unwrap().display().to_string();
    let attach = ["attach", "qemu", "--name", "q", "--qmp", &qmp, "--nic"];
    let (code, said) = daemon.vnplug(&[&attach[..], &["lan0,via=dgram"]].concat());
    assert_eq!(code, Some(0), "{said}");
    let card = "until test -e /sys/class/net/eth0; do sleep 0.1; done";
    ran(&by_dgram, card);
    up(&by_dgram, "eth0", "10.77.6.7");
    eventually("all have joined", || count("switch_ports") == 7);

    let www = files(&lab, LEN).unwrap();
    let sum = sum(&www);
    let host = |netns| End::host(netns, &lab, &www).unwrap();
    let guest = |guest| End::guest(guest, &www).unwrap();
    let ends = [
        (FAR, host(&far)),
        ("10.77.6.2", host(&plug.netns)),
        ("10.77.6.3", host(&module.netns)),
        ("10.77.6.4", host(&nic.netns)),
        ("10.77.6.5", guest(&by_vhost)),
        ("10.77.6.6", guest(&by_bess)),
        ("10.77.6.7", guest(&by_dgram)),
    ];
    all_fetch(&ends, &sum);
    daemon.audit();

    // A machine is killed while it sends and receives; then another, of another kind, and what holds an interface.
    let fetches = |by: &str, from: &str| {
        format!(
            "for at in $(seq 1000); do {by} http://{from}:7000/bulk >/dev/null || sleep 0.1; done"
        )
    };
    let busy = |guest: &Guest| {
        let _job = guest.spawn(&fetches("wget -q -O -", FAR)).unwrap();
    };
    let mut left = 7;
    let mut killed = |what: &str, address: &str, kill: &mut dyn FnMut()| {
        // It ends its shell and what that runs.
        let mut fetcher = far.command("timeout");
        fetcher.args(["300", "sh", "-c", &fetches("curl -sf -m 60", address)]);
        let mut fetcher = Running::start(fetcher, &lab, what).unwrap();
        let before = count("entered");
        eventually("frames of it come and go", || {
            count("entered") > before + 1000
        });
        let over = AtomicBool::new(false);
        left -= 1;
        let (own, other) = (&ends[1].1, ends[2].0);
        let meanwhile = thread::scope(|threads| {
            let _over = Ends([&over; 2]);
            let fetches = threads.spawn(|| {
                let mut times = 0;
                while !over.load(Ordering::Relaxed) {
                    assert_eq!(own.sum_from(other), sum, "beside {what}");
                    times += 1;
                }
                times
            });
            kill();
            eventually(&format!("{what}: its port is gone"), || {
                count("switch_ports") == left
            });
            over.store(true, Ordering::Relaxed);
            fetches.join().unwrap()
        });
        assert!(meanwhile > 0, "{what}");
        fetcher.finish();
        for (own, other) in [(1, 0), (0, 2)] {
            assert_eq!(ends[own].1.sum_from(ends[other].0), sum, "after {what}");
        }
        daemon.audit();
    };
    busy(&by_vhost);
    killed("vhost-user", "10.77.6.5", &mut || by_vhost.kill());
    busy(&by_bess);
    killed("bess", "10.77.6.6", &mut || by_bess.kill());
    killed("vnplug-nic", "10.77.6.4", &mut || nic.cable.kill());
    busy(&by_dgram);
    killed("dgram", "10.77.6.7", &mut || by_dgram.kill());
}
