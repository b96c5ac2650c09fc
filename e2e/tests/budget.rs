//! One owner's thousand ports take a source from nobody else.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, audit, label, program, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_ring::control::{Counted, Message};
use vnplug_testing::eventually;

/// What the other owner opens: as many as the defaults allow a user, roughly.
const PORTS: usize = 1_000;
/// More packets a second than one thread can give to this many ports, and few for one.
const RATE: u64 = 150_000;
const NOBODY: u32 = 65_534;

/// A reader of another user; killed when dropped.
struct Honest(Child);

impl Drop for Honest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn honest_reader(lab: &Lab, daemon: &Daemon) -> Honest {
    // A copy: others may not be allowed to look into the build's directory.
    let copy = lab.dir().join("vnplug");
    fs::copy(program("vnplug").unwrap(), &copy).unwrap();
    let socket = daemon.socket();
    for path in [lab.dir(), &copy, socket.parent().unwrap()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    let child = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["count", "--ring", "64M", "lab"])
        .env("VNPLUG_SOCKET", &socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    Honest(child.unwrap())
}

fn of<'a>(all: &'a [Counted], kind: &str, is_it: impl Fn(&Counted) -> bool) -> Option<&'a Counted> {
    all.iter().find(|it| it.kind == kind && is_it(it))
}

fn is_nobodys(port: &Counted) -> bool {
    label(port, "owner") == format!("uid {NOBODY}")
}

#[test]
fn a_reader_loses_nothing_beside_a_thousand_ports_of_another_owner() {
    let lab = Lab::new().unwrap();
    let source = format!("lab=gen,pps={RATE},start=attach,size=64");
    let grant = format!("uid:{NOBODY}=lab");
    let daemon = Daemon::start(&lab, None, &["--source", &source, "--allow", &grant]).unwrap();
    let _honest = honest_reader(&lab, &daemon);
    eventually("the reader comes", || {
        of(&daemon.counters(), "port", is_nobodys).is_some()
    });
    let mut greedy = Raw::greeted(&daemon.socket());
    for _ in 0..PORTS {
        let opened = greedy.ask(&Message::Open(open("lab", 4096)), 0);
        assert!(matches!(opened, Message::Opened(_)), "{opened:?}");
        greedy.take_fds();
    }
    // It settles, and then it holds.
    let look = || {
        let counters = daemon.counters();
        let at = Instant::now();
        audit(&counters);
        let seen = value(of(&counters, "source", |_| true).unwrap(), "seen");
        (counters, seen, at)
    };
    let mut best = 0.0_f64;
    let deadline = Instant::now() + Duration::from_secs(40);
    while best < 0.95 && Instant::now() < deadline {
        let (_, before, begun) = look();
        thread::sleep(Duration::from_secs(2));
        let (_, after, ended) = look();
        let due = RATE as f64 * (ended - begun).as_secs_f64();
        best = best.max((after - before) as f64 / due);
    }
    let (counters, ..) = look();
    let missed: u64 = counters
        .iter()
        .filter(|it| it.kind == "port" && !is_nobodys(it))
        .map(|it| value(it, "dropped_budget"))
        .sum();
    eprintln!(
        "{:.0} % of {RATE} packets/s beside {PORTS} ports, which missed {missed}",
        best * 100.0
    );
    assert!(best > 0.8, "{best}");
    let honest = of(&counters, "port", is_nobodys).unwrap();
    assert_eq!(value(honest, "dropped_budget"), 0, "{honest:?}");
    assert_eq!(value(honest, "dropped_full"), 0, "{honest:?}");
    assert_eq!(value(honest, "delivered"), value(honest, "offered"));
}
