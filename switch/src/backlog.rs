//! Frames that the far end of a port did not read yet: a bounded number, of bounded bytes (R5).
//!
//! They lie in one piece of memory, which is used again: where a reader is behind now and then, as every guest is, no
//! frame asks for memory of its own.

use std::collections::VecDeque;

/// What waits for a reader, the oldest first, each frame with a note.
#[derive(Debug)]
pub(crate) struct Backlog<T = ()> {
    frames: VecDeque<Kept<T>>,
    /// Their bytes, one frame behind the other; what is before the first one is done with.
    store: Vec<u8>,
    bytes: usize,
}

#[derive(Debug)]
struct Kept<T> {
    begin: usize,
    len: usize,
    note: T,
}

impl<T> Default for Backlog<T> {
    fn default() -> Self {
        Self {
            frames: VecDeque::new(),
            store: Vec::new(),
            bytes: 0,
        }
    }
}

impl<T> Backlog<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether one more frame of `len` bytes may wait.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.frames.len() < MAX_FRAMES && self.bytes + len <= MAX_BYTES
    }

    /// The oldest frame, and what was noted of it.
    pub(crate) fn first(&self) -> Option<(&[u8], &T)> {
        let first = self.frames.front()?;
        Some((self.bytes_of(first), &first.note))
    }

    /// Keeps a frame of `len` bytes, which `write` is to fill in, whether or not there is room.
    pub(crate) fn keep_as(&mut self, note: T, len: usize, write: impl FnOnce(&mut [u8])) {
        self.reclaim(len);
        let begin = self.store.len();
        self.store.resize(begin + len, 0);
        write(&mut self.store[begin..]);
        self.bytes += len;
        self.frames.push_back(Kept { begin, len, note });
    }

    /// The oldest ones are done with.
    pub(crate) fn forget(&mut self, frames: usize) {
        let bytes: usize = self.frames.drain(..frames).map(|frame| frame.len).sum();
        self.bytes -= bytes;
        if self.frames.is_empty() {
            self.store.clear();
            self.store.shrink_to(LEFT);
        }
    }

    fn bytes_of(&self, frame: &Kept<T>) -> &[u8] {
        &self.store[frame.begin..][..frame.len]
    }

    fn has_space(&self, len: usize) -> bool {
        self.store.capacity() - self.store.len() >= len
    }

    /// Before memory for `len` more bytes would have to be allocated: uses again what is done with, if that is not
    /// little beside what would have to be moved for it.
    fn reclaim(&mut self, len: usize) {
        let done = self.store.len() - self.bytes;
        if self.has_space(len) {
            return;
        }
        if done > 0 && done >= self.bytes / 4 {
            self.store.drain(..done);
            for frame in &mut self.frames {
                frame.begin -= done;
            }
            if self.has_space(len) {
                return;
            }
        }
        // By the double, but no further than what may wait and a quarter of it that is done with.
        let least = self.store.len() + len;
        let wanted = (2 * self.store.capacity()).clamp(LEFT, MOST).max(least);
        self.store.reserve_exact(wanted - self.store.len());
    }
}

impl Backlog {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> + Clone {
        self.frames.iter().map(|frame| self.bytes_of(frame))
    }

    /// Keeps a frame, if there is room for it; says whether there was.
    pub(crate) fn push(&mut self, parts: &[&[u8]]) -> bool {
        let fits = self.has_room(parts.iter().map(|part| part.len()).sum());
        if fits {
            self.keep(parts);
        }
        fits
    }

    /// Keeps a frame of which the reader has a part already: it must have all of it.
    pub(crate) fn keep(&mut self, parts: &[&[u8]]) {
        let len = parts.iter().map(|part| part.len()).sum();
        self.keep_as((), len, |place| {
            fill(place, parts);
        });
    }
}

/// Writes parts one behind the other. What is behind them: as many bytes as they do not have.
pub(crate) fn fill<'a>(mut place: &'a mut [u8], parts: &[&[u8]]) -> &'a mut [u8] {
    for part in parts {
        let (now, rest) = place.split_at_mut(part.len());
        now.copy_from_slice(part);
        place = rest;
    }
    place
}

/// What waits for a reader at most: frames, and their bytes.
const MAX_FRAMES: usize = 512;
const MAX_BYTES: usize = 1 << 20;
/// Memory for them, if no frame has to wait that has begun.
const MOST: usize = MAX_BYTES + MAX_BYTES / 4;
/// Memory that is kept while nothing waits.
const LEFT: usize = 128 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(number: u32) -> Vec<u8> {
        let len = 14 + number.wrapping_mul(2_654_435_761) as usize % 1_500;
        (0..len).map(|at| (number as usize + at) as u8).collect()
    }

    #[test]
    fn frames_leave_as_they_came_and_take_no_memory_of_their_own() {
        let mut backlog = Backlog::default();
        let (mut next, mut oldest) = (0, 0);
        let mut most = 0;
        for turn in 0..20_000_u32 {
            for _ in 0..turn % 7 {
                let bytes = frame(next);
                let (head, body) = bytes.split_at(14);
                if !backlog.push(&[head, body]) {
                    break;
                }
                next += 1;
            }
            let wanted = (turn / 1_000 % 6) as usize;
            let count = wanted.min(backlog.len());
            for (kept, number) in backlog.iter().take(count).zip(oldest..) {
                assert_eq!(kept, frame(number));
            }
            backlog.forget(count);
            oldest += count as u32;
            most = most.max(backlog.store.capacity());
        }
        assert!(next > 30_000, "{next} frames");
        assert!(most <= MOST, "{most} bytes");
        assert_eq!(
            backlog.bytes,
            backlog.iter().map(<[u8]>::len).sum::<usize>()
        );
        backlog.forget(backlog.len());
        assert!(backlog.is_empty() && backlog.bytes == 0);
        assert!(backlog.store.capacity() <= LEFT);
    }

    #[test]
    fn what_waits_is_bounded_and_memory_stays_where_it_is() {
        let mut backlog = Backlog::default();
        let frame = [7; 1_514];
        while backlog.push(&[&frame]) {}
        assert_eq!(backlog.len(), MAX_FRAMES);
        // The reader takes one at a time, and is behind all the while.
        let mut places = Vec::new();
        for _ in 0..10 {
            for _ in 0..MAX_FRAMES {
                backlog.forget(1);
                assert!(backlog.push(&[&frame[..14], &frame[14..]]));
            }
            places.push(backlog.store.as_ptr());
        }
        // It may grow once, for what is done with among what waits.
        assert_eq!(places[1..], [places[1]; 9]);
        backlog.forget(MAX_FRAMES);
        let super_frame = vec![1; 65_550];
        while backlog.push(&[&super_frame]) {}
        assert_eq!(backlog.len(), MAX_BYTES / super_frame.len());
        // What was begun has to be ended.
        backlog.keep(&[&super_frame]);
        assert!(backlog.bytes > MAX_BYTES);
    }

    #[test]
    fn a_note_stays_with_its_frame() {
        let mut backlog = Backlog::default();
        for number in 0..3 {
            backlog.keep_as(number, 4, |place| {
                let rest = fill(place, &[&[number], &[number]]);
                rest.fill(9);
            });
        }
        for number in 0..3 {
            assert_eq!(
                backlog.first(),
                Some((&[number, number, 9, 9][..], &number))
            );
            backlog.forget(1);
        }
        assert_eq!(backlog.first(), None);
    }
}
