//! The operator's program between a port's filters and its ring: it drops frames, changes them, counts them.
//!
//! It sees what the port's judge took, as the reader would have had it: of a super-frame the packets of the
//! wire, unless the port takes super-frames as they are. What it makes of a frame is what the reader gets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vnplug_frame::{Frame, vlan_of};
use vnplug_ring::control::Segments;
use vnplug_ring::layout::flags;
use vnplug_twin::{Context, Instance, Meta};

use super::{Offered, Port, PortCounters, Way};
use crate::batch::BatchInfo;

/// One instance of a program, for all ports of one queue.
#[derive(Debug)]
pub struct PortProgram {
    instance: Instance,
    /// The number of the interface that programs are told.
    interface: u32,
    totals: Arc<Totals>,
    /// Packets of super-frames, in one piece.
    joined: Vec<u8>,
}

/// What all instances of a program did.
#[derive(Debug, Default)]
pub struct Totals {
    /// Frames that it was run on.
    pub frames: AtomicU64,
    /// Those that it dropped.
    pub dropped: AtomicU64,
    /// Those for which it was stopped, as it did not end, or that it changed as it must not; they are dropped.
    pub aborted: AtomicU64,
}

impl Totals {
    /// Adds what a batch had: frames, those that were dropped, and those for which the program was stopped.
    pub fn add(&self, frames: u64, dropped: u64, aborted: u64) {
        // Relaxed: numbers that nothing else depends on.
        self.frames.fetch_add(frames, Ordering::Relaxed);
        self.dropped.fetch_add(dropped, Ordering::Relaxed);
        self.aborted.fetch_add(aborted, Ordering::Relaxed);
    }
}

/// What one batch adds to [`Totals`].
#[derive(Debug, Default)]
struct Tally {
    frames: u64,
    dropped: u64,
    aborted: u64,
}

impl PortProgram {
    /// Of this instance; `interface` is what programs are told that frames came from.
    pub fn shared(instance: Instance, interface: u32, totals: Arc<Totals>) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            instance,
            interface,
            totals,
            joined: Vec::new(),
        }))
    }

    /// What it makes of a frame; nothing if it drops it.
    fn run<'a>(
        &'a mut self,
        frame: &Frame<'_>,
        hash: u32,
        queue: u16,
        tally: &mut Tally,
    ) -> Option<Frame<'a>> {
        let meta = Meta {
            interface: self.interface,
            queue: queue.into(),
            wire_len: frame.wire_len,
            hash,
        };
        tally.frames += 1;
        match passed(&mut self.instance, frame, &meta) {
            Ok(made) => Some(made),
            Err(Lost::Dropped) => {
                tally.dropped += 1;
                None
            }
            Err(Lost::Aborted) => {
                tally.aborted += 1;
                None
            }
        }
    }

    /// Another version from the next frame on; the old one.
    pub fn exchange(&mut self, instance: Instance) -> Instance {
        std::mem::replace(&mut self.instance, instance)
    }

    fn count(&self, tally: &Tally) {
        self.totals.add(tally.frames, tally.dropped, tally.aborted);
    }
}

/// Why a program has left nothing of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// It dropped it.
    Dropped,
    /// It failed, was stopped, or changed what it must not.
    Aborted,
}

/// Runs a program on a frame: what it made of it, if it lets it pass.
///
/// # Errors
/// [`Lost`].
pub fn passed<'a>(
    instance: &'a mut Instance,
    frame: &Frame<'_>,
    meta: &Meta,
) -> Result<Frame<'a>, Lost> {
    let context = instance.code().context();
    let run = instance.run(frame.bytes, meta);
    // Where a super-frame's headers lie is said beside it, and would be wrong.
    let is_torn = frame.flags & flags::OFFLOAD != 0 && run.frame.len() != frame.bytes.len();
    match run.verdict {
        Some(verdict) if !is_torn && is_kept(context, verdict) => Ok(changed(frame, run.frame)),
        Some(verdict) if !is_torn && !is_abort(context, verdict) => Err(Lost::Dropped),
        _ => Err(Lost::Aborted),
    }
}

/// A frame that a program made of another.
pub fn changed<'a>(frame: &Frame<'_>, bytes: &'a [u8]) -> Frame<'a> {
    let (vlan, vlan_tci) = vlan_of(bytes);
    let now = bytes.len() as u32;
    let cut = frame.wire_len.saturating_sub(frame.bytes.len() as u32);
    Frame {
        bytes,
        wire_len: now.saturating_add(cut),
        ts_ns: frame.ts_ns,
        flags: frame.flags & !flags::VLAN | vlan,
        vlan_tci,
        offload: frame.offload,
        due: &[],
        is_form: frame.is_form,
        from: frame.from,
    }
}

/// Whether a program lets a frame pass. A port or a source is no way out: what it would send elsewhere is dropped.
fn is_kept(context: Context, verdict: i32) -> bool {
    match context {
        // XDP_PASS
        Context::Xdp => verdict == 2,
        // TC_ACT_UNSPEC, TC_ACT_OK, TC_ACT_RECLASSIFY, TC_ACT_PIPE
        Context::Classifier => matches!(verdict, -1 | 0 | 1 | 3),
    }
}

/// Whether a program says that it failed (XDP_ABORTED).
fn is_abort(context: Context, verdict: i32) -> bool {
    context == Context::Xdp && verdict == 0
}

fn lock(program: &Mutex<PortProgram>) -> MutexGuard<'_, PortProgram> {
    // One thread uses it. If that failed in the middle of a frame, the next frame begins anew.
    program.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Port {
    /// As [`take`](Self::take), for a port with a program.
    #[inline(never)]
    pub(super) fn take_programmed(
        &mut self,
        program: &Mutex<PortProgram>,
        batch: &BatchInfo<'_>,
        offered: Offered<'_>,
    ) {
        let Self {
            judge, counters, ..
        } = self;
        let mut program = lock(program);
        let mut tally = Tally::default();
        let mut way = Way {
            producer: &mut self.producer,
            turn: self.commons.as_deref().map(|commons| commons.turn(batch)),
            mark_gap: &mut self.mark_gap,
            snaplen: self.snaplen,
            cuts: self.segments == Segments::Wire,
            lie: None,
        };
        let mut one = |place: usize, counters: &mut PortCounters| {
            let frame = &batch.frames[place];
            if frame.flags & flags::OFFLOAD != 0 && way.cuts {
                give_cut(&mut way, &mut program, place, batch, counters, &mut tally);
                return;
            }
            let hash = batch.hashes[place];
            match program.run(frame, hash, batch.queue, &mut tally) {
                Some(made) => way.give((place, &made, hash), batch, counters),
                None => counters.program += 1,
            }
        };
        match offered {
            Offered::Whole => {
                for place in 0..batch.frames.len() {
                    if judge.takes(place, batch, counters) {
                        one(place, counters);
                    }
                }
            }
            Offered::Due(places) => {
                for place in places.iter() {
                    if judge.takes(place, batch, counters) {
                        one(place, counters);
                    }
                }
            }
            Offered::Found { places, by_filter } => {
                for place in places.iter() {
                    if judge.takes_found(place, batch, by_filter, counters) {
                        one(place, counters);
                    }
                }
            }
        }
        program.count(&tally);
        drop(program);
        let (ground, lie) = way.end();
        self.end_batch(batch.now_us, ground, lie);
    }
}

/// The packets of a super-frame, one by one.
#[cold]
fn give_cut(
    way: &mut Way<'_>,
    program: &mut PortProgram,
    place: usize,
    batch: &BatchInfo<'_>,
    counters: &mut PortCounters,
    tally: &mut Tally,
) {
    let (frame, hash) = (&batch.frames[place], batch.hashes[place]);
    let mut cuts = batch.cuts.borrow_mut();
    let packets = cuts.of(place, frame);
    counters.cut += packets.len() as u64 - 1;
    let mut joined = std::mem::take(&mut program.joined);
    for at in packets.clone() {
        let piece = cuts.get(at, frame);
        let (head, body) = piece.cut_to(u32::MAX);
        joined.clear();
        joined.extend_from_slice(head);
        joined.extend_from_slice(body);
        let mut left = frame.flags & !flags::OFFLOAD;
        if piece.is_summed {
            left &= !flags::CSUM_NOT_READY;
        }
        if at > packets.start {
            left &= !flags::SOURCE_LOSS;
        }
        let packet = Frame {
            bytes: &joined,
            wire_len: piece.wire_len,
            flags: left,
            ..*frame
        };
        match program.run(&packet, hash, batch.queue, tally) {
            Some(made) => way.give((place, &made, hash), batch, counters),
            None => counters.program += 1,
        }
    }
    program.joined = joined;
}
