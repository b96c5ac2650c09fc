//! Daemons that start, end and are killed, and what is left of their twins.

use std::process::Stdio;
use std::thread::{scope, sleep};
use std::time::Duration;

use vnplug::Next;
use vnplug_e2e::containers::{Containers, address};
use vnplug_e2e::daemon::{Daemon, counted, program, value};
use vnplug_e2e::station::{answered, pings};
use vnplug_testing::eventually;

use super::traffic::numbered;
use super::{TWIN, daemon, of_switch};

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
