//! A lab: the directory its guests share, and the sweep of what killed labs left behind.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::daemon;
use crate::error::{LabError, Result};
use crate::netns;
use crate::owner;

/// A temporary directory for guests and their sockets; gone when the last clone and the last guest
/// of the lab are dropped.
#[derive(Clone, Debug)]
pub struct Lab {
    dir: Arc<Dir>,
}

#[derive(Debug)]
struct Dir {
    path: PathBuf,
}

impl Lab {
    /// Makes a lab, after removing the directories and network namespaces of labs whose owner is
    /// dead. (Guests need no sweep: they die with their owner.)
    ///
    /// # Errors
    /// [`LabError::Io`] if the directory cannot be made.
    pub fn new() -> Result<Self> {
        let base = env::temp_dir();
        sweep(&base);
        sweep(Path::new(daemon::MEMORY));
        netns::sweep();
        let path = base.join(owner::unique_name());
        // Sockets live here, and a Unix socket's path has at most 107 bytes (unix(7)).
        if path.as_os_str().len() > 80 {
            return Err(LabError::Path(path));
        }
        Self::at(path)
    }

    /// Makes a lab in a directory of the caller's, which is made if it is not there: for files that
    /// want a certain disk. Labs in it whose owner is dead are removed before. Its path may be too long
    /// for sockets.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn within(base: &Path) -> Result<Self> {
        let what = || LabError::io(format!("make {}", base.display()));
        fs::create_dir_all(base).map_err(what())?;
        let base = base.canonicalize().map_err(what())?;
        sweep(&base);
        Self::at(base.join(owner::unique_name()))
    }

    fn at(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).map_err(LabError::io(format!("make {}", path.display())))?;
        Ok(Self {
            dir: Arc::new(Dir { path }),
        })
    }

    /// The lab's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir.path
    }

    /// Makes a directory in the lab for one guest; every call makes another one.
    pub(crate) fn guest_dir(&self) -> Result<PathBuf> {
        for number in 0..1000 {
            let dir = self.dir().join(format!("g{number}"));
            match fs::create_dir(&dir) {
                Ok(()) => return Ok(dir),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(LabError::io(format!("make {}", dir.display()))(error)),
            }
        }
        Err(LabError::Path(self.dir().to_path_buf()))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // NB: a failure leaves the directory to the next lab's sweep.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn sweep(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(owner::is_orphan) {
            // NB: it may be another user's, or another lab may be sweeping it: both are fine.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_goes_with_the_last_clone() {
        let lab = Lab::new().unwrap();
        let path = lab.dir().to_path_buf();
        let clone = lab.clone();
        drop(lab);
        assert!(path.is_dir());
        drop(clone);
        assert!(!path.exists());
    }

    #[test]
    fn a_dead_owners_directory_is_swept() {
        let base = env::temp_dir();
        let orphan = base.join(format!(
            "vnplab-{}-1-{}",
            std::process::id(),
            owner::unique_name().len()
        ));
        fs::create_dir(&orphan).unwrap();
        let _lab = Lab::new().unwrap();
        assert!(!orphan.exists());
    }

    #[test]
    fn a_lab_on_another_disk_sweeps_there() {
        let lab = Lab::new().unwrap();
        let base = lab.dir().join("deep/disk");
        let orphan = base.join(format!("vnplab-{}-1-0", std::process::id()));
        fs::create_dir_all(&orphan).unwrap();
        let other = Lab::within(&base).unwrap();
        assert!(!orphan.exists() && other.dir().starts_with(lab.dir().canonicalize().unwrap()));
        drop(other);
        assert_eq!(fs::read_dir(&base).unwrap().count(), 0);
    }
}
