//! What the daemon does now, as the page shows it; with a real daemon: `e2e/tests/live.rs`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};
use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{Counted, Message, VERSION};
use vnplug_testing::eventually;

use crate::browser::Browser;
use crate::support::{Server, TestDir};

/// A daemon that tells counters; they grow with every answer.
struct Daemon {
    socket: PathBuf,
    asked: Arc<AtomicU64>,
    listener: Arc<Mutex<Option<UnixListener>>>,
}

impl Daemon {
    fn start(dir: &Path, counters: fn(u64) -> Vec<Counted>) -> Self {
        let socket = dir.join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let daemon = Self {
            socket,
            asked: Arc::default(),
            listener: Arc::new(Mutex::new(Some(listener.try_clone().unwrap()))),
        };
        let (asked, listening) = (Arc::clone(&daemon.asked), Arc::clone(&daemon.listener));
        thread::spawn(move || {
            for client in listener.incoming() {
                if listening.lock().unwrap().is_none() {
                    return;
                }
                let asked = Arc::clone(&asked);
                thread::spawn(move || serve(client.unwrap(), &asked, counters));
            }
        });
        daemon
    }

    /// It ends.
    fn stop(&self) {
        drop(self.listener.lock().unwrap().take());
        fs::remove_file(&self.socket).unwrap();
    }
}

fn serve(mut client: UnixStream, asked: &AtomicU64, counters: fn(u64) -> Vec<Counted>) {
    let mut framer = Framer::strict(MAX_PAYLOAD);
    let mut bytes = [0; 4096];
    while let Ok(got @ 1..) = client.read(&mut bytes) {
        framer.push(&bytes[..got]);
        while let Ok(Some(frame)) = framer.next_message() {
            let answer = match Message::from_frame(&frame).unwrap() {
                Message::Hello { .. } => Message::Welcome {
                    version: VERSION,
                    server: "vnplugd <b>9</b>".into(),
                    pool_id: 0,
                },
                _ => Message::Counters(counters(asked.fetch_add(1, Ordering::Relaxed))),
            };
            let _ = client.write_all(&answer.encode(frame.0.id, 0));
        }
    }
}

fn counted(kind: &str, name: &str, labels: &[(&str, &str)], values: &[(&str, u64)]) -> Counted {
    let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    Counted {
        kind: kind.into(),
        name: name.into(),
        labels: labels.collect(),
        values: values.iter().map(|(k, v)| ((*k).into(), *v)).collect(),
    }
}

const EVIL: &str = "<img src=x onerror=\"document.title='evil'\">\u{202e}txt";

/// Everything that strangers name is hostile.
fn hostile(n: u64) -> Vec<Counted> {
    let port = [
        ("label", EVIL),
        ("group", EVIL),
        ("owner", "vm \u{202e}<script>document.title='evil'</script>"),
        ("device", "host:eth1"),
        ("state", "open"),
    ];
    let vm = "\u{202e}<script>document.title='evil'</script>";
    vec![
        counted("daemon", "vnplugd", &[], &[]),
        counted(
            "source",
            "eth1",
            &[("state", "up"), ("kind", "af_packet")],
            &[
                ("seen", 1000 * n),
                ("bytes", 100_000 * n),
                ("kernel_dropped", 0),
                ("patience_ms", 2500),
            ],
        ),
        counted(
            "port",
            "1",
            &port,
            &[("delivered", 900 * n), ("dropped_full", 100 * n)],
        ),
        counted(
            "port",
            "12",
            &[("state", "open"), ("label", "tcpdump")],
            &[("delivered", 10 * n)],
        ),
        counted(
            "vm",
            vm,
            &[("state", "ready"), ("kind", "qemu")],
            &[("pool_bytes", 16 << 20), ("pool_free", 4 << 20)],
        ),
    ]
}

/// The page of this daemon, without recordings.
fn page(socket: &Path) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-web"));
    command.arg("--socket").arg(socket);
    Server::start_by(command, &[])
}

#[test]
fn strangers_names_are_text_and_a_daemon_that_goes_is_told() {
    let dir = TestDir::new("web");
    let daemon = Daemon::start(&dir.0, hostile);
    let server = page(&daemon.socket);
    let browser = Browser::open(1200, 1000, false);
    // There are no recordings: the page is the other one.
    browser.go(&format!("http://{}/", server.address));
    let polls = || {
        browser
            .run("return Number(document.body.dataset.polls ?? 0)")
            .as_u64()
            .unwrap()
    };
    eventually("it asks again and again", || polls() >= 3);
    let ports = browser.text("ports");
    assert!(
        ports.contains("<img src=x onerror=\"document.title='evil'\">\\u{202e}txt"),
        "{ports}"
    );
    assert!(browser.text("vms").contains("\\u{202e}<script>"));
    assert!(browser.text("places").starts_with("vnplugd <b>9</b>"));
    assert_eq!(browser.run("return document.title"), "vNPlug now");
    let foreign = "return document.querySelectorAll('img, td script, td b').length";
    assert_eq!(browser.run(foreign), 0);
    assert!(
        browser.text("sources").contains("af_packet"),
        "{}",
        browser.text("sources")
    );
    assert!(
        browser.text("stages").contains("ring"),
        "{}",
        browser.text("stages")
    );
    assert!(
        browser.text("lost").contains("the reader is too slow"),
        "{}",
        browser.text("lost")
    );
    // Sorted by the number, then the other way round.
    let first = || browser.run("return document.querySelector('#ports tbody td').innerText");
    assert_eq!(first(), "1");
    let sort = "document.querySelector('#ports th button').click()";
    browser.run(sort);
    assert_eq!(first(), "1");
    browser.run(sort);
    assert_eq!(first(), "12");
    browser.screenshot("now");
    daemon.stop();
    eventually("it is told", || {
        browser.text("trouble").contains("does not answer")
    });
    assert!(
        browser.text("ports").contains("tcpdump"),
        "the last figures stay"
    );
    browser.screenshot("now-away");
    let _again = Daemon::start(&dir.0, hostile);
    eventually("it goes on", || browser.text("trouble").is_empty());
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn without_a_daemon_the_answer_says_so_and_with_recordings_the_page_is_theirs() {
    let dir = TestDir::new("web");
    let nobody = dir.0.join("nobody");
    let server = page(&nobody);
    let json = server.json("/api/now");
    let error = json["error"].as_str().unwrap();
    assert!(
        error.contains("nobody") || error.contains("No such file"),
        "{error}"
    );
    assert_eq!(
        (&json["sources"], &json["sees_all"]),
        (&json!([]), &json!(false))
    );
    let answer = server.get("/");
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, "now.html")
    );
    assert_eq!(server.get("/api/now?x=1").status, 400);
    let foreign = [("Host", "localhost"), ("Sec-Fetch-Site", "cross-site")];
    assert_eq!(server.ask("GET", "/api/now", &foreign).status, 403);
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-web"));
    command.arg("--socket").arg(&nobody);
    let both = Server::start_by(command, &[&dir.0]);
    assert!(both.get("/").text().contains("Recordings"));
    assert_eq!(both.json("/api/now")["server"], "");
}

#[test]
fn a_hundred_pages_ask_the_daemon_once() {
    let dir = TestDir::new("web");
    let daemon = Daemon::start(&dir.0, hostile);
    let server = page(&daemon.socket);
    let began = Instant::now();
    thread::scope(|scope| {
        let pages: Vec<_> = (0..100)
            .map(|_| scope.spawn(|| server.json("/api/now")))
            .collect();
        for page in pages {
            assert_ne!(page.join().unwrap()["sources"], Value::Null);
        }
    });
    let (asked, seconds) = (
        daemon.asked.load(Ordering::Relaxed),
        began.elapsed().as_secs(),
    );
    assert!((1..=1 + seconds).contains(&asked), "{asked} in {seconds} s");
}
