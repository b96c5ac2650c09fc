//! The hooks of Proxmox VE and libvirt, called as those call them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod killed;
mod played;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

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

/// Puts a script into the hook's path.
fn script(lab: &Lab, name: &str, text: &str) {
    let at = lab.dir().join("bin").join(name);
    fs::write(&at, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
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
    script(&lab, "logger", &format!("echo \"$@\" >>{}", log.display()));
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
    script(&lab, "virsh", "echo 'paused (migrating)'");
    script(&lab, "logger", &format!("echo \"$@\" >>{}", log.display()));
    call("new", uuid, ["started", "begin"]);
    let given_up = "not attached: it has been on its way from another host for 1 s";
    eventually("it is given up", || said().contains(given_up));
    assert_eq!(said().matches("attach qemu").count(), 2, "{}", said());
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
