//! Who may not join a group, and arenas that are too large: refused with a reason, and what fits goes.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use vnplug::Client;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, label, program, refusal, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{Counted, Grant, Message, Open, Role, VmKind, VmSpec, code};
use vnplug_testing::eventually;

const SOURCE: [&str; 2] = ["--source", "lab=gen,pps=1000,protocols=udp4+tcp4"];

fn member(group: &str, arena_bytes: u64) -> Open {
    Open {
        group: group.into(),
        arena_bytes,
        ..open("lab", 4096)
    }
}

fn is_opened(raw: &mut Raw, open: Open) {
    let answer = raw.ask(&Message::Open(open), 0);
    assert!(matches!(answer, Message::Opened(_)), "{answer:?}");
    drop(raw.take_fds());
}

fn is_refused(raw: &mut Raw, open: Open) -> (u16, String) {
    let refused = refusal(raw.ask(&Message::Open(open), 0));
    assert_eq!(raw.take_fds().len(), 0);
    refused
}

fn groups(counters: &[Counted]) -> Vec<(&str, u64)> {
    let ports = counters.iter().filter(|one| one.kind == "port");
    ports
        .map(|port| (label(port, "group"), value(port, "arena_bytes")))
        .collect()
}

#[test]
fn who_is_granted_something_else_is_in_no_group_of_before() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &SOURCE).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let mut grant = |filter: &str| {
        let spec = VmSpec {
            name: "probe".into(),
            kind: VmKind::Qemu,
            pool_bytes: 8 << 20,
            vectors: 0,
            allow: vec![Grant {
                source: "lab".into(),
                filter: filter.into(),
            }],
            owner: 7,
            groups: Vec::new(),
            stays_for: None,
        };
        operator.attach_vm(spec).unwrap()
    };
    let ready = grant("udp");
    let mut agent = Raw::connect(ready.control_path.as_ref());
    agent.hello(Role::Agent);
    is_opened(&mut agent, member("ids", 1 << 16));
    // The control: with the same grant another one joins.
    is_opened(&mut agent, member("ids", 0));
    for filter in ["tcp", "", "udp port 53"] {
        // What one member may see all may: under another grant none of them goes on.
        grant(filter);
        eventually("its members are closed", || in_ids(&daemon) == 0);
        // A group of that name is a new one, with what may be seen now.
        is_opened(&mut agent, member("ids", 1 << 16));
        is_opened(&mut agent, member("ids", 0));
        assert_eq!(in_ids(&daemon), 2);
    }
    // The same grant again changes nothing.
    grant("udp port 53");
    is_opened(&mut agent, member("ids", 0));
    assert_eq!(in_ids(&daemon), 3);
}

/// Ports in the group.
fn in_ids(daemon: &Daemon) -> usize {
    let counters = daemon.audit();
    let all = groups(&counters).into_iter();
    all.filter(|(name, _)| *name == "ids").count()
}

#[test]
fn an_arena_that_is_too_large_is_refused_and_what_fits_is_there() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    fs::write(&config, "max_ring_bytes = '4MiB'\n").unwrap();
    let args = [&["--config", config.to_str().unwrap()], &SOURCE[..]].concat();
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut raw = Raw::greeted(&daemon.socket());
    for bytes in [(4 << 20) + 1, u64::MAX] {
        let (kind, text) = is_refused(&mut raw, member("g", bytes));
        assert_eq!(kind, code::INVALID, "{text}");
        assert!(text.contains("the limit is 4194304"), "{text}");
    }
    let (kind, text) = is_refused(&mut raw, {
        let mut long = member("g", 1 << 16);
        long.snaplen = 60_000;
        long
    });
    assert_eq!(kind, code::INVALID);
    assert!(text.contains("make the arena larger"), "{text}");
    assert_eq!(groups(&daemon.audit()), []);
    is_opened(&mut raw, member("g", 4 << 20));
    // Who joins takes it as it is, whatever it asks for.
    is_opened(&mut raw, member("g", u64::MAX));
    assert_eq!(groups(&daemon.audit()), [("g", 4 << 20), ("g", 4 << 20)]);
}

#[test]
fn arenas_count_for_their_owners_memory_once() {
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("config");
    fs::write(&config, "socket_mode = 0o666\nmax_user_bytes = '3MiB'\n").unwrap();
    let config = ["--config", config.to_str().unwrap()];
    let grant = ["--allow", "uid:65534=lab"];
    let daemon = Daemon::start(&lab, None, &[&config[..], &SOURCE, &grant].concat()).unwrap();
    let nobody = |group: &str, arena: &str, ring: &str| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(["timeout", "60"])
            .arg(program("vnplug").unwrap())
            .args(["count", "-c", "1", "--group", group, "--arena", arena])
            .args(["--ring", ring, "lab"])
            .env("VNPLUG_SOCKET", daemon.socket())
            .process_group(0);
        let output = command.output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let refused = nobody("large", "4M", "64K");
    assert!(refused.contains("the limit is 3145728"), "{refused}");
    assert!(nobody("fits", "2M", "64K").contains("packet"));
    // The arena and a ring of descriptors together.
    let refused = nobody("both", "2M", "2M");
    assert!(refused.contains("the limit is 3145728"), "{refused}");
    assert_eq!(groups(&daemon.audit()), []);
}

#[test]
fn an_arena_that_the_vms_pool_does_not_hold_takes_nothing_of_it() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &SOURCE).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let spec = VmSpec {
        name: "small".into(),
        kind: VmKind::Qemu,
        pool_bytes: 1 << 20,
        vectors: 0,
        allow: vec![Grant {
            source: "lab".into(),
            filter: String::new(),
        }],
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    };
    let ready = operator.attach_vm(spec).unwrap();
    let mut agent = Raw::connect(ready.control_path.as_ref());
    agent.hello(Role::Agent);
    for _ in 0..20 {
        let (kind, text) = is_refused(&mut agent, member("g", 1 << 20));
        assert_eq!(kind, code::NO_MEMORY, "{text}");
        assert!(text.contains("--pool"), "{text}");
    }
    is_opened(&mut agent, member("g", 1 << 19));
    assert_eq!(groups(&daemon.audit()), [("g", 1 << 19)]);
}
