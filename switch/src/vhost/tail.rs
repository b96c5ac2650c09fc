//! The rest of a long frame, which stays with its sender until it is copied to where the frame goes.
//!
//! What is decided about a frame is decided by its begin and its length, of which the switch has copies of
//! its own ([`BEGIN`]). The rest is read once, when the frame leaves: the sender may change it until then,
//! and changes what the receiver reads, as if it had written that before. Where the rest lies has been
//! looked up in the table of the sender's memory once. It stays mapped, whatever the front-end says
//! meanwhile, as the turn holds the [`Memory`]; and the sender has its descriptors back only when the turn
//! has sent everything ([`crate::link::Link::release`]).

use std::sync::Arc;

use super::memory::{Found, Memory};
use super::ring::Part;

/// The rests of a turn's frames.
#[derive(Debug, Default)]
pub(crate) struct Tails {
    memories: Vec<Arc<Memory>>,
    found: Vec<Found>,
}

/// Where one of them is noted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    memory: u32,
    begin: u32,
    end: u32,
    len: u32,
}

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tail<'a> {
    tails: &'a Tails,
    place: &'a Place,
}

impl Tails {
    /// Forgets all, and lets the memories go. NB: never the last to have one, as to unmap it takes time:
    /// the session has it, too.
    pub(crate) fn clear(&mut self) {
        self.memories.clear();
        self.found.clear();
    }

    /// How many have been noted, each by one number or more.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.found.len()
    }

    /// Notes what a chain has behind its first `skip` bytes; `None` if not all of it is there.
    #[inline]
    pub(crate) fn find(
        &mut self,
        memory: &Arc<Memory>,
        parts: &[Part],
        skip: usize,
    ) -> Option<Place> {
        if !self
            .memories
            .last()
            .is_some_and(|last| Arc::ptr_eq(last, memory))
        {
            self.memories.push(Arc::clone(memory));
        }
        let begin = self.found.len();
        let (mut skip, mut all) = (skip as u64, 0);
        for part in parts {
            let len = u64::from(part.len);
            if skip >= len {
                skip -= len;
                continue;
            }
            let now = len - skip;
            if !memory.find(part.at.checked_add(skip)?, now as usize, &mut self.found) {
                self.found.truncate(begin);
                return None;
            }
            (skip, all) = (0, all + now);
        }
        Some(Place {
            memory: self.memories.len() as u32 - 1,
            begin: begin as u32,
            end: self.found.len() as u32,
            len: all as u32,
        })
    }

    #[inline]
    pub(crate) fn get<'a>(&'a self, place: &'a Place) -> Tail<'a> {
        Tail { tails: self, place }
    }
}

impl<'a> Tail<'a> {
    /// Bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.place.len as usize
    }

    /// The memory that it is in, and where: pieces in order.
    #[inline]
    pub(super) fn pieces(&self) -> (&'a Memory, &'a [Found]) {
        let Place {
            memory, begin, end, ..
        } = *self.place;
        let found = &self.tails.found[begin as usize..end as usize];
        (&self.tails.memories[memory as usize], found)
    }

    /// Copies it, once, into as many bytes.
    pub(crate) fn read(&self, into: &mut [u8]) {
        let (memory, found) = self.pieces();
        let mut rest = into;
        for piece in found {
            let (now, after) = rest.split_at_mut(piece.len as usize);
            memory.read_found(piece, now);
            rest = after;
        }
    }
}

/// Bytes of a frame that are always copied: both addresses, tags, and headers to which a checksum or a
/// super-frame may refer; what refers beyond is copied whole. NB: not 64, one cache line: the checksum of TCP over
/// IPv6 ends at byte 72, of 80 with two tags, and super-frames of IPv6 would be copied whole.
pub(crate) const BEGIN: usize = 128;
/// Bytes of the shortest frame of which the rest stays. NB: below, two copies of it cost less than to keep
/// track of where it lies.
pub(crate) const LEAST: usize = 1024;
