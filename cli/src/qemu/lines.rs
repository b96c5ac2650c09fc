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
}

impl Lines {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            received: Vec::new(),
        }
    }

    /// One line, or `None` at the deadline.
    ///
    /// # Errors
    /// `InvalidData` if it is no JSON or is longer than 16 MiB; the connection's.
    pub(super) fn read(&mut self, deadline: Instant) -> io::Result<Option<Value>> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let mut line: Vec<u8> = self.received.drain(..=end).collect();
                // The guest agent marks a beginning with it; no JSON has it.
                line.retain(|&byte| byte != MARK);
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            if self.received.len() > MAX_LINE {
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
