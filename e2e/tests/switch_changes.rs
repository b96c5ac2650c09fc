//! Switches and their entrances come and go while the daemon runs: by commands, by the file, and over a restart. What is not
//! concerned loses nothing, and nothing is left of what went.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use vnplug::{Client, SourceRequest};
use vnplug_e2e::Lab;
use vnplug_e2e::Netns;
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::reading::reads_on;
use vnplug_e2e::streamer::Streamer;
use vnplug_e2e::traffic::Stream;
use vnplug_testing::{PATIENCE, eventually, until};

/// Two stations speak to each other, in turns, until they are told to end: how often. Whatever is lost, they wait for in vain.
fn speak(path: &Path, ends: &AtomicBool) -> u32 {
    let mut both = [1, 2].map(|_| Streamer::join(path));
    // What the first one says before the other one's port is there nobody hears.
    let is_heard = |both: &mut [Streamer; 2]| {
        both[0].send(1, 2, 0);
        both[1].waits(SOON);
        both[1].frame().is_some()
    };
    eventually("both have ports", || is_heard(&mut both));
    both[1].waits(PATIENCE);
    let mut number = 0;
    while !ends.load(Ordering::Relaxed) {
        for (from, to) in [(0, 1), (1, 0)] {
            number += 1;
            both[from].send(from as u8 + 1, to as u8 + 1, number);
            assert_eq!(both[to].heard(), Some(number), "a frame is lost");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    number
}

/// How long a frame may be on its way that is sent again and again.
const SOON: Duration = Duration::from_millis(50);

/// Ends who speaks also when the test fails, which would wait for them else.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn ok(daemon: &Daemon, words: &[&str]) -> String {
    let (code, said) = daemon.vnplug(words);
    assert_eq!(code, Some(0), "{words:?}: {said}");
    said
}

fn refused(daemon: &Daemon, words: &[&str], why: &str) {
    let (code, said) = daemon.vnplug(words);
    assert!(code != Some(0) && said.contains(why), "{words:?}: {said}");
}

/// The entrances of a switch, each with its option and where its setting comes from.
fn entrances(daemon: &Daemon, switch: &str) -> Vec<(String, String)> {
    let shown = Client::connect_to(&daemon.socket()).unwrap();
    let shown = { shown }.show_switch(switch, 0, false).unwrap();
    let labels = &counted(&shown, "switch").labels;
    let keys = ["vde", "stream", "bess", "dgram", "vhost"];
    let from = |key: &str| {
        let own = labels
            .iter()
            .find(|(name, _)| *name == format!("from.{key}"));
        own.map(|(_, from)| (key.to_owned(), from.clone()))
    };
    keys.into_iter().filter_map(from).collect()
}

/// The names of the daemon's threads that let clients in.
fn porters(daemon: &Daemon) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    let names = tasks.filter_map(|task| name(task.unwrap()));
    let ours = ["vnplug-vde", "vnplug-sockets", "vnplug-vhost"];
    let mut names: Vec<_> = names.map(|it| it.trim().to_owned()).collect();
    names.retain(|it| ours.contains(&it.as_str()));
    names
}

fn place(lab: &Lab, name: &str) -> (PathBuf, String) {
    let path = lab.dir().join(name);
    let text = path.display().to_string();
    (path, text)
}

#[test]
fn a_switch_comes_and_goes_with_all_entrances_and_nothing_is_left() {
    let lab = Lab::new().unwrap();
    let mut daemon = Daemon::start(&lab, None, &["--source", "kept=gen,pps=20000"]).unwrap();
    let mut kept = daemon.port("kept").open().unwrap();
    let names = ["ctl", "stream", "bess", "dgram", "vhost"];
    let places = names.map(|name| place(&lab, name));
    let [(_, vde), (stream, s), (_, bess), (_, dgram), (_, vhost)] = &places;
    let spec = format!("lan1,vde={vde},stream={s},bess={bess},dgram={dgram},vhost={vhost}");
    let count = |daemon: &Daemon, what: &str| {
        let all = fs::read_dir(format!("/proc/{}/{what}", daemon.pid()));
        all.unwrap().count()
    };
    let mut before = (0, 0);
    for time in 0..20 {
        ok(&daemon, &["switch", "add", &spec]);
        assert!(places.iter().all(|(path, _)| path.exists()));
        let mut client = Streamer::join(stream);
        eventually("it has a port", || {
            let shown = daemon.vnplug(&["switch", "show", "lan1", "--json"]).1;
            shown.contains("\"way\":\"stream\"")
        });
        ok(&daemon, &["switch", "rm", "lan1"]);
        // When the command is done, so are its sockets.
        assert!(places.iter().all(|(path, _)| !path.exists()), "{time}");
        assert_eq!(client.number(), None);
        if time == 2 {
            before = (count(&daemon, "task"), count(&daemon, "fd"));
        }
    }
    until(
        "no thread and no descriptor stays",
        || (count(&daemon, "task"), count(&daemon, "fd")),
        |now| now.0 <= before.0 + 2 && now.1 <= before.1 + 8,
    );
    assert_eq!(porters(&daemon), Vec::<String>::new());
    reads_on(&mut kept);
    assert_eq!(kept.counts().lost, 0);
    refused(&daemon, &["switch", "rm", "kept"], "no switch");
    refused(&daemon, &["switch", "rm", "lan1"], "no switch");
    refused(
        &daemon,
        &["switch", "add", "lan1=switch"],
        "NAME,OPTION=VALUE",
    );
    for (option, why) in [
        ("colour=red", "no option"),
        ("uplink=lo/twin=on", "gives up after its start"),
        ("uplink=lo/af_xdp", "gives up after its start"),
        ("stream=/nowhere/x", "/nowhere/x"),
    ] {
        // What was made before something is wrong goes again.
        let spec = format!("lan1,vde={vde},{option}");
        refused(&daemon, &["switch", "add", &spec], why);
        assert!(places.iter().all(|(path, _)| !path.exists()), "{option}");
    }

    // Kept, with what is set of it, until it is removed.
    ok(&daemon, &["switch", "add", "--keep", &spec]);
    ok(&daemon, &["switch", "set", "lan1", "hub=yes"]);
    daemon.kill();
    daemon.launch().unwrap();
    let mut both = [1, 2].map(|_| Streamer::join(stream));
    eventually("both have ports", || {
        value(counted(&lan1(&daemon), "source"), "switch_ports") == 2
    });
    both[0].send(1, 2, 7);
    assert_eq!(both[1].number(), Some(7));
    assert!(ok(&daemon, &["switch", "show", "lan1"]).contains("yes  (run time)"));
    daemon.audit();
    ok(&daemon, &["switch", "rm", "lan1"]);
    ok(&daemon, &["switch", "add", &spec]);
    assert!(!ok(&daemon, &["switch", "show", "lan1"]).contains("run time"));
    daemon.kill();
    daemon.launch().unwrap();
    assert_eq!(
        ok(&daemon, &["switch", "list", "--json"]).trim(),
        "{\"switches\":[]}"
    );
}

fn lan1(daemon: &Daemon) -> Vec<vnplug_ring::control::Counted> {
    let mut all = daemon.counters();
    all.retain(|it| it.name == "lan1");
    all
}

#[test]
fn entrances_come_and_go_while_clients_of_others_lose_nothing() {
    let lab = Lab::new().unwrap();
    let [(a, first), (b, second), (c, vde)] = ["a", "b", "c"].map(|name| place(&lab, name));
    let args = ["--switch".to_owned(), format!("lan0,stream={first}")];
    let args = args.each_ref().map(String::as_str);
    let mut daemon = Daemon::start(&lab, None, &args).unwrap();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&ends);
        let speaks = scope.spawn(|| speak(&a, &ends));
        for _ in 0..10 {
            let [bess, vde] =
                [("bess", &second), ("vde", &vde)].map(|(key, it)| format!("{key}={it}"));
            ok(&daemon, &["switch", "set", "lan0", &bess, &vde]);
            assert!(b.exists() && c.join("ctl").exists());
            ok(
                &daemon,
                &["switch", "set", "lan0", "bess=no", "vde=no", "--once"],
            );
            assert!(!b.exists() && !c.exists());
        }
        assert_eq!(porters(&daemon).len(), 1);
        // What is not possible changes nothing.
        for (words, why) in [
            (["lan0", "stream=/nowhere/x"], "/nowhere/x"),
            (["lan0", "mode=660"], "other permissions"),
            (["lan0/port1", "stream=/x"], "a port has no"),
            (["lan0", "stream"], "not KEY=VALUE"),
            (["lan7", "stream=/x"], "no switch"),
        ] {
            refused(&daemon, &[&["switch", "set"], &words[..]].concat(), why);
        }
        let other = format!("bess={second}");
        refused(
            &daemon,
            &["switch", "set", "lan0", "hub=yes", &other],
            "command of its own",
        );
        assert!(!b.exists());
        ends.store(true, Ordering::Relaxed);
        assert!(speaks.join().unwrap() > 5);
    });
    daemon.audit();
    // What was kept last is there in the next daemon, and what was for once is not.
    daemon.kill();
    daemon.launch().unwrap();
    let from = |all: &[(&str, &str)]| {
        let all = all.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
        all.collect::<Vec<_>>()
    };
    let kept = from(&[
        ("vde", "run time"),
        ("stream", "file"),
        ("bess", "run time"),
    ]);
    assert_eq!(entrances(&daemon, "lan0"), kept);
    let mut client = Streamer::join(&a);
    eventually("it has a port", || {
        value(counted(&daemon.counters(), "source"), "switch_ports") == 1
    });
    ok(&daemon, &["switch", "set", "lan0", "stream=no", "vde=no"]);
    assert_eq!(client.number(), None);
    assert!(!a.exists() && !c.exists());
    daemon.kill();
    // A place that is not there any more is no reason not to start.
    let gone = lab.dir().join("gone");
    fs::create_dir(&gone).unwrap();
    daemon.launch().unwrap();
    let late = format!("stream={}/x", gone.display());
    ok(&daemon, &["switch", "set", "lan0", &late]);
    daemon.end();
    fs::remove_dir(&gone).unwrap();
    daemon.launch().unwrap();
    // Nor for others to be missing.
    let kept = from(&[("stream", "file"), ("bess", "run time")]);
    assert_eq!(entrances(&daemon, "lan0"), kept);
    assert!(
        daemon
            .log()
            .contains("was set at run time, and is left out")
    );
}

#[test]
fn a_file_that_is_read_again_changes_switches_where_they_differ() {
    let lab = Lab::new().unwrap();
    let [(a, first), (b, second)] = ["a", "b"].map(|name| place(&lab, name));
    let (_, file) = place(&lab, "vnplug.toml");
    let text = format!("[[switch]]\nname = \"lan0\"\nstream = \"{first}\"\n");
    fs::write(&file, &text).unwrap();
    let daemon = Daemon::start(&lab, None, &["--config", &file]).unwrap();
    let reload = |more: &str| {
        fs::write(&file, format!("{text}{more}")).unwrap();
        daemon.vnplug(&["reload"])
    };
    let said = |text: &str| (Some(0), text.to_owned());
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&ends);
        let speaks = scope.spawn(|| speak(&a, &ends));
        let changed = "source lan0: changed\n";
        ok(&daemon, &["switch", "set", "lan0", "hold=5"]);
        let more = format!("bess = \"{second}\"\nage = 60\nport.9 = {{ vlan = 10 }}\n");
        assert_eq!(reload(&more), said(changed));
        assert!(b.exists());
        let shown = ok(&daemon, &["switch", "show", "lan0"]);
        for (key, value) in [("age", "60  (file)"), ("hold", "5  (run time)")] {
            let is_it = |line: &str| line.trim().starts_with(key) && line.ends_with(value);
            assert!(shown.lines().any(is_it), "{key}: {shown}");
        }
        assert_eq!(
            reload(&more),
            (Some(0), "vnplug: nothing is different\n".into())
        );
        // What is wrong changes nothing, also if something else was opened for it.
        for (wrong, why) in [
            ("bess = \"/nowhere/x\"\n", "/nowhere/x"),
            ("colour = \"red\"\n", "colour"),
            ("age = \"old\"\n", "number of seconds"),
            (
                "[[switch]]\nname = \"lan1\"\nstream = \"/nowhere/x\"\n",
                "/nowhere/x",
            ),
        ] {
            let (code, text) = reload(wrong);
            assert!(code != Some(0) && text.contains(why), "{why}: {text}");
            assert!(text.contains("nothing is changed") && b.exists(), "{text}");
        }
        // By a signal as by the command.
        fs::write(&file, format!("{text}age = 60\n")).unwrap();
        let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
        eventually("the entrance goes", || !b.exists());
        assert!(
            daemon
                .log()
                .contains(&format!("entrance bess={second} goes"))
        );
        // What needs a new start is named, and nothing of that switch is done by halves.
        let more = format!("bess = \"{second}\"\nage = 60\nports = 5\n");
        let waits = "source lan0 (ports): waits for a restart of the daemon\n";
        assert_eq!(reload(&more), said(waits));
        // An uplink that waits for its interface.
        let uplink = "age = 60\nuplink = \"no-such-if0\"\n";
        assert_eq!(reload(uplink), said(changed));
        assert!(ok(&daemon, &["switch", "show", "lan0"]).contains("no-such-if0  (file)"));
        let (code, text) = reload("age = 60\nmode = 0o660\n");
        assert!(
            code == Some(0) && text.contains("other permissions"),
            "{text}"
        );
        assert!(text.contains("waits for a restart"), "{text}");
        assert_eq!(reload(""), said(changed));
        ends.store(true, Ordering::Relaxed);
        assert!(speaks.join().unwrap() > 5);
    });
    let lan1 = format!("[[switch]]\nname = \"lan1\"\nstream = \"{second}\"\n");
    assert_eq!(reload(&lan1), said("source lan1: added\n"));
    let mut client = Streamer::join(&b);
    assert_eq!(reload(""), said("source lan1: removed\n"));
    assert_eq!(client.number(), None);
    daemon.audit();
}

#[test]
fn a_switch_that_is_added_has_interfaces_of_the_host_as_uplinks() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("up0", "far0").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "lab=gen,pps=10"]).unwrap();
    let (stream, path) = place(&lab, "s");
    ok(
        &daemon,
        &["switch", "add", &format!("lan1,stream={path},uplink=up0")],
    );
    let mut client = Streamer::join(&stream);
    eventually("uplink and client are ports", || {
        value(counted(&lan1(&daemon), "source"), "switch_ports") == 2
    });
    let sent = netns.enter(|| Stream::new("far0", 10).send());
    assert_eq!(sent.unwrap().unwrap().frames, 10);
    for _ in 0..10 {
        assert!(client.number().is_some());
    }
    ok(&daemon, &["switch", "rm", "lan1"]);
    assert_eq!(client.number(), None);
    daemon.audit();
}

#[test]
fn uplinks_come_and_go_while_others_lose_nothing() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("up0", "far0").unwrap();
    netns.veth("up1", "far1").unwrap();
    let ([(a, first), (b, second)], mut sent) = (["a", "b"].map(|name| place(&lab, name)), 0);
    let args = ["--switch".to_owned(), format!("lan0,stream={first}")];
    let args = args.each_ref().map(String::as_str);
    let mut daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let of = |daemon: &Daemon, what: &str| value(counted(&daemon.counters(), "source"), what);
    // What the far end sends is heard, and what a client sends to many goes there.
    let passes = |daemon: &Daemon, client: &mut Streamer, far: &str, number: u32| {
        assert_eq!(
            netns
                .enter(|| Stream::new(far, 10).send().unwrap().frames)
                .unwrap(),
            10
        );
        for _ in 0..10 {
            assert!(client.number().is_some());
        }
        let came = || {
            let path = format!("/sys/class/net/{far}/statistics/rx_packets");
            netns
                .exec(&["cat", &path])
                .unwrap()
                .trim()
                .parse::<u64>()
                .unwrap()
        };
        let before = came();
        client.send(7, 9, number);
        until("it goes out", came, |now| *now > before);
        daemon.audit();
    };
    let is_promiscuous = |interface: &str| {
        let told = netns.ip(&["-d", "link", "show", interface]).unwrap();
        !told.contains("promiscuity 0")
    };
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&ends);
        let speaks = scope.spawn(|| speak(&a, &ends));
        let entrance = format!("bess={second}");
        ok(&daemon, &["switch", "set", "lan0", &entrance]);
        for time in 0..5 {
            ok(&daemon, &["switch", "set", "lan0", "uplink=up0"]);
            assert!(is_promiscuous("up0") && !is_promiscuous("up1"));
            assert_eq!(
                netns
                    .enter(|| Stream::new("far0", 100).send().unwrap().frames)
                    .unwrap(),
                100
            );
            sent += 100;
            until(
                "it entered",
                || of(&daemon, "uplink_entered"),
                |count| *count >= sent,
            );
            ok(&daemon, &["switch", "set", "lan0", "uplink=up0+up1"]);
            assert!(is_promiscuous("up0") && is_promiscuous("up1"), "{time}");
            // When the command is done, so is the socket.
            ok(&daemon, &["switch", "set", "lan0", "uplink=up1"]);
            assert!(!is_promiscuous("up0") && is_promiscuous("up1"), "{time}");
            ok(&daemon, &["switch", "set", "lan0", "uplink=no"]);
            assert!(!is_promiscuous("up1") && b.exists(), "{time}");
            daemon.audit();
        }
        ends.store(true, Ordering::Relaxed);
        assert!(speaks.join().unwrap() > 5);
    });
    // Nothing but the two stations' frames and those; what it counted stays.
    assert!(of(&daemon, "uplink_entered") >= sent && of(&daemon, "uplinks_up") == 0);
    ok(&daemon, &["switch", "set", "lan0", "uplink=up1+later0"]);
    for (setting, why) in [
        ("uplink=up1/blocks=64+later0", "take it away first"),
        ("uplink=up1+up0/twin=on", "gives up after its start"),
        ("uplink=up1+up0/af_xdp", "gives up after its start"),
        ("uplink=up1+up0/colour=red", "no option"),
        ("ports=5", "vnplug switch rm lan0"),
        ("longest=2000", "vnplug switch rm lan0"),
    ] {
        refused(&daemon, &["switch", "set", "lan0", setting], why);
    }
    let shown = ok(&daemon, &["switch", "show", "lan0"]);
    assert!(shown.contains("up1+later0  (run time)"), "{shown}");
    assert!(
        shown.contains("interface up1 (af_packet)") && !shown.contains("up0"),
        "{shown}"
    );
    assert!(ok(&daemon, &["list"]).contains("uplink up1 (af_packet)"));
    let joins = |daemon: &Daemon| {
        let ports = || of(daemon, "switch_ports");
        until("only uplinks are left", ports, |count| *count == 2);
        let client = Streamer::join(&a);
        until("it is a port", ports, |count| *count == 3);
        client
    };
    let mut client = joins(&daemon);
    passes(&daemon, &mut client, "far1", 1);
    // One whose interface comes later, and which the next daemon has, too.
    netns.veth("later0", "far2").unwrap();
    until(
        "it is there",
        || of(&daemon, "uplinks_up"),
        |count| *count == 2,
    );
    passes(&daemon, &mut client, "far2", 2);
    daemon.kill();
    daemon.launch().unwrap();
    until(
        "both are there",
        || of(&daemon, "uplinks_up"),
        |count| *count == 2,
    );
    let mut client = joins(&daemon);
    passes(&daemon, &mut client, "far1", 3);
}

#[test]
fn a_daemon_that_is_another_user_says_where_it_may_not_make_files() {
    let lab = Lab::new().unwrap();
    let open = |dir: &Path, mode| {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
    };
    open(lab.dir(), 0o755);
    let (pools, pool_dir) = place(&lab, "pools");
    fs::create_dir(&pools).unwrap();
    open(&pools, 0o777);
    let args = ["--source", "lab=gen,pps=10", "--user", "nobody"];
    let args = [&args[..], &["--pool-dir", &pool_dir]].concat();
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let (_, path) = place(&lab, "s");
    let spec = format!("lan1,stream={path}");
    refused(
        &daemon,
        &["switch", "add", &spec],
        "the daemon runs as user",
    );
    let dir = lab.dir().join("theirs");
    fs::create_dir(&dir).unwrap();
    open(&dir, 0o777);
    let inside = format!("lan1,stream={0}/s,vde={0}/ctl,mode=666", dir.display());
    ok(&daemon, &["switch", "add", &inside]);
    drop(Streamer::join(&dir.join("s")));
    ok(&daemon, &["switch", "rm", "lan1"]);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let text = format!("lan1=switch,stream={path}");
    let error = client.change_sources(SourceRequest::Add { text, keep: true });
    assert!(error.unwrap_err().to_string().contains("may make files"));
    let source = counted(&daemon.counters(), "source").clone();
    assert_eq!(label(&source, "kind"), "gen");
}
