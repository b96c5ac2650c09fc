//! Why there is no wire.

use std::fmt::{self, Display};
use std::io;

use rustix::io::Errno;

/// Why there is no wire, and what to do about it.
#[derive(Debug)]
pub struct WireError(pub(super) String);

impl WireError {
    pub(super) fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// `cannot do WHAT: why`.
    pub(super) fn system<E: Into<io::Error>>(what: &str) -> impl Fn(E) -> Self + use<E> {
        let what = what.to_owned();
        move |error| Self(format!("cannot {what}: {}", error.into()))
    }

    /// The kernel lets this user make no user namespace.
    pub(super) fn closed(errno: Errno) -> Self {
        Self(format!(
            "this user may not make a network namespace ({errno}): {}",
            match errno {
                Errno::NOSPC =>
                    "user.max_user_namespaces is used up, or 0: sudo sysctl user.max_user_namespaces=10000",
                Errno::INVAL =>
                    "the process has several threads, or the kernel has no user namespaces",
                _ =>
                    "where AppArmor closes them (Ubuntu), give vnplug a profile with `userns,` (docs/sandbox.md); where \
                     kernel.unprivileged_userns_clone is 0, set it to 1; in a container allow it, or run it with sudo",
            }
        ))
    }
}

impl Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WireError {}
