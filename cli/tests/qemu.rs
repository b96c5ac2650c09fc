//! `attach qemu` and `detach qemu` against a real QEMU and a daemon that only keeps books.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, ChildStdout, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::json;
use support::{Daemon, Qemu, finish, q35, run, vnplug};
use vnplug_os::socket::connect_within;
use vnplug_ring::control::{Counted, Message, VmKind, code};
use vnplug_testing::{Deadline, TestDir, until};

struct Lab {
    daemon: Daemon,
    qemu: Qemu,
    scratch: TestDir,
}

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
impl Lab {
    fn new(arguments: &[impl AsRef<str>]) -> Self {
        let scratch = TestDir::new("cli");
        let arguments: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
        Self {
            daemon: Daemon::start(&scratch),
            qemu: Qemu::start(&scratch, &arguments),
            scratch,
        }
    }

    fn command(&self, verb: &str, more: &[&str]) -> std::process::Command {
        let qmp = self.qemu.qmp.to_str().unwrap();
        let fixed = [verb, "qemu", "--name", "probe", "--qmp", qmp];
        vnplug(&self.daemon.socket, &[&fixed, more].concat())
    }

    fn run(&self, verb: &str, more: &[&str]) -> (i32, String, String) {
        run(self.command(verb, more))
    }

    /// What waits for a machine that is to come into this QEMU, and its first line.
    fn incoming(&self) -> (Child, BufReader<ChildStdout>) {
        let mut command = self.command("attach", &["--incoming"]);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        assert_eq!(line(&mut out), "probe: is prepared, the machine may come\n");
        assert_eq!(self.daemon.vms(), ["probe"]);
        (child, out)
    }

    fn ok(&self, verb: &str, more: &[&str]) -> String {
        let (code, out, err) = self.run(verb, more);
        assert_eq!(code, 0, "{verb}: {out}{err}");
        out
    }
}

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn line(out: &mut impl BufRead) -> String {
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    line
}

#[test]
fn pc_takes_everything_and_gives_it_back_when_the_guest_lets_go() {
    let mut lab = Lab::new(&["-M", "pc"]);
    let out = lab.ok("attach", &["--pool", "2M", "--allow", "eth1:udp"]);
    assert!(out.starts_with("probe: attached: pool of 2 MiB"), "{out}");
    assert_eq!(lab.daemon.spec("probe").allow[0].filter, "udp");
    let all = ["chr", "mem", "port", "ser", "shm"].map(|part| format!("vnplug-probe-{part}"));
    assert_eq!(lab.qemu.ours(), all);

    let out = lab.ok("attach", &["--pool", "2M"]);
    assert!(out.contains("attached already"), "{out}");

    // No system runs in the guest: it cannot let go.
    let (code, _, err) = lab.run("detach", &["--timeout", "300ms"]);
    assert_eq!(code, 4, "{err}");
    assert!(
        err.contains("vnplug-probe-shm, vnplug-probe-ser")
            || err.contains("vnplug-probe-ser, vnplug-probe-shm"),
        "{err}"
    );
    assert!(err.contains("has not let go"), "{err}");
    assert_eq!(lab.daemon.vms(), [""; 0], "the daemon stopped serving it");
    let (code, _, err) = lab.run("attach", &[]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("finishing an earlier detach first"), "{err}");

    // A reset of the machine counts as letting go.
    let mut detach = lab.command("detach", &[]);
    let child = detach
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Deadline::new("QEMU has let go of all");
    while !lab.qemu.ours().is_empty() {
        deadline.check_seen(&lab.qemu.ours());
        lab.qemu.ask("system_reset", json!({}));
        thread::sleep(Duration::from_millis(100));
    }
    let (code, out, err) = finish(child);
    assert_eq!((code, out.as_str()), (0, "probe: detached\n"), "{err}");
}

#[test]
fn q35_uses_free_ports_by_itself_or_as_told() {
    let mut lab = Lab::new(&q35(4));
    let occupied = json!({"driver": "virtio-serial-pci", "id": "other", "bus": "rp1"});
    lab.qemu.ask("device_add", occupied);
    lab.ok("attach", &[]);
    assert_eq!(lab.qemu.ours().len(), 5);
    lab.ok("detach", &[]);
    assert_eq!(lab.qemu.ours(), [""; 0]);

    lab.ok("attach", &["--bus", "rp4", "--bus", "rp3"]);
    let path = json!({"path": "/machine/peripheral/rp4/rp4"});
    let bus = lab.qemu.ask("qom-list", path).to_string();
    assert!(bus.contains("link<ivshmem-plain>"), "{bus}");
    lab.ok("detach", &[]);
}

#[test]
fn q35_without_room_says_how_to_make_room_and_changes_nothing() {
    let mut lab = Lab::new(&q35(1));
    let (code, _, err) = lab.run("attach", &[]);
    assert_eq!(code, 1);
    assert!(err.contains("2 free PCIe ports are needed, the machine has 1 free of 1 (rp1)"));
    assert!(err.contains("-device pcie-root-port"), "{err}");
    assert_eq!((lab.qemu.ours().len(), lab.daemon.vms().len()), (0, 0));
}

#[test]
fn the_doorbell_is_a_third_device() {
    let mut lab = Lab::new(&q35(3));
    let (code, _, err) = lab.run("attach", &["--doorbell", "2"]);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("without KVM and may crash"), "{err}");
    assert_eq!(lab.daemon.spec("probe").vectors, 2);
    let ours = lab.qemu.ours();
    assert!(ours.contains(&"vnplug-probe-bell".to_owned()), "{ours:?}");
    assert_eq!(ours.len(), 7);
    lab.ok("detach", &[]);
    assert_eq!(lab.qemu.ours(), [""; 0]);
}

#[test]
fn a_failure_in_the_middle_is_rolled_back() {
    let mut lab = Lab::new(&q35(3));
    // The serial controller fails: its port is not one that exists.
    let (code, _, err) = lab.run("attach", &["--bus", "rp1", "--bus", "nosuch"]);
    assert_eq!(code, 1);
    assert!(
        err.contains("vnplug-probe-ser: QEMU refused device_add"),
        "{err}"
    );
    assert!(err.contains("nothing was changed"), "{err}");
    assert_eq!((lab.qemu.ours().len(), lab.daemon.vms().len()), (0, 0));
    lab.ok("attach", &[]);
    lab.ok("detach", &[]);
}

#[test]
fn an_interrupted_attach_is_completed() {
    let mut lab = Lab::new(&q35(2));
    lab.ok("attach", &[]);
    lab.ok("detach", &[]);
    let pool = lab.scratch.path("probe.pool");
    let memory = json!({
        "qom-type": "memory-backend-file", "id": "vnplug-probe-mem", "share": true,
        "mem-path": pool, "size": 1 << 20,
    });
    lab.qemu.ask("object-add", memory);
    let out = lab.ok("attach", &[]);
    assert!(out.contains("completed an interrupted attach"), "{out}");
    assert_eq!(lab.qemu.ours().len(), 5);
    lab.ok("detach", &[]);
    let (code, _, err) = lab.run("detach", &[]);
    assert_eq!(code, 1);
    assert!(err.contains("is not attached to this QEMU"), "{err}");
}

#[test]
fn memory_whose_file_is_gone_is_plugged_anew_and_memory_of_another_daemon_is_not() {
    let mut lab = Lab::new(&q35(2));
    let other = lab.scratch.path("other.pool");
    let memory = json!({
        "qom-type": "memory-backend-file", "id": "vnplug-probe-mem", "share": true,
        "mem-path": other, "size": 1 << 20,
    });
    lab.qemu.ask("object-add", memory.clone());
    let (code, _, err) = lab.run("attach", &[]);
    assert_eq!(code, 1, "{err}");
    let both = ["other.pool (1048576 bytes)", "probe.pool (1048576 bytes)"];
    assert!(both.iter().all(|it| err.contains(it)), "{err}");
    assert_eq!(lab.qemu.ours(), ["vnplug-probe-mem"]);
    std::fs::remove_file(&other).unwrap();
    let (code, out, err) = lab.run("attach", &[]);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("was given up"), "{err}");
    assert!(out.starts_with("probe: attached: pool of 1 MiB"), "{out}");
    assert_eq!(lab.qemu.ours().len(), 5);
    let path = json!({"path": "/objects/vnplug-probe-mem", "property": "mem-path"});
    let path = lab.qemu.ask("qom-get", path);
    assert_eq!(
        path["return"],
        lab.scratch.path("probe.pool").to_str().unwrap()
    );
}

/// A machine that waits for another one.
fn waiting() -> Vec<String> {
    [q35(3), vec!["-incoming".into(), "defer".into()]].concat()
}

#[test]
fn a_machine_that_does_not_come_is_forgotten_also_if_qemu_keeps_something_of_it() {
    let mut lab = Lab::new(&waiting());
    let (mut child, _out) = lab.incoming();
    // Somebody else's device holds the channel.
    let other = json!({
        "driver": "pci-serial", "id": "other", "chardev": "vnplug-probe-chr", "bus": "rp3",
    });
    let told = lab.qemu.ask("device_add", other);
    assert_eq!(told["return"], json!({}), "{told}");
    writeln!(child.stdin.take().unwrap(), "cancel").unwrap();
    let (code, _, err) = finish(child);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("refused chardev-remove"), "{err}");
    assert_eq!(lab.daemon.vms(), [""; 0]);
}

#[test]
fn without_a_word_a_machine_is_given_up_that_was_not_sent_and_awaited_that_was() {
    let mut lab = Lab::new(&waiting());
    let (child, _out) = lab.incoming();
    let (code, _, err) = finish(without_input(child));
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("nothing is left here"), "{err}");
    assert_eq!((lab.qemu.ours().len(), lab.daemon.vms().len()), (0, 0));

    let (mut child, mut out) = lab.incoming();
    writeln!(child.stdin.as_mut().unwrap(), "sent").unwrap();
    assert_eq!(line(&mut out), "probe: is awaited\n");
    let mut child = without_input(child);
    // Its QEMU may be slow to begin.
    thread::sleep(Duration::from_secs(3));
    assert!(child.try_wait().unwrap().is_none());
    assert_eq!(lab.daemon.vms(), ["probe"]);
    let address = format!("unix:{}", lab.scratch.path("stream").display());
    let address = json!({"uri": address});
    let told = lab.qemu.ask("migrate-incoming", address.clone());
    assert_eq!(told["return"], json!({}), "{told}");
    let other = TestDir::new("cli");
    let machine = q35(3);
    let machine: Vec<&str> = machine.iter().map(String::as_str).collect();
    let mut source = Qemu::start(&other, &machine);
    // One that never ran would go on waiting there.
    source.ask("cont", json!({}));
    let told = source.ask("migrate", address);
    assert_eq!(told["return"], json!({}), "{told}");
    let (code, _, err) = finish(child);
    assert_eq!(code, 0, "{err}");
    let said = line(&mut out);
    assert!(said.starts_with("probe: attached"), "{said}");
    assert_eq!(lab.qemu.ours().len(), 5);
}

/// Its standard input ends.
fn without_input(mut child: Child) -> Child {
    drop(child.stdin.take());
    child
}

#[test]
fn a_name_that_qemu_still_has_is_not_brought_again() {
    let mut lab = Lab::new(&["-M", "pc"]);
    let memory = json!({
        "qom-type": "memory-backend-file", "id": "vnplug-probe-mem", "share": true,
        "mem-path": lab.scratch.path("other.pool"), "size": 1 << 20,
    });
    lab.qemu.ask("object-add", memory);
    let device = json!({"driver": "ivshmem-plain", "id": "other", "memdev": "vnplug-probe-mem", "addr": "5"});
    lab.qemu.ask("device_add", device);
    let (code, _, err) = lab.run("attach", &[]);
    assert_eq!(code, 1, "{err}");
    assert!(
        err.contains("names: 0000:00:05.0/vnplug-probe-mem"),
        "{err}"
    );
    assert_eq!(lab.qemu.ours(), ["vnplug-probe-mem"]);
    assert_eq!(lab.daemon.vms(), [""; 0], "the daemon was not asked");
}

#[test]
fn fifty_cycles_leave_no_trace() {
    let mut lab = Lab::new(&q35(2));
    lab.ok("attach", &[]);
    lab.ok("detach", &[]);
    // What QEMU has let go of it closes a little later, in a thread of its own.
    thread::sleep(Duration::from_secs(1));
    let before = lab.qemu.fds();
    for _ in 0..50 {
        lab.ok("attach", &[]);
        lab.ok("detach", &[]);
    }
    assert_eq!(lab.qemu.ours(), [""; 0]);
    until(
        "no descriptor stays in QEMU",
        || lab.qemu.fds(),
        |fds| *fds <= before,
    );
}

#[test]
fn a_locked_down_guest_in_a_machine_without_room_is_told_what_to_change() {
    let mut lab = Lab::new(&["-M", "pc"]);
    let vm = Counted {
        kind: "vm".into(),
        name: "probe".into(),
        labels: vec![("state".into(), "locked-down".into())],
        values: Vec::new(),
    };
    let stats = Message::Stats { port: 0 };
    lab.daemon.answer(stats.kind(), Message::Counters(vec![vm]));
    let (code, out, err) = lab.run("attach", &[]);
    assert_eq!(code, 1, "{out}{err}");
    assert!(
        err.contains("no room for memory of another kind") && err.contains("maxmem=MORE"),
        "{err}"
    );
    // What was plugged stays: the machine is to be started anew in any case.
    assert_eq!(lab.qemu.ours().len(), 5);
    // Who asks for one kind is not asked.
    lab.ok("attach", &["--memory", "ivshmem"]);
    let (code, _, err) = lab.run("attach", &["--group", "ids=eth1"]);
    assert_eq!(code, 1, "{err}");
}

#[test]
fn a_pmem_device_stays_and_is_followed_by_another() {
    let arguments = [&q35(4)[..], &["-m".into(), "32M,maxmem=1G".into()]].concat();
    let mut lab = Lab::new(&arguments);
    let pmem = ["--memory", "pmem", "--pool", "4M"];
    let out = lab.ok("attach", &pmem);
    assert!(out.contains("as virtio-pmem, which stays"), "{out}");
    assert_eq!(lab.daemon.spec("probe").kind, VmKind::QemuPmem);
    let ids = |parts: &[&str]| -> Vec<String> {
        let mut ids: Vec<_> = parts
            .iter()
            .map(|it| format!("vnplug-probe-{it}"))
            .collect();
        ids.sort();
        ids
    };
    let all = ids(&["chr", "pmem0", "pmemdev0", "port", "ser"]);
    assert_eq!(lab.qemu.ours(), all);
    // Who does not say which memory has this one.
    for again in [&pmem[..], &["--pool", "4M"]] {
        let out = lab.ok("attach", again);
        assert!(out.contains("attached already"), "{out}");
    }

    // Nothing is touched by what does not go with it.
    for refused in [
        &["--memory", "ivshmem"][..],
        &["--grow", "16M"],
        &["--doorbell", "1"],
        &["--memory", "pmem", "--grow", "16M"],
        &["--memory", "pmem", "--doorbell", "1"],
        &["--memory", "pmem", "--group", "ids=eth1"],
    ] {
        let (code, _, err) = lab.run("attach", refused);
        assert_eq!(code, 1, "{refused:?}: {err}");
        assert!(err.contains("--memory pmem"), "{err}");
    }
    let target = lab.scratch.path("nobody");
    let target = target.to_str().unwrap();
    let more = [
        "--to",
        "unix:x",
        "--target-qmp",
        target,
        "--target-socket",
        target,
    ];
    let (code, _, err) = lab.run("migrate", &more);
    assert_eq!(code, 1, "{err}");
    assert!(
        err.contains("virtio-pmem device vnplug-probe-pmemdev0"),
        "{err}"
    );
    assert_eq!(lab.qemu.ours(), all);

    let out = lab.ok("detach", &[]);
    assert!(
        out.starts_with("probe: detached; its memory device vnplug-probe-pmemdev0 stays"),
        "{out}"
    );
    assert_eq!(lab.qemu.ours(), ids(&["pmem0", "pmemdev0"]));
    assert_eq!(lab.daemon.vms(), [""; 0]);
    let (code, _, err) = lab.run("detach", &[]);
    assert_eq!(code, 1);
    assert!(err.contains("is not attached"), "{err}");

    // Another one, and then the other kind.
    let (code, _, err) = lab.run("attach", &pmem);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("vnplug-probe-pmemdev0 stays"), "{err}");
    let two = [
        "chr", "pmem0", "pmemdev0", "pmem1", "pmemdev1", "port", "ser",
    ];
    assert_eq!(lab.qemu.ours(), ids(&two));
    let out = lab.ok("detach", &[]);
    assert!(
        out.contains("pmemdev0, vnplug-probe-pmemdev1 stay"),
        "{out}"
    );
    lab.ok("attach", &["--memory", "ivshmem"]);
    let (code, _, err) = lab.run("attach", &pmem);
    assert_eq!(code, 1);
    assert!(err.contains("is attached with an ivshmem device"), "{err}");
    lab.ok("detach", &[]);

    // What fails behind it is taken back, and it is said that it stays.
    let buses = [&pmem[..], &["--bus", "rp1", "--bus", "nosuch"]].concat();
    let (code, _, err) = lab.run("attach", &buses);
    assert_eq!(code, 1);
    assert!(err.contains("vnplug-probe-pmemdev2 stays"), "{err}");
    let dead = [
        "pmem0", "pmemdev0", "pmem1", "pmemdev1", "pmem2", "pmemdev2",
    ];
    assert_eq!(lab.qemu.ours(), ids(&dead));
    assert_eq!(lab.daemon.vms(), [""; 0]);
}

#[test]
fn a_machine_without_room_for_pmem_is_told_which_line_to_change() {
    for (arguments, says) in [
        (
            vec!["-M".to_owned(), "pc".to_owned()],
            "-m SIZE,maxmem=MORE",
        ),
        (q35(1), "2 free PCIe ports are needed"),
    ] {
        let mut lab = Lab::new(&arguments);
        let (code, _, err) = lab.run("attach", &["--memory", "pmem"]);
        assert_eq!(code, 1, "{err}");
        assert!(err.contains(says), "{err}");
        assert_eq!(
            (lab.qemu.ours().len(), lab.daemon.vms().len()),
            (0, 0),
            "{err}"
        );
    }
}

#[test]
fn a_monitor_somebody_else_holds_is_named_as_such() {
    let lab = Lab::new(&["-M", "pc"]);
    let _holder = UnixStream::connect(&lab.qemu.qmp).unwrap();
    let (code, _, err) = lab.run("attach", &[]);
    assert_eq!(code, 1);
    assert!(
        err.starts_with("vnplug: ") && err.contains("second -qmp socket"),
        "{err}"
    );
}

#[test]
fn a_daemon_that_refuses_changes_nothing_and_its_words_are_escaped() {
    let mut lab = Lab::new(&["-M", "pc"]);
    let refusal = Message::Error {
        code: code::DENIED,
        text: "no \u{1b}[2J".into(),
    };
    lab.daemon.answer(17, refusal);
    let (code, _, err) = lab.run("attach", &[]);
    assert_eq!((code, err.as_str()), (1, "vnplug: no \\x1b[2J\n"));
    assert_eq!(lab.qemu.ours(), [""; 0]);

    let nobody = lab.scratch.path("nobody");
    let qmp = lab.qemu.qmp.to_str().unwrap();
    let command = vnplug(&nobody, &["attach", "qemu", "--name", "a", "--qmp", qmp]);
    let (code, _, err) = run(command);
    assert!(code == 1 && err.contains("start the daemon"), "{err}");
}

#[test]
fn a_qemu_whose_monitor_is_not_to_be_had_is_not_gone() {
    let lab = Lab::new(&["-M", "pc"]);
    lab.ok("attach", &[]);
    let path = lab.scratch.path("full");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let dial = || connect_within(&path, Duration::ZERO);
    let waiting: Vec<_> = std::iter::from_fn(|| dial().ok()).take(16).collect();
    let qmp = path.to_str().unwrap();
    let detach = || {
        let words = ["detach", "qemu", "--name", "probe", "--gone", "--qmp", qmp];
        run(vnplug(&lab.daemon.socket, &words))
    };
    let (code, _, err) = detach();
    assert!(
        code == 1 && err.contains("others hold this monitor"),
        "{err}"
    );
    assert_eq!(lab.daemon.vms(), ["probe"]);
    // The control: nobody listens there any more.
    drop((listener, waiting));
    let (code, out, err) = detach();
    assert_eq!(
        (code, out.as_str()),
        (0, "probe: has ended, and is forgotten\n"),
        "{err}"
    );
    assert_eq!(lab.daemon.vms(), [""; 0]);
}
