//! Every order in which a sender writes and kicks, and the thread that serves its transmit ring looks, arms and sleeps, as C11
//! allows their atomic operations to be seen.
//!
//! The handshake is the product's ([`wake`]); the words of the ring are loom's. What is around it is done as
//! `Producer::{publish, bell}` and the thread of `path/src/engine/senders.rs` do it: a ring that is awake is looked at in
//! each turn; one in which nothing is found is armed, looked at once more, and not again before it was kicked. The kick is a byte
//! in a socket or a message. In the end all that was written is to be taken. Each mutant is to leave something: that is
//! the control.
//!
//! Run by `make test-models`, with `--cfg loom`.
#![cfg(loom)]

use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Release};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::thread;
use vnplug_ring::layout::{MAX_DELAY_US, WAKE_AT, WAKE_SEQ};
use vnplug_ring::wake::{self, Words};
use vnplug_testing::panic_of;

/// What is done otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    SenderWithoutFence,
    HostWithoutFence,
    /// The host sleeps without a look after it armed.
    NotLookedAt,
    /// The host empties the socket after it armed.
    EmptiedAfterArming,
    /// The host reads what lies unread, and does not ask again.
    NotAskedAgain,
    /// An arming counts as rung for at which nothing was unread.
    QuietCountsAsRung,
}

/// Frames that are written, one at a time.
const FRAMES: u64 = 2;
/// Turns of the thread while they are; the rest come when all is written.
const TURNS: usize = 2;

/// The words of a transmit ring, and its kicks.
struct Ring {
    head: AtomicU64,
    tail: AtomicU64,
    wake_at: AtomicU64,
    max_delay_us: AtomicU32,
    wake_seq: AtomicU32,
    kicks: AtomicU64,
    mutant: Mutant,
}

/// The ring, as one side sees it.
struct Side<'a> {
    ring: &'a Ring,
    /// The mutant that has no fence here.
    fenceless: Mutant,
}

impl Words for Side<'_> {
    fn store_u64(&self, offset: u64, value: u64, order: Ordering) {
        assert_eq!(offset, WAKE_AT);
        self.ring.wake_at.store(value, order);
    }

    fn store_u32(&self, offset: u64, value: u32, order: Ordering) {
        match offset {
            MAX_DELAY_US => self.ring.max_delay_us.store(value, order),
            WAKE_SEQ => self.ring.wake_seq.store(value, order),
            _ => panic!("no word at {offset}"),
        }
    }

    fn load_u32(&self, offset: u64, order: Ordering) -> u32 {
        assert_eq!(offset, WAKE_SEQ);
        self.ring.wake_seq.load(order)
    }

    fn fence(&self, order: Ordering) {
        if self.ring.mutant != self.fenceless {
            fence(order);
        }
    }
}

/// Writes all frames, and kicks for those for which it is asked to.
fn sends(ring: &Ring) {
    let words = Side {
        ring,
        fenceless: Mutant::SenderWithoutFence,
    };
    let mut rung = 0;
    for head in 1..=FRAMES {
        ring.head.store(head, Release);
        let seq = wake::armed(&words);
        if seq == rung {
            continue;
        }
        if ring.tail.load(Acquire) == head {
            if ring.mutant == Mutant::QuietCountsAsRung {
                rung = seq;
            }
            continue;
        }
        // With a delay of 0 the first record rings, whatever the count.
        rung = seq;
        ring.kicks.fetch_add(1, AcqRel);
    }
}

/// The thread that serves the ring.
struct Host<'a> {
    ring: &'a Ring,
    taken: u64,
    seq: u32,
    is_awake: bool,
}

impl Host<'_> {
    fn turn(&mut self, settles: bool) {
        if !self.is_awake {
            // As the thread, which looks at what it was kicked for. It hears edges, and what it reads then may be of a later
            // kick, which tells no more.
            self.is_awake = self.ring.kicks.swap(0, AcqRel) > 0;
            if self.is_awake {
                self.ring.kicks.swap(0, AcqRel);
            }
        }
        if !self.is_awake {
            if !settles {
                return;
            }
            // What lies unread is read, by now perhaps a kick of which nobody hears. So it is asked again.
            self.ring.kicks.swap(0, AcqRel);
            if self.ring.mutant == Mutant::NotAskedAgain {
                return;
            }
        } else if self.takes() {
            return;
        }
        let words = Side {
            ring: self.ring,
            fenceless: Mutant::HostWithoutFence,
        };
        self.seq += 1;
        wake::arm(&words, self.taken + 1, 0, self.seq);
        self.is_awake = self.ring.mutant != Mutant::NotLookedAt && self.has_news();
        if self.ring.mutant == Mutant::EmptiedAfterArming {
            self.ring.kicks.swap(0, AcqRel);
        }
    }

    fn has_news(&self) -> bool {
        self.ring.head.load(Acquire) != self.taken
    }

    fn takes(&mut self) -> bool {
        let head = self.ring.head.load(Acquire);
        let has = head != self.taken;
        if has {
            self.taken = head;
            self.ring.tail.store(head, Release);
        }
        has
    }
}

/// Whether in some order something is left in the ring of a thread that sleeps.
fn leaves(mutant: Mutant) -> bool {
    let model = move || {
        loom::model(move || {
            let ring = Arc::new(Ring {
                head: AtomicU64::new(0),
                tail: AtomicU64::new(0),
                wake_at: AtomicU64::new(0),
                max_delay_us: AtomicU32::new(0),
                wake_seq: AtomicU32::new(0),
                kicks: AtomicU64::new(0),
                mutant,
            });
            let theirs = Arc::clone(&ring);
            let sender = thread::spawn(move || sends(&theirs));
            let mut host = Host {
                ring: &ring,
                taken: 0,
                seq: 0,
                is_awake: true,
            };
            (1..=TURNS).for_each(|turn| host.turn(turn == TURNS));
            sender.join().expect("it wrote");
            // It is kicked, and takes, or sleeps for ever.
            (0..2).for_each(|_| host.turn(false));
            assert!(host.taken == FRAMES, "left");
        });
    };
    let Some(text) = panic_of(model) else {
        return false;
    };
    assert!(text.contains("left"), "{text}");
    true
}

#[test]
fn nothing_is_left_in_any_order_and_each_mutant_leaves_something_in_one() {
    assert!(!leaves(Mutant::None));
    for mutant in [
        Mutant::SenderWithoutFence,
        Mutant::HostWithoutFence,
        Mutant::NotLookedAt,
        Mutant::EmptiedAfterArming,
        Mutant::NotAskedAgain,
        Mutant::QuietCountsAsRung,
    ] {
        assert!(leaves(mutant), "{mutant:?}");
    }
}
