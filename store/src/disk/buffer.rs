//! Memory as O_DIRECT wants it.

use std::ops::{Deref, DerefMut};

use super::huge::{HUGE, huge_pages};

/// What offsets, lengths and addresses of direct writes are multiples of, in bytes.
pub const BLOCK: usize = 4096;

/// Memory that begins at a multiple of [`BLOCK`]; neither grows nor moves.
#[derive(Debug)]
pub struct Buffer {
    bytes: Box<[u8]>,
    start: usize,
    len: usize,
    id: u16,
}

impl Buffer {
    /// This many bytes, rounded up to [`BLOCK`]. `id` is its place among the buffers that are
    /// registered with the kernel ([`super::Real::register`]).
    ///
    /// Of two MiB and more it asks for huge pages. A virtual disk takes at most some 250 pieces of memory at
    /// once, and pages lie anywhere: with small ones each request is of a megabyte.
    pub fn new(len: usize, id: u16) -> Self {
        let len = len.next_multiple_of(BLOCK);
        let align = if len < HUGE { BLOCK } else { HUGE };
        let bytes = vec![0; len + align].into_boxed_slice();
        let start = bytes.as_ptr().align_offset(align);
        let mut buffer = Self {
            bytes,
            start,
            len,
            id,
        };
        if align == HUGE {
            huge_pages(&mut buffer);
        }
        buffer
    }

    /// No memory at all.
    pub fn none() -> Self {
        Self {
            bytes: Box::default(),
            start: 0,
            len: 0,
            id: u16::MAX,
        }
    }

    /// Its place among the registered buffers.
    pub fn id(&self) -> u16 {
        self.id
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}
