//! Several QEMU guests read one copy of each packet from a device that none of them can write.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use vnplug::Client;
use vnplug_e2e::attached::{agent, summary};
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::groups::{ARENA, POOL, boot, members, pull, store, take, word};
use vnplug_e2e::traffic::sequence;
use vnplug_e2e::{Guest, Job, Lab, Machine};
use vnplug_frame::witness::{Checker, View};
use vnplug_testing::{PATIENCE, eventually};

const SOURCE: &str = "lab=gen,pps=1000,size=100-1000,flows=4,protocols=udp4+tcp4";

fn plug(daemon: &Daemon, guest: &Guest, name: &str, more: &[&str]) -> (Option<i32>, String) {
    let qmp = guest.qmp_path().unwrap();
    let qmp = qmp.to_str().unwrap();
    let args = ["attach", "qemu", "--qmp", qmp, "--name", name];
    let fixed = ["--allow", "lab", "--pool", "8M", "--wait", "0s"];
    daemon.vnplug(&[&args[..], &fixed, more].concat())
}

/// The files in the daemon's pool directory that end so.
fn files(dir: &Path, has: &str, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let paths = entries.map(|entry| entry.path());
    let is_one = |path: &str| path.contains(has) && path.ends_with(end);
    paths
        .filter(|path| is_one(path.to_str().unwrap()))
        .collect()
}

#[test]
fn two_guests_read_one_copy_byte_for_byte_and_neither_can_write_it() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", SOURCE]).unwrap();
    let (pc, q35) = std::thread::scope(|scope| {
        let pc = scope.spawn(|| boot(&lab, Machine::Pc).unwrap());
        let q35 = boot(&lab, Machine::Q35 { root_ports: 3 }).unwrap();
        (pc.join().unwrap(), q35)
    });
    let (code, text) = plug(&daemon, &pc, "pc", &["--group", "ids=lab,16M"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("group ids (32 MiB)"), "{text}");
    // Again is nothing; with another group is refused.
    let (code, text) = plug(&daemon, &pc, "pc", &["--group", "ids=lab,16M"]);
    assert!(code == Some(0) && text.contains("nothing to do"), "{text}");
    let (code, text) = plug(&daemon, &q35, "q35", &["--group", "ids=lab,1M"]);
    assert!(
        code == Some(1) && text.contains("arenas of 16777216 bytes"),
        "{text}"
    );
    let (code, text) = plug(&daemon, &q35, "q35", &["--group", "ids=lab"]);
    assert_eq!(code, Some(0), "{text}");
    let (_pc_agent, _q35_agent) = (agent(&pc).unwrap(), agent(&q35).unwrap());

    // What private rings on the host get.
    let private = |filter: &str| {
        let port = daemon.port("lab").ring_bytes(1 << 24).filter(filter);
        (port.open().unwrap(), Vec::new())
    };
    let (mut udp, mut tcp) = (private("udp"), private("tcp"));
    // A process of the operator's is a member, too.
    let mut process = daemon.port("lab").group("ids").open().unwrap();
    let dump = "vnplug dump host:lab --group ids -c 3000 -w /tmp/frames.pcap";
    let in_pc = pc.spawn(&format!("{dump} -f udp 2>&1")).unwrap();
    let in_q35 = q35.spawn(&format!("{dump} -f tcp 2>&1")).unwrap();
    eventually("three are in the group", || {
        members(&daemon, "ids").len() == 3
    });
    let counters = members(&daemon, "ids");
    for port in &counters {
        assert_eq!(value(port, "arena_bytes"), 16 << 20);
    }
    let mut checker = Checker::new(View::Whole);
    let (done_pc, done_q35) = std::thread::scope(|scope| {
        let done = scope.spawn(|| {
            (
                in_pc.wait(PATIENCE).unwrap(),
                in_q35.wait(PATIENCE).unwrap(),
            )
        });
        while !done.is_finished() {
            process.batch(1000).for_each(|packet| {
                checker.feed(packet.unwrap().bytes);
            });
            take(&mut udp.0, &mut udp.1);
            take(&mut tcp.0, &mut tcp.1);
            std::thread::sleep(Duration::from_millis(10));
        }
        done.join().unwrap()
    });
    assert!(done_pc.success(), "{}", done_pc.text());
    assert!(done_q35.success(), "{}", done_q35.text());
    std::thread::sleep(Duration::from_millis(100));
    for (guest, private) in [(&pc, &mut udp), (&q35, &mut tcp)] {
        take(&mut private.0, &mut private.1);
        assert_eq!(private.0.dropped(), 0);
        let frames = pull(guest, &lab, "/tmp/frames.pcap").unwrap();
        assert_eq!(frames.len(), 3000);
        let range = sequence(&frames[0])..=sequence(&frames[2999]);
        let of_range = private.1.iter().filter(|it| range.contains(&sequence(it)));
        assert!(frames.iter().eq(of_range), "not what a private ring got");
    }
    assert_eq!((process.dropped(), checker.corrupt()), (0, 0));
    // The process was the first member and has everything.
    let counters = members(&daemon, "ids");
    let whole = counters
        .iter()
        .find(|it| it.name == process.number().to_string());
    let whole = whole.unwrap();
    let (copies, delivered) = (value(whole, "arena_copies"), value(whole, "delivered"));
    assert!(
        copies.abs_diff(delivered) < 1_000 && copies >= 6_000,
        "one copy for all: {copies} of {delivered}"
    );

    // The guest's root writes where it can: of the arena nothing changes.
    let pools = files_dir(&daemon, "q35");
    let [arena] = files(&pools, "-ids.", ".arena").try_into().unwrap();
    let (end, pool_end) = ((32 << 20) - 8, (8 << 20) - 8);
    let epoch = word(&arena, 0x10);
    let reader = pc.spawn("vnplug count host:lab --group ids --witness --json -t 600 2>&1");
    let reader = reader.unwrap();
    for (offset, lie) in [(0x80, u64::MAX / 2), (0x10, 1), (0x1000, 7), (end, 7)] {
        let seen = store(&q35, ARENA, offset, lie).unwrap();
        assert!(
            seen.starts_with("0x") && seen != format!("{lie:#018X}").replace('X', "x"),
            "{offset:#x}: {seen:?}"
        );
    }
    assert_eq!((word(&arena, 0x10), word(&arena, end)), (epoch, 0));
    // The control: its own pool it writes so.
    let seen = store(&q35, POOL, pool_end, 0x7777).unwrap();
    assert_eq!(seen, "0x0000000000007777");
    let [pool] = files(&pools, "-q35.", ".pool").try_into().unwrap();
    assert_eq!(word(&pool, pool_end), 0x7777);

    // In its own pool a guest has groups as ever.
    let own = "vnplug count host:lab --group own --arena 1M --witness --json --packets 2000 2>&1";
    let own: Vec<Job> = (0..2).map(|_| q35.spawn(own).unwrap()).collect();
    for output in own {
        let output = output.wait(PATIENCE).unwrap();
        let text = output.text();
        assert!(output.success(), "{text}");
        let summary = summary(&text).unwrap();
        assert_eq!(summary["witness"]["perfect"], true, "{text}");
    }

    // The daemon dies and comes back: the same file, the same devices.
    daemon.kill();
    daemon.launch().unwrap();
    eventually("the reader is back", || {
        let ports = members(&daemon, "ids");
        ports.iter().any(|port| value(port, "delivered") > 500)
    });

    // One guest is killed; the others read on, and with the last the file goes.
    q35.kill();
    let before = value(&members(&daemon, "ids")[0], "delivered");
    eventually("the other guest reads on", || {
        let ports = members(&daemon, "ids");
        ports
            .iter()
            .any(|port| value(port, "delivered") > before + 2_000)
    });
    reader.signal("INT").unwrap();
    let output = reader.wait(PATIENCE).unwrap();
    let text = output.text();
    assert_eq!(output.status, 0, "{text}");
    let summary = summary(&text).unwrap();
    assert_eq!(summary["lost"], 0, "{text}");
    assert_eq!(summary["witness"]["corrupt"], 0, "{text}");
    assert_eq!(summary["reopened"], 1, "{text}");
    Client::connect_to(&daemon.socket())
        .unwrap()
        .detach_own_vm("q35", 0)
        .unwrap();
    assert!(arena.exists());
    let qmp = pc.qmp_path().unwrap();
    let detach = ["detach", "qemu", "--qmp", qmp.to_str().unwrap()];
    let (code, text) = daemon.vnplug(&[&detach[..], &["--name", "pc"]].concat());
    assert_eq!(code, Some(0), "{text}");
    assert!(!arena.exists());
    let devices = pc
        .run("cat /sys/bus/pci/devices/*/device", PATIENCE)
        .unwrap();
    assert!(!devices.text().contains("0x1110"), "{}", devices.text());
    daemon.audit();
}

/// Where the pool of a VM lies.
fn files_dir(daemon: &Daemon, vm: &str) -> PathBuf {
    let record = daemon
        .socket()
        .parent()
        .unwrap()
        .join(format!("vms/{vm}.toml"));
    let record = std::fs::read_to_string(&record).unwrap_or_else(|error| panic!("{error}"));
    let line = record.lines().find_map(|it| it.strip_prefix("pool = \""));
    let pool = PathBuf::from(line.unwrap().trim_end_matches('"'));
    pool.parent().unwrap().to_owned()
}
