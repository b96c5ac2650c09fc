//! One port: what it is given, what is done for it here, and what went through it.

use vnplug_frame::aggregate::Limits;
use vnplug_frame::offload::is_for_linux;
use vnplug_ring::offload::{Offload, flags, gso};

use super::due::Item;
use super::glance::Glance;
use super::note::Noted;
use crate::batch::Entered;
use crate::counts::Counters;
use crate::link::{Given, Link, Losses};

/// One port.
pub(crate) struct Port {
    /// None: its frames go through rings, which the fanout fills.
    pub(crate) link: Option<Box<dyn Link>>,
    /// Told when the link cannot serve any longer. None: nobody watches the link here.
    pub(super) losses: Option<Losses>,
    /// The link copies the rests of frames from where they are.
    pub(super) takes_tails: bool,
    /// It may have sent frames.
    pub(crate) is_ready: bool,
    /// It is told when the far end reads.
    pub(super) is_watched: bool,
    pub(crate) counters: PortCounters,
    /// What it is to be given of the batch.
    pub(super) todo: Vec<Item>,
    /// Its frames take their time.
    pub(super) is_slow: bool,
    pub(super) kept: Kept,
    /// Segments that are merged for it at most; 0: none are.
    pub(super) gro: u8,
    /// Which batches are looked at for that.
    pub(super) glance: Glance,
    /// What it sends has ACKs of ours in it.
    pub(super) expands_acks: bool,
    /// Lanes give it frames, too: what is lost of those that wait is counted together with what they gave.
    pub(super) is_shared: bool,
}

/// Work that is done for a port here, whatever its far end could do.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Kept {
    /// Super-frames are cut.
    pub(super) cuts: bool,
    /// So they are, and checksums are made.
    pub(super) sums: bool,
}

impl Kept {
    /// Whether the far end is left what is left to do with such a frame of `len` bytes.
    #[inline]
    pub(super) fn leaves(self, link: &dyn Link, offload: &Offload, len: usize) -> bool {
        let is_kept = self.sums || (self.cuts && offload.is_super_frame());
        !is_kept && link.takes(offload) && is_for_linux(len, offload)
    }
}

impl Port {
    /// A frame is for its ring: the fanout shows it.
    #[inline]
    pub(super) fn count_shown(&mut self, it: &Entered<'_>, noted: &mut Noted) {
        self.counters.out_frames += 1;
        self.counters.out_bytes += it.bytes.len() as u64;
        noted.rings += 1;
    }

    /// What is merged for it of this batch, if anything: what its far end takes, and a slow wire carries single frames.
    #[inline]
    pub(super) fn limits(&self) -> Option<Limits> {
        if self.gro == 0 || self.is_slow || self.glance.passes_by() {
            return None;
        }
        let link = self.link.as_ref().filter(|link| link.merges())?;
        let takes = |gso_type| {
            self.kept.leaves(
                &**link,
                &Offload {
                    flags: flags::NEEDS_CSUM,
                    gso_type,
                    ..Offload::default()
                },
                0,
            )
        };
        let limits = Limits {
            segments: self.gro.into(),
            ipv4: takes(gso::TCPV4),
            ipv6: takes(gso::TCPV6),
        };
        (limits.ipv4 || limits.ipv6).then_some(limits)
    }

    /// Counts what waited and never arrived, and ACKs that came with what it sent.
    #[inline]
    pub(crate) fn count_lost(&mut self, counters: &mut Counters) {
        if self.expands_acks
            && let Some(link) = &mut self.link
        {
            let added = link.added_acks();
            counters.acks_expanded += added;
            self.counters.acks_expanded += added;
        }
        if !self.is_shared
            && let Some(gone) = self.link.as_mut().map(|link| link.lost())
            && gone > 0
        {
            let lost = Given {
                gone,
                ..Given::default()
            };
            self.counters.took_back(lost, counters);
        }
    }

    /// What there was for it is given to it.
    #[inline]
    pub(super) fn done(&mut self) {
        self.todo.clear();
        if self.todo.capacity() > KEPT {
            self.todo.shrink_to(KEPT);
        }
    }
}

/// What went through one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PortCounters {
    /// Frames that it sent.
    pub(crate) in_frames: u64,
    /// Their bytes.
    pub(crate) in_bytes: u64,
    /// Of those frames, ACKs that one of its own became.
    pub(crate) acks_expanded: u64,
    /// Frames that it was given.
    pub(crate) out_frames: u64,
    /// Their bytes.
    pub(crate) out_bytes: u64,
    /// Frames that it was given within others, beyond one for each of those.
    pub(crate) out_merged: u64,
    /// Those others, which were made for it.
    pub(crate) out_super_frames: u64,
    /// Frames that it was not given: it does not read as fast.
    pub(crate) out_full: u64,
    /// Frames that it was not given: nobody is there.
    pub(crate) out_gone: u64,
    /// Frames that it was not given: the far end cannot carry so long ones.
    pub(crate) out_long: u64,
    /// Frames that were lost on purpose.
    pub(crate) out_lost: u64,
}

impl PortCounters {
    pub(crate) fn gave(&mut self, given: Given, counters: &mut Counters) {
        counters.enqueued += given.enqueued;
        counters.dropped_full += given.full;
        counters.dropped_gone += given.gone;
        counters.dropped_too_long += given.long;
        self.out_frames += given.enqueued;
        self.out_bytes += given.bytes;
        self.out_full += given.full;
        self.out_gone += given.gone;
        self.out_long += given.long;
    }

    /// The last of them are dropped after all.
    pub(crate) fn took_back(&mut self, dropped: Given, counters: &mut Counters) {
        let Given {
            full, gone, long, ..
        } = dropped;
        let all = full + gone + long;
        counters.enqueued -= all;
        counters.dropped_full += full;
        counters.dropped_gone += gone;
        counters.dropped_too_long += long;
        self.out_frames -= all;
        self.out_full += full;
        self.out_gone += gone;
        self.out_long += long;
    }

    /// `gone` frames less leave, in `made` super-frames.
    pub(super) fn were_merged(&mut self, gone: u64, made: u64, counters: &mut Counters) {
        counters.merged += gone;
        counters.super_frames += made;
        self.out_merged += gone;
        self.out_super_frames += made;
    }

    /// One of them became several packets after all: `more` than one.
    pub(super) fn was_cut(&mut self, more: u64, counters: &mut Counters) {
        counters.due += more;
        counters.cut += more;
        counters.enqueued += more;
        self.out_frames += more;
    }
}

/// Frames of a batch for one port for which memory is kept.
const KEPT: usize = 4096;
