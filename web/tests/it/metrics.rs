//! `vnplug-metrics` as Prometheus and worse clients see it; with a real daemon: `e2e/tests/metrics.rs`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vnplug_testing::eventually;

use crate::support::{Answer, TestDir, ask};

/// vnplug-metrics at work.
struct Metrics {
    child: Child,
    address: SocketAddr,
}

impl Metrics {
    fn start(socket: &Path) -> Self {
        Self::start_by(command(socket, "127.0.0.1:0"))
    }

    fn start_by(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("vnplug-metrics: http://");
        let address = address.and_then(|rest| rest.strip_suffix("/metrics"));
        let Some(address) = address.and_then(|text| text.parse().ok()) else {
            let _ = child.kill();
            panic!("{line:?}, {:?}", child.wait());
        };
        Self { child, address }
    }

    fn ask(&self, path: &str, host: &str) -> Answer {
        ask(self.address, "GET", path, &[("Host", host)], b"").unwrap()
    }

    fn scrape(&self) -> Answer {
        self.ask("/metrics", &self.address.to_string())
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(socket: &Path, listen: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug-metrics"));
    command.args(["--listen", listen, "--socket"]).arg(socket);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A daemon that takes a while, says nothing, and hangs up.
fn daemon(dir: &TestDir) -> (std::path::PathBuf, Arc<AtomicU32>) {
    let path = dir.0.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    thread::spawn(move || {
        for client in listener.incoming() {
            count.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(100));
            drop(client);
        }
    });
    (path, asked)
}

#[test]
fn a_daemon_that_is_not_there_is_told_and_the_answer_is_a_metric() {
    let dir = TestDir::new("metrics");
    let metrics = Metrics::start(&dir.0.join("nobody"));
    let answer = metrics.scrape();
    assert_eq!(answer.status, 200);
    assert!(
        answer
            .header("content-type")
            .starts_with("application/openmetrics-text")
    );
    let text = answer.text();
    assert!(
        text.contains("\nvnplug_up 0.0\n") && text.ends_with("# EOF\n"),
        "{text}"
    );
    assert_eq!(metrics.ask("/", "localhost").status, 404);
}

#[test]
fn a_hundred_scrapers_ask_the_daemon_once() {
    let dir = TestDir::new("metrics");
    let (socket, asked) = daemon(&dir);
    let metrics = Metrics::start(&socket);
    let began = Instant::now();
    thread::scope(|scope| {
        let scrapers: Vec<_> = (0..100).map(|_| scope.spawn(|| metrics.scrape())).collect();
        for scraper in scrapers {
            assert_eq!(scraper.join().unwrap().status, 200);
        }
    });
    let seconds = began.elapsed().as_secs() as u32;
    let asked = asked.load(Ordering::Relaxed);
    assert!((1..=1 + seconds).contains(&asked), "{asked} in {seconds} s");
}

#[test]
fn clients_that_stop_halfway_keep_nobody_waiting() {
    let dir = TestDir::new("metrics");
    let metrics = Metrics::start(&dir.0.join("nobody"));
    let peer = |says: &[u8]| {
        let mut peer = TcpStream::connect(metrics.address).unwrap();
        // One that is cut meanwhile is no failure.
        let _ = peer.write_all(says);
        peer
    };
    // Half a request, and a request whose answer nobody reads.
    let half: Vec<_> = (0..150).map(|_| peer(b"GET /metrics HT")).collect();
    let host = metrics.address;
    let whole = format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let deaf: Vec<_> = (0..150).map(|_| peer(whole.as_bytes())).collect();
    eventually("others are answered", || metrics.scrape().status == 200);
    drop((half, deaf));
    // A header without end, and very many of them.
    for filler in ["x", "\r\nx: y"] {
        let mut peer = peer(format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\nlong: ").as_bytes());
        let filler = filler.repeat(10_000);
        let limit = Instant::now() + Duration::from_secs(30);
        let sent = std::iter::repeat_with(|| peer.write_all(filler.as_bytes()));
        let sent = sent.take(1000).take_while(Result::is_ok).count();
        assert!(
            sent < 1000 && Instant::now() < limit,
            "it reads without end"
        );
        let mut answer = String::new();
        let _ = peer.read_to_string(&mut answer);
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
            "{answer}"
        );
    }
    assert_eq!(metrics.scrape().status, 200);
}

#[test]
fn who_may_ask() {
    let dir = TestDir::new("metrics");
    let socket = dir.0.join("nobody");
    let metrics = Metrics::start(&socket);
    // A page whose name was made to point here.
    assert_eq!(metrics.ask("/metrics", "evil.example").status, 403);
    assert_eq!(metrics.ask("/metrics", "localhost").status, 200);
    let mut named = command(&socket, "127.0.0.1:0");
    named.args(["--host", "sensor.example", "--host", "other.example"]);
    let named = Metrics::start_by(named);
    for (host, status) in [
        ("sensor.example", 200),
        ("other.example", 200),
        ("evil.example", 403),
    ] {
        assert_eq!(named.ask("/metrics", host).status, status, "{host}");
    }
    let output = command(&socket, "0.0.0.0:0").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("--allow-remote"),
        "{said}"
    );
}
