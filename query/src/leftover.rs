//! Files that must not stay when the work is cut short: by an error, Ctrl-C, or SIGTERM.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::signal::unix::{SignalKind, signal};

/// A file or a directory that is removed when this is dropped, or when the process is interrupted.
#[derive(Debug)]
pub(crate) struct Leftover(PathBuf);

impl Leftover {
    /// Of what is there, or is made next.
    pub(crate) fn new(path: PathBuf) -> Self {
        all().push(path.clone());
        Self(path)
    }

    /// A new directory in `parent`, which others cannot look into.
    ///
    /// # Errors
    /// Those of mkdir(2).
    pub(crate) fn directory(parent: &Path) -> io::Result<Self> {
        let mut number = 0;
        loop {
            let path = parent.join(format!("vnplug-query-{}-{number}", std::process::id()));
            // No signal comes between making and noting it.
            let mut all = all();
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {
                    all.push(path.clone());
                    return Ok(Self(path));
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// It has become what it was to be, or another's.
    pub(crate) fn keep(self) {
        forget(&self.0);
        std::mem::forget(self);
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        remove(&self.0);
        forget(&self.0);
    }
}

/// From now on Ctrl-C and SIGTERM end the process with code 130, and nothing is left behind, whatever its
/// threads are waiting for.
///
/// # Errors
/// If the system has no room for it.
pub(crate) fn watch() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        )
    };
    thread::Builder::new().spawn(move || {
        runtime.block_on(async {
            let (interrupt, terminate) = (interrupt.recv(), terminate.recv());
            futures::future::select(std::pin::pin!(interrupt), std::pin::pin!(terminate)).await;
        });
        // Held to the end: nobody begins anything new.
        let all = all();
        all.iter().for_each(|path| remove(path));
        std::process::exit(INTERRUPTED);
    })?;
    Ok(())
}

fn remove(path: &Path) {
    // Other threads may still be making files in a directory.
    for _ in 0..MOST_TRIES {
        let removed = match fs::symlink_metadata(path) {
            Ok(about) if about.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(_) => return,
        };
        if removed.is_ok() {
            return;
        }
    }
}

fn forget(path: &Path) {
    let mut all = all();
    if let Some(at) = all.iter().position(|other| other == path) {
        all.swap_remove(at);
    }
}

fn all() -> MutexGuard<'static, Vec<PathBuf>> {
    static ALL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

const MOST_TRIES: usize = 100;
/// As shells say it of a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;
