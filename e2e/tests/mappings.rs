//! The kernel's limit of mappings (`vm.max_map_count`) is the daemon's as a whole: it holds some back,
//! and one user cannot have them all.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::thread;

use rustix::process::Uid;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, refusal};
use vnplug_e2e::raw::{Holdings, Raw, open};
use vnplug_ring::control::{Message, Open, code};

const NOBODY: u32 = 65_534;

/// A port of 32 rings, the smallest there are, woken by the connection's one doorbell.
fn wide() -> Open {
    Open {
        shares_wake: true,
        ..open("lab", 4096)
    }
}

/// Opens ports on one connection until it is refused, at most this many; how many, and the refusal.
fn open_all(raw: &mut Raw, most: usize) -> (usize, Option<(u16, String)>) {
    for opened in 0..most {
        match raw.ask(&Message::Open(wide()), 0) {
            Message::Opened(_) => drop(raw.take_fds()),
            other => return (opened, Some(refusal(other))),
        }
    }
    (most, None)
}

#[test]
fn neither_a_user_nor_all_readers_together_exhaust_the_daemons_mappings() {
    let allowed: usize = fs::read_to_string("/proc/sys/vm/max_map_count")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    if allowed > 70_000 {
        println!("SKIPPED: vm.max_map_count is {allowed}, more than can be filled in a test");
        return;
    }
    let lab = Lab::new().unwrap();
    let config = lab.dir().join("vnplug.toml");
    let text = format!(
        "socket_mode = 0o666\n\
         [[source]]\nname = \"lab\"\nkind = \"gen\"\npps = 100\nqueues = 32\n\
         [[allow]]\nuid = {NOBODY}\nsource = \"lab\"\n"
    );
    fs::write(&config, text).unwrap();
    let daemon = Daemon::start(&lab, None, &["--config", config.to_str().unwrap()]).unwrap();
    let socket = daemon.socket();
    for dir in [lab.dir(), socket.parent().unwrap()] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut user = thread::scope(|scope| {
        let connect = || {
            rustix::thread::set_thread_uid(Uid::from_raw(NOBODY)).unwrap();
            Raw::greeted(&socket)
        };
        scope.spawn(connect).join().unwrap()
    });
    let (users, refused) = open_all(&mut user, 1_024);
    let maps = Holdings::of(daemon.pid()).maps;
    println!("a user opened {users} ports of 32 rings: {maps} mappings of {allowed}, {refused:?}");
    let (code, text) = refused.expect("a user may not have them all");
    assert!(
        code == code::LIMIT && text.contains("vm.max_map_count"),
        "{text}"
    );
    assert!(maps < allowed / 2 + 1_000);

    // Others have theirs, and then something is left for the daemon itself.
    let mut operator = Raw::greeted(&socket);
    let (operators, refused) = open_all(&mut operator, 1_024);
    let maps = Holdings::of(daemon.pid()).maps;
    println!("an operator opened {operators} beside: {maps} mappings, {refused:?}");
    let (code, text) = refused.expect("there is a limit");
    assert!(
        code == code::NO_MEMORY && text.contains("vm.max_map_count"),
        "{text}"
    );
    assert!(operators > 300 && maps < allowed - 1_000);
    drop((user, operator));
    daemon.await_no_ports();
    let port = daemon.port("lab").ring_bytes(1 << 16).open();
    assert!(port.is_ok(), "what was closed is free");
    drop(port);
    daemon.audit();
}
