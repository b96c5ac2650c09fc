//! The host's end of the command channel: one stream to the guest's init, many commands at once.
//!
//! To the guest go lines `ID BASE64`; a long command goes in pieces, `+ BASE64` each but the last.
//! Back come lines `ID STATUS LENGTH BASE64`, in the order the commands end. For every line it has
//! read the guest also sends one `!`, which may stand anywhere, even within a line: it is taken out
//! before lines are cut. No line is sent before the `!` of the one before.
//!
//! NB: that one rule is what makes User-mode Linux's tty lines usable: when more than about 4 KiB
//! wait in one, it stops delivering and does not always start again.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use crate::error::{LabError, Result};

/// What a command in the guest left behind.
#[derive(Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit status; 128 + signal number if a signal ended it.
    pub status: i32,
    /// Standard output and standard error, in the order written.
    pub bytes: Vec<u8>,
}

impl Output {
    /// Whether the exit status is 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.status == 0
    }

    /// The output as text, without blanks at its end.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).trim_end().to_owned()
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output")
            .field("status", &self.status)
            .field("text", &self.text())
            .finish()
    }
}

/// A command that runs in a guest.
#[derive(Debug)]
pub struct Job {
    channel: Arc<Channel>,
    id: u64,
    command: String,
}

impl Job {
    /// Waits for the command's end. May be called again after a timeout; the output is handed out
    /// once.
    ///
    /// # Errors
    /// [`LabError::Timeout`] if it still runs, [`LabError::GuestGone`],
    /// [`LabError::OutputTooLarge`].
    pub fn wait(&self, limit: Duration) -> Result<Output> {
        self.channel.wait(self.id, limit, &self.command)
    }

    /// Whether the command has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.channel.state().replies.contains_key(&self.id)
    }

    /// Sends a signal (`TERM`, `INT`, `KILL` …) to the command and everything it started.
    ///
    /// # Errors
    /// [`LabError::Timeout`] or [`LabError::GuestGone`].
    pub fn signal(&self, name: &str) -> Result<()> {
        if self.is_done() {
            return Ok(());
        }
        // The command may not have begun: it has a number first, and then a session of its own. One
        // that has ended has no number any more, which is no error.
        let kill = format!(
            "pid=/run/lab/{}.pid; seen=; for try in $(seq 100); do \
             if [ -s $pid ]; then seen=1; kill -s {name} -- -$(cat $pid) && exit; \
             elif [ $seen ]; then exit; fi; sleep 0.1; done",
            self.id
        );
        Channel::start(&self.channel, &kill)?
            .wait(SIGNAL_LIMIT)
            .map(drop)
    }

    /// Sends a signal to the command, waits until it prints something, and tells the end of what it has
    /// printed, at most `limit_bytes`. One command to the guest, which takes an emulated one a second.
    ///
    /// # Errors
    /// [`LabError::Timeout`] or [`LabError::GuestGone`].
    pub fn answer(&self, name: &str, limit_bytes: usize) -> Result<String> {
        let job = format!("/run/lab/{}", self.id);
        // One that has ended answers nothing: what it said last is told.
        let ask = format!(
            "pid=$(cat {job}.pid); len=$(wc -c <{job}.out); kill -s {name} -- -$pid && \
             for try in $(seq 50); do [ $(wc -c <{job}.out) -gt $len ] && break; \
             kill -0 -- -$pid || break; sleep 0.1; done; tail -c {limit_bytes} {job}.out"
        );
        Channel::start(&self.channel, &ask)?
            .wait(SIGNAL_LIMIT)
            .map(|output| output.text())
    }

    /// The end of what the command has printed so far, at most `limit_bytes`.
    ///
    /// # Errors
    /// [`LabError::Timeout`] or [`LabError::GuestGone`].
    pub fn peek(&self, limit_bytes: usize) -> Result<String> {
        let tail = format!("tail -c {limit_bytes} /run/lab/{}.out", self.id);
        Channel::start(&self.channel, &tail)?
            .wait(SIGNAL_LIMIT)
            .map(|output| output.text())
    }
}

/// The stream and what has come back on it.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: Mutex<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
    console: PathBuf,
}

#[derive(Debug, Default)]
struct State {
    last_id: u64,
    replies: HashMap<u64, Reply>,
    lines_sent: u64,
    lines_read: u64,
    closed: bool,
}

#[derive(Debug)]
struct Reply {
    status: i32,
    len_bytes: u64,
    bytes: Vec<u8>,
}

impl Channel {
    /// Takes the host's end of the stream; a thread reads it until the guest closes it.
    /// `console` is where a gone guest's last words are.
    pub(crate) fn new(stream: UnixStream, console: &Path) -> Result<Arc<Self>> {
        let reader = stream
            .try_clone()
            .map_err(LabError::io("clone the command channel"))?;
        let channel = Arc::new(Self {
            stream: Mutex::new(stream),
            state: Mutex::default(),
            changed: Condvar::new(),
            console: console.to_path_buf(),
        });
        let shared = Arc::clone(&channel);
        thread::Builder::new()
            .name("lab-channel".to_owned())
            .spawn(move || {
                let mut line = Vec::new();
                for byte in BufReader::new(reader).bytes() {
                    match byte {
                        Ok(b'!') => {
                            shared.state().lines_read += 1;
                            shared.changed.notify_all();
                        }
                        Ok(b'\n') => {
                            // Lines that mean nothing are noise from early boot.
                            if let Some((id, reply)) =
                                std::str::from_utf8(&line).ok().and_then(parse_reply)
                            {
                                shared.state().replies.insert(id, reply);
                                shared.changed.notify_all();
                            }
                            line.clear();
                        }
                        Ok(byte) => line.push(byte),
                        Err(_) => break,
                    }
                }
                shared.state().closed = true;
                shared.changed.notify_all();
            })
            .map_err(LabError::io("start the channel's thread"))?;
        Ok(channel)
    }

    /// As [`new`](Self::new), to the init that another one spoke to: its numbers go on.
    pub(crate) fn following(other: &Self, stream: UnixStream, console: &Path) -> Result<Arc<Self>> {
        let channel = Self::new(stream, console)?;
        channel.state().last_id = other.state().last_id + NUMBERS_APART;
        Ok(channel)
    }

    /// Waits until init has said that it serves; `false` if it has not within `limit`.
    pub(crate) fn greeted(&self, limit: Duration) -> bool {
        self.wait(0, limit, "boot").is_ok()
    }

    /// Whether the guest's end is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Starts a command.
    pub(crate) fn start(channel: &Arc<Self>, command: &str) -> Result<Job> {
        let id = {
            let mut state = channel.state();
            state.last_id += 1;
            state.last_id
        };
        let code = BASE64.encode(command);
        // Pieces of whole base64 groups; an empty command is one empty piece.
        let pieces: Vec<&[u8]> = code.as_bytes().chunks(PIECE_LEN).collect();
        let (last, first) = pieces
            .split_last()
            .map_or((&b""[..], &[][..]), |(last, first)| (*last, first));
        // Held over all pieces: they must not mix with another command's.
        let mut stream = channel
            .stream
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for piece in first {
            channel.send_line(&mut stream, "+", piece, command)?;
        }
        channel.send_line(&mut stream, &id.to_string(), last, command)?;
        Ok(Job {
            channel: Arc::clone(channel),
            id,
            command: command.to_owned(),
        })
    }

    /// Sends one line once the guest has read the one before.
    fn send_line(
        &self,
        stream: &mut UnixStream,
        head: &str,
        piece: &[u8],
        command: &str,
    ) -> Result<()> {
        let deadline = Instant::now() + LINE_LIMIT;
        let mut state = self.state();
        while state.lines_read < state.lines_sent && !state.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LabError::Timeout {
                    what: format!("sending `{command}`"),
                    after: LINE_LIMIT,
                });
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.lines_sent += 1;
        drop(state);
        let line = [head.as_bytes(), b" ", piece, b"\n"].concat();
        stream.write_all(&line).map_err(|_| self.gone())
    }

    fn wait(&self, id: u64, limit: Duration, command: &str) -> Result<Output> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        loop {
            if let Some(reply) = state.replies.remove(&id) {
                if reply.len_bytes != reply.bytes.len() as u64 {
                    return Err(LabError::OutputTooLarge {
                        len_bytes: reply.len_bytes,
                    });
                }
                return Ok(Output {
                    status: reply.status,
                    bytes: reply.bytes,
                });
            }
            if state.closed {
                return Err(self.gone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LabError::Timeout {
                    what: format!("guest command `{command}`"),
                    after: limit,
                });
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn gone(&self) -> LabError {
        LabError::GuestGone {
            console: console_tail(&self.console, 20),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last `lines` lines of a console log, control characters replaced.
pub(crate) fn console_tail(console: &Path, lines: usize) -> String {
    let bytes = fs::read(console).unwrap_or_default();
    let text: String = String::from_utf8_lossy(&bytes)
        .chars()
        .filter(|&c| c != '\r')
        .map(|c| if c.is_control() && c != '\n' { '.' } else { c })
        .collect();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Parses `ID STATUS LENGTH BASE64`.
fn parse_reply(line: &str) -> Option<(u64, Reply)> {
    let mut words = line.trim_end_matches('\r').split(' ');
    let id = words.next()?.parse().ok()?;
    let status = words.next()?.parse().ok()?;
    let len_bytes = words.next()?.parse().ok()?;
    let bytes = BASE64.decode(words.next()?).ok()?;
    Some((
        id,
        Reply {
            status,
            len_bytes,
            bytes,
        },
    ))
}

/// More than commands that are sent to the other one meanwhile.
const NUMBERS_APART: u64 = 10_000;
const SIGNAL_LIMIT: Duration = Duration::from_secs(60);
/// The guest reads a line at once, however busy its commands are.
const LINE_LIMIT: Duration = Duration::from_secs(60);
/// Characters of base64 in a line; whole groups of four.
const PIECE_LEN: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_find_their_commands_in_any_order_and_between_noise() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let channel = Channel::new(ours, Path::new("/dev/null")).unwrap();
        let first = Channel::start(&channel, "first").unwrap();
        // The second command waits until the first has been read.
        theirs.write_all(b"!").unwrap();
        let second = Channel::start(&channel, "second").unwrap();
        theirs
            .write_all(b"\xff\xfe noise\n2 3 3 b2!5l\n1 0 3 dHdv\n")
            .unwrap();
        let limit = Duration::from_secs(5);
        assert_eq!(first.wait(limit).unwrap().text(), "two");
        assert_eq!(
            second.wait(limit).unwrap(),
            Output {
                status: 3,
                bytes: b"one".to_vec()
            }
        );
    }

    #[test]
    fn a_closed_channel_ends_every_wait() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let channel = Channel::new(ours, Path::new("/dev/null")).unwrap();
        let job = Channel::start(&channel, "true").unwrap();
        drop(theirs);
        assert!(matches!(
            job.wait(Duration::from_secs(5)),
            Err(LabError::GuestGone { .. })
        ));
    }

    #[test]
    fn a_large_output_is_refused_not_cut() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let channel = Channel::new(ours, Path::new("/dev/null")).unwrap();
        let job = Channel::start(&channel, "cat big").unwrap();
        theirs.write_all(b"1 0 5000000 \n").unwrap();
        let refused = job.wait(Duration::from_secs(5));
        assert!(matches!(
            refused,
            Err(LabError::OutputTooLarge {
                len_bytes: 5_000_000
            })
        ));
    }
}
