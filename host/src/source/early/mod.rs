//! Early drop: a frame that no port of a source wants is dropped by the kernel, and counted.
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
//!   the kernel may not let through, every queue lets everything through, and has said so. A
//!   narrower filter is made afterwards, by a thread of its own: the kernel's verifier takes its
//!   time, and filters come from guests. It is put in place only if nothing was widened meanwhile.
//!   So the kernel's filter covers every filter that judges a frame, at all times.
//! - **Counted.** A queue's filters count what they drop in memory that stays with the queue,
//!   whatever filter comes next: `seen = read + dropped + early`.
//! - **Not needed.** Where the kernel takes no eBPF, or the filters are too many, nothing is
//!   narrowed: every frame comes to the daemon, as without early drop. `Standing` says why.

mod loader;
mod seat;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use loader::{Loader, Narrowing, Place};
pub use seat::{Loaded, Seat};

/// How a source's early drop stands, for people; of one generation.
#[derive(Debug, Default)]
pub(crate) struct Standing(Mutex<(u64, String)>);

impl Standing {
    /// A new generation begins with this text.
    pub(crate) fn begin(&self, generation: u64, text: impl Into<String>) {
        *self.lock() = (generation, text.into());
    }

    /// Says how a generation stands, unless it is over.
    pub(crate) fn say(&self, generation: u64, text: &str) {
        let mut standing = self.lock();
        if standing.0 == generation && standing.1 != text {
            standing.1 = text.to_owned();
        }
    }

    /// What was said last.
    pub(crate) fn text(&self) -> String {
        self.lock().1.clone()
    }

    /// What it guards is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, (u64, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
