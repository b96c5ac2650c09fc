//! The network namespace that a source is in, if that is not the daemon's.
//!
//! It is known by a file, and whatever has a socket in it keeps it alive: a container that is gone, with its interfaces. So
//! the queues look now and then whether the file still stands for the namespace that they are in, and let go of it if not.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vnplug_os::namespace::{self, Entrance, Id};

use super::interfaces::any_socket;
use crate::source::SourceError;

/// A network namespace by its name or file.
#[derive(Debug)]
pub struct Namespace {
    /// As it was given.
    name: String,
    file: PathBuf,
    entrance: Arc<Entrance>,
    /// Asks about interfaces there.
    inside: Mutex<Option<Inside>>,
}

#[derive(Debug)]
struct Inside {
    id: Id,
    socket: Arc<OwnedFd>,
}

impl PartialEq for Namespace {
    fn eq(&self, other: &Self) -> bool {
        self.file == other.file
    }
}

impl Eq for Namespace {}

impl Namespace {
    /// By a name, as `ip netns` has it, or by an absolute path such as `/proc/PID/ns/net`. It need not be there yet.
    ///
    /// # Errors
    /// [`SourceError`] if it is neither.
    pub fn new(name: &str, entrance: Arc<Entrance>) -> Result<Self, SourceError> {
        let file = match name {
            "" | "." | ".." => None,
            name if name.starts_with('/') => Some(PathBuf::from(name)),
            name if name.contains('/') => None,
            name => Some(Path::new(NAMED).join(name)),
        };
        let file = file.ok_or_else(|| {
            SourceError::new(format!(
                "{name:?} is no network namespace: write a name of ip netns, or an absolute path"
            ))
        })?;
        Ok(Self {
            name: name.to_owned(),
            file,
            entrance,
            inside: Mutex::new(None),
        })
    }

    /// As it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether another one may take its place. A file of a process may be another process' one day, whose namespace nobody named.
    pub fn may_return(&self) -> bool {
        !self.file.starts_with("/proc")
    }

    /// Which namespace it is now; `None` if there is none. One that this knew and that is another one now is let go.
    pub fn id(&self) -> Option<Id> {
        let id = namespace::id(&self.file).ok();
        let mut inside = self.lock();
        if inside.as_ref().is_some_and(|inside| Some(inside.id) != id) {
            *inside = None;
        }
        id
    }

    /// Asks something by a socket that is in it, if one is; for threads that must not wait.
    pub fn ask<T>(&self, ask: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        use std::os::fd::AsFd;
        let socket = Arc::clone(&self.lock().as_ref()?.socket);
        Some(ask(socket.as_fd()))
    }

    /// Does something in it, and says which one it is.
    ///
    /// # Errors
    /// [`SourceError`] if it is not there, is none, or may not be entered.
    pub fn within<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<(T, Id), SourceError> {
        let work = || any_socket().map(|socket| (socket, work()));
        let entered = self.entrance.within(&self.file, work);
        let (done, id) = entered.map_err(|cause| self.blame(cause))?;
        let (socket, done) =
            done.map_err(|cause| SourceError::io("cannot ask about interfaces", cause))?;
        let socket = Arc::new(socket);
        *self.lock() = Some(Inside { id, socket });
        Ok((done, id))
    }

    fn blame(&self, cause: io::Error) -> SourceError {
        let (name, file) = (&self.name, self.file.display());
        match cause.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => SourceError::new(format!(
                "no network namespace {name:?}: there is no {file}; list them with: ip netns"
            )),
            io::ErrorKind::InvalidInput => {
                SourceError::new(format!("{file} is no network namespace"))
            }
            io::ErrorKind::PermissionDenied => SourceError::io(
                format!(
                    "no permission to enter network namespace {name:?} ({file}): that needs root, or CAP_SYS_ADMIN, which a daemon \
                     keeps if its configuration names a namespace when it starts"
                ),
                cause,
            ),
            _ => SourceError::io(
                format!("cannot enter network namespace {name:?} ({file})"),
                cause,
            ),
        }
    }

    /// What it guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Option<Inside>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where `ip netns` has them.
const NAMED: &str = "/run/netns";

#[cfg(test)]
mod tests {
    use super::*;

    fn error(name: &str) -> String {
        let made = Namespace::new(name, Arc::default());
        let entered = made.and_then(|it| it.within(|| ()).map(drop));
        entered.unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_namespace_is_named() {
        for (name, why) in [
            ("a/b", "is no network namespace: write"),
            ("..", "is no network namespace: write"),
            ("vnplug-none", "there is no /run/netns/vnplug-none"),
            (
                "/proc/self/status",
                "/proc/self/status is no network namespace",
            ),
            (
                "/proc/self/ns/mnt",
                "/proc/self/ns/mnt is no network namespace",
            ),
            ("/proc/self/ns", "/proc/self/ns is no network namespace"),
        ] {
            assert!(error(name).contains(why), "{name}: {}", error(name));
        }
    }

    #[test]
    fn work_is_done_in_it_and_the_calling_thread_stays_where_it_is() {
        let own = namespace::id(Path::new("/proc/thread-self/ns/net")).unwrap();
        let it = Namespace::new("/proc/self/ns/net", Arc::default()).unwrap();
        assert!(it.ask(|_| ()).is_none());
        let (there, id) = it
            .within(|| namespace::id(Path::new("/proc/thread-self/ns/net")).unwrap())
            .unwrap();
        assert_eq!((there, id), (own, own));
        assert!(it.ask(|_| ()).is_some());
        assert_eq!(it.id(), Some(own));
    }
}
