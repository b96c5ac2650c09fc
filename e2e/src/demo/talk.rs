//! Real traffic: ordinary programs that talk to each other over the wire.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::wire::{FAR, Wire, until};
use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::netns;

/// Servers at the far end: HTTP, DNS, and a sink for bulk data.
#[derive(Debug)]
pub(super) struct Talkers {
    dir: PathBuf,
    near: String,
    _servers: Vec<Tethered>,
}

impl Talkers {
    pub(super) fn start(lab: &Lab, wire: &Wire) -> Result<Self> {
        let dir = lab.dir().join("talk");
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.join(name);
            fs::write(&path, bytes).map_err(LabError::io(format!("write {}", path.display())))
        };
        fs::create_dir(&dir).map_err(LabError::io("make the talkers' directory"))?;
        write(
            "page.html",
            "<p>A page for the demo.</p>\n".repeat(200).as_bytes(),
        )?;
        write("large", &noise(2 << 20))?;
        write("bulk", &noise(8 << 20))?;
        let names: String = (1..=100).map(|n| format!("host{n}.demo A\n")).collect();
        write("names", names.as_bytes())?;
        write("converse.sh", CONVERSE.as_bytes())?;
        write("sink.py", SINK.as_bytes())?;
        write("send.py", SEND.as_bytes())?;
        let at_dir = dir.display().to_string();
        let listen = format!("--listen-address={FAR}");
        let sink = dir.join("sink.py").display().to_string();
        let servers: [&[&str]; 3] = [
            &["busybox", "httpd", "-f", "-p", "80", "-h", &at_dir],
            &[
                "/usr/sbin/dnsmasq",
                "--keep-in-foreground",
                "--conf-file=/dev/null",
                "--pid-file=",
                "--user=root",
                "--no-resolv",
                "--no-hosts",
                "--bind-interfaces",
                "--address=/demo/10.77.0.7",
                &listen,
            ],
            &["python3", &sink, FAR],
        ];
        let start = |words: &&[&str]| spawn(wire.far.name(), words, Path::new("/dev/null"));
        let talkers = Self {
            _servers: servers.iter().map(start).collect::<Result<_>>()?,
            near: wire.near.name().to_owned(),
            dir,
        };
        let page = format!("http://{FAR}/page.html");
        let name = format!("@{FAR}");
        until("the servers answer", || {
            let http = wire
                .near
                .exec(&["curl", "-sfo", "/dev/null", "-m", "1", &page]);
            let dns = wire
                .near
                .exec(&["dig", "+tries=1", "+time=1", &name, "host1.demo"]);
            Ok(http.is_ok() && dns.is_ok())
        })?;
        Ok(talkers)
    }

    /// Lets the programs talk until all are done.
    ///
    /// # Errors
    /// If one of them fails, with what they printed.
    pub(super) fn converse(&self) -> Result<Duration> {
        let log = self.dir.join("log");
        let (dir, script) = (self.dir.display().to_string(), "converse.sh");
        let start = Instant::now();
        let words = [
            "sh",
            "-c",
            "cd \"$0\" && exec sh -e \"$1\" \"$2\"",
            &dir,
            script,
            FAR,
        ];
        let mut programs = spawn(&self.near, &words, &log)?;
        let text = match programs.wait(TALK_LIMIT) {
            Some(status) if status.success() => return Ok(start.elapsed()),
            Some(status) => format!("{status}"),
            None => format!("not done after {TALK_LIMIT:?}"),
        };
        Err(LabError::Command {
            command: "the talking programs".to_owned(),
            text: format!("{text}: {}", fs::read_to_string(&log).unwrap_or_default()),
        })
    }
}

/// Starts a program in a namespace; it dies with us. Its errors go to `log`.
pub(super) fn spawn(netns: &str, words: &[&str], log: &Path) -> Result<Tethered> {
    let open = || fs::File::options().create(true).append(true).open(log);
    let errors = open().map_err(LabError::io(format!("open {}", log.display())))?;
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors);
    Tethered::spawn(command, Vec::new(), Some(netns::open(netns)?))
}

/// Bytes that do not repeat (a linear congruential generator), so no two segments are alike.
fn noise(len: u32) -> Vec<u8> {
    let mut state = 1_u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(next).collect()
}

/// All at once; fails if one fails. `$1` is the far end.
const CONVERSE: &str = r#"
ping -q -c 100 -i 0.01 "$1" >/dev/null & ping=$!
dig +tries=3 +time=20 @"$1" -f names >/dev/null & dns=$!
(for n in 1 2 3 4 5 6 7 8 9 10; do curl -sf -m 90 -o /dev/null "http://$1/page.html"; done) & pages=$!
(for n in 1 2 3; do curl -sf -m 90 -o /dev/null "http://$1/large"; done) & large=$!
python3 send.py "$1" <bulk & bulk=$!
for job in $ping $dns $pages $large $bulk; do wait $job; done
"#;
/// Takes whatever comes and says how much it was.
const SINK: &str = r#"
import socket, sys
listener = socket.create_server((sys.argv[1], 5001))
while True:
    peer, _ = listener.accept()
    total = sum(iter(lambda: len(peer.recv(65536)), 0))
    peer.sendall(str(total).encode())
    peer.close()
"#;
/// Sends its input; fails unless the sink got all of it.
const SEND: &str = r#"
import socket, sys
data = sys.stdin.buffer.read()
sink = socket.create_connection((sys.argv[1], 5001), timeout=90)
sink.sendall(data)
sink.shutdown(socket.SHUT_WR)
sys.exit(int(sink.recv(100)) != len(data))
"#;
const TALK_LIMIT: Duration = Duration::from_secs(120);
