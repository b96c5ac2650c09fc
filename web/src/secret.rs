//! Files that decide who may see what: their owner and mode are checked on what was opened.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Reads a file that nobody but its owner and root may change; of a `private` one, nobody outside its group may know it.
///
/// # Errors
/// What is wrong with it, and what mends it; also if it has more than `most` bytes.
pub(crate) fn read(path: &Path, private: bool, most: u64) -> Result<Vec<u8>, String> {
    let about = |what: &str| format!("{}: {what}", path.display());
    let file = File::open(path).map_err(|error| about(&error.to_string()))?;
    let status = file.metadata().map_err(|error| about(&error.to_string()))?;
    if !status.is_file() {
        return Err(about("this is no file"));
    }
    let own = rustix::process::geteuid().as_raw();
    if ![0, own].contains(&status.uid()) {
        return Err(about(&format!(
            "it belongs to user {}, who can change it: it must be root's, or of the user who runs this ({own})",
            status.uid()
        )));
    }
    let (forbidden, mends) = match private {
        true => (0o027, "chmod 640"),
        false => (0o022, "chmod 644"),
    };
    if status.mode() & forbidden != 0 {
        let mode = status.mode() & 0o777;
        let what = if private { "read or change" } else { "change" };
        return Err(about(&format!(
            "its mode {mode:03o} lets others {what} it: {mends} {}",
            path.display()
        )));
    }
    let mut bytes = Vec::new();
    let read = file.take(most + 1).read_to_end(&mut bytes);
    read.map_err(|error| about(&error.to_string()))?;
    match bytes.len() as u64 > most {
        true => Err(about(&format!("it has more than {} MiB", most >> 20))),
        false => Ok(bytes),
    }
}

/// Of certificates, keys and tokens: thousands of them.
pub(crate) const MOST: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use vnplug_testing::TestDir;

    use super::*;

    #[test]
    fn what_others_can_change_or_read_is_refused() {
        let dir = TestDir::new("web-secret");
        let path = dir.0.join("key");
        fs::write(&path, "it").unwrap();
        let may = |mode: u32, private| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            read(&path, private, MOST)
        };
        for (mode, private, public) in [
            (0o600, true, true),
            (0o640, true, true),
            (0o644, false, true),
            (0o660, false, false),
            (0o602, false, false),
        ] {
            assert_eq!(may(mode, true).is_ok(), private, "{mode:o}");
            assert_eq!(may(mode, false).is_ok(), public, "{mode:o}");
        }
        let said = may(0o644, true).unwrap_err();
        assert!(
            said.contains("mode 644") && said.contains("chmod 640"),
            "{said}"
        );
        assert!(read(&dir.0, true, MOST).unwrap_err().contains("no file"));
        let said = read(&path, false, 1).unwrap_err();
        assert!(said.contains("more than 0 MiB"), "{said}");
        // Root may give files away.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            assert!(
                may(0o600, true)
                    .unwrap_err()
                    .contains("belongs to user 65534")
            );
        }
    }
}
