//! Asks whoever connects to a Unix socket: lines of JSON, which docs/sandbox.md describes.
//!
//! A front-end belongs to the same user, and is not a process of the sandbox: one of these would answer its own
//! questions. The gate refuses to connect them, and who connects all the same is looked at here once more. A
//! front-end that does not read, sends half a line for ever or too long a line is let go; there are at most
//! [`CLIENTS`] of them.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde_json::{Value, json};
use vnplug_ring::units;

use crate::ask::{Answer, Event, Life, show};
use crate::gate::Gate;

/// The directory of the sockets of all sandboxes of this user, made if it is not there: only the user may enter it.
///
/// # Errors
/// It cannot be made, or belongs to somebody else.
pub fn directory() -> io::Result<PathBuf> {
    let own = geteuid().as_raw();
    let base = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_absolute())
    {
        Some(dir) => PathBuf::from(dir).join("vnplug"),
        None => PathBuf::from(format!("/tmp/vnplug-{own}")),
    };
    for path in [base.clone(), base.join("sandbox")] {
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // In /tmp somebody else could have been first.
        let meta = fs::symlink_metadata(&path)?;
        if !meta.is_dir() || meta.uid() != own {
            let text = format!("{} is not a directory of this user", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
    }
    let path = base.join("sandbox");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
    Ok(path)
}

/// A socket where front-ends connect; its file goes with it.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
}

impl Socket {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes front-ends at `path`, on threads of its own. `command` is shown to them. `sandbox` is the process
    /// whose descendants are inside: none of them is let in.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn start(gate: &Gate, path: &Path, command: &[String], sandbox: u32) -> io::Result<Self> {
        // Of a process with the same number, which is gone.
        let _ = fs::remove_file(path);
        let listener = UnixListener::bind(path)?;
        let socket = Self {
            path: path.to_owned(),
        };
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        gate.keep_private(path);
        let hello =
            json!({"hello": "vnplug-sandbox", "version": 1, "pid": sandbox, "command": command});
        let gate = gate.clone();
        let clients = Arc::new(AtomicUsize::new(0));
        let run = move || {
            loop {
                let Ok((stream, _)) = listener.accept() else {
                    // No descriptor is left: one will be.
                    thread::sleep(PAUSE);
                    continue;
                };
                // What does not hold for the peer is told to nobody: it is no peer.
                if !is_front(&stream, sandbox) {
                    continue;
                }
                let place = Place::take(&clients);
                let Some(place) = place else {
                    let _ = refuse(&stream, "there are too many front-ends already");
                    continue;
                };
                let (gate, hello) = (gate.clone(), hello.to_string());
                let serve = move || {
                    let closing = stream.try_clone();
                    // However it ends, the place is free, and then the peer sees the end.
                    let _ = Client { gate, stream }.serve(&hello);
                    drop(place);
                    if let Ok(stream) = closing {
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                };
                let _ = thread::Builder::new()
                    .name("vnplug-front".to_owned())
                    .spawn(serve);
            }
        };
        thread::Builder::new()
            .name("vnplug-fronts".to_owned())
            .spawn(run)?;
        Ok(socket)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // It may be gone with its directory.
        let _ = fs::remove_file(&self.path);
    }
}

/// One of the places for front-ends.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(clients: &Arc<AtomicUsize>) -> Option<Self> {
        let more = |count| (count < CLIENTS).then_some(count + 1);
        // One thread takes places; others only give them back.
        clients
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()?;
        Some(Self(clients.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// True if the peer is a process of this user (or of root) that is not `sandbox`, which connects
/// for those inside, and does not descend from it.
fn is_front(stream: &UnixStream, sandbox: u32) -> bool {
    let Ok(peer) = socket_peercred(stream) else {
        return false;
    };
    let is_user = peer.uid == geteuid() || peer.uid.is_root();
    let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
    is_user && pid != sandbox && !descends(pid, sandbox)
}

/// True if the process `pid` descends from `sandbox`, or is gone: whoever it was may be anybody's child.
pub(crate) fn descends(mut pid: u32, sandbox: u32) -> bool {
    for _ in 0..GENERATIONS {
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
            return true;
        };
        // The second field is the name, in parentheses and with whatever the process wrote there.
        let parent = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        match parent {
            Some(parent) if parent == sandbox => return true,
            Some(0 | 1) => return false,
            Some(parent) => pid = parent,
            None => return true,
        }
    }
    true
}

fn refuse(mut stream: &UnixStream, why: &str) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    writeln!(stream, "{}", json!({"error": why}))
}

struct Client {
    gate: Gate,
    stream: UnixStream,
}

impl Client {
    fn serve(self, hello: &str) -> io::Result<()> {
        self.stream.set_write_timeout(Some(PATIENCE))?;
        let writer = Arc::new(Writer(Mutex::new(self.stream.try_clone()?)));
        writer.line(hello)?;
        let events = self.gate.subscribe();
        let (its, stream) = (writer.clone(), self.stream.try_clone()?);
        let tell = move || {
            // Who does not read is let go, reader and all.
            let _ = tell(&its, &events);
            let _ = stream.shutdown(Shutdown::Both);
        };
        thread::Builder::new()
            .name("vnplug-front".to_owned())
            .spawn(tell)?;
        let mut reader = BufReader::new(self.stream.try_clone()?);
        let mut line = Vec::new();
        loop {
            line.clear();
            let count = reader.by_ref().take(LINE).read_until(b'\n', &mut line)?;
            if count == 0 {
                return Ok(());
            }
            if line.last() != Some(&b'\n') {
                return refuse(&self.stream, "a line is too long, or ends before its end");
            }
            if let Err(why) = self.line(&line) {
                writer.line(&json!({"error": why}).to_string())?;
            }
        }
    }

    fn line(&self, line: &[u8]) -> Result<(), String> {
        let value: Value =
            serde_json::from_slice(line).map_err(|error| format!("this is no JSON: {error}"))?;
        let answer = value
            .get("answer")
            .ok_or("write {\"answer\": {\"id\": …, \"say\": …}}")?;
        let id = answer
            .get("id")
            .and_then(Value::as_u64)
            .ok_or("the answer has no id: write the question's")?;
        let allow = match answer.get("say").and_then(Value::as_str) {
            Some("allow") => true,
            Some("deny") => false,
            _ => return Err("say is \"allow\" or \"deny\"".to_owned()),
        };
        let life = match answer.get("for").and_then(Value::as_str).unwrap_or("once") {
            "once" => Life::Once,
            "session" => Life::Session,
            "always" => Life::Always,
            time => {
                let time = units::duration(time).map_err(|_| {
                    "for is \"once\", \"session\", \"always\", or a time, as in \"10m\"".to_owned()
                })?;
                let until = std::time::SystemTime::now().checked_add(time);
                Life::Until(until.ok_or("that is too long: write \"always\"")?)
            }
        };
        let offer = answer
            .get("offer")
            .map_or(Some(0), Value::as_u64)
            .and_then(|offer| usize::try_from(offer).ok());
        let offer = offer.ok_or("offer is the place of one of the question's offers, from 0 on")?;
        self.gate
            .answer(id, Answer { allow, life, offer }, "socket")
            .map_err(|error| error.to_string())
    }
}

fn tell(writer: &Writer, events: &Receiver<Event>) -> io::Result<()> {
    loop {
        let line = match events.recv_timeout(ALIVE) {
            Ok(Event::Asked(question)) => json!({"ask": show::question_json(&question)}),
            Ok(Event::Settled { id, allow, by }) => {
                let say = if allow { "allow" } else { "deny" };
                json!({"settled": {"id": id, "say": say, "by": by}})
            }
            // A front-end that is gone is noticed by writing to it.
            Err(RecvTimeoutError::Timeout) => json!({}),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        writer.line(&line.to_string())?;
    }
}

/// Writes whole lines, whoever writes.
struct Writer(Mutex<UnixStream>);

impl Writer {
    fn line(&self, line: &str) -> io::Result<()> {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(format!("{line}\n").as_bytes())
    }
}

/// The most front-ends at once.
pub const CLIENTS: usize = 8;
/// The longest line that a front-end may send, in bytes.
pub const LINE: u64 = 4096;
/// How long a front-end may leave a full socket unread.
const PATIENCE: Duration = Duration::from_secs(2);
/// Before a front-end is taken again, if that failed.
const PAUSE: Duration = Duration::from_millis(100);
/// How often a line without content comes.
const ALIVE: Duration = Duration::from_secs(10);
/// Deeper than any tree of processes.
const GENERATIONS: usize = 100_000;
