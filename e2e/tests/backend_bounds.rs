//! What back-ends and programs that mean no good cannot have of the daemon: queues, descriptors, work, and what is
//! others'.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{BackEnd, BackEndOptions, ChannelOptions, Client, Error, Heard};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::raw::{Holdings, Raw, open};
use vnplug_e2e::times::Times;
use vnplug_e2e::user::{USER, as_uid, as_user, open_to_all};
use vnplug_ring::control::backend::{Register, cost};
use vnplug_ring::control::{Backend, Message, Role, VmKind, VmSpec, code};
use vnplug_testing::until;

const SOON: Option<Duration> = Some(Duration::from_secs(20));
/// Takes tens of milliseconds to empty.
const MUCH: u64 = 512 << 20;
/// A VM's pool, and a place in it of which there is one.
const POOL: u64 = 512 << 20;
const PLACE: u64 = 384 << 20;

/// A daemon that permits a back-end to root.
fn daemon(lab: &Lab) -> Daemon {
    let kv = "kv,id=85,uid=0,open=*,memory=4M";
    Daemon::start(
        lab,
        None,
        &["--source", "lab=gen,pps=1000", "--backend", kv],
    )
    .unwrap()
}

fn back_end(daemon: &Daemon) -> BackEnd {
    let options = BackEndOptions::new(85, "kv").socket(daemon.socket());
    options.register().unwrap()
}

fn heard(back: &mut BackEnd) -> Heard {
    back.next(SOON)
        .unwrap()
        .expect("the back-end hears something")
}

/// A back-end that does what it likes: number 85.
fn raw_back_end(socket: &Path) -> Raw {
    let mut raw = Raw::greeted(socket);
    let register = Register {
        id: 85,
        name: "kv".into(),
        version: 0,
        events_in: 0,
        events_out: 0,
    };
    let done = raw.ask(&Message::Backend(Backend::Register(register)), 0);
    assert!(matches!(done, Message::Done), "{done:?}");
    raw
}

/// A back-end's memory for a program.
fn share(back: &mut Raw, channel: u32, bytes: u64) -> u32 {
    let region = Message::Backend(Backend::Region {
        channel,
        bytes,
        writable: true,
    });
    let Message::Backend(Backend::Mapped(mapped)) = back.ask(&region, 0) else {
        panic!("no memory");
    };
    drop(back.take_fds());
    mapped.region
}

/// A back-end shares memory, and its program, which reads nothing, lets go of it.
fn share_and_let_go(back: &mut Raw, program: &mut Raw, channel: u32, bytes: u64) {
    let shared = share(back, channel, bytes);
    let lets_go = Message::Backend(Backend::Withdraw {
        channel,
        region: shared,
        within_ms: 0,
    });
    program.send(&lets_go.encode(0, 0)).unwrap();
    loop {
        let told = back.next().expect("the back-end is connected");
        if let (0, Message::Backend(Backend::Withdraw { region, .. })) = told
            && region == shared
        {
            return;
        }
    }
}

/// Credit for what lies in the daemon would have it queue without bound: the back-end says on.
#[test]
fn a_program_that_takes_what_it_was_not_given_yet_is_cut() {
    const ANSWER: usize = 40_000;
    const ROUNDS: u64 = 40;
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = back_end(&daemon);
    let serves = thread::spawn(move || {
        loop {
            match heard(&mut back) {
                Heard::Message { channel, .. } => back.send(channel, &[7; ANSWER]).unwrap(),
                Heard::Left { .. } => return,
                _ => {}
            }
        }
    });
    let (mut raw, channel) = Raw::program(&daemon.socket(), 85);
    let told = |of: &str| {
        let counters = daemon.counters();
        let mut own = counters.iter().filter(|it| it.kind == "backend");
        value(own.find(|it| it.name == "kv").unwrap(), of)
    };
    let mut rounds = 0;
    // It reads nothing, and says after each answer that it took it.
    while told("channels_cut") == 0 {
        rounds += 1;
        assert!(rounds <= ROUNDS, "{} bytes wait", ANSWER as u64 * ROUNDS);
        let bytes = vec![1];
        let asks = Message::Backend(Backend::Say { channel, bytes });
        raw.send(&asks.encode(0, 0)).unwrap();
        let answered = || told("messages_out") == rounds || told("channels_cut") > 0;
        until("it is answered", answered, |it| *it);
        let cost = cost(ANSWER);
        let took = Message::Backend(Backend::Took { channel, cost });
        raw.send(&took.encode(0, 0)).unwrap();
    }
    serves.join().unwrap();
}

#[test]
fn memory_that_is_gone_before_its_program_was_told_leaves_no_descriptors() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = raw_back_end(&daemon.socket());
    let (mut program, channel) = Raw::program(&daemon.socket(), 85);
    let before = Holdings::at_rest(daemon.pid()).fds;
    for _ in 0..1500 {
        share_and_let_go(&mut back, &mut program, channel, 4096);
    }
    let now = || Holdings::of(daemon.pid()).fds;
    until("its descriptors are closed", now, |now| *now <= before + 4);
}

#[test]
fn memory_of_which_a_program_lets_go_again_and_again_costs_what_rings_cost() {
    const EACH: u64 = 64 << 20;
    const TIMES: u64 = 24;
    let lab = Lab::new().unwrap();
    let kv = "kv,id=85,uid=0,open=*,memory=64M";
    let daemon = Daemon::start(&lab, None, &["--backend", kv]).unwrap();
    let mut back = raw_back_end(&daemon.socket());
    let (mut program, channel) = Raw::program(&daemon.socket(), 85);
    let began = Instant::now();
    for _ in 0..TIMES {
        share_and_let_go(&mut back, &mut program, channel, EACH);
    }
    // 5 requests' worth each MiB, 4,000 at once and 2,000 a second.
    let worth = (TIMES * (EACH >> 20) * 5) as f64;
    let least = Duration::from_secs_f64((worth - 4000.0) / 2000.0 - 0.5);
    let took = began.elapsed();
    assert!(took > least, "{took:?}, not {least:?}");
}

/// How long a back-end waits for an answer that costs it next to nothing.
fn waits(back: &mut Raw) -> Duration {
    let begun = Instant::now();
    let listed = back.ask(&Message::Backend(Backend::List), 0);
    assert!(matches!(listed, Message::Backend(Backend::Listed(_))));
    begun.elapsed()
}

/// Each program that comes is given much memory. Whoever pays for that waits: who comes again and again, and not the
/// back-end, of which others ask something.
#[test]
fn who_comes_for_memory_again_and_again_waits_and_the_back_end_does_not() {
    const EACH: u64 = 256 << 20;
    const ROUNDS: usize = 16;
    const LONG: Duration = Duration::from_millis(250);
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let kv = "kv,id=85,uid=0,open=uid:*,memory=1G";
    let daemon = Daemon::start(&lab, None, &["--config", &config, "--backend", kv]).unwrap();
    let mut back = raw_back_end(&daemon.socket());
    let joins = || joins(&daemon);
    let mut of_back_end = Times::default();
    let mut last = (0..ROUNDS).find_map(|round| {
        let (program, waited) = joins();
        eprintln!("program {round} was there after {waited:?}");
        // Before, there is enough at once, and it had no processor.
        if round > 2 && waited > LONG {
            return Some(program);
        }
        share(&mut back, program.1, EACH);
        of_back_end.push(waits(&mut back));
        None
    });
    let (program, channel) = last.as_mut().expect("it waits before it comes again");
    of_back_end.are_within(Duration::from_millis(100), "an answer to the back-end");
    // The control: what a back-end takes back itself, and shares again, it pays, and waits.
    let again = (0..ROUNDS).filter_map(|_| {
        let region = share(&mut back, *channel, EACH);
        let waited = waits(&mut back);
        let withdraw = Backend::Withdraw {
            channel: *channel,
            region,
            within_ms: 60_000,
        };
        back.send(&Message::Backend(withdraw).encode(7, 0)).unwrap();
        let asked =
            |it: &(u32, Message)| matches!(it.1, Message::Backend(Backend::Withdraw { .. }));
        while !asked(&program.next().unwrap()) {}
        drop(program.take_fds());
        let lets_go = Message::Backend(Backend::Withdraw {
            channel: *channel,
            region,
            within_ms: 0,
        });
        program.send(&lets_go.encode(0, 0)).unwrap();
        while back.next().unwrap().0 != 7 {}
        (waited > LONG).then_some(waited)
    });
    let again: Vec<_> = again.take(2).collect();
    eprintln!("a back-end that shares again by itself waited {again:?}");
    assert_eq!(again.len(), 2);
}

/// A back-end that has its programs come again, each time with much memory, pays for that itself.
#[test]
fn who_is_given_memory_and_is_hung_up_on_again_and_again_does_not_wait() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let kv = "kv,id=85,uid=0,open=uid:*,memory=1G";
    let daemon = Daemon::start(&lab, None, &["--config", &config, "--backend", kv]).unwrap();
    let mut back = raw_back_end(&daemon.socket());
    let (mut of_programs, mut of_back_end) = (Times::default(), Times::default());
    for _ in 0..9 {
        let ((_program, channel), waited) = joins(&daemon);
        of_programs.push(waited);
        share(&mut back, channel, 256 << 20);
        let reason = "again".to_owned();
        let hangup = Message::Backend(Backend::Hangup { channel, reason });
        back.send(&hangup.encode(0, 0)).unwrap();
        of_back_end.push(waits(&mut back));
    }
    of_programs.are_within(Duration::from_millis(250), "to come again");
    // The control: somebody did.
    let waited = of_back_end.at(100);
    assert!(waited > Duration::from_millis(250), "{waited:?}");
}

/// A program of a user with its channel, and how long it took until it had that.
fn joins(daemon: &Daemon) -> ((Raw, u32), Duration) {
    let (socket, begun) = (daemon.socket(), Instant::now());
    let program = as_user(move || Raw::program(&socket, 85));
    (program, begun.elapsed())
}

#[test]
fn no_owner_of_programs_takes_all_of_a_back_ends_memory() {
    let lab = Lab::new().unwrap();
    let kv = format!("kv,id=85,uid=0,open=uid:{USER}+uid:{},memory=1M", USER + 1);
    let config = open_to_all(&lab, "");
    let args = ["--config", &config, "--backend", &kv];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut back = back_end(&daemon);
    let socket = daemon.socket();
    let greedy = as_user(move || ChannelOptions::new("kv").socket(&socket).open().unwrap());
    let Heard::Joined { channel, .. } = heard(&mut back) else {
        panic!("nobody joined");
    };
    let mut pieces = 0;
    let refused = loop {
        match back.share(channel, 64 << 10, false) {
            Ok(_) => pieces += 1,
            Err(Error::Refused { code, text }) => break (code, text),
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!((pieces, refused.0), (8, code::LIMIT), "{}", refused.1);
    assert!(refused.1.contains("half"), "{}", refused.1);
    // Who comes later has half of what is left.
    let socket = daemon.socket();
    let other = as_uid(USER + 1, move || {
        ChannelOptions::new("kv").socket(&socket).open().unwrap()
    });
    let Heard::Joined { channel, .. } = heard(&mut back) else {
        panic!("nobody joined");
    };
    for _ in 0..4 {
        back.share(channel, 64 << 10, false).unwrap();
    }
    let refused = back.share(channel, 64 << 10, false);
    assert!(
        matches!(&refused, Err(Error::Refused { text, .. }) if text.contains("half")),
        "{refused:?}"
    );
    drop((greedy, other));
}

/// The most open files that a process may have, and descriptors that may be on their way.
fn limit_files(pid: u32, most: u64) {
    let arguments = [format!("--pid={pid}"), format!("--nofile={most}")];
    let status = Command::new("prlimit").args(arguments).status().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn a_user_that_reads_no_descriptors_has_a_share_of_those_that_may_be_on_their_way() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let kv = format!("kv,id=85,uid=0,open=uid:{USER},memory=4M");
    let args = ["--config", &config, "--source", "lab=gen,pps=1000"];
    let args = [&args[..], &["--backend", &kv]].concat();
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    limit_files(daemon.pid(), 500);
    let mut back = raw_back_end(&daemon.socket());
    let mut bystander = Raw::greeted(&daemon.socket());
    let mut programs: Vec<_> = (0..4)
        .map(|_| {
            let socket = daemon.socket();
            as_user(move || Raw::program(&socket, 85))
        })
        .collect();
    for (program, channel) in &mut programs {
        for _ in 0..200 {
            share_and_let_go(&mut back, program, *channel, 4096);
        }
    }
    let opened = bystander.ask(&Message::Open(open("lab", 1 << 16)), 0);
    assert!(matches!(opened, Message::Opened(_)), "{opened:?}");
    // Theirs count while they are unread, also when their connections are cut.
    for (program, _) in &mut programs {
        program.send(&[0xff; 64]).unwrap();
    }
    let (mut another, channel) = {
        let socket = daemon.socket();
        as_user(move || Raw::program(&socket, 85))
    };
    for _ in 0..200 {
        share_and_let_go(&mut back, &mut another, channel, 4096);
    }
    let opened = bystander.ask(&Message::Open(open("lab", 1 << 16)), 0);
    assert!(matches!(opened, Message::Opened(_)), "{opened:?}");
    drop(programs);
    // And no longer: what waits for it comes.
    let share = Message::Backend(Backend::Region {
        channel,
        bytes: 4096,
        writable: true,
    });
    assert!(matches!(
        back.ask(&share, 0),
        Message::Backend(Backend::Mapped(_))
    ));
    while !matches!(
        another.next().expect("it is connected"),
        (0, Message::Backend(Backend::Mapped(_)))
    ) {}
}

#[test]
fn an_answer_with_descriptors_waits_until_the_kernel_takes_them() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab);
    let mut back = raw_back_end(&daemon.socket());
    let mut bystander = Raw::greeted(&daemon.socket());
    // Operators' connections have a share each.
    let mut programs = [(); 2].map(|()| Raw::program(&daemon.socket(), 85));
    for (program, channel) in &mut programs {
        for _ in 0..200 {
            share_and_let_go(&mut back, program, *channel, 4096);
        }
    }
    limit_files(daemon.pid(), 300);
    let opens = Message::Open(open("lab", 1 << 16));
    bystander.send(&opens.encode(7, 0)).unwrap();
    let waits = thread::spawn(move || bystander.next());
    thread::sleep(Duration::from_millis(300));
    assert!(!waits.is_finished(), "answered, or cut");
    drop(programs);
    let opened = waits.join().unwrap();
    assert!(
        matches!(opened, Some((7, Message::Opened(_)))),
        "{opened:?}"
    );
}

/// Nanoseconds that the daemon's threads for memory have run, and all others.
fn ran(daemon: &Daemon) -> [u64; 2] {
    let mut ran = [0; 2];
    for task in fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap() {
        let task = task.unwrap().path();
        // It may have ended.
        let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default();
        let is_other = !read("comm").starts_with("vnplug-memory");
        let nanoseconds = read("schedstat");
        let nanoseconds = nanoseconds.split(' ').next().unwrap();
        ran[usize::from(is_other)] += nanoseconds.parse::<u64>().unwrap_or(0);
    }
    ran
}

/// Has something done that is work for the threads for memory alone.
fn beside_others<T>(daemon: &Daemon, does: impl FnOnce() -> T) -> T {
    let before = ran(daemon);
    let done = does();
    let after = ran(daemon);
    let [memory, others] = [0, 1].map(|at| after[at].saturating_sub(before[at]) / 1000);
    eprintln!("memory's threads ran for {memory} us, others for {others} us");
    assert!(
        others < memory / 2,
        "{others} us of other threads, {memory} us"
    );
    done
}

#[test]
fn nobody_waits_while_much_is_emptied_under_a_program() {
    let lab = Lab::new().unwrap();
    let kv = "kv,id=85,uid=0,open=*,memory=2G";
    let daemon = Daemon::start(&lab, None, &["--backend", kv]).unwrap();
    let mut back = raw_back_end(&daemon.socket());
    let (mut program, channel) = Raw::program(&daemon.socket(), 85);
    for _ in 0..3 {
        let share = Message::Backend(Backend::Region {
            channel,
            bytes: MUCH,
            writable: true,
        });
        let Message::Backend(Backend::Mapped(mapped)) = back.ask(&share, 0) else {
            panic!("no memory");
        };
        let withdraw = Backend::Withdraw {
            channel,
            region: mapped.region,
            within_ms: 0,
        };
        let withdraw = Message::Backend(withdraw);
        let done = beside_others(&daemon, || back.ask(&withdraw, 0));
        let late = Message::Backend(Backend::Withdrawn { released: false });
        assert_eq!(done, late);
        let fd = back.take_fds().pop().unwrap();
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks, 0, "not emptied");
        program.send(&withdraw.encode(0, 0)).unwrap();
    }
}

/// A back-end may share a VM's pool; the VM's agent.
fn beside_a_vm(lab: &Lab) -> (Daemon, Raw) {
    let kv = "kv,id=85,uid=0,open=*,memory=2G,pool=yes";
    let daemon = Daemon::start(lab, None, &["--backend", kv]).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let spec = VmSpec {
        name: "probe".into(),
        kind: VmKind::Qemu,
        pool_bytes: POOL,
        vectors: 0,
        allow: Vec::new(),
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    };
    let ready = operator.attach_vm(spec).unwrap();
    let mut agent = Raw::connect(ready.control_path.as_ref());
    agent.hello(Role::Agent);
    (daemon, agent)
}

#[test]
fn nobody_waits_while_much_of_a_pool_is_emptied_for_a_back_end() {
    let lab = Lab::new().unwrap();
    let (daemon, mut agent) = beside_a_vm(&lab);
    let mut back = raw_back_end(&daemon.socket());
    let channel = agent.connect_to(85, 1);
    let share = Message::Backend(Backend::Region {
        channel,
        bytes: PLACE,
        writable: true,
    });
    for _ in 0..3 {
        let done = beside_others(&daemon, || back.ask(&share, 0));
        let Message::Backend(Backend::Mapped(mapped)) = done else {
            panic!("{done:?}");
        };
        let pool = back.take_fds().pop().unwrap();
        let mut ends = [1; 2];
        rustix::io::pread(&pool, &mut ends[..1], mapped.offset).unwrap();
        rustix::io::pread(&pool, &mut ends[1..], mapped.offset + PLACE - 1).unwrap();
        assert_eq!(ends, [0; 2]);
        rustix::io::pwrite(&pool, &[7], mapped.offset).unwrap();
        rustix::io::pwrite(&pool, &[7], mapped.offset + PLACE - 1).unwrap();
        let lets_go = Message::Backend(Backend::Withdraw {
            channel,
            region: mapped.region,
            within_ms: 0,
        });
        agent.send(&lets_go.encode(0, 1)).unwrap();
        while !matches!(
            back.next().expect("it is connected"),
            (0, Message::Backend(Backend::Withdraw { .. }))
        ) {}
    }
}

/// Who asked, and whose program went meanwhile, is told, and the place is another's again.
#[test]
fn a_place_whose_program_goes_while_it_is_emptied_is_free_again() {
    let lab = Lab::new().unwrap();
    let (daemon, mut agent) = beside_a_vm(&lab);
    let mut back = raw_back_end(&daemon.socket());
    for app in 1..=3 {
        let channel = agent.connect_to(85, app);
        let share = Message::Backend(Backend::Region {
            channel,
            bytes: PLACE,
            writable: true,
        });
        back.send(&share.encode(7, 0)).unwrap();
        let reason = String::new();
        let hangs_up = Message::Backend(Backend::Hangup { channel, reason });
        agent.send(&hangs_up.encode(0, app)).unwrap();
        let answer = loop {
            if let (7, answer) = back.next().expect("it is connected") {
                break answer;
            }
        };
        // It may have been quicker.
        assert!(
            matches!(
                answer,
                Message::Backend(Backend::Mapped(_)) | Message::Error { .. }
            ),
            "{answer:?}"
        );
    }
    let channel = agent.connect_to(85, 9);
    let share = Message::Backend(Backend::Region {
        channel,
        bytes: PLACE,
        writable: true,
    });
    let again = || back.ask(&share, 0);
    until("the place is free", again, |it| {
        matches!(it, Message::Backend(Backend::Mapped(_)))
    });
}
