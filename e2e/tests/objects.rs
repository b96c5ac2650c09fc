//! Kernel objects that the daemon shares with its peers: whatever they do with them, no thread of the
//! daemon that others need waits for it. The table is in docs/threat-model.md.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use rustix::process::{Pid, Signal, kill_process};
use vnplug_e2e::beside::{beside, liar, port_of};
use vnplug_e2e::bombs::{Lingering, UnansweredPage, forget_pass_rights, lingering};
use vnplug_e2e::daemon::{Daemon, refusal, value};
use vnplug_e2e::raw::{Raw, hello, open};
use vnplug_e2e::silent_file::SilentFile;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{Message, Role, VmKind, VmSpec, code};
use vnplug_testing::{Deadline, eventually, until};

/// How long descriptors block who drops them: longer than anybody here is patient.
const LINGER: Duration = Duration::from_secs(40);
/// The daemon's answer to a bystander, on a machine with other work. A thread that waits for a bomb
/// takes forty times as long.
const SOON: Duration = Duration::from_secs(1);

const SOURCE: &[&str] = &["--source", "lab=gen,pps=1000"];

/// Answers the fault of a page in the end.
struct Answers<'a>(&'a UnansweredPage);

impl Drop for Answers<'_> {
    fn drop(&mut self) {
        self.0.release().expect("the fault is answered");
    }
}

/// Reads what wakes a reader into a page whose fault nobody answers, while `then` runs.
fn into_nowhere<T>(fd: BorrowedFd<'_>, then: impl FnOnce() -> T) -> T {
    let page = UnansweredPage::new().expect("root may have the kernel's page faults");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let read = page.read(fd);
            done.store(true, Ordering::Relaxed);
            read
        });
        // Also if `then` panics: the reader is waited for.
        let answers = Answers(&page);
        let outcome = then();
        let stuck = !done.load(Ordering::Relaxed);
        drop(answers);
        let read = reader.join().expect("the reader comes back");
        assert!(stuck, "the reader was to wait: {read:?}");
        outcome
    })
}

#[test]
fn a_pipe_read_into_a_page_that_faults_for_ever_stops_its_writer() {
    use rustix::pipe::{PipeFlags, pipe_with};
    // The control of the next test, and why a doorbell is no pipe.
    let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    rustix::io::write(&write, &[1]).unwrap();
    let writes = AtomicBool::new(false);
    thread::scope(|scope| {
        let waited = into_nowhere(read.as_fd(), || {
            thread::sleep(Duration::from_millis(200));
            scope.spawn(|| {
                rustix::io::write(&write, &[1]).unwrap();
                writes.store(true, Ordering::Relaxed);
            });
            thread::sleep(Duration::from_millis(500));
            !writes.load(Ordering::Relaxed)
        });
        assert!(waited, "this kernel holds no lock over a fault");
    });
    assert!(writes.into_inner());
}

#[test]
fn a_doorbell_read_into_a_page_that_faults_for_ever_stops_nobody() {
    beside(50_000, Duration::from_secs(1), |daemon, enough| {
        let reader = liar(daemon, 1 << 20);
        let number = reader.port.to_string();
        let rings = || value(port_of(&daemon.counters(), &number), "rings");
        reader.arm(1);
        let deadline = Deadline::new("it is rung often");
        while rings() == 0 {
            deadline.check();
        }
        let wake = reader.wake.try_clone().expect("a copy");
        into_nowhere(wake.as_fd(), || {
            let (mut seq, before) = (1, rings());
            while !enough.load(Ordering::Relaxed) || rings() < before + 20 {
                deadline.check_seen(&rings());
                for _ in 0..1000 {
                    seq += 1;
                    reader.arm(seq);
                }
            }
            // Its port closes and the connection ends, with the reader where it is.
            let begun = Instant::now();
            let mut raw = reader.raw;
            let close = Message::Close { port: reader.port };
            assert_eq!(raw.ask(&close, 0), Message::Done);
            drop((raw, reader.wake));
            let counters = daemon.counters();
            assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
            assert!(counters.iter().all(|it| it.name != number));
        });
    });
}

#[test]
fn a_doorbell_that_nobody_empties_stalls_nobody_and_takes_nothing() {
    beside(50_000, Duration::from_secs(2), |daemon, enough| {
        let reader = liar(daemon, 1 << 20);
        // A reader can neither write there nor open it again.
        let sent = send(
            &reader.wake,
            &[0],
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        );
        assert_eq!(sent, Err(Errno::PIPE));
        rustix::io::ioctl_fionbio(&reader.wake, false).expect("a flag");
        let number = reader.port.to_string();
        let rings = || value(port_of(&daemon.counters(), &number), "rings");
        let deadline = Deadline::new("it is rung often");
        let mut seq = 0;
        while !enough.load(Ordering::Relaxed) || rings() <= 100 {
            deadline.check_seen(&rings());
            for _ in 0..1000 {
                seq += 1;
                reader.arm(seq);
            }
        }
    });
}

/// A network namespace with a loopback, and a daemon in it; `old`: as on a Linux before 6.16.
fn daemon(lab: &Lab, args: &[&str], old: bool) -> (Netns, Daemon) {
    let netns = Netns::new().expect("a namespace");
    netns.ip(&["link", "set", "lo", "up"]).expect("a loopback");
    let daemon = thread::scope(|scope| {
        let start = scope.spawn(|| {
            if old {
                forget_pass_rights().expect("a filter");
            }
            Daemon::start(lab, Some(&netns), args).expect("the daemon starts")
        });
        start.join().expect("it starts")
    });
    (netns, daemon)
}

fn bomb(netns: &Netns) -> Lingering {
    netns.enter(|| lingering(LINGER)).expect("the namespace")
}

/// Asks for the list as somebody else, for a while; the longest answer.
fn longest_list(daemon: &Daemon, time: Duration) -> Duration {
    let mut bystander = Raw::greeted(&daemon.socket());
    let (begun, mut longest) = (Instant::now(), Duration::ZERO);
    while begun.elapsed() < time {
        let asked = Instant::now();
        assert!(matches!(
            bystander.ask(&Message::List, 0),
            Message::Devices(_)
        ));
        longest = longest.max(asked.elapsed());
        thread::sleep(Duration::from_millis(2));
    }
    longest
}

/// SIGTERM ends it soon.
fn ends(daemon: &Daemon) {
    let pid = Pid::from_raw(daemon.pid() as i32).expect("a process");
    kill_process(pid, Signal::TERM).expect("it is ours");
    let begun = Instant::now();
    // A process that ended is a zombie until its parent looks.
    while std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid()))
        .is_ok_and(|stat| !stat.contains(") Z"))
    {
        assert!(
            begun.elapsed() < Duration::from_secs(2) + SOON,
            "SIGTERM does not end it"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a bomb over a connection, and closes every copy: first the bomb's, then the connection's.
fn throw(netns: &Netns, raw: Raw, bytes: &[u8], kept: &mut Vec<Lingering>) -> std::io::Result<()> {
    let bomb = bomb(netns);
    let sent = raw.send_with(bytes, &[bomb.socket.as_fd()]);
    let Lingering { socket, peer } = bomb;
    drop(socket);
    drop(raw);
    // The peer lives on, so the bomb ticks.
    let socket = File::open("/dev/null").expect("a file").into();
    kept.push(Lingering { socket, peer });
    sent.map(|_| ())
}

#[test]
fn descriptors_that_block_who_drops_them_stop_nobody() {
    let lab = Lab::new().expect("a lab");
    let (netns, daemon) = daemon(&lab, SOURCE, true);
    // The control: to close such a socket takes as long as it lingers.
    let short = netns
        .enter(|| lingering(Duration::from_secs(1)))
        .expect("the namespace");
    let begun = Instant::now();
    drop(short.socket);
    assert!(
        begun.elapsed() > Duration::from_millis(900),
        "{:?}",
        begun.elapsed()
    );

    let mut kept = Vec::new();
    // Plainly, with a whole message and with a piece of one; with more than one message takes.
    for bytes in [&Message::List.encode(1, 0)[..], b"V"] {
        for _ in 0..3 {
            let raw = Raw::greeted(&daemon.socket());
            throw(&netns, raw, bytes, &mut kept).expect("it is sent");
        }
    }
    // Before the daemon has so much as accepted it.
    let raw = Raw::connect(&daemon.socket());
    throw(&netns, raw, &hello(Role::Client).encode(1, 0), &mut kept).expect("it is sent");
    // Behind requests whose answers nobody reads: the daemon does not come to it before the end.
    let mut raw = Raw::greeted(&daemon.socket());
    raw.stream.set_nonblocking(true).expect("a flag");
    let lists = Message::List.encode(1, 0).repeat(3000);
    let _ = raw.send(&lists);
    raw.stream.set_nonblocking(false).expect("a flag");
    let _ = throw(&netns, raw, b"V", &mut kept);
    let longest = longest_list(&daemon, Duration::from_secs(2));
    eprintln!("{} bombs; the longest List took {longest:?}", kept.len());
    assert!(longest < SOON, "{longest:?}");
    ends(&daemon);
}

#[test]
fn a_vms_control_socket_takes_no_descriptors_that_block() {
    let lab = Lab::new().expect("a lab");
    let (netns, daemon) = daemon(&lab, SOURCE, true);
    let mut operator = vnplug::Client::connect_to(&daemon.socket()).expect("a client");
    let ready = operator.attach_vm(vm("bomber")).expect("a VM");
    let control = std::path::Path::new(&ready.control_path);
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut raw = Raw::connect(control);
        raw.hello(Role::Agent);
        throw(&netns, raw, &Message::List.encode(1, 0), &mut kept).expect("it is sent");
    }
    // In the queue of the listener, which goes with the VM.
    let raw = Raw::connect(control);
    throw(&netns, raw, b"V", &mut kept).expect("it is sent");
    operator.detach_vm("bomber").expect("it is detached");
    let longest = longest_list(&daemon, Duration::from_secs(1));
    assert!(longest < SOON, "{longest:?}");
    ends(&daemon);
}

fn vm(name: &str) -> VmSpec {
    VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes: 4 << 20,
        vectors: 0,
        allow: Vec::new(),
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    }
}

#[test]
fn descriptors_that_come_with_kicks_cost_their_sender_and_nobody_else() {
    let lab = Lab::new().expect("a lab");
    let (netns, daemon) = daemon(&lab, SOURCE, true);
    let mut kept = Vec::new();
    for _ in 0..3 {
        let mut raw = Raw::greeted(&daemon.socket());
        let mut request = open("lab", 1 << 16);
        request.transmit_bytes = 1 << 16;
        let Message::Opened(opened) = raw.ask(&Message::Open(request), 0) else {
            panic!("not opened");
        };
        let mut fds = raw.take_fds();
        let kick = Raw::over(fds.pop().expect("the kick").into());
        throw(&netns, kick, b"k", &mut kept).expect("it is sent");
        // It costs this port, and is told.
        let look = || port_of(&daemon.counters(), &opened.port.to_string()).clone();
        until("its port is in quarantine", look, |port| {
            port.labels
                .iter()
                .any(|(_, value)| value.contains("descriptors came with its kicks"))
        });
    }
    // The queue's thread is asked in each of these.
    let longest = longest_list(&daemon, Duration::from_secs(1));
    assert!(longest < SOON, "{longest:?}");
    ends(&daemon);
}

#[test]
fn where_the_kernel_can_it_refuses_descriptors_for_the_daemon() {
    let lab = Lab::new().expect("a lab");
    let (_netns, daemon) = daemon(&lab, SOURCE, false);
    let null = File::open("/dev/null").expect("a file");
    let mut operator = vnplug::Client::connect_to(&daemon.socket()).expect("a client");
    let ready = operator.attach_vm(vm("quiet")).expect("a VM");
    let raw = Raw::connect(std::path::Path::new(&ready.control_path));
    match raw.send_with(b"V", &[null.as_fd()]) {
        Err(error) => assert_eq!(error.raw_os_error(), Some(Errno::PERM.raw_os_error())),
        Ok(_) => eprintln!("SKIPPED: Linux before 6.16"),
    }
}

#[test]
fn files_whose_server_never_answers_and_many_descriptors_stop_nobody() {
    let lab = Lab::new().expect("a lab");
    let (_netns, daemon) = daemon(&lab, SOURCE, true);
    // It goes before the daemon, and with it all that waits.
    let silent = match SilentFile::new() {
        Ok(silent) => silent,
        Err(error) => {
            eprintln!("SKIPPED: no FUSE: {error}");
            return;
        }
    };
    // The control: to close such a file waits. Ours are all closed aside.
    let aside = |fd: OwnedFd| thread::spawn(move || drop(fd));
    let control = aside(silent.open().expect("it is opened"));
    thread::sleep(Duration::from_millis(200));
    assert!(!control.is_finished() && silent.unanswered() == 1);

    let mut operator = vnplug::Client::connect_to(&daemon.socket()).expect("a client");
    let ready = operator.attach_vm(vm("fuse")).expect("a VM");
    let throw = |raw: &Raw, bytes: &[u8]| {
        let file = silent.open().expect("it is opened");
        // As many as a message takes.
        let sent = raw.send_with(bytes, &vec![file.as_fd(); 253]);
        aside(file);
        sent.expect("it is sent");
    };
    // From a VM: nobody receives them.
    let control = std::path::Path::new(&ready.control_path);
    for bytes in [&Message::List.encode(1, 0)[..], b"V"] {
        let mut raw = Raw::connect(control);
        raw.hello(Role::Agent);
        throw(&raw, bytes);
        assert!(raw.next().is_none(), "the connection is over");
    }
    // With a kick.
    let mut raw = Raw::greeted(&daemon.socket());
    let mut request = open("lab", 1 << 16);
    request.transmit_bytes = 1 << 16;
    assert!(matches!(
        raw.ask(&Message::Open(request), 0),
        Message::Opened(_)
    ));
    let kick = Raw::over(raw.take_fds().pop().expect("the kick").into());
    throw(&kick, b"k");
    // From an operator, who may send one, and one that is looked at.
    let mut many = Raw::greeted(&daemon.socket());
    let adopt = Message::Adopt {
        name: "fuse".into(),
    };
    throw(&many, &adopt.encode(7, 0));
    assert!(many.next().is_none(), "more than any message takes");
    let mut one = Raw::greeted(&daemon.socket());
    let before = silent.unanswered();
    let file = silent.open().expect("it is opened");
    one.send_with(&adopt.encode(7, 0), &[file.as_fd()])
        .expect("it is sent");
    let (code, text) = refusal(one.next().expect("an answer").1);
    assert!(code == code::INVALID && text.contains("socket"), "{text}");
    aside(file);
    eventually("the daemon and we close it", || {
        silent.unanswered() >= before + 2
    });
    let longest = longest_list(&daemon, Duration::from_secs(1));
    eprintln!(
        "{} wait; the longest List took {longest:?}",
        silent.unanswered()
    );
    assert!(longest < SOON, "{longest:?}");
    operator.detach_vm("fuse").expect("it is detached");
    drop(silent);
    ends(&daemon);
}
