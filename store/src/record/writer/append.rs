//! Chunks are appended to a segment.

use std::io;
use std::time::Instant;

use super::Writer;
use super::segment::{reserve, with_tail};
use crate::disk::{BLOCK, Buffer, Write};
use crate::name::Format;
use crate::record::chunk::Chunk;

impl Writer {
    /// Starts the writes of what waits, as many as may be under way, to one segment.
    pub(super) fn start_some(&mut self, now: Instant) -> io::Result<()> {
        let most = match self.settings.format {
            Format::Pcapng if !self.careful => self.most,
            _ => 1,
        };
        while self.flying.len() < most
            && let Some(first) = self.backlog.front()
        {
            let (start_ns, note) = (first.tally.first_ns, first.note.clone());
            let open = self.segment.as_ref();
            if open.is_some_and(|segment| !segment.fill.admits(&self.settings, first)) {
                if !self.flying.is_empty() {
                    break;
                }
                self.close(now);
                if self.pauses() {
                    return Ok(());
                }
            }
            if self.segment.is_none() {
                self.open(start_ns, note)?;
            }
            self.start_one();
        }
        self.disk.submit();
        Ok(())
    }

    fn start_one(&mut self) {
        let (Some(segment), Some(mut chunk)) = (&mut self.segment, self.backlog.pop_front()) else {
            return;
        };
        let offset = segment.next;
        segment.next += chunk.len as u64;
        segment.fill.add(chunk.len, chunk.serial, &chunk.tally);
        if segment.next > segment.allocated {
            let (end, step) = (segment.next, self.settings.reserve());
            reserve(self.disk.as_mut(), &self.dir, segment, end, step);
            self.quota_due = true;
        }
        let write = match self.settings.format {
            Format::Pcapng => Write {
                len: chunk.len,
                offset,
                buffer: chunk.lend(),
            },
            Format::Pcap => {
                chunk.shift(segment.tail.len());
                let len = segment.tail.len() + chunk.len;
                with_tail(chunk.lend(), len, segment)
            }
        };
        self.disk.start(write);
        self.flying.push_back(chunk);
    }

    /// Waits for the oldest write. After an error all that is under way waits again, as what was not
    /// written does.
    pub(super) fn finish_one(&mut self) -> io::Result<()> {
        let Some(written) = self.disk.finish() else {
            return Ok(());
        };
        let (Some(mut chunk), Some(segment)) = (self.flying.pop_front(), &mut self.segment) else {
            return Ok(());
        };
        chunk.buffer = written.write.buffer;
        let mut result = written.result;
        if result.is_ok() && self.settings.format == Format::Pcap {
            result = self.disk.truncate(segment.len + chunk.len as u64);
        }
        if let Err(error) = result {
            self.recall(Some(chunk));
            self.careful = true;
            return Err(error);
        }
        let offset = segment.len;
        segment.len += chunk.len as u64;
        if self.settings.format == Format::Pcap {
            let whole = segment.len as usize % BLOCK;
            let end = chunk.from + chunk.len;
            segment.tail = chunk.buffer[end - whole.min(end)..end].to_vec();
        }
        segment.tally.merge(&chunk.tally);
        segment.unsynced.push((chunk.serial, chunk.tally.clone()));
        self.behind.push((offset, chunk));
        (self.careful, self.removed) = (false, 0);
        Ok(())
    }

    /// Waits for all that is under way, and lets it wait again, behind `first`.
    pub(super) fn recall(&mut self, first: Option<Chunk>) {
        let mut left: Vec<Chunk> = first.into_iter().collect();
        while let Some(written) = self.disk.finish() {
            if let Some(mut chunk) = self.flying.pop_front() {
                chunk.buffer = written.write.buffer;
                left.push(chunk);
            }
        }
        self.failed = left.len();
        for chunk in left.into_iter().rev() {
            self.backlog.push_front(chunk);
        }
    }

    /// Adds to the index what is written, and gives the buffers back.
    pub(super) fn catch_up(&mut self) {
        for (offset, chunk) in self.behind.drain(..) {
            let bytes = &chunk.buffer[chunk.from..chunk.from + chunk.len];
            self.index.written(self.disk.as_mut(), offset, bytes);
            // Nobody wants it when the recorder ends.
            let _ = self.pool.send(chunk.buffer);
        }
    }

    /// The segment is given up: nothing more is added to its index.
    pub(in crate::record) fn drop_index(&mut self) {
        self.index.abandon();
        self.catch_up();
    }
}

impl Chunk {
    /// The buffer, while the disk has it; an empty one is in its place.
    fn lend(&mut self) -> Buffer {
        std::mem::replace(&mut self.buffer, Buffer::none())
    }

    /// Moves the packets within the buffer, so that they begin at `from`.
    fn shift(&mut self, from: usize) {
        self.buffer
            .copy_within(self.from..self.from + self.len, from);
        self.from = from;
    }
}
