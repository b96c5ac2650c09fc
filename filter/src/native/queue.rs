//! Programs that wait to be translated: owners take turns, one program each.
//!
//! After a costly program its owner rests for nine times as long, so that no owner keeps a
//! processor busy by sending hard programs one after the other.

use std::sync::{Arc, Weak};
use std::time::Duration;

use vnplug_os::fair::{self, Meanwhile, Terms};

use super::NativeSlot;
use vnplug_bpf::Instruction;

/// A program that somebody may still want.
#[derive(Debug)]
pub(super) struct Job {
    instructions: Weak<[Instruction]>,
    slot: Weak<NativeSlot>,
}

/// A program that somebody wants.
pub(super) struct Wanted {
    pub(super) owner: String,
    pub(super) instructions: Arc<[Instruction]>,
    pub(super) slot: Arc<NativeSlot>,
}

impl Job {
    pub(super) fn new(instructions: &Arc<[Instruction]>, slot: &Arc<NativeSlot>) -> Self {
        Self {
            instructions: Arc::downgrade(instructions),
            slot: Arc::downgrade(slot),
        }
    }

    /// The program, if somebody still wants it.
    pub(super) fn wanted(self, owner: String) -> Option<Wanted> {
        Some(Wanted {
            owner,
            instructions: self.instructions.upgrade()?,
            slot: self.slot.upgrade()?,
        })
    }
}

impl fair::Job for Job {
    fn is_wanted(&self) -> bool {
        self.slot.strong_count() > 0
    }
}

/// What an owner may.
pub(super) const TERMS: Terms = Terms {
    // The next one is interpreted for good.
    most: 16_384,
    // What people write takes less.
    cheap: Duration::from_millis(10),
    debt: 9,
    meanwhile: Meanwhile::Rests,
};
