//! A machine moves from one QEMU to another and back, each attached to a daemon of its own, while an application
//! in it reads; its pool is unplugged meanwhile, or goes along. With `VNPLUG_LONG=1` a hundred times, with figures.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use vnplug_e2e::attached::{self, image};
use vnplug_e2e::daemon::{Daemon, counted, label, value};
use vnplug_e2e::{Guest, Lab, Qemu, QemuConfig};
use vnplug_frame::capfile::write::pcapng::GAP_COMMENT;
use vnplug_frame::witness::{Parsed, parse};
use vnplug_store::read::Reader;
use vnplug_testing::{PATIENCE, eventually};

/// Two daemons, and the machine, which is at the first one.
struct Rig {
    lab: Lab,
    daemons: [Daemon; 2],
    guest: Guest,
    config: QemuConfig,
    /// Which daemon serves it.
    at: usize,
}

/// Before a packet that follows a gap: how long nothing was captured, and whether the other daemon goes on.
struct Mark {
    away: Duration,
    moved: bool,
}

impl Rig {
    /// The machine is attached with these options, too.
    fn new(how: &[&str]) -> Self {
        let lab = Lab::new().unwrap();
        // Each generator numbers its own packets, and names its run.
        let source = ["--source", "lab=gen,pps=1000,size=100"];
        let daemons = [(); 2].map(|()| Daemon::start(&lab, None, &source).unwrap());
        let config = || QemuConfig {
            image: image().unwrap(),
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&lab, config()).unwrap_or_else(|error| panic!("{error}"));
        attached::plug(&daemons[0], &guest, "vm", how).unwrap_or_else(|error| panic!("{error}"));
        let agent = attached::agent(&guest).unwrap_or_else(|error| panic!("{error}"));
        // It runs on, and its answer goes to whoever listens.
        drop(agent);
        let rig = Self {
            lab,
            daemons,
            guest,
            config: config(),
            at: 0,
        };
        let read = "vnplug dump host:lab --ring 4M -w /tmp/seen.pcapng 2>/tmp/said & \
                    echo $! >/tmp/pid; wait $!; echo $? >/tmp/status";
        drop(rig.guest.spawn(read).unwrap());
        rig.await_packets();
        rig
    }

    fn daemon(&self) -> &Daemon {
        &self.daemons[self.at]
    }

    fn run(&self, command: &str) -> String {
        self.guest.run(command, PATIENCE).unwrap().text()
    }

    /// Waits until the reader has got some packets where it is.
    fn await_packets(&self) {
        eventually("the reader gets packets", || {
            let counters = self.daemon().audit();
            let ports = counters.iter().filter(|it| it.kind == "port");
            ports.map(|it| value(it, "delivered")).sum::<u64>() > 100
        });
    }

    /// Moves the machine to a QEMU that waits for it.
    fn command(&self, target: &(Guest, String), more: &[&str]) -> Command {
        let path = |guest: &Guest| guest.qmp_path().unwrap();
        let mut command = self.daemon().command().unwrap();
        command
            .args(["migrate", "qemu", "--name", "vm", "--json", "--qmp"])
            .arg(path(&self.guest))
            .args(["--to", &target.1, "--target-qmp"])
            .arg(path(&target.0))
            .arg("--target-socket")
            .arg(self.daemons[1 - self.at].socket())
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn waiting(&self) -> (Guest, String) {
        Qemu::incoming(&self.lab, &self.config, &self.guest).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The machine has moved.
    fn moved_to(&mut self, target: (Guest, String)) {
        let before = self.daemon().audit();
        assert!(before.iter().all(|it| it.kind != "vm"), "{before:?}");
        self.guest = target.0;
        self.at = 1 - self.at;
        self.await_packets();
    }

    fn move_on(&mut self) -> Value {
        let target = self.waiting();
        let output = self.command(&target, &["--allow", "*"]).output().unwrap();
        let figures = succeeded(&output);
        self.moved_to(target);
        figures
    }

    /// Ends the reader, and judges what it has written, all of it. The marks of gaps.
    fn finish(self) -> Vec<Mark> {
        let (marks, read) = self.marks();
        let delivered: u64 = self.daemons.iter().map(delivered).sum();
        // What was published before the machine left was read before its memory went; but for a packet that came
        // in the moment when the port closed.
        let unread = delivered - read;
        println!("{unread} of {delivered} packets were published and not read");
        assert!(unread <= marks.len() as u64, "{unread} of {delivered}");
        marks
    }

    /// Ends the reader, and judges what it has written. The marks of gaps, and how much it read.
    fn marks(&self) -> (Vec<Mark>, u64) {
        // It reads what is published, and then no more comes.
        let mut client = vnplug::Client::connect_to(&self.daemon().socket()).unwrap();
        client.hold_vm("vm", 0, true).unwrap();
        eventually("the reader has let go", || {
            let counters = self.daemon().audit();
            let vm = counted(&counters, "vm");
            value(vm, "pool_free") == value(vm, "pool_bytes") - 4096
        });
        let end = "kill -INT $(cat /tmp/pid); until [ -s /tmp/status ]; do sleep 0.1; done; \
                   cat /tmp/status /tmp/said";
        let said = self.run(end);
        assert!(said.starts_with('0'), "{said}");
        let file = self.lab.dir().join("seen.pcapng");
        self.guest
            .pull("/tmp/seen.pcapng", &file, PATIENCE)
            .unwrap();
        let mut reader = Reader::open(&file).unwrap();
        let (mut marks, mut read) = (Vec::new(), 0);
        let mut last: HashMap<u32, u64> = HashMap::new();
        let mut before: Option<(u32, u64, u64)> = None;
        while let Some(packet) = reader.read().unwrap() {
            read += 1;
            let Parsed::Witness(witness) = parse(packet.bytes) else {
                panic!("packet {read} is no whole frame of a generator");
            };
            let (run, seq) = (witness.run, witness.seq);
            // None twice, and none that was left in a pool.
            let newest = last.insert(run, seq);
            assert!(
                newest.is_none_or(|newest| newest < seq),
                "{run:#x}: {newest:?} {seq}"
            );
            let is_marked = packet.comment.lines().any(|line| line == GAP_COMMENT);
            if let Some((old_run, old_seq, old_ts)) = before {
                let follows = old_run == run && old_seq + 1 == seq;
                assert!(
                    is_marked || follows,
                    "a gap nobody told of: {old_run:#x} {old_seq}, {run:#x} {seq}"
                );
                if is_marked {
                    let away = Duration::from_nanos(packet.ts_ns.saturating_sub(old_ts));
                    marks.push(Mark {
                        away,
                        moved: old_run != run,
                    });
                }
            }
            assert_eq!(packet.lost, 0, "packet {read}");
            before = Some((run, seq, packet.ts_ns));
        }
        (marks, read)
    }
}

/// What a daemon delivered to readers that are gone.
fn delivered(daemon: &Daemon) -> u64 {
    daemon.await_no_ports();
    value(counted(&daemon.audit(), "source"), "departed_delivered")
}

fn succeeded(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    text
}

fn state(daemon: &Daemon) -> String {
    label(counted(&daemon.audit(), "vm"), "state").to_owned()
}

/// QEMU takes its time from now on: it copies at most `bytes` in a second.
fn slow_down(guest: &Guest, bytes: u64) {
    let slow = json!({"max-bandwidth": bytes});
    let mut qmp = guest.qmp().unwrap();
    qmp.execute("migrate-set-parameters", slow).unwrap();
}

/// Starts to move, and is on its way.
fn on_the_way(rig: &Rig, target: &(Guest, String)) -> Child {
    slow_down(&rig.guest, 1 << 20);
    let child = rig.command(target, &["--allow", "*"]).spawn().unwrap();
    let mut qmp = rig.guest.qmp().unwrap();
    eventually("QEMU sends the machine", || {
        qmp.execute("query-migrate", json!({})).unwrap()["status"] == "active"
    });
    child
}

#[test]
fn a_reader_goes_on_where_the_machine_goes() {
    go_to_and_fro(&[]);
}

#[test]
fn a_reader_goes_on_where_the_machine_goes_with_its_memory() {
    go_to_and_fro(&["--movable"]);
}

fn go_to_and_fro(how: &[&str]) {
    let rounds = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 100,
        None => 2,
    };
    let mut rig = Rig::new(how);
    let mut figures = Vec::new();
    for _ in 0..rounds {
        figures.push(rig.move_on());
    }
    let marks = rig.finish();
    assert_eq!(marks.len(), rounds);
    assert!(marks.iter().all(|mark| mark.moved));
    let ms = |mark: &Mark| mark.away.as_secs_f64() * 1e3;
    let of = |value: &Value, key: &str| value[key].as_f64().unwrap();
    for (mark, told) in marks.iter().zip(&figures) {
        println!("{how:?}: {:.1} ms without packets; {told}", ms(mark));
    }
    for (what, of_qemu) in [
        ("without packets, beyond QEMU's own time", "qemu_total_ms"),
        (
            "without packets, beyond QEMU's down time",
            "qemu_downtime_ms",
        ),
    ] {
        let told = marks.iter().zip(&figures);
        let mut beyond: Vec<f64> = told
            .map(|(mark, told)| ms(mark) - of(told, of_qemu))
            .collect();
        tell(what, &mut beyond);
        let median = beyond[beyond.len() / 2];
        assert!(median < BEYOND_MS, "{how:?}: {what}: {beyond:?}");
    }
    tell(
        "without packets",
        &mut marks.iter().map(ms).collect::<Vec<_>>(),
    );
    for key in [
        "qemu_total_ms",
        "qemu_downtime_ms",
        "drained_ms",
        "unplugged_ms",
        "plugged_ms",
    ] {
        let mut all: Vec<f64> = figures.iter().map(|told| of(told, key)).collect();
        tell(key, &mut all);
    }
}

/// What a move may cost beyond QEMU's own time, in the median. Of a hundred moves under emulation, beside builds, the largest was 1,451 ms
/// beyond `total-time`, and none was without packets for more than 2,735 ms. The goal, 500 ms beyond the time in which the machine
/// stands still, is missed: docs/migration.md.
const BEYOND_MS: f64 = 4500.0;

fn tell(what: &str, all: &mut [f64]) {
    all.sort_by(f64::total_cmp);
    let at = |share: usize| all[(all.len() * share / 100).min(all.len() - 1)];
    println!(
        "figure: migrate {what} (ms, {} times): median {:.0}, p99 {:.0}, most {:.0}",
        all.len(),
        at(50),
        at(99),
        at(100)
    );
}

#[test]
fn a_move_that_fails_leaves_the_machine_attached_where_it_is() {
    let mut rig = Rig::new(&[]);

    // The daemon there grants nothing: nothing is done here, and nothing is left there.
    let target = rig.waiting();
    let early = attached::plug(&rig.daemons[1], &target.0, "vm", &[]).unwrap_err();
    assert!(early.to_string().contains("waits for a machine"), "{early}");
    let text = refused(&rig.command(&target, &[]).output().unwrap());
    assert!(
        text.contains("the target refuses") && text.contains("no such source"),
        "{text}"
    );
    let text = refused(
        &rig.command(&target, &["--allow", "other"])
            .output()
            .unwrap(),
    );
    assert!(text.contains("no source \"other\""), "{text}");
    assert_eq!(state(rig.daemon()), "ready");
    let there = &rig.daemons[1];
    assert!(there.audit().iter().all(|it| it.kind != "vm"));

    // A reader that does not let go would be killed with its memory.
    rig.run("kill -STOP $(cat /tmp/pid)");
    let stuck = ["--allow", "*", "--timeout", "1s"];
    let text = refused(&rig.command(&target, &stuck).output().unwrap());
    assert!(
        text.contains("still map") && text.contains("--force"),
        "{text}"
    );
    assert_eq!(state(rig.daemon()), "ready");
    rig.run("kill -CONT $(cat /tmp/pid)");
    rig.await_packets();

    // The other QEMU dies half way.
    let child = on_the_way(&rig, &target);
    target.0.kill();
    let text = refused(&child.wait_with_output().unwrap());
    assert!(text.contains("attached here as before"), "{text}");
    rig.await_packets();
    assert!(there.audit().iter().all(|it| it.kind != "vm"));

    // The command itself is killed half way: run again, it ends what was begun.
    let target = rig.waiting();
    let mut child = on_the_way(&rig, &target);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(state(rig.daemon()), "held");
    slow_down(&rig.guest, 1 << 30);
    let output = rig.command(&target, &["--allow", "*"]).output().unwrap();
    succeeded(&output);
    rig.moved_to(target);

    // Killed before QEMU was asked to send it: the same, or the way back.
    let target = rig.waiting();
    let socket = rig.daemon().socket();
    let mut client = vnplug::Client::connect_to(&socket).unwrap();
    client.hold_vm("vm", 0, true).unwrap();
    let text = refused(&rig.command(&target, &[]).output().unwrap());
    assert!(text.contains("the target refuses"), "{text}");
    rig.await_packets();

    let marks = rig.finish();
    let moved: Vec<bool> = marks.iter().map(|mark| mark.moved).collect();
    assert_eq!(moved, [false, false, true, false]);
}

/// Ends what waits at this daemon's for the machine that is on its way.
fn end_target(daemon: &Daemon) {
    let socket = daemon.socket();
    let is_it = |pid: &i32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0);
        words.clone().any(|word| word == b"--incoming")
            && words.any(|word| word == socket.as_os_str().as_encoded_bytes())
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = pids.filter_map(|it| it.file_name().to_str()?.parse().ok());
    let pid = pids.find(is_it).expect("it waits");
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    eventually("it is forgotten", || {
        daemon.audit().iter().all(|it| it.kind != "vm")
    });
}

#[test]
fn a_machine_that_was_given_up_at_the_target_and_comes_reads_on_there() {
    let mut rig = Rig::new(&["--movable"]);
    let target = rig.waiting();
    let mut child = on_the_way(&rig, &target);
    child.kill().unwrap();
    child.wait().unwrap();
    end_target(&rig.daemons[1]);
    // It brings the memory of a pool that is no more, and another one is made for it.
    slow_down(&rig.guest, 1 << 30);
    succeeded(&rig.command(&target, &["--allow", "*"]).output().unwrap());
    rig.moved_to(target);
    let marks = rig.finish();
    assert_eq!((marks.len(), marks[0].moved), (1, true));
}

#[test]
fn by_force_a_reader_that_does_not_let_go_keeps_its_memory_and_goes_on_with_it() {
    let mut rig = Rig::new(&["--movable"]);
    rig.run("kill -STOP $(cat /tmp/pid)");
    let target = rig.waiting();
    let forced = ["--allow", "*", "--timeout", "1s", "--force"];
    succeeded(&rig.command(&target, &forced).output().unwrap());
    (rig.guest, rig.at) = (target.0, 1);
    let taken = || {
        let counters = rig.daemon().audit();
        let vm = counted(&counters, "vm");
        value(vm, "pool_bytes") - 4096 - value(vm, "pool_free")
    };
    eventually("its place there is taken", || taken() > 4 << 20);
    rig.run("kill -CONT $(cat /tmp/pid)");
    rig.await_packets();
    let marks = rig.finish();
    assert_eq!((marks.len(), marks[0].moved), (1, true));
}

#[test]
fn memory_of_a_group_is_unplugged_where_the_pool_goes_along() {
    let group = ["--group", "ids=lab"];
    let mut rig = Rig::new(&[&["--movable"], &group[..]].concat());
    let target = rig.waiting();
    let more = [&["--allow", "*"], &group[..]].concat();
    let figures = succeeded(&rig.command(&target, &more).output().unwrap());
    assert!(figures["unplugged_ms"].as_f64() > Some(20.0), "{figures}");
    rig.moved_to(target);
    let said = rig.run("vnplug count host:lab --group ids -t 1 2>&1");
    assert!(said.contains(" 0 lost"), "{said}");
    // What the other one read is not in the file.
    let (marks, _) = rig.marks();
    assert_eq!((marks.len(), marks[0].moved), (1, true));
}

#[test]
fn a_move_with_memory_that_fails_leaves_it_and_its_channel_where_they_are() {
    let mut rig = Rig::new(&["--movable"]);

    // Refused before the other QEMU has devices that it cannot let go of.
    let target = rig.waiting();
    let text = refused(&rig.command(&target, &[]).output().unwrap());
    assert!(text.contains("the target refuses"), "{text}");
    rig.run("kill -STOP $(cat /tmp/pid)");
    let stuck = ["--allow", "*", "--timeout", "1s"];
    let text = refused(&rig.command(&target, &stuck).output().unwrap());
    assert!(text.contains("still map"), "{text}");
    rig.run("kill -CONT $(cat /tmp/pid)");
    rig.await_packets();
    assert!(rig.daemons[1].audit().iter().all(|it| it.kind != "vm"));

    // The other QEMU dies half way.
    let child = on_the_way(&rig, &target);
    target.0.kill();
    let text = refused(&child.wait_with_output().unwrap());
    assert!(text.contains("attached here as before"), "{text}");
    rig.await_packets();
    assert!(rig.daemons[1].audit().iter().all(|it| it.kind != "vm"));

    // The command and the daemon here are killed half way. The next daemon opens no port either, for QEMU would not
    // see what it writes; and the next command ends what was begun.
    let target = rig.waiting();
    let mut child = on_the_way(&rig, &target);
    child.kill().unwrap();
    child.wait().unwrap();
    let daemon = &mut rig.daemons[rig.at];
    daemon.kill();
    daemon.launch().unwrap();
    eventually("the next daemon opens no port", || {
        let said = rig.run("vnplug count host:lab -t 1 2>&1; true");
        assert!(!said.contains("packets"), "{said}");
        said.contains("the machine moves")
    });
    assert_eq!(state(rig.daemon()), "held");
    slow_down(&rig.guest, 1 << 30);
    succeeded(&rig.command(&target, &["--allow", "*"]).output().unwrap());
    rig.moved_to(target);

    // What a daemon delivered that was killed nobody counts.
    let (marks, _) = rig.marks();
    let moved: Vec<bool> = marks.iter().map(|mark| mark.moved).collect();
    assert_eq!(moved, [false, false, true]);
}
