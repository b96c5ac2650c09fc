//! Early drop: the kernel drops and counts a frame that no port of a source wants.
//!
//! ```text
//! hub (control thread)      what all ports together may want; a generation
//!   | Widen, and waits        | asks
//!   |                       loader (thread vnplug-early): eBPF for each queue's seat
//!   v                         | Narrow
//! queue's thread  <-----------'  puts it below its queue, if the generation is still the same
//! ```
//!
//! - **Widen before, narrow after.** Before a port attaches or a filter changes to something that
//!   the kernel may drop, every queue passes everything, and has said so. A
//!   narrower filter is made afterwards, by a thread of its own: the kernel's verifier takes its
//!   time, and filters come from guests. It is put in place only if nothing was widened meanwhile.
//!   So the kernel's filter covers every filter that judges a frame, at all times.
//! - **Fail open.** A filter that cannot be replaced by one that passes everything is removed, if
//!   that has the same effect; else the queue tries again (`Stuck`), and `Standing` says so.
//! - **Counted.** A queue's filters count what they drop in memory that stays with the queue,
//!   whatever filter comes next: `seen = read + dropped + early`.
//! - **Not needed.** Where the kernel takes no eBPF, or the filters are too many, nothing is
//!   narrowed: every frame comes to the daemon, as without early drop. `Standing` says why.

mod seat;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::SourceError;
pub use seat::{Loaded, Seat};

/// The kernel's part in a queue: it drops what no port wants. No call blocks.
pub trait EarlyDrop {
    /// Where it can do so.
    ///
    /// # Errors
    /// Why it cannot, for people.
    fn seat(&self) -> Result<Seat, String>;

    /// Makes the kernel hand over only what this filter, made for this queue's
    /// [`seat`](Self::seat), passes, instead of what the one before passed; `None`: everything.
    ///
    /// # Errors
    /// [`SourceError`]: it goes on as before.
    fn narrow(&mut self, filter: Option<Box<Loaded>>) -> Result<(), SourceError>;
}

/// The state of a source's early drop, for people.
#[derive(Debug, Default)]
pub struct Standing(Mutex<Words>);

#[derive(Debug, Default)]
struct Words {
    generation: u64,
    text: String,
    /// Queues whose filters could not be widened, and why.
    ailing: BTreeMap<u16, String>,
}

impl Standing {
    /// A new generation begins with this text.
    pub fn begin(&self, generation: u64, text: impl Into<String>) {
        let mut words = self.lock();
        (words.generation, words.text) = (generation, text.into());
    }

    /// Says how a generation stands, unless it is over.
    pub fn say(&self, generation: u64, text: &str) {
        let mut words = self.lock();
        if words.generation == generation && words.text != text {
            words.text = text.to_owned();
        }
    }

    /// A queue's filter may drop what ports want, because it cannot be replaced: more urgent than
    /// what is said otherwise.
    pub(crate) fn ails(&self, queue: u16, why: String) {
        self.lock().ailing.insert(queue, why);
    }

    /// It was replaced.
    pub(crate) fn cured(&self, queue: u16) {
        self.lock().ailing.remove(&queue);
    }

    /// What was said last.
    pub fn text(&self) -> String {
        let words = self.lock();
        match words.ailing.first_key_value() {
            Some((queue, why)) => format!(
                "failing: the kernel may drop what ports want (queue {queue}, trying again): {why}"
            ),
            None => words.text.clone(),
        }
    }

    /// What it guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Words> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
