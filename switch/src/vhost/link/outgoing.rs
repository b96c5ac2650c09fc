//! Frames for the guest.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_frame::flow::flow_hash;
use vnplug_os::event;
use vnplug_ring::offload::{HEADER, Offload};

use super::half::Half;
use super::waiting::{Hopeless, Stuck, Waiting};
use super::wire::Shared;
use crate::backlog::Backlog;
use crate::exits::{Due, Out};
use crate::link::Given;
use crate::vhost::acks::Expansion;
use crate::vhost::frames::{Head, MAX_PARTS, Put, Scratch, put};
use crate::vhost::ring::Broken;
use crate::vhost::spec::feature;
use crate::vhost::tail::BEGIN;

/// The rings in which a guest receives.
pub(super) struct Outgoing {
    pub(super) half: Half,
    /// The rings in which the guest receives, one of each pair that it uses.
    pub(super) receiving: Vec<usize>,
    /// Those by which it sends.
    partners: Vec<usize>,
    /// Pairs that the guest's driver uses, if it said so.
    pub(super) pairs: usize,
    pub(super) waiting: Backlog<Waiting>,
    /// A merged frame did not fit into the guest's buffers, all of them together.
    pub(super) is_narrow: bool,
    /// Since when the first that waits is longer than all buffers that are there.
    pub(super) stuck: Option<Stuck>,
    /// What was found to be so for good.
    pub(super) hopeless: Option<Hopeless>,
    /// ACKs for what was merged, if they are expanded.
    pub(super) acks: Option<Box<Expansion>>,
    scratch: Scratch,
    /// Descriptors that may still be read in this turn.
    pub(super) budget: usize,
}

impl Outgoing {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            half: Half::new(shared),
            receiving: Vec::new(),
            partners: Vec::new(),
            pairs: usize::MAX,
            waiting: Backlog::default(),
            is_narrow: false,
            stuck: None,
            hopeless: None,
            acks: None,
            scratch: Scratch::default(),
            budget: 0,
        }
    }

    /// Gives the guest frames, in order.
    pub(super) fn send(&mut self, due: Due<'_>) -> Given {
        let mut given = Given::default();
        if self.half.is_lost() {
            given.gone = due.iter().count() as u64;
            return given;
        }
        self.budget = MAX_PARTS;
        if !self.waiting.is_empty() {
            self.flush();
        }
        let plain = Offload::default().to_header(&[]);
        let valid = self.half.shared.header_of_valid();
        for out in due.iter() {
            let Some(at) = self.receiver(&out) else {
                given.gone += 1;
                continue;
            };
            let header = match out.offload {
                Some(offload) => offload.to_header(out.head),
                None if out.is_valid => valid,
                None => plain,
            };
            // Who gives asked before, and the driver may have changed its mind since.
            let takes = out.offload.is_none_or(|it| self.half.shared.takes(it));
            let put = match self.waiting.is_empty() && self.budget > 0 {
                _ if !takes => Some(Put::Never),
                true => self.put(at, &header, &out),
                false => Some(Put::Full),
            };
            match put {
                None => given.gone += 1,
                Some(Put::Never) => given.full += 1,
                Some(Put::Full | Put::Short(_)) if !self.keep(at, &header, &out) => given.full += 1,
                Some(put @ (Put::Full | Put::Short(_) | Put::Done)) => {
                    if put == Put::Done {
                        self.gave(&out);
                        if out.len() >= LONG {
                            self.half.publish(at);
                        }
                    }
                    given.enqueued += 1;
                    given.bytes += out.len() as u64;
                }
            }
        }
        self.publish_all();
        if !self.waiting.is_empty() {
            self.await_buffers();
        }
        given
    }

    /// Gives what waits.
    pub(super) fn go_on(&mut self) {
        self.budget = MAX_PARTS;
        if !self.waiting.is_empty() {
            self.flush();
            self.publish_all();
        }
    }

    /// Gives a frame to the guest, if it has buffers.
    #[inline]
    pub(super) fn put(&mut self, at: usize, header: &[u8; HEADER], out: &Out<'_>) -> Option<Put> {
        let header_len = self.half.header_len();
        let is_mergeable = self.half.setup.features & feature::MRG_RXBUF != 0;
        let ring = self.half.rings.get_mut(at)?.as_mut()?;
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
                if put == Put::Never && out.merged.is_some() {
                    self.is_narrow = true;
                    self.tell_merges();
                }
                if put == Put::Done {
                    self.hope(at, need, left);
                }
                Some(put)
            }
            Err(broken) => {
                self.stop(at, broken);
                None
            }
        }
    }

    /// Which ring a frame is received in.
    #[inline]
    fn receiver(&self, out: &Out<'_>) -> Option<usize> {
        match *self.receiving {
            [] => None,
            [only] => Some(only),
            ref all => {
                let bytes = if out.head.is_empty() {
                    out.body
                } else {
                    out.head
                };
                // Of a long frame no more may be here, and a flow has short ones, too.
                let bytes = &bytes[..bytes.len().min(BEGIN)];
                all.get(flow_hash(bytes) as usize % all.len()).copied()
            }
        }
    }

    /// The guest has this frame.
    #[inline]
    pub(super) fn gave(&mut self, out: &Out<'_>) {
        if let Some(acks) = &mut self.acks {
            acks.given(out.head, out.body, out.len(), out.merged);
        }
    }

    pub(super) fn expand_acks(&mut self, is: bool) {
        if !is {
            self.acks = None;
        } else if self.acks.is_none() {
            self.acks = Some(Box::default());
        }
    }

    pub(super) fn added_acks(&mut self) -> u64 {
        let added = self.acks.as_mut().map(|acks| &mut acks.added);
        added.map_or(0, std::mem::take)
    }

    fn publish_all(&mut self) {
        for place in 0..self.receiving.len() {
            if let Some(&at) = self.receiving.get(place) {
                self.half.publish(at);
            }
        }
    }

    /// Frames wait that did not before: the guest is to kick when it has buffers.
    fn await_buffers(&mut self) {
        // SeqCst: see there. If it is not armed, the next turn does it.
        if self.half.shared.is_armed.load(Ordering::SeqCst) && !self.arm() {
            // They came in this moment: let that thread look.
            event::ring(&self.half.shared.news);
        }
    }

    /// Asks the guest to kick for buffers. True if it has added none yet.
    pub(super) fn arm(&mut self) -> bool {
        let mut nothing = true;
        self.half.shared.asks.store(true, Ordering::Relaxed);
        for place in 0..self.receiving.len() {
            let Some(&at) = self.receiving.get(place) else {
                break;
            };
            match self.half.ring(at).map(|ring| ring.arm()) {
                None => {}
                Some(Ok(has_nothing)) => nothing &= has_nothing,
                Some(Err(broken)) => self.stop(at, broken),
            }
        }
        nothing
    }

    pub(super) fn disarm(&mut self) {
        self.half.shared.asks.store(false, Ordering::Relaxed);
        self.half.disarm();
    }

    /// The guest sends by these rings.
    pub(super) fn pair_with(&mut self, sending: &[usize]) {
        self.partners = sending.to_vec();
        self.count_rings();
    }

    /// Finds out in which rings the guest receives.
    pub(super) fn count_rings(&mut self) {
        let receiving = (0..self.half.rings.len()).step_by(2);
        let receiving: Vec<usize> = receiving.filter(|at| self.half.has(*at)).collect();
        // Both of a pair, if there is one: a driver that uses fewer pairs stops the others.
        let pairs = receiving
            .iter()
            .copied()
            .filter(|at| self.partners.contains(&(at + 1)) && at / 2 < self.pairs);
        let pairs: Vec<usize> = pairs.collect();
        self.receiving = if pairs.is_empty() { receiving } else { pairs };
    }

    #[cold]
    fn stop(&mut self, at: usize, broken: Broken) {
        self.half.stop(at, broken);
        self.count_rings();
    }
}

/// Bytes of a frame that its guest learns of at once: it has work with one as long as it takes to copy the next.
const LONG: usize = 16 << 10;
