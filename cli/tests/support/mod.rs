//! A daemon that only says what the protocol asks of it, and a paused QEMU to plug into.

#![allow(dead_code, reason = "each test binary uses its part")]
#![expect(clippy::unwrap_used, reason = "a test's helper fails loudly")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use vnplug_ring::control::wire::{Framer, MAX_REQUEST};
use vnplug_ring::control::{Message, VERSION, VmReady, VmSpec, code};
use vnplug_testing::{Deadline, TestDir, until};

/// Answers on a socket until the test ends.
#[derive(Clone)]
pub(crate) struct Daemon {
    pub(crate) socket: PathBuf,
    dir: PathBuf,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    vms: Vec<VmSpec>,
    /// The latest that was asked for, whatever was answered.
    asked: Option<VmSpec>,
    adopted: Vec<(String, OwnedFd)>,
    answers: Vec<(u8, Message)>,
    connections: Vec<UnixStream>,
}

impl Daemon {
    pub(crate) fn start(scratch: &TestDir) -> Self {
        let daemon = Self {
            socket: scratch.path("vnplug.sock"),
            dir: scratch.0.clone(),
            state: Arc::default(),
        };
        let listener = UnixListener::bind(&daemon.socket).unwrap();
        let server = daemon.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let server = server.clone();
                thread::spawn(move || server.serve(stream.unwrap()));
            }
        });
        daemon
    }

    /// From now on a request of this kind gets this answer.
    pub(crate) fn answer(&self, kind: u8, answer: Message) {
        self.state.lock().unwrap().answers.push((kind, answer));
    }

    pub(crate) fn vms(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        state.vms.iter().map(|vm| vm.name.clone()).collect()
    }

    pub(crate) fn spec(&self, name: &str) -> VmSpec {
        let state = self.state.lock().unwrap();
        state.vms.iter().find(|vm| vm.name == name).unwrap().clone()
    }

    pub(crate) fn asked(&self) -> VmSpec {
        self.state.lock().unwrap().asked.clone().unwrap()
    }

    pub(crate) fn take_adopted(&self) -> Option<(String, OwnedFd)> {
        self.state.lock().unwrap().adopted.pop()
    }

    /// Forgets everything and closes every connection, as a daemon that ends does.
    pub(crate) fn restart(&self) {
        let mut state = self.state.lock().unwrap();
        for connection in state.connections.drain(..) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        *state = State::default();
    }

    fn serve(&self, stream: UnixStream) {
        let copy = stream.try_clone().unwrap();
        self.state.lock().unwrap().connections.push(copy);
        let mut framer = Framer::strict(MAX_REQUEST);
        loop {
            let mut fds = Vec::new();
            let Some(bytes) = receive(&stream, &mut fds) else {
                return;
            };
            framer.push(&bytes);
            while let Some(frame) = framer.next_message().unwrap() {
                let message = Message::from_frame(&frame).unwrap();
                let answer = self.handle(message, &mut fds).encode(frame.0.id, 0);
                if (&stream).write_all(&answer).is_err() {
                    return;
                }
            }
        }
    }

    fn handle(&self, message: Message, fds: &mut Vec<OwnedFd>) -> Message {
        let mut state = self.state.lock().unwrap();
        if let Message::AttachVm(spec) = &message {
            state.asked = Some(spec.clone());
        }
        let canned = state
            .answers
            .iter()
            .find(|(kind, _)| *kind == message.kind());
        if let Some((_, answer)) = canned {
            return answer.clone();
        }
        match message {
            Message::Hello { .. } => Message::Welcome {
                version: VERSION,
                server: "test".into(),
                pool_id: 0,
            },
            Message::AttachVm(spec) => {
                state.vms.retain(|vm| vm.name != spec.name);
                let ready = self.ready(&spec);
                state.vms.push(spec);
                Message::VmReady(ready)
            }
            Message::DetachVm { name, .. } => {
                let before = state.vms.len();
                state.vms.retain(|vm| vm.name != name);
                if state.vms.len() < before {
                    return Message::Done;
                }
                Message::Error {
                    code: code::NOT_FOUND,
                    text: "no such VM".into(),
                }
            }
            Message::Adopt { name } => {
                let fd = fds.pop().expect("Adopt comes with a descriptor");
                state.adopted.push((name, fd));
                Message::Done
            }
            _ => Message::Error {
                code: code::PROTOCOL,
                text: "not in this test".into(),
            },
        }
    }

    fn ready(&self, spec: &VmSpec) -> VmReady {
        let path = |suffix: &str| self.dir.join(format!("{}.{suffix}", spec.name));
        let len = spec.pool_bytes.max(1 << 20);
        let pool = File::options();
        let pool = pool
            .clone()
            .create(true)
            .truncate(false)
            .write(true)
            .read(true)
            .open(path("pool"));
        let pool = pool.unwrap();
        pool.set_len(len).unwrap();
        let control = path("control");
        if !control.exists() {
            let listener = UnixListener::bind(&control).unwrap();
            thread::spawn(move || {
                let mut kept = Vec::new();
                loop {
                    kept.push(listener.accept());
                }
            });
        }
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let mut doorbell = String::new();
        if spec.vectors > 0 {
            doorbell = text(path("bell"));
            let _ = fs::remove_file(&doorbell);
            let listener = UnixListener::bind(&doorbell).unwrap();
            let vectors = spec.vectors;
            thread::spawn(move || {
                let mut kept = Vec::new();
                loop {
                    let (stream, _) = listener.accept().unwrap();
                    greet_ivshmem(&stream, &pool, vectors);
                    kept.push(stream);
                }
            });
        }
        VmReady {
            pool_path: text(path("pool")),
            pool_len: len,
            control_path: text(control),
            doorbell_path: doorbell,
            arenas: Vec::new(),
        }
    }
}

/// The handshake of QEMU's docs/specs/ivshmem-spec: version, id, memory, peers' and own vectors.
fn greet_ivshmem(stream: &UnixStream, pool: &File, vectors: u32) {
    let send = |number: i64, fd: Option<BorrowedFd<'_>>| {
        let fds: Vec<_> = fd.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let bytes = number.to_le_bytes();
        sendmsg(
            stream,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .unwrap();
    };
    send(0, None);
    send(1, None);
    send(-1, Some(pool.as_fd()));
    for peer in [0, 1] {
        for _ in 0..vectors {
            let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            send(peer, Some(bell.as_fd()));
        }
    }
}

fn receive(stream: &UnixStream, fds: &mut Vec<OwnedFd>) -> Option<Vec<u8>> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [std::io::IoSliceMut::new(&mut bytes)];
    let received = recvmsg(stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(got) = message {
            fds.extend(got);
        }
    }
    bytes.truncate(received.bytes);
    (!bytes.is_empty()).then_some(bytes)
}

/// A QEMU that stays paused (`-S`): its firmware never runs, hot-plug works all the same.
pub(crate) struct Qemu {
    child: Child,
    pub(crate) qmp: PathBuf,
    own: BufReader<UnixStream>,
}

impl Qemu {
    pub(crate) fn start(scratch: &TestDir, arguments: &[&str]) -> Self {
        let qmp = scratch.path("qmp");
        let own = scratch.path("qmp-of-the-test");
        let monitor = |path: &Path| format!("unix:{},server=on,wait=off", path.display());
        let child = Command::new("qemu-system-x86_64")
            .args([
                "-display",
                "none",
                "-nodefaults",
                "-m",
                "32",
                "-S",
                "-accel",
                "tcg",
            ])
            .args(["-qmp", &monitor(&qmp), "-qmp", &monitor(&own)])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-system-x86_64 is installed");
        let connect = || UnixStream::connect(&own);
        let stream = until("QEMU has a monitor", connect, Result::is_ok).unwrap();
        let mut qemu = Self {
            child,
            qmp,
            own: BufReader::new(stream),
        };
        qemu.line();
        qemu.ask("qmp_capabilities", json!({}));
        qemu
    }

    pub(crate) fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments}).to_string();
        self.own.get_mut().write_all(request.as_bytes()).unwrap();
        loop {
            let answer = self.line();
            if answer.get("event").is_none() {
                return answer;
            }
        }
    }

    /// Names of everything of ours in it.
    pub(crate) fn ours(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        for path in ["/objects", "/machine/peripheral"] {
            let list = self.ask("qom-list", json!({"path": path}));
            let items = list["return"].as_array().unwrap().clone();
            names.extend(items.iter().map(|i| i["name"].as_str().unwrap().to_owned()));
        }
        let chardevs = self.ask("query-chardev", json!({}));
        let items = chardevs["return"].as_array().unwrap().clone();
        names.extend(
            items
                .iter()
                .map(|i| i["label"].as_str().unwrap().to_owned()),
        );
        names.retain(|name| name.starts_with("vnplug-"));
        names.sort();
        names
    }

    pub(crate) fn fds(&self) -> usize {
        let path = format!("/proc/{}/fd", self.child.id());
        fs::read_dir(path).unwrap().count()
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.own.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// q35 that unplugs like real PCIe: at once while the slot has no power, so no guest is needed.
const NATIVE: [&str; 4] = [
    "-M",
    "q35",
    "-global",
    "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
];

/// The arguments of such a machine with this many ports, `rp1` and on.
pub(crate) fn q35(ports: usize) -> Vec<String> {
    let mut arguments: Vec<String> = NATIVE.map(str::to_owned).to_vec();
    for port in 1..=ports {
        arguments.push("-device".into());
        arguments.push(format!("pcie-root-port,id=rp{port},slot={port}"));
    }
    arguments
}

/// The command under test.
pub(crate) fn vnplug(socket: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vnplug"));
    command.arg("--socket").arg(socket).args(arguments);
    command.stdin(Stdio::null());
    command
}

/// Its exit code, stdout and stderr.
pub(crate) fn run(mut command: Command) -> (i32, String, String) {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    finish(child)
}

/// As [`run`], of a running child.
pub(crate) fn finish(mut child: Child) -> (i32, String, String) {
    let deadline = Deadline::new("the command ends");
    while child.try_wait().unwrap().is_none() {
        if deadline.is_over() {
            let _ = child.kill();
            panic!("the command did not end");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let Output {
        status,
        stdout,
        stderr,
    } = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

/// Reads what is there within `limit`.
pub(crate) fn read_some(fd: OwnedFd, limit: Duration) -> Vec<u8> {
    let mut stream = UnixStream::from(fd);
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(limit)).unwrap();
    let mut bytes = vec![0; 4096];
    let len = stream.read(&mut bytes).unwrap_or(0);
    bytes.truncate(len);
    bytes
}
