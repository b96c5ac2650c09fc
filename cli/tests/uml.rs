//! `attach uml` with a script in the place of the kernel: what it inherits, and what happens when
//! either side ends. Booting a real one is the business of the end-to-end tests.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use vnplug_testing::{TestDir, eventually};

use support::{Daemon, finish, read_some, run, vnplug};

/// Finds N in `ssl0=fd:N` among its arguments.
const FIND_FD: &str = "#!/bin/sh
for word; do case $word in ssl0=fd:*) fd=${word#ssl0=fd:};; esac; done
";

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn script(scratch: &TestDir, body: &str) -> PathBuf {
    let path = scratch.path("linux");
    fs::write(&path, format!("{FIND_FD}{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn attach(daemon: &Daemon, more: &[&str], linux: &Path) -> Command {
    let fixed = ["attach", "uml", "--name", "probe"];
    let linux = ["--", linux.to_str().unwrap(), "mem=64M"];
    vnplug(&daemon.socket, &[&fixed, more, &linux].concat())
}

#[test]
fn the_guest_inherits_the_channel_and_its_exit_code_is_ours() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    let linux = script(&scratch, "echo \"$@\"; echo hello >&$fd; exit 7");
    let (code, out, err) = run(attach(&daemon, &["--pool", "4M"], &linux));
    assert_eq!(code, 7, "{err}");
    let pool = scratch.path("probe.pool");
    let start = format!("mem=64M iomem=mmapper,{} ssl0=fd:", pool.display());
    assert!(
        out.starts_with(&start) && out.trim().ends_with("vnplug=ttyS0"),
        "{out}"
    );
    let (name, channel) = daemon.take_adopted().unwrap();
    assert_eq!(name, "probe");
    assert_eq!(read_some(channel, Duration::from_secs(60)), b"hello\n");
    assert_eq!(daemon.vms(), [""; 0], "the VM is forgotten when it ends");
}

#[test]
fn printing_starts_nothing_and_leaves_nothing() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    let (code, out, err) = run(attach(&daemon, &["--print"], &scratch.path("absent")));
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("ssl0=fd:N vnplug=ttyS0"), "{out}");
    assert_eq!(daemon.vms(), [""; 0]);
}

#[test]
fn a_command_that_cannot_start_is_an_error_and_leaves_nothing() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    let (code, _, err) = run(attach(&daemon, &[], &scratch.path("absent")));
    assert!(code == 1 && err.contains("No such file"), "{err}");
    assert_eq!(daemon.vms(), [""; 0]);
}

#[test]
fn what_is_to_be_preloaded_must_exist_and_comes_before_the_rest() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    let linux = script(&scratch, "echo \"$LD_PRELOAD\"");
    let library = scratch.path("extra.so");
    let preload = |path: &Path| {
        let mut command = attach(&daemon, &[], &linux);
        command
            .env("VNPLUG_UML_PRELOAD", path)
            .env("LD_PRELOAD", "/absent/other.so");
        run(command)
    };
    let (code, _, err) = preload(&library);
    assert!(code == 1 && err.contains("VNPLUG_UML_PRELOAD"), "{err}");
    assert_eq!(daemon.vms(), [""; 0]);
    // The loader notes that neither is a library, and goes on.
    fs::write(&library, "").unwrap();
    let (code, out, err) = preload(&library);
    assert_eq!(code, 0, "{err}");
    assert_eq!(
        out.trim(),
        format!("{}:/absent/other.so", library.display())
    );
}

#[test]
fn a_restarted_daemon_gets_the_same_channel_again() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    let linux = script(&scratch, "read line <&$fd; echo \"$line\" >&$fd");
    let mut command = attach(&daemon, &[], &linux);
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("adopted", || daemon.take_adopted().is_some());
    daemon.restart();
    let mut again = None;
    eventually("adopted again", || {
        again = again.take().or_else(|| daemon.take_adopted());
        again.is_some()
    });
    assert_eq!(daemon.vms(), ["probe"]);
    let (_, channel) = again.unwrap();
    rustix::io::write(&channel, b"still here\n").unwrap();
    let (code, _, err) = finish(child);
    assert_eq!(code, 0, "{err}");
    assert!(
        err.contains("the daemon went away") && err.contains("is back"),
        "{err}"
    );
    assert_eq!(read_some(channel, Duration::from_secs(60)), b"still here\n");
}

#[test]
fn signals_are_passed_on() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    let linux = script(
        &scratch,
        "trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done",
    );
    let mut command = attach(&daemon, &[], &linux);
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("adopted", || daemon.take_adopted().is_some());
    // The script needs a moment until its trap is set; a signal before that ends it with 143.
    thread::sleep(Duration::from_millis(500));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let (code, _, err) = finish(child);
    assert!(code == 9 || code == 143, "{code}: {err}");
    assert_eq!(daemon.vms(), [""; 0]);
}
