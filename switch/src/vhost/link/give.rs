//! Frames for the guest, and those that wait for its buffers.

use std::time::{Duration, Instant};

use vnplug_frame::flow::flow_hash;
use vnplug_os::event;
use vnplug_ring::offload::{HEADER, Offload};

use super::Rings;
use crate::exits::Out;
use crate::link::Link;
use crate::vhost::frames::{Head, Put, put};
use crate::vhost::spec::feature;

/// A frame that waits for buffers, with its header before it.
pub(super) struct Waiting {
    receiver: usize,
    bytes: Box<[u8]>,
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
    pub(super) is_merged: bool,
}

/// A ring to which its guest adds nothing.
#[derive(Clone, Copy)]
pub(super) struct Stuck {
    ring: usize,
    /// The guest's index there.
    seen: u16,
    since: Instant,
}

impl Rings {
    /// Gives a frame to the guest, if it has buffers.
    #[inline]
    pub(super) fn put(&mut self, at: usize, header: &[u8; HEADER], out: &Out<'_>) -> Option<Put> {
        let header_len = self.header_len();
        let is_mergeable = self.setup.features & feature::MRG_RXBUF != 0;
        let ring = self.rings.get_mut(at)?.as_mut()?;
        let header = Head {
            bytes: *header,
            len: header_len,
            is_mergeable,
        };
        let put = put(ring, &mut self.scratch, header, out);
        // One at least: a chain of none costs, too.
        self.budget = self.budget.saturating_sub(self.scratch.parts.len().max(1));
        let (need, left) = ((header_len + out.len()) as u64, ring.left());
        match put {
            Ok(Put::Short(room)) if self.is_hopeless(at, need, room, out.merged.is_some()) => {
                Some(Put::Never)
            }
            Ok(put) => {
                self.is_narrow |= put == Put::Never && out.merged.is_some();
                if put == Put::Done
                    && let Some(it) = self.hopeless
                    && (need >= it.from || (at == it.ring && left > it.left))
                {
                    // It has more than then: its machine was stopped, say.
                    self.hopeless = None;
                }
                Some(put)
            }
            Err(broken) => {
                self.stop(at, broken);
                None
            }
        }
    }

    /// Whether the guest will have no room for so many bytes, as far as one can know: it has buffers for `room`,
    /// which is less, and has not added any for long; or it was found to have no more before.
    #[cold]
    fn is_hopeless(&mut self, at: usize, need: u64, room: u64, is_merged: bool) -> bool {
        if let Some(it) = self.hopeless.as_mut().filter(|it| need >= it.from) {
            it.is_merged |= is_merged;
            return true;
        }
        let Some(Some(ring)) = self.rings.get(at) else {
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
        }
        is_hopeless
    }

    /// Which ring a frame is received in.
    #[inline]
    pub(super) fn receiver(&self, out: &Out<'_>) -> Option<usize> {
        match *self.receiving {
            [] => None,
            [only] => Some(only),
            ref all => {
                let bytes = if out.head.is_empty() {
                    out.body
                } else {
                    out.head
                };
                all.get(flow_hash(bytes) as usize % all.len()).copied()
            }
        }
    }

    /// Gives what waits, as far as there are buffers.
    pub(super) fn flush(&mut self) {
        while self.budget > 0
            && let Some(first) = self.waiting.pop_front()
        {
            let (header, frame) = first.bytes.split_at(HEADER);
            let header: &[u8; HEADER] = header.first_chunk().unwrap_or(&[0; HEADER]);
            // Its ring may be gone since.
            let at = match self.receiving.contains(&first.receiver) {
                true => first.receiver,
                false => match self.receiving.first() {
                    Some(at) => *at,
                    None => {
                        self.waiting.push_front(first);
                        break;
                    }
                },
            };
            let out = Out {
                head: frame,
                body: &[],
                tail: None,
                offload: None,
                merged: first.merged,
            };
            // The guest may have changed its offloads since.
            let offload = header.first_chunk().map(Offload::from_header);
            let offload = offload.unwrap_or_default();
            let put = match offload.is_due() && !self.takes(&offload) {
                true => Some(Put::Never),
                false => self.put(at, header, &out),
            };
            match put {
                Some(Put::Done) => self.gave(&out),
                Some(Put::Full | Put::Short(_)) => {
                    self.waiting.push_front(first);
                    break;
                }
                // Its buffers make no sense, or its ring.
                Some(Put::Never) | None => self.lost += 1,
            }
            self.waiting_bytes -= first.bytes.len();
        }
    }

    /// The guest has this frame.
    #[inline]
    pub(super) fn gave(&mut self, out: &Out<'_>) {
        if let Some(acks) = &mut self.acks {
            acks.given(out.head, out.body, out.len(), out.merged);
        }
    }

    pub(super) fn publish_received(&mut self) {
        for place in 0..self.receiving.len() {
            if let Some(&at) = self.receiving.get(place) {
                self.publish(at);
            }
        }
    }

    /// Keeps a frame until there are buffers; false if too much waits.
    pub(super) fn keep(&mut self, at: usize, header: &[u8; HEADER], out: &Out<'_>) -> bool {
        let len = HEADER + out.len();
        if self.waiting.len() >= MAX_FRAMES || self.waiting_bytes + len > MAX_BYTES {
            return false;
        }
        let mut bytes = Vec::with_capacity(len);
        for part in [header, out.head, out.body] {
            bytes.extend_from_slice(part);
        }
        if let Some(tail) = out.tail {
            let begin = bytes.len();
            bytes.resize(len, 0);
            tail.read(&mut bytes[begin..]);
        }
        self.waiting.push_back(Waiting {
            receiver: at,
            bytes: bytes.into_boxed_slice(),
            merged: out.merged,
        });
        self.waiting_bytes += len;
        true
    }

    /// Frames wait that did not before: the guest is to kick when it has buffers.
    pub(super) fn await_buffers(&mut self) {
        if !self.is_armed {
            // The next turn does it.
            return;
        }
        for place in 0..self.receiving.len() {
            let ring = self.rings.get_mut(self.receiving[place]);
            if let Some(Some(ring)) = ring
                && !ring.arm().unwrap_or(true)
            {
                // They came in this moment: let this thread look.
                event::ring(&self.shared.news);
            }
        }
    }
}

/// What waits for a guest at most: frames, and their bytes.
const MAX_FRAMES: usize = 512;
const MAX_BYTES: usize = 1 << 20;
/// How long a frame waits for more buffers than are there while the guest adds none.
const STUCK: Duration = Duration::from_secs(1);
