//! What a writer tells the books, and the file that they are kept in.

use std::io;
use std::time::Instant;

use super::Writer;
use crate::name::{Format, state_file};
use crate::record::chunk::Chunk;
use crate::record::now_ns;
use crate::record::state::lock_path;

impl Writer {
    /// A chunk is not, or not for certain, on the disk.
    pub(super) fn lose(&mut self, chunk: Chunk, written: Option<&str>, reason: &str) {
        self.ledger
            .lost(chunk.serial, &chunk.tally, written, reason);
        let _ = self.pool.send(chunk.buffer);
    }

    /// Tells the losses that no file tells yet, in a segment without packets. True if none is left.
    pub fn tell_losses(&mut self) -> bool {
        if self.settings.format == Format::Pcap || !self.ledger.has_untold() {
            return true;
        }
        let now = Instant::now();
        self.retry_at = None;
        let told = self.open(now_ns(), None);
        self.close(now);
        if let Err(error) = told {
            log::warn!("{}: losses are in no file: {error}", self.dir.display());
        }
        !self.ledger.has_untold()
    }

    /// Nobody else is at work here, also where a new directory took the place of the one that was locked.
    pub(super) fn hold(&mut self) -> io::Result<()> {
        let path = lock_path(&self.dir, &self.settings.recording);
        let held = self.disk.lock(&path);
        held.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::WouldBlock, ANOTHER),
            _ => error,
        })
    }

    /// Writes `NAME.state`: each directory has one of the whole recording.
    pub fn save_state(&mut self) {
        self.saved = self.ledger.revision();
        self.saved_at = Instant::now();
        self.state_due = false;
        let text = self.ledger.status().to_json(now_ns());
        let path = self.dir.join(state_file(&self.settings.recording));
        let new = path.with_extension("state.new");
        let saved = self
            .hold()
            .and_then(|()| self.disk.store(&new, text.as_bytes()))
            .and_then(|()| self.disk.rename(&new, &path))
            .and_then(|()| self.disk.sync_dir(&self.dir));
        match saved {
            Err(error) if !self.state_fails => {
                log::warn!("{}: {error}", path.display());
                self.state_fails = true;
            }
            Err(_) => {}
            Ok(()) => self.state_fails = false,
        }
    }
}

const ANOTHER: &str = "another recorder is writing this recording here";
