//! `vnplug sandbox ask --notify` on a session bus of its own, with a server of notifications that presses a button.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use vnplug_testing::{TestDir, eventually};

/// Which words a program says it was started with: marks of HTML, and what escapes of C make of them.
const HOSTILE: &str = "<b>x</b> & \\074u\\076 \\n.";

/// Runs a program that connects to `port`, and presses a button: what was to be shown, and how the program ended.
fn pressed(dir: &TestDir, button: &str, port: u16) -> (Value, Output) {
    let rules = "[[rule]]\nsay = 'ask'\nto = '127.0.0.1'\n";
    std::fs::write(dir.path("rules.toml"), rules).unwrap();
    let command = |program: &str| {
        let mut command = Command::new(program);
        command.current_dir(&dir.0).stdin(Stdio::null());
        command.env("XDG_RUNTIME_DIR", &dir.0);
        command.env("XDG_CONFIG_HOME", dir.path("config"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let vnplug = env!("CARGO_BIN_EXE_vnplug");
    let mut sandbox = command(vnplug);
    sandbox.args(["sandbox", "--ask", "socket", "--timeout", "60s"]);
    sandbox.args(["--profile", "./rules.toml", "--", "bash", "-c"]);
    sandbox.arg(format!(
        "exec 3<>/dev/tcp/127.0.0.1/{port} && echo is connected"
    ));
    let sandbox = sandbox.arg(HOSTILE).spawn().unwrap();
    let sockets = dir.path("vnplug/sandbox");
    eventually("it asks at its socket", || {
        std::fs::read_dir(&sockets).is_ok_and(|mut found| found.next().is_some())
    });
    let mut server = command("dbus-run-session");
    server.args(["--", "/usr/bin/python3"]);
    server.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/notifications.py"
    ));
    server.args([button, vnplug, "sandbox", "ask", "--notify"]);
    let shown = server.output().unwrap();
    let ended = sandbox.wait_with_output().unwrap();
    let line = String::from_utf8_lossy(&shown.stdout);
    let line = line.lines().next().map(serde_json::from_str);
    (line.unwrap_or_else(|| panic!("{shown:?}")).unwrap(), ended)
}

#[test]
fn a_button_of_a_notification_answers_and_nothing_of_the_program_is_markup() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (shown, ended) = pressed(&TestDir::new("cli-sandbox-yes"), "y", port);
    assert_eq!(ended.stdout, b"is connected\n", "{shown} {ended:?}");
    let text = |what: &str| shown[what].as_str().unwrap();
    assert_eq!(text("app"), "vnplug");
    let summary = text("summary");
    let end = format!("wants to connect to 127.0.0.1 port {port} by tcp");
    assert!(summary.starts_with("question 1: bash["), "{summary}");
    assert!(summary.ends_with(&end), "{summary}");
    // As it is shown: `<b>x</b> & \074u\076 \n.`, which a line of the question has escaped once.
    let body = text("body");
    let escaped = "&lt;b&gt;x&lt;/b&gt; &amp; \\";
    assert!(body.contains(escaped), "{body}");
    assert!(!body.contains('<') && body.contains("074u"), "{body}");
    assert!(shown["actions"].as_array().unwrap().contains(&"y".into()));

    let (shown, ended) = pressed(&TestDir::new("cli-sandbox-no"), "n", port);
    assert!(ended.stdout.is_empty(), "{shown} {ended:?}");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("that was the answer"), "{said}");
}
