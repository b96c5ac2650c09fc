//! Sources and grants that change while the daemon runs: what differs becomes so, what does not loses nothing, and what is wrong
//! changes nothing.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use vnplug::{Client, Error, Next, SourceRequest};
use vnplug_e2e::Lab;
use vnplug_e2e::Netns;
use vnplug_e2e::daemon::{Daemon, label, program, value};
use vnplug_e2e::reading::{end_of, reads_on};
use vnplug_e2e::silent_file::SilentFile;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::user::{USER, as_user, open_to_all};
use vnplug_testing::{eventually, until};

/// A daemon with a configuration file that can be rewritten.
struct Configured {
    file: String,
    daemon: Daemon,
}

impl Configured {
    fn start(lab: &Lab, netns: Option<&Netns>, text: &str) -> Self {
        let file = open_to_all(lab, text);
        let daemon = Daemon::start(lab, netns, &["--config", &file]).unwrap();
        Self { file, daemon }
    }

    fn write(&self, text: &str) {
        fs::write(&self.file, format!("socket_mode = 0o666\n{text}")).unwrap();
    }

    /// `vnplug reload`: its exit code and what it says.
    fn reload(&self, text: &str) -> (Option<i32>, String) {
        self.write(text);
        self.daemon.vnplug(&["reload"])
    }

    fn sources(&self) -> Vec<String> {
        let all = self.daemon.audit();
        let sources = all.iter().filter(|it| it.kind == "source");
        sources.map(|it| it.name.clone()).collect()
    }
}

fn lab_source(name: &str, pps: u32) -> String {
    format!("[[source]]\nname = \"{name}\"\nkind = \"gen\"\npps = {pps}\n")
}

fn allow(filter: &str) -> String {
    format!("[[allow]]\nuid = {USER}\nsource = \"kept\"\nfilter = \"{filter}\"\n")
}

fn is_removed(error: &Error) -> bool {
    matches!(error, Error::Gone(why) if why.contains("removed the source, or changed it"))
}

#[test]
fn what_differs_becomes_so_and_what_does_not_loses_nothing() {
    let lab = Lab::new().unwrap();
    let [kept, gone, other] =
        [("kept", 20_000), ("gone", 100), ("other", 100)].map(|(a, b)| lab_source(a, b));
    let text = [kept.clone(), gone, other, allow("udp")].concat();
    let configured = Configured::start(&lab, None, &text);
    let daemon = &configured.daemon;
    let mut of_kept = daemon.port("kept").open().unwrap();
    let options = daemon.port("kept");
    let mut of_user = as_user(move || options.open().unwrap());
    let mut of_gone = daemon.port("gone").open().unwrap();
    let mut of_other = daemon.port("other").open().unwrap();
    // Twice the same is nothing.
    let said = configured.reload(&text);
    assert_eq!(said, (Some(0), "vnplug: nothing is different\n".into()));

    let new = [
        kept.clone(),
        lab_source("other", 200),
        lab_source("new", 100),
        allow("arp"),
    ]
    .concat();
    let said = configured.reload(&format!("max_ports = 99\n{new}"));
    let expected = format!(
        "source gone: removed\nsource new: added\nsource other: changed\ngrant see uid:{USER}=kept:udp: removed\n\
         grant see uid:{USER}=kept:arp: added\nmax_ports: waits for a restart of the daemon\n"
    );
    assert_eq!(said, (Some(0), expected));
    let told = end_of(&mut of_gone);
    assert!(is_removed(&told), "{told:?}");
    // A reader of a source that became another one goes on with that.
    eventually("it reads on", || {
        while let Next::Packet(_) = of_other.next().unwrap() {}
        of_other.counts().reopened == 1
    });
    // An open port follows its grant: what the generator makes is no ARP.
    let refused = |it: &Configured| {
        let all = it.daemon.audit();
        let name = of_user.number().to_string();
        let mut ports = all.iter().filter(|it| it.kind == "port");
        let port = ports.find(|it| it.name == name).unwrap();
        (value(port, "delivered"), value(port, "refused"))
    };
    let (delivered, before) = refused(&configured);
    until(
        "it is judged anew",
        || refused(&configured).1,
        |now| *now > before + 1000,
    );
    assert_eq!(refused(&configured).0, delivered);
    assert!(of_user.next().is_ok());
    let mut names = configured.sources();
    names.sort();
    assert_eq!(names, ["kept", "new", "other"]);
    drop((
        daemon.port("new").open().unwrap(),
        daemon.port("other").open().unwrap(),
    ));
    // What did not change lost nothing.
    reads_on(&mut of_kept);
    assert_eq!(of_kept.counts().lost, 0);
}

#[test]
fn what_is_wrong_changes_nothing() {
    let lab = Lab::new().unwrap();
    let kept = lab_source("kept", 20_000);
    let configured = Configured::start(&lab, None, &[kept.clone(), lab_source("old", 10)].concat());
    let mut port = configured.daemon.port("old").open().unwrap();
    // What an operator asks before, and the unit's own way to ask, which need no other program.
    let vnplugd = |what: &str| {
        let mut command = Command::new(program("vnplugd").unwrap());
        command.args([what, "--config", &configured.file, "--socket"]);
        let output = command.arg(configured.daemon.socket()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    // How often the daemon was asked to read the file, by its log.
    let noticed = || {
        let log = configured.daemon.log();
        log.matches("is not in force").count() + log.matches("reload: source").count()
    };
    let missing = "[[source]]\nname = \"file\"\nkind = \"pcap\"\npath = \"/nowhere/x.pcap\"\n";
    let bad_filter = allow("port nonsense");
    for (text, why, is_seen_before) in [
        ("[[source", "TOML parse error", true),
        // Half of it was written.
        (&kept[..kept.len() - 8], "TOML parse error", true),
        // Who checks opens no source.
        (&*[&*kept, missing].concat(), "/nowhere/x.pcap", false),
        (&*[&*kept, &*bad_filter].concat(), "port nonsense", true),
        ("colour = 1\n", "colour", true),
    ] {
        let before = noticed();
        let (code, said) = configured.reload(text);
        assert!(code != Some(0) && said.contains(why), "{why}: {said}");
        assert!(said.contains("nothing is changed"), "{said}");
        let (code, checked) = vnplugd("--check");
        assert_eq!(code, Some(i32::from(is_seen_before)), "{why}: {checked}");
        if is_seen_before {
            // The same, which the other one shows in a line.
            let text = checked.strip_prefix("vnplugd: ").unwrap();
            let text = text.strip_suffix('\n').unwrap().replace('\n', "\\x0a");
            assert_eq!(said, format!("vnplug: {text}; nothing is changed\n"));
        }
        assert_eq!(configured.sources(), ["kept", "old"]);
        // Of the reload, and not of the check.
        assert_eq!(noticed(), before + 1, "{}", configured.daemon.log());
    }
    assert!(port.next().is_ok());
    // The unit's way fails for what is wrong alone.
    let (code, said) = vnplugd("--reload");
    assert!(code == Some(1) && said.contains("colour"), "{said}");
    configured.write(&[&*kept, missing].concat());
    let (code, said) = vnplugd("--reload");
    assert!(
        code == Some(1) && said.contains("nothing is changed"),
        "{said}"
    );
    configured.write(&[kept, lab_source("old", 10), lab_source("new", 10)].concat());
    let (code, said) = vnplugd("--check");
    assert!(
        code == Some(0) && said.contains("the configuration is right; 3 sources"),
        "{said}"
    );
    assert_eq!(configured.sources(), ["kept", "old"]);
    assert_eq!(vnplugd("--reload").0, Some(0));
    assert_eq!(configured.sources(), ["kept", "old", "new"]);
    // Whoever is no operator is refused.
    let socket = configured.daemon.socket();
    let refused = as_user(move || {
        Client::connect_to(&socket)
            .unwrap()
            .change_sources(SourceRequest::Reload)
    });
    assert!(refused.unwrap_err().to_string().contains("only root"));
}

#[test]
fn a_hangup_reads_the_file_again_and_without_a_file_ends_the_daemon() {
    let lab = Lab::new().unwrap();
    let configured = Configured::start(&lab, None, &lab_source("old", 10));
    let hang_up = |daemon: &Daemon| {
        let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
    };
    configured.write(&lab_source("new", 10));
    hang_up(&configured.daemon);
    until(
        "the file is read again",
        || configured.sources(),
        |names| names == &["new"],
    );
    // Nobody waits for an answer: what is different is in the log.
    let told = || {
        let log = configured.daemon.log();
        let lines = { log.lines() }.filter_map(|line| line.split_once("reload: "));
        lines.map(|(_, it)| it.to_owned()).collect::<Vec<_>>()
    };
    until("it is told", told, |told| {
        told == &["source new: added", "source old: removed"]
    });
    // What is wrong is told in the log.
    configured.write("[[source");
    hang_up(&configured.daemon);
    eventually("it is refused", || {
        configured.daemon.log().contains("nothing is changed")
    });
    assert_eq!(configured.sources(), ["new"]);

    let bare = Daemon::start(&lab, None, &["--source", "lab=gen,pps=10"]).unwrap();
    hang_up(&bare);
    eventually("it ends", || bare.log().contains("ended"));
}

#[test]
fn sources_come_and_go_and_nothing_is_left_of_them() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "kept=gen,pps=20000"]).unwrap();
    let mut kept = daemon.port("kept").open().unwrap();
    let vnplug = |words: &[&str]| {
        let (code, said) = daemon.vnplug(words);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{words:?}");
    };
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let count = |what: &str| {
        fs::read_dir(format!("/proc/{}/{what}", daemon.pid()))
            .unwrap()
            .count()
    };
    let mut before = (0, 0);
    for time in 0..200 {
        let name = format!("late{time}");
        let text = format!("{name}=gen,pps=1000,queues=2");
        client
            .change_sources(SourceRequest::Add { text, keep: false })
            .unwrap();
        let mut port = daemon.port(&name).open().unwrap();
        client
            .change_sources(SourceRequest::Remove { name })
            .unwrap();
        let told = end_of(&mut port);
        assert!(is_removed(&told), "{told:?}");
        if time == 20 {
            before = (count("task"), count("fd"));
        }
    }
    until(
        "no thread and no descriptor stays",
        || (count("task"), count("fd")),
        |now| {
            // A few may still be on their way.
            now.0 <= before.0 + 4 && now.1 <= before.1 + 16
        },
    );
    vnplug(&["source", "add", "lab=gen,pps=1000"]);
    let (code, said) = daemon.vnplug(&["source", "add", "lab=gen,pps=1000"]);
    assert!(code != Some(0) && said.contains("already"), "{said}");
    vnplug(&["source", "rm", "host:lab"]);
    for (words, why) in [
        (["rm", "lab"], "no source"),
        (["rm", "kept@0"], "only whole sources"),
        (["add", "no-such-if0"], "wait for it: wait=yes"),
        (["add", "a=tape"], "no kind"),
    ] {
        let (code, said) = daemon.vnplug(&[&["source"], &words[..]].concat());
        assert!(code != Some(0) && said.contains(why), "{why}: {said}");
    }
    // A switch comes and goes, too, with whoever takes part in it.
    vnplug(&["source", "add", "lan0=switch"]);
    let mut member = daemon.port("lan0").transmit(1 << 16).join().open().unwrap();
    vnplug(&["source", "rm", "lan0"]);
    let told = end_of(&mut member);
    assert!(is_removed(&told), "{told:?}");
    reads_on(&mut kept);
    assert_eq!(kept.counts().lost, 0);
    daemon.audit();
}

#[test]
fn a_source_that_is_kept_is_there_in_the_next_daemon_until_it_is_removed() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("late0", "peer0").unwrap();
    let args = ["--source", "lab=gen,pps=10"];
    let mut daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let names = |daemon: &Daemon| {
        let all = daemon.audit();
        let sources = all.iter().filter(|it| it.kind == "source");
        let mut names: Vec<_> = sources.map(|it| it.name.clone()).collect();
        names.sort();
        names
    };
    let vnplug = |daemon: &Daemon, words: &[&str]| {
        let (code, said) = daemon.vnplug(&[&["source"], words].concat());
        assert_eq!((code, said.as_str()), (Some(0), ""), "{words:?}");
    };
    vnplug(&daemon, &["add", "--keep", "late0"]);
    vnplug(&daemon, &["add", "--keep", "twice=gen,pps=1"]);
    vnplug(&daemon, &["add", "--keep", "gone*"]);
    vnplug(&daemon, &["add", "once=gen,pps=10"]);
    daemon.kill();
    // One that is not there any more is waited for.
    netns.ip(&["link", "del", "late0"]).unwrap();
    daemon.launch().unwrap();
    assert_eq!(names(&daemon), ["lab", "late0", "twice"]);
    netns.veth("gone1", "peer1").unwrap();
    until(
        "the pattern is kept",
        || names(&daemon).len(),
        |len| *len == 4,
    );
    for name in ["late0", "gone*", "twice"] {
        vnplug(&daemon, &["rm", name]);
    }
    daemon.kill();
    daemon.launch().unwrap();
    assert_eq!(names(&daemon), ["lab"]);
}

#[test]
fn others_are_answered_while_a_source_opens() {
    let lab = Lab::new().unwrap();
    // Opening it blocks until its server is gone.
    let file = SilentFile::that_never_opens().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "kept=gen,pps=20000"]).unwrap();
    let mut kept = daemon.port("kept").open().unwrap();
    let request = |name: &str| SourceRequest::Add {
        text: format!("{name}=pcap:{}", file.path()),
        keep: false,
    };
    let (socket, first) = (daemon.socket(), request("slow"));
    let asker = std::thread::spawn(move || {
        let mut client = Client::connect_to(&socket).unwrap();
        client.change_sources(first)
    });
    eventually("it is being opened", || file.unanswered() == 1);
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    for _ in 0..100 {
        assert_eq!(client.devices().unwrap().len(), 1);
    }
    let twice = client.change_sources(request("slow")).unwrap_err();
    assert!(twice.to_string().contains("being added"), "{twice}");
    let text = "other=gen,pps=10".to_owned();
    client
        .change_sources(SourceRequest::Add { text, keep: false })
        .unwrap();
    reads_on(&mut kept);
    assert!(!asker.is_finished());
    drop(file);
    let failed = asker.join().unwrap().unwrap_err();
    assert!(failed.to_string().contains("cannot open"), "{failed}");
    assert_eq!(client.devices().unwrap().len(), 2);
    assert_eq!(kept.counts().lost, 0);
}

#[test]
fn an_interface_that_comes_later_is_received_by_ports_that_were_open_before() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    let configured = Configured::start(&lab, Some(&netns), "[[source]]\nname = \"late0\"\n");
    let daemon = &configured.daemon;
    let state = || {
        let all = daemon.audit();
        let source = all.iter().find(|it| it.kind == "source").unwrap();
        label(source, "state").to_owned()
    };
    assert_eq!(state(), "missing");
    let mut port = daemon.port("late0").open().unwrap();
    netns.veth("late0", "peer0").unwrap();
    until("it is received", state, |state| state == "up");
    netns
        .enter(|| Stream::new("peer0", 1000).send())
        .unwrap()
        .unwrap();
    let mut read = 0;
    eventually("the frames come", || {
        while let Next::Packet(_) = port.next().unwrap() {
            read += 1;
        }
        read >= 1000
    });
    assert_eq!(port.counts().lost, 0);
}

/// Whether an XDP program is at an interface.
fn has_xdp(netns: &Netns, interface: &str) -> bool {
    let said = netns
        .command("ip")
        .args(["link", "show", interface])
        .output()
        .unwrap();
    String::from_utf8_lossy(&said.stdout).contains("xdp")
}

#[test]
fn sources_of_af_xdp_are_added_where_a_thread_keeps_the_rights_and_say_why_elsewhere() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("va", "vb").unwrap();
    let args = ["--source", "lab=gen,pps=10"];
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let (code, said) = daemon.vnplug(&["source", "add", "va=af_xdp,fallback=no"]);
    assert!(
        code != Some(0) && said.contains("change_programs"),
        "{said}"
    );
    let (code, said) = daemon.vnplug(&["source", "add", "va=af_xdp"]);
    assert_eq!((code, said.as_str()), (Some(0), ""));
    let listed = daemon.vnplug(&["list"]).1;
    assert!(listed.contains("packet socket instead of XDP"), "{listed}");
    drop(daemon);

    let args = [&args[..], &["--change-programs", "on"]].concat();
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    let vnplug = |words: &[&str]| {
        let (code, said) = daemon.vnplug(words);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{words:?}");
    };
    let receives = |count: u64| {
        let mut port = daemon.port("va").filter("udp").open().unwrap();
        let sent = netns.enter(|| Stream::new("vb", count).send());
        assert_eq!(sent.unwrap().unwrap().frames, count);
        let mut read = 0;
        eventually("the frames come", || {
            while let Next::Packet(_) = port.next().unwrap() {
                read += 1;
            }
            read == count
        });
    };
    for _ in 0..3 {
        vnplug(&["source", "add", "va=af_xdp,fallback=no"]);
        assert!(has_xdp(&netns, "va"));
        receives(100);
        daemon.audit();
        vnplug(&["source", "rm", "va"]);
        eventually("the program goes with it", || !has_xdp(&netns, "va"));
    }
    // What it cannot have is said.
    let (code, said) = daemon.vnplug(&["source", "add", "va=af_xdp,arena=vm"]);
    assert!(code != Some(0) && said.contains("arena=vm"), "{said}");
    // It goes on when its interface was made again.
    // What its own thread may lock is enough for little memory.
    vnplug(&["source", "add", "va=af_xdp,fallback=no,frames=1024"]);
    netns.ip(&["link", "del", "va"]).unwrap();
    netns.veth("va", "vb").unwrap();
    // The program is there before its socket is, and frames pass to the host between the two.
    let rebinds = || {
        let all = daemon.audit();
        let own = all.iter().find(|it| it.kind == "source" && it.name == "va");
        own.map_or(0, |it| value(it, "rebinds"))
    };
    // Bound between the moment when it was made and that when it is up, it counts once more when it is up.
    until("it is back", rebinds, |count| *count >= 1);
    assert!(has_xdp(&netns, "va"));
    receives(100);
    vnplug(&["source", "rm", "va"]);
    eventually("the program goes with it", || !has_xdp(&netns, "va"));
    vnplug(&["switch", "add", "lan1,uplink=va/af_xdp"]);
    assert!(has_xdp(&netns, "va"));
    vnplug(&["switch", "rm", "lan1"]);
    eventually("the program goes with it", || !has_xdp(&netns, "va"));
    vnplug(&["switch", "add", "lan1"]);
    vnplug(&["switch", "set", "lan1", "uplink=va/af_xdp"]);
    assert!(has_xdp(&netns, "va"));
    vnplug(&["switch", "set", "lan1", "uplink=no"]);
    eventually("the program goes with it", || !has_xdp(&netns, "va"));
    daemon.audit();
}
