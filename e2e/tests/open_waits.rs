//! Ports that are asked for, and wait for memory or for their turn, while the grants change: they are opened by the new ones.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::Duration;

use rustix::io::ioctl_fionread;
use rustix::process::{Pid, Signal, kill_process};
use vnplug::{Client, GrantAction, GrantKind};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::{Raw, open};
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_ring::control::{FilterSpec, Grow, Message, Open, Opened, Role, VmKind, VmSpec, code};
use vnplug_ring::layout::Meta;
use vnplug_ring::{Producer, Region};
use vnplug_testing::{Deadline, until};

/// A change of the grants, and the refusal that follows; without one the port is opened, and may not send any more what it
/// might before.
type Change = (GrantAction, GrantKind, &'static str, Option<u16>);

const NARROWER: Change = (
    GrantAction::Set,
    GrantKind::See,
    ":src host 10.0.0.1",
    // Its filters are compiled by then: the library asks again.
    Some(code::UNAVAILABLE),
);
const UNSEEN: Change = (
    GrantAction::Remove,
    GrantKind::See,
    "",
    Some(code::NOT_FOUND),
);
const MUTE: Change = (GrantAction::Remove, GrantKind::Send, "", Some(code::DENIED));
const LOCKED: Change = (
    GrantAction::Set,
    GrantKind::Send,
    ",mac=02:00:00:00:00:01",
    None,
);

/// How it ended.
enum Answer {
    Refused(u16, String),
    Opened(Box<Sends>),
}

/// The transmit ring of an opened port, and how its host is told of it.
struct Sends {
    port: u32,
    memory: Region,
    ring: Producer,
    kick: Box<dyn FnMut()>,
}

impl Sends {
    fn new(opened: &Opened, memory: Region, kick: impl FnMut() + 'static) -> Self {
        let place = opened.transmit;
        let ring = memory.part(place.offset, place.len).unwrap();
        Self {
            port: opened.port,
            ring: Producer::attach(ring).unwrap(),
            memory,
            kick: Box::new(kick),
        }
    }

    /// Sends a frame from a station that only some may be: whether it was sent.
    fn sends(mut self, daemon: &Daemon) -> bool {
        let frame = [7; 60];
        assert_eq!(self.ring.push(&Meta::default(), &frame), Ok(true));
        self.ring.publish();
        let number = self.port.to_string();
        let counters = ["send_taken", "sent", "send_dropped_station"];
        let look = || {
            (self.kick)();
            let all = daemon.counters();
            let own = all.iter().find(|it| it.kind == "port" && it.name == number);
            counters.map(|name| value(own.unwrap(), name))
        };
        let [_, sent, dropped] = until("it is taken", look, |it| it[0] == 1);
        assert_eq!(sent + dropped, 1);
        drop(self.memory);
        sent == 1
    }
}

/// Has ports opened that wait, by `opens`, and changes the grants meanwhile: what it is given does that.
fn meets(
    daemon: &Daemon,
    whose: &str,
    changes: &[Change],
    mut opens: impl FnMut(&mut dyn FnMut()) -> Answer,
) {
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let mut change = |action, kind, rest: &str| {
        let text = format!("{whose}=lab{rest}");
        operator.change_grant(action, kind, &text, false).unwrap();
    };
    // The control: nothing changes.
    match opens(&mut || {}) {
        Answer::Opened(port) => assert!(port.sends(daemon)),
        Answer::Refused(code, text) => panic!("{code}: {text}"),
    }
    for (action, kind, rest, expected) in changes {
        let answer = opens(&mut || change(*action, *kind, rest));
        match (answer, expected) {
            (Answer::Refused(code, text), Some(expected)) => assert_eq!(code, *expected, "{text}"),
            (Answer::Opened(port), None) => assert!(!port.sends(daemon), "{rest}"),
            (Answer::Refused(code, text), None) => panic!("{rest}: {code}: {text}"),
            (Answer::Opened(_), Some(_)) => panic!("{rest}: opened by the old grant"),
        }
        for kind in [GrantKind::See, GrantKind::Send] {
            change(GrantAction::Set, kind, "");
        }
    }
}

/// Nothing was answered yet.
fn waits(raw: &Raw) {
    assert_eq!(ioctl_fionread(&raw.stream).unwrap(), 0, "it did not wait");
}

fn answer(raw: &mut Raw) -> Message {
    loop {
        if let (ASKED, message) = raw.next().unwrap() {
            return message;
        }
    }
}

/// A user asks for a port; `changes` is called while it waits, `goes_on` afterwards.
fn of_user(
    daemon: &Daemon,
    request: Open,
    changes: &mut dyn FnMut(),
    goes_on: impl FnOnce(),
) -> Answer {
    let socket = daemon.socket();
    let mut raw = as_user(move || Raw::greeted(&socket));
    raw.send(&Message::Open(request).encode(ASKED, 0)).unwrap();
    // It is served by then, if it does not wait.
    sleep(Duration::from_millis(50));
    waits(&raw);
    changes();
    waits(&raw);
    goes_on();
    match answer(&mut raw) {
        Message::Opened(opened) => {
            let fds = raw.take_fds();
            let memory = vnplug::map_apart(fds[0].as_fd(), fds[1].as_fd(), &opened).unwrap();
            let mut kicks = UnixStream::from(fds[3].try_clone().unwrap());
            Answer::Opened(Box::new(Sends::new(&opened, memory, move || {
                // It may be kicked already. The port is there as long as the connection.
                let _ = (kicks.write(&[1]), &raw, &fds);
            })))
        }
        Message::Error { code, text } => Answer::Refused(code, text),
        other => panic!("{other:?}"),
    }
}

fn user_daemon(lab: &Lab) -> (Daemon, String) {
    let config = open_to_all(lab, "max_user_bytes = \"1G\"\n");
    let whose = format!("uid:{USER}");
    let grant = format!("{whose}=lab");
    let args = ["--config", &config, "--source", "lab=gen,pps=1000"];
    let grants = ["--allow", &grant, "--allow-send", &grant];
    let daemon = Daemon::start(lab, None, &[&args[..], &grants].concat()).unwrap();
    (daemon, whose)
}

fn asked(ring_bytes: u64) -> Open {
    Open {
        transmit_bytes: 1 << 16,
        ..open("lab", ring_bytes)
    }
}

#[test]
fn who_waits_for_memory_that_another_gets_first_is_given_what_is_granted_then() {
    let lab = Lab::new().unwrap();
    let (daemon, whose) = user_daemon(&lab);
    let changes = [NARROWER, UNSEEN, MUTE, LOCKED];
    meets(&daemon, &whose, &changes, |changes| {
        // Much memory, which takes its time.
        let mut first = Raw::greeted(&daemon.socket());
        let much = Message::Open(open("lab", 1 << 30));
        first.send(&much.encode(ASKED, 0)).unwrap();
        sleep(Duration::from_millis(20));
        let answered = of_user(&daemon, asked(32 << 20), changes, || {});
        assert!(matches!(answer(&mut first), Message::Opened(_)));
        answered
    });
}

/// The process that compiles filters for a daemon.
fn compiler(daemon: &Daemon) -> Pid {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    // A thread may have ended since.
    let children =
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
    let children: String = children.collect();
    let mut children = children.split_whitespace();
    let child = children.next().expect("the daemon has a child");
    assert_eq!(children.next(), None, "and no other");
    Pid::from_raw(child.parse().unwrap()).unwrap()
}

/// A process that was stopped goes on when this is dropped, also if the test fails: it would never end.
struct GoesOn(Pid);

impl Drop for GoesOn {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[test]
fn who_waits_for_a_filters_turn_is_given_what_is_granted_then() {
    let lab = Lab::new().unwrap();
    let (daemon, whose) = user_daemon(&lab);
    let compiler = compiler(&daemon);
    let mut port = 0;
    // What needs a filter itself would wait for its turn, too.
    let changes = [UNSEEN, MUTE, LOCKED];
    meets(&daemon, &whose, &changes, |changes| {
        port += 1;
        let request = Open {
            // Never compiled before.
            filter: FilterSpec::Expression(format!("udp port {port}")),
            ..asked(1 << 16)
        };
        kill_process(compiler, Signal::STOP).unwrap();
        let goes_on = GoesOn(compiler);
        of_user(&daemon, request, changes, || drop(goes_on))
    });
}

/// Plugs a device that the daemon wants: its memory.
fn wanted(plugger: &mut Client) -> (u32, OwnedFd) {
    let deadline = Deadline::new("a device is wanted");
    loop {
        deadline.check();
        match plugger.next_growth().unwrap() {
            Some((Grow::Plug { number, .. }, Some(fd))) => return (number, fd),
            _ => sleep(Duration::from_millis(1)),
        }
    }
}

#[test]
fn a_vms_port_that_waits_for_a_device_is_given_what_is_granted_then() {
    let lab = Lab::new().unwrap();
    let grant = "vm:slow=lab";
    let args = ["--source", "lab=gen,pps=1000", "--allow", grant];
    let daemon =
        Daemon::start(&lab, None, &[&args[..], &["--allow-send", grant]].concat()).unwrap();
    let changes = [NARROWER, UNSEEN, MUTE, LOCKED];
    meets(&daemon, "vm:slow", &changes, |changes| {
        let mut plugger = Client::connect_to(&daemon.socket()).unwrap();
        // Of the round before.
        let _ = plugger.detach_vm("slow");
        let spec = VmSpec {
            name: "slow".into(),
            kind: VmKind::Qemu,
            pool_bytes: 1 << 20,
            vectors: 0,
            allow: Vec::new(),
            owner: 9,
            groups: Vec::new(),
            stays_for: None,
        };
        let ready = plugger.attach_vm(spec).unwrap();
        plugger.offer_growth("slow", 64 << 20, false).unwrap();
        let mut agent = Raw::connect(ready.control_path.as_ref());
        agent.hello(Role::Agent);
        let request = Message::Open(Open {
            device: "host:lab".into(),
            ..asked(4 << 20)
        });
        agent.send(&request.encode(ASKED, 1)).unwrap();
        let (number, fd) = wanted(&mut plugger);
        changes();
        waits(&agent);
        let error = String::new();
        plugger
            .tell_growth(Grow::Plugged { number, error })
            .unwrap();
        match answer(&mut agent) {
            Message::Opened(opened) => {
                let len = rustix::fs::fstat(&fd).unwrap().st_size as u64;
                let memory = vnplug::map_memory(fd.as_fd(), len).unwrap();
                let kick = Message::Kick(vec![opened.port]).encode(0, 0);
                Answer::Opened(Box::new(Sends::new(&opened, memory, move || {
                    let _ = (agent.send(&kick), &plugger);
                })))
            }
            Message::Error { code, text } => Answer::Refused(code, text),
            other => panic!("{other:?}"),
        }
    });
}

/// The number of what is asked.
const ASKED: u32 = 7;
