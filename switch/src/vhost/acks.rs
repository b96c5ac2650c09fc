//! ACKs of a guest that segments were merged for, expanded where it sends them: the setting `acks`.
//!
//! The link knows both ends of it: what the guest was really given, and what it sends. Which ACK becomes
//! which is decided by [`vnplug_frame::acks`].

use vnplug_frame::acks::Acks;
use vnplug_frame::segment::{HEADERS, Look, look};
use vnplug_ring::offload::Offload;

use crate::batch::{Batch, Entered};

/// The ACKs of one guest.
#[derive(Debug, Default)]
pub(super) struct Expansion {
    acks: Acks,
    /// ACKs that were added since somebody asked.
    pub(super) added: u64,
}

impl Expansion {
    /// The guest has a frame of `len` bytes that begins with these two parts; it was merged of segments of so
    /// many bytes.
    pub(super) fn given(&mut self, head: &[u8], body: &[u8], len: usize, merged: Option<u16>) {
        let mut space = [0; HEADERS];
        let head = match head.len() < HEADERS && !body.is_empty() {
            false => head,
            true => {
                let more = body.len().min(HEADERS - head.len());
                space[..head.len()].copy_from_slice(head);
                space[head.len()..head.len() + more].copy_from_slice(&body[..more]);
                &space[..head.len() + more]
            }
        };
        if let Look::Tcp(segment) = look(head, len) {
            self.acks.given(&segment, merged);
        }
    }

    /// The guest sends a frame that is too long to be an ACK alone.
    pub(super) fn saw(&mut self, it: &Entered<'_>) {
        if it.fault.is_none()
            && let Look::Tcp(segment) = look(it.bytes, it.len())
        {
            self.acks.sent(&segment);
        }
    }

    /// The guest sends this frame: appends what goes before it to a batch, where one place at least is left.
    pub(super) fn expand(&mut self, frame: &[u8], offload: &Offload, batch: &mut Batch) {
        self.added += self.acks.expand(frame, offload, |copy| {
            // NB: fewer ACKs are right, too.
            batch.room() > 1
                && batch.push(copy.len(), *offload, |place| {
                    place.copy_from_slice(copy);
                    true
                })
        });
    }
}
