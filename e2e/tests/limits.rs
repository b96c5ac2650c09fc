//! What runs out or goes away: interfaces, memory, files, the doorbell's peer.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use vnplug::{Client, Next, PortOptions};
use vnplug_e2e::daemon::{Daemon, label, program, refusal, value};
use vnplug_e2e::raw::{Holdings, Raw, hello, open, status};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::control::{Counted, Message, Role, VmKind, VmSpec, code};
use vnplug_testing::{Deadline, until};

fn source(daemon: &Daemon, name: &str) -> Counted {
    let mut all = daemon.audit().into_iter();
    all.find(|counted| counted.kind == "source" && counted.name == name)
        .expect("the source is counted")
}

fn becomes(daemon: &Daemon, name: &str, state: &str) -> Counted {
    let look = || source(daemon, name);
    until(&format!("{name} is {state}"), look, |source| {
        label(source, "state") == state
    })
}

/// Reads this many packets of an open port.
fn read(port: &mut vnplug::Port, count: u64) {
    let deadline = Deadline::new(format!("{count} packets come"));
    let mut packets = 0;
    while packets < count {
        deadline.check_seen(&packets);
        match port.next().expect("the port lives") {
            Next::Packet(_) => packets += 1,
            Next::Nothing => {
                port.wait(Some(Duration::from_millis(100))).expect("sleep");
            }
            Next::Ended => panic!("ended after {packets}"),
        }
    }
}

#[test]
fn an_interface_that_goes_and_returns_keeps_its_readers() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
    let mut port = daemon.port("wire1").ring_bytes(1 << 20).open().unwrap();
    let send = || {
        netns
            .enter(|| Stream::new("wire0", 2000).send())
            .unwrap()
            .unwrap()
    };
    for round in 0..3 {
        assert_eq!(send().frames, 2000);
        read(&mut port, 2000);
        if round < 2 {
            netns.ip(&["link", "del", "wire0"]).unwrap();
            becomes(&daemon, "wire1", "gone");
            netns.veth("wire0", "wire1").unwrap();
            becomes(&daemon, "wire1", "up");
        }
    }
    // Point K, at rest.
    let counted = source(&daemon, "wire1");
    let of = |name| value(&counted, name);
    assert_eq!(of("read"), 6000);
    assert_eq!(of("seen"), of("read") + of("kernel_dropped"), "{counted:?}");
}

#[test]
fn an_interface_that_is_missing_at_start_is_named() {
    let lab = Lab::new().unwrap();
    let socket = lab.dir().join("s");
    let mut command = Command::new(program("vnplugd").unwrap());
    command
        .args(["--source", "nosuchif0", "--socket"])
        .arg(&socket);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("nosuchif0"),
        "{text}"
    );
    assert!(
        PortOptions::new("nosuchif0")
            .socket(socket.clone())
            .reconnect(false)
            .open()
            .is_err()
    );
    // It left no socket behind that nobody serves.
    assert!(!socket.exists());
}

#[test]
fn idle_ports_on_a_silent_wire_cost_nothing() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
    let _ports: Vec<_> = (0..100)
        .map(|_| daemon.port("wire1").ring_bytes(1 << 16).open().unwrap())
        .collect();
    let little = Duration::from_millis(40);
    let spent = daemon.cpu_at_rest(Duration::from_secs(4), little);
    eprintln!("{spent:?} in 4 s with 100 idle ports");
    assert!(spent <= little, "{spent:?}");
}

/// A little-endian pcap file with microseconds; 50 records, the last cut short.
fn cut_file() -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 65535, 1] {
        bytes.extend(word.to_le_bytes());
    }
    for at in 0..50_u32 {
        for word in [1_700_000_000, at, 60, 60] {
            bytes.extend(u32::to_le_bytes(word));
        }
        bytes.extend([at as u8; 60]);
    }
    bytes.truncate(bytes.len() - 7);
    bytes
}

#[test]
fn a_damaged_file_is_played_up_to_the_damage_and_the_others_go_on() {
    let lab = Lab::new().unwrap();
    let file = lab.dir().join("cut.pcap");
    fs::write(&file, cut_file()).unwrap();
    let cut = format!("cut=pcap:{},pace=top", file.display());
    let daemon = Daemon::start(
        &lab,
        None,
        &["--source", &cut, "--source", "lab=gen,pps=1000"],
    )
    .unwrap();
    let mut port = daemon.port("cut").open().unwrap();
    read(&mut port, 49);
    let counted = becomes(&daemon, "cut", "failed");
    assert_eq!(value(&counted, "read"), 49);
    // The last record begins at 24 + 49 * 76.
    let offset = (24 + 49 * 76).to_string();
    let failure = label(&counted, "failure");
    assert!(failure.contains(&offset), "{failure}");
    assert!(daemon.log().contains(failure), "{}", daemon.log());
    // The reader hears of it, and so does one that comes after it.
    for mut port in [port, daemon.port("cut").open().unwrap()] {
        let error = loop {
            match port.next() {
                Err(error) => break error.to_string(),
                Ok(Next::Nothing) => {
                    let woken = port.wait(Some(Duration::from_secs(60)));
                    assert_eq!(woken, Ok(vnplug::Ready::Now));
                }
                Ok(other) => panic!("{other:?}"),
            }
        };
        assert!(error.contains(&offset), "{error}");
    }
    let mut other = daemon.port("lab").open().unwrap();
    read(&mut other, 100);
}

#[test]
fn a_damaged_file_fails_the_programs_that_read_it_after_all_whole_packets() {
    let lab = Lab::new().unwrap();
    let file = lab.dir().join("cut.pcap");
    fs::write(&file, cut_file()).unwrap();
    let offset = (24 + 49 * 76).to_string();
    let written = lab.dir().join("out.pcap");
    for command in [&["count"][..], &["dump", "-w", written.to_str().unwrap()]] {
        let cut = format!("cut=pcap:{},pace=top", file.display());
        let daemon = Daemon::start(&lab, None, &["--source", &cut]).unwrap();
        let (code, said) = daemon.vnplug(&[command, &["host:cut"]].concat());
        assert_eq!(code, Some(1), "{said}");
        assert!(
            said.contains("49 packets") && said.contains(&offset),
            "{said}"
        );
    }
    // A header and 49 whole records.
    assert_eq!(fs::metadata(&written).unwrap().len(), 24 + 49 * 76);
}

/// A tmpfs that is unmounted when dropped.
struct Tmpfs(std::path::PathBuf);

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn spec(name: &str, pool_bytes: u64, vectors: u32) -> VmSpec {
    VmSpec {
        name: name.into(),
        kind: VmKind::Qemu,
        pool_bytes,
        vectors,
        allow: Vec::new(),
        owner: 0,
        groups: Vec::new(),
        stays_for: None,
    }
}

#[test]
fn what_does_not_fit_is_refused_with_advice_and_leaves_nothing() {
    let lab = Lab::new().unwrap();
    let pools = lab.dir().join("pools");
    fs::create_dir(&pools).unwrap();
    let mut mount = Command::new("mount");
    mount
        .args(["-t", "tmpfs", "-o", "size=2m", "vnplug-test"])
        .arg(&pools);
    assert!(mount.status().unwrap().success());
    let _tmpfs = Tmpfs(pools.clone());
    let config = lab.dir().join("config");
    fs::write(&config, "max_ports = 3\nmax_ring_bytes = '1MiB'\n").unwrap();
    let args = [
        "--config",
        config.to_str().unwrap(),
        "--pool-dir",
        pools.to_str().unwrap(),
    ];
    let daemon = Daemon::start(
        &lab,
        None,
        &[&args[..], &["--source", "lab=gen,pps=10"]].concat(),
    )
    .unwrap();
    let mut raw = Raw::greeted(&daemon.socket());
    let before = Holdings::at_rest(daemon.pid());
    for _ in 0..20 {
        let answer = raw.ask(&Message::AttachVm(spec("large", 4 << 20, 0)), 0);
        assert_eq!(refusal(answer).0, code::NO_MEMORY);
        let answer = raw.ask(&Message::AttachVm(spec("odd", 12_345, 0)), 0);
        assert!(refusal(answer).1.contains("power of two"));
        let answer = raw.ask(&Message::Open(open("lab", 1 << 30)), 0);
        assert!(refusal(answer).1.contains("the limit is 1048576"));
    }
    assert_eq!(fs::read_dir(&pools).unwrap().count(), 0);
    let after = Holdings::at_rest(daemon.pid());
    assert_eq!(after.fds, before.fds);
    // What twenty refusals leave behind is twenty times; a mapping or two are the allocator's.
    assert!(after.maps < before.maps + 20, "{before:?} {after:?}");
    for _ in 0..3 {
        let opened = raw.ask(&Message::Open(open("lab", 4096)), 0);
        assert!(matches!(opened, Message::Opened(_)));
    }
    let (kind, text) = refusal(raw.ask(&Message::Open(open("lab", 4096)), 0));
    assert!(kind == code::LIMIT && text.contains("max_ports"), "{text}");
    // What fits is served: the refusals were about size.
    let ready = raw.ask(&Message::AttachVm(spec("small", 1 << 20, 0)), 0);
    assert!(matches!(ready, Message::VmReady(_)), "{ready:?}");
    let gone = raw.ask(
        &Message::DetachVm {
            name: "small".into(),
            owner: 0,
        },
        0,
    );
    assert_eq!(gone, Message::Done);
    daemon.audit();
}

#[test]
fn a_full_disk_is_told_and_what_was_kept_stays() {
    let lab = Lab::new().unwrap();
    let state = lab.dir().join("state");
    fs::create_dir(&state).unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=128k", "vnplug-test"]);
    assert!(mount.arg(&state).status().unwrap().success());
    let _tmpfs = Tmpfs(state.clone());
    let args = ["--source", "lab=gen,pps=10", "--switch", "lan0"];
    let at = ["--state-dir", state.to_str().unwrap()];
    let mut daemon = Daemon::start(&lab, None, &[&args[..], &at].concat()).unwrap();
    let attach = |daemon: &Daemon, name: &str| {
        let mut operator = Client::connect_to(&daemon.socket()).unwrap();
        let attached = operator.attach_vm(spec(name, 1 << 20, 0));
        attached.map(drop).map_err(|error| error.to_string())
    };
    let ok = |daemon: &Daemon, words: &[&str]| {
        let (code, said) = daemon.vnplug(words);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{words:?}");
    };
    ok(&daemon, &["grant", "add", "uid:1=lab"]);
    ok(&daemon, &["source", "add", "--keep", "late=gen,pps=10"]);
    ok(&daemon, &["switch", "set", "lan0", "age=60"]);
    attach(&daemon, "probe").unwrap();
    let files = || {
        let entries = fs::read_dir(state.join("vms")).unwrap().flatten();
        let files = entries.filter(|it| it.file_type().is_ok_and(|kind| kind.is_file()));
        let read = |it: fs::DirEntry| (it.file_name(), fs::read(it.path()).unwrap());
        files
            .map(read)
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    let before = files();
    assert_eq!(before.len(), 4, "{before:?}");
    let filler = state.join("filler");
    fs::write(&filler, vec![0; 1 << 20]).unwrap_err();
    let refused: [(&[&str], &str); 4] = [
        (&["grant", "add", "uid:2=lab"], "not kept for a restart"),
        (&["grant", "rm", "uid:1=lab"], "not kept for a restart"),
        (
            &["source", "add", "--keep", "more=gen,pps=10"],
            "not kept for the next daemon",
        ),
        (
            &["switch", "set", "lan0", "age=70"],
            "not kept for a restart",
        ),
    ];
    for (words, why) in refused {
        let (code, said) = daemon.vnplug(words);
        let is_told = said.contains(why) && said.contains("No space left");
        assert!(code != Some(0) && is_told, "{words:?}: {said}");
    }
    let said = attach(&daemon, "other").unwrap_err();
    assert!(said.contains("No space left"), "{said}");
    assert_eq!(files(), before);
    daemon.audit();
    // The next daemon starts with what was kept, and where the disk is full, too.
    daemon.kill();
    daemon.launch().unwrap();
    let granted = daemon.vnplug(&["grant", "list"]).1;
    assert!(
        granted.contains("uid:1") && !granted.contains("uid:2"),
        "{granted}"
    );
    assert!(daemon.vnplug(&["list"]).1.contains("late"));
    assert!(
        daemon
            .counters()
            .iter()
            .any(|it| (&*it.kind, &*it.name) == ("vm", "probe"))
    );
    // The control: with room all of it is kept.
    fs::remove_file(&filler).unwrap();
    ok(&daemon, &["grant", "add", "uid:2=lab"]);
    attach(&daemon, "other").unwrap();
    daemon.kill();
    daemon.launch().unwrap();
    assert!(daemon.vnplug(&["grant", "list"]).1.contains("uid:2"));
    assert_eq!(files().len(), 5);
}

#[test]
fn a_doorbells_handshake_comes_whole_and_its_peers_harm_nobody() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let ready = operator.attach_vm(spec("bell", 1 << 20, 8)).unwrap();
    let fds = Holdings::at_rest(daemon.pid()).fds;
    // Peers that connect and leave, or connect and do not read.
    let mut silent = Vec::new();
    for turn in 0..50 {
        let stream = UnixStream::connect(&ready.doorbell_path).unwrap();
        if turn % 2 == 0 {
            silent.push(stream);
        }
        operator.stats().unwrap();
    }
    let mut stream = UnixStream::connect(&ready.doorbell_path).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    // Version 0, id 1, memory, one eventfd of peer 0, eight of peer 1: ivshmem-spec. (The
    // descriptors that come along are closed by the kernel, as no room is given for them.)
    let mut numbers = Vec::new();
    for _ in 0..12 {
        let mut word = [0; 8];
        stream.read_exact(&mut word).unwrap();
        numbers.push(i64::from_le_bytes(word));
    }
    assert_eq!(numbers[..4], [0, 1, -1, 0]);
    assert_eq!(numbers[4..], [1; 8]);
    drop((silent, stream));
    operator.detach_vm("bell").unwrap();
    let now = || Holdings::of(daemon.pid());
    until("no descriptor stays", now, |now| now.fds < fds);
    daemon.audit();
}

#[test]
fn a_channel_of_garbage_and_resets_finds_its_words_again() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=1000"]).unwrap();
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    let ready = operator.attach_vm(spec("noisy", 1 << 20, 0)).unwrap();
    let fds = Holdings::at_rest(daemon.pid()).fds;
    let greeting = hello(Role::Agent).encode(1, 0);
    let mut state = 77_u64;
    for turn in 0..100_usize {
        let mut agent = Raw::connect(ready.control_path.as_ref());
        // Noise, the letters of the magic without end, and a message that a reset cut.
        let mut noise: Vec<u8> = (0..turn * 40)
            .map(|_| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        noise.extend(b"VNPC".repeat(turn));
        agent.send(&noise).unwrap();
        agent.send(&greeting[..turn % 24]).unwrap();
        agent.send(&greeting).unwrap();
        // It may be asked to say Hello before it is answered.
        let welcome = std::iter::from_fn(|| agent.next()).find(|(id, _)| *id == 1);
        assert!(
            matches!(welcome, Some((1, Message::Welcome { .. }))),
            "{welcome:?}"
        );
    }
    let counters = daemon.audit();
    assert!(counters.iter().any(|counted| counted.kind == "vm"));
    let now = || Holdings::of(daemon.pid());
    until("no channel stays open", now, |now| now.fds <= fds);
    operator.detach_vm("noisy").unwrap();
}

#[test]
fn as_another_user_it_serves_the_same() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let pools = lab.dir().join("pools");
    fs::create_dir(&pools).unwrap();
    let pool_dir = pools.to_str().unwrap();
    let args = [
        "--source",
        "wire1",
        "--user",
        "nobody",
        "--pool-dir",
        pool_dir,
    ];
    // Where it may not write, it says so at start, and takes nothing that was there before.
    let refused = Daemon::start(&lab, Some(&netns), &args)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains(pool_dir) && refused.contains("--pool-dir"),
        "{refused}"
    );
    std::os::unix::fs::chown(&pools, Some(65534), None).unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &args).unwrap();
    assert!(status(daemon.pid(), "Uid").starts_with("65534"));
    let state = daemon.socket().parent().unwrap().to_owned();
    let uid =
        |path: &std::path::Path| std::os::unix::fs::MetadataExt::uid(&fs::metadata(path).unwrap());
    assert_eq!((uid(&state), uid(&state.join("vms"))), (0, 65534));
    let mut port = daemon.port("wire1").filter("udp").open().unwrap();
    let sent = netns.enter(|| Stream::new("wire0", 1000).send());
    assert_eq!(sent.unwrap().unwrap().frames, 1000);
    read(&mut port, 1000);
    // With what it kept it still finds an interface that comes back.
    netns.ip(&["link", "del", "wire0"]).unwrap();
    becomes(&daemon, "wire1", "gone");
    netns.veth("wire0", "wire1").unwrap();
    becomes(&daemon, "wire1", "up");
    let mut operator = Client::connect_to(&daemon.socket()).unwrap();
    operator.attach_vm(spec("other", 1 << 20, 0)).unwrap();
    operator.detach_vm("other").unwrap();
}

#[test]
fn a_start_that_fails_ends_with_its_reason() {
    let lab = Lab::new().unwrap();
    let missing = lab.dir().join("missing");
    // As root: by then it has given up the power to kill its compiler, which is another user.
    let mut daemon = Command::new(program("vnplugd").unwrap())
        .arg("--socket")
        .arg(lab.dir().join("s"))
        .arg("--pool-dir")
        .arg(&missing)
        .args(["--source", "lab=gen"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Deadline::new("it serves or ends");
    while daemon.try_wait().unwrap().is_none() {
        if deadline.is_over() {
            daemon.kill().unwrap();
            panic!("it neither serves nor ends");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let output = daemon.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains(missing.to_str().unwrap()), "{said}");
}
