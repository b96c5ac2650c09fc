//! A service manager, as far as a daemon sees one: it hears what the daemon says, keeps descriptors for the next daemon, and
//! passes them on as `sd_listen_fds(3)` says.

use std::io::{ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::error::{LabError, Result};
use crate::lab::Lab;

/// One that ends when it is dropped.
#[derive(Debug)]
pub struct Manager {
    path: PathBuf,
    keeps: Arc<Keeps>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

type Keeps = Mutex<Vec<(String, Arc<OwnedFd>)>>;

impl Manager {
    /// Begins to listen.
    ///
    /// # Errors
    /// [`LabError`] if the socket cannot be made.
    pub fn new(lab: &Lab) -> Result<Arc<Self>> {
        let path = lab.dir().join("notify");
        let socket = UnixDatagram::bind(&path).map_err(LabError::io("the manager's socket"))?;
        let pause = socket.set_read_timeout(Some(Duration::from_millis(20)));
        pause.map_err(LabError::io("the manager's socket"))?;
        let (keeps, ends) = (Arc::<Keeps>::default(), Arc::<AtomicBool>::default());
        let own = (Arc::clone(&keeps), Arc::clone(&ends));
        let thread = thread::spawn(move || {
            while !own.1.load(Ordering::Relaxed) {
                hear(&socket, &own.0);
            }
        });
        Ok(Arc::new(Self {
            path,
            keeps,
            ends,
            thread: Some(thread),
        }))
    }

    /// Has a descriptor passed to the daemons that start from now on.
    ///
    /// # Panics
    /// If there is no room for it.
    pub fn pass(&self, name: &str, fd: OwnedFd) {
        let fd = high(fd).expect("a descriptor");
        lock(&self.keeps).push((name.to_owned(), Arc::new(fd)));
    }

    /// The names of what it keeps.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let keeps = lock(&self.keeps);
        keeps.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The command that starts a daemon as it does, and what that inherits.
    pub(crate) fn start(&self, program: &Path) -> (Command, Vec<Arc<OwnedFd>>) {
        let keeps = lock(&self.keeps).clone();
        let numbers: Vec<_> = keeps
            .iter()
            .map(|(_, fd)| fd.as_raw_fd().to_string())
            .collect();
        // The process' number is known in it alone. Not by a shell: of more than a few, bash loses some.
        let mut command = Command::new("/usr/bin/perl");
        command
            .args(["-MPOSIX=dup2", "-e", PASS, &numbers.join(",")])
            .arg(program);
        let names: Vec<_> = keeps.iter().map(|(name, _)| name.as_str()).collect();
        command
            .env("NOTIFY_SOCKET", &self.path)
            .env("LISTEN_FDS", keeps.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"));
        (command, keeps.into_iter().map(|(_, fd)| fd).collect())
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Hears one thing that is said, if something is.
fn hear(socket: &UnixDatagram, keeps: &Keeps) {
    let (mut bytes, mut space) = (
        [0; 4096],
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))],
    );
    let mut with = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let heard = match recvmsg(socket, &mut parts, &mut with, RecvFlags::CMSG_CLOEXEC) {
        Ok(heard) => heard.bytes,
        Err(error) => {
            let quiet = std::io::Error::from(error).kind();
            assert!(
                matches!(quiet, ErrorKind::WouldBlock | ErrorKind::Interrupted),
                "{error}"
            );
            return;
        }
    };
    let fds: Vec<OwnedFd> = with
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
            _ => Vec::new(),
        })
        .collect();
    let text = String::from_utf8_lossy(&bytes[..heard]).into_owned();
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
    let Some(name) = name else { return };
    let mut keeps = lock(keeps);
    if text.lines().any(|line| line == "FDSTOREREMOVE=1") {
        keeps.retain(|(known, _)| known != name);
    }
    let fds = fds.into_iter().filter_map(high);
    keeps.extend(fds.map(|fd| (name.to_owned(), Arc::new(fd))));
}

fn lock(keeps: &Keeps) -> std::sync::MutexGuard<'_, Vec<(String, Arc<OwnedFd>)>> {
    keeps.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Out of the way of the numbers by which they are passed.
fn high(fd: OwnedFd) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(&fd, HIGH).ok()
}

const HIGH: i32 = 600;

/// Moves descriptors to 3, 4 and so on, and is the program then.
const PASS: &str = r#"
    my $to = 3;
    for (split /,/, shift) {
        defined dup2($_, $to++) or die "dup2: $!\n";
        POSIX::close($_);
    }
    $ENV{LISTEN_PID} = $$;
    exec @ARGV or die "exec: $!\n";
"#;
