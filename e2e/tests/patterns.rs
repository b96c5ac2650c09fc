//! Patterns: every interface that matches is a source while it is there.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::Write;
use std::num::NonZeroU64;
use std::process::Stdio;
use std::time::Instant;

use vnplug::{Client, Error, Next, SourceRequest};
use vnplug_e2e::Lab;
use vnplug_e2e::Netns;
use vnplug_e2e::daemon::{Daemon, label, value};
use vnplug_e2e::reading::{end_of, reads_on};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_testing::{eventually, until};

fn sources(daemon: &Daemon) -> Vec<String> {
    let all = daemon.audit();
    let sources = all.iter().filter(|it| it.kind == "source");
    let mut names: Vec<_> = sources.map(|it| it.name.clone()).collect();
    names.sort();
    names
}

fn until_sources(daemon: &Daemon, names: &[&str]) {
    until("the sources", || sources(daemon), |found| found == names);
}

fn is_gone(error: &Error) -> bool {
    matches!(error, Error::Gone(why) if why.contains("the interface of this source is gone"))
}

#[test]
fn interfaces_that_match_are_sources_while_they_are_there() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("vnet0", "peer0").unwrap();
    let file = "[[source]]\nname = \"vnet*\"\nmembers = 3\n[[source]]\nname = \"kept\"\nkind = \"gen\"\npps = 20000\n";
    let grant = format!("[[allow]]\nuid = {USER}\nsource = \"vnet*\"\nfilter = \"udp\"\n");
    let file = open_to_all(&lab, &[file, &grant].concat());
    let daemon = Daemon::start(&lab, Some(&netns), &["--config", &file]).unwrap();
    let mut kept = daemon.port("kept").open().unwrap();
    until_sources(&daemon, &["kept", "vnet0"]);
    netns.veth("vnet1", "peer1").unwrap();
    netns.veth("other0", "other1").unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet1"]);
    let mut port = daemon.port("vnet1").open().unwrap();
    netns
        .enter(|| Stream::new("peer1", 1000).send())
        .unwrap()
        .unwrap();
    let mut read = 0;
    eventually("the frames come", || {
        while let Next::Packet(_) = port.next().unwrap() {
            read += 1;
        }
        read == 1000
    });

    // Who may see the pattern sees its sources, and no other one whose name is like theirs.
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let mut change = |request| {
        let changed = client.change_sources(request);
        changed.map(drop).map_err(|error| error.to_string())
    };
    let add = |text: &str| SourceRequest::Add {
        text: text.into(),
        keep: false,
    };
    let rm = |name: &str| SourceRequest::Remove { name: name.into() };
    change(add("vnet9=gen,pps=10")).unwrap();
    let seen = |socket: std::path::PathBuf| {
        as_user(move || {
            let devices = Client::connect_to(&socket).unwrap().devices().unwrap();
            let mut names: Vec<_> = devices.into_iter().map(|it| it.name).collect();
            names.sort();
            names
        })
    };
    assert_eq!(seen(daemon.socket()), ["host:vnet0", "host:vnet1"]);
    let options = daemon.port("vnet0");
    drop(as_user(move || options.open().unwrap()));
    let options = daemon.port("vnet9");
    assert!(as_user(move || options.open().is_err()));
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let devices = client.devices().unwrap();
    let device = devices.iter().find(|it| it.name == "host:vnet1").unwrap();
    assert_eq!(device.description, "interface vnet1, of vnet*");

    // A renamed interface is another source, or none.
    netns.ip(&["link", "set", "vnet1", "down"]).unwrap();
    netns
        .ip(&["link", "set", "vnet1", "name", "vnet5"])
        .unwrap();
    netns.ip(&["link", "set", "vnet5", "up"]).unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet5", "vnet9"]);
    let told = end_of(&mut port);
    assert!(is_gone(&told), "{told:?}");
    netns.ip(&["link", "set", "vnet5", "down"]).unwrap();
    netns.ip(&["link", "set", "vnet5", "name", "web"]).unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet9"]);
    // As its port of a bridge it is the same one.
    netns.bridge("br0", &["vnet0"]).unwrap();
    netns.ip(&["link", "set", "vnet0", "nomaster"]).unwrap();
    let mut port = daemon.port("vnet0").open().unwrap();
    assert!(port.next().is_ok());

    // There are never more than it may have.
    for n in 1..4 {
        netns.veth(&format!("vnet{n}"), &format!("far{n}")).unwrap();
    }
    let text = "pattern \"vnet*\" has 3 sources, which is all that it may have: 1 more";
    until("it is full", || daemon.log(), |log| log.contains(text));
    until_sources(&daemon, &["kept", "vnet0", "vnet1", "vnet2", "vnet9"]);
    netns.ip(&["link", "del", "vnet1"]).unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet2", "vnet3", "vnet9"]);

    // What the operator names comes first.
    let refused = change(rm("vnet2")).unwrap_err();
    assert!(refused.contains("there by \"vnet*\""), "{refused}");
    change(add("vnet2=gen,pps=10")).unwrap();
    // The one that gave way has left its room, which another interface takes, and gives back.
    netns.veth("vnet4", "far4").unwrap();
    until_sources(
        &daemon,
        &["kept", "vnet0", "vnet2", "vnet3", "vnet4", "vnet9"],
    );
    netns.ip(&["link", "del", "vnet4"]).unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet2", "vnet3", "vnet9"]);
    assert!(change(add("vnet2=gen,pps=10")).is_err());
    // When it goes, the pattern has the interface again, as often as that happens.
    let is_of_pattern = |name: &str| {
        let devices = Client::connect_to(&daemon.socket())
            .unwrap()
            .devices()
            .unwrap();
        devices
            .iter()
            .any(|it| it.name == name && it.description.ends_with("of vnet*"))
    };
    change(rm("vnet2")).unwrap();
    eventually("it is received again", || is_of_pattern("host:vnet2"));
    for _ in 0..5 {
        change(add("vnet2=gen,pps=10")).unwrap();
        change(rm("vnet2")).unwrap();
    }
    eventually("it is received again", || is_of_pattern("host:vnet2"));
    // The same if the other one was there before the interface: that is not even opened.
    netns.ip(&["link", "del", "vnet3"]).unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet2", "vnet9"]);
    change(add("vnet3=gen,pps=10")).unwrap();
    netns.veth("vnet3", "far3").unwrap();
    netns.veth("vnet4", "far4").unwrap();
    until_sources(
        &daemon,
        &["kept", "vnet0", "vnet2", "vnet3", "vnet4", "vnet9"],
    );
    assert!(!is_of_pattern("host:vnet3"));
    assert!(!daemon.log().contains("there is a source \"vnet3\" already"));
    netns.ip(&["link", "del", "vnet4"]).unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet2", "vnet3", "vnet9"]);
    change(rm("vnet3")).unwrap();
    eventually("it is received", || is_of_pattern("host:vnet3"));
    let refused = change(add("vnet*")).unwrap_err();
    assert!(refused.contains("already"), "{refused}");
    change(rm("vnet*")).unwrap();
    until_sources(&daemon, &["kept", "vnet9"]);
    let told = end_of(&mut port);
    assert!(
        matches!(&told, Error::Gone(why) if why.contains("removed the source")),
        "{told:?}"
    );
    let refused = change(add("vnet*=af_packet,colour=red")).unwrap_err();
    assert!(refused.contains("no option \"colour\""), "{refused}");
    change(add("vnet*=af_packet,members=1")).unwrap();
    until_sources(&daemon, &["kept", "vnet0", "vnet9"]);
    reads_on(&mut kept);
    assert_eq!(kept.counts().lost, 0);
}

#[test]
fn a_pattern_has_what_the_configuration_names_no_more() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("vnet2", "far2").unwrap();
    let pattern = "[[source]]\nname = \"vnet*\"\n";
    let named = "[[source]]\nname = \"vnet2\"\nkind = \"gen\"\npps = 10\n";
    let config = open_to_all(&lab, &[pattern, named].concat());
    let daemon = Daemon::start(&lab, Some(&netns), &["--config", &config]).unwrap();
    let description = || {
        let mut client = Client::connect_to(&daemon.socket()).unwrap();
        let devices = client.devices().unwrap();
        devices
            .into_iter()
            .find(|it| it.name == "host:vnet2")
            .map(|it| it.description)
    };
    let is_of_pattern = || description().is_some_and(|it| it.ends_with("of vnet*"));
    assert!(description().is_some() && !is_of_pattern());
    assert!(!daemon.log().contains("already"), "{}", daemon.log());
    fs::write(&config, format!("socket_mode = 0o666\n{pattern}")).unwrap();
    let (code, said) = daemon.vnplug(&["reload"]);
    assert_eq!((code, said.as_str()), (Some(0), "source vnet2: removed\n"));
    eventually("it is received", is_of_pattern);
    // And back.
    fs::write(&config, format!("socket_mode = 0o666\n{pattern}{named}")).unwrap();
    let (code, said) = daemon.vnplug(&["reload"]);
    assert_eq!((code, said.as_str()), (Some(0), "source vnet2: added\n"));
    assert!(description().is_some() && !is_of_pattern());
    // What was removed at run time is the pattern's by now: that the file names it no more ends nothing.
    let (code, said) = daemon.vnplug(&["source", "rm", "vnet2"]);
    assert_eq!(code, Some(0), "{said}");
    eventually("it is received", is_of_pattern);
    let mut reader = daemon.port("vnet2").open().unwrap();
    fs::write(&config, format!("socket_mode = 0o666\n{pattern}")).unwrap();
    assert_eq!(daemon.vnplug(&["reload"]).0, Some(0));
    assert!(is_of_pattern());
    let next = reader.next().unwrap();
    assert!(matches!(next, Next::Nothing), "{next:?}");
}

#[test]
fn a_pattern_in_a_namespace_follows_that() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("eth0", "far0").unwrap();
    let file = |members| {
        format!(
            "[[source]]\nname = \"c1-*\"\ninterface = \"eth*\"\nnetns = \"{}\"\nmembers = {members}\n",
            netns.name()
        )
    };
    let config = open_to_all(&lab, &file(2));
    let daemon = Daemon::start(&lab, None, &["--config", &config]).unwrap();
    until_sources(&daemon, &["c1-0"]);
    netns.remove().unwrap();
    until_sources(&daemon, &[]);
    netns.make().unwrap();
    for n in 1..4 {
        netns.veth(&format!("eth{n}"), &format!("far{n}")).unwrap();
    }
    until_sources(&daemon, &["c1-1", "c1-2"]);
    fs::write(&config, format!("socket_mode = 0o666\n{}", file(3))).unwrap();
    let (code, said) = daemon.vnplug(&["reload"]);
    assert_eq!((code, said.as_str()), (Some(0), "source c1-*: changed\n"));
    until_sources(&daemon, &["c1-1", "c1-2", "c1-3"]);
}

/// As often as usual, or with `VNPLUG_LONG=1` in the environment as the long run does it.
fn times(usual: usize, long: usize) -> usize {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => long,
        None => usual,
    }
}

/// Kilobytes that a process has in memory.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn interfaces_in_crowds_leave_nothing_and_disturb_nobody() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let args = [
        "--source",
        "kept=gen,pps=2000",
        "--source",
        "wire0",
        "--source",
        "crowd*=af_packet,members=16,blocks=4",
    ];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let mut kept = daemon.port("kept").ring_bytes(64 << 20).open().unwrap();
    let mut wire = daemon.port("wire0").ring_bytes(64 << 20).open().unwrap();
    let batch = |lines: &str| {
        let mut command = netns.command("ip");
        let mut ip = command
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        ip.stdin
            .take()
            .unwrap()
            .write_all(lines.as_bytes())
            .unwrap();
        assert!(ip.wait().unwrap().success());
    };
    let crowd = |round: usize, size: usize| {
        let line = |n: usize| {
            format!(
                "link add crowd{n} group {} type veth peer name far{n}\nlink set crowd{n} up\n",
                100 + round
            )
        };
        batch(&(0..size).map(line).collect::<String>());
        until(
            "the members",
            || sources(&daemon).len(),
            |count| *count == 18,
        );
        batch(&format!("link del group {}\n", 100 + round));
        until_sources(&daemon, &["kept", "wire0"]);
    };
    let left = || {
        let dir = format!("/proc/{}", daemon.pid());
        let count = |what: &str| fs::read_dir(format!("{dir}/{what}")).unwrap().count();
        (count("task"), count("fd"), resident(daemon.pid()))
    };
    crowd(0, 100);
    until("threads end", left, |now| now.0 < 40);
    let before = left();
    let (rounds, size) = (times(1, 20), 1000);
    let frames = 2_000 * rounds as u64;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let stream = Stream {
                pps: NonZeroU64::new(1000),
                ..Stream::new("wire1", frames)
            };
            netns.enter(|| stream.send()).unwrap().unwrap()
        });
        (1..=rounds).for_each(|round| crowd(round, size));
        assert_eq!(sender.join().unwrap().frames, frames);
    });
    println!("{rounds} times {size} interfaces in {:?}", begun.elapsed());
    until("no thread and no descriptor stays", left, |now| {
        now.0 <= before.0 + 2 && now.1 <= before.1 + 8
    });
    let after = left();
    println!("before {before:?}, after {after:?}");
    assert!(after.2 <= before.2 + (16 << 10), "{before:?} {after:?}");
    let mut read = 0;
    eventually("each frame of the other wire", || {
        while let Next::Packet(_) = wire.next().unwrap() {
            read += 1;
        }
        read == frames
    });
    assert_eq!(wire.counts().lost, 0);
    let all = daemon.audit();
    let source = all
        .iter()
        .find(|it| it.kind == "source" && it.name == "wire0")
        .unwrap();
    assert_eq!(value(source, "kernel_dropped"), 0);
    reads_on(&mut kept);
    assert_eq!(kept.counts().lost, 0);
}

#[test]
fn members_and_sources_that_are_added_drop_early_as_others_do() {
    const FRAMES: u64 = 1000;
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let args = [
        "--source",
        "in*",
        // The control.
        "--source",
        "all*=af_packet,early=no",
    ];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    netns.veth("in0", "far0").unwrap();
    netns.veth("all0", "far1").unwrap();
    netns.veth("late0", "far2").unwrap();
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let text = "late0".to_owned();
    client
        .change_sources(SourceRequest::Add { text, keep: false })
        .unwrap();
    until_sources(&daemon, &["all0", "in0", "late0"]);
    let source = |name: &str| {
        let all = daemon.audit();
        let mut own = all.into_iter().filter(|it| it.kind == "source");
        own.find(|it| it.name == name).unwrap()
    };
    for (name, far, early) in [
        ("in0", "far0", true),
        ("all0", "far1", false),
        ("late0", "far2", true),
    ] {
        let state = || label(&source(name), "early_drop").to_owned();
        let mut port = daemon
            .port(name)
            .filter("udp and dst host 10.9.9.9")
            .open()
            .unwrap();
        let words = if early {
            "on: 1 filter"
        } else {
            "off: as configured"
        };
        until("it is so", state, |state| state.starts_with(words));
        let before = source(name);
        let sent = netns.enter(|| Stream::new(far, FRAMES).send());
        assert_eq!(sent.unwrap().unwrap().frames, FRAMES);
        let during = |what: &str| value(&source(name), what) - value(&before, what);
        // Others, as of the kernel's own, may come besides.
        until("all are counted", || during("seen"), |seen| *seen >= FRAMES);
        let dropped = during("early");
        assert_eq!(dropped >= FRAMES, early, "{name}: {dropped} dropped early");
        assert!(matches!(port.next().unwrap(), Next::Nothing));
        // What is wanted comes.
        let mut port = daemon.port(name).filter("udp").open().unwrap();
        netns
            .enter(|| Stream::new(far, FRAMES).send())
            .unwrap()
            .unwrap();
        let mut read = 0;
        eventually("the frames come", || {
            while let Next::Packet(_) = port.next().unwrap() {
                read += 1;
            }
            read >= FRAMES
        });
        assert_eq!(port.counts().lost, 0);
    }
}
