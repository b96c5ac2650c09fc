//! What VMs have when the daemon comes back, as it was or with another configuration.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::Wire;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::Counted;
use vnplug_testing::eventually;

use crate::{LENT, arena, attach, client, counts, epoch, member, process, sees, spec, stat, word};

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
    let nowhere = "[[source]]\nname = \"nowhere\"\nkind = \"af_packet\"\nwait = false\n";
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
            let read = |counters: Vec<Counted>| value(counted(&counters, "source"), "read");
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
        eventually("it ends", || !wire.daemon.socket().exists());
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
