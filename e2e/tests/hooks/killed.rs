//! Hooks that are killed, as a machine's power fails: the next one makes good what they left.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use vnplug_e2e::daemon::{Daemon, label, program};
use vnplug_e2e::{Lab, Qemu, QemuConfig};
use vnplug_testing::eventually;

use super::{hook, set_up, succeeded, vms};

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
