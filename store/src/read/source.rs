//! What a reader reads from: a file as it is, or one that was packed ([`crate::archive`]).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use crate::archive::{Keys, Seekable};

/// Bytes that can be read anywhere.
pub(crate) trait Source: Send {
    /// Some bytes from `offset` on; 0 at the end.
    fn read_at(&mut self, into: &mut [u8], offset: u64) -> io::Result<usize>;

    /// How many there are now.
    fn len_bytes(&self) -> io::Result<u64>;

    /// All of `into`, or an error.
    fn read_exact_at(&mut self, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !into.is_empty() {
            match self.read_at(into, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    into = &mut into[read..];
                    offset += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Source for File {
    fn read_at(&mut self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, into, offset)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.metadata().map(|data| data.len())
    }
}

/// A file whose bytes cannot be had; each read says why.
pub(super) struct Closed(pub(super) io::Error);

impl Source for Closed {
    fn read_at(&mut self, _: &mut [u8], _: u64) -> io::Result<usize> {
        Err(self.again())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Err(self.again())
    }
}

impl Closed {
    fn again(&self) -> io::Error {
        io::Error::new(self.0.kind(), self.0.to_string())
    }
}

/// What is in a file, decrypted and decompressed if it begins as such files do.
///
/// # Errors
/// Those of reading, also that no key fits.
pub(crate) fn open(file: File, keys: &Keys) -> io::Result<Box<dyn Source>> {
    let mut source: Box<dyn Source> = Box::new(file);
    if starts_with(source.as_mut(), AGE)? {
        source = keys.open(At::new(source))?;
    }
    let mut magic = [0; 4];
    if starts(source.as_mut(), &mut magic)? == 4 && Seekable::is_magic(magic) {
        source = Box::new(Seekable::open(source)?);
    }
    Ok(source)
}

fn starts_with(source: &mut dyn Source, magic: &[u8]) -> io::Result<bool> {
    let mut start = [0; AGE.len()];
    let len = starts(source, &mut start)?;
    Ok(&start[..len] == magic)
}

fn starts(source: &mut dyn Source, into: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < into.len() {
        match source.read_at(&mut into[len..], len as u64) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// A source with a place in it.
pub(crate) struct At {
    source: Box<dyn Source>,
    at: u64,
}

impl At {
    fn new(source: Box<dyn Source>) -> Self {
        Self { source, at: 0 }
    }
}

impl Read for At {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read_at(into, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for At {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        self.at = match to {
            SeekFrom::Start(at) => at,
            SeekFrom::End(back) => self
                .source
                .len_bytes()?
                .checked_add_signed(back)
                .ok_or_else(wrong)?,
            SeekFrom::Current(step) => self.at.checked_add_signed(step).ok_or_else(wrong)?,
        };
        Ok(self.at)
    }
}

/// What an encrypted file begins with (age-encryption.org/v1).
const AGE: &[u8] = b"age-encryption.org/v1";
