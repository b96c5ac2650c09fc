//! Who touches a handle's state when: the thread that receives at any time, the others by turns.
//!
//! Programs ask for statistics, change the filter, and more, in other threads than the one that
//! receives. That one takes a packet per turn, so a lock would cost it two locked instructions per
//! packet. Here a turn costs it two stores and two loads; the others pay.
//!
//! | who     | says         | then looks at | and goes on if                                |
//! |---------|--------------|---------------|-----------------------------------------------|
//! | reader  | `inside`     | `wanted`      | nobody wants a turn; else it queues up as one |
//! | another | `wanted`     | `inside`      | the reader is not inside; else it waits       |
//!
//! Each must see what the other said. The barrier between the two steps is paid for by the others:
//! membarrier(2) makes one in every thread of the program. Where the kernel has none, both sides pay.
//!
//! The reader is the thread in a call that receives, the first if there are several; the others take
//! turns as others do. No code of the program's runs in a turn and nobody sleeps for packets in one.
#![expect(unsafe_code, reason = "a lock")]

use std::cell::UnsafeCell;
use std::sync::Once;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, compiler_fence, fence};
use std::time::{Duration, Instant};

/// See the module's comment.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    /// The thread that receives; 0 = none. Set by that thread alone.
    reader: AtomicUsize,
    /// It has its turn. Set by that thread alone.
    inside: AtomicBool,
    /// How many others have a turn or want one.
    wanted: AtomicU32,
    /// The one that has it; 0 = none.
    holder: AtomicUsize,
    value: UnsafeCell<T>,
}

impl<T> Turns<T> {
    pub(crate) fn new(value: T) -> Self {
        prepare();
        Self {
            reader: AtomicUsize::new(0),
            inside: AtomicBool::new(false),
            wanted: AtomicU32::new(0),
            holder: AtomicUsize::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// The calling thread receives from now on. False: another does, or this one does already.
    #[inline]
    pub(crate) fn enter(&self) -> bool {
        // SeqCst: with `wanted` in `as_other`, either sees the other.
        let won = self
            .reader
            .compare_exchange(0, this_thread(), SeqCst, Relaxed);
        won.is_ok()
    }

    /// The end of an `enter` that was true.
    #[inline]
    pub(crate) fn leave(&self) {
        // Release: pairs with the load in `as_other`, which then needs no barrier.
        self.reader.store(0, Release);
    }

    /// Runs `look` in a turn of its own. `None`: this thread has one already and was interrupted in
    /// it by a signal handler that comes here, or the reader's does not end.
    #[inline]
    pub(crate) fn with<R>(&self, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.reader.load(Relaxed) != this_thread() {
            return self.as_other(look);
        }
        self.as_reader(look)
    }

    /// As [`with`](Self::with), for a thread whose `enter` was true.
    #[inline]
    pub(crate) fn as_reader<R>(&self, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.inside.load(Relaxed) {
            return None;
        }
        self.inside.store(true, Relaxed);
        let turn = ReaderTurn(&self.inside);
        light_barrier();
        // Acquire: pairs with the Release of the last one's end.
        if self.wanted.load(SeqCst) != 0 {
            drop(turn);
            return self.as_other(look);
        }
        // SAFETY: others wait while `inside` is set, and this thread has one turn at a time.
        Some(look(unsafe { &mut *self.value.get() }))
    }

    #[cold]
    fn as_other<R>(&self, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let me = this_thread();
        if self.holder.load(Relaxed) == me {
            return None;
        }
        self.wanted.fetch_add(1, SeqCst);
        let _wish = Wish(&self.wanted);
        let free = || self.holder.compare_exchange(0, me, AcqRel, Relaxed).is_ok();
        if !wait_until(free) {
            return None;
        }
        let _turn = OtherTurn(&self.holder);
        // A reader that enters after this look sees `wanted` before its first turn.
        let reader = self.reader.load(SeqCst);
        if reader != 0 && reader != me {
            heavy_barrier();
            // Acquire: pairs with the Release at the end of the reader's turn.
            if !wait_until(|| !self.inside.load(Acquire)) {
                return None;
            }
        }
        // SAFETY: the reader sees `wanted` and queues up; of the others `holder` lets one in.
        Some(look(unsafe { &mut *self.value.get() }))
    }
}

/// Ends the reader's turn, also by a panic.
struct ReaderTurn<'a>(&'a AtomicBool);

impl Drop for ReaderTurn<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

struct OtherTurn<'a>(&'a AtomicUsize);

impl Drop for OtherTurn<'_> {
    fn drop(&mut self) {
        self.0.store(0, Release);
    }
}

struct Wish<'a>(&'a AtomicU32);

impl Drop for Wish<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Release);
    }
}

/// The number of the calling thread; never 0.
#[inline]
pub(crate) fn this_thread() -> usize {
    // SAFETY: no arguments.
    unsafe { libc::pthread_self() as usize }
}

/// False if it does not come true for so long that it never will: of a process that forked, the child
/// has no other threads.
fn wait_until(mut is: impl FnMut() -> bool) -> bool {
    for _ in 0..SPINS {
        if is() {
            return true;
        }
        std::hint::spin_loop();
    }
    let deadline = Instant::now() + LONGEST_TURN;
    while !is() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

/// The reader's half of the barrier.
#[inline]
fn light_barrier() {
    if NO_MEMBARRIER.load(Relaxed) {
        fence(SeqCst);
    } else {
        compiler_fence(SeqCst);
    }
}

/// The others' half, which makes the reader's.
fn heavy_barrier() {
    fence(SeqCst);
    if NO_MEMBARRIER.load(Relaxed) {
        return;
    }
    if !membarrier(PRIVATE_EXPEDITED) {
        // It was there before; a sandbox may have taken it. What the reader has stored is seen within
        // the time that a store takes to become visible, far less than this.
        NO_MEMBARRIER.store(true, Relaxed);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Finds out once what the kernel has.
fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let there = membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED);
        NO_MEMBARRIER.store(!there, Relaxed);
    });
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: plain numbers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

static NO_MEMBARRIER: AtomicBool = AtomicBool::new(true);
/// linux/membarrier.h.
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;
/// A turn of a packet is over by then.
const SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(50);
/// Reopening a port and requests to the daemon have limits of their own, which are less.
const LONGEST_TURN: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Two numbers that only a torn turn finds different.
    struct Pair(Turns<(u64, u64)>);

    // SAFETY: what is tested.
    unsafe impl Sync for Pair {}

    fn raise((one, other): &mut (u64, u64)) {
        assert_eq!(one, other);
        *one += 1;
        std::hint::black_box(&one);
        *other += 1;
    }

    #[test]
    fn the_reader_and_the_others_never_meet() {
        let pair = Arc::new(Pair(Turns::new((0, 0))));
        const ROUNDS: u64 = 20_000;
        let readers = (0..2).map(|_| {
            let pair = Arc::clone(&pair);
            std::thread::spawn(move || {
                for _ in 0..ROUNDS / 10 {
                    let entered = pair.0.enter();
                    for _ in 0..10 {
                        pair.0.with(raise).unwrap();
                    }
                    if entered {
                        pair.0.leave();
                    }
                }
            })
        });
        let others = (0..2).map(|_| {
            let pair = Arc::clone(&pair);
            std::thread::spawn(move || {
                for _ in 0..ROUNDS / 10 {
                    pair.0.with(raise).unwrap();
                }
            })
        });
        let all: Vec<_> = readers.chain(others).collect();
        all.into_iter().for_each(|thread| thread.join().unwrap());
        let total = 2 * ROUNDS + 2 * (ROUNDS / 10);
        assert_eq!(pair.0.with(|pair| *pair), Some((total, total)));
    }

    #[test]
    fn who_comes_back_within_its_turn_is_refused() {
        let turns = Turns::new(0);
        assert_eq!(turns.with(|_| turns.with(|_| ())), Some(None));
        assert!(turns.enter());
        assert_eq!(turns.with(|_| turns.with(|_| ())), Some(None));
        turns.leave();
        assert_eq!(turns.with(|number| *number), Some(0));
    }

    #[test]
    fn a_panic_ends_a_turn() {
        let turns = Turns::new(0);
        let panics = || turns.with(|_| panic!("meant"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(turns.with(|number| *number), Some(0));
    }
}
