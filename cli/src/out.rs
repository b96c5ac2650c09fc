//! Standard output and standard error.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use log::Level;
use vnplug_os::service::marked;

use crate::failure::Failure;
use crate::text::escape;

/// Writes one line of text to stdout, escaped.
///
/// # Errors
/// [`Failure::quiet`] if the reader is gone, else the reason.
pub(crate) fn line(line: &str) -> Result<(), Failure> {
    raw(&(escape(line) + "\n"))
}

/// Writes text that is safe already (made of escaped parts, or JSON) to stdout and flushes it.
///
/// # Errors
/// As [`line`].
pub(crate) fn raw(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    written.and_then(|()| stdout.flush()).map_err(failed)
}

/// Writes one line to stderr, escaped; if that fails there is nobody left to tell.
pub(crate) fn note(line: &str) {
    say(Level::Info, line);
}

/// Writes one line of something that went wrong to stderr, as [`note`].
pub(crate) fn warn(line: &str) {
    say(Level::Warn, line);
}

/// Writes one line to stderr, as [`note`]; in the journal it has the priority of this level.
pub(crate) fn say(level: Level, line: &str) {
    let text = marked(level, &format!("vnplug: {}", escape(line)));
    // In one piece: a program in the sandbox writes there, too.
    let _ = io::stderr().write_all((text + "\n").as_bytes());
}

/// True if stdout is a terminal.
pub(crate) fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// What a failed write means: a reader that went away (`| head`) ends the command quietly.
pub(crate) fn failed(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::quiet(),
        _ => Failure::about("cannot write to stdout", error),
    }
}

/// How far long work is, on a terminal only: a line that is written over, twice a second.
pub(crate) struct Progress {
    is_shown: bool,
    began: Instant,
    told: Instant,
    is_told: bool,
}

impl Progress {
    /// Nothing is shown if `quiet`.
    pub(crate) fn new(quiet: bool) -> Self {
        let now = Instant::now();
        Self {
            is_shown: !quiet && io::stderr().is_terminal(),
            began: now,
            told: now,
            is_told: false,
        }
    }

    /// Says how far it is, if it is time for that.
    pub(crate) fn tell(&mut self, what: impl FnOnce() -> String) {
        if !self.is_shown {
            return;
        }
        let now = Instant::now();
        if now.duration_since(self.told) >= EACH {
            (self.told, self.is_told) = (now, true);
            let passed = now.duration_since(self.began).as_secs();
            let line = crate::text::escape(&format!("{}, {passed} s", what()));
            // Nothing depends on it.
            let _ = write!(io::stderr(), "\r\x1b[K{line}");
        }
    }

    /// Takes the line away.
    pub(crate) fn end(&mut self) {
        if std::mem::take(&mut self.is_told) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}

const EACH: Duration = Duration::from_millis(500);
