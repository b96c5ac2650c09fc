//! What can go wrong in the lab, told so that a failed test explains itself.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The lab's result.
pub type Result<T> = std::result::Result<T, LabError>;

/// Why the lab could not do what a test asked.
#[derive(Debug)]
pub enum LabError {
    /// The operating system refused; `what` says during which step.
    Io {
        /// The step.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Something the lab needs on the host is not there; the text says how to get it.
    Missing(String),
    /// A host command failed; `text` is what it printed.
    Command {
        /// The command line.
        command: String,
        /// Its standard error, or how it ended.
        text: String,
    },
    /// A guest did not report for duty; `console` is the end of its console.
    Boot {
        /// What was booted and why the lab gave up.
        what: String,
        /// The console's last lines.
        console: String,
        /// Whether it ended by itself, so that booting it once more may help.
        ended: bool,
    },
    /// A command in the guest ran longer than allowed; it has been killed.
    Timeout {
        /// The command, or what was waited for.
        what: String,
        /// The limit.
        after: Duration,
    },
    /// The guest ended while something was expected of it.
    GuestGone {
        /// The console's last lines.
        console: String,
    },
    /// A command's output is too large for the channel: write it to a file and pull that.
    OutputTooLarge {
        /// Its length.
        len_bytes: u64,
    },
    /// A peer (guest agent or QEMU) said something the lab does not understand, or an error.
    Protocol(String),
    /// The path is not usable, for example too long for a Unix socket.
    Path(PathBuf),
}

impl LabError {
    /// Wraps a system error with the step it happened in.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl fmt::Display for LabError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { what, source } => write!(f, "{what}: {source}"),
            Self::Missing(text) => write!(f, "{text}"),
            Self::Command { command, text } => write!(f, "`{command}` failed: {}", text.trim_end()),
            Self::Boot { what, console, .. } => write!(f, "{what}; end of its console:\n{console}"),
            Self::Timeout { what, after } => write!(f, "{what}: not done after {after:?}"),
            Self::GuestGone { console } => {
                write!(f, "the guest is gone; end of its console:\n{console}")
            }
            Self::OutputTooLarge { len_bytes } => {
                write!(
                    f,
                    "output of {len_bytes} bytes is too large for the channel; use a file and pull it"
                )
            }
            Self::Protocol(text) => write!(f, "{text}"),
            Self::Path(path) => write!(f, "path {} is not usable here", path.display()),
        }
    }
}

// NB: no `source`: what panics and reports print is `Display`, which tells the system's answer itself.
impl std::error::Error for LabError {}
