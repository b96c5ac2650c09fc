//! What a batch ends with: its records become visible, and the reader is rung or not.

use std::sync::atomic::Ordering;

use super::Producer;
use crate::layout::{DROPPED, HEAD, MAX_DELAY_US, PUBLISHED, TAIL, WAKE_AT, reached};
use crate::wake;

/// An arena as the readers of a group need it told, in the unit of its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ground {
    /// Where it was when the packets published now began to be placed.
    pub began: u64,
    /// Where it is.
    pub now: u64,
    /// How far it may move while packets are unread; not zero.
    pub most: u64,
}

/// What to do about the reader after publishing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bell {
    /// Nothing: the reader is awake or was rung already, or there is nothing to read.
    Quiet,
    /// Ring now, once.
    Ring,
    /// Ask again at this time (the clock's microseconds) if nothing was published until then.
    Later(u64),
}

impl Producer {
    /// Makes everything filled so far visible. Once per batch.
    #[inline]
    pub fn publish(&mut self) {
        if self.announced != self.head {
            // Release: pairs with the Acquire in Consumer::refresh.
            self.region.store_u64(HEAD, self.head, Ordering::Release);
            self.announced = self.head;
            self.published = self.written;
            // Release: pairs with the Acquire in Consumer::arm. After `head`, so that the count a
            // reader sees never runs ahead of the head it sees next.
            self.region
                .store_u64(PUBLISHED, self.published, Ordering::Release);
        }
        self.region
            .store_u64(DROPPED, self.dropped, Ordering::Relaxed);
    }

    /// Decides whether the reader is to be woken; call it after [`publish`](Self::publish) and when
    /// a time it returned has come. `now_us` is any clock that does not go backwards.
    #[inline]
    pub fn bell(&mut self, now_us: u64) -> Bell {
        self.bell_on(now_us, None)
    }

    /// [`bell`](Self::bell) of a ring of descriptors: what `ground` says of their arena rings, too.
    #[inline]
    pub fn bell_on(&mut self, now_us: u64, ground: Option<Ground>) -> Bell {
        let seq = wake::armed(&self.words);
        if seq == self.rung {
            Bell::Quiet
        } else {
            self.armed(seq, now_us, ground)
        }
    }

    /// Where the arena is when a reader that [`Bell::Later`] was said of is to be looked at again,
    /// though its time has not come.
    #[inline]
    pub fn due_at(&self) -> Option<u64> {
        self.waiting.and_then(|waiting| waiting.due_at)
    }

    fn armed(&mut self, seq: u32, now_us: u64, ground: Option<Ground>) -> Bell {
        // Acquire: pairs with the Release in Consumer::release.
        let tail = self.words.load_u64(TAIL, Ordering::Acquire);
        let unread = self.announced.wrapping_sub(tail);
        if unread == 0 {
            // Nothing unread: the delay starts with the next record.
            self.waiting = None;
            return Bell::Quiet;
        }
        let wake_at = self.words.load_u64(WAKE_AT, Ordering::Relaxed);
        let delay_us = self.words.load_u32(MAX_DELAY_US, Ordering::Relaxed);
        let waiting = match self.waiting {
            Some(waiting) if waiting.seq == seq => waiting,
            _ => Waiting {
                seq,
                since_us: now_us,
                tail,
                // The oldest packet is none the younger for another arming.
                due_at: match self.waiting {
                    Some(Waiting {
                        tail: before,
                        due_at: Some(due_at),
                        ..
                    }) if before == tail => Some(due_at),
                    _ => ground.map(|ground| ground.began.saturating_add(ground.most)),
                },
            },
        };
        let due_us = waiting.since_us.saturating_add(u64::from(delay_us));
        // Whatever the watermark, the reader is to have the time that half a ring gives. A tail that
        // lies rings its own reader, once.
        let filling = unread > self.geometry.capacity / 2;
        // Nor does the arena wait for it, whatever fills the arena.
        let turning = ground.zip(waiting.due_at);
        let turning = turning.is_some_and(|(ground, due_at)| ground.now >= due_at);
        if filling || turning || reached(self.published, wake_at) || now_us >= due_us {
            self.rung = seq;
            self.waiting = None;
            return Bell::Ring;
        }
        self.waiting = Some(waiting);
        Bell::Later(due_us)
    }
}

/// An arming that was seen with unread records below its watermark.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    seq: u32,
    since_us: u64,
    tail: u64,
    /// Of a ring of descriptors: where the arena is when it has moved too far for the packet at
    /// `tail`.
    due_at: Option<u64>,
}
