//! A QEMU monitor client for tests (QMP): commands and waiting for events.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{LabError, Result};

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects and leaves negotiation mode.
    ///
    /// # Errors
    /// [`LabError::Io`], [`LabError::Protocol`].
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .map_err(LabError::io(format!("connect to {}", path.display())))?;
        stream
            .set_read_timeout(Some(REPLY_LIMIT))
            .map_err(LabError::io("QMP socket"))?;
        let mut qmp = Self {
            reader: BufReader::new(stream),
            events: VecDeque::new(),
        };
        qmp.read_message()?; // the greeting
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns its `return` value.
    ///
    /// # Errors
    /// [`LabError::Protocol`] with QEMU's words if it refuses; [`LabError::Io`] if it does not
    /// answer within a minute.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut request = json!({ "execute": command, "arguments": arguments }).to_string();
        request.push('\n');
        self.reader
            .get_mut()
            .write_all(request.as_bytes())
            .map_err(LabError::io("write to QMP"))?;
        loop {
            let mut message = self.read_message()?;
            if message.get("event").is_some() {
                self.events.push_back(message);
            } else if let Some(error) = message.get("error") {
                return Err(LabError::Protocol(format!(
                    "QEMU refuses {command}: {error}"
                )));
            } else {
                return Ok(message["return"].take());
            }
        }
    }

    /// Waits for an event of this name and returns its `data`; earlier events of other names stay
    /// queued.
    ///
    /// # Errors
    /// [`LabError::Timeout`], [`LabError::Io`].
    pub fn wait_event(&mut self, name: &str, limit: Duration) -> Result<Value> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return Ok(self.events.remove(at).unwrap_or_default()["data"].take());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LabError::Timeout {
                    what: format!("QMP event {name}"),
                    after: limit,
                });
            }
            let stream = self.reader.get_ref();
            stream
                .set_read_timeout(Some(left))
                .map_err(LabError::io("QMP socket"))?;
            let message = self.read_message();
            let stream = self.reader.get_ref();
            stream
                .set_read_timeout(Some(REPLY_LIMIT))
                .map_err(LabError::io("QMP socket"))?;
            match message {
                Ok(message) => self.events.push_back(message),
                Err(LabError::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether QEMU has a memory block whose name ends in `/memory`: one that a device brought, and whose
    /// name must not come again to the same slot before it has gone.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn has_block(&mut self, memory: &str) -> Result<bool> {
        let command = json!({ "command-line": "info ramblock" });
        let told = self.execute("human-monitor-command", command)?;
        let mut words = told.as_str().unwrap_or_default().split_whitespace();
        let name = format!("/{memory}");
        Ok(words.any(|word| word.ends_with(&name)))
    }

    fn read_message(&mut self) -> Result<Value> {
        let mut line = String::new();
        let len = self
            .reader
            .read_line(&mut line)
            .map_err(LabError::io("read from QMP"))?;
        if len == 0 {
            return Err(LabError::Protocol("QEMU closed its monitor".to_owned()));
        }
        serde_json::from_str(&line)
            .map_err(|error| LabError::Protocol(format!("QMP line {line:?}: {error}")))
    }
}

const REPLY_LIMIT: Duration = Duration::from_secs(60);
