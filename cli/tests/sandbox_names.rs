//! A program in the sandbox that asks for names: what it may look up, and what it may reach by that.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::Value;
use vnplug_testing::TestDir;

/// A server of the DNS that says 127.0.0.1 to everything, and what it was asked.
fn server() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = socket.local_addr().unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let its = asked.clone();
    thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let question = &buffer[12..length];
            let mut labels = Vec::new();
            let mut at = 0;
            while question[at] != 0 {
                let end = at + 1 + usize::from(question[at]);
                labels.push(String::from_utf8_lossy(&question[at + 1..end]).into_owned());
                at = end;
            }
            let question = &question[..at + 5];
            let is_a = question[at + 2] == 1;
            its.lock().unwrap().push(labels.join("."));
            let mut answer = [
                &buffer[..2],
                &[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0],
                question,
            ]
            .concat();
            if is_a {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
                answer.extend(Ipv4Addr::LOCALHOST.octets());
            }
            socket.send_to(&answer, from).unwrap();
        }
    });
    (at, asked)
}

/// A server that says hello.
fn hello() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            // Whoever is gone has what it wanted.
            let _ = stream.write_all(b"hello");
        }
    });
    port
}

/// Runs a command on a terminal of its own; answers the first question with yes, and `ready` with a line.
const TERMINAL: &str = "import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
seen, answers = b'', [(b'answer: ', b'y'), (b'ready', b'more')]
while True:
    try:
        data = os.read(terminal, 4096)
    except OSError:
        break
    seen += data
    if answers and answers[0][0] in seen:
        os.write(terminal, answers.pop(0)[1] + b'\\n')
sys.stdout.buffer.write(seen)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

const PROGRAM: &str = "import socket, sys
for where in sys.argv[1:]:
    host, port = where.split(':')
    try:
        print(socket.create_connection((host, int(port)), 20).recv(5).decode())
    except OSError as error:
        print(type(error).__name__)
";

#[test]
fn a_rule_for_a_name_opens_what_the_name_was_answered_with() {
    if std::fs::read_to_string("/etc/resolv.conf").is_ok_and(|text| text.contains("nameserver ::"))
    {
        println!("skipped: the name server is IPv6 alone here");
        return;
    }
    let dir = TestDir::new("cli-sandbox-names");
    let ((dns, asked), port) = (server(), hello());
    let rules = "default = 'deny'\n[[rule]]\nsay = 'allow'\nto = ['good.test', 'other.test']\nlocal = true\n\
                 [[rule]]\nsay = 'deny'\nto = 'never.test'\n";
    std::fs::write(dir.path("rules.toml"), rules).unwrap();
    let run = |places: &[String]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug"));
        command
            .current_dir(&dir.0)
            .env("XDG_CONFIG_HOME", dir.path("config"));
        command.args([
            "sandbox",
            "--profile",
            "./rules.toml",
            "--ask",
            "none",
            "--log",
            "log",
            "--dns",
        ]);
        command
            .arg(dns.to_string())
            .args(["--", "python3", "-c", PROGRAM])
            .args(places);
        let output = command.output().unwrap();
        (
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    // By number it is refused; by name it is open; then the number has a name.
    let number = format!("127.0.0.1:{port}");
    let (said, told) = run(&[
        number.clone(),
        format!("good.test:{port}"),
        number,
        format!("evil.test:{port}"),
    ]);
    assert_eq!(
        said.lines().collect::<Vec<_>>(),
        ["PermissionError", "hello", "hello", "gaierror"],
        "{told}"
    );
    assert!(told.contains("wanted to connect to 127.0.0.1"), "{told}");
    assert!(told.contains("wanted to look up evil.test: no rule is about it; to allow it: vnplug sandbox rules add"), "{told}");
    let asked = asked.lock().unwrap();
    assert!(
        asked.iter().any(|name| name == "good.test")
            && !asked.iter().any(|name| name.contains("evil")),
        "{asked:?}"
    );

    let mut log = String::new();
    std::fs::File::open(dir.path("log"))
        .unwrap()
        .read_to_string(&mut log)
        .unwrap();
    let entries: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let allowed = entries
        .iter()
        .find(|entry| entry["doing"] == "connect" && entry["verdict"] == "allow")
        .unwrap();
    assert_eq!(
        (&allowed["names"][0], &allowed["to"]["port"]),
        (&"good.test".into(), &port.into())
    );
    assert!(
        allowed["process"]["program"]
            .as_str()
            .unwrap()
            .contains("python3"),
        "{allowed}"
    );
    // Who asked for the name is known, too.
    let resolved = entries
        .iter()
        .find(|entry| entry["doing"] == "resolve")
        .unwrap();
    assert_eq!(resolved["process"]["pid"], allowed["process"]["pid"]);
}

#[test]
fn the_terminal_is_asked_and_given_back() {
    let dir = TestDir::new("cli-sandbox-terminal");
    let port = hello();
    std::fs::write(
        dir.path("rules.toml"),
        "[[rule]]\nsay = 'ask'\nto = '127.0.0.1'\n",
    )
    .unwrap();
    let program = format!("{PROGRAM}\nprint('got', input('ready'))\n");
    let mut command = Command::new("python3");
    command
        .current_dir(&dir.0)
        .env("XDG_CONFIG_HOME", dir.path("config"));
    command.args([
        "-c",
        TERMINAL,
        env!("CARGO_BIN_EXE_vnplug"),
        "sandbox",
        "--profile",
        "./rules.toml",
    ]);
    command.args([
        "--timeout",
        "60s",
        "--",
        "python3",
        "-c",
        &program,
        &format!("127.0.0.1:{port}"),
    ]);
    let output = command.output().unwrap();
    let seen = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{seen}");
    for text in [
        "question 1: python3",
        "an answer holds for this one act",
        "question 1: allowed",
        "hello",
        "got more",
    ] {
        assert!(seen.contains(text), "{text} is not in {seen}");
    }
}
