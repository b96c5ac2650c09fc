//! Packet memory of an AF_XDP source plugged into VMs, seen from the host: what they get, what they
//! have after the daemon was killed, and who has to do with copies. `umem_guests` has real guests.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vnplug::{Client, Next, Port};
use vnplug_e2e::daemon::{Daemon, label, program, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::Wire;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{
    ArenaHome, Counted, Grant, HostGroup, Message, Open, Opened, RingPlace, Role, VmKind, VmReady,
    VmSpec,
};
use vnplug_ring::witness::{Checker, View};

const LENT: &str = "wire1=af_xdp,fallback=no,arena=vm,frames=1024";
const LIMIT: Duration = Duration::from_secs(120);

fn spec(name: &str, filter: &str, arena_bytes: u64) -> VmSpec {
    VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes: 1 << 20,
        vectors: 0,
        allow: vec![Grant {
            source: "wire1".into(),
            filter: filter.into(),
        }],
        owner: 7,
        groups: vec![HostGroup {
            name: "g".into(),
            source: "wire1".into(),
            arena_bytes,
        }],
    }
}

fn client(wire: &Wire) -> Client {
    Client::connect_to(&wire.daemon.socket()).unwrap()
}

fn attach(wire: &Wire, name: &str) -> VmReady {
    client(wire).attach_vm(spec(name, "", 0)).unwrap()
}

/// A VM with a pool of this size, in no group.
fn attach_unlike(wire: &Wire, name: &str, pool_bytes: u64) -> VmReady {
    let wanted = VmSpec {
        pool_bytes,
        groups: Vec::new(),
        ..spec(name, "", 0)
    };
    client(wire).attach_vm(wanted).unwrap()
}

/// Opens a port in the group as the agent of a VM does, which is over when the agent is dropped.
fn member(vm: &VmReady) -> Result<(Opened, Raw), String> {
    let mut agent = Raw::connect(vm.control_path.as_ref());
    agent.hello(Role::Agent);
    let request = Open {
        group: "g".into(),
        ..open("wire1", 1 << 14)
    };
    match agent.ask(&Message::Open(request), 1) {
        Message::Opened(opened) => Ok((opened, agent)),
        other => Err(refusal(other).1),
    }
}

fn process(wire: &Wire) -> Port {
    wire.daemon.port("wire1").group("g").open().unwrap()
}

/// Sends frames, no more than the kernel has room for, and reads them all.
fn sees(wire: &Wire, port: &mut Port, frames: u64) {
    wire.send(&Stream {
        run: frames as u32,
        ..Stream::new("wire0", frames)
    });
    let deadline = Instant::now() + LIMIT;
    let mut checker = Checker::new(View::Whole);
    let mut received = 0;
    while received < frames {
        assert!(Instant::now() < deadline, "{received} of {frames}");
        match port.next().unwrap() {
            Next::Packet(packet) => {
                checker.feed(packet.bytes);
                received += 1;
            }
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(20))).unwrap();
            }
            Next::Ended => panic!("the source ended"),
        }
    }
    assert_eq!(checker.corrupt(), 0);
}

/// `arena_copies` and `arena_lent` of a port's group.
fn counts(wire: &Wire, port: &Port) -> (u64, u64) {
    let counters = wire.daemon.audit();
    let name = port.number().to_string();
    let of = |it: &&Counted| it.kind == "port" && it.name == name;
    let port = counters.iter().find(of).unwrap();
    (value(port, "arena_copies"), value(port, "arena_lent"))
}

fn arena(vm: &VmReady) -> PathBuf {
    PathBuf::from(&vm.arenas[0].0)
}

fn stat(vm: &VmReady) -> Metadata {
    std::fs::metadata(arena(vm)).unwrap()
}

fn epoch(vm: &VmReady) -> u64 {
    word(&File::open(arena(vm)).unwrap(), 0x10)
}

fn word(file: &File, offset: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, offset).unwrap();
    u64::from_le_bytes(word)
}

#[test]
fn vms_and_processes_have_one_file_in_which_frames_are_received() {
    let wire = Wire::new("1500", &["--source", LENT]);
    let (a, b) = (attach(&wire, "a"), attach(&wire, "b"));
    assert_eq!(a.arenas, b.arenas);
    let len = a.arenas[0].1;
    assert!(len.is_power_of_two() && stat(&a).len() == len);
    assert_eq!(stat(&a).mode() & 0o777, 0o600);
    let (in_a, _a) = member(&a).unwrap();
    let (in_b, _b) = member(&b).unwrap();
    assert_eq!(in_a.arenas.home, ArenaHome::Apart);
    assert_eq!(in_a.arenas, in_b.arenas);
    // By which a guest finds the device, and how much of it is mapped.
    assert_eq!((in_a.arenas.memory, in_a.arenas.map_len), (epoch(&a), len));
    let mut port = process(&wire);
    sees(&wire, &mut port, 500);
    assert_eq!(counts(&wire, &port), (0, 500));
    // What is received lies there, and nothing that was sent.
    let mut sender = wire.daemon.port("wire1").transmit(1 << 16).open().unwrap();
    for _ in 0..100 {
        assert!(sender.send(&[0xa5; 60]).unwrap());
    }
    let deadline = Instant::now() + LIMIT;
    let sent = || {
        let counters = wire.daemon.counters();
        value(
            counters.iter().find(|it| it.kind == "source").unwrap(),
            "sent",
        )
    };
    while sent() < 100 {
        assert!(Instant::now() < deadline, "it is not sent");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(sender);
    let bytes = std::fs::read(arena(&a)).unwrap();
    let shown = (in_a.arenas.places[0].offset + in_a.arenas.places[0].len) as usize;
    let (shown, hidden) = bytes.split_at(shown);
    // Behind it is the mark by which the daemon sees that nothing was cut off.
    let (mark, hidden) = hidden.split_at(8);
    assert_eq!(mark, epoch(&a).to_le_bytes());
    assert!(shown.iter().filter(|byte| **byte != 0).count() > 500 * 60 / 2);
    assert!(hidden.iter().all(|byte| *byte == 0));
    assert!(!shown.windows(60).any(|it| it == [0xa5; 60]));
    // A group that ended goes on with the same memory; with the last VM only the group goes.
    drop((_a, _b, port));
    wire.daemon.await_no_ports();
    let mut port = process(&wire);
    sees(&wire, &mut port, 400);
    drop(port);
    for vm in ["a", "b"] {
        client(&wire).detach_own_vm(vm, 7).unwrap();
    }
    assert!(arena(&a).exists());
}

#[test]
fn the_next_daemon_receives_into_the_memory_that_vms_have() {
    let mut wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let (inode, before) = (stat(&vm).ino(), epoch(&vm));
    let mut port = process(&wire);
    sees(&wire, &mut port, 100);
    for _ in 0..2 {
        wire.daemon.kill();
        // While nobody serves, old packets are there to be read, and no new ones come.
        assert_eq!(stat(&vm).ino(), inode);
        wire.daemon.launch().unwrap();
        assert_eq!(stat(&vm).ino(), inode);
        assert_ne!(epoch(&vm), before);
        assert_eq!(attach(&wire, "a"), vm);
        let (opened, _agent) = member(&vm).unwrap();
        assert_eq!(opened.arenas.memory, epoch(&vm));
        let mut port = process(&wire);
        sees(&wire, &mut port, 300);
        assert_eq!(counts(&wire, &port), (0, 300));
    }
    // Detached while no daemon of that source runs: nobody else deletes it.
    client(&wire).detach_own_vm("a", 7).unwrap();
    wire.daemon.kill();
    assert!(arena(&vm).exists());
}

#[test]
fn memory_of_another_size_bars_the_group_until_its_vms_are_detached() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    let write = |more: &str| {
        let text =
            format!("[[source]]\nname = \"wire1\"\nkind = \"af_xdp\"\nfallback = \"no\"\n{more}\n");
        std::fs::write(&config, text).unwrap();
    };
    write("arena = \"vm\"\nframes = \"1024\"");
    let args = ["--config", config.to_str().unwrap()];
    let mut wire = Wire::new("1500", &args);
    let vm = attach(&wire, "a");
    let inode = stat(&vm).ino();
    let refused = |wire: &Wire, why: &str| {
        let text = member(&vm).err().unwrap();
        assert!(
            text.contains(why) && text.contains("detach VM \"a\""),
            "{text}"
        );
        // Nor may a process be in it, or another VM.
        let text = wire.daemon.port("wire1").group("g").open().err().unwrap();
        assert!(text.to_string().contains(why), "{text}");
        let text = client(wire).attach_vm(spec("b", "", 0)).err().unwrap();
        assert!(text.to_string().contains(why), "{text}");
    };
    for (more, why) in [
        ("arena = \"vm\"\nframes = \"4096\"", "is another file now"),
        ("arena = \"copy\"", "no packet memory that VMs can map now"),
    ] {
        wire.daemon.kill();
        write(more);
        wire.daemon.launch().unwrap();
        refused(&wire, why);
    }
    // As it was, in a new file: the VM has the old one.
    wire.daemon.kill();
    write("arena = \"vm\"\nframes = \"1024\"");
    wire.daemon.launch().unwrap();
    refused(&wire, "is another file now");
    client(&wire).detach_own_vm("a", 7).unwrap();
    let again = attach(&wire, "a");
    assert_ne!(stat(&again).ino(), inode);
    let (_, _agent) = member(&again).unwrap();
    let mut port = process(&wire);
    sees(&wire, &mut port, 100);
    assert_eq!(counts(&wire, &port), (0, 100));
}

/// An arena of the old ones would lie among the frames of the new ones.
#[test]
fn memory_for_other_queues_is_another_file_though_it_is_as_long() {
    let (lab, netns) = (Lab::new().unwrap(), Netns::new().unwrap());
    let queues = ["numrxqueues", "4", "numtxqueues", "4"];
    let (one, other) = (
        ["link", "add", "wire0"],
        ["type", "veth", "peer", "name", "wire1"],
    );
    let add = [&one[..], &queues, &other, &queues].concat();
    netns.ip(&add).unwrap();
    for end in ["wire0", "wire1"] {
        netns.ip(&["link", "set", end, "arp", "off", "up"]).unwrap();
    }
    let config = lab.dir().join("config");
    let write = |queues: &str| {
        let text = format!(
            "[[source]]\nname = \"wire1\"\nkind = \"af_xdp\"\nfallback = \"no\"\n\
             arena = \"vm\"\nframes = \"64\"\nqueues = \"{queues}\"\n"
        );
        std::fs::write(&config, text).unwrap();
    };
    write("0+1+2");
    let args = ["--config", config.to_str().unwrap()];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut wire = Wire { daemon, netns, lab };
    let vm = attach(&wire, "a");
    let (inode, len) = (stat(&vm).ino(), stat(&vm).len());
    let file = File::open(arena(&vm)).unwrap();
    wire.daemon.kill();
    write("all");
    wire.daemon.launch().unwrap();
    assert_eq!(stat(&vm).len(), len);
    assert_ne!(stat(&vm).ino(), inode);
    let text = member(&vm).err().unwrap();
    assert!(text.contains("another file now"), "{text}");
    // Nobody wrote to what the VM has.
    assert_ne!(word(&file, 0x10), 0);
    client(&wire).detach_own_vm("a", 7).unwrap();
    // As it is cut now it is used again.
    let vm = attach(&wire, "a");
    let inode = stat(&vm).ino();
    wire.daemon.kill();
    wire.daemon.launch().unwrap();
    assert_eq!(stat(&vm).ino(), inode);
    member(&vm).unwrap();
}

/// Whoever has the memory would find an arena that nobody fills; and who has none, nothing to delete.
#[test]
fn a_start_that_fails_lays_no_arena_and_leaves_no_file_that_no_vm_has() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    let write = |mode: &str, more: &str| {
        let text = format!(
            "[[source]]\nname = \"wire1\"\nkind = \"af_xdp\"\nfallback = \"no\"\n\
             arena = \"vm\"\nframes = \"1024\"\nmode = \"{mode}\"\n{more}"
        );
        std::fs::write(&config, text).unwrap();
    };
    write("auto", "");
    let args = ["--config", config.to_str().unwrap()];
    let mut wire = Wire::new("1500", &args);
    let fails = |wire: &mut Wire, why: &str| {
        wire.daemon.kill();
        let text = wire.daemon.launch().err().unwrap().to_string();
        assert!(text.contains(why), "{text}");
    };
    let vm = attach(&wire, "a");
    let inode = stat(&vm).ino();
    // No veth writes into packet memory itself, which is known when the socket is bound.
    write("zerocopy", "");
    fails(&mut wire, "zero-copy");
    assert_eq!((stat(&vm).ino(), epoch(&vm)), (inode, 0));
    write("auto", "");
    wire.daemon.launch().unwrap();
    assert_eq!(stat(&vm).ino(), inode);
    let (_, agent) = member(&vm).unwrap();
    let mut port = process(&wire);
    sees(&wire, &mut port, 100);
    assert_eq!(counts(&wire, &port), (0, 100));
    drop((agent, port));
    client(&wire).detach_own_vm("a", 7).unwrap();
    write("zerocopy", "");
    fails(&mut wire, "zero-copy");
    assert!(!arena(&vm).exists());
    let nowhere = "[[source]]\nname = \"nowhere\"\nkind = \"af_packet\"\n";
    write("auto", nowhere);
    fails(&mut wire, "nowhere");
    assert!(!arena(&vm).exists());
}

/// A frame is there for whoever has the file, without any port: so it is another file.
#[test]
fn a_vm_that_may_not_see_everything_any_more_gets_no_further_frame() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    let write = |allow: &str| std::fs::write(&config, allow).unwrap();
    let all = "[[allow]]\nvm = \"a\"\nsource = \"wire1\"\n";
    let some = format!("{all}filter = \"tcp\"\n");
    for (now, why) in [("", "may not see"), (&*some, "another file now")] {
        write(all);
        let args = ["--source", LENT, "--config", config.to_str().unwrap()];
        let mut wire = Wire::new("1500", &args);
        let mut wanted = spec("a", "", 0);
        wanted.allow.clear();
        let vm = client(&wire).attach_vm(wanted).unwrap();
        let device = File::open(arena(&vm)).unwrap();
        let held = || {
            let mut bytes = vec![0; vm.arenas[0].1 as usize];
            device.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        let send = |wire: &Wire| {
            let read = |counters: Vec<Counted>| {
                let source = counters.iter().find(|it| it.kind == "source").unwrap();
                value(source, "read")
            };
            let before = read(wire.daemon.counters());
            wire.send(&Stream::new("wire0", 100));
            wire.read(before + 100);
        };
        let before = held();
        send(&wire);
        assert!(held() != before);
        wire.daemon.kill();
        write(now);
        wire.daemon.launch().unwrap();
        let before = held();
        send(&wire);
        assert!(held() == before, "it sees the wire");
        let log = wire.daemon.log();
        let said = |line: &&str| line.contains(why) && line.contains("detach VM \"a\"");
        assert!(log.lines().any(|line| said(&line)), "{log}");
        let text = wire.daemon.port("wire1").group("g").open().err().unwrap();
        assert!(text.to_string().contains("detach VM \"a\""), "{text}");
        client(&wire).detach_own_vm("a", 7).unwrap();
        let again = attach(&wire, "b");
        let (_, _agent) = member(&again).unwrap();
        let mut port = process(&wire);
        sees(&wire, &mut port, 100);
        assert_eq!(counts(&wire, &port), (0, 100));
    }
}

/// It would receive into the same memory, and delete it at its end.
#[test]
fn a_second_daemon_needs_a_state_directory_of_its_own() {
    let wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let before = (stat(&vm).ino(), epoch(&vm));
    let state = wire.daemon.socket().parent().unwrap().to_owned();
    let second = |args: [&str; 2]| {
        let mut command = std::process::Command::new(program("vnplugd").unwrap());
        command.arg("--socket").arg(state.join("other")).args(args);
        let output = command.output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let text = second(["--source", "lab=gen,pps=1"]);
    assert!(text.contains("another daemon uses"), "{text}");
    assert!(text.contains("its own --state-dir"), "{text}");
    assert_eq!((stat(&vm).ino(), epoch(&vm)), before);
    let mut port = process(&wire);
    sees(&wire, &mut port, 100);
}

/// Whoever may write another file of the daemon's could give it the name of packet memory.
#[test]
fn a_file_that_was_put_in_the_place_of_packet_memory_is_not_received_into() {
    let mut wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let len = stat(&vm).len();
    let own = attach_unlike(&wire, "b", len);
    wire.daemon.kill();
    let pool = Path::new(&own.pool_path);
    let before = std::fs::read(pool).unwrap();
    for link in [
        |pool: &Path, name: &Path| std::fs::hard_link(pool, name),
        |pool: &Path, name: &Path| std::os::unix::fs::symlink(pool, name),
    ] {
        std::fs::remove_file(arena(&vm)).unwrap();
        link(pool, &arena(&vm)).unwrap();
        wire.daemon.launch().unwrap();
        assert_ne!(stat(&vm).ino(), std::fs::metadata(pool).unwrap().ino());
        let text = member(&vm).err().unwrap();
        assert!(text.contains("another file now"), "{text}");
        wire.daemon.kill();
    }
    // But for its header, which each daemon writes.
    let after = std::fs::read(pool).unwrap();
    assert!(before[4096..] == after[4096..]);
}

#[test]
fn who_does_not_see_everything_or_names_a_size_has_copies() {
    let wire = Wire::new("1500", &["--source", LENT]);
    for (filter, bytes) in [("udp", 0), ("", 1 << 16)] {
        let vm = client(&wire).attach_vm(spec("a", filter, bytes)).unwrap();
        let name = vm.arenas[0].0.clone();
        assert!(name.ends_with("-g.arena"), "{name}");
        let mut port = process(&wire);
        sees(&wire, &mut port, 50);
        assert_eq!(counts(&wire, &port), (50, 0));
        drop(port);
        client(&wire).detach_own_vm("a", 7).unwrap();
        assert!(!Path::new(&name).exists());
    }
    let vm = attach(&wire, "a");
    let refused = |wanted: VmSpec, why: &str| {
        let text = client(&wire).attach_vm(wanted).err().unwrap().to_string();
        assert!(text.contains(why), "{text}");
    };
    refused(spec("b", "udp", 0), "the same --allow");
    refused(spec("b", "", 1 << 16), "leave the size out");
    assert!(vm.arenas[0].0.ends_with("-wire1.umem"));
}

#[test]
fn in_a_directory_on_a_disk_vms_have_copies() {
    // The lab's own is wherever TMPDIR is; programs are built on a disk.
    let pools = format!("pools-{}", std::process::id());
    let pools = Path::new(env!("CARGO_TARGET_TMPDIR")).join(pools);
    std::fs::create_dir(&pools).unwrap();
    let wire = Wire::new(
        "1500",
        &["--source", LENT, "--pool-dir", pools.to_str().unwrap()],
    );
    let vm = attach(&wire, "a");
    let log = wire.daemon.log();
    let mut port = process(&wire);
    sees(&wire, &mut port, 50);
    let counts = counts(&wire, &port);
    drop(wire);
    std::fs::remove_dir_all(&pools).unwrap();
    assert!(vm.arenas[0].0.ends_with("-g.arena"));
    assert!(log.contains("is on no tmpfs or hugetlbfs"), "{log}");
    assert_eq!(counts, (50, 0));
}

#[test]
fn a_truncated_file_costs_those_who_read_there_and_nobody_else() {
    truncated(|_| 4096, false);
}

#[test]
fn a_file_that_was_truncated_and_grew_again_is_noticed() {
    truncated(|_| 0, true);
}

#[test]
fn a_file_of_which_the_beginning_stayed_when_it_was_truncated_and_grew_again_is_noticed() {
    truncated(|_| 4096, true);
    truncated(|place| place.offset + place.len - 4096, true);
}

/// Truncates it to what is told of the arena's place.
fn truncated(keep: impl Fn(RingPlace) -> u64, grows: bool) {
    let wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let (opened, agent) = member(&vm).unwrap();
    let keep = keep(opened.arenas.places[0]);
    drop(agent);
    let mut own = wire.daemon.port("wire1").open().unwrap();
    sees(&wire, &mut own, 100);
    let file = File::options().write(true).open(arena(&vm)).unwrap();
    if grows {
        file.set_len(keep).unwrap();
        file.set_len(vm.arenas[0].1).unwrap();
        wire.send(&Stream::new("wire0", 10));
        // Counted, and no port gets zeros for frames.
        let counters = wire.daemon.counters();
        let deadline = Instant::now() + LIMIT;
        let mut dropped = value(
            counters.iter().find(|it| it.kind == "source").unwrap(),
            "kernel_dropped",
        );
        while dropped == 0 {
            assert!(Instant::now() < deadline, "it is not noticed");
            std::thread::sleep(Duration::from_millis(20));
            let counters = wire.daemon.counters();
            dropped = value(
                counters.iter().find(|it| it.kind == "source").unwrap(),
                "kernel_dropped",
            );
        }
    } else {
        file.set_len(keep).unwrap();
    }
    // Those that are received in this moment are lost.
    let deadline = Instant::now() + LIMIT;
    while !wire.daemon.log().contains("was truncated: detach its VMs") {
        assert!(Instant::now() < deadline, "it is not noticed");
        wire.send(&Stream::new("wire0", 10));
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_millis(500));
    while own.batch(10_000).count() > 0 {}
    for _ in 0..10 {
        sees(&wire, &mut own, 300);
    }
    let text = member(&vm).err().unwrap();
    assert!(text.contains("detach its VMs and restart"), "{text}");
    // Groups of processes have copies from now on.
    let mut port = wire.daemon.port("wire1").group("other").open().unwrap();
    sees(&wire, &mut port, 100);
    assert_eq!(counts(&wire, &port), (100, 0));
}

#[test]
fn files_go_that_no_vm_has_and_no_source_uses() {
    let mut wire = Wire::new("1500", &["--source", LENT]);
    let vm = attach(&wire, "a");
    let stale = arena(&vm).with_file_name(
        arena(&vm)
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .replace("wire1", "gone"),
    );
    File::create(&stale).unwrap();
    let others = stale.with_file_name("vnplug-00000000-gone.umem");
    File::create(&others).unwrap();
    let end = |wire: &mut Wire| {
        let pid = rustix::process::Pid::from_raw(wire.daemon.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let deadline = Instant::now() + LIMIT;
        while wire.daemon.socket().exists() {
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        wire.daemon.kill();
    };
    wire.daemon.kill();
    wire.daemon.launch().unwrap();
    assert!(!stale.exists() && others.exists() && arena(&vm).exists());
    end(&mut wire);
    assert!(arena(&vm).exists(), "a VM has it");
    wire.daemon.launch().unwrap();
    client(&wire).detach_own_vm("a", 7).unwrap();
    end(&mut wire);
    assert!(!arena(&vm).exists());
}

/// Its guest may run, and has the memory: the daemon cannot know what it may see.
#[test]
fn a_vm_that_cannot_be_served_again_bars_its_groups() {
    for source in [LENT, "wire1=gen,pps=10"] {
        let mut wire = Wire::new("1500", &["--source", source]);
        let (broken, whole) = (attach(&wire, "a"), attach(&wire, "b"));
        wire.daemon.kill();
        std::fs::remove_file(&broken.pool_path).unwrap();
        wire.daemon.launch().unwrap();
        let text = member(&whole).err().unwrap();
        assert!(text.contains("detach VM \"a\""), "{text}");
        let counters = wire.daemon.counters();
        let is_broken = |vm: &Counted| vm.name == "a" && label(vm, "state") == "broken";
        assert!(counters.iter().any(is_broken), "{counters:?}");
        client(&wire).detach_own_vm("a", 7).unwrap();
        member(&whole).unwrap();
        // Alone, too: the group is not one of the same name in somebody's own memory.
        wire.daemon.kill();
        let record = wire.daemon.socket().with_file_name("vms").join("b.toml");
        let text = std::fs::read_to_string(&record).unwrap();
        std::fs::write(&record, text.replace("uml = false", "uml = 7")).unwrap();
        wire.daemon.launch().unwrap();
        let text = wire.daemon.port("wire1").group("g").open().err().unwrap();
        assert!(text.to_string().contains("detach VM \"b\""), "{text}");
        client(&wire).detach_own_vm("b", 7).unwrap();
        process(&wire);
    }
}
