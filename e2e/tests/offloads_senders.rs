//! What slirp sends, whose TCP counts ACKs, and what scp copies is whole where segments are merged and ACKs for them
//! restored, and a capture has nothing but right frames of the wire. A stock guest gives slirp the ACKs back.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::ends::{keep_window, ran};
use vnplug_e2e::station::{Running, Station, content};
use vnplug_e2e::sums::Capture;
use vnplug_e2e::{Image, Lab, Netns, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, eventually};

fn count(daemon: &Daemon, name: &str) -> u64 {
    let counters = daemon.counters();
    value(counters.iter().find(|it| it.name == "lan0").unwrap(), name)
}

/// Ends the interface of a container, which merged and restored some.
fn finish(mut nic: Station) {
    nic.cable.finish();
    let told = nic.cable.last();
    for name in ["merged", "acks_added"] {
        assert!(told[name].as_u64().unwrap() > 0, "{told}");
    }
}

/// Bytes of what is moved: 5,700 segments.
const LEN: usize = 8 << 20;
/// Bytes of a segment without timestamps.
const MSS: usize = 1460;
/// How often slirp sends it to the guest by each of the settings.
const ROUNDS: usize = 2;

const MERGING: [&str; 4] = ["--gro", "20", "--acks", "expand"];

#[test]
fn what_slirp_sends_is_whole_merged_and_with_acks_restored() {
    let lab = Lab::new().unwrap();
    let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!("lan0,vhost={},vde={}", socket.display(), dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    // slirp's own machine serves a file, at its loopback.
    let far = Netns::new().unwrap();
    let www = lab.dir().join("www");
    std::fs::create_dir(&www).unwrap();
    let bytes = content(LEN);
    std::fs::write(www.join("bulk"), &bytes).unwrap();
    let mut server = far.command("python3");
    server.args(["-m", "http.server", "7000", "-d"]).arg(&www);
    let _server = Running::start(server, &lab, "http").unwrap();
    let mut slirp = far.command("vde_plug");
    slirp
        .arg("slirp://")
        .arg(format!("vde://{}", dir.display()));
    let _slirp = Running::start(slirp, &lab, "slirp").unwrap();
    eventually("slirp has joined", || count(&daemon, "switch_ports") == 1);
    let config = UmlConfig::vhost_user(&socket, Image::default());
    let guest = Uml::boot(&lab, config).unwrap();
    ran(
        &guest,
        "ip addr add 10.0.2.16/32 dev eth0 && ip link set eth0 up",
    );
    keep_window(&guest, "10.0.2.16");
    let nic = Station::by_nic(&lab, &daemon, "lan0", "10.0.2.15", &MERGING).unwrap();
    let url = "http://10.0.2.2:7000/bulk";
    eventually("it serves", || {
        nic.netns.exec(&["curl", "-sfI", url]).is_ok()
    });
    let capture = Capture::start(&lab, &daemon, "lan0", "slirp").unwrap();
    let came = lab.dir().join("came");
    // The guest is a stock one, whose kernel merges, too.
    let seen = [
        "gro=off acks=as-is",
        "gro=20 acks=as-is",
        "gro=20 acks=expand",
    ]
    .map(|settings| {
        let (code, said) = daemon.vnplug(&["switch", "set", "lan0/port2", settings]);
        assert_eq!(code, Some(0), "{said}");
        let read = || {
            let own = ran(&guest, "cat /sys/class/net/eth0/statistics/tx_packets");
            let of = ["out_super_frames", "acks_expanded"].map(|name| count(&daemon, name));
            [own.trim().parse().unwrap(), of[0], of[1]]
        };
        let before: [u64; 3] = read();
        for _ in 0..ROUNDS {
            ran(&guest, &format!("wget -q -O /tmp/came {url}"));
            guest.pull("/tmp/came", &came, PATIENCE).unwrap();
            assert!(std::fs::read(&came).unwrap() == bytes, "{settings}");
        }
        let after = read();
        let [own, merged, expanded] = [0, 1, 2].map(|at| after[at] - before[at]);
        let to = came.to_str().unwrap();
        let get = ["curl", "-sf", "--max-time", "60", "-o", to, url];
        nic.netns.exec(&get).unwrap();
        assert!(
            std::fs::read(&came).unwrap() == bytes,
            "container, {settings}"
        );
        let acks = (own + expanded) as f64 / (ROUNDS * LEN / MSS) as f64;
        println!(
            "{settings}: {merged} super-frames, {expanded} ACKs added, {acks:.3} ACKs for a segment"
        );
        (merged, expanded, acks)
    });
    let (frames, _) = capture.check("slirp").unwrap();
    assert!(frames > (3 + 3 * ROUNDS) * LEN / MSS, "{frames}");
    let [off, merged, restored] = seen;
    assert_eq!((off.0, off.1, merged.1), (0, 0, 0));
    assert!(merged.0 > 0 && restored.0 > 0 && restored.1 > 0);
    // What slirp lets its window grow by: it has them back, one for two segments at most beside the guest's own.
    assert!(restored.2 > 2.0 * merged.2, "{seen:?}");
    assert!(restored.2 < 0.65, "{seen:?}");
    finish(nic);
    daemon.audit();
}

/// dropbear in a namespace, at port 7003, for root with this key; its home is its own.
fn serve(netns: &Netns, lab: &Lab, keys: &Path) -> Running {
    let (host, own) = (keys.join("host"), keys.join("own"));
    let made = ["dropbearkey", "-t", "ed25519", "-f"].as_slice();
    netns
        .exec(&[made, &[host.to_str().unwrap()]].concat())
        .unwrap();
    let make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"].as_slice();
    netns
        .exec(&[make, &[own.to_str().unwrap()]].concat())
        .unwrap();
    let script = "mount -t tmpfs -o mode=700 none /root && mkdir -m 700 /root/.ssh && \
         cp \"$1/own.pub\" /root/.ssh/authorized_keys && chmod 600 /root/.ssh/authorized_keys && \
         exec dropbear -F -E -s -r \"$1/host\" -P '' -p 7003";
    let mut server = netns.command("unshare");
    server.args(["--mount", "sh", "-c", script, "sh"]).arg(keys);
    let server = Running::start(server, lab, "dropbear").unwrap();
    eventually("it serves", || {
        let listening = netns.exec(&["ss", "-Hltn"]).unwrap();
        listening.contains(":7003")
    });
    server
}

#[test]
fn what_scp_copies_is_whole_merged_and_with_acks_restored() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let vde = Station::by_vde(&lab, &dir, "10.77.8.3").unwrap();
    let nic = Station::by_nic(&lab, &daemon, "lan0", "10.77.8.4", &MERGING).unwrap();
    assert!(nic.pings(&vde.address));
    let keys = lab.dir().join("keys");
    std::fs::create_dir(&keys).unwrap();
    let server = serve(&vde.netns, &lab, &keys);
    let [bulk, came, back] = ["bulk", "came", "back"].map(|it| lab.dir().join(it));
    let bytes = content(LEN);
    std::fs::write(&bulk, &bytes).unwrap();
    let key = keys.join("own");
    let copies = |from: &str, to: &str| {
        let key = key.to_str().unwrap();
        let mut words = vec!["scp", "-O", "-q", "-P", "7003", "-i", key];
        for option in [
            "BatchMode=yes",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "ConnectTimeout=20",
        ] {
            words.extend(["-o", option]);
        }
        words.extend([from, to]);
        let copied = nic.netns.exec(&words);
        copied.unwrap_or_else(|error| panic!("{error}: {}", server.errors()));
    };
    let there = |path: &Path| format!("root@{}:{}", vde.address, path.display());
    let capture = Capture::start(&lab, &daemon, "lan0", "scp").unwrap();
    for round in 0..3 {
        copies(&there(&bulk), came.to_str().unwrap());
        assert!(std::fs::read(&came).unwrap() == bytes, "{round}");
        copies(came.to_str().unwrap(), &there(&back));
        assert!(std::fs::read(&back).unwrap() == bytes, "{round}");
        std::fs::remove_file(&back).unwrap();
    }
    let (frames, _) = capture.check("scp").unwrap();
    assert!(frames > 6 * LEN / 1460, "{frames}");
    finish(nic);
    daemon.audit();
}
