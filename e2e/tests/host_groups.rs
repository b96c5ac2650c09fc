//! Groups of the host, seen from the host: who is let in, who is told why not, and members that harm
//! themselves alone. `host_groups_guests` has real guests.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vnplug::{Client, Next};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, refusal, value};
use vnplug_e2e::groups::members;
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{
    ArenaHome, Grant, HostGroup, Message, Open, Opened, Role, VmKind, VmReady, VmSpec,
};
use vnplug_ring::layout::{LIFE, Life, TAIL};
use vnplug_testing::eventually;

/// Asks for a VM that sees `filter` of `lab`, with groups (name, source, bytes of an arena).
fn spec(name: &str, filter: &str, groups: &[(&str, &str, u64)]) -> VmSpec {
    let group = |&(name, source, arena_bytes): &(&str, &str, u64)| HostGroup {
        name: name.into(),
        source: source.into(),
        arena_bytes,
    };
    VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes: 1 << 20,
        vectors: 0,
        allow: vec![Grant {
            source: "lab".into(),
            filter: filter.into(),
        }],
        owner: 7,
        groups: groups.iter().map(group).collect(),
        stays_for: None,
    }
}

/// Opens a port in group `g` as the agent of a VM.
fn member(agent: &mut Raw, device: &str) -> Result<Opened, String> {
    let request = Open {
        group: "g".into(),
        ..open(device, 1 << 14)
    };
    match agent.ask(&Message::Open(request), 1) {
        Message::Opened(opened) => {
            assert_eq!(opened.arenas.home, ArenaHome::Apart);
            assert!(agent.take_fds().is_empty(), "a VM gets no descriptors");
            Ok(opened)
        }
        other => Err(refusal(other).1),
    }
}

#[test]
fn a_member_that_lags_lies_or_dies_harms_itself_alone() {
    let lab = Lab::new().unwrap();
    // An arena holds what comes in many seconds, which this process may be kept waiting.
    let source = "lab=gen,pps=2000,queues=2,size=200";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut attach = |name| {
        let ready = client.attach_vm(spec(name, "", &[("g", "lab", 4 << 20)]));
        let ready = ready.unwrap();
        let mut agent = Raw::connect(ready.control_path.as_ref());
        agent.hello(Role::Agent);
        (ready, agent)
    };
    let ((ready, mut lagging), (liars, mut liar)) = (attach("a"), attach("b"));
    let of_all = member(&mut lagging, "lab").unwrap();
    let of_one = member(&mut liar, "lab@1").unwrap();
    // One file, an arena for each queue, told from others by the first one's epoch.
    assert_eq!(ready.arenas, liars.arenas);
    assert_eq!(of_all.arenas.memory, of_one.arenas.memory);
    assert_eq!(of_all.arenas.places[1..], of_one.arenas.places);
    let mut epoch = [0; 8];
    let (path, len) = &ready.arenas[0];
    let file = File::open(path).unwrap();
    file.read_exact_at(&mut epoch, 0x10).unwrap();
    assert_eq!(u64::from_le_bytes(epoch), of_all.arenas.memory);
    assert_eq!(of_all.arenas.map_len, *len);

    let mut honest = daemon.port("lab").group("g").open().unwrap();
    let mut goes_on = |what: &str, mut also: Box<dyn FnMut() -> bool + '_>| {
        let before = honest.counts().received;
        eventually(what, || {
            honest
                .batch(10_000)
                .for_each(|packet| assert!(packet.is_ok()));
            honest.counts().received > before + 2_000 && also()
        });
    };
    // The first one never reads.
    let port = |number: u32| {
        let ports = members(&daemon, "g").into_iter();
        ports.into_iter().find(|it| it.name == number.to_string())
    };
    let full = || value(&port(of_all.port).unwrap(), "dropped_full") > 0;
    goes_on("one lags", Box::new(full));
    // The second one writes nonsense into its ring.
    let mut options = File::options();
    let pool = options.read(true).write(true).open(&liars.pool_path);
    let pool = pool.unwrap();
    let memory = vnplug::map_memory(pool.as_fd(), of_one.map_len).unwrap();
    let place = of_one.rings[0];
    let ring = memory.part(place.offset, place.len).unwrap();
    let found_out = || {
        ring.store_u64(TAIL, 0x1234_5678, Ordering::Release);
        Life::from_word(ring.load_u64(LIFE, Ordering::Acquire)) == Life::Quarantined
    };
    goes_on("one lies", Box::new(found_out));
    drop(liar);
    let gone = || port(of_one.port).is_none();
    goes_on("one dies", Box::new(gone));
    assert_eq!(honest.dropped(), 0);

    // Who owns the file can truncate it: nobody joins any more, and nothing else happens.
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(4096).unwrap();
    eventually("the daemon notices", || {
        member(&mut lagging, "lab").is_err_and(|why| why.contains("was truncated"))
    });
    daemon.audit();
}

#[test]
fn who_asks_for_an_impossible_group_is_told_what_to_do() {
    let lab = Lab::new().unwrap();
    let sources = ["--source", "lab=gen,pps=10", "--source", "other=gen,pps=10"];
    let daemon = Daemon::start(&lab, None, &sources).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut attach = |name: &str, filter: &str, groups: &[(&str, &str, u64)]| {
        client.attach_vm(spec(name, filter, groups))
    };
    let refused = |attached: Result<VmReady, vnplug::Error>, why: &str| {
        let error = attached.expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(attach("a", "", &[("g", "nowhere", 0)]), "no source");
    refused(attach("a", "", &[("g", "lab@0", 0)]), "write \"lab\"");
    refused(attach("a", "", &[("g", "other", 0)]), "add --allow other");
    refused(attach("a", "", &[("../g", "lab", 0)]), "no group name");
    let huge = attach("a", "", &[("g", "lab", 1 << 50)]);
    refused(huge, "the limit is");
    let twice = attach("a", "", &[("g", "lab", 0), ("g", "lab", 0)]);
    refused(twice, "named twice");
    let names: Vec<String> = (0..9).map(|n| format!("g{n}")).collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_str(), "lab", 0)).collect();
    refused(attach("a", "", &many), "at most 8");

    let ready = attach("a", "udp", &[("g", "host:lab", 1 << 20)]).unwrap();
    let (path, len) = ready.arenas[0].clone();
    assert_eq!(
        (len, std::fs::metadata(&path).unwrap().len()),
        (2 << 20, 2 << 20)
    );
    refused(attach("b", "", &[("g", "lab", 0)]), "the same --allow");
    refused(
        attach("b", "udp", &[("g", "lab", 1 << 21)]),
        "leave the size",
    );
    refused(attach("a", "", &[("g", "lab", 0)]), "the same --allow");
    refused(attach("a", "udp", &[]), "is attached with g=lab");
    assert_eq!(attach("a", "udp", &[("g", "lab", 0)]).unwrap(), ready);
    let b = attach("b", "udp", &[("g", "lab", 0)]).unwrap();
    assert_eq!(b.arenas, ready.arenas);
    // An operator's process in the group gets what the group may see, and no more.
    let mut port = daemon.port("lab").group("g").filter("tcp").open().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(matches!(port.next().unwrap(), Next::Nothing));
    client.detach_own_vm("a", 7).unwrap();
    assert!(Path::new(&path).exists());
    client.detach_own_vm("b", 7).unwrap();
    assert!(!Path::new(&path).exists());
    daemon.audit();
}

/// What a configuration takes from a VM while no daemon runs: its guest has the memory plugged in
/// all the same.
#[test]
fn a_uml_is_told_why_it_can_be_in_no_group_of_the_host() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,count=1"]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let wanted = VmSpec {
        kind: VmKind::Uml,
        ..spec("uml", "", &[("g", "lab", 1 << 16)])
    };
    let text = client.attach_vm(wanted.clone()).err().unwrap().to_string();
    assert!(
        text.contains("maps one memory") && text.contains("can write"),
        "{text}"
    );
    // The control: it is the group, and not the machine.
    let groups = Vec::new();
    client.attach_vm(VmSpec { groups, ..wanted }).unwrap();
}

#[test]
fn a_vm_that_may_not_see_the_source_any_more_keeps_the_others_from_its_memory() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    let grant = |vms: &[&str]| {
        let of = |vm: &&str| format!("[[allow]]\nvm = \"{vm}\"\nsource = \"lab\"\n");
        std::fs::write(&config, vms.iter().map(of).collect::<String>()).unwrap();
    };
    grant(&["a", "b"]);
    let path = config.to_str().unwrap();
    let args = ["--config", path, "--source", "lab=gen,pps=10"];
    let mut daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut attach = |name| {
        let spec = VmSpec {
            allow: Vec::new(),
            ..spec(name, "", &[("g", "lab", 1 << 16)])
        };
        client.attach_vm(spec).unwrap()
    };
    let (file, control) = (attach("a").arenas.remove(0).0, attach("b").control_path);
    let ask = || {
        let mut agent = Raw::connect(control.as_ref());
        agent.hello(Role::Agent);
        member(&mut agent, "lab").map(drop)
    };
    ask().unwrap();
    daemon.kill();
    grant(&["b"]);
    daemon.launch().unwrap();
    let why = ask().unwrap_err();
    assert!(why.contains("detach VM \"a\""), "{why}");
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    client.detach_own_vm("a", 7).unwrap();
    ask().unwrap();
    // Nobody is left who may: the file goes all the same.
    daemon.kill();
    grant(&[]);
    daemon.launch().unwrap();
    assert!(Path::new(&file).exists());
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    client.detach_own_vm("b", 7).unwrap();
    assert!(!Path::new(&file).exists());
}

/// Its machine may run and read on: its name is not free, and what is refused changes nothing.
#[test]
fn a_vm_that_cannot_be_served_again_is_its_owners_until_it_is_detached() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=100"]).unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let groups = [("g", "lab", 1 << 20)];
    let ready = client.attach_vm(spec("a", "", &groups)).unwrap();
    client.attach_vm(spec("b", "", &groups)).unwrap();
    daemon.kill();
    let record = daemon.socket().with_file_name("vms").join("a.toml");
    let text = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, text.replace("uml = false", "uml = 7")).unwrap();
    daemon.launch().unwrap();

    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let other = VmSpec {
        owner: 8,
        ..spec("a", "", &[])
    };
    for other in [other.clone(), VmSpec { owner: 0, ..other }] {
        let text = client.attach_vm(other).err().unwrap().to_string();
        assert!(text.contains("cannot be served"), "{text}");
    }
    let text = client.detach_own_vm("a", 8).err().unwrap().to_string();
    assert!(text.contains("cannot be served"), "{text}");
    let impossible = VmSpec {
        pool_bytes: 3 << 20,
        ..spec("a", "", &[])
    };
    let text = client.attach_vm(impossible).err().unwrap().to_string();
    assert!(text.contains("power of two"), "{text}");

    let pool = Path::new(&ready.pool_path);
    assert!(record.exists() && pool.exists());
    let port = || daemon.port("lab").group("g").open();
    let text = port().err().unwrap().to_string();
    assert!(text.contains("detach VM \"a\""), "{text}");
    client.detach_own_vm("a", 7).unwrap();
    assert!(!record.exists() && !pool.exists());
    port().unwrap();
}
