//! Standard output and standard error.

use std::io::{self, IsTerminal, Write};

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
    let _ = writeln!(io::stderr(), "vnplug: {}", escape(line));
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
