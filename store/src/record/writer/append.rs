//! Chunks are appended to a segment.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::Writer;
use super::segment::{reserve, with_tail};
use crate::disk::{BLOCK, Write};
use crate::name::Format;
use crate::record::chunk::Chunk;

impl Writer {
    /// Writes up to [`AT_ONCE`] chunks to one segment.
    pub(super) fn write_some(&mut self, now: Instant) -> io::Result<()> {
        let Some(first) = self.backlog.front() else {
            return Ok(());
        };
        let (start_ns, begins) = (first.tally.first_ns, first.begins_segment);
        if begins
            && self
                .segment
                .as_ref()
                .is_some_and(|segment| segment.tally.packets > 0)
        {
            self.close(now);
            if self.pauses() {
                return Ok(());
            }
        }
        if self.segment.is_none() {
            self.open(start_ns)?;
        }
        let Some(segment) = &mut self.segment else {
            return Ok(());
        };
        let most = match self.settings.format {
            Format::Pcapng => AT_ONCE,
            Format::Pcap => 1,
        };
        let mut count = 1;
        while count < most
            && self
                .backlog
                .get(count)
                .is_some_and(|chunk| !chunk.begins_segment)
        {
            count += 1;
        }
        let len: u64 = self
            .backlog
            .iter()
            .take(count)
            .map(|chunk| chunk.len as u64)
            .sum();
        if segment.len + len > segment.allocated {
            let end = segment.len + len;
            reserve(self.disk.as_mut(), segment, end, self.settings.reserve());
            self.enforce_quota();
        }
        let Some(segment) = &mut self.segment else {
            return Ok(());
        };
        let mut offset = segment.len;
        let mut chunks = VecDeque::with_capacity(count);
        for _ in 0..count {
            let Some(mut chunk) = self.backlog.pop_front() else {
                break;
            };
            let (write, next) = match self.settings.format {
                Format::Pcapng => (
                    Write {
                        len: chunk.len,
                        offset,
                        buffer: chunk.buffer,
                    },
                    offset + chunk.len as u64,
                ),
                Format::Pcap => {
                    chunk.shift(segment.tail.len());
                    let len = segment.tail.len() + chunk.len;
                    let write = with_tail(chunk.buffer, len, segment);
                    (write, offset + chunk.len as u64)
                }
            };
            offset = next;
            chunks.push_back((
                chunk.serial,
                chunk.tally,
                chunk.len,
                chunk.from,
                chunk.begins_segment,
            ));
            self.disk.start(write);
        }
        let mut failed = None;
        let mut left = Vec::new();
        while let Some(written) = self.disk.finish() {
            let Some((serial, tally, len, from, begins_segment)) = chunks.pop_front() else {
                break;
            };
            let buffer = written.write.buffer;
            let mut result = written.result;
            if result.is_ok() && self.settings.format == Format::Pcap && failed.is_none() {
                result = self.disk.truncate(segment.len + len as u64);
            }
            match result {
                Ok(()) if failed.is_none() => {
                    let bytes = &buffer[from..from + len];
                    self.index.written(self.disk.as_mut(), segment.len, bytes);
                    segment.len += len as u64;
                    if self.settings.format == Format::Pcap {
                        let whole = segment.len as usize % BLOCK;
                        let end = from + len;
                        segment.tail = buffer[end - whole.min(end)..end].to_vec();
                    }
                    segment.tally.merge(&tally);
                    segment.unsynced.push((serial, tally));
                    // Nobody wants it when the recorder ends.
                    let _ = self.pool.send(buffer);
                }
                result => {
                    if let Err(error) = result {
                        failed.get_or_insert(error);
                    }
                    left.push(Chunk {
                        buffer,
                        from,
                        len,
                        serial,
                        tally,
                        begins_segment,
                    });
                }
            }
        }
        for chunk in left.into_iter().rev() {
            self.backlog.push_front(chunk);
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Chunk {
    /// Moves the packets within the buffer, so that they begin at `from`.
    fn shift(&mut self, from: usize) {
        self.buffer
            .copy_within(self.from..self.from + self.len, from);
        self.from = from;
    }
}

const AT_ONCE: usize = 4;
