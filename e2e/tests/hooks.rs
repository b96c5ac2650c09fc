//! The hooks of Proxmox VE and libvirt, called as those call them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use vnplug_e2e::daemon::{Daemon, counted, label, program};
use vnplug_e2e::{Lab, Qemu, QemuConfig};
use vnplug_testing::eventually;

const HOOKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/vm");

/// A hook that finds this `vnplug`, and the options of VMs in `lab`/vms.
fn hook(lab: &Lab, file: &str) -> Command {
    let mut command = Command::new(Path::new(HOOKS).join(file));
    let path = std::env::var("PATH").unwrap();
    command
        .env(
            "PATH",
            format!("{}:{path}", lab.dir().join("bin").display()),
        )
        .env("VNPLUG_VMS", lab.dir().join("vms"))
        .env("VNPLUG_PVE_RUN", lab.dir())
        .stdin(Stdio::null());
    command
}

/// The hook's files: which `vnplug` it runs, and the options of one VM.
fn set_up(lab: &Lab, vnplug: &Path, vm: &str, options: &str) {
    for dir in ["bin", "vms"] {
        fs::create_dir_all(lab.dir().join(dir)).unwrap();
    }
    symlink(vnplug, lab.dir().join("bin/vnplug")).unwrap();
    fs::write(lab.dir().join("vms").join(vm), options).unwrap();
}

fn succeeded(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

fn vms(daemon: &Daemon) -> usize {
    let counters = daemon.audit();
    counters.iter().filter(|it| it.kind == "vm").count()
}

#[test]
fn a_vm_of_proxmox_is_attached_while_it_runs() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=100"]).unwrap();
    let guest = Qemu::boot(&lab, QemuConfig::default()).unwrap_or_else(|error| panic!("{error}"));
    let options = "# what it may see\n--allow 'lab:not port 22'\n--pool 16M\n";
    set_up(&lab, &program("vnplug").unwrap(), "100", options);
    let qmp = lab.dir().join("100.qmp");
    let call = |vmid: &str, phase: &str| {
        let mut hook = hook(&lab, "proxmox-hook");
        let called = hook
            .env("VNPLUG_SOCKET", daemon.socket())
            .args([vmid, phase]);
        succeeded(&called.output().unwrap())
    };
    // Before there is a QEMU, and of a VM that nobody configured: nothing, and no complaint.
    assert_eq!(call("100", "pre-start"), "");
    assert_eq!(call("101", "post-start"), "");
    symlink(guest.qmp_path().unwrap(), &qmp).unwrap();
    let said = call("100", "post-start");
    assert!(said.contains("100: attached: pool of 16 MiB"), "{said}");
    assert_eq!(label(counted(&daemon.audit(), "vm"), "kind"), "qemu");
    // A migration, or a hook that was killed, calls it once more.
    assert!(call("100", "post-start").contains("attached already"));
    call("100", "pre-stop");
    assert_eq!(vms(&daemon), 0);
    call("100", "post-stop");

    // A hook that was killed half way: the next one ends what it began.
    let mut killed = hook(&lab, "proxmox-hook");
    killed.env("VNPLUG_SOCKET", daemon.socket());
    let mut killed = killed.args(["100", "post-start"]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(30));
    killed.kill().unwrap();
    killed.wait().unwrap();
    let mut last = String::new();
    eventually("it is attached", || {
        last = call("100", "post-start");
        last.contains("attached")
    });
    // A QEMU that dies is not told to stop.
    guest.kill();
    call("100", "post-stop");
    assert_eq!(vms(&daemon), 0, "after {last}");
}

#[test]
fn a_vm_of_proxmox_that_is_migrated_is_attached_when_it_is_there() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=100"]).unwrap();
    let config = QemuConfig::default();
    let guest = Qemu::boot(&lab, QemuConfig::default()).unwrap_or_else(|error| panic!("{error}"));
    set_up(
        &lab,
        &program("vnplug").unwrap(),
        "100",
        "--allow lab --pool 16M\n",
    );
    // What goes to the journal.
    let log = lab.dir().join("log");
    let logger = lab.dir().join("bin/logger");
    fs::write(
        &logger,
        format!("#!/bin/sh\necho \"$@\" >>{}\n", log.display()),
    )
    .unwrap();
    fs::set_permissions(&logger, fs::Permissions::from_mode(0o755)).unwrap();
    let call = |phase: &str, comes: &str| {
        let mut hook = hook(&lab, "proxmox-hook");
        hook.env("VNPLUG_SOCKET", daemon.socket())
            .env("VNPLUG_COMES", comes);
        succeeded(&hook.args(["100", phase]).output().unwrap())
    };
    let qmp = lab.dir().join("100.qmp");
    let at = |guest: &vnplug_e2e::Guest| {
        let _ = fs::remove_file(&qmp);
        symlink(guest.qmp_path().unwrap(), &qmp).unwrap();
    };
    at(&guest);
    assert!(call("post-start", "60").contains("100: attached: "));
    // As an operator does before `qm migrate`, which itself calls nothing here.
    call("pre-stop", "60");
    assert_eq!(vms(&daemon), 0);

    // It waits no longer than it is told.
    let (there, uri) = Qemu::incoming(&lab, &config, &guest).unwrap_or_else(|e| panic!("{e}"));
    at(&there);
    let comes = "comes from another host, and is attached when it is here";
    assert!(call("post-start", "0").contains(comes));
    let said = || fs::read_to_string(&log).unwrap_or_default();
    eventually("it is given up", || {
        said().contains("not attached: it has been on its way from another host for 0 s")
    });
    // Proxmox is not kept, nor is its monitor.
    assert!(call("post-start", "60").contains(comes));
    assert_eq!(vms(&daemon), 0);
    let migrate = serde_json::json!({"uri": uri});
    guest.qmp().unwrap().execute("migrate", migrate).unwrap();
    eventually("it is attached where it is", || vms(&daemon) == 1);
    eventually("that is said", || {
        said().contains("100: attached: pool of 16 MiB")
    });
    call("post-stop", "60");
}

/// Kills a hook after this time, with all that it has started, as a machine's power fails; whether it was not over before.
fn killed_after(mut hook: Command, time: Duration) -> bool {
    let mut child = hook.process_group(0).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(time);
    let group = Pid::from_raw(child.id() as i32).unwrap();
    let was_there = kill_process_group(group, Signal::KILL).is_ok();
    let status = child.wait().unwrap();
    // Of a hook that went on by itself the group is left.
    status.signal().is_some() || was_there
}

/// As many kills as usual, or with `VNPLUG_LONG=1` as the long run has.
fn steps() -> u32 {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 40,
        None => 5,
    }
}

#[test]
fn a_hook_that_is_killed_at_any_step_is_made_good_by_the_next_one() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=100"]).unwrap();
    let guest = Qemu::boot(&lab, QemuConfig::default()).unwrap_or_else(|error| panic!("{error}"));
    let options = "--allow lab --pool 16M\n";
    set_up(&lab, &program("vnplug").unwrap(), "100", options);
    symlink(guest.qmp_path().unwrap(), lab.dir().join("100.qmp")).unwrap();
    let hook = |phase: &str| {
        let mut hook = hook(&lab, "proxmox-hook");
        hook.env("VNPLUG_SOCKET", daemon.socket());
        hook.args(["100", phase]);
        hook
    };
    let call = |phase: &str| succeeded(&hook(phase).output().unwrap());
    let timed = |phase: &str| {
        let begun = Instant::now();
        (call(phase), begun.elapsed())
    };
    let killed_after = |phase: &str, time: Duration| killed_after(hook(phase), time);
    // A detach of this guest waits: nothing in it answers.
    let (said, attaching) = timed("post-start");
    assert!(said.contains("attached"), "{said}");
    let (_, detaching) = timed("pre-stop");
    assert_eq!(vms(&daemon), 0);
    let mut killed = 0;
    for step in 0..steps() {
        let part = |whole: Duration| whole * step / steps();
        killed += u32::from(killed_after("post-start", part(attaching)));
        let said = call("post-start");
        assert!(said.contains("attached"), "step {step}: {said}");
        assert_eq!(vms(&daemon), 1, "step {step}");
        killed += u32::from(killed_after("pre-stop", part(detaching)));
        // Twice is once.
        call("pre-stop");
        call("pre-stop");
        assert_eq!(vms(&daemon), 0, "step {step}");
    }
    assert!(
        killed >= steps(),
        "only {killed} were killed before they were done"
    );
    assert!(call("post-start").contains("attached"));
    guest.kill();
    // QEMU has gone by itself, and so has who should have said so.
    killed_after("post-stop", Duration::from_millis(1));
    call("post-stop");
    assert_eq!(vms(&daemon), 0);
    let pools = fs::read_dir(daemon.pools()).unwrap();
    assert_eq!(pools.count(), 0, "memory of nobody's");
}

#[test]
fn a_domain_of_libvirt_is_attached_by_itself_when_the_hook_is_over() {
    let lab = Lab::new().unwrap();
    // It says what it was asked; libvirt is not there.
    let fake = lab.dir().join("fake");
    let log = lab.dir().join("log");
    fs::write(
        &fake,
        format!("#!/bin/sh\nsleep 0.2; echo \"$@\" >>{}\n", log.display()),
    )
    .unwrap();
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).unwrap();
    let uuid = "6f5b4c1e-0001-4c7e-9d1f-0123456789ab";
    set_up(&lab, &fake, uuid, "--name probe --allow 'eth1:not port 22'");
    let call = |domain: &str, uuid: &str, operation: [&str; 2]| {
        let mut hook = hook(&lab, "libvirt-hook");
        hook.args([domain, operation[0], operation[1], "-"]);
        hook.env("VNPLUG_COMES", "1");
        let pipes = hook
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = pipes.spawn().unwrap();
        let mut xml = child.stdin.take().unwrap();
        writeln!(
            xml,
            "<domain><name>{domain}</name>\n<uuid>{uuid}</uuid></domain>"
        )
        .unwrap();
        drop(xml);
        // Its pipes close: libvirt does not wait for what it left running.
        assert_eq!(succeeded(&child.wait_with_output().unwrap()), "");
    };
    let said = || fs::read_to_string(&log).unwrap_or_default();
    call(
        "other",
        "00000000-0000-0000-0000-000000000000",
        ["started", "begin"],
    );
    call("old", uuid, ["prepare", "begin"]);
    call("old", uuid, ["started", "begin"]);
    assert_eq!(said(), "");
    let attach = format!(
        "attach qemu --libvirt {uuid} --connect qemu:///system --name probe --allow eth1:not port 22 --guest-wait 0s\n"
    );
    eventually("it is attached", || said() == attach);
    // Renamed: the file is the same.
    call("new", uuid, ["release", "end"]);
    let detach = "detach qemu --qmp /nonexistent --name probe --gone\n";
    assert_eq!(said(), format!("{attach}{detach}"));

    // One that does not come, as libvirt sees it, is not waited for without end.
    for (program, script) in [
        ("virsh", "echo 'paused (migrating)'".to_owned()),
        ("logger", format!("echo \"$@\" >>{}", log.display())),
    ] {
        let at = lab.dir().join("bin").join(program);
        fs::write(&at, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
    }
    call("new", uuid, ["started", "begin"]);
    let given_up = "not attached: it has been on its way from another host for 1 s";
    eventually("it is given up", || said().contains(given_up));
    assert_eq!(said().matches("attach qemu").count(), 2, "{}", said());
}

/// A machine that QEMU has made and that does not run; what is plugged is there all the same. Ends with its test.
struct Bare(Child);

impl Bare {
    fn start(qmp: &Path) -> Self {
        let _ = fs::remove_file(qmp);
        let monitor = format!("unix:{},server=on,wait=off", qmp.display());
        let child = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "qemu-system-x86_64",
                "-S",
                "-M",
                "pc",
                "-m",
                "32",
            ])
            .args([
                "-accel",
                "tcg",
                "-display",
                "none",
                "-nodefaults",
                "-qmp",
                &monitor,
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually("QEMU has a monitor", || UnixStream::connect(qmp).is_ok());
        Self(child)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `virsh` that has one domain, whose monitor is at QMP, if it runs.
const VIRSH: &str = r#"#!/usr/bin/python3 -SE
import json, socket, sys
if sys.argv[-1] == "uri":
    sys.exit(print("qemu:///system"))
try:
    monitor = socket.socket(socket.AF_UNIX)
    monitor.connect("QMP")
except OSError:
    sys.exit("error: Requested operation is not valid: domain is not running")
lines = monitor.makefile("rw")
lines.readline()
for line in ('{"execute": "qmp_capabilities"}', sys.argv[-1]):
    print(line, file=lines, flush=True)
    answer = lines.readline()
    while "event" in json.loads(answer):
        answer = lines.readline()
print(answer, end="")
"#;

#[test]
fn a_domain_starts_and_is_attached_whenever_its_hook_was_killed() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,pps=100"]).unwrap();
    // No libvirt is there to say as whom QEMU runs.
    let options = "--name probe --allow lab --pool 1M --qemu-user 0:0\n";
    set_up(&lab, &program("vnplug").unwrap(), "probe", options);
    let (qmp, virsh) = (lab.dir().join("qmp"), lab.dir().join("bin/virsh"));
    fs::write(&virsh, VIRSH.replace("QMP", &qmp.display().to_string())).unwrap();
    fs::set_permissions(&virsh, fs::Permissions::from_mode(0o755)).unwrap();
    let hook = |operation: &str, stage: &str| {
        let mut hook = hook(&lab, "libvirt-hook");
        hook.env("VNPLUG_SOCKET", daemon.socket());
        hook.args(["probe", operation, stage, "-"]);
        hook
    };
    // As libvirt, which ends a domain whose hook fails.
    let call = |operation: &str, stage: &str| {
        let begun = Instant::now();
        assert_eq!(succeeded(&hook(operation, stage).output().unwrap()), "");
        begun.elapsed()
    };
    let is_attached = || {
        let all = daemon.audit();
        let vm = all.iter().find(|it| it.kind == "vm");
        vm.is_some_and(|vm| label(vm, "state") == "connected")
    };
    let starts = || {
        for operation in ["prepare", "start"] {
            call(operation, "begin");
        }
        Bare::start(&qmp)
    };
    let machine = starts();
    let begun = Instant::now();
    call("started", "begin");
    eventually("it is attached", is_attached);
    let attaching = begun.elapsed();
    drop(machine);
    let detaching = call("release", "end");
    assert_eq!(vms(&daemon), 0);
    let mut killed = 0;
    let steps = steps() * 3 / 5;
    for step in 0..steps {
        let part = |whole: Duration| whole * step / steps;
        let machine = starts();
        // It waits a second before it does anything.
        let time = Duration::from_secs(1) + part(attaching.saturating_sub(Duration::from_secs(1)));
        killed += u32::from(killed_after(hook("started", "begin"), time));
        // libvirt comes back, and the machine runs on.
        call("reconnect", "begin");
        eventually("it is attached after all", is_attached);
        assert_eq!(vms(&daemon), 1, "step {step}");
        drop(machine);
        killed += u32::from(killed_after(hook("release", "end"), part(detaching)));
        // Whoever was not forgotten is attached anew when it starts, for it is another QEMU.
        let machine = starts();
        call("started", "begin");
        eventually("it is attached again", is_attached);
        assert_eq!(vms(&daemon), 1, "step {step}");
        drop(machine);
        call("release", "end");
        assert_eq!(vms(&daemon), 0, "step {step}");
    }
    assert!(
        killed >= steps,
        "only {killed} were killed before they were done"
    );
    let pools = fs::read_dir(daemon.pools()).unwrap();
    assert_eq!(pools.count(), 0, "memory of nobody's");
}

/// Whatever the file says, the VM starts and stops; a comment behind an option, and another way to write one, are right.
#[test]
fn a_file_that_is_wrong_keeps_no_vm_from_starting() {
    let lab = Lab::new().unwrap();
    let (fake, log) = (lab.dir().join("fake"), lab.dir().join("log"));
    fs::write(
        &fake,
        format!("#!/bin/sh\necho \"$@\" >>{}\n", log.display()),
    )
    .unwrap();
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).unwrap();
    set_up(&lab, &fake, "100", "--allow 'eth1\n--pool 1M\n");
    let call = |file: &str, words: &[&str]| {
        let mut hook = hook(&lab, file);
        succeeded(&hook.args(words).output().unwrap())
    };
    for phase in ["pre-start", "post-start", "pre-stop", "post-stop"] {
        let said = call("proxmox-hook", &["100", phase]);
        assert_eq!(
            said.contains("is wrong"),
            phase != "pre-start",
            "{phase}: {said}"
        );
    }
    for [operation, stage] in [
        ["prepare", "begin"],
        ["start", "begin"],
        ["started", "begin"],
        ["reconnect", "begin"],
        ["release", "end"],
    ] {
        call("libvirt-hook", &["100", operation, stage, "-"]);
    }
    assert!(!log.exists());
    let right = "--name=probe # of this one\n\n# --group x\n--allow 'eth1:not port 22' --pool 1M";
    fs::write(lab.dir().join("vms/100"), right).unwrap();
    call("proxmox-hook", &["100", "post-start"]);
    call("proxmox-hook", &["100", "pre-stop"]);
    let qmp = lab.dir().join("100.qmp");
    let expected = format!(
        "attach qemu --qmp {qmp} --name=probe --allow eth1:not port 22 --pool 1M --guest-wait 0s\n\
         detach qemu --qmp {qmp} --name probe --timeout 2s --gone\n",
        qmp = qmp.display()
    );
    assert_eq!(fs::read_to_string(&log).unwrap(), expected);
}

/// Puts a script into the hook's path.
fn script(lab: &Lab, name: &str, text: &str) {
    let at = lab.dir().join("bin").join(name);
    fs::write(&at, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A lab with such a `vnplug`, whose words go to `said`, as do the journal's.
fn played(vnplug: &str) -> Lab {
    let lab = Lab::new().unwrap();
    fs::create_dir(lab.dir().join("bin")).unwrap();
    set_up(
        &lab,
        Path::new("fake"),
        "100",
        "--guest-agent /run/100.qga\n",
    );
    script(&lab, "fake", vnplug);
    script(&lab, "logger", r#"echo "$@" >>"$LAB/said""#);
    // The machine's monitor, which nobody asks here.
    drop(UnixListener::bind(lab.dir().join("100.qmp")).unwrap());
    lab
}

/// As Proxmox or libvirt calls it; what it says itself.
fn call(lab: &Lab, file: &str, words: &[&str], env: &[(&str, &str)]) -> String {
    let mut hook = hook(lab, file);
    hook.env("LAB", lab.dir()).envs(env.iter().copied());
    succeeded(&hook.args(words).output().unwrap())
}

fn said(lab: &Lab) -> String {
    fs::read_to_string(lab.dir().join("said")).unwrap_or_default()
}

/// A daemon that is not told that a machine is gone keeps its memory: somebody has to know.
#[test]
fn a_release_that_fails_is_told_and_one_that_was_done_before_is_not() {
    let lab = played(r#"echo "$SAYS" >&2; exit "$CODE""#);
    let file = lab.dir().join("vms/100");
    fs::write(file, "--name \"it's one\"\n").unwrap();
    let told = |says: &str, code: &str| {
        let env = [("SAYS", says), ("CODE", code)];
        call(&lab, "libvirt-hook", &["100", "release", "end", "-"], &env);
        call(&lab, "proxmox-hook", &["100", "post-stop"], &env);
        let told = said(&lab);
        let _ = fs::remove_file(lab.dir().join("said"));
        told
    };
    let away = told("vnplug: nobody listens", "1");
    let complaints = away.matches("not forgotten: vnplug: nobody listens");
    assert_eq!(complaints.count(), 2, "{away}");
    // What is to be typed then, unless it runs again.
    for typed in [
        r"vnplug detach qemu --qmp /nonexistent --name 'it'\''s one' --gone",
        "proxmox-hook' 100 post-stop",
    ] {
        assert!(away.contains(typed), "{away}");
    }
    assert_eq!(away.matches("If it does not run again: ").count(), 2);
    assert_eq!(told("", "0"), "");
}

/// It does not answer at once; who waits longer begins, and ends when the test says so.
const STARTS_SLOWLY: &str = r#"case $* in
*'--guest-wait 0s') echo '100: attached'; echo 'no answer yet' >&2; exit 8 ;;
attach*)
    echo "$@" >>"$LAB/said"
    echo $$ >"$LAB/waits"
    until [ -e "$LAB/answers" ]; do sleep 0.02; done
    echo 'pushed' ;;
*) echo "$@" >>"$LAB/said" ;;
esac"#;

/// Whether a process has not ended.
fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    // Behind the name in brackets.
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// A guest has no agent before it has started, and nobody who starts it waits for that.
#[test]
fn a_guest_that_starts_slowly_is_waited_for_and_not_by_who_starts_it() {
    let lab = played(STARTS_SLOWLY);
    let answers = lab.dir().join("answers");
    let waits = || fs::read_to_string(lab.dir().join("waits")).unwrap_or_default();
    let start = |file: &str| {
        let words: &[&str] = match file {
            "proxmox-hook" => &["100", "post-start"],
            _ => &["100", "started", "begin", "-"],
        };
        let told = call(&lab, file, words, &[]);
        eventually("it goes on in the background", || waits().ends_with('\n'));
        told
    };
    for file in ["proxmox-hook", "libvirt-hook"] {
        let told = start(file);
        if file == "proxmox-hook" {
            let words = "100: attached\nno answer yet; the guest is waited for in the background";
            assert!(told.contains(words), "{told}");
        }
        assert!(said(&lab).contains("--guest-wait 5m"), "{}", said(&lab));
        fs::write(&answers, "").unwrap();
        eventually("it is done", || said(&lab).contains("100: pushed"));
        for file in ["answers", "waits", "said"] {
            fs::remove_file(lab.dir().join(file)).unwrap();
        }
    }
    // A machine that is to stop, or to move, is not plugged into any more.
    for phase in ["pre-stop", "post-stop", "post-start"] {
        start("proxmox-hook");
        let pid = waits();
        assert!(runs(&pid));
        fs::remove_file(lab.dir().join("waits")).unwrap();
        call(&lab, "proxmox-hook", &["100", phase], &[]);
        eventually("it ends", || !runs(&pid));
        let detached = said(&lab).contains("detach qemu");
        assert_eq!(detached, phase != "post-start", "{}", said(&lab));
        // The control: one that still ran would say so now. After post-start another one waits.
        if phase != "post-start" {
            fs::write(&answers, "").unwrap();
            std::thread::sleep(Duration::from_millis(200));
            assert!(!said(&lab).contains("pushed"), "{phase}: {}", said(&lab));
            fs::remove_file(&answers).unwrap();
        }
        let _ = fs::remove_file(lab.dir().join("said"));
    }
    call(&lab, "proxmox-hook", &["100", "post-stop"], &[]);
}

/// What is attached is not attached again because its guest does not take the agent.
#[test]
fn what_cannot_be_put_into_a_guest_is_told_once_and_what_cannot_be_attached_is_tried_again() {
    let lab = played(r#"echo "$@" >>"$LAB/tries"; echo "ends with $CODE"; exit "$CODE""#);
    for (file, words) in [
        ("libvirt-hook", &["100", "started", "begin", "-"][..]),
        ("proxmox-hook", &["100", "in-background"]),
    ] {
        for (code, tries) in [("0", 1), ("7", 1), ("8", 1), ("1", 5)] {
            call(&lab, file, words, &[("CODE", code)]);
            let ends = format!("ends with {code}");
            eventually("it gives up", || said(&lab).contains(&ends));
            let made = fs::read_to_string(lab.dir().join("tries")).unwrap();
            // libvirt's begins without waiting for the guest.
            let tries = tries + usize::from(file == "libvirt-hook" && code == "8");
            assert_eq!(made.lines().count(), tries, "{file} {code}: {made}");
            let failed = said(&lab).contains("not attached");
            assert_eq!(failed, code == "1", "{}", said(&lab));
            for file in ["tries", "said"] {
                fs::remove_file(lab.dir().join(file)).unwrap();
            }
        }
    }
}
