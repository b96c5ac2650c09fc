//! How a command fails: exit codes and one line on stderr.

use std::fmt::Display;
use std::process::ExitCode;

/// A command failed; `text` is one line that says what is wrong and what to do.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    text: String,
}

/// What a command returns: its exit code if it ran.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// Exit code: done.
pub(crate) const OK: ExitCode = ExitCode::SUCCESS;
/// Exit code: something failed.
const ERROR: u8 = 1;
/// Exit code: wrong usage; clap's own.
pub(crate) const USAGE: u8 = 2;
/// Exit code of `count --witness`: packets were lost, duplicated, reordered or corrupted.
pub(crate) const WITNESS: u8 = 3;
/// Exit code of `detach`: the guest did not let go of a device; run it again later.
pub(crate) const PENDING: u8 = 4;
/// Exit code of `stats`: an account does not close.
pub(crate) const ACCOUNTS: u8 = 5;

/// Exit code of `doctor`: something does not work.
pub(crate) const DOCTOR: u8 = 6;
/// Exit code of `attach qemu --guest-agent`: the VM is attached, and the agent cannot be put into its guest.
pub(crate) const REFUSES: u8 = 7;
/// Exit code of `attach qemu --guest-agent`: the VM is attached, and its guest did not answer in time.
pub(crate) const UNANSWERED: u8 = 8;

/// Shown at the end of `vnplug --help`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  an error, told on stderr
  2  wrong usage
  3  count --witness: packets are missing, duplicated, reordered or corrupt
  4  detach: the guest has not let go of a device yet
  5  stats: an account does not close
  6  doctor: something does not work
  7  attach: attached; the agent cannot be put into the guest
  8  attach: attached; the guest did not answer in time
attach uml ends with the exit code of the User-mode Linux it ran, sandbox with that of its program.";

impl Failure {
    /// An error with a text of its own.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self {
            code: ERROR,
            text: text.into(),
        }
    }

    /// The same with another exit code.
    pub(crate) fn with_code(code: u8, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }

    /// `what: why`.
    pub(crate) fn about(what: impl Display, why: impl Display) -> Self {
        Self::new(format!("{what}: {why}"))
    }

    /// The reader of our output is gone: end at once, as if done.
    pub(crate) fn quiet() -> Self {
        Self::with_code(0, "")
    }

    /// The text as it may go to a terminal; empty if there is nothing to say.
    pub(crate) fn line(&self) -> String {
        crate::text::escape(&self.text)
    }

    /// The number of the exit code.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// The exit code.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

/// The error and its sources.
impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            text += &format!(": {error}");
            source = error.source();
        }
        Self::new(text)
    }
}
