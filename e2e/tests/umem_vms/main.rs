//! Packet memory of an AF_XDP source plugged into VMs, seen from the host: what they get, what they
//! have after the daemon was killed, and who has to do with copies. `umem_guests` has real guests.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod files;
mod restarts;

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use vnplug::{Client, Next, Port};
use vnplug_e2e::daemon::{counted, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::Wire;
use vnplug_frame::witness::{Checker, View};
use vnplug_ring::control::{
    ArenaHome, Counted, Grant, HostGroup, Message, Open, Opened, Role, VmKind, VmReady, VmSpec,
};
use vnplug_testing::{Deadline, until};

const LENT: &str = "wire1=af_xdp,fallback=no,arena=vm,frames=1024";

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
        stays_for: None,
    }
}

fn client(wire: &Wire) -> Client {
    Client::connect_to(&wire.daemon.socket()).unwrap()
}

fn attach(wire: &Wire, name: &str) -> VmReady {
    client(wire).attach_vm(spec(name, "", 0)).unwrap()
}

/// Whether this file is the group's own, which packets are copied into.
fn is_copy(file: &str) -> bool {
    file.contains("-g.") && file.ends_with(".arena")
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
    let deadline = Deadline::new(format!("{frames} frames come"));
    let mut checker = Checker::new(View::Whole);
    let mut received = 0;
    while received < frames {
        deadline.check_seen(&received);
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
    let sent = || value(counted(&wire.daemon.counters(), "source"), "sent");
    until("all are sent", sent, |sent| *sent >= 100);
    drop(sender);
    let bytes = std::fs::read(arena(&a)).unwrap();
    let shown = (in_a.arenas.places[0].offset + in_a.arenas.places[0].len) as usize;
    let (shown, hidden) = bytes.split_at(shown);
    // After it is the mark by which the daemon sees that nothing was cut off.
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
fn who_does_not_see_everything_or_names_a_size_has_copies() {
    let wire = Wire::new("1500", &["--source", LENT]);
    for (filter, bytes) in [("udp", 0), ("", 1 << 16)] {
        let vm = client(&wire).attach_vm(spec("a", filter, bytes)).unwrap();
        let name = vm.arenas[0].0.clone();
        assert!(is_copy(&name), "{name}");
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
    assert!(is_copy(&vm.arenas[0].0));
    assert!(log.contains("is on no tmpfs or hugetlbfs"), "{log}");
    assert_eq!(counts, (50, 0));
}
