//! One port of a switch: who sees what of it, what is set at run time, and who may join.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use vnplug::{Client, Direction, Error, Next, Port, PortOptions};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::station::{Running, Station};
use vnplug_e2e::third_party::build_c;
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_ring::layout::flags;
use vnplug_testing::{eventually, until};

/// A numbered frame between two stations.
fn frame(to: u8, from: u8, number: u32) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.resize(60, 0);
    frame
}

/// The number of each frame that a port has now, and whether the port that is read was given it.
fn numbers(port: &mut Port) -> Vec<(u32, bool)> {
    let mut all = Vec::new();
    while let Next::Packet(packet) = port.next().unwrap() {
        let number = packet.bytes[14..18].try_into().map(u32::from_be_bytes);
        let given = packet.meta.flags & flags::OUTBOUND != 0;
        all.push((number.unwrap(), given));
    }
    all
}

/// What a port has when it has `count`.
fn numbers_of(port: &mut Port, count: usize) -> Vec<(u32, bool)> {
    let mut all = Vec::new();
    eventually("all of it is there", || {
        all.extend(numbers(port));
        all.len() >= count
    });
    all.sort_unstable();
    all
}

fn send(port: &mut Port, frame: &[u8]) {
    assert!(port.send(frame).unwrap());
}

/// How `vnplug switch show` has it.
fn shown(daemon: &Daemon, name: &str) -> Value {
    let (code, text) = daemon.vnplug(&["switch", "show", name, "--stations", "--json"]);
    assert_eq!(code, Some(0), "{text}");
    serde_json::from_str(&text).unwrap()
}

fn options(socket: &Path, device: &str) -> PortOptions {
    PortOptions::new(device).socket(socket)
}

#[test]
fn a_reader_of_one_port_has_exactly_its_frames_both_ways() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut ports = [0; 3].map(|_| daemon.port("host:lan0").join().open().unwrap());
    let named: Vec<_> = ports.iter().map(|it| it.device().to_owned()).collect();
    assert_eq!(
        named,
        ["host:lan0/port1", "host:lan0/port2", "host:lan0/port3"]
    );
    // Each has spoken: no frame is for all any more.
    for (at, port) in (1..).zip(&mut ports) {
        send(port, &frame(at, at, 0));
    }
    eventually("all are known", || {
        value(counted(&daemon.counters(), "source"), "stations") == 3
    });
    let read = |direction| {
        let reader = daemon.port("host:lan0/port2").direction(direction);
        reader.open().unwrap()
    };
    let [mut both, mut rx, mut tx] = [Direction::Both, Direction::Rx, Direction::Tx].map(read);
    let other = daemon
        .port("host:lan0/3")
        .filter("ether src 02:00:00:00:00:02");
    let mut other = other.open().unwrap();
    let mut waiting = daemon.port("lan0/port9").open().unwrap();
    let (mut sent, mut given, mut to_third) = (Vec::new(), Vec::new(), 0);
    let mut state = 7_u32;
    for number in 1..=3000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let from = (state >> 24) % 3 + 1;
        let to = (from + (state >> 16) % 2) % 3 + 1;
        match (from, to) {
            (2, _) => sent.push((number, false)),
            (_, 2) => given.push((number, true)),
            _ => {}
        }
        to_third += usize::from((from, to) == (2, 3));
        send(
            &mut ports[from as usize - 1],
            &frame(to as u8, from as u8, number),
        );
    }
    let mut all = [sent.clone(), given.clone()].concat();
    all.sort_unstable();
    assert!(sent.len() > 500 && given.len() > 500);
    assert_eq!(numbers_of(&mut both, all.len()), all);
    assert_eq!(numbers_of(&mut rx, sent.len()), sent);
    assert_eq!(numbers_of(&mut tx, given.len()), given);
    assert_eq!(numbers_of(&mut other, to_third).len(), to_third);
    for port in [&mut both, &mut rx, &mut tx, &mut other, &mut waiting] {
        assert!(numbers(port).is_empty());
    }
    daemon.audit();
    // Capturing follows the number, whoever has it.
    let mut ninth = daemon.port("lan0/port9").join().open().unwrap();
    send(&mut ninth, &frame(1, 9, 9));
    assert_eq!(numbers_of(&mut waiting, 1), [(9, false)]);
    let taken = daemon.port("lan0/port9").join().open().unwrap_err();
    assert!(taken.to_string().contains("port 9 is taken"), "{taken}");
    for (device, part) in [("lan0/port0", "lan0/port1"), ("lan0/x", "lan0/port1")] {
        let error = daemon.port(device).open().unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    let (_, list) = daemon.vnplug(&["list"]);
    assert!(
        list.contains("host:lan0/port9") && list.contains("switch port"),
        "{list}"
    );
    daemon.audit();
}

#[test]
fn a_grant_of_one_port_shows_that_port_alone() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let grant = format!("uid:{USER}=lan0/port2");
    let args = ["--config", &config, "--switch", "lan0", "--allow", &grant];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut ports = [0; 2].map(|_| daemon.port("host:lan0").join().open().unwrap());
    let socket = daemon.socket();
    let (mut reader, refused, seen) = as_user(move || {
        let refused = ["lan0", "lan0/port1", "lan0/port22"].map(|device| {
            let opened = options(&socket, device).open();
            opened.map(|_| ()).unwrap_err()
        });
        let reader = options(&socket, "lan0/port2").open().unwrap();
        let seen = Client::connect_to(&socket).unwrap().devices().unwrap();
        (reader, refused, seen)
    });
    for error in refused {
        assert!(error.to_string().contains("no source"), "{error}");
    }
    let names: Vec<_> = seen.into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["host:lan0/port2"]);
    send(&mut ports[0], &frame(9, 1, 1));
    assert_eq!(numbers_of(&mut reader, 1), [(1, true)]);
}

#[test]
fn what_operators_set_is_there_after_a_restart_and_nobody_else_sets_anything() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "[[switch]]\nname = 'lan0'\nage = 100\n");
    let mut daemon = Daemon::start(&lab, None, &["--config", &config]).unwrap();
    let run = |daemon: &Daemon, args: &[&str]| {
        let (code, text) = daemon.vnplug(&[&["switch"], args].concat());
        assert_eq!(code, Some(0), "{args:?}: {text}");
        text
    };
    let settings = |daemon: &Daemon| {
        let settings = &shown(daemon, "lan0")["settings"];
        ["hub", "age", "hold"].map(|key| {
            let setting = &settings[key];
            ["value", "from"].map(|it| setting[it].as_str().unwrap().to_owned())
        })
    };
    let told = |words: [[&str; 2]; 3]| words.map(|it| it.map(str::to_owned));
    let before = told([["no", "file"], ["100", "file"], ["2", "file"]]);
    assert_eq!(settings(&daemon), before);
    run(&daemon, &["set", "lan0", "hub=yes", "age=50"]);
    run(&daemon, &["set", "lan0", "hold=9", "--once"]);
    let set = told([["yes", "run time"], ["50", "run time"], ["9", "once"]]);
    assert_eq!(settings(&daemon), set);
    for (args, part) in [
        (["lan0", "hub=maybe"], "yes or no"),
        (["lan0", "color=blue"], "has no \"color\""),
        (["lan7", "hub=yes"], "no switch"),
    ] {
        let (code, text) = daemon.vnplug(&[&["switch", "set"][..], &args].concat());
        assert!(code == Some(1) && text.contains(part), "{text}");
    }
    daemon.kill();
    daemon.launch().unwrap();
    let kept = told([["yes", "run time"], ["50", "run time"], ["2", "file"]]);
    assert_eq!(settings(&daemon), kept);
    let socket = daemon.socket();
    let refused = as_user(move || {
        let mut client = Client::connect_to(&socket).unwrap();
        [
            client.show_switch("lan0", 0, false).map(|_| ()),
            client.set_switch("lan0", 0, "hub=no", true),
            client.kick("lan0", 1),
        ]
    });
    for error in refused {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("only root"), "{error}");
    }
    assert_eq!(settings(&daemon), kept);
    assert!(run(&daemon, &["list"]).contains("hub=yes"));
}

#[test]
fn a_port_that_is_closed_is_free_and_its_program_comes_again_with_its_number() {
    let lab = Lab::new().unwrap();
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={}", dir.display());
    let mut daemon = Daemon::start(&lab, None, &["--switch", &spec]).unwrap();
    let mut first = daemon
        .port("host:lan0")
        .join()
        .label("first")
        .open()
        .unwrap();
    let mut second = daemon
        .port("host:lan0")
        .join()
        .label("second")
        .open()
        .unwrap();
    drop(Station::by_vde(&lab, &dir, "10.0.6.1").unwrap());
    let mut old = Station::by_vde(&lab, &dir, "10.0.6.1").unwrap();
    let ports = |daemon: &Daemon| {
        let shown = shown(daemon, "lan0");
        let ports = shown["ports"].as_array().unwrap().iter();
        let port = |it: &Value| {
            let [way, about] =
                ["way", "description"].map(|key| it[key].as_str().unwrap().to_owned());
            (it["number"].as_u64().unwrap(), way, about)
        };
        ports.map(port).collect::<Vec<_>>()
    };
    eventually("the VDE client is there alone", || {
        ports(&daemon).len() == 3
    });
    let there = ports(&daemon);
    assert_eq!(there[0], (1, "ring".into(), "first".into()));
    assert_eq!(there[1], (2, "ring".into(), "second".into()));
    assert_eq!(there[2].1, "unix prog");

    let vde = format!("lan0/port{}", there[2].0);
    let (code, text) = daemon.vnplug(&["switch", "kick", &vde]);
    assert_eq!(code, Some(0), "{text}");
    eventually("its port is free", || ports(&daemon).len() == 2);
    let ended = until("vde_plug2tap ends", || old.cable.status(), Option::is_some);
    assert!(ended.is_some());
    let (code, text) = daemon.vnplug(&["switch", "kick", &vde]);
    assert!(
        code == Some(1) && text.contains("nobody has port"),
        "{text}"
    );

    // A ring's: it is told, and comes again.
    let (code, text) = daemon.vnplug(&["switch", "kick", "lan0/port1"]);
    assert_eq!(code, Some(0), "{text}");
    eventually("it comes again", || {
        let _ = first.next();
        first.counts().reopened == 1
    });
    assert_eq!(first.device(), "host:lan0/port1");
    send(&mut first, &frame(9, 1, 5));
    assert_eq!(numbers_of(&mut second, 1), [(5, false)]);

    // The second is back before the first, and each has its number again.
    daemon.kill();
    daemon.launch().unwrap();
    for port in [&mut second, &mut first] {
        let before = port.counts().reopened;
        eventually("it comes again", || {
            let _ = port.next();
            port.counts().reopened > before
        });
    }
    let devices = [first.device(), second.device()];
    assert_eq!(devices, ["host:lan0/port1", "host:lan0/port2"]);
    let about: Vec<_> = ports(&daemon).into_iter().map(|it| it.2).collect();
    assert_eq!(about, ["first", "second"]);
}

#[test]
fn who_has_a_grant_joins_and_sees_no_more_than_its_port_is_given() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let grant = format!("uid:{USER}=lan0");
    let args = ["--config", &config, "--switch", "lan0", "--switch", "lan1"];
    let args = [&args[..], &["--allow-join", &grant]].concat();
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut own = daemon.port("lan0").join().open().unwrap();
    let socket = daemon.socket();
    let (mut theirs, refused) = as_user(move || {
        let refused: Vec<Error> = [
            options(&socket, "lan0").open(),
            options(&socket, "lan0/port1").open(),
            options(&socket, "lan0").transmit(1 << 16).open(),
            options(&socket, "lan1").join().open(),
        ]
        .map(|opened| opened.map(|_| ()).unwrap_err())
        .into();
        (options(&socket, "lan0").join().open().unwrap(), refused)
    });
    for error in refused {
        assert!(error.to_string().contains("no source"), "{error}");
    }
    send(&mut own, &frame(9, 1, 1));
    assert_eq!(numbers_of(&mut theirs, 1), [(1, false)]);
    send(&mut theirs, &frame(1, 9, 2));
    assert_eq!(numbers_of(&mut own, 1), [(2, false)]);
    let owner = &shown(&daemon, "lan0")["ports"][1]["owner"];
    assert!(owner.as_str().unwrap().contains("54321"), "{owner}");
}

#[test]
fn where_joining_is_granted_nobody_joins_without_a_grant() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let dir = lab.dir().join("lan0.ctl");
    let spec = format!("lan0,vde={},mode=666", dir.display());
    let args = ["--config", &config, "--switch", &spec];
    let sees = format!("uid:{USER}=lan0");
    let args = [&args[..], &["--allow", &sees, "--allow-send", &sees]].concat();
    let try_both = |daemon: &Daemon| {
        let socket = daemon.socket();
        let ring = as_user(move || options(&socket, "lan0").join().open().map(|_| ()));
        let mut plug = Command::new("setpriv");
        let user = USER.to_string();
        plug.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
        plug.arg("vde_plug").arg(&dir);
        let mut plug = Running::start(plug, &lab, "plug").unwrap();
        until(
            "the VDE client is sent away",
            || plug.status(),
            Option::is_some,
        );
        let log = daemon.log();
        let why = log.lines().find(|line| line.contains("cannot join"));
        (ring, why.unwrap_or_default().to_owned())
    };
    // A control: without such grants both may, as far as root that gave up its rights can serve others.
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let (ring, vde) = try_both(&daemon);
    ring.unwrap();
    assert!(vde.contains("--user"), "{vde}");
    drop(daemon);
    let args = [&args[..], &["--allow-join", "vm:probe=lan0"]].concat();
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let (ring, vde) = try_both(&daemon);
    let error = ring.unwrap_err().to_string();
    assert!(error.contains("--allow-join"), "{error}");
    assert!(vde.contains("has no grant to join"), "{vde}");
}

#[test]
fn a_grant_says_of_the_port_what_its_program_cannot_change() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let grant = format!("uid:{USER}=lan0,vlan=10,mac=02:00:00:00:00:09");
    let args = [
        "--config",
        &config,
        "--switch",
        "lan0",
        "--allow-join",
        &grant,
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let (code, text) = daemon.vnplug(&["switch", "set", "lan0/port1", "trunk=10"]);
    assert_eq!(code, Some(0), "{text}");
    let join = |device: &str| daemon.port(device).join().open().unwrap();
    let (mut trunk, mut plain) = (join("lan0/port1"), join("lan0"));
    let socket = daemon.socket();
    let mut theirs = as_user(move || options(&socket, "lan0").join().open().unwrap());
    assert_eq!(theirs.device(), "host:lan0/port3");
    let mut reader = daemon.port("host:lan0/port3").open().unwrap();

    // What another station than the granted one sends goes nowhere; the rest to its VLAN.
    send(&mut theirs, &frame(0xff, 8, 1));
    send(&mut theirs, &frame(0xff, 9, 2));
    let tagged = |frame: &[u8]| [&frame[..12], &[0x81, 0, 0, 10], &frame[12..]].concat();
    let mut given = Vec::new();
    eventually("the trunk has it", || {
        while let Next::Packet(packet) = trunk.next().unwrap() {
            given.push(packet.bytes.to_vec());
        }
        !given.is_empty()
    });
    assert_eq!(given, [tagged(&frame(0xff, 9, 2))]);
    send(&mut trunk, &tagged(&frame(9, 1, 3)));
    assert_eq!(numbers_of(&mut theirs, 1), [(3, false)]);
    // A reader of the port has what it was given in the form in which it was given.
    assert_eq!(
        numbers_of(&mut reader, 3),
        [(1, false), (2, false), (3, true)]
    );
    assert!(numbers(&mut plain).is_empty());

    let ports = &shown(&daemon, "lan0")["ports"];
    let setting = |port: usize, key: &str| {
        let setting = &ports[port]["settings"][key];
        ["value", "from"].map(|it| setting[it].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(setting(0, "trunk"), ["10", "run time"]);
    assert_eq!(setting(2, "vlan"), ["10", "grant"]);
    assert_eq!(setting(2, "lock"), ["02:00:00:00:00:09", "grant"]);
    assert_eq!(ports[1]["settings"], serde_json::json!({}));
    daemon.audit();
    // The next that has the number has nothing of it.
    drop(theirs);
    eventually("its port is free", || {
        shown(&daemon, "lan0")["ports"][2].is_null()
    });
    let next = join("lan0/port3");
    assert_eq!(
        shown(&daemon, "lan0")["ports"][2]["settings"],
        serde_json::json!({})
    );
    drop(next);
    let wrong = ["--switch", "lan0", "--allow-join", "uid:1=lan0,color=blue"];
    let error = Daemon::start(&lab, None, &wrong).unwrap_err().to_string();
    assert!(error.contains("color"), "{error}");
}

#[test]
fn a_program_in_c_takes_part_and_stations_are_learned() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/tests/c/switch.c");
    let program = build_c(&source, lab.dir(), &[]).unwrap();
    let mut child = Command::new(program)
        .env("VNPLUG_SOCKET", daemon.socket())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut lines = BufReader::new(output).lines().map(Result::unwrap);
    let of_switch = |name: &str| value(counted(&daemon.counters(), "source"), name);
    assert_eq!(lines.next().as_deref(), Some("learned"), "see above");
    assert_eq!(of_switch("switch_ports"), 3);
    eventually("they are counted", || of_switch("entered") == 5);
    input.write_all(b"\n").unwrap();
    assert_eq!(lines.next().as_deref(), Some("direct"), "see above");
    // Of 2,000 frames those that were sent before the two knew each other.
    let entered = of_switch("entered") - 5;
    assert!(entered < 1000, "{entered}");
    input.write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    daemon.audit();
}
