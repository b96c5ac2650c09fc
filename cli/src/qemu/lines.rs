//! Lines of JSON over a Unix socket, with a limit to every wait: what QEMU's monitor and its guest agent speak.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use serde_json::Value;

/// A connection, and what it received that is no whole line yet.
#[derive(Debug)]
pub(super) struct Lines {
    pub(super) stream: UnixStream,
    received: Vec<u8>,
    /// The number of its bytes, from the first, among which no end of a line is.
    searched: usize,
}

impl Lines {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            received: Vec::new(),
            searched: 0,
        }
    }

    /// One line, or `None` at the deadline.
    ///
    /// # Errors
    /// `InvalidData` if it is no JSON or is longer than 16 MiB, and the next call goes on behind it; the connection's.
    pub(super) fn read(&mut self, deadline: Instant) -> io::Result<Option<Value>> {
        loop {
            let new = &self.received[self.searched..];
            if let Some(end) = new.iter().position(|&byte| byte == b'\n') {
                let end = self.searched + end;
                let line: Vec<u8> = self.received.drain(..=end).collect();
                self.searched = 0;
                // The guest agent marks a beginning with it, and no JSON has it: what stands before is a part of something else.
                let answer = line.rsplit(|&byte| byte == MARK).next();
                let value = serde_json::from_slice(answer.unwrap_or_default());
                // NB: of a line that ends too soon serde_json says that the connection has.
                return value
                    .map(Some)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
            }
            self.searched = self.received.len();
            if self.searched > MAX_LINE {
                self.received.clear();
                self.searched = 0;
                return Err(io::ErrorKind::InvalidData.into());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => self.received.extend_from_slice(&chunk[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes all, until the deadline: who does not read holds nobody up.
    ///
    /// # Errors
    /// The connection's; `TimedOut` at the deadline.
    pub(super) fn write(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_write_timeout(Some(left))?;
            match self.stream.write(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Stands before the answer to `guest-sync-delimited`.
pub(super) const MARK: u8 = 0xff;
const MAX_LINE: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_comes_behind_a_line_that_is_too_long_is_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let writes = std::thread::spawn(move || {
            theirs.write_all(&vec![b' '; MAX_LINE + 8192]).unwrap();
            theirs.write_all(b"x\n{\"return\": 1}\n").unwrap();
        });
        let mut lines = Lines::new(ours);
        let deadline = Instant::now() + Duration::from_secs(60);
        let kinds = [(); 2].map(|()| lines.read(deadline).unwrap_err().kind());
        assert_eq!(kinds, [io::ErrorKind::InvalidData; 2]);
        let answer = lines.read(deadline).unwrap().unwrap();
        assert_eq!(answer["return"], 1);
        writes.join().unwrap();
    }
}
