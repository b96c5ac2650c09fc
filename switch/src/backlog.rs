//! Frames that the far end of a port did not read yet: a bounded number, of bounded bytes (R5).

use std::collections::VecDeque;

/// What waits for a reader, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    frames: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl Backlog {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.frames.iter().map(|frame| &frame[..])
    }

    /// Keeps a frame, if there is room for it; says whether there was.
    pub(crate) fn push(&mut self, parts: &[&[u8]]) -> bool {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let fits = self.frames.len() < MAX_FRAMES && self.bytes + len <= MAX_BYTES;
        if fits {
            self.keep(parts);
        }
        fits
    }

    /// Keeps a frame of which the reader has a part already: it must have all of it.
    pub(crate) fn keep(&mut self, parts: &[&[u8]]) {
        let frame = parts.concat().into_boxed_slice();
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }

    /// The oldest ones are done with.
    pub(crate) fn forget(&mut self, frames: usize) {
        let bytes: usize = self.frames.drain(..frames).map(|frame| frame.len()).sum();
        self.bytes -= bytes;
    }
}

/// What waits for a reader at most: frames, and their bytes.
const MAX_FRAMES: usize = 512;
const MAX_BYTES: usize = 1 << 20;
