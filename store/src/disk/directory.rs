//! A directory for a recording, whose name is on the disk, too.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fsync, open};

use super::errno;

/// Makes a directory and those above it that are missing, and syncs those in which a name is new.
///
/// # Errors
/// Those of mkdir(2) and fsync(2).
pub fn make_directory(path: &Path) -> io::Result<()> {
    for parent in make(path)? {
        sync_directory(&parent)?;
    }
    Ok(())
}

/// fsync(2) of a directory.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = open(path, flags, Mode::empty()).map_err(errno)?;
    fsync(dir).map_err(errno)
}

/// The directories in which one was made, from the root on.
fn make(path: &Path) -> io::Result<Vec<PathBuf>> {
    let missing = path
        .ancestors()
        .take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
    let mut parents = Vec::new();
    for dir in missing.collect::<Vec<_>>().into_iter().rev() {
        match std::fs::create_dir(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let parent = dir.parent().filter(|dir| !dir.as_os_str().is_empty());
        parents.push(parent.unwrap_or(Path::new(".")).to_owned());
    }
    match path.is_dir() {
        true => Ok(parents),
        false => Err(errno(rustix::io::Errno::NOTDIR)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directory_with_a_new_name_is_synced() {
        let root = std::env::temp_dir().join(format!("vnplug-make-{}", std::process::id()));
        let (a, b, c) = (root.join("a"), root.join("a/b"), root.join("a/b/c"));
        std::fs::create_dir(&root).unwrap();
        assert_eq!(make(&c).unwrap(), [root.clone(), a, b]);
        assert!(make(&c).unwrap().is_empty());
        make_directory(&c).unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        assert!(make_directory(&root.join("file")).is_err());
        assert!(make_directory(&root.join("file/d")).is_err());
        std::fs::remove_dir_all(&root).unwrap();
    }
}
