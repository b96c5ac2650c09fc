//! Early drop: the kernel drops and counts a frame that no port of a source wants.
//!
//! ```text
//! hub (control thread)      what all ports together may want; a generation
//!   | a store in memory       | asks
//!   |                       loader (thread vnplug-early): eBPF for each queue's seat
//!   v                         | Narrow
//! a seat's book               v
//!   ^                       queue's thread: puts it below its queue
//!   '---- each frame asks ---'
//! ```
//!
//! - **One book.** What the kernel's instance and the daemon both need is in one array, which the daemon maps
//!   (`filter/src/ebpf/book.rs`): which filters are on, and what was dropped. No system call carries it.
//! - **Widen before, narrow after.** Before a port attaches or a filter changes to something that the kernel
//!   may drop, the hub writes into the books that the generation is another one: whatever filter is in place,
//!   or on its way there, passes everything from then on. A narrower filter is made afterwards, by a thread of
//!   its own: the kernel's verifier takes its time, and filters come from guests. It drops only while its
//!   generation lasts. So the kernel's filter covers every filter that judges a frame, at all times.
//! - **Fail open.** To widen cannot fail. A filter that cannot be put in place leaves one of an older
//!   generation there, which passes everything.
//! - **Less is a bit.** A filter whose last port went is put out by a bit, and lit again by it.
//! - **Made where it may be.** A seat takes the right to use eBPF. Sources that come later, when only the loader
//!   has it, are opened by threads that ask it for theirs ([`SeatOffice`]).
//! - **Counted.** A queue's filters count what they drop in memory that stays with the queue,
//!   whatever filter comes next: `seen = read + dropped + early`.
//! - **Not needed.** Where the kernel takes no eBPF, or the filters are too many, nothing is
//!   narrowed: every frame comes to the daemon, as without early drop. `Standing` says why.

mod seat;

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::SourceError;
pub use seat::{Loaded, Seat, SeatOffice};

/// The kernel's part in a queue: it drops what no port wants. No call blocks.
pub trait EarlyDrop {
    /// Where it can do so.
    ///
    /// # Errors
    /// Why it cannot, for people.
    fn seat(&self) -> Result<Seat, String>;

    /// Makes the kernel hand over only what this filter, made for this queue's [`seat`](Self::seat), passes,
    /// instead of what the one before passed.
    ///
    /// # Errors
    /// [`SourceError`]: it goes on as before.
    fn narrow(&mut self, filter: Box<Loaded>) -> Result<(), SourceError>;
}

/// The state of a source's early drop, for people.
#[derive(Debug, Default)]
pub struct Standing(Mutex<Words>);

#[derive(Debug, Default)]
struct Words {
    generation: u64,
    /// Why it is off.
    off: String,
    /// Whether filters are in place, and what is wanted by them.
    is_on: bool,
    has_failed: bool,
    wanted: String,
}

impl Standing {
    /// A new generation begins, of which nothing is in place for this reason.
    pub fn begin(&self, generation: u64, off: impl Into<String>) {
        let mut words = self.lock();
        (words.generation, words.off) = (generation, off.into());
        (words.is_on, words.has_failed) = (false, false);
    }

    /// What a generation's filters want, as soon as they are in place.
    pub fn wants(&self, wanted: String) {
        self.lock().wanted = wanted;
    }

    /// A generation's filters are in place, or are not for this reason, unless it is over.
    pub fn say(&self, generation: u64, result: Result<(), &str>) {
        let mut words = self.lock();
        if words.generation == generation {
            (words.is_on, words.has_failed) = (result.is_ok(), result.is_err());
            result.unwrap_or_else(|why| words.off = why.to_owned());
        }
    }

    /// Whether this generation's filters could not be put in place.
    pub fn has_failed(&self) -> bool {
        self.lock().has_failed
    }

    /// Whether it is this generation.
    pub fn is_at(&self, generation: u64) -> bool {
        self.lock().generation == generation
    }

    /// How it stands.
    pub fn text(&self) -> String {
        let words = self.lock();
        match words.is_on {
            true => format!("on: {}", words.wanted),
            false => words.off.clone(),
        }
    }

    /// What it guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Words> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
