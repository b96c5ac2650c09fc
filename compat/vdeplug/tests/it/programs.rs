//! Programs of libvdeplug.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::ends::{End, files, sum};
use vnplug_e2e::station::{Running, Station, content};
use vnplug_testing::eventually;

use crate::support::{environment, output, ports, text_of};

#[test]
fn programs_of_libvdeplug_are_ports_beside_all_others() {
    let lab = Lab::new().unwrap();
    let [ours, theirs] = ["lan0.ctl", "vde.ctl"].map(|name| lab.dir().join(name));
    let spec = format!("lan0,vde={}", ours.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let env = environment(&lab, &daemon);
    let plug = |words: &[&str], name: &str| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).envs(env.iter().cloned());
        Running::start(command, &lab, name).unwrap()
    };

    // A switch of VDE at the end of a wire, a router, and four kinds of cable.
    let theirs = theirs.to_str().unwrap();
    let _real = plug(&["vde_switch", "-s", theirs, "-x"], "vde_switch");
    eventually("the other switch is there", || {
        std::path::Path::new(theirs).join("ctl").exists()
    });
    let wire = [
        "dpipe",
        "vde_plug",
        "vnplug://lan0",
        "=",
        "vde_plug",
        theirs,
    ];
    let _wire = plug(&wire, "dpipe");
    let _slirp = plug(
        &["vde_plug", "slirp://", "vnplug://host:lan0[ring=1M]"],
        "slirp",
    );
    let by_ring = |address: &str| Station::by_plug(&lab, "vnplug://lan0", &env, address).unwrap();
    let [one, two] = ["10.0.2.21", "10.0.2.22"].map(by_ring);
    let three = Station::by_vde(&lab, &ours, "10.0.2.23").unwrap();
    let four = Station::by_nic(&lab, &daemon, "lan0", "10.0.2.24", &[]).unwrap();
    let five = Station::by_vde(&lab, theirs.as_ref(), "10.0.2.25").unwrap();
    eventually("all have joined", || ports(&daemon) == 6);

    let all = [&one, &two, &three, &four, &five];
    for station in all {
        for other in all {
            let (from, to) = (&station.address, &other.address);
            assert!(station.pings(to), "{from} {to}");
        }
    }
    assert!(one.pings("10.0.2.2"), "slirp answers");
    let bytes = content(10 << 20);
    for (from, to) in [
        (&one, &two),
        (&two, &three),
        (&three, &one),
        (&four, &one),
        (&two, &four),
        (&one, &five),
        (&five, &two),
    ] {
        let between = format!("{} {}", from.address, to.address);
        assert!(from.sends(to, &bytes).unwrap() == bytes, "{between}");
    }
    let counters = daemon.audit();
    let lan0 = counted(&counters, "source");
    assert!(value(lan0, "out_rings") > 4 * (10 << 20) / 1514, "{lan0:?}");
    let label =
        |it: &&vnplug::Counted| it.labels.iter().any(|(_, text)| text.contains("user=root"));
    assert_eq!(counters.iter().filter(label).count(), 4, "{counters:?}");

    // SIGKILL.
    drop(two);
    eventually("its port is free", || ports(&daemon) == 5);
    assert!(one.pings(&three.address));
}

#[test]
fn a_restart_of_the_daemon_under_traffic_is_a_pause() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let env = environment(&lab, &daemon);
    let by_ring = |address: &str| Station::by_plug(&lab, "vnplug://lan0", &env, address).unwrap();
    let [mut one, mut two] = ["10.0.7.1", "10.0.7.2"].map(by_ring);
    for _ in 0..2 {
        let mut flood = one.netns.command("ping");
        flood.args(["-q", "-f", "-s", "1000", &two.address]);
        let _flood = Running::start(flood, &lab, "flood").unwrap();
        let before = two.statistic("rx_packets");
        let received = || two.statistic("rx_packets");
        eventually("frames move", || received() > before + 100);
        daemon.kill();
        let gone = received();
        daemon.launch().unwrap();
        eventually("frames move again", || received() > gone + 100);
    }
    assert!(one.pings(&two.address) && two.pings(&one.address));
    for station in [&mut one, &mut two] {
        let ended = station.cable.status();
        assert!(ended.is_none(), "{ended:?}: {}", station.cable.errors());
        assert_eq!(station.cable.errors(), "");
    }
    assert_eq!(ports(&daemon), 2);
    daemon.audit();
}

#[test]
fn a_user_has_a_namespace_of_his_own_on_the_switch() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("vnplug.toml");
    let text = format!(
        "socket_mode = 0o666\n[[switch]]\nname = \"lan0\"\n\
         [[allow]]\nuid = {NOBODY}\nsource = \"lan0\"\nsend = true\n"
    );
    fs::write(&config, text).unwrap();
    let daemon = Daemon::start(&lab, None, &["--config", config.to_str().unwrap()]).unwrap();
    let env = environment(&lab, &daemon);
    let station = Station::by_plug(&lab, "vnplug://lan0", &env, "10.0.8.1").unwrap();
    a_user_fetches_by_vdens(&lab, &daemon, "vnplug://lan0", &station);
}

/// By the socket of a daemon that is not root: one that was, and gave up its power, cannot answer him.
#[test]
fn a_user_has_a_namespace_of_his_own_on_the_switch_by_a_socket() {
    let lab = Lab::new().unwrap();
    let [pools, dir] = ["pools", "lan0.ctl"].map(|name| lab.dir().join(name));
    fs::create_dir(&pools).unwrap();
    let spec = format!("lan0,vde={},mode=666", dir.display());
    let pool_dir = pools.to_str().unwrap();
    std::os::unix::fs::chown(&pools, Some(DAEMON), None).unwrap();
    let args = [
        "--switch",
        &spec,
        "--user",
        "daemon",
        "--pool-dir",
        pool_dir,
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let station = Station::by_vde(&lab, &dir, "10.0.8.1").unwrap();
    let url = format!("vde://{}", dir.display());
    a_user_fetches_by_vdens(&lab, &daemon, &url, &station);
}

/// In a namespace that `vdens` makes for him a user reaches another port of the switch, and fetches what that one serves.
fn a_user_fetches_by_vdens(lab: &Lab, daemon: &Daemon, url: &str, station: &Station) {
    for dir in [lab.dir(), daemon.socket().parent().unwrap()] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let www = files(lab, 1 << 20).unwrap();
    let _served = End::host(&station.netns, lab, &www).unwrap();
    let user = format!("--reuid={NOBODY}");
    let script = "ip addr add 10.0.8.2/24 dev vde0 && ip link set vde0 up && ping -c 3 10.0.8.1 && \
                  curl -sf --max-time 60 http://10.0.8.1:7000/bulk | sha256sum";
    let vdens = ["vdens", url, "sh", "-c", script];
    let args = [&[user.as_str(), "--clear-groups"], &vdens[..]].concat();
    let text = text_of(&output("setpriv", &args, &environment(lab, daemon)));
    for part in [" 0% packet loss", sum(&www).as_str()] {
        assert!(text.contains(part), "{text}");
    }
    eventually("its port is free", || ports(daemon) == 1);
    assert_eq!(station.cable.errors(), "");
    daemon.audit();
}

#[test]
fn what_cannot_be_joined_is_refused_by_name() {
    let lab = Lab::new().unwrap();
    let args = [
        "--switch",
        "lan0,ports=1,ports_each=1",
        "--source",
        "lab=gen,pps=1",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let env = environment(&lab, &daemon);
    let _only = Station::by_plug(&lab, "vnplug://lan0", &env, "10.0.9.1").unwrap();
    for (url, args, parts) in [
        ("vnplug://lan1", &[][..], ["lan1", "No such device"]),
        ("vnplug://lab", &[], ["no switch", "Invalid argument"]),
        (
            "vnplug://lan0",
            &[],
            ["all 1 ports are taken", "Too many users"],
        ),
        (
            "vnplug://lan0",
            &["--port", "3"],
            ["by its number", "Invalid argument"],
        ),
        (
            "vnplug://lan0[color=red]",
            &[],
            ["no option 'color'", "Invalid argument"],
        ),
        (
            "vnplug://lan0[socket='/nowhere']",
            &[],
            ["/nowhere", "No such file"],
        ),
        ("vnplug://", &[], ["vnplug://lan0", "Invalid argument"]),
    ] {
        let args = [args, &[url, "null://"]].concat();
        let done = output("vde_plug", &args, &env);
        let text = text_of(&done);
        assert_eq!(done.status.code(), Some(1), "{url}: {text}");
        assert!(
            parts.iter().all(|part| text.contains(part)),
            "{url}: {text}"
        );
    }
}

const NOBODY: u32 = 65534;
/// Debian's user `daemon`.
const DAEMON: u32 = 1;
