//! `attach qemu --libvirt` and `detach`: a real QEMU behind a `virsh` of our own, which takes the
//! same words, forwards the JSON and prints QEMU's answer, as libvirt's does.

mod support;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread;

use serde_json::{Value, json};
use support::{Daemon, Qemu, q35, run, vnplug};
use vnplug_ring::control::{Message, VmReady};
use vnplug_testing::TestDir;

/// Two FIFOs lead to the thread that holds QEMU's monitor.
const VIRSH: &str = r#"#!/bin/sh
dir=$(dirname "$0")
echo "$@" >>"$dir/calls"
case "$*" in
    *" uri") echo "${URI:-qemu:///system}"; exit ;;
    *--domain=nosuch*)
        printf "error: failed to get domain 'nosuch'\n\n" >&2; exit 1 ;;
    *--domain=off*)
        echo "error: Requested operation is not valid: domain is not running" >&2; exit 1 ;;
    *--domain=odd*) echo "not what QEMU says"; exit ;;
    "--quiet --connect=qemu:///lab qemu-monitor-command --domain=vm --cmd {"*) ;;
    *) echo "error: unexpected words: $*" >&2; exit 1 ;;
esac
for json; do :; done
printf '%s\n' "$json" >"$dir/request"
cat "$dir/answer"
"#;

struct Lab {
    daemon: Daemon,
    qemu: Qemu,
    scratch: TestDir,
}

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
impl Lab {
    fn new(arguments: &[String]) -> Self {
        let scratch = TestDir::new("cli");
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let qemu = Qemu::start(&scratch, &arguments);
        let fifos = ["request", "answer"].map(|name| scratch.path(name));
        assert!(
            Command::new("mkfifo")
                .args(&fifos)
                .status()
                .unwrap()
                .success()
        );
        fs::write(scratch.path("virsh"), VIRSH).unwrap();
        fs::set_permissions(scratch.path("virsh"), Permissions::from_mode(0o755)).unwrap();
        forward(UnixStream::connect(&qemu.qmp).unwrap(), fifos);
        Self {
            daemon: Daemon::start(&scratch),
            qemu,
            scratch,
        }
    }

    fn command(&self, verb: &str, domain: &str, more: &[&str]) -> Command {
        let fixed = [verb, "qemu", "--name", "probe", "--libvirt", domain];
        let uri = ["--connect", "qemu:///lab"];
        let mut command = vnplug(&self.daemon.socket, &[&fixed, &uri[..], more].concat());
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.scratch.0.display()));
        command
    }

    fn run(&self, verb: &str, more: &[&str]) -> (i32, String, String) {
        run(self.command(verb, "vm", more))
    }

    fn ok(&self, verb: &str, more: &[&str]) -> String {
        let (code, out, err) = self.run(verb, more);
        assert_eq!(code, 0, "{verb}: {out}{err}");
        out
    }
}

/// Sends each line of the first FIFO to QEMU and its answer into the second, until QEMU ends.
#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn forward(monitor: UnixStream, [request, answer]: [std::path::PathBuf; 2]) {
    let mut lines = BufReader::new(monitor.try_clone().unwrap()).lines();
    let mut ask = move |line: &str| -> Option<String> {
        (&monitor).write_all(line.as_bytes()).ok()?;
        lines.by_ref().map_while(Result::ok).find(|line| {
            let value: Value = serde_json::from_str(line).unwrap();
            value.get("return").is_some() || value.get("error").is_some()
        })
    };
    ask(r#"{"execute":"qmp_capabilities"}"#).unwrap();
    thread::spawn(move || {
        while let Ok(line) = fs::read_to_string(&request) {
            let Some(reply) = ask(&line) else { return };
            if fs::write(&answer, reply + "\n").is_err() {
                return;
            }
        }
    });
}

fn pc() -> [String; 2] {
    ["-M", "pc"].map(str::to_owned)
}

const ROOT: [&str; 2] = ["--qemu-user", "0:0"];

#[test]
fn libvirts_monitor_attaches_and_detaches_without_events() {
    let mut lab = Lab::new(&q35(3));
    let out = lab.ok("attach", &["--pool", "2M", "--qemu-user", "0:0"]);
    assert!(out.starts_with("probe: attached: pool of 2 MiB"), "{out}");
    let all = ["chr", "mem", "port", "ser", "shm"].map(|part| format!("vnplug-probe-{part}"));
    assert_eq!(lab.qemu.ours(), all);
    let path = json!({"path": "/machine/peripheral/rp3/rp3"});
    let last = lab.qemu.ask("qom-list", path).to_string();
    assert!(last.contains("link<ivshmem-plain>"), "{last}");

    let out = lab.ok("attach", &["--pool", "2M"]);
    assert!(out.contains("attached already"), "{out}");
    assert_eq!(lab.ok("detach", &[]), "probe: detached\n");
    assert_eq!(lab.qemu.ours(), [""; 0]);
    assert_eq!(lab.daemon.vms(), [""; 0]);
}

#[test]
fn a_guest_that_does_not_let_go_is_given_its_time_and_no_more() {
    let mut lab = Lab::new(&pc());
    lab.ok("attach", &ROOT);
    let (code, _, err) = lab.run("detach", &["--timeout", "300ms"]);
    assert_eq!(code, 4, "{err}");
    assert!(err.contains("has not let go"), "{err}");
    let shm = "vnplug-probe-shm".to_owned();
    assert!(lab.qemu.ours().contains(&shm));
}

#[test]
fn on_pc_the_last_slots_are_taken_for_libvirt_takes_the_first() {
    let mut lab = Lab::new(&pc());
    lab.ok("attach", &ROOT);
    let buses = lab.qemu.ask("query-pci", json!({}));
    let devices = buses["return"][0]["devices"].as_array().unwrap();
    let slot = |id: &str| {
        let device = devices.iter().find(|device| device["qdev_id"] == id);
        device.unwrap()["slot"].as_u64()
    };
    assert_eq!(slot("vnplug-probe-shm"), Some(31));
    assert_eq!(slot("vnplug-probe-ser"), Some(30));
}

#[test]
fn qemus_refusal_comes_through_and_is_rolled_back() {
    let mut lab = Lab::new(&q35(3));
    let more = [&ROOT[..], &["--bus", "rp1", "--bus", "nosuch"]].concat();
    let (code, _, err) = lab.run("attach", &more);
    assert_eq!(code, 1);
    let words = "vnplug-probe-ser: QEMU refused device_add: Bus 'nosuch' not found";
    assert!(err.contains(words), "{err}");
    assert!(err.contains("nothing was changed"), "{err}");
    assert_eq!((lab.qemu.ours().len(), lab.daemon.vms().len()), (0, 0));
}

#[test]
fn a_qemu_whose_user_is_not_found_needs_the_user_named() {
    let mut lab = Lab::new(&q35(2));
    let (code, _, err) = lab.run("attach", &[]);
    assert_eq!(code, 1);
    assert!(err.contains("give --qemu-user"), "{err}");
    assert_eq!((lab.qemu.ours().len(), lab.daemon.vms().len()), (0, 0));

    // A user's own libvirt runs QEMU as that user, who is us.
    let mut session = lab.command("attach", "vm", &[]);
    session.env("URI", "qemu:///session");
    let (code, _, err) = run(session);
    assert_eq!(code, 0, "{err}");
}

#[test]
fn each_way_not_to_get_a_domain_says_what_to_do() {
    let lab = Lab::new(&pc());
    for (domain, words) in [
        (
            "nosuch",
            "failed to get domain 'nosuch'; `virsh list` shows",
        ),
        ("off", "domain is not running; start it first"),
        ("odd", "virsh did not print QEMU's answer to query-name"),
    ] {
        let (code, _, err) = run(lab.command("attach", domain, &[]));
        assert!(code == 1 && err.contains(words), "{domain}: {err}");
    }
    let mut command = lab.command("detach", "vm", &[]);
    command.env("PATH", Path::new("/nonexistent"));
    let (code, _, err) = run(command);
    assert!(
        code == 1 && err.contains("install libvirt-clients"),
        "{err}"
    );
    assert_eq!(lab.daemon.vms(), [""; 0]);
}

/// One that keeps a definition and a running domain, which has what it is given, line by line.
const KEEPS: &str = r#"#!/bin/sh
dir=$(dirname "$0")
places=
case "$*" in *--config*) places=config ;; esac
case "$*" in *--live*) places="$places live" ;; esac
case "$*" in
    *" domstate --domain=vm") cat "$dir/state" ;;
    *" dominfo --domain=vm") printf 'Id: -\nUUID:           082c2fd2-82c2-4f56-8517-238bc9fe578a\n' ;;
    *" dumpxml --domain=vm --inactive") cat "$dir/config" ;;
    *" dumpxml --domain=vm") cat "$dir/live" ;;
    *" attach-device --domain=vm --file=/dev/stdin "*)
        element=$(cat)
        case "$element" in *"$(cat "$dir/refuses")"*) echo "error: no more PCI slots" >&2; exit 1 ;; esac
        for place in $places; do echo "$element" >>"$dir/$place"; done ;;
    *" detach-device --domain=vm --file=/dev/stdin "*)
        element=$(cat)
        for place in $places; do
            [ -e "$dir/holds-$place" ] && continue
            grep -vxF "$element" "$dir/$place" >"$dir/new"; mv "$dir/new" "$dir/$place"
        done ;;
    *) echo "error: unexpected words: $*" >&2; exit 1 ;;
esac
"#;

#[test]
fn a_definition_has_the_devices_until_they_are_detached() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    fs::write(scratch.path("virsh"), KEEPS).unwrap();
    fs::set_permissions(scratch.path("virsh"), Permissions::from_mode(0o755)).unwrap();
    let set = |file: &str, text: &str| fs::write(scratch.path(file), text).unwrap();
    let lines = |file: &str| {
        fs::read_to_string(scratch.path(file))
            .unwrap()
            .lines()
            .count()
    };
    for (file, text) in [
        ("config", ""),
        ("live", ""),
        ("state", "shut off"),
        ("refuses", "!"),
    ] {
        set(file, text);
    }
    let on = |verb: &str| {
        let fixed = [
            verb,
            "qemu",
            "--name",
            "probe",
            "--libvirt",
            "vm",
            "--permanent",
        ];
        let more: &[&str] = match verb {
            "attach" => &ROOT,
            _ => &["--timeout", "300ms"],
        };
        let mut command = vnplug(&daemon.socket, &[&fixed, more].concat());
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", scratch.0.display()));
        run(command)
    };
    // The daemon's pool is where libvirt takes none.
    let (code, _, err) = on("attach");
    assert!(code == 1 && err.contains("from /dev/shm alone"), "{err}");
    assert_eq!(daemon.vms(), [""; 0]);
    let has_pool = |number: &str| {
        let ready = VmReady {
            pool_path: format!("/dev/shm/vnplug-test-probe.{number}.pool"),
            pool_len: 1 << 20,
            control_path: "/run/vnplug/vms/probe.control".into(),
            doorbell_path: String::new(),
            arenas: Vec::new(),
        };
        daemon.restart();
        daemon.answer(17, Message::VmReady(ready));
    };
    has_pool("0000000000000001");
    let (code, out, err) = on("attach");
    assert!(code == 0 && out.contains("when it starts"), "{out}{err}");
    assert_eq!((lines("config"), lines("live")), (2, 0));
    // By QEMU's user the daemon has it ready again when the host has booted.
    assert_eq!(daemon.asked().stays_for, Some(0));
    let (code, out, err) = on("attach");
    assert!(code == 0 && out.contains("nothing to do"), "{out}{err}");
    // It runs, and the daemon has another pool than before.
    fs::copy(scratch.path("config"), scratch.path("live")).unwrap();
    set("state", "running");
    has_pool("0000000000000002");
    let (code, out, err) = on("attach");
    assert!(code == 0 && out.contains("and attached ("), "{out}{err}");
    for place in ["config", "live"] {
        let text = fs::read_to_string(scratch.path(place)).unwrap();
        assert!(
            text.contains("0002.pool") && !text.contains("0001.pool"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 2);
    }
    // A guest does not let go: it is out of the definition, and the rest goes later.
    set("holds-live", "");
    let (code, _, err) = on("detach");
    assert!(code == 4 && err.contains("has not let go"), "{err}");
    assert_eq!((lines("config"), lines("live")), (0, 2));
    fs::remove_file(scratch.path("holds-live")).unwrap();
    let (code, out, err) = on("detach");
    assert_eq!((code, out.as_str()), (0, "probe: detached\n"), "{err}");
    assert_eq!((lines("config"), lines("live")), (0, 0));
    let (code, _, err) = on("detach");
    assert!(
        code == 1 && err.contains("is not in the definition"),
        "{err}"
    );
    // The second device has no room.
    set("refuses", "<channel");
    let (code, _, err) = on("attach");
    assert!(code == 1 && err.contains("nothing was changed"), "{err}");
    assert_eq!((lines("config"), lines("live")), (0, 0));
}

#[test]
fn one_monitor_is_named_not_none_and_not_two() {
    let scratch = TestDir::new("cli");
    let socket = scratch.path("nobody");
    for words in [
        &[][..],
        &["--qmp", "x", "--libvirt", "vm"],
        &["--qmp", "x", "--connect", "qemu:///system"],
        &["--connect", "qemu:///system"],
    ] {
        for verb in ["attach", "detach"] {
            let fixed = [verb, "qemu", "--name", "probe"];
            let (code, _, err) = run(vnplug(&socket, &[&fixed, words].concat()));
            assert_eq!(code, 2, "{verb} {words:?}: {err}");
        }
    }
}
