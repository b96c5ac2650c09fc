//! A directory for a recording, whose name is on the disk, too.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fsync, open};

use super::errno;

/// Makes a directory, `with_parents` also those above it that are missing, and syncs those in which a name is
/// new.
///
/// # Errors
/// Those of mkdir(2) and fsync(2): [`io::ErrorKind::NotFound`] if what is above it is missing.
pub fn make_directory(path: &Path, with_parents: bool) -> io::Result<()> {
    for parent in make(path, with_parents)? {
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
fn make(path: &Path, with_parents: bool) -> io::Result<Vec<PathBuf>> {
    let missing = path
        .ancestors()
        .take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
    let mut parents = Vec::new();
    let most = if with_parents { usize::MAX } else { 1 };
    for dir in missing.take(most).collect::<Vec<_>>().into_iter().rev() {
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
        let missing = make_directory(&b, false).unwrap_err();
        assert!(missing.kind() == io::ErrorKind::NotFound && !a.exists());
        assert_eq!(make(&c, true).unwrap(), [root.clone(), a, b]);
        assert!(make(&c, false).unwrap().is_empty());
        make_directory(&c, false).unwrap();
        assert_eq!(make(&c.join("d"), false).unwrap(), [c]);
        std::fs::write(root.join("file"), "").unwrap();
        assert!(make_directory(&root.join("file"), true).is_err());
        assert!(make_directory(&root.join("file/d"), true).is_err());
        std::fs::remove_dir_all(&root).unwrap();
    }
}
