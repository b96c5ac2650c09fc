//! Third parties' back-ends in C: both ends, against the header and the shared library.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::third_party::build_c;

struct End {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl End {
    fn start(program: &Path, mode: &str, socket: &Path) -> Self {
        let mut child = Command::new(program)
            .arg(mode)
            .env("VNPLUG_SOCKET", socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn says(&mut self, what: &str) {
        let line = self.lines.next().map(Result::unwrap);
        assert_eq!(line.as_deref(), Some(what), "see what it wrote above");
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn both_ends_in_c_do_what_the_header_says() {
    let lab = Lab::new().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/tests/c/backend.c");
    let program = build_c(&source, lab.dir(), &[]).unwrap();
    let args = [
        "--source",
        "lab=gen,pps=1000",
        "--backend",
        "kv,id=85,uid=0,open=*,memory=4M",
    ];
    let mut daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut back = End::start(&program, "serve", &daemon.socket());
    back.says("registered");
    let mut user = End::start(&program, "use", &daemon.socket());
    back.says("again");
    daemon.kill();
    daemon.launch().unwrap();
    user.says("back");
    back.says("full");
    drop(user.child.stdin.take());
    user.says("over");
    back.says("over");
    for mut end in [user, back] {
        assert!(end.child.wait().unwrap().success());
    }
}

/// The programs of the tutorial, as `docs/backends.md` has them.
fn of_the_tutorial(name: &str, dir: &Path) -> PathBuf {
    let manual = include_str!("../../docs/backends.md");
    let begin = format!("```c\n/* {name}.c */\n");
    let (_, program) = manual.split_once(&begin).unwrap();
    let (program, _) = program.split_once("\n```\n").unwrap();
    let source = dir.join(format!("{name}.c"));
    std::fs::write(&source, format!("{program}\n")).unwrap();
    build_c(&source, dir, &[]).unwrap()
}

#[test]
fn the_tutorial_does_what_it_says() {
    let lab = Lab::new().unwrap();
    let (clock, ask) = (
        of_the_tutorial("clock", lab.dir()),
        of_the_tutorial("ask", lab.dir()),
    );
    let args = [
        "--source",
        "lab=gen,pps=1000",
        "--backend",
        "clock,id=90,uid=0,open=*,memory=1M",
    ];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let mut ask = End::start(&ask, "", &daemon.socket());
    let mut back = End::start(&clock, "", &daemon.socket());
    for _ in 0..2 {
        let (mut said, mut read) = (false, 0);
        while !said || read < 2 {
            let line = ask.line();
            if let Some(seconds) = line.strip_prefix("the page says ") {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                assert!(
                    now.as_secs() - seconds.parse::<u64>().unwrap() < 5,
                    "{line}"
                );
                read += 1;
            }
            said |= line.starts_with("it says ") && line.len() == "it says 12:34:56".len();
        }
        back.child.kill().unwrap();
        while !ask.line().starts_with("gone: ") {}
        back = End::start(&clock, "", &daemon.socket());
    }
}
