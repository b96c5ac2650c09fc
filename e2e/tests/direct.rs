//! Direct mode: ports of one user hand frames to each other, and the switch has no work with them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{Shutdown, shutdown};
use vnplug::{FilterSpec, Offload, Port, PortOptions, Segments};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, refusal, value};
use vnplug_e2e::raw::{self, Raw};
use vnplug_e2e::station::{Station, content};
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_ring::control::{Counted, Direct, Message, Open, code};
use vnplug_ring::direct::{SLOTS, home_size};
use vnplug_testing::eventually;

#[path = "direct/members.rs"]
mod members;
use members::{become_direct, entered, frame, open, take};

#[test]
fn members_hand_over_frames_and_the_switch_has_no_work() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let [mut one, mut two] = [(); 2].map(|()| open(&daemon));
    let mut other = daemon.port("lan0").join().open().unwrap();
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    become_direct(&daemon, (2, &mut two), (1, &mut one));

    let before = entered(&daemon);
    let (mut sent, mut came) = (0, Vec::new());
    let deadline = Instant::now() + Duration::from_secs(20);
    while came.len() < 100_000 {
        assert!(
            Instant::now() < deadline,
            "{sent} sent, {} came",
            came.len()
        );
        while sent < 100_000 && one.outbox().unwrap().push(&frame(2, 1, sent)).unwrap() {
            sent += 1;
        }
        one.outbox().unwrap().flush();
        came.extend(take(&mut two));
    }
    assert!(came.iter().copied().eq(0..100_000), "in order, each once");
    assert_eq!(entered(&daemon), before, "the switch saw none");

    // Everybody else is reached through it, and many are.
    assert!(other.send(&frame(0xff, 3, 0)).unwrap());
    assert!(one.send(&frame(3, 1, 7)).unwrap());
    let mut at_other = Vec::new();
    eventually("a port that is no member gets its frame", || {
        at_other.extend(take(&mut other));
        at_other.contains(&7)
    });
    let mut broadcast = frame(2, 1, 8);
    broadcast[..6].fill(0xff);
    assert!(one.send(&broadcast).unwrap());
    for port in [&mut two, &mut other] {
        let mut got = Vec::new();
        eventually("a frame for all", || {
            got.extend(take(port));
            got.contains(&8)
        });
        assert_eq!(got.iter().filter(|it| **it == 8).count(), 1);
    }
    daemon.audit();
}

#[test]
fn who_sleeps_is_woken_by_the_sender() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let [mut one, mut two] = [(); 2].map(|()| open(&daemon));
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    let before = entered(&daemon);
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut came = Vec::new();
            while came.len() < 300 {
                let ready = two.wait(Some(Duration::from_secs(10))).unwrap();
                assert_eq!(ready, vnplug::Ready::Now, "after {}", came.len());
                came.extend(take(&mut two));
            }
            came
        });
        for number in 0..300 {
            assert!(one.send(&frame(2, 1, number)).unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(reader.join().unwrap().into_iter().eq(0..300));
    });
    assert_eq!(entered(&daemon), before);
}

#[test]
fn who_captures_sees_all_and_settings_hold() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let [mut one, mut two] = [(); 2].map(|()| open(&daemon));
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    let mut capture = daemon.port("host:lan0").open().unwrap();
    for number in 1..=1000 {
        assert!(one.send(&frame(2, 1, number)).unwrap());
    }
    let (mut seen, mut came) = (Vec::new(), Vec::new());
    eventually("all is captured", || {
        seen.extend(take(&mut capture));
        came.extend(take(&mut two));
        seen.len() == 1000 && came.len() == 1000
    });
    assert!(seen.iter().copied().eq(1..=1000));
    drop(capture);
    become_direct(&daemon, (1, &mut one), (2, &mut two));

    // What is set of the sender's port alone holds: the switch has to see its frames.
    let number = |port: &Port| port.device().strip_prefix("host:").unwrap().to_owned();
    let set = daemon.vnplug(&["switch", "set", &number(&one), "link=down"]);
    assert_eq!(set.0, Some(0), "{}", set.1);
    eventually("nothing of it goes anywhere", || {
        take(&mut two);
        for _ in 0..10 {
            assert!(one.send(&frame(2, 1, 5)).unwrap());
        }
        std::thread::sleep(Duration::from_millis(10));
        take(&mut two).is_empty()
    });
    let set = daemon.vnplug(&["switch", "set", &number(&one), "link=up"]);
    assert_eq!(set.0, Some(0), "{}", set.1);
    become_direct(&daemon, (1, &mut one), (2, &mut two));

    // An isolated port reaches no isolated one.
    for port in [&one, &two] {
        let set = daemon.vnplug(&["switch", "set", &number(port), "isolated=yes"]);
        assert_eq!(set.0, Some(0), "{}", set.1);
    }
    eventually("frames go through the switch", || {
        let before = entered(&daemon);
        assert!(one.send(&frame(2, 1, 5)).unwrap());
        std::thread::sleep(Duration::from_millis(10));
        entered(&daemon) > before
    });
    take(&mut two);
    for _ in 0..100 {
        assert!(one.send(&frame(2, 1, 6)).unwrap());
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(take(&mut two).is_empty(), "it is isolated");
    for port in [&one, &two] {
        let set = daemon.vnplug(&["switch", "set", &number(port), "isolated=no"]);
        assert_eq!(set.0, Some(0), "{}", set.1);
    }
    become_direct(&daemon, (1, &mut one), (2, &mut two));
}

#[test]
fn members_come_and_go_and_a_slot_is_taken_again() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut one = open(&daemon);
    for round in 0..20 {
        let mut two = open(&daemon);
        become_direct(&daemon, (1, &mut one), (2 + round, &mut two));
        become_direct(&daemon, (2 + round, &mut two), (1, &mut one));
    }
    // There is room for these, and the next one is told.
    let mut all: Vec<_> = (1..SLOTS).map(|_| open(&daemon)).collect();
    let refused = daemon.port("lan0").direct().open().unwrap_err();
    assert!(refused.to_string().contains("room for 16"), "{refused}");
    become_direct(&daemon, (1, &mut one), (99, all.last_mut().unwrap()));
    drop(all);
    // With another daemon it begins anew.
    daemon.kill();
    daemon.launch().unwrap();
    let mut two = open(&daemon);
    eventually("the port is there again", || {
        let _ = one.next().unwrap();
        !one.is_away()
    });
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    become_direct(&daemon, (2, &mut two), (1, &mut one));
}

#[test]
fn who_does_not_read_holds_up_nobody() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let [mut one, mut two, mut deaf] = [(); 3].map(|()| open(&daemon));
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    become_direct(&daemon, (1, &mut one), (3, &mut deaf));
    let begin = Instant::now();
    take(&mut two);
    let mut came = Vec::new();
    for number in 0..50_000 {
        while !one.send(&frame(3, 1, 0)).unwrap() {}
        while !one.send(&frame(2, 1, number)).unwrap() {
            came.extend(take(&mut two));
        }
        if number % 64 == 0 {
            came.extend(take(&mut two));
        }
    }
    came.extend(take(&mut two));
    assert!(came.into_iter().eq(0..50_000));
    assert!(
        begin.elapsed() < Duration::from_secs(10),
        "{:?}",
        begin.elapsed()
    );
    // What waited for it is there, and what comes now comes again.
    assert!(!take(&mut deaf).is_empty());
    assert!(one.send(&frame(3, 1, 77)).unwrap());
    eventually("it reads again", || take(&mut deaf).contains(&77));
}

#[test]
fn super_frames_go_whole_to_whom_takes_them() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let nic = |address: &str, more: &[&str]| {
        Station::by_nic(&lab, &daemon, "lan0", address, more).unwrap()
    };
    let one = nic("10.0.6.1", &["--direct"]);
    let two = nic("10.0.6.2", &["--direct"]);
    let plain = nic("10.0.6.3", &["--direct", "--segments", "wire"]);
    let all = [&one, &two, &plain];
    for from in all {
        for to in all {
            assert!(from.pings(&to.address));
        }
    }
    let bytes = content(8 << 20);
    for from in all {
        for to in all.into_iter().filter(|to| to.address != from.address) {
            assert!(from.sends(to, &bytes).unwrap() == bytes);
        }
    }
    let before = entered(&daemon);
    assert!(one.sends(&two, &bytes).unwrap() == bytes);
    let through = entered(&daemon) - before;
    assert!(
        through < 20,
        "{through} frames of a bulk stream entered the switch"
    );
    // One is killed; the others go on, and one that comes in its place is reached.
    // Its process is killed.
    drop(two);
    let two = nic("10.0.6.4", &["--direct"]);
    assert!(one.sends(&two, &bytes).unwrap() == bytes);
    assert!(plain.sends(&one, &bytes).unwrap() == bytes);
    daemon.audit();
}

#[test]
fn frames_to_be_cut_or_summed_are_the_switchs_for_whom_they_must_be() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let merged = daemon.port("lan0").segments(Segments::Merged);
    let mut one = merged.direct().open().unwrap();
    let mut two = open(&daemon);
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    let before = entered(&daemon);
    let due = Offload {
        flags: 1,
        csum_start: 34,
        csum_offset: 16,
        ..Offload::default()
    };
    let mut tcp = frame(2, 1, 0);
    tcp[12..14].copy_from_slice(&[8, 0]);
    assert!(one.outbox().unwrap().push_offloaded(&tcp, &due).unwrap());
    one.outbox().unwrap().flush();
    eventually("the switch has it", || entered(&daemon) > before);
}

#[test]
fn what_takes_no_part_in_a_switch_is_no_member() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    let refused = daemon.port("lab").direct().open().unwrap_err();
    assert!(refused.to_string().contains("no switch"), "{refused}");
}

/// A memfd of this many bytes with these seals.
fn memory(len: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("home", flags).unwrap();
    ftruncate(&memory, len).unwrap();
    fcntl_add_seals(&memory, seals).unwrap();
    memory
}

#[test]
fn what_is_no_home_is_refused() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let _other = open(&daemon);
    let mut raw = Raw::greeted(&daemon.socket());
    let request = raw::open("lan0", 0);
    let joins = Open {
        joins: true,
        transmit_bytes: 1 << 16,
        ..request.clone()
    };
    let mut port = |open: Open| match raw.ask(&Message::Open(open), 0) {
        Message::Opened(opened) => opened.port,
        other => panic!("{other:?}"),
    };
    let (member, capture) = (port(joins), port(request));
    raw.take_fds();
    let capacity = 1 << 16;
    let ask = |port, capacity| {
        let merged = false;
        let direct = Direct {
            port,
            capacity,
            merged,
        };
        Message::Direct(direct).encode(9, 0)
    };
    let tight = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let home = |seals| memory(home_size(capacity), seals);
    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    let device = OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
    let writable = home(tight - SealFlags::FUTURE_WRITE);
    let loose = home(tight - SealFlags::SHRINK);
    let short = memory(home_size(capacity) - 4096, tight);
    let good = home(tight);
    let cases: [(u32, u64, Option<&OwnedFd>, u16, &str); 10] = [
        (member, capacity, None, code::INVALID, "none came"),
        (member, capacity, Some(&pipe), code::INVALID, "sealed memfd"),
        (
            member,
            capacity,
            Some(&device),
            code::INVALID,
            "sealed memfd",
        ),
        (
            member,
            capacity,
            Some(&writable),
            code::INVALID,
            "sealed memfd",
        ),
        (
            member,
            capacity,
            Some(&loose),
            code::INVALID,
            "sealed memfd",
        ),
        (member, capacity, Some(&short), code::INVALID, "which needs"),
        (member, 5000, Some(&good), code::INVALID, "power of two"),
        (member, 8 << 20, Some(&good), code::INVALID, "to 4194304"),
        (capture, capacity, Some(&good), code::INVALID, "take part"),
        (
            member + 999,
            capacity,
            Some(&good),
            code::NOT_FOUND,
            "not open",
        ),
    ];
    for (port, capacity, gift, code, part) in cases {
        let bytes = ask(port, capacity);
        let fds: Vec<_> = gift.iter().map(|fd| fd.as_fd()).collect();
        match fds.is_empty() {
            true => raw.send(&bytes).unwrap(),
            false => drop(raw.send_with(&bytes, &fds).unwrap()),
        }
        let (code_said, text) = refusal(raw.next().unwrap().1);
        assert!(
            code_said == code && text.contains(part),
            "{code_said} {text}"
        );
        assert!(raw.take_fds().is_empty());
    }
    // The same connection with the memory of a home becomes a member.
    raw.send_with(&ask(member, capacity), &[good.as_fd()])
        .unwrap();
    let Some((9, Message::Members(members))) = raw.next() else {
        panic!("no member");
    };
    assert!(members.is_first && members.others.len() == 1, "{members:?}");
    assert_eq!(raw.take_fds().len(), 4);
    // Who says nonsense with a descriptor has none of it, and no connection.
    raw.send_with(&Message::List.encode(9, 0), &[good.as_fd()])
        .unwrap();
    assert_eq!(raw.next(), None);
    daemon.audit();
}

#[test]
fn a_member_whose_bell_was_shut_is_one_again_soon() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let [mut one, mut two] = [(); 2].map(|()| open(&daemon));
    become_direct(&daemon, (1, &mut one), (2, &mut two));

    // A third member has the others' bells, and shuts the first one's.
    let mut raw = Raw::greeted(&daemon.socket());
    let joins = Open {
        joins: true,
        transmit_bytes: 1 << 16,
        ..raw::open("lan0", 0)
    };
    let Message::Opened(opened) = raw.ask(&Message::Open(joins), 0) else {
        panic!("no port");
    };
    raw.take_fds();
    let capacity = 1 << 16;
    let tight = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let request = Direct {
        port: opened.port,
        capacity,
        merged: false,
    };
    let home = memory(home_size(capacity), tight);
    let bytes = Message::Direct(request).encode(9, 0);
    raw.send_with(&bytes, &[home.as_fd()]).unwrap();
    assert!(matches!(raw.next(), Some((9, Message::Members(_)))));
    // The table and its own bell, then memory and bell of each other.
    let fds = raw.take_fds();
    assert_eq!(fds.len(), 6);
    shutdown(&fds[3], Shutdown::Both).unwrap();

    let begin = Instant::now();
    one.wait(Some(Duration::from_millis(50))).unwrap();
    let before = entered(&daemon);
    assert!(one.send(&frame(2, 1, 7)).unwrap());
    let mut came = Vec::new();
    eventually("it comes, through the switch", || {
        came.extend(take(&mut two));
        came.contains(&7) && entered(&daemon) > before
    });
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    become_direct(&daemon, (2, &mut two), (1, &mut one));
    assert!(begin.elapsed() > Duration::from_millis(900));
    daemon.audit();
}

#[test]
fn what_was_handed_over_is_read_by_a_port_that_leaves_and_that_is_a_member_again_without_a_filter()
{
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let [mut one, mut two] = [(); 2].map(|()| open(&daemon));
    let filter = || FilterSpec::Expression("ether proto 0x88b5".into());
    for round in 0..5 {
        become_direct(&daemon, (1, &mut one), (2, &mut two));
        let before = entered(&daemon);
        for number in 1..=1000 {
            assert!(one.send(&frame(2, 1, number)).unwrap());
        }
        assert_eq!(entered(&daemon), before, "the switch saw none");
        two.set_filter(filter()).unwrap();
        // What comes now comes by the switch.
        for number in 1001..=1010 {
            assert!(one.send(&frame(2, 1, number)).unwrap());
        }
        let mut came = Vec::new();
        eventually("all came", || {
            came.extend(take(&mut two));
            came.len() >= 1010
        });
        assert_eq!(entered(&daemon), before + 10, "{round}");
        let (by_switch, direct): (Vec<_>, Vec<_>) = came.into_iter().partition(|it| *it > 1000);
        assert!(direct.into_iter().eq(1..=1000), "each once, in order");
        assert!(by_switch.into_iter().eq(1001..=1010));
        if round == 2 {
            // Its filter keeps it out of the next daemon's group, too.
            daemon.kill();
            daemon.launch().unwrap();
            for port in [&mut one, &mut two] {
                eventually("the port is there again", || {
                    take(port);
                    !port.is_away()
                });
            }
            // Longer than until direct mode is tried again after a fault.
            std::thread::sleep(Duration::from_millis(1500));
            take(&mut two);
        }
        two.set_filter(FilterSpec::All).unwrap();
    }
    assert_eq!((one.dropped(), two.dropped()), (0, 0));
    daemon.audit();
}

#[test]
fn a_group_is_one_users_and_a_grant_that_says_more_is_kept_by_the_switch() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let [plain, locked] = ["", ",mac=02:00:00:00:00:01"].map(|more| {
        let lan = if more.is_empty() { "lan0" } else { "lan1" };
        format!("uid:{USER}={lan}{more}")
    });
    let mut args = vec!["--config", &config];
    args.extend(["--switch", "lan0", "--allow-join", &plain]);
    args.extend(["--switch", "lan1", "--allow-join", &locked]);
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let entered = |name: &str| {
        let counters = daemon.counters();
        let is_it = |it: &&Counted| it.kind == "source" && it.name == name;
        counters
            .iter()
            .find(is_it)
            .map_or(0, |it| value(it, "entered"))
    };
    let theirs = |name: &'static str| {
        let socket = daemon.socket();
        as_user(move || {
            PortOptions::new(name)
                .socket(socket)
                .direct()
                .open()
                .unwrap()
        })
    };
    // Without a privilege, and beside a group of root's.
    let mut root = open(&daemon);
    let [mut one, mut two] = ["lan0"; 2].map(theirs);
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    assert!(root.send(&frame(0xff, 3, 0)).unwrap());
    eventually("root's port is heard", || take(&mut one).contains(&0));
    let before = entered("lan0");
    for _ in 0..100 {
        assert!(one.send(&frame(3, 1, 9)).unwrap());
    }
    let mut came = 0;
    eventually("they come", || {
        came += take(&mut root).iter().filter(|it| **it == 9).count();
        came == 100
    });
    assert_eq!(entered("lan0") - before, 100, "another user's");

    // Whose address a port may send from, only the switch knows.
    let [mut one, mut two] = ["lan1"; 2].map(theirs);
    for number in 0..200 {
        assert!(two.send(&frame(0xff, 1, 0)).unwrap());
        assert!(one.send(&frame(1, 1, number)).unwrap());
        std::thread::sleep(Duration::from_millis(1));
        let _ = (take(&mut one), take(&mut two));
    }
    eventually("all went through the switch", || entered("lan1") == 400);
}
