//! Who asks people: the terminal, and front-ends at a socket that may be hostile.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Value, json};
use vnplug_testing::{TestDir, eventually};

use super::socket::{CLIENTS, LINE, Socket, descends};
use super::terminal;
use super::tests::{asking, connect, who};
use crate::act::Act;
use crate::ask::{Answer, Life};
use crate::gate::{Gate, Verdict};

const LONG: Duration = Duration::from_secs(100);

fn judge(gate: &Gate, act: &Act) -> Receiver<Verdict> {
    let (told, verdicts) = channel();
    // A test that ended does not listen any more.
    gate.judge(act, move |verdict| {
        let _ = told.send(verdict);
    });
    verdicts
}

/// The other end of a terminal, and what was written there.
struct Screen {
    master: File,
    path: PathBuf,
    seen: String,
}

impl Screen {
    fn new() -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = PathBuf::from(ptsname(&master, Vec::new()).unwrap().to_str().unwrap());
        Self {
            master: File::from(master),
            path,
            seen: String::new(),
        }
    }

    fn read_until(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let mut buffer = [0; 4096];
            let count = self.master.read(&mut buffer).unwrap();
            self.seen += &String::from_utf8_lossy(&buffer[..count]);
        }
    }

    fn typed(&mut self, text: &str) {
        self.seen.clear();
        self.master.write_all(text.as_bytes()).unwrap();
    }
}

#[test]
fn the_terminal_asks_several_at_once_and_shows_nothing_that_it_acts_on() {
    let gate = asking(LONG);
    let mut screen = Screen::new();
    terminal::start(&gate, &screen.path).unwrap();
    let mut first = connect(1, "192.0.2.1:443");
    let mut hostile = (*who(1, "/tmp/\u{1b}[2Jx")).clone();
    hostile.arguments = vec![
        "a\r\nvnplug: question 9: trusted".to_owned(),
        "b".repeat(10_000),
    ];
    first.who = hostile.into();
    let verdict = judge(&gate, &first);
    screen.read_until("answer: ");
    assert!(
        screen
            .seen
            .contains("question 1: \\x1b[2Jx[1] wants to connect to 192.0.2.1 port 443 by tcp"),
        "{}",
        screen.seen
    );
    assert!(
        !screen.seen.contains('\u{1b}') && screen.seen.len() < 2000,
        "{}",
        screen.seen
    );
    assert!(
        !screen
            .seen
            .lines()
            .any(|line| line.starts_with("vnplug: question 9")),
        "{}",
        screen.seen
    );
    screen.seen.clear();
    let other = judge(&gate, &connect(2, "192.0.2.2:443"));
    screen.read_until("answer: ");
    screen.typed("nonsense\n");
    screen.read_until("is no answer");
    screen.read_until("open: 1, 2");
    screen.typed("2n\n");
    assert_eq!(other.recv().unwrap(), Verdict::Deny);
    screen.read_until("question 2: refused");
    assert!(verdict.try_recv().is_err());
    screen.typed("s\n");
    assert_eq!(verdict.recv().unwrap(), Verdict::Allow);
    screen.read_until("question 1: allowed");
}

#[test]
fn an_answer_without_a_number_is_for_the_one_question_that_was_shown() {
    let gate = asking(LONG);
    let mut screen = Screen::new();
    terminal::start(&gate, &screen.path).unwrap();
    let first = judge(&gate, &connect(1, "192.0.2.1:1"));
    screen.read_until("answer: ");
    // Another one comes while somebody types, and the first one ends without them.
    let second = judge(&gate, &connect(2, "192.0.2.2:1"));
    screen.read_until("question 2");
    let no = Answer {
        allow: false,
        life: Life::Once,
        offer: 0,
    };
    gate.answer(1, no, "elsewhere").unwrap();
    assert_eq!(first.recv().unwrap(), Verdict::Deny);
    screen.read_until("answered elsewhere");
    screen.typed("y\n");
    screen.read_until("more than one question");
    assert!(second.try_recv().is_err());
    // Now one alone was shown.
    screen.typed("y\n");
    assert_eq!(second.recv().unwrap(), Verdict::Allow);
    // One ends, and the next is asked in the same moment.
    let third = judge(&gate, &connect(3, "192.0.2.3:1"));
    screen.read_until("question 3");
    gate.answer(3, no, "elsewhere").unwrap();
    assert_eq!(third.recv().unwrap(), Verdict::Deny);
    screen.read_until("answered elsewhere");
    let fourth = judge(&gate, &connect(4, "192.0.2.4:1"));
    screen.read_until("question 4");
    screen.read_until("answer: ");
    screen.typed("y\n");
    screen.read_until("more than one question");
    assert!(fourth.try_recv().is_err());
    screen.typed("4y\n");
    assert_eq!(fourth.recv().unwrap(), Verdict::Allow);
}

#[test]
fn control_c_is_no_to_all() {
    let gate = asking(LONG);
    let mut screen = Screen::new();
    terminal::start(&gate, &screen.path).unwrap();
    let verdicts = [
        judge(&gate, &connect(1, "192.0.2.1:1")),
        judge(&gate, &connect(2, "192.0.2.2:1")),
    ];
    screen.read_until("question 2");
    screen.read_until("answer: ");
    screen.typed("\u{3}");
    for verdict in verdicts {
        assert_eq!(verdict.recv().unwrap(), Verdict::Deny);
    }
}

#[test]
fn where_there_is_no_terminal_nobody_asks() {
    let gate = asking(LONG);
    assert!(terminal::start(&gate, Path::new("/dev/null")).is_err());
    assert_eq!(
        judge(&gate, &connect(1, "192.0.2.1:1")).recv().unwrap(),
        Verdict::Deny
    );
}

struct Front {
    reader: BufReader<UnixStream>,
}

impl Front {
    fn new(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self {
            reader: BufReader::new(stream),
        }
    }

    /// The next line that says something; `None` at the end.
    fn line(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            // A front-end that was let go may see that as an error.
            if self.reader.read_line(&mut line).unwrap_or(0) == 0 {
                return None;
            }
            let value: Value = serde_json::from_str(&line).unwrap();
            if value != json!({}) {
                return Some(value);
            }
        }
    }

    fn send(&mut self, text: &str) {
        // Whoever was let go is told when it reads.
        let _ = self.reader.get_mut().write_all(text.as_bytes());
    }
}

/// This process is a front-end, and no sandbox.
fn served(gate: &Gate, dir: &TestDir) -> (Socket, PathBuf) {
    served_for(gate, dir, u32::MAX)
}

fn served_for(gate: &Gate, dir: &TestDir, sandbox: u32) -> (Socket, PathBuf) {
    let path = dir.path("1.sock");
    let socket = Socket::start(gate, &path, &["curl".into(), "x".into()], sandbox).unwrap();
    (socket, path)
}

#[test]
fn a_front_end_is_told_and_answers() {
    let dir = TestDir::new("sandbox-front");
    let gate = asking(LONG);
    let (socket, path) = served(&gate, &dir);
    let mut front = Front::new(&path);
    let hello = front.line().unwrap();
    assert_eq!(
        (&hello["hello"], &hello["version"], &hello["command"]),
        (&json!("vnplug-sandbox"), &json!(1), &json!(["curl", "x"]))
    );
    eventually("the front-end listens", || gate.has_fronts());
    let verdict = judge(&gate, &connect(7, "192.0.2.1:443"));
    let ask = front.line().unwrap()["ask"].clone();
    assert_eq!(
        (&ask["id"], &ask["to"], &ask["doing"]),
        (
            &json!(1),
            &json!({"address": "192.0.2.1", "port": 443}),
            &json!("connect")
        )
    );
    assert_eq!(
        (
            &ask["process"]["pid"],
            &ask["process"]["program"],
            &ask["lasts"]
        ),
        (&json!(7), &json!("/usr/bin/curl"), &json!(true))
    );
    assert!(
        ask["offers"][0]["rule"]
            .as_str()
            .unwrap()
            .contains("port = 443")
            && ask["wait_ms"].as_u64().unwrap() > 1000
    );
    for (line, error) in [
        ("x\n", "no JSON"),
        ("{}\n", "write {"),
        ("{\"answer\": {\"id\": 1}}\n", "say is"),
        (
            "{\"answer\": {\"id\": 1, \"say\": \"allow\", \"for\": \"ever\"}}\n",
            "for is",
        ),
        (
            "{\"answer\": {\"id\": 1, \"say\": \"allow\", \"offer\": -1}}\n",
            "offer is",
        ),
        (
            "{\"answer\": {\"id\": 1, \"say\": \"allow\", \"offer\": 99}}\n",
            "no offer 99",
        ),
        (
            "{\"answer\": {\"id\": 9, \"say\": \"allow\"}}\n",
            "not open",
        ),
    ] {
        front.send(line);
        let said = front.line().unwrap();
        assert!(
            said["error"].as_str().unwrap().contains(error),
            "{line}: {said}"
        );
    }
    front.send("{\"answer\": {\"id\": 1, \"say\": \"allow\", \"for\": \"10m\", \"offer\": 1}}\n");
    assert_eq!(verdict.recv().unwrap(), Verdict::Allow);
    assert_eq!(
        front.line().unwrap(),
        json!({"settled": {"id": 1, "say": "allow", "by": "socket"}})
    );
    assert!(gate.policy().answers[0].until.is_some());
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn hostile_front_ends_are_let_go_and_hold_up_nobody() {
    let dir = TestDir::new("sandbox-hostile-front");
    let gate = asking(LONG);
    let (_socket, path) = served(&gate, &dir);
    // A line without end, and half a line.
    let mut long = Front::new(&path);
    long.send(&"x".repeat(usize::try_from(LINE).unwrap() + 10));
    while long.line().is_some() {}
    // All places: the next one is told, and a place is free again when somebody goes.
    let fronts: Vec<Front> = (0..CLIENTS).map(|_| Front::new(&path)).collect();
    let mut fronts: Vec<Front> = fronts.into_iter().collect();
    for front in &mut fronts {
        assert!(front.line().unwrap()["hello"].is_string());
    }
    let mut more = Front::new(&path);
    assert!(
        more.line().unwrap()["error"]
            .as_str()
            .unwrap()
            .contains("too many")
    );
    assert!(more.line().is_none());
    fronts.truncate(2);
    eventually("a place is free", || {
        Front::new(&path)
            .line()
            .is_some_and(|line| line["hello"].is_string())
    });
    // One that never reads, while there is much to tell: the other one answers all.
    let reads = &mut fronts[0];
    for pid in 0..400 {
        let act = connect(pid, &format!("198.51.{}.{}:443", pid / 200, pid % 200 + 1));
        let verdict = judge(&gate, &act);
        let id = loop {
            if let Some(id) = reads.line().unwrap()["ask"]["id"].as_u64() {
                break id;
            }
        };
        reads.send(&format!(
            "{{\"answer\": {{\"id\": {id}, \"say\": \"allow\"}}}}\n"
        ));
        assert_eq!(verdict.recv_timeout(LONG).unwrap(), Verdict::Allow);
    }
}

#[test]
fn nobody_inside_answers_its_own_question() {
    let dir = TestDir::new("sandbox-inside");
    let gate = asking(LONG);
    let (socket, path) = served(&gate, &dir);
    // The control: this process is not inside, and is let in.
    assert!(Front::new(&path).line().is_some());
    drop(socket);
    let (_socket, path) = served_for(&gate, &dir, std::process::id());
    // The sandbox's own process connects for those inside.
    assert!(Front::new(&path).line().is_none());
    let program = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nprint(len(s.recv(9)))";
    let inside = |program: &str, nested: bool| {
        let mut command = Command::new("sh");
        let call = if nested {
            "sh -c 'exec python3 -c \"$0\" \"$1\"' \"$0\" \"$1\"; true"
        } else {
            "exec python3 -c \"$0\" \"$1\""
        };
        let output = command
            .args(["-c", call, program])
            .arg(&path)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(
        (inside(program, false), inside(program, true)),
        ("0\n".to_owned(), "0\n".to_owned())
    );
    assert!(!descends(1, std::process::id()) && descends(u32::MAX, 1));
}
