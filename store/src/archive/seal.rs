//! Encryption by age (age-encryption.org/v1): for whom, and with which keys it is opened.

use std::fmt;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use age::stream::{StreamReader, StreamWriter};
use age::x25519;

use crate::read::{At, Source};

/// For whom files are encrypted.
#[derive(Clone, Default)]
pub struct Recipients(Arc<Vec<x25519::Recipient>>);

impl Recipients {
    /// From public keys (`age1…`), and files with one in each line, as `age -R` has them.
    ///
    /// # Errors
    /// What is wrong with which key.
    pub fn new<P: AsRef<Path>>(keys: &[String], files: &[P]) -> Result<Self, String> {
        let mut all = Vec::new();
        for key in keys {
            all.push(recipient(key)?);
        }
        for file in files {
            let before = all.len();
            each_line(file.as_ref(), |line| {
                all.push(recipient(line)?);
                Ok(())
            })?;
            if all.len() == before {
                return Err(format!("{}: no key in it", file.as_ref().display()));
            }
        }
        Ok(Self(Arc::new(all)))
    }

    /// Whether there is nobody.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Encrypts what is written; it must be [finished](StreamWriter::finish).
    pub(super) fn seal<W: Write>(&self, to: W) -> io::Result<StreamWriter<W>> {
        let each = self.0.iter().map(|key| key as &dyn age::Recipient);
        let encryptor = age::Encryptor::with_recipients(each).map_err(io::Error::other)?;
        encryptor.wrap_output(to)
    }
}

impl fmt::Debug for Recipients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self.0.iter().map(ToString::to_string);
        f.debug_list().entries(keys).finish()
    }
}

/// Secret keys, which open encrypted files.
#[derive(Clone, Default)]
pub struct Keys(Arc<Vec<x25519::Identity>>);

impl Keys {
    /// From files as `age-keygen` writes them.
    ///
    /// # Errors
    /// What is wrong with which file.
    pub fn read<P: AsRef<Path>>(files: &[P]) -> Result<Self, String> {
        let mut all = Vec::new();
        for file in files {
            let before = all.len();
            each_line(file.as_ref(), |line| {
                all.push(identity(line)?);
                Ok(())
            })?;
            if all.len() == before {
                return Err(format!("{}: no key in it", file.as_ref().display()));
            }
        }
        Ok(Self(Arc::new(all)))
    }

    /// Opens an encrypted file.
    pub(crate) fn open(&self, file: At) -> io::Result<Box<dyn Source>> {
        let refused = |what: String| io::Error::new(io::ErrorKind::PermissionDenied, what);
        if self.0.is_empty() {
            return Err(refused(
                "is encrypted: name the file with its key by --identity".into(),
            ));
        }
        let damaged = |error| io::Error::new(io::ErrorKind::InvalidData, format!("age: {error}"));
        let decryptor = age::Decryptor::new(file).map_err(damaged)?;
        let each = self.0.iter().map(|key| key as &dyn age::Identity);
        let mut reader = decryptor.decrypt(each).map_err(|error| match error {
            age::DecryptError::NoMatchingKeys => {
                refused("is encrypted, and for none of the keys of --identity".into())
            }
            other => damaged(other),
        })?;
        let len = reader.seek(SeekFrom::End(0))?;
        Ok(Box::new(Opened {
            reader,
            len,
            at: len,
        }))
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

/// An encrypted file that was opened. What is damaged is an error of the read: each 64 KiB are
/// authenticated.
struct Opened {
    reader: StreamReader<At>,
    len: u64,
    at: u64,
}

impl Source for Opened {
    fn read_at(&mut self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        if offset >= self.len {
            return Ok(0);
        }
        if self.at != offset {
            self.at = self.reader.seek(SeekFrom::Start(offset))?;
        }
        let read = self.reader.read(into);
        match &read {
            Ok(read) => self.at += *read as u64,
            // Where it is now is not known.
            Err(_) => self.at = u64::MAX,
        }
        read
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len)
    }
}

fn recipient(text: &str) -> Result<x25519::Recipient, String> {
    if text.to_ascii_uppercase().starts_with("AGE-SECRET-KEY-") {
        return Err(
            "that is a secret key: encrypt to its public one (age1…), which `age-keygen -y` tells"
                .into(),
        );
    }
    x25519::Recipient::from_str(text).map_err(|why| {
        format!(
            "`{}` is no public key of age (age1…): {why}",
            text.escape_debug()
        )
    })
}

/// The line is not told: it may be a secret with a slip of the pen.
fn identity(text: &str) -> Result<x25519::Identity, String> {
    if text.starts_with("age1") {
        return Err("that is a public key, which opens nothing: the secret one is needed".into());
    }
    if text.starts_with("age-encryption.org/") || text.starts_with("-----BEGIN AGE") {
        return Err("is encrypted itself: decrypt it first (age -d)".into());
    }
    x25519::Identity::from_str(text)
        .map_err(|why| format!("no key of age (AGE-SECRET-KEY-1…): {why}"))
}

/// Lines that say something.
fn each_line(path: &Path, mut take: impl FnMut(&str) -> Result<(), String>) -> Result<(), String> {
    let about = |what: &dyn fmt::Display| format!("{}: {what}", path.display());
    let text = fs::read(path).map_err(|error| about(&error))?;
    let text = String::from_utf8_lossy(&text);
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if !line.is_empty() && !line.starts_with('#') {
            take(line).map_err(|what| about(&format!("line {}: {what}", number + 1)))?;
        }
    }
    Ok(())
}
