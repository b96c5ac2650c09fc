//! Chunks are appended to a segment.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::Writer;
use super::segment::{reserve, with_tail};
use crate::disk::{BLOCK, Buffer, Write};
use crate::name::Format;
use crate::record::chunk::Chunk;

impl Writer {
    /// Writes up to [`AT_ONCE`] chunks to one segment.
    pub(super) fn write_some(&mut self, now: Instant) -> io::Result<()> {
        let Some(first) = self.backlog.front() else {
            return Ok(());
        };
        let (start_ns, note) = (first.tally.first_ns, first.note.clone());
        let open = self.segment.as_ref();
        if open.is_some_and(|segment| !segment.fill.admits(&self.settings, first)) {
            self.close(now);
            if self.pauses() {
                return Ok(());
            }
        }
        if self.segment.is_none() {
            self.open(start_ns, note)?;
        }
        let Some(segment) = &mut self.segment else {
            return Ok(());
        };
        let most = match self.settings.format {
            Format::Pcapng if !self.careful => AT_ONCE,
            _ => 1,
        };
        let mut fill = segment.fill.clone();
        let (mut count, mut end) = (0, segment.len);
        for chunk in self.backlog.iter().take(most) {
            if !fill.admits(&self.settings, chunk) {
                break;
            }
            fill.add(chunk.len, chunk.serial, &chunk.tally);
            count += 1;
            end += chunk.len as u64;
        }
        if end > segment.allocated {
            reserve(self.disk.as_mut(), segment, end, self.settings.reserve());
            self.enforce_quota();
        }
        let batch = self.start(count);
        self.disk.submit();
        self.catch_up();
        self.finish(batch)
    }

    /// Starts the writes of so many chunks; what they were without their buffers.
    fn start(&mut self, count: usize) -> VecDeque<Chunk> {
        let mut batch = VecDeque::with_capacity(count);
        let Some(segment) = &self.segment else {
            return batch;
        };
        let mut offset = segment.len;
        for mut chunk in self.backlog.drain(..count) {
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
            offset += chunk.len as u64;
            batch.push_back(chunk);
            self.disk.start(write);
        }
        batch
    }

    /// Waits for the writes of a batch. Chunks that were not written wait again.
    fn finish(&mut self, mut batch: VecDeque<Chunk>) -> io::Result<()> {
        let mut failed = None;
        let mut left = Vec::new();
        while let (Some(written), Some(segment)) = (self.disk.finish(), &mut self.segment) {
            let Some(mut chunk) = batch.pop_front() else {
                break;
            };
            chunk.buffer = written.write.buffer;
            let mut result = written.result;
            if result.is_ok() && self.settings.format == Format::Pcap && failed.is_none() {
                result = self.disk.truncate(segment.len + chunk.len as u64);
            }
            match result {
                Ok(()) if failed.is_none() => {
                    let offset = segment.len;
                    segment.len += chunk.len as u64;
                    if self.settings.format == Format::Pcap {
                        let whole = segment.len as usize % BLOCK;
                        let end = chunk.from + chunk.len;
                        segment.tail = chunk.buffer[end - whole.min(end)..end].to_vec();
                    }
                    segment.fill.add(chunk.len, chunk.serial, &chunk.tally);
                    segment.tally.merge(&chunk.tally);
                    segment.unsynced.push((chunk.serial, chunk.tally.clone()));
                    self.behind.push((offset, chunk));
                }
                result => {
                    if let Err(error) = result {
                        failed.get_or_insert(error);
                    }
                    left.push(chunk);
                }
            }
        }
        self.failed = left.len();
        for chunk in left.into_iter().rev() {
            self.backlog.push_front(chunk);
        }
        self.careful = failed.is_some();
        failed.map_or(Ok(()), Err)
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

/// Chunks that are on their way to the disk together.
pub(in crate::record) const AT_ONCE: usize = 4;
