//! The file that packets are written to: under a temporary name until it is whole.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use vnplug_store::name::PART;

/// A file that is being written. Dropped before [`finish`](Self::finish) it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Target {
    file: File,
    /// Its names now and later; `None`: a pipe or a device is written as it is.
    names: Option<(PathBuf, PathBuf)>,
}

impl Target {
    /// Makes it beside the name it will have, for its owner and group only, as segments are.
    ///
    /// # Errors
    /// Those of open(2).
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        if fs::metadata(path).is_ok_and(|about| !about.is_file()) {
            let file = File::options().write(true).open(path)?;
            return Ok(Self { file, names: None });
        }
        // Behind a symbolic link is what is to be replaced.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let Some(name) = path.file_name() else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let mut temporary = name.to_owned();
        temporary.push(format!(".{}{PART}", std::process::id()));
        let temporary = path.with_file_name(temporary);
        let mut options = File::options();
        let file = options
            .write(true)
            .create_new(true)
            .mode(MODE)
            .open(&temporary)?;
        Ok(Self {
            file,
            names: Some((temporary, path)),
        })
    }

    /// It is whole: gives it its name.
    ///
    /// # Errors
    /// Those of rename(2).
    pub(crate) fn finish(mut self) -> io::Result<()> {
        match self.names.take() {
            None => Ok(()),
            Some((temporary, path)) => fs::rename(&temporary, path).inspect_err(|_| {
                let _ = fs::remove_file(&temporary);
            }),
        }
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some((temporary, _)) = &self.names {
            // Nobody is left to tell.
            let _ = fs::remove_file(temporary);
        }
    }
}

/// As the recorder gives it to segments.
const MODE: u32 = 0o640;
