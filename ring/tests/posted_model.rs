//! Every order in which a host takes a posted record, its sender gives the place back, and the host writes there again.
//!
//! The rule by which a batch is given back is the product's ([`Held`]); the words of both rings, and the place, are
//! loom's, which tells when the place is read and written by two threads of which neither waited for the other. That is to
//! happen in no order of the product, and in some of each mutant.
//!
//! Run by `make test-models`, with `--cfg loom`.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom's cell says by itself what is wrong")]

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use vnplug_ring::posted::{Held, Mark};
use vnplug_testing::panic_of;

/// What is done otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    /// The reader gives back what it posted.
    NotHeld,
    /// The tail of the transmit ring orders nothing.
    RelaxedTransmitTail,
    /// The tail of the ring orders nothing.
    RelaxedTail,
}

struct Shared {
    /// The place of the one record that was received.
    place: UnsafeCell<()>,
    /// Of the ring.
    tail: AtomicU64,
    /// Of the transmit ring.
    sent_head: AtomicU64,
    sent_tail: AtomicU64,
    mutant: Mutant,
}

// SAFETY: nobody touches what lies in the cell; loom only notes who would.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn order(&self, of: Mutant, order: Ordering) -> Ordering {
        match self.mutant == of {
            true => Relaxed,
            false => order,
        }
    }

    fn look(&self) {
        // Loom says if another thread writes there and neither waited for the other.
        self.place.with(|_| ());
    }

    /// The host takes the posted record, if it is there.
    fn take(&self) {
        if look(&self.sent_head, Acquire) == 1 && look(&self.sent_tail, Relaxed) == 0 {
            self.look();
            let order = self.order(Mutant::RelaxedTransmitTail, Release);
            self.sent_tail.swap(1, order);
        }
    }

    /// The host receives a packet, if the place is free.
    fn receive(&self) -> bool {
        let is_free = look(&self.tail, self.order(Mutant::RelaxedTail, Acquire)) == 1;
        if is_free {
            self.place.with_mut(|_| ());
        }
        is_free
    }

    /// The reader gives back what it may.
    fn release(&self, held: &mut Held, from: Mark) {
        let passed = match self.mutant {
            Mutant::NotHeld => 1,
            _ => {
                let order = self.order(Mutant::RelaxedTransmitTail, Acquire);
                look(&self.sent_tail, order)
            }
        };
        let upto = held.release((from, AFTER), (1, passed));
        if upto == AFTER {
            let order = self.order(Mutant::RelaxedTail, Release);
            self.tail.swap(upto.tail, order);
        }
    }
}

/// Reads a word. By an exchange, of which loom tries every place among the others; a load that sees an older value
/// says no more than one that comes earlier.
fn look(word: &AtomicU64, order: Ordering) -> u64 {
    word.fetch_add(0, order)
}

const AFTER: Mark = Mark { tail: 1, read: 1 };

/// Whether in some order the place is written while it is read.
fn breaks(mutant: Mutant) -> bool {
    let model = move || {
        loom::model(move || {
            let shared = Arc::new(Shared {
                place: UnsafeCell::new(()),
                tail: AtomicU64::new(0),
                sent_head: AtomicU64::new(0),
                sent_tail: AtomicU64::new(0),
                mutant,
            });
            let [takes, receives] = [(); 2].map(|()| Arc::clone(&shared));
            let takes = thread::spawn(move || takes.take());
            let receives = thread::spawn(move || receives.receive());
            let mut held = Held::new(0);
            shared.look();
            shared.sent_head.swap(1, Release);
            shared.release(&mut held, Mark::default());
            shared.release(&mut held, AFTER);
            takes.join().expect("it took");
            let received = receives.join().expect("it received");
            // What was held back comes back, and its room is used again.
            shared.take();
            shared.release(&mut held, AFTER);
            assert!(received || shared.receive());
        });
    };
    panic_of(model).is_some()
}

#[test]
fn no_order_writes_where_a_posted_record_is_read_and_each_mutant_has_one_that_does() {
    assert!(!breaks(Mutant::None));
    assert!(breaks(Mutant::NotHeld));
    assert!(breaks(Mutant::RelaxedTransmitTail));
    assert!(breaks(Mutant::RelaxedTail));
}
