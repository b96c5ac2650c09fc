use std::slice;

use vnplug_os::access::READ_WRITE;
use vnplug_ring::pool::MAX_NAME;

use super::dirs::{ARENA, POOL, record_path};
use super::*;

fn dirs(name: &str) -> Dirs {
    let state = std::env::temp_dir().join(format!("vnplug-vm-{name}-{}", std::process::id()));
    std::fs::create_dir_all(state.join("vms")).unwrap();
    Dirs {
        pools: state.clone(),
        state,
        pool_bytes: 1 << 20,
    }
}

fn spec(name: &str) -> VmSpec {
    let allow = vec![Grant {
        source: "eth1".into(),
        filter: "icmp".into(),
    }];
    VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes: 0,
        vectors: 0,
        allow,
        owner: 7,
        groups: Vec::new(),
        stays_for: None,
    }
}

fn create(spec: &VmSpec, dirs: &Dirs) -> Result<Vm, Refusal> {
    let plan = VmPlan::new(spec, Vec::new(), dirs)?;
    let pool = plan.commit(&|| true).map(|committed| committed.pool);
    Vm::create(plan, pool, dirs)
}

/// Ends a VM's part of a daemon as the daemon's own end does: its listener is closed elsewhere.
fn end(vm: Vm, dirs: &Dirs) {
    let path = control_path(&dirs.state, vm.name());
    drop(vm);
    while std::os::unix::net::UnixStream::connect(&path).is_ok() {
        std::thread::yield_now();
    }
}

#[test]
fn an_attach_that_fails_leaves_nothing() {
    let dirs = dirs("failed");
    // Something that is no socket is where the doorbell's has to be.
    let obstacle = doorbell_path(&dirs.state, "probe");
    std::fs::create_dir(&obstacle).unwrap();
    let wanted = VmSpec {
        vectors: 2,
        ..spec("probe")
    };
    let refusal = create(&wanted, &dirs).err().unwrap();
    assert!(refusal.text.contains("no socket"), "{}", refusal.text);
    std::fs::remove_dir(&obstacle).unwrap();
    let left = std::fs::read_dir(dirs.state.join("vms")).unwrap();
    assert_eq!(left.count(), 0);
    assert_eq!(std::fs::read_dir(&dirs.pools).unwrap().count(), 1);
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn a_vm_is_found_again_by_the_next_daemon_with_the_same_pool() {
    let dirs = dirs("again");
    let vm = create(&spec("probe"), &dirs).unwrap();
    let (id, ready) = (vm.pool_id, vm.ready(&dirs.state));
    end(vm, &dirs);
    let (again, _) = Vm::load_all(&dirs);
    assert_eq!(again.len(), 1);
    assert_eq!((again[0].pool_id, again[0].ready(&dirs.state)), (id, ready));
    assert_eq!(again[0].grants(), spec("probe").allow);
    again[0].record.remove_files(&dirs.state);
    assert!(Vm::load_all(&dirs).0.is_empty());
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn a_vm_that_was_forgotten_has_another_file_when_it_comes_again() {
    let dirs = dirs("fresh");
    let file = || {
        let vm = create(&spec("probe"), &dirs).unwrap();
        let ready = vm.ready(&dirs.state);
        drop(vm.dissolve(&dirs.state));
        ready.pool_path
    };
    assert_ne!(file(), file());
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn what_stays_is_made_again_after_a_boot_and_the_rest_is_forgotten() {
    let dirs = dirs("boot");
    let us = rustix::process::geteuid().as_raw();
    let wanted = VmSpec {
        stays_for: Some(us),
        ..spec("probe")
    };
    let ready = |vm: Vm| {
        let ready = vm.ready(&dirs.state);
        end(vm, &dirs);
        ready
    };
    let boots = |pool: &[u8]| {
        let path = record_path(&dirs.state, "probe");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace(&record::this_boot(), "another")).unwrap();
        let [file] = dirs.pools_of("probe").try_into().unwrap();
        std::fs::remove_file(&file).unwrap();
        if !pool.is_empty() {
            std::fs::write(file, pool).unwrap();
        }
        Vm::load_all(&dirs).0
    };
    let first = ready(create(&wanted, &dirs).unwrap());
    // Also when a daemon was killed while it made the file, or just after that.
    for pool in [0, 4096, 1 << 20] {
        let again = boots(&vec![7; pool]).pop().unwrap();
        assert_eq!(PoolHeader::read(&again.region).unwrap().name, "probe");
        assert_eq!(ready(again), first);
        // It is of this boot now.
        assert_eq!(ready(Vm::load_all(&dirs).0.pop().unwrap()), first);
    }
    Vm::load_all(&dirs).0.pop().unwrap().dissolve(&dirs.state);
    drop(create(&spec("probe"), &dirs).unwrap());
    assert!(boots(&[]).is_empty() && !record_path(&dirs.state, "probe").exists());
    let impossible = VmSpec {
        kind: VmKind::Uml,
        ..wanted
    };
    assert!(create(&impossible, &dirs).is_err());
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn files_that_no_record_tells_of_go_unless_a_record_that_cannot_be_read_may() {
    let dirs = dirs("swept");
    drop(create(&spec("probe"), &dirs).unwrap());
    let [kept] = dirs.pools_of("probe").try_into().unwrap();
    let left = [
        dirs.fresh("probe", POOL),
        dirs.fresh("other", POOL),
        dirs.fresh("ids", ARENA),
    ];
    // Another daemon's, and one of this daemon's sources.
    let others = [
        dirs.pools.join("vnplug-0-probe.pool"),
        dirs.fresh("lab", "umem"),
    ];
    let make = || {
        for path in left.iter().chain(&others) {
            std::fs::write(path, "").unwrap();
        }
    };
    let are = || left.each_ref().map(|path| path.exists());
    make();
    Vm::load_all(&dirs);
    assert_eq!(are(), [false; 3]);
    assert!(kept.exists() && others.iter().all(|path| path.exists()));
    make();
    std::fs::write(record_path(&dirs.state, "probe"), "no record").unwrap();
    Vm::load_all(&dirs);
    assert_eq!(are(), [true, false, true]);
    assert!(kept.exists());
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn a_pmem_vm_has_a_new_file_each_time_and_its_header_is_the_hosts() {
    let dirs = dirs("pmem");
    let wanted = VmSpec {
        kind: VmKind::QemuPmem,
        pool_bytes: (2 << 20) + 1,
        ..spec("probe")
    };
    let mut vm = create(&wanted, &dirs).unwrap();
    let ready = vm.ready(&dirs.state);
    assert_eq!((vm.kind(), vm.pool_bytes()), ("qemu-pmem", 4 << 20));
    assert_eq!(ready.pool_len, pmem::FRONT + (4 << 20));
    let file = || std::fs::read(&ready.pool_path).unwrap();
    let front = |file: &[u8]| file[..pmem::FRONT as usize].to_vec();
    let first = front(&file());
    assert_eq!(&first[4096..4112], b"NVDIMM_DAX_INFO\0");
    let magic = vnplug_ring::pool::MAGIC.to_le_bytes();
    assert_eq!(file()[pmem::FRONT as usize..][..8], magic);

    // Root in the guest writes it; before it is plugged again, and by the next daemon, it is what it was.
    let spoil = |vm: &Vm| vm.front.as_ref().unwrap().write(4096 + 72, &[2]);
    spoil(&vm);
    assert_ne!(front(&file()), first);
    vm.readopt(&wanted, &dirs.state).unwrap();
    assert_eq!(front(&file()), first);
    let other = VmSpec {
        kind: VmKind::Qemu,
        pool_bytes: 4 << 20,
        ..wanted.clone()
    };
    assert!(vm.readopt(&other, &dirs.state).is_err());
    spoil(&vm);
    end(vm, &dirs);
    let again = Vm::load_all(&dirs).0.pop().unwrap();
    assert_eq!(again.ready(&dirs.state), ready);
    assert_eq!(front(&file()), first);
    drop(again.dissolve(&dirs.state));

    let vm = create(&wanted, &dirs).unwrap();
    assert_ne!(vm.ready(&dirs.state).pool_path, ready.pool_path);
    drop(vm.dissolve(&dirs.state));
    let belled = VmSpec {
        vectors: 1,
        ..wanted
    };
    assert!(create(&belled, &dirs).is_err());
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn what_cannot_be_served_keeps_its_owner_and_goes_with_its_pool() {
    let dirs = dirs("broken");
    drop(create(&spec("probe"), &dirs).unwrap());
    let path = record_path(&dirs.state, "probe");
    let pools = dirs.pools_of("probe");
    assert_eq!(pools.len(), 1);
    let whole = std::fs::read_to_string(&path).unwrap();
    let elsewhere = Dirs {
        pools: dirs.state.join("elsewhere"),
        ..dirs.clone()
    };
    for (text, now, known) in [
        (whole.replace("uml = false", "uml = 7"), &elsewhere, true),
        ("no record".to_owned(), &dirs, false),
    ] {
        std::fs::write(&path, text).unwrap();
        let (vms, broken) = Vm::load_all(now);
        assert!(vms.is_empty());
        let obeys = [7, 8, 0].map(|owner| broken[0].obeys(owner));
        assert_eq!(obeys, [known, false, true]);
        assert_eq!(broken[0].pools, pools);
    }
    Vm::load_all(&dirs).1[0].remove_files(&dirs.state);
    assert_eq!(
        std::fs::read_dir(dirs.state.join("vms")).unwrap().count(),
        0
    );
    assert!(!pools[0].exists());
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn who_may_map_the_pool_may_connect_after_a_restart() {
    let dirs = dirs("acl");
    let vm = create(&spec("probe"), &dirs).unwrap();
    let list = AccessList::only(READ_WRITE, &[65_534]);
    list.set(Path::new(&vm.ready(&dirs.state).pool_path))
        .unwrap();
    end(vm, &dirs);
    let again = Vm::load_all(&dirs).0.pop().unwrap();
    let socket = again.ready(&dirs.state).control_path;
    assert_eq!(AccessList::of(Path::new(&socket)).unwrap(), Some(list));
    again.record.remove_files(&dirs.state);
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn what_a_guest_wrote_over_its_pools_header_does_not_reach_the_next_daemon() {
    let dirs = dirs("scribbled");
    let vm = create(&spec("probe"), &dirs).unwrap();
    let id = vm.pool_id;
    // A name that is longer once its bytes are made UTF-8, and another length.
    vm.region.write(0x20, &[0xff; MAX_NAME]);
    vm.region.write(0x10, &u64::MAX.to_le_bytes());
    end(vm, &dirs);
    let (again, _) = Vm::load_all(&dirs);
    assert_eq!((again[0].name(), again[0].pool_id), ("probe", id));
    let header = PoolHeader::read(&again[0].region).unwrap();
    assert_eq!((header.len, header.name.as_str()), (1 << 20, "probe"));
    again[0].record.remove_files(&dirs.state);
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn names_that_are_paths_and_sizes_that_are_no_power_of_two_are_refused() {
    let dirs = dirs("bad");
    for name in ["", "../x", "a/b", ".hidden", "ä", &"x".repeat(64)] {
        let refusal = create(&spec(name), &dirs).err().unwrap();
        assert_eq!(refusal.code, code::INVALID, "{name}");
    }
    let odd = VmSpec {
        pool_bytes: (1 << 20) + 4096,
        ..spec("odd")
    };
    assert!(
        create(&odd, &dirs)
            .err()
            .unwrap()
            .text
            .contains("power of two")
    );
    std::fs::remove_dir_all(&dirs.state).unwrap();
}

#[test]
fn what_operators_took_of_an_attachment_stays_taken_and_what_is_withheld_comes_again() {
    let dirs = dirs("taken");
    let grant = |source: &str, filter: &str| Grant {
        source: source.into(),
        filter: filter.into(),
    };
    let (icmp, udp, other) = (
        grant("eth1", "icmp"),
        grant("eth1", "udp"),
        grant("eth2", "icmp"),
    );
    let wanted = VmSpec {
        allow: vec![icmp.clone(), udp.clone(), other.clone()],
        ..spec("probe")
    };
    let mut vm = create(&wanted, &dirs).unwrap();
    let take = |vm: &mut Vm, what, for_good| vm.take_grants(what, for_good, &dirs.state);
    // By its filter, one; by no filter, all of the source.
    assert!(!take(&mut vm, ("eth1", "arp"), true).unwrap());
    assert!(!take(&mut vm, ("eth", ""), true).unwrap());
    assert!(take(&mut vm, ("eth1", "icmp"), true).unwrap());
    assert_eq!(vm.grants(), [udp.clone(), other.clone()]);
    assert!(take(&mut vm, ("eth1", ""), false).unwrap());
    assert!(!take(&mut vm, ("eth1", ""), false).unwrap());
    assert_eq!(vm.grants(), slice::from_ref(&other));
    // Whoever attaches the machine again has what is not taken for good, and what is new.
    let new = grant("eth3", "");
    let again = [&wanted.allow[..], slice::from_ref(&new)].concat();
    let left = [udp.clone(), other.clone(), new];
    assert_eq!(vm.left_of(again), left);
    // Nothing is changed if it cannot be written down.
    let nowhere = dirs.state.join("nowhere");
    assert!(vm.take_grants(("eth2", ""), true, &nowhere).is_err());
    assert_eq!(vm.grants(), slice::from_ref(&other));
    end(vm, &dirs);
    // The next daemon has what was withheld; it can be taken for good behind that, too.
    let mut again = Vm::load_all(&dirs).0;
    let vm = &mut again[0];
    assert_eq!(vm.grants(), [udp.clone(), other.clone()]);
    for for_good in [false, true] {
        assert!(take(vm, ("eth1", "udp"), for_good).unwrap());
    }
    assert_eq!(vm.left_of(wanted.allow), slice::from_ref(&other));
    vm.record.remove_files(&dirs.state);
    std::fs::remove_dir_all(&dirs.state).unwrap();
}
