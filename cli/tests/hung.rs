//! What the tools say of a daemon that is away, hangs, says nothing or refuses, and that they say it soon.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use vnplug_os::socket::connect_within;
use vnplug_ring::control::Message;
use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_testing::TestDir;

/// How a daemon is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Daemon {
    /// There is none.
    Away,
    /// It takes no connection, and there is room for no more.
    Hung,
    /// It takes connections, and that is all.
    Silent,
    /// It refuses every greeting.
    Refuses,
}

impl Daemon {
    const ALL: [Self; 4] = [Self::Away, Self::Hung, Self::Silent, Self::Refuses];

    /// What has to be said of it.
    fn words(self) -> &'static str {
        match self {
            Self::Away => "nobody listens on",
            Self::Hung => "takes no connections",
            Self::Silent => "no answer within the time limit",
            Self::Refuses => "not today",
        }
    }

    /// Listens, if it does, as long as what it gives is there.
    fn start(self, path: &Path) -> Box<dyn std::any::Any> {
        match self {
            Self::Away => Box::new(()),
            Self::Silent => Box::new(UnixListener::bind(path).unwrap()),
            Self::Hung => {
                let listener = UnixListener::bind(path).unwrap();
                rustix::net::listen(&listener, 1).unwrap();
                let dial = || connect_within(path, Duration::ZERO);
                let all: Vec<_> = std::iter::from_fn(|| dial().ok()).take(16).collect();
                assert_eq!(dial().unwrap_err().kind(), ErrorKind::TimedOut);
                Box::new((listener, all))
            }
            Self::Refuses => {
                let listener = UnixListener::bind(path).unwrap();
                thread::spawn(move || listener.incoming().flatten().for_each(refuse));
                Box::new(())
            }
        }
    }
}

fn refuse(mut client: UnixStream) {
    let mut framer = Framer::strict(MAX_PAYLOAD);
    let mut bytes = [0; 4096];
    while let Ok(len @ 1..) = client.read(&mut bytes) {
        framer.push(&bytes[..len]);
        while let Ok(Some((header, _))) = framer.next_message() {
            let text = "not today".to_owned();
            let answer = Message::Error { code: 1, text }.encode(header.id, 0);
            let _ = client.write_all(&answer);
        }
    }
}

/// What a command said, and how long it took.
struct Said {
    code: Option<i32>,
    out: String,
    errors: String,
    took: Duration,
}

fn vnplug(socket: &Path, words: &[&str]) -> Said {
    let begun = Instant::now();
    // One that hangs ends with another code.
    let mut command = Command::new("timeout");
    command.args(["60", env!("CARGO_BIN_EXE_vnplug"), "--socket"]);
    let output = command.arg(socket).args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said {
        code: output.status.code(),
        out: text(&output.stdout),
        errors: text(&output.stderr),
        took: begun.elapsed(),
    }
}

/// Asks each kind of daemon, all at one time.
fn of_each(ask: impl Fn(Daemon, &Path, PathBuf) + Sync) {
    let dir = TestDir::new("hung");
    thread::scope(|scope| {
        for daemon in Daemon::ALL {
            let (ask, dir) = (&ask, &dir);
            scope.spawn(move || {
                let socket = dir.path(format!("{daemon:?}"));
                let _there = daemon.start(&socket);
                ask(daemon, &socket, dir.path(format!("{daemon:?}.pcapng")));
            });
        }
    });
}

/// Two seconds, on a machine that is busy.
const SOON: Duration = Duration::from_secs(8);

#[test]
fn wireshark_is_told_what_is_wrong_and_its_window_is_not_held() {
    of_each(|daemon, socket, file| {
        let words = daemon.words();
        let extcap = |more: &[&str]| vnplug(socket, &[&["extcap"], more].concat());
        let at = ["--extcap-interface", "vnplug-host:eth1"];

        let said = extcap(&["--extcap-interfaces"]);
        assert_eq!(said.code, Some(0), "{daemon:?}: {}", said.errors);
        assert!(
            said.out.contains("{value=vnplug_recording}"),
            "{}",
            said.out
        );
        // A machine without a daemon is no fault of it.
        let is_told = said.errors.contains(words);
        assert_eq!(
            is_told,
            daemon != Daemon::Away,
            "{daemon:?}: {}",
            said.errors
        );
        assert!(said.took < SOON, "{daemon:?}: {:?}", said.took);

        let said = extcap(&[&at[..], &["--extcap-dlts"]].concat());
        assert_eq!(said.code, Some(1), "{daemon:?}: {}", said.out);
        assert!(said.errors.contains(words), "{daemon:?}: {}", said.errors);
        assert!(said.took < SOON, "{daemon:?}: {:?}", said.took);

        let said = extcap(&[&at[..], &["--extcap-capture-filter", "udp"]].concat());
        assert!(said.out.contains(words), "{daemon:?}: {}", said.out);
        assert!(said.took < SOON, "{daemon:?}: {:?}", said.took);

        // What it asks about itself needs no daemon.
        let said = extcap(&[&at[..], &["--extcap-config"]].concat());
        assert!(said.out.contains("--snaplen"), "{daemon:?}: {}", said.out);

        let fifo = ["--capture", "--fifo", file.to_str().unwrap()];
        let said = extcap(&[&at[..], &fifo].concat());
        assert_eq!(said.code, Some(1), "{daemon:?}: {}", said.errors);
        assert!(said.errors.contains(words), "{daemon:?}: {}", said.errors);
        assert!(said.took < SOON * 3, "{daemon:?}: {:?}", said.took);
    });
}

#[test]
fn the_doctor_and_others_who_ask_say_what_is_wrong_and_end() {
    of_each(|daemon, socket, _| {
        let said = vnplug(socket, &["doctor", "--role", "host", "--json"]);
        assert_eq!(said.code, Some(6), "{daemon:?}: {}", said.errors);
        let whole: Value = serde_json::from_str(&said.out).unwrap();
        let checks = whole["checks"].as_array().unwrap();
        let found = checks.iter().find(|it| it["name"] == "daemon").unwrap();
        assert_eq!(found["state"], "FAIL", "{found}");
        let text = found["text"].as_str().unwrap();
        assert!(text.contains(daemon.words()), "{daemon:?}: {text}");
        for words in ["list", "stats"] {
            let said = vnplug(socket, &[words]);
            assert_eq!(said.code, Some(1), "{daemon:?} {words}: {}", said.out);
            let is_told = said.errors.contains(daemon.words());
            assert!(is_told, "{daemon:?} {words}: {}", said.errors);
        }
    });
}
