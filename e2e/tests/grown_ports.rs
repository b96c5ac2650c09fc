//! Ports of a QEMU guest that do not fit its pool, or are not to lie there: devices are plugged for them while
//! the guest runs, and taken out when they are closed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::process::{Child, Stdio};

use vnplug_e2e::attached::{agent, plug, summary};
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::groups::{ARENA, boot, store};
use vnplug_e2e::{Guest, Lab, Machine};
use vnplug_ring::control::grow::PLUGGED_MAGIC;
use vnplug_testing::{PATIENCE, eventually, until};

const THIRD: &str = "su -s /bin/sh third -c";

fn daemon(lab: &Lab) -> Daemon {
    Daemon::start(lab, None, &["--source", "lab=gen,pps=2000,size=200"]).unwrap()
}

/// `vnplug attach qemu --grow`, which stays.
struct Plugger(Child);

impl Plugger {
    fn start(daemon: &Daemon, guest: &Guest, more: &[&str]) -> Self {
        let qmp = guest.qmp_path().unwrap();
        let mut command = daemon.command().unwrap();
        let attach = ["attach", "qemu", "--name", "vm", "--allow", "*", "--qmp"];
        command.args(attach).arg(qmp).args(more);
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Plugger {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn devices(daemon: &Daemon) -> u64 {
    value(counted(&daemon.counters(), "vm"), "grown_devices")
}

fn grown_bytes(daemon: &Daemon) -> u64 {
    value(counted(&daemon.counters(), "vm"), "grown_bytes")
}

/// Shared-memory devices that the guest sees.
fn seen(guest: &Guest) -> String {
    let count = "cat /sys/bus/pci/devices/*/device | grep -c 0x1110";
    let said = guest.run(count, PATIENCE).unwrap();
    said.text().trim().to_owned()
}

/// Reads packets with these options: all are there.
fn counts(guest: &Guest, options: &str) {
    let command = format!("vnplug count host:lab {options} --packets 1000 --json 2>&1");
    let said = guest.run(&command, PATIENCE).unwrap();
    assert_eq!(said.status, 0, "{}", said.text());
    let summary = summary(&said.text()).unwrap();
    assert_eq!(summary["packets"], 1000, "{}", said.text());
    assert_eq!(summary["lost"], 0, "{}", said.text());
}

fn is_refused(guest: &Guest, options: &str) -> String {
    let command = format!("vnplug count host:lab {options} --packets 1 2>&1");
    let said = guest.run(&command, PATIENCE).unwrap();
    assert_eq!(said.status, 1, "{}", said.text());
    said.text().to_string()
}

#[test]
fn a_port_that_does_not_fit_the_pool_gets_a_device_and_gives_it_back() {
    let lab = Lab::new().unwrap();
    let mut daemon = daemon(&lab);
    let guest = boot(&lab, Machine::Pc).unwrap();
    // The control: without --grow there is no room.
    plug(&daemon, &guest, "vm", &["--pool", "1M"]).unwrap();
    let _agent = agent(&guest).unwrap();
    counts(&guest, "--ring 256K");
    let said = is_refused(&guest, "--ring 4M");
    assert!(
        said.contains("the VM's pool has") && said.contains("--grow"),
        "{said}"
    );

    let plugger = Plugger::start(&daemon, &guest, &["--grow", "20M"]);
    let begun = std::time::Instant::now();
    eventually("somebody plugs", || {
        let said = guest.run("vnplug count host:lab --ring 4M --packets 1 2>&1", PATIENCE);
        said.unwrap().status == 0
    });
    eprintln!("first port in a device after {:?}", begun.elapsed());
    counts(&guest, "--ring 4M");
    eventually("the device is gone", || devices(&daemon) == 0);
    eventually("the guest lost it", || seen(&guest) == "1");
    // What fits lies in the pool.
    counts(&guest, "--ring 256K");

    // Up to the limit, and no more.
    let reader = || {
        guest
            .spawn("exec vnplug count host:lab --ring 4M --seconds 600")
            .unwrap()
    };
    let readers = [reader(), reader()];
    eventually("both are there", || grown_bytes(&daemon) == 16 << 20);
    let said = is_refused(&guest, "--ring 4M");
    assert!(
        said.contains("--grow") && said.contains("plugged"),
        "{said}"
    );
    counts(&guest, "--ring 256K");
    let [first, second] = readers;
    first.signal("KILL").unwrap();
    eventually("one is gone", || grown_bytes(&daemon) == 8 << 20);
    counts(&guest, "--ring 4M");

    // Who plugs is killed: the port goes on, and the next process takes its device out when it is closed.
    plugger.kill();
    let packets = |daemon: &Daemon| {
        let all = daemon.counters();
        let ports = all.iter().filter(|it| it.kind == "port");
        ports.map(|it| value(it, "offered")).sum::<u64>()
    };
    let before = packets(&daemon);
    eventually("it reads on", || packets(&daemon) > before + 1000);
    let plugger = Plugger::start(&daemon, &guest, &["--grow", "20M"]);
    eventually("it is known again", || {
        let said = guest.run("vnplug count host:lab --ring 4M --packets 1 2>&1", PATIENCE);
        said.unwrap().status == 0
    });
    eventually("and alone", || devices(&daemon) == 1);

    // The daemon is killed: the reader comes back with another device, and the old one goes.
    daemon.kill();
    daemon.launch().unwrap();
    eventually("the reader is back", || {
        daemon.counters().iter().any(|it| it.kind == "port")
    });
    eventually("the old device is gone", || {
        devices(&daemon) == 1 && seen(&guest) == "2"
    });
    second.signal("KILL").unwrap();
    eventually("all are gone", || {
        devices(&daemon) == 0 && seen(&guest) == "1"
    });
    drop(plugger);
}

#[test]
fn a_group_that_does_not_fit_the_pool_gets_a_device_that_no_member_writes() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let guest = boot(&lab, Machine::Q35 { root_ports: 6 }).unwrap();
    let _plugger = Plugger::start(&daemon, &guest, &["--pool", "1M", "--grow", "32M"]);
    let _agent = agent(&guest).unwrap();
    eventually("it is attached", || seen(&guest) == "1");
    // The first has its ring of descriptors in the pool, the second not.
    let member = || {
        guest
            .spawn("exec vnplug count host:lab --group ids --arena 4M --packets 12000 --json 2>&1")
            .unwrap()
    };
    let members = [member(), member()];
    eventually("arenas and a ring lie in devices", || devices(&daemon) == 2);
    // Root stores into the arenas, into the first one's epoch and where packets lie: nothing changes.
    // The daemon knows of a device before the guest has it.
    let stored = |magic: &str, offset| {
        let seen = || store(&guest, magic, offset, 0x7777).unwrap();
        until("the guest has the device", seen, |text| !text.is_empty())
    };
    for offset in [0x10, 0x1000] {
        let seen = stored(ARENA, offset);
        assert!(seen.starts_with("0x") && !seen.ends_with("7777"), "{seen}");
    }
    // The control: into the first page of the ring's device it can.
    let plugged = format!("{PLUGGED_MAGIC:#018X}").replace('X', "x");
    let seen = stored(&plugged, 0x800);
    assert!(seen.ends_with("7777"), "{seen}");
    for member in members {
        let said = member.wait(PATIENCE).unwrap();
        let summary = summary(&said.text()).unwrap();
        assert_eq!(summary["packets"], 12_000, "{}", said.text());
        assert_eq!(summary["lost"], 0, "{}", said.text());
    }
    eventually("all are gone", || devices(&daemon) == 0);
}

/// The shared-memory devices that each reader in a guest maps, by what it was started with.
fn maps(guest: &Guest) -> Vec<(String, BTreeSet<String>)> {
    let each = "for p in $(pidof vnplug); do \
                echo \"$(tr '\\0' ' ' </proc/$p/cmdline)|$(grep -o '/sys[^ ]*resource2' /proc/$p/maps | sort -u | tr '\\n' ' ')\"; \
                done";
    let said = guest.run(each, PATIENCE).unwrap();
    let text = said.text();
    let readers = text.lines().filter_map(|line| line.split_once('|'));
    let readers = readers.filter(|(command, _)| command.starts_with("vnplug count"));
    let own = |devices: &str| devices.split_whitespace().map(str::to_owned).collect();
    readers
        .map(|(command, devices)| (command.trim().to_owned(), own(devices)))
        .collect()
}

#[test]
fn with_apart_another_users_program_has_no_way_to_a_ports_memory() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let guest = boot(&lab, Machine::Pc).unwrap();
    plug(&daemon, &guest, "vm", &["--pool", "4M"]).unwrap();
    let _agent = agent(&guest).unwrap();
    let users = "echo nobody:x:65534:65534::/:/bin/sh >> /etc/passwd; \
                 echo other:x:65533:65533::/:/bin/sh >> /etc/passwd; \
                 echo third:x:65532:65532::/:/bin/sh >> /etc/passwd";
    guest.run(users, PATIENCE).unwrap();
    let reader = |user: &str| {
        let exec = "exec vnplug count host:lab --ring 256K --seconds 600";
        guest
            .spawn(&format!("exec su -s /bin/sh {user} -c '{exec}'"))
            .unwrap()
    };
    let ports = || {
        let all = daemon.counters();
        all.iter().filter(|it| it.kind == "port").count()
    };
    // The control: in the pool, both map the same memory, all of it.
    let both = [reader("nobody"), reader("other")];
    eventually("both read", || ports() == 2 && maps(&guest).len() == 2);
    let mapped = maps(&guest);
    assert_eq!(mapped[0].1, mapped[1].1);
    let [pool] = &mapped[0].1.iter().cloned().collect::<Vec<_>>()[..] else {
        panic!("{mapped:?}");
    };
    for reader in both {
        reader.signal("KILL").unwrap();
    }
    eventually("both are gone", || ports() == 0);

    let plugger = Plugger::start(&daemon, &guest, &["--grow", "8M", "--apart"]);
    eventually("each has a device", || {
        let said = guest.run(
            "vnplug count host:lab --ring 256K --packets 1 2>&1",
            PATIENCE,
        );
        said.unwrap().status == 0 && seen(&guest) == "1"
    });
    let both = [reader("nobody"), reader("other")];
    eventually("both read", || {
        devices(&daemon) == 2 && maps(&guest).len() == 2
    });
    let mapped = maps(&guest);
    let (first, second) = (&mapped[0].1, &mapped[1].1);
    assert!(first.len() == 1 && second.len() == 1, "{mapped:?}");
    assert!(first.is_disjoint(second), "{mapped:?}");
    assert!(
        !first.contains(pool) && !second.contains(pool),
        "{mapped:?}"
    );
    // Nor by the file; root can, and sees that it is one.
    for device in first.union(second) {
        let open = format!("dd if={device} of=/dev/null bs=8 count=1 2>&1");
        let said = guest.run(&format!("{THIRD} '{open}'"), PATIENCE).unwrap();
        assert!(
            said.status != 0 && said.text().contains("ermission denied"),
            "{}",
            said.text()
        );
        let opens = format!("exec 3<>{device} && echo opened");
        let said = guest.run(&opens, PATIENCE).unwrap();
        assert!(said.text().contains("opened"), "{}", said.text());
    }
    // Nor by the descriptors of the processes.
    let steal = format!(
        "{THIRD} 'for p in $(pidof vnplug); do for f in /proc/$p/fd/*; do (exec 3<$f) && echo got; done; done' \
         2>/dev/null | grep -c got"
    );
    let said = guest.run(&steal, PATIENCE).unwrap();
    assert_eq!(said.text().trim(), "0", "{}", said.text());
    for reader in both {
        reader.signal("KILL").unwrap();
    }
    eventually("both are gone", || devices(&daemon) == 0);

    // Without who plugs there is no port, rather than one in the pool.
    plugger.kill();
    let refused = || is_refused(&guest, "--ring 256K").contains("--apart");
    eventually("it is refused", refused);
}
