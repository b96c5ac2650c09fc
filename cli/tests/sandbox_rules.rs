//! `vnplug sandbox rules`, `log`, and options of what is run: the commands as users type them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use serde_json::{Value, json as object};
use vnplug_testing::TestDir;

fn vnplug(dir: &TestDir, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug"));
    command
        .current_dir(&dir.0)
        .env("XDG_CONFIG_HOME", dir.path("config"))
        .args(["sandbox"]);
    command.args(line.split(' ')).output().unwrap()
}

fn said(dir: &TestDir, line: &str) -> String {
    let output = vnplug(dir, line);
    assert!(
        output.status.success(),
        "{line}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn json(dir: &TestDir, line: &str) -> Value {
    serde_json::from_str(&said(dir, &format!("{line} --json"))).unwrap()
}

#[test]
fn rules_are_added_listed_tried_and_taken_away() {
    let dir = TestDir::new("cli-sandbox-rules");
    said(
        &dir,
        "rules add allow --program /usr/bin/git --to *.example.org,192.0.2.0/24 --port 22,443 --note ours",
    );
    said(&dir, "rules add deny --all --to 192.0.2.9");
    said(&dir, "rules add ask --first --to example.org --for 2h");
    let list = json(&dir, "rules list");
    let rules = list["rules"].as_array().unwrap();
    let of = |index: usize, key: &str| rules[index][key].as_str().unwrap().to_owned();
    assert_eq!((of(0, "id"), of(0, "say")), ("all:1".into(), "deny".into()));
    assert_eq!((of(1, "id"), of(1, "say")), ("1".into(), "ask".into()));
    assert_eq!(
        (of(2, "id"), of(2, "text")),
        (
            "2".into(),
            "/usr/bin/git to *.example.org or 192.0.2.0/24, port 22 or 443".into()
        )
    );
    assert!(rules[1]["until"].is_string() && of(3, "origin").starts_with("profile base"));
    assert!(said(&dir, "rules list").contains("otherwise: ask"));

    let verdict = |line: &str| {
        json(&dir, &format!("rules test {line}"))["verdict"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        verdict("--program /usr/bin/git --to git.example.org --port 22"),
        "allow"
    );
    assert_eq!(
        verdict("--program /usr/bin/git --to git.example.org"),
        "allow"
    );
    assert_eq!(
        verdict("--program /usr/bin/git --to git.example.org --port 80"),
        "ask"
    );
    assert_eq!(
        verdict("--program /usr/bin/curl --to git.example.org --port 22"),
        "ask"
    );
    assert_eq!(
        verdict("--program /usr/bin/git --to 192.0.2.9 --port 22"),
        "deny"
    );
    assert_eq!(verdict("--to 169.254.169.254 --port 80"), "deny");
    assert_eq!(verdict("--to unix:/run/nscd/socket"), "deny");
    assert_eq!(verdict("--protocol raw"), "ask");
    // Of a name nobody has looked up no address is shown.
    let to = |line: &str| json(&dir, &format!("rules test {line}"))["act"]["to"].clone();
    assert_eq!(
        to("--to git.example.org --port 22"),
        object!({"name": "git.example.org", "port": 22})
    );
    assert_eq!(
        to("--to 192.0.2.9 --port 22"),
        object!({"address": "192.0.2.9", "port": 22})
    );
    let text = said(&dir, "rules test --to 192.0.2.9");
    assert!(
        text.starts_with("deny: ")
            && text.contains("all.toml:1 says so: deny any program to 192.0.2.9"),
        "{text}"
    );

    // A project tightens.
    std::fs::write(
        dir.path(".vnplug-sandbox.toml"),
        "[[rule]]\nsay = 'allow'\n[[rule]]\nsay = 'deny'\n",
    )
    .unwrap();
    assert_eq!(verdict("--to 192.0.2.77 --port 22"), "ask");
    std::fs::write(dir.path(".vnplug-sandbox.toml"), "default = 'deny'\n").unwrap();
    assert_eq!(
        verdict("--program /usr/bin/git --to git.example.org --port 22"),
        "deny"
    );
    std::fs::remove_file(dir.path(".vnplug-sandbox.toml")).unwrap();

    assert!(said(&dir, "rules rm 2 all:1").contains("taken away: deny any program to 192.0.2.9"));
    let left = json(&dir, "rules list");
    assert_eq!(
        left["rules"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|rule| rule["id"] != "-")
            .count(),
        1
    );
    let agent = json(&dir, "rules list --profile agent");
    assert_eq!(
        (agent["default"].as_str(), agent["profile"].as_str()),
        (Some("ask"), Some("agent"))
    );
}

/// By what else than its path a rule knows a program, and how long it holds.
#[test]
fn a_rule_is_for_a_file_a_command_line_and_an_ancestor_until_its_time() {
    let dir = TestDir::new("cli-sandbox-rules-whose");
    let (hash, other) = ("a".repeat(64), "b".repeat(64));
    said(
        &dir,
        &format!(
            "rules add allow --sha256 {hash} --arguments fetch* --parent /usr/bin/make \
             --to 192.0.2.7 --until 2100-01-02T03:04:05Z"
        ),
    );
    said(
        &dir,
        "rules add allow --to 192.0.2.8 --until 2001-01-02T03:04:05Z",
    );
    let rule = json(&dir, "rules list")["rules"][0].clone();
    assert_eq!(rule["until"], "2100-01-02T03:04:05Z", "{rule}");
    let verdict = |hash: &str, words: &str, parent: &str| {
        let line = format!(
            "rules test --sha256 {hash} --arguments {words} --parent {parent} --to 192.0.2.7 --port 443"
        );
        json(&dir, &line)["verdict"].clone()
    };
    assert_eq!(verdict(&hash, "fetch-all", "/usr/bin/make"), "allow");
    for (hash, words, parent) in [
        (&other, "fetch-all", "/usr/bin/make"),
        (&hash, "push", "/usr/bin/make"),
        (&hash, "fetch-all", "/usr/bin/sh"),
    ] {
        assert_eq!(verdict(hash, words, parent), "ask", "{words} {parent}");
    }
    let over = json(&dir, "rules test --to 192.0.2.8 --port 443");
    assert_eq!(over["verdict"], "ask", "{over}");
    let wrong = vnplug(&dir, "rules add allow --to 192.0.2.8 --until tomorrow");
    assert!(!wrong.status.success());
}

#[test]
fn what_is_wrong_is_said_with_what_to_do() {
    let dir = TestDir::new("cli-sandbox-wrong");
    for (line, words) in [
        (
            "rules add allow --to http://example.org",
            "write example.org",
        ),
        ("rules add allow --program curl", "the whole path"),
        ("rules add perhaps", "allow, ask or deny"),
        (
            "rules add allow --local --to private",
            "local is for rules with names",
        ),
        ("rules rm 1", "there is no rule 1"),
        ("rules rm x", "rules list"),
        ("rules list --profile nobody", "there is no profile"),
    ] {
        let output = vnplug(&dir, line);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(words),
            "{line}: {error}"
        );
    }
    std::fs::create_dir_all(dir.path("config/vnplug/sandbox")).unwrap();
    std::fs::write(
        dir.path("config/vnplug/sandbox/default.toml"),
        "\n[[rule]]\nsay = 'alow'\n",
    )
    .unwrap();
    let output = vnplug(&dir, "rules list");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("default.toml:3: say: \"alow\" is not allow, ask or deny"),
        "{error}"
    );
}

#[test]
fn a_log_is_shown_and_nothing_in_it_reaches_the_terminal() {
    let dir = TestDir::new("cli-sandbox-log");
    let entry = |verdict: &str| {
        format!(
            "{{\"time\": \"2026-11-26T00:00:00.000001Z\", \"verdict\": \"{verdict}\", \"doing\": \"connect\", \
             \"protocol\": \"tcp\", \"to\": {{\"address\": \"192.0.2.1\", \"port\": 80}}, \"names\": [\"example.org\"], \
             \"process\": {{\"pid\": 7, \"program\": \"/tmp/\\u001b[2Jx\"}}, \"why\": \"no rule is about it\", \
             \"allow_with\": \"[[rule]]\\nsay = \\\"allow\\\"\\n\"}}\n"
        )
    };
    std::fs::write(
        dir.path("log"),
        entry("allow") + &entry("deny") + "{\"time\": \"x\", \"not_written\": 3}\n",
    )
    .unwrap();
    let text = said(&dir, "log log");
    assert_eq!(text.lines().count(), 3);
    let first = "2026-11-26T00:00:00.000001Z  allow  /tmp/\\x1b[2Jx[7]  connect 192.0.2.1 (example.org) port 80 by tcp: no rule is about it";
    assert_eq!(text.lines().next(), Some(first));
    let denied = said(&dir, "log log --denied");
    assert!(
        denied.contains("    say = \"allow\"")
            && denied.contains("3 decisions")
            && !denied.contains("  allow  "),
        "{denied}"
    );
    assert_eq!(said(&dir, "log log --json").lines().count(), 3);
}

/// Runs a program in the sandbox, with nobody to ask; its exit code and what it and the sandbox say.
fn ran(dir: &TestDir, options: &[&str], program: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug"));
    command.current_dir(&dir.0);
    command.env("XDG_CONFIG_HOME", dir.path("config"));
    command.args(["sandbox", "--ask", "none"]).args(options);
    let output = command.arg("--").args(program).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.code(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

#[test]
fn a_projects_rules_are_left_aside_if_it_is_said() {
    let dir = TestDir::new("cli-sandbox-project");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let rules = "[[rule]]\nsay = 'allow'\nto = '127.0.0.1'\n";
    fs::write(dir.path("rules.toml"), rules).unwrap();
    fs::write(dir.path(".vnplug-sandbox.toml"), "default = 'deny'\n").unwrap();
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port} && echo is connected");
    let connects = |options: &[&str]| {
        let options = [&["--profile", "./rules.toml"], options].concat();
        let (code, said) = ran(&dir, &options, &["bash", "-c", &script]);
        assert_eq!(code == Some(0), said.contains("is connected"), "{said}");
        code == Some(0)
    };
    assert!(connects(&["--no-project"]));
    // The control.
    assert!(!connects(&[]));
}

#[test]
fn files_are_written_and_run_without_a_question_below_what_is_named() {
    let dir = TestDir::new("cli-sandbox-places");
    for place in ["free", "kept", "tools"] {
        fs::create_dir(dir.path(place)).unwrap();
    }
    let tool = dir.path("tools/mine");
    fs::copy("/usr/bin/true", &tool).unwrap();
    fs::set_permissions(&tool, PermissionsExt::from_mode(0o755)).unwrap();
    let script = "echo x > free/new; echo x > kept/new; tools/mine && echo it ran";
    let does = |options: &[&str]| {
        let options = [&["--files"], options].concat();
        let (_, said) = ran(&dir, &options, &["sh", "-c", script]);
        let is_there = ["free", "kept"].map(|it| fs::remove_file(dir.path(it).join("new")).is_ok());
        (is_there, said.contains("it ran"), said)
    };
    let (written, ran, said) = does(&["--writable", "free"]);
    assert_eq!((written, ran), ([true, false], false), "{said}");
    let (written, ran, said) = does(&["--runnable", "tools"]);
    assert_eq!((written, ran), ([false, false], true), "{said}");
}

/// Runs a command on a kernel that seems to have no Landlock: `landlock_create_ruleset` is 444 everywhere.
const WITHOUT_LANDLOCK: &str = "import ctypes, os, struct, sys
code = b''.join(struct.pack('HBBI', *step) for step in [
    (0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7fff0000)])
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('steps', ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Program(4, code))) == 0
os.execv(sys.argv[1], sys.argv[1:])
";

#[test]
fn a_kernel_without_landlock_has_to_be_accepted() {
    let runs = |options: &[&str]| {
        let mut command = Command::new("python3");
        command.args(["-c", WITHOUT_LANDLOCK, env!("CARGO_BIN_EXE_vnplug")]);
        command.args(["sandbox", "--ask", "none"]).args(options);
        let output = command.args(["--", "echo", "it", "ran"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            output.stdout == b"it ran\n",
            output.status.success(),
            "{said}"
        );
        (output.status.success(), said)
    };
    let (ran, said) = runs(&["--without-landlock"]);
    assert!(ran, "{said}");
    // Not for files, which nothing else keeps.
    for options in [&[][..], &["--without-landlock", "--files"]] {
        let (ran, said) = runs(options);
        assert!(
            !ran && said.contains("this kernel has no Landlock"),
            "{said}"
        );
    }
}
