//! QEMU's monitor where libvirt keeps it: `virsh qemu-monitor-command`, one process per command.
//!
//! libvirt forwards the command and prints QEMU's answer, errors included. It marks the domain as
//! tainted (custom-monitor), for its own picture of the VM does not contain what is plugged this
//! way. QEMU's events stay with libvirt: a wait here is a pause, then a look.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::BorrowedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::access::{self, Owner};
use super::monitor::{Monitor, MonitorError, News};

/// One domain of libvirt.
#[derive(Debug)]
pub(crate) struct Virsh {
    domain: String,
    uri: Option<String>,
    /// The domain's name, where `domain` may be an id or a UUID; empty if QEMU does not tell.
    name: String,
    limit: Duration,
    /// See [`Self::claim`].
    claimed: Option<File>,
}

impl Virsh {
    /// Finds a running domain by name, id or UUID at `uri` (default: virsh's own choice); every
    /// command may take up to `limit`.
    ///
    /// # Errors
    /// [`MonitorError`]; its text says what to do.
    pub(crate) fn open(
        domain: &str,
        uri: Option<&str>,
        limit: Duration,
    ) -> Result<Self, MonitorError> {
        let mut virsh = Self::at(domain, uri, limit);
        let name = virsh.execute("query-name", json!({}))?;
        virsh.name = name["name"].as_str().unwrap_or_default().to_owned();
        Ok(virsh)
    }

    /// A domain that need not run.
    pub(crate) fn at(domain: &str, uri: Option<&str>, limit: Duration) -> Self {
        Self {
            domain: domain.to_owned(),
            uri: uri.map(str::to_owned),
            name: String::new(),
            limit,
            claimed: None,
        }
    }

    /// What `virsh WHAT` prints about the domain, with more words, and with this as its standard input.
    ///
    /// # Errors
    /// libvirt's words.
    pub(super) fn ask(
        &self,
        what: &str,
        more: &[&str],
        input: Option<&str>,
    ) -> Result<String, MonitorError> {
        let domain = format!("--domain={}", self.domain);
        let words = [&[what, &domain], more].concat();
        output(self.command(&words), what, self.limit, input)
    }

    /// The libvirt that answers.
    ///
    /// # Errors
    /// libvirt's words.
    pub(super) fn uri(&self) -> Result<String, MonitorError> {
        self.virsh(&["uri"], "uri")
    }

    /// Has the running domain to itself among what attaches, detaches and moves: a hook and an operator may do so at one
    /// time. It ends with this. Nothing where libvirt writes no process id, as a user's own does not.
    ///
    /// # Errors
    /// Another one has it, and does not end.
    pub(super) fn claim(&mut self) -> Result<(), MonitorError> {
        // NB: libvirt and QEMU lock this file by fcntl(2), which knows nothing of flock(2).
        let Some(file) = self.pid_file().and_then(|path| File::open(path).ok()) else {
            return Ok(());
        };
        let until = Instant::now() + CLAIM_LIMIT;
        loop {
            match file.try_lock() {
                Ok(()) => {
                    self.claimed = Some(file);
                    return Ok(());
                }
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    thread::sleep(LOOK_EVERY);
                }
                Err(TryLockError::WouldBlock) => {
                    let text = format!(
                        "another vnplug has been busy with the domain {} for {} s: wait for its end",
                        self.name,
                        CLAIM_LIMIT.as_secs()
                    );
                    return Err(MonitorError::Libvirt(text));
                }
                Err(TryLockError::Error(error)) => {
                    log::debug!("the domain is not claimed: {error}");
                    return Ok(());
                }
            }
        }
    }

    /// Where the system's libvirt has the process id of its QEMU.
    fn pid_file(&self) -> Option<String> {
        let is_name = !self.name.is_empty() && !self.name.contains('/');
        is_name.then(|| format!("{PID_FILES}/{}.pid", self.name))
    }

    /// Has QEMU's guest agent run a command, for which libvirt gives it these seconds (and five at most for it to say that it
    /// is there).
    ///
    /// # Errors
    /// As [`execute`](Monitor::execute); what the agent refuses is among libvirt's words.
    pub(crate) fn in_guest(
        &self,
        command: &str,
        arguments: Value,
        seconds: u64,
    ) -> Result<Value, MonitorError> {
        let domain = format!("--domain={}", self.domain);
        let limit = format!("--timeout={seconds}");
        let request = json!({"execute": command, "arguments": arguments}).to_string();
        let words = ["qemu-agent-command", &domain, &limit, "--cmd", &request];
        let answer = self.virsh(&words, command)?;
        let answer: Option<Value> = serde_json::from_str(&answer).ok();
        answer
            .and_then(|mut answer| answer.get_mut("return").map(Value::take))
            .ok_or_else(|| MonitorError::NotAnswer(command.to_owned()))
    }

    fn virsh(&self, arguments: &[&str], what: &str) -> Result<String, MonitorError> {
        output(self.command(arguments), what, self.limit, None)
    }

    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("virsh");
        command.arg("--quiet").env("LC_ALL", "C");
        if let Some(uri) = &self.uri {
            command.arg(format!("--connect={uri}"));
        }
        command.args(arguments);
        command
    }
}

impl Monitor for Virsh {
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MonitorError> {
        log::debug!("virsh {}: {command} {arguments}", self.domain);
        let domain = format!("--domain={}", self.domain);
        let request = json!({"execute": command, "arguments": arguments}).to_string();
        let words = ["qemu-monitor-command", &domain, "--cmd", &request];
        let answer = self.virsh(&words, command)?;
        log::debug!("virsh {}: {answer}", self.domain);
        let not_answer = || MonitorError::NotAnswer(command.to_owned());
        let mut answer: Value = serde_json::from_str(&answer).map_err(|_| not_answer())?;
        if let Some(refused) = MonitorError::in_answer(command, &answer) {
            return Err(refused);
        }
        answer
            .get_mut("return")
            .map(Value::take)
            .ok_or_else(not_answer)
    }

    fn add_fd(&mut self, _: BorrowedFd<'_>) -> Result<(i64, i64), MonitorError> {
        let what = "descriptors do not go through virsh; give QEMU a monitor socket of its own and use --qmp";
        Err(MonitorError::Libvirt(what.to_owned()))
    }

    fn news(&mut self, deadline: Instant) -> Result<News, MonitorError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(News::Nothing);
        }
        thread::sleep(left.min(LOOK_EVERY));
        Ok(News::Look)
    }

    fn qemu_user(&mut self) -> Result<Option<Owner>, MonitorError> {
        let uri = self.uri()?;
        let owner = if uri.contains(":///session") {
            // A user's own libvirt runs everything as that user.
            access::user_of("self")
        } else if uri.contains(":///system") {
            let pid = self.pid_file().map(std::fs::read_to_string);
            let pid = pid.and_then(Result::ok);
            pid.and_then(|pid| access::user_of(pid.trim()))
        } else {
            None
        };
        match owner {
            Some(owner) => Ok(Some(owner)),
            None => Err(MonitorError::UnknownUser(self.domain.clone())),
        }
    }
}

/// What `command` prints, if it succeeds within `limit`; a slower one is killed. `what` it is about. `input` is a few
/// lines: a pipe takes them at once.
fn output(
    mut command: Command,
    what: &str,
    limit: Duration,
    input: Option<&str>,
) -> Result<String, MonitorError> {
    let stdin = match input {
        Some(_) => Stdio::piped(),
        None => Stdio::null(),
    };
    let streams = command.stdin(stdin).stdout(Stdio::piped());
    let mut child = streams
        .stderr(Stdio::piped())
        .spawn()
        .map_err(MonitorError::NoVirsh)?;
    if let (Some(mut pipe), Some(text)) = (child.stdin.take(), input) {
        // One that does not read it says why.
        let _ = pipe.write_all(text.as_bytes());
    }
    let (out, err) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let deadline = Instant::now() + limit;
    let left = || deadline.saturating_duration_since(Instant::now());
    let texts = out
        .recv_timeout(left())
        .and_then(|out| Ok((out, err.recv_timeout(left())?)));
    let Ok((out, err)) = texts else {
        // Both fail only if it has just ended by itself, which is as good.
        let _ = child.kill();
        let _ = child.wait();
        return Err(MonitorError::Silent(what.to_owned(), limit));
    };
    // It has closed its output, so it ends now.
    let status = child.wait().map_err(MonitorError::NoVirsh)?;
    if status.success() {
        return Ok(out.trim().to_owned());
    }
    let said = one_line(&err);
    Err(MonitorError::Libvirt(match said.is_empty() {
        true => format!("{what} failed ({status})"),
        false => said,
    }))
}

/// What virsh says of an error, as one line.
pub(super) fn one_line(errors: &str) -> String {
    let lines = errors
        .lines()
        .map(|line| line.trim_start_matches("error: "));
    let lines: Vec<&str> = lines.filter(|line| !line.trim().is_empty()).collect();
    lines.join(": ")
}

/// The domain's state, and the reason for it; `None`: libvirt knows no such domain.
///
/// # Errors
/// As [`Virsh::ask`].
pub(super) fn state(virsh: &Virsh) -> Result<Option<String>, MonitorError> {
    match virsh.ask("domstate", &["--reason"], None) {
        Ok(state) => Ok(Some(state)),
        Err(error) if is_unknown(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether libvirt says that it knows no such domain.
pub(super) fn is_unknown(error: &MonitorError) -> bool {
    matches!(error, MonitorError::Libvirt(text) if text.contains("failed to get domain"))
}

/// Reads a stream to its end beside the caller.
fn collect(stream: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(stream) = stream
            && let Err(error) = stream.take(MAX_OUTPUT).read_to_end(&mut bytes)
            && error.kind() != ErrorKind::Interrupted
        {
            log::debug!("virsh's output: {error}");
        }
        // Nobody receives any more after the limit.
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// How long another one may be busy with a domain: as long as a guest may take to let go of what is plugged, and more.
const CLAIM_LIMIT: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const MAX_OUTPUT: u64 = 16 << 20;
/// Where the system's libvirt writes the process ids of its QEMUs (`NAME.pid`).
const PID_FILES: &str = "/run/libvirt/qemu";

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<String, MonitorError> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        output(command, "query-name", limit, None)
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn libvirts_words_become_one_line_with_advice() {
        let script = "printf 'error: failed to get domain %s\\n\\nerror: Domain not found\\n' x >&2
                      exit 1";
        let error = shell(script, LONG).unwrap_err().to_string();
        let words = "virsh: failed to get domain x: Domain not found; `virsh list`";
        assert!(error.starts_with(words), "{error}");
        let error = shell("exit 3", LONG).unwrap_err().to_string();
        assert!(
            error.starts_with("virsh: query-name failed (exit status: 3"),
            "{error}"
        );
    }

    #[test]
    fn a_virsh_that_hangs_is_killed() {
        let error = shell("exec sleep 60", Duration::from_millis(20));
        assert!(matches!(error, Err(MonitorError::Silent(..))), "{error:?}");
    }

    #[test]
    fn long_output_on_both_streams_does_not_block() {
        let script =
            "head -c 300000 /dev/zero | tr '\\0' x >&2; head -c 300000 /dev/zero | tr '\\0' y";
        assert_eq!(shell(script, LONG).unwrap().len(), 300_000);
    }

    #[test]
    fn a_missing_virsh_is_named() {
        let error = output(Command::new("/nonexistent/virsh"), "uri", LONG, None);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("install libvirt-clients"), "{error}");
    }
}
