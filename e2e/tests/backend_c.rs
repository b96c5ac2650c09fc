//! Third parties' back-ends in C: both ends, against the header and the shared library.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use vnplug_e2e::Lab;
use vnplug_e2e::attached::{AttachedUml, agent, everything, image};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::third_party::build_c;
use vnplug_testing::until;

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
fn the_tutorials_program_runs_in_a_guest_unchanged() {
    let lab = Lab::new().unwrap();
    let (clock, ask) = (
        of_the_tutorial("clock", lab.dir()),
        of_the_tutorial("ask", lab.dir()),
    );
    let grant = "clock,id=90,uid=0,open=vm:*,memory=1M,pool=yes";
    let args = ["--source", "lab=gen,pps=1000", "--backend", grant];
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let _back = End::start(&clock, "", &daemon.socket());
    let image = image().unwrap().program_at(ask, "/bin/ask");
    let uml = AttachedUml::boot(&lab, &daemon, "uml", everything(), image);
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let asks = uml.guest.spawn("exec ask 2>&1").unwrap();
    let said = until(
        "it has an answer, and reads the page",
        || asks.peek(8192).unwrap(),
        |said| said.contains("it says ") && said.matches("the page says ").count() > 1,
    );
    let mut seconds = said
        .lines()
        .filter_map(|it| it.strip_prefix("the page says "));
    let seconds: u64 = seconds.next_back().unwrap().parse().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert!(now.as_secs() - seconds < 60, "{said}");
}
