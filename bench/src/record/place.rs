//! Where on the disk a row writes.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;
use vnplug_e2e::Lab;

use crate::row::{Plan, Result};

/// A directory on the disk that is measured; it and all that is in it goes when it is dropped. Where it
/// could not, since the row was killed, the bench sweeps it.
pub(super) struct DiskDir {
    lab: Lab,
}

impl DiskDir {
    /// Makes it, if there is room for this many bytes.
    pub(super) fn with_room(plan: &Plan, bytes: u64) -> Result<Self> {
        let place = Self {
            lab: Lab::within(&plan.disk)?,
        };
        let free = free(place.dir())?;
        let gigabytes = |bytes: u64| bytes.div_ceil(100_000_000) as f64 / 10.0;
        match free >= bytes {
            true => Ok(place),
            false => Err(format!(
                "needs {} GB of disk, and {} has {} GB free: DISK=DIR names another one",
                gigabytes(bytes),
                plan.disk.display(),
                gigabytes(free),
            )
            .into()),
        }
    }

    /// The directory.
    pub(super) fn dir(&self) -> &Path {
        self.lab.dir()
    }

    /// An empty directory in it; [`clear`] removes it.
    pub(super) fn fresh(&self, name: &str) -> Result<PathBuf> {
        let dir = self.dir().join(name);
        clear(&dir)?;
        fs::create_dir(&dir)?;
        Ok(dir)
    }
}

/// Removes a directory and what is in it; that there is none is fine.
pub(super) fn clear(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Bytes that may be written where a directory is.
fn free(dir: &Path) -> Result<u64> {
    let about = statvfs(dir)?;
    Ok(about.f_bavail.saturating_mul(about.f_frsize))
}
