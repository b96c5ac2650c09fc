//! From the wire to QEMU guests without a copy by the daemon: an AF_XDP source's packet memory, plugged
//! into two of them, which they read and none can write.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vnplug_e2e::Machine;
use vnplug_e2e::attached::{agent, plug, summary, values};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::groups::{ARENA, boot, members, pull, store, take, word};
use vnplug_e2e::traffic::{Stream, sequence};
use vnplug_e2e::wire::Wire;
use vnplug_testing::{Deadline, PATIENCE, eventually};

const SOURCE: &str = "wire1=af_xdp,fallback=no,arena=vm,frames=1024";

/// The packet memory in the daemon's pool directory.
fn packets(daemon: &Daemon) -> PathBuf {
    let record = daemon.socket().with_file_name("vms").join("pc.toml");
    let record = std::fs::read_to_string(record).unwrap();
    let mut quoted = record.split('"').map(PathBuf::from);
    let end = "-wire1.umem";
    quoted
        .find(|it| it.to_str().unwrap().ends_with(end))
        .unwrap()
}

#[test]
fn guests_read_frames_where_they_were_received_and_go_on_after_a_restart() {
    let mut wire = Wire::new("1500", &["--source", SOURCE]);
    let (pc, q35) = std::thread::scope(|scope| {
        let pc = scope.spawn(|| boot(&wire.lab, Machine::Pc).unwrap());
        let q35 = boot(&wire.lab, Machine::Q35 { root_ports: 3 }).unwrap();
        (pc.join().unwrap(), q35)
    });
    for (guest, name) in [(&pc, "pc"), (&q35, "q35")] {
        let more = ["--pool", "8M", "--group", "ids=wire1"];
        let said = plug(&wire.daemon, guest, name, &more).unwrap();
        let group = "group ids (16 MiB, packet memory of wire1)";
        assert!(said.contains(group), "{said}");
    }
    let _agents = [agent(&pc).unwrap(), agent(&q35).unwrap()];

    // A process of the operator's is a member, too, and has everything.
    let mut process = wire.daemon.port("wire1").group("ids").open().unwrap();
    let dump = "vnplug dump host:wire1 --group ids -c 2000 -w /tmp/frames.pcap 2>&1";
    let jobs = [pc.spawn(dump).unwrap(), q35.spawn(dump).unwrap()];
    eventually("three are in the group", || {
        members(&wire.daemon, "ids").len() == 3
    });
    let mut all = Vec::new();
    let mut written = 24;
    for len_bytes in [60, 1514, 300, 777] {
        // The memory has 1,024 places: no more frames than a guest may have unread.
        for first in [0, 250] {
            wire.send(&Stream {
                len_bytes,
                flows: 8,
                first,
                ..Stream::new("wire0", 250)
            });
            take(&mut process, &mut all);
            written += 250 * (16 + len_bytes);
            for guest in [&pc, &q35] {
                eventually("the guest has them", || {
                    let len = guest.run("stat -c %s /tmp/frames.pcap", PATIENCE).unwrap();
                    len.text() == written.to_string()
                });
            }
        }
    }
    for job in jobs {
        let output = job.wait(PATIENCE).unwrap();
        assert!(output.success(), "{}", output.text());
    }
    take(&mut process, &mut all);
    let sequences = all.iter().map(|frame| sequence(frame));
    assert!(sequences.eq((0..4).flat_map(|_| 0..500)));
    for guest in [&pc, &q35] {
        assert_eq!(pull(guest, &wire.lab, "/tmp/frames.pcap").unwrap(), all);
    }
    for port in members(&wire.daemon, "ids") {
        assert_eq!(value(&port, "arena_copies"), 0, "{port:?}");
        assert_eq!(value(&port, "arena_lent"), 2000, "{port:?}");
    }

    // The guest's root writes where it can: nothing changes. `host_groups_guests` has the control.
    let packets = packets(&wire.daemon);
    let before = word(&packets, 0x10);
    for (offset, lie) in [(0x80, u64::MAX / 2), (0x10, 1), (0x1000, 7), (3 << 20, 7)] {
        let was = word(&packets, offset);
        let seen = store(&q35, ARENA, offset, lie).unwrap();
        assert!(seen.starts_with("0x"), "{offset:#x}: {seen:?}");
        assert_eq!(word(&packets, offset), was);
    }
    assert_eq!(word(&packets, 0x10), before);

    // The daemon dies and comes back: the same memory in the same devices. A guest that lags then
    // loses its own packets, and is told how many.
    let count = "vnplug count host:wire1 --group ids --witness --json -t 600 2>&1";
    let readers = [pc.spawn(count).unwrap(), q35.spawn(count).unwrap()];
    let delivered = |daemon: &Daemon, enough: u64| {
        let ports = members(daemon, "ids");
        let guests = ports.iter().filter(|it| label(it, "owner") != "uid:0");
        guests.filter(|it| value(it, "delivered") >= enough).count() >= 2
    };
    let go_on = |wire: &Wire, run: u32| {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    wire.send(&Stream {
                        len_bytes: 200,
                        run,
                        pps: NonZeroU64::new(500),
                        ..Stream::new("wire0", 100)
                    });
                }
            });
            // What sends is to end in any case; who lost shows below.
            let deadline = Deadline::new("both readers go on");
            while !delivered(&wire.daemon, 500) && !deadline.is_over() {
                std::thread::sleep(Duration::from_millis(50));
            }
            done.store(true, Ordering::Release);
        });
        assert!(
            delivered(&wire.daemon, 500),
            "{:?}",
            members(&wire.daemon, "ids")
        );
    };
    drop(process);
    go_on(&wire, 2);
    wire.daemon.kill();
    wire.daemon.launch().unwrap();
    go_on(&wire, 3);
    assert_ne!(word(&packets, 0x10), before, "the epoch is another");
    for port in members(&wire.daemon, "ids") {
        assert_eq!(value(&port, "arena_copies"), 0, "{port:?}");
    }
    for reader in readers {
        reader.signal("INT").unwrap();
        let output = reader.wait(PATIENCE).unwrap();
        let text = output.text();
        let summary = summary(&text).unwrap();
        assert_eq!(summary["witness"]["corrupt"], 0, "{text}");
        assert_eq!(summary["reopened"], 1, "{text}");
    }

    // Stopped, a guest's reader keeps nobody's memory: it loses what comes meanwhile.
    let one = "vnplug count host:wire1 --group ids --witness --json -t 600 2>&1";
    let slow = pc.spawn(one).unwrap();
    eventually("it is in the group", || {
        members(&wire.daemon, "ids").len() == 1
    });
    slow.signal("STOP").unwrap();
    let sent = 20_000;
    let before = source_read(&wire.daemon);
    // No more at a time than the kernel has room for.
    for lot in 1..=sent / 500 {
        wire.send(&Stream {
            run: 9,
            len_bytes: 400,
            ..Stream::new("wire0", 500)
        });
        eventually("all are received", || {
            source_read(&wire.daemon) == before + lot * 500
        });
    }
    slow.signal("CONT").unwrap();
    // What it lost is told with what comes next.
    eventually("it reads on", || {
        wire.send(&Stream {
            run: 10,
            ..Stream::new("wire0", 10)
        });
        let said = slow.peek(1 << 16).unwrap();
        let last = values(&said).next_back().unwrap_or_default();
        last["lost"].as_u64().is_some_and(|lost| lost > 0)
    });
    slow.signal("INT").unwrap();
    let output = slow.wait(PATIENCE).unwrap();
    let text = output.text();
    let summary = summary(&text).unwrap();
    assert_eq!(summary["witness"]["corrupt"], 0, "{text}");
    assert!(summary["lost"].as_u64().unwrap() > sent / 2, "{text}");
    wire.daemon.audit();
}

fn source_read(daemon: &Daemon) -> u64 {
    let counters = daemon.counters();
    let source = counted(&counters, "source");
    assert_eq!(value(source, "kernel_dropped"), 0);
    value(source, "read")
}
