//! Buffered bytes of a file or a stream, with the offset in it.

use std::io::{self, ErrorKind, Read};

use super::source::Source;

/// Where bytes come from.
enum Origin {
    File(Box<dyn Source>),
    Stream(Box<dyn Read + Send>),
}

/// A window on a file: what lies between `start` and the buffer's end can be looked at.
pub(super) struct Input {
    origin: Origin,
    buffer: Vec<u8>,
    /// The first byte of the buffer that was not taken.
    start: usize,
    /// How much of the buffer is filled.
    filled: usize,
    /// The file's offset of `start`.
    offset: u64,
    /// Where the block that was taken last begins in the buffer.
    taken: usize,
    /// Bytes of a file asked for at once; grows while it is read in order.
    ahead: usize,
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input")
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl Input {
    pub(super) fn file(file: Box<dyn Source>) -> Self {
        Self::new(Origin::File(file))
    }

    pub(super) fn stream(stream: Box<dyn Read + Send>) -> Self {
        Self::new(Origin::Stream(stream))
    }

    fn new(origin: Origin) -> Self {
        Self {
            origin,
            buffer: Vec::new(),
            start: 0,
            filled: 0,
            offset: 0,
            taken: 0,
            ahead: FIRST_READ,
        }
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn buffered(&self) -> usize {
        self.filled - self.start
    }

    pub(super) fn len_bytes(&self) -> Option<u64> {
        match &self.origin {
            Origin::File(file) => file.len_bytes().ok(),
            Origin::Stream(_) => None,
        }
    }

    /// Goes on at `offset`; what is buffered stays if it lies there.
    pub(super) fn seek(&mut self, offset: u64) {
        let begin = self.offset - self.start as u64;
        let inside = offset
            .checked_sub(begin)
            .and_then(|at| usize::try_from(at).ok());
        match inside {
            Some(at) if at <= self.filled => self.start = at,
            _ => {
                (self.start, self.filled) = (0, 0);
                self.ahead = FIRST_READ;
            }
        }
        self.taken = self.start;
        self.offset = offset;
    }

    /// Lets go of what is buffered and was not taken, so that it is read again; false if it cannot be.
    pub(super) fn forget(&mut self) -> bool {
        match self.origin {
            Origin::File(_) => {
                self.filled = self.start;
                self.ahead = FIRST_READ;
                true
            }
            Origin::Stream(_) => false,
        }
    }

    /// What is buffered and was not taken.
    pub(super) fn rest(&self) -> &[u8] {
        &self.buffer[self.start..self.filled]
    }

    /// `len` bytes from the current place on; `None` if the file ends before.
    pub(super) fn peek(&mut self, len: usize) -> io::Result<Option<&[u8]>> {
        if self.buffered() < len && !self.fill(len)? {
            return Ok(None);
        }
        Ok(Some(&self.buffer[self.start..self.start + len]))
    }

    /// Takes `len` bytes that were peeked at; [`taken`](Self::taken) lends them.
    pub(super) fn take(&mut self, len: usize) {
        debug_assert!(len <= self.buffered());
        self.taken = self.start;
        self.start += len;
        self.offset += len as u64;
    }

    /// A part of what was taken last.
    pub(super) fn taken(&self, skip: usize, len: usize) -> &[u8] {
        &self.buffer[self.taken + skip..self.taken + skip + len]
    }

    /// Passes over `len` bytes that need not be buffered; false if the file ends before them.
    pub(super) fn skip(&mut self, len: u64) -> io::Result<bool> {
        if let Ok(short) = usize::try_from(len)
            && short <= self.buffered()
        {
            self.take(short);
            return Ok(true);
        }
        match &mut self.origin {
            Origin::File(file) => {
                let end = self.offset.checked_add(len);
                let Some(end) = end.filter(|&end| file.len_bytes().is_ok_and(|len| end <= len))
                else {
                    return Ok(false);
                };
                self.seek(end);
            }
            Origin::Stream(_) => {
                let mut left = len;
                while left > 0 {
                    if self.buffered() == 0 && !self.fill(1)? {
                        return Ok(false);
                    }
                    let step = self
                        .buffered()
                        .min(usize::try_from(left).unwrap_or(usize::MAX));
                    self.take(step);
                    left -= step as u64;
                }
            }
        }
        Ok(true)
    }

    /// Has at least `len` bytes buffered, or says that there are fewer.
    fn fill(&mut self, len: usize) -> io::Result<bool> {
        self.buffer.copy_within(self.start..self.filled, 0);
        self.filled -= self.start;
        (self.start, self.taken) = (0, 0);
        let room = len.max(self.ahead);
        if self.buffer.len() < room {
            self.buffer.resize(room, 0);
        }
        while self.filled < len {
            let rest = &mut self.buffer[self.filled..];
            let read = match &mut self.origin {
                Origin::File(file) => file.read_at(rest, self.offset + self.filled as u64),
                Origin::Stream(stream) => stream.read(rest),
            };
            match read {
                Ok(0) => return Ok(false),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.ahead = (self.ahead * 4).min(MAX_READ);
        Ok(true)
    }
}

/// After a jump a little is read, then more and more.
const FIRST_READ: usize = 4 << 10;
const MAX_READ: usize = 1 << 20;
