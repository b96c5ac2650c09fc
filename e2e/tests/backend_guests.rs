//! Programs in guests that use a back-end on the host: by the agent, in User-mode Linux and in QEMU, with memory
//! in the pool and in devices that are plugged for it; and the same program, doing the same, in a container.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "backend_guests/deaths.rs"]
mod deaths;
#[path = "backend_guests/memory.rs"]
mod memory;
#[path = "backend_guests/resumes.rs"]
mod resumes;
#[path = "backend_guests/speech.rs"]
mod speech;

use std::os::unix::net::UnixListener;
use std::process::Stdio;
use std::time::{Duration, Instant};

use vnplug::{BackEnd, BackEndOptions, Error, Heard};
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::{Daemon, example};
use vnplug_e2e::manager::Manager;
use vnplug_e2e::times::Times;
use vnplug_e2e::user::{USER, open_to_all};
use vnplug_e2e::{Guest, Image, Job, Lab, Machine, Qemu, QemuConfig, container};
use vnplug_ring::control::{REVOKED_CHANNEL, code};
use vnplug_testing::{PATIENCE, eventually};

use self::deaths::{back_end_dies, program_dies};
use self::memory::{is_apart, is_emptied, is_withdrawn, lets_go, shares, shares_again, writes};
use self::resumes::{Program, resumes};
use self::speech::{counts, floods, speaks};

const SOON: Option<Duration> = Some(Duration::from_secs(60));
/// A guest that is emulated answers with what others leave of a processor.
const EMULATED: Duration = Duration::from_millis(500);

fn daemon(lab: &Lab, more: &str) -> Daemon {
    let kv = format!("kv,id=85,uid=0,open=vm:*,memory=16M{more}");
    let args = [
        "--source",
        "lab=gen,pps=100",
        "--backend",
        &kv,
        "--backend",
        "none,id=9,uid=0",
    ];
    Daemon::start(lab, None, &args).unwrap()
}

/// With `pen` of the library's examples, which writes memory.
fn with_pen() -> Image {
    image()
        .unwrap()
        .program_at(example("pen").unwrap(), "/bin/pen")
}

fn back_end(daemon: &Daemon) -> BackEnd {
    let options = BackEndOptions::new(85, "kv").events(4, 4);
    options.socket(daemon.socket()).register().unwrap()
}

fn heard(back: &mut BackEnd) -> Heard {
    back.next(SOON)
        .unwrap()
        .expect("the back-end hears something")
}

/// The channel of a program of `whose`: `vm:NAME`, `uid:N`.
fn joined(back: &mut BackEnd, whose: &str) -> u32 {
    loop {
        match heard(back) {
            Heard::Joined { channel, who, .. } => {
                assert_eq!(who, whose);
                return channel;
            }
            Heard::Left { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Waits until a program in a guest has shown this.
fn shows(program: &Job, text: &str) {
    let began = Instant::now();
    loop {
        let said = program.peek(8192).unwrap_or_default();
        if said.contains(text) {
            return;
        }
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no {text:?} in {said:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What an operator revokes is over for the program, which ends by that, and for the back-end.
fn is_revoked(guest: &Guest, daemon: &Daemon, back: &mut BackEnd) {
    let command = "vnplug channel kv --dump 32 <>/tmp/quiet 2>&1";
    let program = guest.spawn(command).unwrap();
    let channel = joined(back, "vm:uml");
    let region = back.share(channel, 4096, true).unwrap();
    back.memory(region).unwrap().write(0, b"shared").unwrap();
    back.event(channel, 0, 1).unwrap();
    shows(&program, "begins: shared");
    let (status, text) = daemon.vnplug(&["revoke", "--backend", "kv", "--vm", "uml"]);
    assert_eq!(status, Some(0), "{text}");
    assert!(matches!(heard(back), Heard::Left { channel: of, reason }
        if of == channel && reason == REVOKED_CHANNEL));
    let said = program.wait(PATIENCE).unwrap();
    assert!(
        said.status != 0 && said.text().contains(REVOKED_CHANNEL),
        "{}",
        said.text()
    );
}

#[test]
fn programs_in_a_uml_speak_to_a_back_end_and_share_memory_of_the_pool() {
    let lab = Lab::new().unwrap();
    let mut daemon = daemon(&lab, ",pool=yes");
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), with_pen());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let mut back = back_end(&daemon);
    speaks(&uml.guest, &mut back, "vm:uml");
    counts(&uml.guest, &mut back, "vm:uml");
    floods(&uml.guest, &mut back);
    shares(&uml.guest, &mut back, "vm:uml");
    is_withdrawn(&uml.guest, &mut back, "vm:uml");
    is_emptied(&uml.guest, &mut back, "vm:uml");
    writes(&uml.guest, &mut back, "vm:uml");
    resumes(Program::in_guest(&uml.guest), "vm:uml", &mut back, || {
        daemon.kill();
        daemon.launch().unwrap();
        uml.adopt_again(&daemon);
    });
    is_revoked(&uml.guest, &daemon, &mut back);
    // All of it is free again.
    let free = || {
        let counters = daemon.counters();
        let vm = counters.iter().find(|it| it.kind == "vm").unwrap();
        let value = |name: &str| vm.values.iter().find(|it| it.0 == name).unwrap().1;
        value("pool_free") + 4096 == value("pool_bytes")
    };
    eventually("the pool is free", free);
    let back = back_end_dies(&uml.guest, &daemon, back, "vm:uml");
    let mut back = program_dies(&uml.guest, back);
    // Death of the guest's agent is told.
    let program = uml
        .guest
        .spawn("vnplug channel kv <>/tmp/quiet 2>&1")
        .unwrap();
    joined(&mut back, "vm:uml");
    let killed = uml.guest.run(
        "kill -9 $(pidof vnplug | tr ' ' '\\n' | sort -n | head -1)",
        PATIENCE,
    );
    assert_eq!(killed.unwrap().status, 0);
    drop(program);
    let _agent = agent(&uml.guest).unwrap();
    assert!(matches!(heard(&mut back), Heard::Left { .. }));
}

#[test]
fn a_pool_is_not_a_back_ends_without_the_operators_word() {
    let lab = Lab::new().unwrap();
    let daemon = daemon(&lab, "");
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let mut back = back_end(&daemon);
    uml.guest.run("mkfifo /tmp/quiet", PATIENCE).unwrap();
    let _program = uml
        .guest
        .spawn("vnplug channel kv <>/tmp/quiet 2>&1")
        .unwrap();
    let channel = joined(&mut back, "vm:uml");
    let Err(Error::Refused {
        code: code::DENIED,
        text,
    }) = back.share(channel, 4096, false)
    else {
        panic!("memory of the pool");
    };
    assert!(text.contains("pool = true"), "{text}");
    // Messages need no memory.
    back.send(channel, b"hello").unwrap();
}

#[test]
fn the_same_program_in_a_container_speaks_and_shares_memory() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let whose = format!("uid:{USER}");
    let kv = format!("kv,id=85,uid=0,open={whose},memory=8M");
    let args = ["--config", &config, "--source", "lab=gen,pps=100"];
    let none = "none,id=9,uid=0";
    let backends = ["--backend", &kv, "--backend", none];
    let mut daemon = Daemon::unstarted(&lab, None, &[&args[..], &backends].concat()).unwrap();
    // The container has this one file, which a service manager keeps; without one the next daemon makes another.
    let manager = Manager::new(&lab).unwrap();
    let listener = UnixListener::bind(daemon.socket()).unwrap();
    manager.pass("control", listener.into());
    daemon.set_manager(&manager);
    daemon.launch().unwrap();
    let container = container::start(&lab, USER, &daemon.socket(), &with_pen());
    let container = container.unwrap_or_else(|error| panic!("{error}"));
    // It is one: of the host it has the socket, and no process, interface or user.
    let is = "ls /run/vnplug; ip -o link | wc -l; id -u; pidof init systemd vnplugd; ls /proc | grep -c '^[0-9]'";
    let is = container.run(is, PATIENCE).unwrap().text();
    let [socket, links, user, processes] = is.lines().collect::<Vec<_>>()[..] else {
        panic!("{is}");
    };
    assert_eq!((socket, links, user), ("vnplug.sock", "1", "0"));
    assert!(processes.parse::<u32>().unwrap() < 20, "{is}");
    let mut back = back_end(&daemon);
    speaks(&container, &mut back, &whose);
    counts(&container, &mut back, &whose);
    floods(&container, &mut back);
    shares(&container, &mut back, &whose);
    is_withdrawn(&container, &mut back, &whose);
    is_emptied(&container, &mut back, &whose);
    writes(&container, &mut back, &whose);
    let mut back = back_end_dies(&container, &daemon, back, &whose);
    resumes(Program::in_guest(&container), &whose, &mut back, || {
        daemon.kill();
        daemon.launch().unwrap();
    });
    // It ends with a program in it, and that is told.
    let _program = container
        .spawn("vnplug channel kv <>/tmp/quiet 2>&1")
        .unwrap();
    joined(&mut back, &whose);
    container.kill();
    assert!(matches!(heard(&mut back), Heard::Left { .. }));
}

#[test]
fn a_running_qemu_gets_memory_of_its_own_and_gives_it_back() {
    let lab = Lab::new().unwrap();
    let mut daemon = daemon(&lab, "");
    let mut deaths = Times::default();
    for (vm, machine) in [("pc", Machine::Pc), ("q35", Machine::Q35 { root_ports: 4 })] {
        let config = QemuConfig {
            machine,
            image: with_pen(),
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&lab, config).unwrap();
        let qmp = guest.qmp_path().unwrap();
        let mut command = daemon.command().unwrap();
        command.args([
            "attach", "qemu", "--name", vm, "--allow", "*", "--grow", "8M", "--qmp",
        ]);
        command.arg(qmp).stdout(Stdio::null());
        let mut plugger = command.spawn().unwrap();
        let _agent = agent(&guest).unwrap();
        let mut back = back_end(&daemon);
        let whose = format!("vm:{vm}");
        speaks(&guest, &mut back, &whose);
        counts(&guest, &mut back, &whose);
        floods(&guest, &mut back);
        shares(&guest, &mut back, &whose);
        is_emptied(&guest, &mut back, &whose);
        // Memory that a program keeps has its port until it goes, and q35 has four.
        if vm == "pc" {
            writes(&guest, &mut back, &whose);
            is_apart(&guest, &mut back, &whose);
        }
        let mut back = back_end_dies(&guest, &daemon, back, &whose);
        // What was plugged is taken out: twice the limit goes, one after the other, and more at once does not.
        let program = guest.spawn("vnplug channel kv <>/tmp/quiet 2>&1").unwrap();
        let channel = joined(&mut back, &whose);
        let mut withdrawn = Times::default();
        for _ in 0..4 {
            let region = shares_again(&mut back, channel, 3 << 20, false);
            let Err(Error::Refused {
                code: code::NO_MEMORY,
                text,
            }) = back.share(channel, 4 << 20, false)
            else {
                panic!("more than --grow");
            };
            assert!(text.contains("--grow"), "{text}");
            lets_go(&mut back, region, &mut withdrawn);
            let began = Instant::now();
            let region = shares_again(&mut back, channel, 7 << 20, false);
            eprintln!(
                "{vm}: taken out, and more plugged, in {:?}",
                began.elapsed()
            );
            lets_go(&mut back, region, &mut withdrawn);
        }
        withdrawn.are_within(EMULATED, "to withdraw memory from a program in QEMU");
        program.signal("KILL").unwrap();
        assert!(matches!(heard(&mut back), Heard::Left { channel: of, .. } if of == channel));
        // The daemon is started again: both resume, and so does who plugs.
        resumes(Program::in_guest(&guest), &whose, &mut back, || {
            daemon.kill();
            daemon.launch().unwrap();
        });
        // A QEMU that is killed takes its programs along.
        let _program = guest.spawn("vnplug channel kv <>/tmp/quiet 2>&1").unwrap();
        let channel = joined(&mut back, &whose);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| guest.kill());
            let left = loop {
                if let Heard::Left { channel, .. } = heard(&mut back) {
                    break channel;
                }
            };
            deaths.push(begun.elapsed());
            assert_eq!(left, channel);
        });
        plugger.kill().unwrap();
        plugger.wait().unwrap();
        drop(back);
    }
    deaths.are_within(
        Duration::from_millis(100),
        "to tell of the death of a QEMU with a program",
    );
}
