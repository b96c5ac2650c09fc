//! `vnplug doctor` on this machine, with faults made for it, and without them: the controls.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use serde_json::Value;
use vnplug_testing::TestDir;

/// A network namespace with a veth, gone at the end.
struct Wire(String);

impl Wire {
    fn new() -> Self {
        let wire = Self(format!("vnplug-doctor-{}", std::process::id()));
        run(&["ip", "netns", "add", &wire.0]);
        wire.ip(&[
            "link", "add", "wire0", "type", "veth", "peer", "name", "wire1",
        ]);
        for end in ["wire0", "wire1"] {
            wire.ip(&["link", "set", end, "up"]);
        }
        wire
    }

    fn ip(&self, words: &[&str]) {
        run(&[&["ip", "-n", &self.0], words].concat());
    }

    /// Runs a command there.
    fn inside(&self, words: &[&str]) -> Output {
        let words = [&["ip", "netns", "exec", &self.0], words].concat();
        Command::new(words[0]).args(&words[1..]).output().unwrap()
    }

    /// What the doctor says of the interface, and whether it says that all works.
    fn ask(&self) -> (Value, Option<i32>) {
        let doctor = [
            env!("CARGO_BIN_EXE_vnplug"),
            "--socket",
            "/nonexistent/vnplug.sock",
            "doctor",
        ];
        let said = self.inside(&[&doctor[..], &["--role", "host", "--json", "wire0"]].concat());
        (
            serde_json::from_slice(&said.stdout).unwrap(),
            said.status.code(),
        )
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn run(words: &[&str]) {
    let done = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(done.status.success(), "{words:?}: {done:?}");
}

fn state(said: &Value, check: &str) -> String {
    let all = said["checks"].as_array().unwrap().iter();
    let found = { all }.find(|it| it["name"] == check);
    found.unwrap_or_else(|| panic!("{check} is not in {said}"))["state"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn faults_of_an_interface_are_found_and_mended_by_what_it_says() {
    let wire = Wire::new();
    run(&[
        "ip", "netns", "exec", &wire.0, "ethtool", "-K", "wire0", "gro", "on",
    ]);
    let (said, code) = wire.ask();
    assert_eq!(state(&said, "link-wire0"), "ok");
    assert_eq!(state(&said, "merging-wire0"), "warn");
    assert_eq!(state(&said, "xdp-wire0"), "ok");
    // Without a daemon it says so, and what asks it is skipped.
    assert_eq!((state(&said, "daemon").as_str(), code), ("FAIL", Some(6)));
    assert_eq!(state(&said, "traffic"), "skipped");
    assert_eq!(said["works"], false);

    let all = said["checks"].as_array().unwrap().iter();
    let merging = { all }.find(|it| it["name"] == "merging-wire0").unwrap();
    let cure = merging["cure"]
        .as_str()
        .unwrap()
        .split("    ")
        .next()
        .unwrap();
    let done = wire.inside(&["sh", "-c", cure]);
    assert!(done.status.success(), "{cure}: {done:?}");
    let (said, _) = wire.ask();
    assert_eq!(state(&said, "merging-wire0"), "ok");

    wire.ip(&["link", "set", "wire0", "down"]);
    let (said, _) = wire.ask();
    assert_eq!(state(&said, "link-wire0"), "FAIL");
    assert_eq!(state(&said, "merging-wire0"), "skipped");
}

#[test]
fn little_locked_memory_is_found() {
    let ask = |limit: &str| {
        let doctor = format!(
            "ulimit -l {limit} && exec {} --socket /nonexistent/vnplug.sock doctor --role host --json",
            env!("CARGO_BIN_EXE_vnplug")
        );
        let said = Command::new("sh").args(["-c", &doctor]).output().unwrap();
        // A machine may not let root have more than it has.
        let said: Value = serde_json::from_slice(&said.stdout).ok()?;
        assert_eq!(state(&said, "daemon"), "FAIL");
        let mut all = said["checks"].as_array().unwrap().iter();
        all.find(|it| it["name"] == "memlock").cloned()
    };
    let little = ask("64").unwrap();
    // A daemon of another test has limits of its own.
    let text = little["text"].as_str().unwrap();
    if !text.starts_with("the daemon") {
        assert!(text.starts_with("no daemon runs"), "{little}");
        assert_eq!(little["state"], "warn", "{little}");
        match ask("unlimited") {
            Some(all) => assert_eq!(all["state"], "ok", "{all}"),
            None => eprintln!("skipped: this machine raises no limit of locked memory"),
        }
    }
}

#[test]
fn a_bpf_filesystem_that_is_missing_is_mounted_when_it_may() {
    let vnplug = env!("CARGO_BIN_EXE_vnplug");
    let doctor = format!("{vnplug} --socket /nonexistent/vnplug.sock doctor --role host --json");
    let script = format!(
        "while umount /sys/fs/bpf 2>/dev/null; do :; done; {doctor}; {doctor} --fix; {doctor}"
    );
    let apart = ["--mount", "--propagation", "private", "sh", "-c", &script];
    let said = Command::new("unshare").args(apart).output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let said = said
        .lines()
        .map(|it| serde_json::from_str::<Value>(it).unwrap());
    let states: Vec<_> = said.map(|it| state(&it, "bpf-filesystem")).collect();
    assert_eq!(states, ["warn", "ok", "ok"]);
}

#[test]
fn a_module_that_is_missing_is_loaded_when_it_may() {
    let dir = TestDir::new("modprobe");
    // What the kernel does once it has the module.
    let loads = "touch /dev/net/tun";
    let fails = "echo 'modprobe: FATAL: Module tun not found.' >&2; exit 1";
    let ask = |what: &str| {
        let modprobe = dir.path("modprobe");
        let calls = dir.path("calls");
        let script = format!("#!/bin/sh\necho \"$@\" >>{}\n{what}\n", calls.display());
        fs::write(&modprobe, script).unwrap();
        fs::set_permissions(&modprobe, fs::Permissions::from_mode(0o755)).unwrap();
        let vnplug = env!("CARGO_BIN_EXE_vnplug");
        let doctor =
            format!("{vnplug} --socket /nonexistent/vnplug.sock doctor --role host --json");
        let calls = calls.display();
        let script = format!(
            "mkdir -p /dev/net && mount -t tmpfs none /dev/net && PATH={}:$PATH && >{calls} || exit
            {doctor}; cat {calls} >&2; {doctor} --fix; {doctor}; cat {calls} >&2",
            dir.0.display()
        );
        let apart = ["--mount", "--propagation", "private", "sh", "-c", &script];
        let said = Command::new("unshare").args(apart).output().unwrap();
        let states = String::from_utf8(said.stdout).unwrap();
        let states = { states.lines() }.map(|it| state(&serde_json::from_str(it).unwrap(), "tun"));
        let told = String::from_utf8(said.stderr).unwrap();
        let calls = { told.lines() }.filter(|it| !it.starts_with("vnplug: "));
        let calls = calls.map(str::to_owned).collect::<Vec<_>>();
        (states.collect::<Vec<_>>(), calls, told)
    };
    let (states, calls, told) = ask(loads);
    assert_eq!(states, ["warn", "ok", "ok"], "{told}");
    // It was called by `--fix` alone, once.
    assert_eq!(calls, ["tun"], "{told}");
    let (states, calls, told) = ask(fails);
    assert_eq!(states, ["warn", "warn", "warn"], "{told}");
    assert_eq!(calls, ["tun"], "{told}");
    let is_told = told.contains("tun: cannot be mended") && told.contains("Module tun not found");
    assert!(is_told, "{told}");
}
