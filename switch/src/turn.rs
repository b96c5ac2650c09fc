//! What happens to the frames of a turn: decide, give, show.
//!
//! ```text
//! decide: where each goes → fetch: rests that must be here → give: to links → show: to the fanout
//! ```
//!
//! While nobody reads the switch, nothing is shown: frames pass, and are counted.

use std::time::{SystemTime, UNIX_EPOCH};

use vnplug_frame::{Frame, recycle, vlan_of};
use vnplug_path::source::Received;
use vnplug_ring::layout::flags;
use vnplug_ring::offload::Offload;

use crate::batch::{Batch, Entered};
use crate::edits::Forms;
use crate::exits::Exits;
use crate::forward::{Forwarder, HOST, Number, Way};
use crate::queue::HEADER;

/// Who is shown frames.
pub(crate) type Sink<'a> = dyn FnMut(&[Frame<'_>]) + 'a;

/// Always empty between calls; keeps its memory.
#[derive(Default)]
pub(crate) struct Spare {
    entered: Vec<Entered<'static>>,
    /// Where each frame goes.
    ways: Vec<Way>,
    frames: Vec<Frame<'static>>,
    /// Frames with other tags, for rings.
    forms: Forms,
}

impl Spare {
    /// Decides for each frame of a batch where it goes.
    pub(crate) fn decide<'a>(
        &mut self,
        forwarder: &mut Forwarder,
        batch: impl Iterator<Item = Entered<'a>>,
        now_us: u64,
    ) {
        forwarder.begin(now_us);
        self.ways.clear();
        let decided = batch.map(|it| forwarder.decide(it.from, it.bytes, it.fault));
        self.ways.extend(decided);
    }

    /// Copies the rests of frames that not only go to where they can be copied to.
    pub(crate) fn fetch(&mut self, forwarder: &Forwarder, exits: &Exits, batch: &mut Batch) {
        for (at, way) in self.ways.iter().enumerate() {
            let it = batch.get(at);
            if it.tail.is_some() && !exits.take_tails(forwarder.due(way.all()), it.offload) {
                batch.fetch(at);
            }
        }
    }

    /// Gives the frames to those of the ports that they go to that have links, and shows all that are frames,
    /// as captures and ports with rings see them, received just now. How many are shown, or would be.
    pub(crate) fn give<'a>(
        &mut self,
        forwarder: &mut Forwarder,
        exits: &mut Exits,
        batch: impl Iterator<Item = Entered<'a>>,
        now_us: u64,
        sink: Option<&mut Sink<'_>>,
    ) -> Passed {
        exits.begin();
        self.forms.clear();
        let mut entered = recycle(std::mem::take(&mut self.entered));
        entered.extend(batch);
        for ((place, it), way) in (0..).zip(&entered).zip(&self.ways) {
            let dues = forwarder.dues();
            let noted = exits.note(place, it, way, dues, &mut self.forms);
            forwarder.counters.rings += noted.rings;
            forwarder.counters.cut += noted.cut;
            forwarder.counters.due += noted.cut;
        }
        exits.send(&entered, &mut forwarder.counters, now_us);
        let passed = match sink {
            Some(sink) => self.show(forwarder, &entered, sink),
            None => {
                let mut passed = Passed::default();
                for it in entered.iter().filter(|it| is_whole(it)) {
                    passed.frames += 1;
                    passed.bytes += it.len() as u64;
                }
                passed
            }
        };
        self.entered = recycle(entered);
        passed
    }

    /// Shows frames to readers, and their forms.
    fn show(
        &mut self,
        forwarder: &Forwarder,
        entered: &[Entered<'_>],
        sink: &mut Sink<'_>,
    ) -> Passed {
        let mut frames = recycle(std::mem::take(&mut self.frames));
        let ts_ns = now_ns();
        let all = entered.iter().zip(&self.ways);
        let all = all.filter(|(it, _)| is_whole(it));
        frames.extend(all.map(|(it, way)| {
            let ways = (it.from, forwarder.due(way.kept()));
            shown(it.bytes, it.offload, ways, ts_ns)
        }));
        let passed = Passed {
            frames: frames.len() as u64,
            bytes: 0,
        };
        if !frames.is_empty() {
            sink(&frames);
        }
        if !self.forms.is_empty() {
            frames.clear();
            frames.extend(self.forms.iter().map(|(bytes, form)| Frame {
                is_form: true,
                ..shown(
                    bytes,
                    form.offload.as_ref(),
                    // Who sent it has been told.
                    (HOST, forwarder.due(form.due.clone())),
                    ts_ns,
                )
            }));
            sink(&frames);
        }
        self.frames = recycle(frames);
        passed
    }
}

/// Frames that went through.
#[derive(Default)]
pub(crate) struct Passed {
    pub(crate) frames: u64,
    /// Their bytes; of those that were shown nobody asks.
    pub(crate) bytes: u64,
}

impl Passed {
    /// What is said of them, of so many with those that are none.
    pub(crate) fn received(self, count: usize, is_unread: bool) -> Received {
        let Self { frames, bytes } = self;
        match is_unread {
            true => Received::Passed { frames, bytes },
            false => Received::Frames(count),
        }
    }
}

/// Whether it is a frame.
#[inline]
fn is_whole(it: &Entered<'_>) -> bool {
    it.fault.is_none() && it.bytes.len() >= HEADER
}

/// A frame as a reader of the wire sees it.
#[inline]
fn shown<'a>(
    bytes: &'a [u8],
    offload: Option<&Offload>,
    (from, due): (Number, &'a [Number]),
    ts_ns: u64,
) -> Frame<'a> {
    let (tag, vlan_tci) = vlan_of(bytes);
    let left = match offload {
        Some(_) => flags::OFFLOAD | flags::CSUM_NOT_READY,
        None => 0,
    };
    Frame {
        bytes,
        wire_len: bytes.len() as u32,
        ts_ns,
        flags: tag | left,
        vlan_tci,
        offload: offload.copied().unwrap_or_default(),
        due,
        is_form: false,
        from,
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
