//! Who sleeps asks to be woken, and who publishes looks whether it is asked: the two halves of the handshake of
//! [`layout`](crate::layout#sleeping-and-ringing), in rings of both directions.
//!
//! | who sleeps: [`arm`] | who publishes: [`armed`] |
//! |---|---|
//! | stores `wake_at` and `max_delay_us`, then a new `wake_seq` | stored `head` |
//! | fence | fence |
//! | then loads `head` | loads `wake_seq` |
//!
//! One of the fences comes first. So either the one sees the arming and rings, or the other sees the head and does not sleep.
//! `ring/tests/kick_model.rs` finds what is lost without either fence, in a transmit ring and the thread that serves it.

use std::sync::atomic::{Ordering, fence};

use crate::layout::{MAX_DELAY_US, WAKE_AT, WAKE_SEQ};
use crate::region::Region;

/// Words of a ring that both sides have.
pub trait Words {
    /// Writes the word at this offset.
    fn store_u64(&self, offset: u64, value: u64, order: Ordering);

    /// Writes the word at this offset.
    fn store_u32(&self, offset: u64, value: u32, order: Ordering);

    /// Reads the word at this offset.
    fn load_u32(&self, offset: u64, order: Ordering) -> u32;

    /// A fence between what was done with them and what is done next.
    fn fence(&self, order: Ordering);
}

/// Asks to be woken, once: at record `wake_at`, or `max_delay_us` microseconds after the first that is unread.
/// `seq` is another number than that of the last time. Then look for records, and sleep if there are none.
#[inline]
pub fn arm(words: &impl Words, wake_at: u64, max_delay_us: u32, seq: u32) {
    words.store_u64(WAKE_AT, wake_at, Ordering::Relaxed);
    words.store_u32(MAX_DELAY_US, max_delay_us, Ordering::Relaxed);
    // Release: pairs with the Acquire in `armed`; it sees the words before.
    words.store_u32(WAKE_SEQ, seq, Ordering::Release);
    // Pairs with the fence in `armed`: either it sees our arming or we its head.
    words.fence(Ordering::SeqCst);
}

/// The number of the last arming, after records were published. Whoever rang for that number does not ring again.
#[inline]
pub fn armed(words: &impl Words) -> u32 {
    // Pairs with the fence in `arm`: either we see its arming or it sees our head.
    words.fence(Ordering::SeqCst);
    // Acquire: pairs with the Release in `arm`; the words before it are visible.
    words.load_u32(WAKE_SEQ, Ordering::Acquire)
}

impl Words for Region {
    #[inline]
    fn store_u64(&self, offset: u64, value: u64, order: Ordering) {
        Self::store_u64(self, offset, value, order);
    }

    #[inline]
    fn store_u32(&self, offset: u64, value: u32, order: Ordering) {
        Self::store_u32(self, offset, value, order);
    }

    #[inline]
    fn load_u32(&self, offset: u64, order: Ordering) -> u32 {
        Self::load_u32(self, offset, order)
    }

    #[inline]
    fn fence(&self, order: Ordering) {
        fence(order);
    }
}
