//! rsync and iperf3 of Debian between a guest and others on a switch, by port settings and through the guest's own
//! netem: what they copy is whole. And a stream of a million segments, or with `VNPLUG_LONG=1` of a million frames of many
//! segments or one, is.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::ends::ran;
use vnplug_e2e::station::{Running, Station, content};
use vnplug_e2e::sums::Capture;
use vnplug_e2e::{Image, Lab, Netns, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, eventually};

/// Servers of both programs in a namespace; rsync's has this directory.
fn serve(netns: &Netns, lab: &Lab, dir: &Path) -> [Running; 2] {
    let config = lab.dir().join("rsyncd.conf");
    let text = format!(
        "use chroot = no\nuid = 0\ngid = 0\n[www]\npath = {}\nread only = no\n",
        dir.display()
    );
    std::fs::write(&config, text).unwrap();
    let mut rsync = netns.command("rsync");
    rsync.args(["--daemon", "--no-detach", "--port=7001", "--config"]);
    rsync.arg(&config);
    let mut iperf = netns.command("iperf3");
    iperf.args(["-s", "-p", "7002"]);
    let servers = [(rsync, "rsync"), (iperf, "iperf3")].map(|(command, name)| {
        Running::start(command, lab, &format!("{name}-{}", netns.name())).unwrap()
    });
    eventually("both serve", || {
        let listening = netns.exec(&["ss", "-Hltn"]).unwrap();
        [":7001", ":7002"]
            .iter()
            .all(|port| listening.contains(port))
    });
    servers
}

/// Bytes of what is moved.
const LEN: usize = 2 << 20;

#[test]
fn what_rsync_copies_is_whole_and_iperf3_runs_through_settings_loss_and_another_order() {
    let lab = Lab::new().unwrap();
    let (socket, dir) = (lab.dir().join("lan0.sock"), lab.dir().join("lan0.ctl"));
    let spec = format!("lan0,vhost={},vde={}", socket.display(), dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let image = Image::default()
        .program("/usr/bin/rsync")
        .program("/usr/bin/iperf3")
        .program_at("/usr/sbin/tc", "/bin/tc-netem")
        .module("sch_netem");
    let config = UmlConfig::vhost_user(&socket, image);
    let guest = Uml::boot(&lab, config).unwrap();
    ran(
        &guest,
        "ip addr add 10.77.8.2/24 dev eth0 && ip link set eth0 up && mkdir -p /tmp/in",
    );
    let vde = Station::by_vde(&lab, &dir, "10.77.8.3").unwrap();
    let nic = ["--gro", "44", "--acks", "expand"];
    let nic = Station::by_nic(&lab, &daemon, "lan0", "10.77.8.4", &nic).unwrap();
    let www = lab.dir().join("www");
    std::fs::create_dir(&www).unwrap();
    let bytes = content(LEN);
    std::fs::write(www.join("bulk"), &bytes).unwrap();
    let _servers = [&vde, &nic].map(|it| serve(&it.netns, &lab, &www));
    let set = |text: &str| {
        let (code, said) = daemon.vnplug(&["switch", "set", "lan0/port1", text]);
        assert_eq!(code, Some(0), "{text}: {said}");
    };
    let count = |name: &str| {
        let counters = daemon.counters();
        value(counters.iter().find(|it| it.name == "lan0").unwrap(), name)
    };
    let dropped = || -> u64 {
        let said = ran(&guest, "/bin/tc-netem -s qdisc show dev eth0");
        let (_, rest) = said.split_once("dropped ").unwrap();
        rest.split([',', ' ']).next().unwrap().parse().unwrap()
    };
    for netem in ["", "loss 1% delay 1ms 1ms reorder 25%"] {
        if !netem.is_empty() {
            // NB: busybox has a tc of its own, which its shell prefers.
            ran(
                &guest,
                &format!("/bin/tc-netem qdisc add dev eth0 root netem {netem}"),
            );
        }
        for settings in ["gro=off", "gro=20 acks=expand", "tso=off csum=off"] {
            set("default");
            set(settings);
            let capture = Capture::start(&lab, &daemon, "lan0", "rsync").unwrap();
            for other in [&vde, &nic] {
                let about = format!("{settings} {netem} {}", other.address);
                let url = format!("rsync://{}:7001/www", other.address);
                // Whole files: what was there before is of no use.
                ran(
                    &guest,
                    &format!("rsync --whole-file {url}/bulk /tmp/in/bulk"),
                );
                ran(
                    &guest,
                    &format!("rsync --whole-file /tmp/in/bulk {url}/back"),
                );
                assert!(std::fs::read(www.join("back")).unwrap() == bytes, "{about}");
                std::fs::remove_file(www.join("back")).unwrap();
                ran(&guest, "rm /tmp/in/bulk");
                for way in ["", "-R"] {
                    let iperf = format!("iperf3 -c {} -p 7002 -n {LEN} {way}", other.address);
                    ran(&guest, &iperf);
                }
            }
            // Each of both has and gives it by both programs, in segments of 1,448 bytes.
            let (frames, _) = capture.check(&format!("{settings} {netem}")).unwrap();
            assert!(frames > 8 * LEN / 1448, "{settings} {netem}: {frames}");
        }
    }
    assert!(dropped() > 0, "the guest's netem lost nothing");
    assert!(count("out_super_frames") > 0);
    daemon.audit();
}

/// What a stream has at each place, as long as it is asked for.
struct Content(u64);

impl Content {
    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            // Xorshift (Marsaglia, 2003).
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.to_ne_bytes());
        }
    }
}

#[test]
fn a_million_segments_are_whole_merged_and_with_some_of_them_lost() {
    const BLOCK: usize = 1 << 20;
    // 1,448 bytes of it are a segment. In the long run there are 26 million, and so a million frames if 25 of them make one.
    let is_long = std::env::var_os("VNPLUG_LONG").is_some();
    let blocks = if is_long { 36_000 } else { 1_500 };
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let vde = Station::by_vde(&lab, &dir, "10.77.8.3").unwrap();
    let nic = ["--gro", "44", "--acks", "expand"];
    let mut nic = Station::by_nic(&lab, &daemon, "lan0", "10.77.8.4", &nic).unwrap();
    // ACKs get lost, and come in another order; what is lost of segments is what a full queue drops.
    let wire = "delay=100us jitter=200us reorder=yes loss=0.1% seed=7";
    let (code, said) = daemon.vnplug(&["switch", "set", "lan0/port1", wire]);
    assert_eq!(code, Some(0), "{said}");
    let listener = vde.netns.enter(|| TcpListener::bind(("10.77.8.3", 7000)));
    let listener = listener.unwrap().unwrap();
    let bad = std::thread::scope(|threads| {
        threads.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut content, mut block) = (Content(1), vec![0; BLOCK]);
            for _ in 0..blocks {
                content.fill(&mut block);
                stream.write_all(&block).unwrap();
            }
        });
        nic.netns
            .enter(|| {
                let mut stream = TcpStream::connect(("10.77.8.3", 7000)).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let (mut content, mut due) = (Content(1), vec![0; BLOCK]);
                let mut block = due.clone();
                let mut bad = 0;
                for _ in 0..blocks {
                    content.fill(&mut due);
                    stream.read_exact(&mut block).unwrap();
                    bad += usize::from(block != due);
                }
                bad
            })
            .unwrap()
    });
    assert_eq!(bad, 0, "blocks that differ");
    let counters = daemon.audit();
    let lan0 = counters.iter().find(|it| it.name == "lan0").unwrap();
    let (entered, lost) = (value(lan0, "entered"), value(lan0, "out_dropped_loss"));
    nic.cable.finish();
    let told = nic.cable.last();
    println!("{entered} frames, {lost} lost; {told}");
    assert!(entered > 1_000_000 && lost > 0, "{entered} {lost}");
    let count = |name: &str| told[name].as_u64().unwrap();
    for name in ["merged", "acks_added"] {
        assert!(count(name) > 10_000, "{told}");
    }
    // What the interface was given are three segments and more in the mean: super-frames, and some that were left alone.
    assert!(count("merged") > 2 * count("injected"), "{told}");
    assert!(!is_long || count("injected") > 1_000_000, "{told}");
}
