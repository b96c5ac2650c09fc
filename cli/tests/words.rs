//! What the command says: help, usage errors, an absent daemon.

mod support;

use support::{Daemon, run, vnplug};
use vnplug_ring::control::{Counted, Device, Message};
use vnplug_testing::TestDir;

#[test]
fn every_command_has_help_with_an_example() {
    let scratch = TestDir::new("cli");
    let socket = scratch.path("nobody");
    for command in [
        "count",
        "dump",
        "record",
        "send",
        "replay",
        "tap",
        "extract",
        "flows",
        "index",
        "list",
        "stats",
        "agent",
        "attach qemu",
        "attach uml",
        "detach qemu",
        "detach uml",
        "migrate qemu",
    ] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let (code, out, _) = run(vnplug(&socket, &words));
        assert_eq!(code, 0, "{command}");
        assert!(
            out.contains("Example") && out.contains(&format!("vnplug {command}")),
            "{out}"
        );
    }
    let (_, out, _) = run(vnplug(&socket, &["--help"]));
    assert!(out.contains("Exit codes:"), "{out}");
}

#[test]
fn a_recording_is_not_begun_by_mistake() {
    let scratch = TestDir::new("cli");
    let socket = scratch.path("nobody");
    let to = scratch.path("rec");
    let words = [
        "record",
        "host:mid",
        "host:mid",
        "--to",
        to.to_str().unwrap(),
    ];
    let (code, _, err) = run(vnplug(&socket, &words));
    assert!(code == 2 && err.contains("named twice"), "{err}");
    assert!(!to.exists());
    // A disk that is not mounted: nothing is made on the one below.
    let deep = scratch.path("nope").join("deep");
    let words = ["record", "host:mid", "--to", deep.to_str().unwrap()];
    let (code, _, err) = run(vnplug(&socket, &words));
    assert!(
        code == 1 && err.contains("is its disk mounted? --parents"),
        "{err}"
    );
    assert!(!scratch.path("nope").exists());
    let (code, _, err) = run(vnplug(&socket, &[&words[..], &["--parents"]].concat()));
    assert!(code != 0 && deep.exists(), "{err}");
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let scratch = TestDir::new("cli");
    let socket = scratch.path("nobody");
    for words in [
        &["count"][..],
        &["nonsense"],
        &["count", "eth1", "--ring", "64Q"],
        &["count", "eth1", "--witness", "--snaplen", "60"],
        &["count", "eth1", "--packets", "0"],
        &["attach", "qemu", "--name", "a b", "--qmp", "x"],
        &[
            "attach", "uml", "--name", "a", "--pool", "3M", "--", "linux",
        ],
    ] {
        let (code, _, err) = run(vnplug(&socket, words));
        assert_eq!(code, 2, "{words:?}: {err}");
    }
}

#[test]
fn a_closed_standard_output_is_an_error_and_a_discarded_one_is_not() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    daemon.answer(4, Message::Devices(Vec::new()));
    daemon.answer(10, Message::Counters(Vec::new()));
    let shell = |redirection: &str, words: &str| {
        let mut command = std::process::Command::new("sh");
        let program = env!("CARGO_BIN_EXE_vnplug");
        let script = format!("exec \"$0\" --socket \"$1\" {words} {redirection}");
        command
            .args(["-c", &script, program])
            .arg(&daemon.socket)
            .stdin(std::process::Stdio::null());
        run(command)
    };
    for words in ["list", "stats", "count eth1 -c 1", "dump eth1"] {
        let (code, _, err) = shell(">&-", words);
        assert!(
            code == 1 && err.contains("standard output is closed"),
            "{words}: {code} {err}"
        );
    }
    for null in [">/dev/null", "1<>/dev/null"] {
        let (code, _, err) = shell(null, "list");
        assert_eq!(code, 0, "{err}");
    }
    let (code, _, err) = shell(">/dev/full", "list --json");
    assert!(code == 1 && err.contains("cannot write"), "{err}");
}

#[test]
fn an_absent_daemon_is_exit_code_1_with_advice() {
    let scratch = TestDir::new("cli");
    let socket = scratch.path("nobody");
    for words in [
        &["list"][..],
        &["stats"],
        &["count", "eth1"],
        &["dump", "eth1", "-w", "/x"],
    ] {
        let (code, _, err) = run(vnplug(&socket, words));
        assert_eq!(code, 1, "{words:?}: {err}");
        assert!(
            err.starts_with("vnplug: ") && err.contains("start the daemon"),
            "{err}"
        );
        assert_eq!(err.lines().count(), 1, "{err}");
    }
}

#[test]
fn devices_are_listed_as_text_and_json() {
    let scratch = TestDir::new("cli");
    let daemon = Daemon::start(&scratch);
    let device = Device {
        name: "host:eth1".into(),
        kind: "af_packet".into(),
        state: "up".into(),
        description: "eth1".into(),
        queues: 2,
        ports: 1,
        mtu: 1500,
        speed_mbps: 10_000,
        mac: [2, 0, 0, 0, 0, 1],
        addresses: vec!["192.0.2.1/24".into(), "fe80::1/64".into()],
        ..Device::default()
    };
    daemon.answer(4, Message::Devices(vec![device]));
    let port = Counted {
        kind: "port".into(),
        name: "7".into(),
        labels: vec![("label".into(), "probe[\u{1b}1]".into())],
        values: vec![("delivered".into(), 1234)],
    };
    daemon.answer(10, Message::Counters(vec![port]));
    let (code, out, err) = run(vnplug(&daemon.socket, &["list"]));
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("host:eth1  af_packet  up"), "{out}");
    assert!(
        out.contains("02:00:00:00:00:01") && out.contains("192.0.2.1/24"),
        "{out}"
    );
    assert!(
        out.contains("1,234") && out.contains("probe[\\x1b1]"),
        "{out}"
    );
    let (_, out, _) = run(vnplug(&daemon.socket, &["list", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["ports"][0]["name"], "7");
    let device = &json["devices"][0];
    assert_eq!(
        (&device["queues"], &device["mtu"]),
        (&2.into(), &1500.into())
    );
    assert_eq!(device["mac"], "02:00:00:00:00:01");
    assert_eq!(device["addresses"][1], "fe80::1/64");
}

#[test]
fn a_directory_that_is_named_twice_is_told_so() {
    let scratch = TestDir::new("cli");
    let (dir, link) = (scratch.path("rec"), scratch.path("link"));
    std::fs::create_dir(&dir).unwrap();
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    for second in [path(&dir), path(&link), path(&dir.join("."))] {
        let words = ["record", "host:eth1", "--to", &path(&dir), "--to", &second];
        let (code, _, err) = run(vnplug(&scratch.path("nobody"), &words));
        assert_eq!(code, 1);
        assert!(
            err.contains(&second) && err.contains("named twice"),
            "{err}"
        );
    }
}
