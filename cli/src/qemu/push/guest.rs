//! QEMU's guest agent: it reads and writes files in the guest and runs programs there, if its administrator allows it.
//!
//! What answers is the guest: every answer has a limit in time and size, and nothing of it is done here.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use vnplug_os::socket::connect_within;

use crate::failure::Failure;
use crate::qemu::lines::{Lines, MARK};
use crate::qemu::virsh::Virsh;

/// A guest whose agent answers.
pub(super) struct Guest {
    way: Way,
}

enum Way {
    Socket(Lines),
    /// With how many seconds an answer may take.
    Libvirt(Virsh, u64),
}

impl Guest {
    /// By the socket of the agent's channel; each of so many `tries` takes 1.5 seconds at most.
    ///
    /// # Errors
    /// Nobody is there, or nobody answers.
    pub(super) fn at(path: &Path, tries: u32) -> Result<Self, Failure> {
        let about = |why: String| Failure::about(path.display(), why);
        let first = u64::from(std::process::id()) << 20;
        // What is sent before the guest's end is open may never arrive there.
        for id in first..first + u64::from(tries) {
            let stream = connect_within(path, TRY_LIMIT).map_err(|error| {
                about(match error.kind() {
                    io::ErrorKind::TimedOut => format!("{error}; others hold this channel or wait for it"),
                    _ => format!("{error}; QEMU makes it by {CHANNEL}"),
                })
            })?;
            if let Some(lines) = synchronised(Lines::new(stream), id) {
                return Ok(Self {
                    way: Way::Socket(lines),
                });
            }
        }
        let limit = (TRY_LIMIT * tries).as_secs();
        Err(about(format!(
            "no guest agent answers within {limit} s: is qemu-guest-agent installed and running in the guest?"
        )))
    }

    /// By libvirt, which holds the channel; `tries` as for [`at`](Self::at).
    pub(super) fn of(virsh: Virsh, tries: u32) -> Self {
        let limit = LIMIT.min(TRY_LIMIT * tries);
        Self {
            way: Way::Libvirt(virsh, limit.as_secs_f64().ceil() as u64),
        }
    }

    /// Fails if the guest's administrator forbids what is needed.
    pub(super) fn must_do(&mut self, commands: &[&str]) -> Result<(), Failure> {
        let info = self.call("guest-info", json!({}))?;
        let supported = info["supported_commands"].as_array();
        let can = |command: &str| {
            let named = |it: &&Value| it["name"] == command && it["enabled"] == true;
            supported.is_some_and(|all| all.iter().any(|it| named(&it)))
        };
        match commands.iter().find(|command| !can(command)) {
            None => Ok(()),
            Some(command) => Err(Failure::new(format!(
                "the guest's agent does not allow {command}: allow it in the guest (block-rpcs in /etc/qemu/qemu-ga.conf, \
                 or BLACKLIST_RPC in /etc/sysconfig/qemu-ga), or install vNPlug's agent there by its package"
            ))),
        }
    }

    /// Reads the beginning of a file, 4 KiB at most.
    pub(super) fn read(&mut self, path: &str) -> Result<String, Failure> {
        let file = self.call("guest-file-open", json!({"path": path, "mode": "r"}))?;
        let read = self.call("guest-file-read", json!({"handle": file, "count": 4096}));
        self.call("guest-file-close", json!({"handle": file}))?;
        let bytes = STANDARD.decode(read?["buf-b64"].as_str().unwrap_or_default());
        Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
    }

    /// Writes a file.
    pub(super) fn write(&mut self, path: &str, bytes: &[u8]) -> Result<(), Failure> {
        let file = self.call("guest-file-open", json!({"path": path, "mode": "w"}))?;
        for piece in bytes.chunks(PIECE) {
            let arguments = json!({"handle": file, "buf-b64": STANDARD.encode(piece)});
            let written = self.call("guest-file-write", arguments)?;
            if written["count"] != piece.len() {
                return Err(Failure::about(path, "the guest wrote less of it"));
            }
        }
        self.call("guest-file-flush", json!({"handle": file}))?;
        self.call("guest-file-close", json!({"handle": file}))
            .map(drop)
    }

    /// Has the guest's shell run a script; what it said.
    ///
    /// # Errors
    /// It failed, or is not done within 30 seconds.
    pub(super) fn run(&mut self, script: &str) -> Result<String, Failure> {
        let script =
            format!("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; {script}");
        let arguments = json!({"path": "/bin/sh", "arg": ["-c", script], "capture-output": true});
        let pid = self.call("guest-exec", arguments)?["pid"].take();
        let deadline = Instant::now() + SCRIPT_LIMIT;
        loop {
            let status = self.call("guest-exec-status", json!({"pid": pid}))?;
            if status["exited"] == true {
                let text = |key: &str| {
                    let data = status[key].as_str().unwrap_or_default();
                    let bytes = STANDARD.decode(data).unwrap_or_default();
                    String::from_utf8_lossy(&bytes).trim().to_owned()
                };
                if status["exitcode"] == 0 {
                    return Ok(text("out-data"));
                }
                let said = text("err-data");
                return Err(Failure::about("in the guest", said));
            }
            if Instant::now() >= deadline {
                let limit = SCRIPT_LIMIT.as_secs();
                return Err(Failure::new(format!(
                    "the guest is not done within {limit} s"
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn call(&mut self, command: &str, arguments: Value) -> Result<Value, Failure> {
        let lines = match &mut self.way {
            Way::Libvirt(virsh, limit) => return Ok(virsh.in_guest(command, arguments, *limit)?),
            Way::Socket(lines) => lines,
        };
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        let deadline = Instant::now() + LIMIT;
        let answer = lines
            .write(line.as_bytes(), deadline)
            .and_then(|()| lines.read(deadline));
        match answer {
            Ok(Some(mut answer)) if answer.get("return").is_some() => Ok(answer["return"].take()),
            Ok(Some(answer)) => {
                let why = answer["error"]["desc"].as_str().unwrap_or("no answer");
                Err(Failure::new(format!("the guest refused {command}: {why}")))
            }
            Ok(None) => Err(Failure::new(format!(
                "the guest's agent did not answer {command} within {} s",
                LIMIT.as_secs()
            ))),
            Err(error) => Err(Failure::new(format!(
                "the guest's agent is gone (during {command}): {error}"
            ))),
        }
    }
}

/// A connection to an agent that has answered everything else.
fn synchronised(mut lines: Lines, id: u64) -> Option<Lines> {
    let deadline = Instant::now() + TRY_LIMIT;
    let sync = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}}).to_string();
    // The mark ends half a command of somebody who was interrupted.
    let bytes = [&[MARK], sync.as_bytes(), b"\n"].concat();
    lines.write(&bytes, deadline).ok()?;
    loop {
        match lines.read(deadline) {
            Ok(Some(answer)) if answer["return"] == id => return Some(lines),
            // To an earlier command, or a complaint about half of one.
            Ok(Some(_)) => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

const CHANNEL: &str = "-chardev socket,id=qga,path=PATH,server=on,wait=off -device virtio-serial -device virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
/// Tries for a guest that must answer.
pub(super) const TRIES: u32 = 4;
const TRY_LIMIT: Duration = Duration::from_millis(1500);
/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(5);
const SCRIPT_LIMIT: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(50);
/// So much of a file at a time: with libvirt it is an argument of a command, of 128 KiB at most.
const PIECE: usize = 64 << 10;
