//! Standard output and standard error, for people.

use std::io::{self, Write};

use crate::failure::Failure;

/// Writes one line of text to stdout, escaped.
///
/// # Errors
/// [`Failure::quiet`] if the reader is gone, else the reason.
pub(crate) fn line(line: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = writeln!(stdout, "{}", escape(line));
    written.and_then(|()| stdout.flush()).map_err(failed)
}

/// Writes one line to stderr, escaped; if that fails there is nobody left to tell.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr(), "vnplug-query: {}", escape(line));
}

/// Text of strangers as it may go to a terminal: without control characters, but for ends of lines.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => safe.push(c),
            // Those that turn the direction of text around, too.
            c if c.is_control()
                || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
            {
                safe.extend(c.escape_unicode());
            }
            c => safe.push(c),
        }
    }
    safe
}

/// What a failed write means: a reader that went away (`| head`) ends the command quietly.
pub(crate) fn failed(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::quiet(),
        _ => Failure::about("cannot write", error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(escape("eth0"), "eth0");
        assert_eq!(escape("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\nc");
        assert_eq!(escape("a\u{202e}b"), "a\\u{202e}b");
    }
}
