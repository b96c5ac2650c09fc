//! `vnplug top` on a terminal, tmux's: what a user sees, and what it does when things go wrong.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use vnplug::Next;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_testing::until;

/// A terminal with `vnplug top` in it; ended when dropped.
struct Screen {
    server: String,
}

impl Screen {
    fn start(lab: &Lab, daemon: &Daemon) -> Self {
        Self::start_with(lab, daemon, "")
    }

    /// With these variables before the command.
    fn start_with(lab: &Lab, daemon: &Daemon, variables: &str) -> Self {
        let screen = Self {
            server: lab.dir().join("tmux").display().to_string(),
        };
        let vnplug = program("vnplug").unwrap().display().to_string();
        let socket = daemon.socket().display().to_string();
        let words = ["new-session", "-d", "-x", "120", "-y", "30"];
        let top = format!(
            "before=$(stty -g); {variables} '{vnplug}' --socket '{socket}' top --every 200ms; echo ended $?
             [ \"$before\" = \"$(stty -g)\" ] && echo restored; cat"
        );
        screen.tmux(&[&words[..], &[&top]].concat());
        screen
    }

    fn tmux(&self, words: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command.args(["-f", "/dev/null", "-S", &self.server, "-u"]);
        let output = command.args(words).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn resize(&self, width: &str, height: &str) {
        self.tmux(&["resize-window", "-x", width, "-y", height]);
    }

    fn look(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    fn shows(&self, text: &str) -> String {
        until(text, || self.look(), |screen| screen.contains(text))
    }

    fn lacks(&self, text: &str) {
        let what = format!("no {text:?}");
        until(&what, || self.look(), |screen| !screen.contains(text));
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut command = Command::new("tmux");
        let _ = command.args(["-S", &self.server, "kill-server"]).output();
    }
}

/// How many frames a second a source has seen, by the screen: `lab  gen  up  19.9 k  …`.
fn rate_of(screen: &str, source: &str) -> f64 {
    let row = screen.lines().find(|line| line.starts_with(source));
    let words: Vec<&str> = row.unwrap_or_default().split_whitespace().collect();
    let number = words.get(3).and_then(|it| it.parse().ok()).unwrap_or(0.0);
    match words.get(4) {
        Some(&"k") => number * 1e3,
        Some(&"M") => number * 1e6,
        _ => number,
    }
}

/// The reader may end. It does not see that the daemon is gone: it only looks into its ring.
static DONE: AtomicBool = AtomicBool::new(false);

#[test]
fn a_user_sees_rates_and_losses_sorts_resizes_and_a_restart_is_told() {
    let lab = Lab::new().unwrap();
    let sources = [
        "--source",
        "lab=gen,pps=20000,flows=10",
        "--source",
        "slow=gen,pps=100",
    ];
    let mut daemon = Daemon::start(&lab, None, &sources).unwrap();
    let screen = Screen::start(&lab, &daemon);
    let mut reader = daemon.port("lab").label("a reader").open().unwrap();
    let stuck = daemon.port("lab").ring_bytes(4096).label("stuck").open();
    let _stuck = stuck.unwrap();
    let reads = thread::spawn(move || {
        while !DONE.load(Ordering::Relaxed) {
            while let Ok(Next::Packet(_)) = reader.next() {}
            thread::sleep(Duration::from_millis(1));
        }
    });
    screen.shows("ring: the reader is too slow");
    let full = until(
        "the source's rate",
        || screen.look(),
        |it| rate_of(it, "lab") > 1000.0,
    );
    println!("{full}");
    assert!(full.contains("2 sources, 2 ports, 0 VMs"), "{full}");
    assert!(
        full.contains("a reader") && full.contains("stuck"),
        "{full}"
    );
    // Ports, by their readers.
    screen.press("Tab");
    for (key, by) in [
        ("S", "STATE▾"),
        ("S", "READER▾"),
        ("s", "STATE▾"),
        ("S", "READER▾"),
    ] {
        screen.press(key);
        screen.shows(by);
    }
    let sorted = screen.look();
    assert!(sorted.find("a reader") < sorted.find("stuck"), "{sorted}");
    screen.press("r");
    let turned = screen.shows("READER▴");
    assert!(turned.find("a reader") > turned.find("stuck"), "{turned}");
    screen.press("Enter");
    println!("{}", screen.shows("dropped: its ring was full"));
    screen.press("Escape");
    screen.lacks("dropped: its ring was full");
    screen.press("?");
    screen.shows("choose a row");
    screen.press("?");
    screen.lacks("choose a row");
    // Smaller, too small, and back.
    screen.resize("80", "24");
    println!("{}", screen.shows("Sources"));
    screen.resize("20", "5");
    screen.shows("too small");
    screen.resize("120", "30");
    screen.shows("Sources");
    daemon.kill();
    println!("{}", screen.shows("no answer for"));
    daemon.launch().unwrap();
    screen.shows("restarted while this ran: 1");
    // It ends, and leaves the terminal as it was.
    screen.press("q");
    let left = screen.shows("restored");
    assert!(left.contains("ended 0"), "{left}");
    assert!(!left.contains("Sources"), "{left}");
    DONE.store(true, Ordering::Relaxed);
    reads.join().unwrap();
}

#[test]
fn a_thousand_ports_without_colours_and_ctrl_c_restores_the_terminal() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "slow=gen,pps=100"]).unwrap();
    let port = || daemon.port("slow").ring_bytes(4096).open().unwrap();
    let ports: Vec<_> = std::iter::repeat_with(port).take(1000).collect();
    let screen = Screen::start_with(&lab, &daemon, "NO_COLOR=1");
    screen.shows("1,000 ports");
    screen.press("Tab");
    // Ports by their number, the last ones first; then the other end of the table.
    for key in ["s", "s", "s", "s", "s", "s"] {
        screen.press(key);
    }
    screen.press("r");
    screen.shows("\n1000 ");
    screen.press("End");
    screen.shows("\n1 ");
    let raw = screen.tmux(&["capture-pane", "-p", "-e"]);
    assert!(raw.contains("\x1b[7m"), "no row is chosen: {raw:?}");
    assert!(
        !raw.contains("\x1b[38") && !raw.contains("\x1b[31"),
        "{raw:?}"
    );
    drop(ports);
    screen.shows("0 ports");
    screen.press("C-c");
    let left = screen.shows("restored");
    assert!(
        left.contains("ended 0") && !left.contains("Sources"),
        "{left}"
    );
}

#[test]
fn what_is_no_terminal_is_refused() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &[]).unwrap();
    let (code, said) = daemon.vnplug(&["top"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("this is none: use `vnplug stats`"), "{said}");
}
