//! `vnplug attach qemu --incoming` where the machine goes to: here, or behind ssh.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::incoming::{AWAITED, CANCEL, READY, SENT};
use crate::external;
use crate::failure::Failure;

/// The process, and what it says.
pub(super) struct Target {
    process: Child,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

/// The command that attaches there, behind ssh if told so.
pub(super) fn command(ssh: Option<&str>, arguments: &[String]) -> Result<Command, Failure> {
    let mut command = match ssh {
        None => {
            let mut command = external::own();
            command.args(arguments);
            command
        }
        Some(host) => {
            let quoted: Vec<String> = arguments.iter().map(|argument| quote(argument)).collect();
            let mut command = Command::new("ssh");
            // It cannot ask anything, in a group of its own, and notices that the other side is gone.
            for option in SSH {
                command.args(["-o", option]);
            }
            // Options end here; the other side's shell reads the rest.
            command.args(["--", host, &format!("vnplug {}", quoted.join(" "))]);
            command
        }
    };
    // Of a group of its own: what stops `vnplug migrate` at a terminal does not stop it.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    Ok(command)
}

impl Target {
    /// Starts it.
    ///
    /// # Errors
    /// It cannot be run.
    pub(super) fn start(mut command: Command) -> Result<Self, Failure> {
        let program = command.get_program().to_string_lossy().into_owned();
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::about(format!("cannot run {program}"), error))?;
        let (sender, lines) = sync_channel(MOST_LINES);
        if let Some(output) = process.stdout.take() {
            std::thread::spawn(move || {
                // It says three lines.
                let lines = BufReader::new(output.take(MOST_TEXT))
                    .lines()
                    .map_while(Result::ok);
                lines
                    .take_while(|line| sender.send(line.clone()).is_ok())
                    .for_each(drop);
            });
        }
        let errors = process.stderr.take().map(|errors| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                // What is longer is no error of ours.
                let _ = errors.take(MOST_TEXT).read_to_end(&mut text);
                String::from_utf8_lossy(&text).trim_end().to_owned()
            })
        });
        Ok(Self {
            process,
            lines,
            errors,
        })
    }

    /// Waits until the machine may come.
    ///
    /// # Errors
    /// It may not, with what was said.
    pub(super) fn await_ready(&mut self, limit: Duration) -> Result<(), Failure> {
        match self.lines.recv_timeout(limit) {
            Ok(line) if line.ends_with(READY) => Ok(()),
            Ok(line) => Err(Failure::about("the target says", line)),
            Err(RecvTimeoutError::Disconnected) => Err(self.refusal()),
            Err(RecvTimeoutError::Timeout) => {
                let text = format!("the target was not prepared within {} s", limit.as_secs());
                Err(Failure::new(text))
            }
        }
    }

    /// Says that the machine is about to be sent; devices are plugged there that it brings the contents of.
    ///
    /// # Errors
    /// They are not, or nobody waits there any more, with what was said.
    pub(super) fn await_sent(&mut self, limit: Duration) -> Result<(), Failure> {
        if let Some(input) = &mut self.process.stdin {
            // What has ended says why.
            let _ = writeln!(input, "{SENT}");
        }
        match self.lines.recv_timeout(limit) {
            Ok(line) if line.ends_with(AWAITED) => Ok(()),
            Ok(line) => Err(Failure::about("the target says", line)),
            Err(RecvTimeoutError::Disconnected) => Err(self.refusal()),
            Err(RecvTimeoutError::Timeout) => {
                let text = format!("the target did not wait within {} s", limit.as_secs());
                Err(Failure::new(text))
            }
        }
    }

    /// Waits until the machine is attached there; what was said of that.
    ///
    /// # Errors
    /// It is not, with what was said.
    pub(super) fn await_attached(&mut self, limit: Duration) -> Result<String, Failure> {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Disconnected) => Err(self.refusal()),
            Err(RecvTimeoutError::Timeout) => {
                let text = format!("not attached within {} s", limit.as_secs());
                Err(Failure::new(text))
            }
        }
    }

    /// The machine does not come. One that does not end is killed: what it left there the next command finds.
    pub(super) fn cancel(mut self) {
        if let Some(mut input) = self.process.stdin.take() {
            // One that has ended needs not be told.
            let _ = writeln!(input, "{CANCEL}");
        }
        let until = Instant::now() + CANCEL_LIMIT;
        while matches!(self.process.try_wait(), Ok(None)) {
            if Instant::now() > until {
                let _ = self.process.kill();
                let _ = self.process.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn refusal(&mut self) -> Failure {
        let said = self
            .errors
            .take()
            .and_then(|errors| errors.join().ok())
            .unwrap_or_default();
        let said = said.strip_prefix("vnplug: ").unwrap_or(&said);
        Failure::about(
            "the target refuses",
            if said.is_empty() { "it ended" } else { said },
        )
    }
}

/// One word for a shell.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

const MOST_TEXT: u64 = 64 << 10;
const MOST_LINES: usize = 16;
/// How long a target is waited for that is told to end.
const CANCEL_LIMIT: Duration = Duration::from_secs(10);
const SSH: [&str; 4] = [
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_on_the_other_side_reads_what_was_meant() {
        let words = ["a b", "it's", "$(x)", ""].map(str::to_owned);
        let command = command(Some("host"), &words).unwrap();
        let line = command.get_args().last().unwrap();
        let echo = Command::new("sh")
            .arg("-c")
            .arg(format!(
                "vnplug() {{ printf '<%s>' \"$@\"; }}; {}",
                line.to_str().unwrap()
            ))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&echo.stdout), "<a b><it's><$(x)><>");
    }
}
