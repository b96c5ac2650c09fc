//! Files that VMs map: opened by path, of the daemon's own user, with every page allocated.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use vnplug_ring::Region;

use super::mapping::{Watch, map};
use super::{GoOn, commit};

/// Opens or makes the file of a VM's pool, commits its memory and maps it.
///
/// # Errors
/// The system's; an existing file of another length, another user's or no regular file is refused
/// with `InvalidData`. `Interrupted` if nobody wants it any more. Nothing is left of a file that
/// could not be made.
pub fn pool_file(path: &Path, len: u64, create: bool, go_on: GoOn<'_>) -> io::Result<Pool> {
    let made = open_pool(path, len, create, go_on);
    if create && made.is_err() {
        // The shortage is what the caller is told of; what is left of the file is nobody's.
        let _ = std::fs::remove_file(path);
    }
    made
}

/// A VM's pool, mapped.
pub type Pool = (Region, Arc<Watch>);

fn open_pool(path: &Path, len: u64, create: bool, go_on: GoOn<'_>) -> io::Result<Pool> {
    // Who owns the file can give it to others.
    let us = [rustix::process::geteuid().as_raw()];
    let file = open(path, len, create.then_some(go_on), &us)?;
    watched(&file, len, go_on)
}

/// As [`pool_file`] makes one.
pub fn anew(path: &Path, len: u64) -> io::Result<(File, Pool)> {
    let us = [rustix::process::geteuid().as_raw()];
    let made = open(path, len, Some(&|| true), &us).and_then(|file| {
        let pool = watched(&file, len, &|| true)?;
        Ok((file, pool))
    });
    if made.is_err() {
        // As above.
        let _ = std::fs::remove_file(path);
    }
    made
}

/// As [`pool_file`] opens one that is there, if it is this one, of one of these users.
pub fn again(path: &Path, inode: u64, len: u64, users: &[u32]) -> io::Result<(File, Pool)> {
    use std::os::unix::fs::MetadataExt;
    let file = open(path, len, None, users)?;
    if file.metadata()?.ino() != inode {
        let what = format!("{} is another file now", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    commit(&file, len, &|| true)?;
    let pool = watched(&file, len, &|| true)?;
    Ok((file, pool))
}

/// Opens a file of one of these users; with `make`, makes it.
fn open(path: &Path, len: u64, make: Option<GoOn<'_>>, users: &[u32]) -> io::Result<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = match make {
        None => options.open(path)?,
        Some(go_on) => {
            let file = options.create_new(true).open(path)?;
            commit(&file, len, go_on)?;
            file
        }
    };
    let have = file.metadata()?;
    let wrong = |what: String| {
        let what = format!("{} {what}", path.display());
        Err(io::Error::new(io::ErrorKind::InvalidData, what))
    };
    if !have.is_file() {
        return wrong("is no regular file".into());
    }
    if !users.contains(&have.uid()) {
        let us = users[0];
        return wrong(format!("belongs to user {}, not to user {us}", have.uid()));
    }
    if have.len() != len {
        return wrong(format!("has {} bytes, not {len}", have.len()));
    }
    Ok(file)
}

fn watched(file: &File, len: u64, go_on: GoOn<'_>) -> io::Result<Pool> {
    let watch = Arc::new(Watch::default());
    let region = map(file, len, &watch, go_on)?;
    Ok((region, watch))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::super::CHUNK;
    use super::*;

    #[test]
    fn what_nobody_wants_any_more_is_given_up_between_two_chunks() {
        let name = format!("vnplug-pool-given-up-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let left = std::cell::Cell::new(3);
        let go_on = || {
            left.set(left.get() - 1);
            left.get() > 0
        };
        let error = pool_file(&path, 64 * CHUNK, true, &go_on).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        assert_eq!(left.get(), 0);
        assert!(!path.exists());
    }

    #[test]
    fn a_pool_that_is_not_ours_is_not_mapped() {
        let name = format!("vnplug-pool-theirs-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let wrong = |path: &Path| {
            let opened = pool_file(path, 1 << 20, false, &|| true);
            opened.err().unwrap().to_string()
        };
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        let error = wrong(&path);
        assert!(error.contains("no regular file"), "{error}");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        wrong(&path);
        std::fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        pool_file(&path, 1 << 20, false, &|| true).unwrap();
        // Only root can give a file away; without, there is nothing to refuse.
        if std::os::unix::fs::chown(&path, Some(65534), None).is_ok() {
            let error = wrong(&path);
            assert!(error.contains("belongs to user 65534"), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_truncated_pool_reads_as_zero_and_is_noticed() {
        let path = std::env::temp_dir().join(format!("vnplug-pool-test-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let (region, watch) = pool_file(&path, 1 << 20, true, &|| true).unwrap();
        region.store_u64(8192, 7, Ordering::Relaxed);
        assert!(!watch.lost.load(Ordering::Relaxed));
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        assert_eq!(region.load_u64(8192, Ordering::Relaxed), 0);
        region.store_u64(8192, 9, Ordering::Relaxed);
        assert!(watch.lost.load(Ordering::Relaxed));
        std::fs::remove_file(&path).unwrap();
    }
}
