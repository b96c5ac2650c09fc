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
use crate::qemu::monitor::MonitorError;
use crate::qemu::virsh::Virsh;

/// Why a guest's agent does not do what it is asked for.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It does not answer, or has forgotten what was begun: its guest has not started, or starts again.
    Passing(Failure),
    /// It refuses, or nobody will ever answer: there is no such machine, or it has no such channel.
    Final(Failure),
}

impl Trouble {
    pub(super) fn why(&self) -> String {
        let (Self::Passing(why) | Self::Final(why)) = self;
        why.line()
    }

    fn of_refusal(why: String) -> Self {
        let kind = match FORGOTTEN.iter().any(|words| why.contains(words)) {
            true => Self::Passing,
            false => Self::Final,
        };
        kind(Failure::new(why))
    }
}

/// What virsh says. Words that are not known may be of libvirtd, which starts again.
impl From<MonitorError> for Trouble {
    fn from(error: MonitorError) -> Self {
        match &error {
            MonitorError::Libvirt(text) if text.contains(REFUSED) => {
                Self::of_refusal(error.to_string())
            }
            MonitorError::Libvirt(text) if NEVER.iter().any(|words| text.contains(words)) => {
                Self::Final(error.into())
            }
            MonitorError::NoVirsh(_) => Self::Final(error.into()),
            _ => Self::Passing(error.into()),
        }
    }
}

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
    /// By the socket of the agent's channel, within 1.5 seconds. `number` differs from that of this process' other tries: what is
    /// sent before the guest's end is open may never arrive there, or late.
    ///
    /// # Errors
    /// Nobody is there, or nobody answers.
    pub(super) fn at(path: &Path, number: u32) -> Result<Self, Trouble> {
        let about = |why: String| Failure::about(path.display(), why);
        let stream = connect_within(path, TRY_LIMIT).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Trouble::Passing(about(format!(
                "{error}; others hold this channel or wait for it"
            ))),
            _ => Trouble::Final(about(format!("{error}; QEMU makes it by {CHANNEL}"))),
        })?;
        let id = (u64::from(std::process::id()) << 32) + u64::from(number);
        let lines = synchronised(Lines::new(stream), id);
        lines.map_or_else(
            || Err(Trouble::Passing(about("no answer".to_owned()))),
            |lines| {
                let way = Way::Socket(lines);
                Ok(Self { way })
            },
        )
    }

    /// By libvirt, which holds the channel; an answer may take `limit`.
    ///
    /// # Errors
    /// As for [`at`](Self::at).
    pub(super) fn of(virsh: Virsh, limit: Duration) -> Result<Self, Trouble> {
        let way = Way::Libvirt(virsh, limit.as_secs_f64().ceil() as u64);
        let mut guest = Self { way };
        guest.call("guest-ping", json!({}))?;
        Ok(guest)
    }

    /// Fails if the guest's administrator forbids what is needed.
    pub(super) fn must_do(&mut self, commands: &[&str]) -> Result<(), Trouble> {
        let info = self.call("guest-info", json!({}))?;
        let supported = info["supported_commands"].as_array();
        let can = |command: &str| {
            let named = |it: &&Value| it["name"] == command && it["enabled"] == true;
            supported.is_some_and(|all| all.iter().any(|it| named(&it)))
        };
        match commands.iter().find(|command| !can(command)) {
            None => Ok(()),
            Some(command) => Err(Trouble::Final(Failure::new(format!(
                "the guest's agent does not allow {command}: allow it in the guest (block-rpcs in /etc/qemu/qemu-ga.conf, \
                 or BLACKLIST_RPC in /etc/sysconfig/qemu-ga), or install vNPlug's agent there by its package"
            )))),
        }
    }

    /// Reads the beginning of a file, 4 KiB at most.
    pub(super) fn read(&mut self, path: &str) -> Result<String, Trouble> {
        let file = self.call("guest-file-open", json!({"path": path, "mode": "r"}))?;
        let read = self.call("guest-file-read", json!({"handle": file, "count": 4096}));
        self.call("guest-file-close", json!({"handle": file}))?;
        let bytes = STANDARD.decode(read?["buf-b64"].as_str().unwrap_or_default());
        Ok(String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned())
    }

    /// Writes a file.
    pub(super) fn write(&mut self, path: &str, bytes: &[u8]) -> Result<(), Trouble> {
        let file = self.call("guest-file-open", json!({"path": path, "mode": "w"}))?;
        for piece in bytes.chunks(PIECE) {
            let arguments = json!({"handle": file, "buf-b64": STANDARD.encode(piece)});
            let written = self.call("guest-file-write", arguments)?;
            if written["count"] != piece.len() {
                let why = "the guest wrote less of it";
                return Err(Trouble::Final(Failure::about(path, why)));
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
    pub(super) fn run(&mut self, script: &str) -> Result<String, Trouble> {
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
                let why = Failure::about("in the guest", text("err-data"));
                // One that was killed: the guest is about to end.
                return Err(match status["signal"].is_null() {
                    true => Trouble::Final(why),
                    false => Trouble::Passing(why),
                });
            }
            if Instant::now() >= deadline {
                let limit = SCRIPT_LIMIT.as_secs();
                return Err(Trouble::Passing(Failure::new(format!(
                    "the guest is not done within {limit} s"
                ))));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn call(&mut self, command: &str, arguments: Value) -> Result<Value, Trouble> {
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
        let lost = |why: String| Err(Trouble::Passing(Failure::new(why)));
        match answer {
            Ok(Some(mut answer)) if answer.get("return").is_some() => Ok(answer["return"].take()),
            Ok(Some(answer)) => {
                let why = answer["error"]["desc"].as_str().unwrap_or("no answer");
                let why = format!("the guest refused {command}: {why}");
                Err(Trouble::of_refusal(why))
            }
            Ok(None) => lost(format!(
                "the guest's agent did not answer {command} within {} s",
                LIMIT.as_secs()
            )),
            Err(error) => lost(format!(
                "the guest's agent is gone (during {command}): {error}"
            )),
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
/// What an agent says that has started again, of what the one before had begun (QEMU's qga/commands-posix.c, commands.c).
const FORGOTTEN: [&str; 2] = ["has not been found", "Invalid parameter 'pid'"];
/// libvirt's words for what the agent itself refuses (its qemu_agent.c).
const REFUSED: &str = "unable to execute QEMU agent command";
/// And for what will not change while the machine is the same (qemu_domain.c, virsh).
const NEVER: [&str; 3] = [
    "agent is not configured",
    "domain is not running",
    "failed to get domain",
];
/// How long one try to be heard takes.
pub(super) const TRY_LIMIT: Duration = Duration::from_millis(1500);
/// How long an answer may take.
pub(super) const LIMIT: Duration = Duration::from_secs(5);
const SCRIPT_LIMIT: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(50);
/// The most of a file at a time: with libvirt it is an argument of a command, of 128 KiB at most.
const PIECE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_change_is_told_from_what_will_not() {
        let is_final = |trouble: Trouble| matches!(trouble, Trouble::Final(_));
        for (text, never) in [
            (
                "guest agent is not responding: QEMU guest agent is not connected",
                false,
            ),
            (
                "failed to connect to the hypervisor: Connection refused",
                false,
            ),
            (
                "Timed out during operation: cannot acquire state change lock",
                false,
            ),
            (
                "argument unsupported: QEMU guest agent is not configured",
                true,
            ),
            (
                "Requested operation is not valid: domain is not running",
                true,
            ),
            ("failed to get domain 'x'", true),
            (
                "unable to execute QEMU agent command 'guest-exec': it has been disabled",
                true,
            ),
            // The guest has started again meanwhile.
            (
                "unable to execute QEMU agent command 'guest-file-write': handle '1000' has not been found",
                false,
            ),
            (
                "unable to execute QEMU agent command 'guest-exec-status': Invalid parameter 'pid'",
                false,
            ),
        ] {
            let said = Trouble::from(MonitorError::Libvirt(text.to_owned()));
            assert_eq!(is_final(said), never, "{text}");
        }
        let silent = MonitorError::Silent("guest-ping".to_owned(), LIMIT);
        assert!(!is_final(silent.into()));
        let missing = MonitorError::NoVirsh(io::ErrorKind::NotFound.into());
        assert!(is_final(missing.into()));
    }
}
