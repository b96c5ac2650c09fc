//! A sandbox of a test: the probe, run by an ordinary user.

use std::fs::{self, Permissions};
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use vnplug_testing::TestDir;

/// Nobody's number.
const NOBODY: u32 = 65_534;

/// The probe, where everybody can run it.
fn probe() -> &'static PathBuf {
    static PROBE: OnceLock<(TestDir, PathBuf)> = OnceLock::new();
    let (_, path) = PROBE.get_or_init(|| {
        let dir = TestDir::new("sandbox-probe");
        let path = dir.path("probe");
        fs::copy(env!("CARGO_BIN_EXE_sandbox-probe"), &path).unwrap();
        fs::set_permissions(&dir.0, Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        (dir, path)
    });
    path
}

/// The probe as an ordinary user runs it.
pub(crate) fn as_nobody(words: &[&str]) -> Command {
    let mut command = Command::new(probe());
    command.args(words).current_dir("/");
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// The probe in a sandbox that allows what `allowed` says.
pub(crate) fn sandboxed(allowed: &[&str], words: &[&str]) -> Command {
    let inside = probe().to_str().unwrap();
    let all = [&["run"], allowed, &["--", inside], words].concat();
    as_nobody(&all)
}

/// What it says, if it ends well.
pub(crate) fn said(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap().trim().to_string()
}

/// A directory that the ordinary user may write to.
pub(crate) fn open_dir(what: &str) -> TestDir {
    let dir = TestDir::new(what);
    fs::set_permissions(&dir.0, Permissions::from_mode(0o777)).unwrap();
    dir
}

/// A command that runs, and its lines as they come.
pub(crate) struct Running {
    pub(crate) child: Child,
    text: Arc<std::sync::Mutex<String>>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let text = Arc::new(std::sync::Mutex::new(String::new()));
        let into = Arc::clone(&text);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = stdout.read(&mut bytes) {
                into.lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&bytes[..length]));
            }
        });
        Self { child, text }
    }

    pub(crate) fn text(&self) -> String {
        self.text.lock().unwrap().clone()
    }

    /// The supervisor's process id: the only child of the keeper.
    pub(crate) fn supervisor(&self) -> u32 {
        let keeper = self.child.id();
        let children = format!("/proc/{keeper}/task/{keeper}/children");
        let text = vnplug_testing::until(
            "there is a supervisor",
            || fs::read_to_string(&children).unwrap_or_default(),
            |text| !text.trim().is_empty(),
        );
        text.trim().parse().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port with a TCP listener and a UDP socket outside the sandbox, which count what comes.
pub(crate) struct Port {
    pub(crate) number: u16,
    pub(crate) connections: Arc<AtomicU64>,
    pub(crate) datagrams: Arc<AtomicU64>,
    goes_on: Arc<AtomicBool>,
}

impl Port {
    pub(crate) fn new() -> Self {
        loop {
            let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let number = udp.local_addr().unwrap().port();
            let Ok(tcp) = TcpListener::bind((Ipv4Addr::LOCALHOST, number)) else {
                continue;
            };
            let port = Self {
                number,
                connections: Arc::default(),
                datagrams: Arc::default(),
                goes_on: Arc::new(AtomicBool::new(true)),
            };
            port.count(udp, tcp);
            return port;
        }
    }

    fn count(&self, udp: UdpSocket, tcp: TcpListener) {
        udp.set_read_timeout(Some(Duration::from_millis(50)))
            .unwrap();
        let (goes_on, datagrams) = (Arc::clone(&self.goes_on), Arc::clone(&self.datagrams));
        thread::spawn(move || {
            let mut bytes = [0; 64];
            while goes_on.load(Ordering::Relaxed) {
                if udp.recv(&mut bytes).is_ok() {
                    datagrams.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let (goes_on, connections) = (Arc::clone(&self.goes_on), Arc::clone(&self.connections));
        thread::spawn(move || {
            while goes_on.load(Ordering::Relaxed) {
                if tcp.accept().is_ok() {
                    connections.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }

    pub(crate) fn name(&self) -> String {
        format!("127.0.0.1:{}", self.number)
    }

    /// What came, when all that was sent has come.
    pub(crate) fn arrived(&self) -> u64 {
        thread::sleep(Duration::from_millis(100));
        self.connections.load(Ordering::Relaxed) + self.datagrams.load(Ordering::Relaxed)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.goes_on.store(false, Ordering::Relaxed);
        // Its listener looks up.
        let _ = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.number));
    }
}

/// A port where nobody listens now.
pub(crate) fn free_port() -> u16 {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.local_addr().unwrap().port()
}

/// As often as usual, or with `VNPLUG_LONG=1` in the environment as the long run does it.
pub(crate) fn often(usual: u64, long: u64) -> u64 {
    match std::env::var_os("VNPLUG_LONG") {
        Some(_) => long,
        None => usual,
    }
}

/// A number that a line of the probe's says as `name=number`.
pub(crate) fn figure(text: &str, name: &str) -> u64 {
    let mark = format!("{name}=");
    let rest = text.split(mark.as_str()).nth(1);
    let digits: String = rest
        .unwrap_or("")
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits
        .parse()
        .unwrap_or_else(|_| panic!("no {name} in {text:?}"))
}
