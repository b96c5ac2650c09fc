//! Frames that wait for the guest's buffers.
//!
//! What a guest has no buffers for waits here, bounded, then it is dropped: a guest that does not
//! read costs itself only (R5). A frame that is longer than all buffers that are there waits for more of
//! them, but not for ever, as a driver may have no more to give: after `STUCK` without any new one it is
//! dropped, so that the shorter ones behind it come.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vnplug_ring::offload::{HEADER, Offload};

use super::outgoing::Outgoing;
use crate::backlog::fill;
use crate::exits::Out;
use crate::vhost::frames::Put;

/// What is noted of a frame that waits for buffers, with its header before it.
pub(super) struct Waiting {
    receiver: usize,
    /// As [`Out::merged`].
    merged: Option<u16>,
}

/// A guest had no room for a frame, and added none for long.
#[derive(Clone, Copy)]
pub(super) struct Hopeless {
    /// Bytes from which on a frame is too long, its header included.
    from: u64,
    ring: usize,
    /// Buffers that the guest had there then.
    left: u16,
    /// Such a frame was merged.
    is_merged: bool,
}

/// A ring to which its guest adds nothing.
#[derive(Clone, Copy)]
pub(super) struct Stuck {
    ring: usize,
    /// The guest's index there.
    seen: u16,
    since: Instant,
}

impl Outgoing {
    /// Whether the guest will have no room for `need` bytes, as far as one can know: it has buffers for `room`,
    /// which is less, and has not added any for long; or it was found to have no more before.
    #[cold]
    pub(super) fn is_hopeless(&mut self, at: usize, need: u64, room: u64, is_merged: bool) -> bool {
        if let Some(it) = self.hopeless.as_mut().filter(|it| need >= it.from) {
            it.is_merged |= is_merged;
            self.tell_merges();
            return true;
        }
        let Some(Some(ring)) = self.half.rings.get(at) else {
            return false;
        };
        let (seen, now) = (ring.seen(), Instant::now());
        let before = self.stuck.filter(|it| (it.ring, it.seen) == (at, seen));
        let stuck = before.unwrap_or(Stuck {
            ring: at,
            seen,
            since: now,
        });
        self.stuck = Some(stuck);
        let is_hopeless = now.duration_since(stuck.since) >= STUCK;
        if is_hopeless {
            // NB: not what this frame needs, or a sender of ever shorter ones makes each of them wait.
            self.hopeless = Some(Hopeless {
                from: room + 1,
                ring: at,
                left: ring.left(),
                is_merged,
            });
            self.tell_merges();
        }
        is_hopeless
    }

    /// A frame of `need` bytes fitted into a ring that has `left` chains then.
    #[inline]
    pub(super) fn hope(&mut self, at: usize, need: u64, left: u16) {
        if let Some(it) = self.hopeless
            && (need >= it.from || (at == it.ring && left > it.left))
        {
            // It has more than then: its machine was stopped, say.
            self.hopeless = None;
            self.tell_merges();
        }
    }

    /// Says whether segments may be merged for the guest.
    pub(super) fn tell_merges(&self) {
        let merges = !self.is_narrow && !self.hopeless.is_some_and(|it| it.is_merged);
        self.half.shared.merges.store(merges, Ordering::Relaxed);
    }

    /// Gives what waits, as far as there are buffers.
    pub(super) fn flush(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        while self.budget > 0
            && let Some((bytes, first)) = waiting.first()
        {
            let (header, frame) = bytes.split_at(HEADER);
            let header: &[u8; HEADER] = header.first_chunk().unwrap_or(&[0; HEADER]);
            // Its ring may be gone since.
            let at = match self.receiving.contains(&first.receiver) {
                true => first.receiver,
                false => match self.receiving.first() {
                    Some(at) => *at,
                    None => break,
                },
            };
            let out = Out {
                head: frame,
                body: &[],
                tail: None,
                offload: None,
                is_valid: false,
                merged: first.merged,
            };
            // The guest may have changed its offloads since.
            let offload = header.first_chunk().map(Offload::from_header);
            let offload = offload.unwrap_or_default();
            let put = match offload.is_due() && !self.half.shared.takes(&offload) {
                true => Some(Put::Never),
                false => self.put(at, header, &out),
            };
            match put {
                Some(Put::Done) => self.gave(&out),
                Some(Put::Full | Put::Short(_)) => break,
                // Its buffers make no sense, or its ring.
                Some(Put::Never) | None => self.lose(1),
            }
            waiting.forget(1);
        }
        self.waiting = waiting;
        self.tell_waits();
    }

    /// What waits may be what the guest does not take any more.
    pub(super) fn forget_waiting(&mut self) {
        self.lose(self.waiting.len() as u64);
        self.waiting.forget(self.waiting.len());
        self.tell_waits();
    }

    /// `count` of those that waited are dropped.
    fn lose(&self, count: u64) {
        self.half.shared.lost.fetch_add(count, Ordering::Relaxed);
    }

    /// Says whether frames wait.
    fn tell_waits(&self) {
        let waits = !self.waiting.is_empty();
        // SeqCst: see `Shared::is_armed`.
        self.half.shared.waits.store(waits, Ordering::SeqCst);
    }

    /// Keeps a frame until there are buffers; false if too much waits.
    pub(super) fn keep(&mut self, at: usize, header: &[u8; HEADER], out: &Out<'_>) -> bool {
        let len = HEADER + out.len();
        if !self.waiting.has_room(len) {
            return false;
        }
        let note = Waiting {
            receiver: at,
            merged: out.merged,
        };
        self.waiting.keep_as(note, len, |place| {
            let rest = fill(place, &[header, out.head, out.body]);
            if let Some(tail) = out.tail {
                tail.read(rest);
            }
        });
        self.tell_waits();
        true
    }
}

/// How long a frame waits for more buffers than are there while the guest adds none.
const STUCK: Duration = Duration::from_secs(1);
