//! What can go wrong, and what to do about it.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use vnplug_ring::control::{Malformed, code};
use vnplug_ring::{AttachError, Corrupt};

/// Why a request failed or a port is over. [`Display`](std::fmt::Display) says what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// Nobody listens on the socket.
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The system's reason.
        errno: Errno,
    },
    /// The socket exists but this user may not connect to it.
    Permission {
        /// The socket.
        path: PathBuf,
    },
    /// The daemon or agent closed the connection.
    Disconnected,
    /// No answer within the time limit; the connection is not used again.
    TimedOut,
    /// The other side said something that is not the protocol.
    Protocol(String),
    /// The two sides have no protocol version in common: update one of them.
    Version {
        /// What the other side picked.
        theirs: u8,
        /// What this library speaks.
        ours: u8,
    },
    /// The daemon or agent refused the request.
    Refused {
        /// One of [`vnplug_ring::control::code`].
        code: u16,
        /// Its words.
        text: String,
    },
    /// The port was closed by the host, or a channel by an operator, for this reason.
    Gone(String),
    /// The host stopped serving this port because the reader's indices made no sense: some other
    /// code in this process, or another process that maps the ring, wrote to it.
    Quarantined,
    /// The source failed (a damaged file), for this reason; everything before it was delivered.
    SourceFailed(String),
    /// The ring's memory cannot be read by this library.
    Ring(AttachError),
    /// The ring's memory was overwritten by somebody.
    Corrupt(Corrupt),
    /// The other side of a channel has not taken what was said before; nothing was sent.
    Full,
    /// An argument is out of range.
    Invalid(&'static str),
    /// A system call failed.
    System {
        /// What it was for.
        what: &'static str,
        /// The system's reason.
        errno: Errno,
    },
}

impl Error {
    /// Adds what a system call was for; for `map_err`.
    pub(crate) fn system(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { what, errno }
    }

    /// True if trying again later may succeed without anybody changing the request.
    pub fn heals(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Disconnected | Self::TimedOut | Self::Full => true,
            Self::Refused { code, .. } => {
                matches!(*code, code::UNAVAILABLE | code::NO_MEMORY | code::LIMIT)
            }
            _ => false,
        }
    }
}

impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Self {
        Self::Protocol(malformed.to_string())
    }
}

impl From<Corrupt> for Error {
    fn from(corrupt: Corrupt) -> Self {
        Self::Corrupt(corrupt)
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            // Asked only now: nothing is decided by it.
            Self::Unreachable { path, .. } if is_no_socket(path) => {
                write!(f, "{} is not a socket; give the daemon's", path.display())
            }
            Self::Unreachable {
                path,
                errno: Errno::AGAIN,
            } => write!(
                f,
                "{} takes no connections: whoever listens there hangs, or has too many",
                path.display()
            ),
            Self::Unreachable { path, errno } => write!(
                f,
                "nobody listens on {} ({errno}): on a host start the daemon (vnplugd --source \
                 INTERFACE), in a guest the agent (vnplug agent)",
                path.display()
            ),
            Self::Permission { path } => write!(
                f,
                "connecting to {} is not permitted: ask the operator for socket_mode or \
                 socket_group, or run as root",
                path.display()
            ),
            Self::Disconnected => f.write_str("the connection was closed by the other side"),
            Self::TimedOut => f.write_str("no answer within the time limit"),
            Self::Protocol(text) => write!(f, "protocol error: {text}"),
            Self::Version { theirs, ours } => write!(
                f,
                "the other side speaks protocol version {theirs}, this library {ours}: update one"
            ),
            Self::Refused { text, .. } => f.write_str(text),
            Self::Gone(reason) => write!(f, "the host closed it: {reason}"),
            Self::Quarantined => f.write_str(
                "the port is quarantined: this reader's side of the ring was overwritten",
            ),
            Self::SourceFailed(reason) => write!(f, "the source failed: {reason}"),
            Self::Ring(_) => f.write_str("the ring cannot be attached"),
            Self::Corrupt(_) => f.write_str("the ring was overwritten"),
            Self::Full => f.write_str(
                "the other side has not taken what was said before: wait for it, then say it again",
            ),
            Self::Invalid(what) => write!(f, "invalid argument: {what}"),
            Self::System { what, errno } => write!(f, "{what}: {errno}"),
        }
    }
}

/// True for a directory, a file or whatever else is there and cannot be listened on.
fn is_no_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|there| !there.file_type().is_socket())
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Ring(source) => Some(source),
            Self::Corrupt(source) => Some(source),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_time_can_change_heals() {
        let refused = |code| Error::Refused {
            code,
            text: String::new(),
        };
        assert!(Error::Disconnected.heals() && refused(code::UNAVAILABLE).heals());
        for code in [
            code::NOT_FOUND,
            code::DENIED,
            code::FILTER,
            code::INVALID,
            code::PROTOCOL,
        ] {
            assert!(!refused(code).heals(), "code {code}");
        }
    }

    #[test]
    fn what_is_no_socket_is_told_as_such() {
        let path = std::env::temp_dir();
        let errno = Errno::CONNREFUSED;
        let text = Error::Unreachable { path, errno }.to_string();
        assert!(text.contains("is not a socket"), "{text}");
    }

    #[test]
    fn an_absent_daemon_is_named_with_the_remedy() {
        let path = PathBuf::from("/run/x.sock");
        let text = Error::Unreachable {
            path,
            errno: Errno::NOENT,
        }
        .to_string();
        assert!(
            text.contains("/run/x.sock") && text.contains("vnplugd --source"),
            "{text}"
        );
    }
}
