//! Other network namespaces: a short-lived thread enters one, opens there what is to be opened, and ends.
//!
//! No other thread of the process ever leaves the namespace that it is in: what it opens later would be of the wrong one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::privileges::{self, Keep};

/// Which namespace it is, as long as something holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id {
    device: u64,
    inode: u64,
}

/// The namespace that a file stands for now.
///
/// # Errors
/// The system's; `NotFound` if there is no such file.
pub fn id(file: &Path) -> io::Result<Id> {
    std::fs::metadata(file).map(|it| Id::of(&it))
}

impl Id {
    fn of(it: &std::fs::Metadata) -> Self {
        Self {
            device: it.dev(),
            inode: it.ino(),
        }
    }
}

/// By which namespaces are entered, which needs `CAP_SYS_ADMIN`.
#[derive(Debug, Default)]
pub struct Entrance {
    /// Has that right after this process' other threads gave it up.
    keeper: OnceLock<Sender<Job>>,
}

type Job = Box<dyn FnOnce() + Send>;

/// What the keeper and those who enter keep.
const KEPT: [Keep; 2] = [Keep::NetRaw, Keep::SysAdmin];

impl Entrance {
    /// Starts a thread that keeps the right which the calling one has yet, and nothing else but to open packet sockets. It
    /// starts the threads that enter from now on, and does nothing itself.
    ///
    /// # Errors
    /// The system's.
    pub fn keep(&self) -> io::Result<()> {
        let (jobs, inbox) = channel();
        let keeper = std::thread::Builder::new().name("vnplug-netns".into());
        keeper.spawn(move || keep(&inbox))?;
        // Kept once.
        let _ = self.keeper.set(jobs);
        Ok(())
    }

    /// Does something in the namespace that a file stands for, and says which one that is. The calling thread waits.
    ///
    /// # Errors
    /// The system's: `NotFound` if there is no such file, `InvalidInput` if it is no network namespace, `PermissionDenied` if it
    /// may not be opened or entered.
    pub fn within<T: Send + 'static>(
        &self,
        file: &Path,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<(T, Id)> {
        // Whatever it is, opening it does not block.
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open(file)?;
        let id = Id::of(&file.metadata()?);
        let (tell, hear) = channel();
        let is_kept = self.keeper.get().is_some();
        let job = move || {
            let done = enter(&file.into(), is_kept).map(|()| work());
            // Who asked waits.
            let _ = tell.send(done);
        };
        match self.keeper.get() {
            Some(keeper) => {
                // If the keeper is gone, so is the job, and with it what is heard.
                let _ = keeper.send(Box::new(job));
            }
            None => start(job)?,
        }
        let gone = || {
            io::Error::other(
                "the thread that entered it failed, which is a bug: the log says where",
            )
        };
        hear.recv().map_err(|_| gone())?.map(|done| (done, id))
    }
}

/// Moves the calling thread, which has what is kept and gives up what it needs no more.
fn enter(namespace: &OwnedFd, is_kept: bool) -> io::Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    match is_kept {
        true => privileges::keep_only(&KEPT[..1]),
        false => Ok(()),
    }
}

fn keep(inbox: &Receiver<Job>) {
    if let Err(error) = privileges::keep_only(&KEPT) {
        log::error!(target: "source", "vnplug-netns keeps more than it needs: {error}");
    }
    for job in inbox {
        if let Err(error) = start(job) {
            log::error!(target: "source", "a network namespace cannot be entered: no thread: {error}");
        }
    }
}

/// Starts a thread that may enter, and is not waited for.
fn start(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("vnplug-enters".into());
    thread.spawn(job).map(drop)
}
