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
use crate::exits::{Exits, Noted};
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
        let decided = batch.map(|it| forwarder.decide(it.from, (it.bytes, it.len()), it.fault));
        self.ways.extend(decided);
    }

    /// Copies the rests of frames that not only go to where they can be copied to.
    pub(crate) fn fetch(&mut self, forwarder: &Forwarder, exits: &Exits, batch: &mut Batch) {
        for (at, way) in self.ways.iter().enumerate() {
            let it = batch.get(at);
            if it.tail.is_some() && !exits.take_tails(forwarder.due(way.all()), &it) {
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
        batch: impl Iterator<Item = Entered<'a>> + Clone,
        now_us: u64,
        sink: Option<&mut Sink<'_>>,
    ) -> Passed {
        exits.begin();
        self.forms.clear();
        match sink {
            Some(sink) => self.give_and_show(forwarder, exits, batch, now_us, sink),
            None => self.only_give(forwarder, exits, batch, now_us),
        }
    }

    /// As [`decide`](Self::decide) and [`give`](Self::give), frame by frame, while nobody is shown anything and no
    /// rest of a frame is where it came from.
    pub(crate) fn pass<'a>(
        &mut self,
        forwarder: &mut Forwarder,
        exits: &mut Exits,
        batch: impl Iterator<Item = Entered<'a>>,
        now_us: u64,
    ) -> Passed {
        forwarder.begin(now_us);
        exits.begin();
        self.forms.clear();
        let (mut noted, mut passed) = (Noted::default(), Passed::default());
        let mut entered = recycle(std::mem::take(&mut self.entered));
        for (place, it) in (0..).zip(batch) {
            let way = forwarder.decide(it.from, (it.bytes, it.len()), it.fault);
            let (dues, _) = forwarder.dues();
            exits.note(place, &it, &way, dues, &mut self.forms, &mut noted);
            passed.count(&it);
            entered.push(it);
        }
        let (_, counters) = forwarder.dues();
        counters.noted(&noted);
        exits.send(&entered, counters, now_us);
        self.entered = recycle(entered);
        passed
    }

    /// Nobody is shown anything: all go to links.
    fn only_give<'a>(
        &mut self,
        forwarder: &mut Forwarder,
        exits: &mut Exits,
        batch: impl Iterator<Item = Entered<'a>>,
        now_us: u64,
    ) -> Passed {
        let (mut noted, mut passed) = (Noted::default(), Passed::default());
        let (dues, counters) = forwarder.dues();
        let mut entered = recycle(std::mem::take(&mut self.entered));
        entered.extend(batch);
        for ((place, it), way) in (0..).zip(&entered).zip(&self.ways) {
            exits.note(place, it, way, dues, &mut self.forms, &mut noted);
            passed.count(it);
        }
        counters.noted(&noted);
        exits.send(&entered, counters, now_us);
        self.entered = recycle(entered);
        passed
    }

    /// NB: one loop for all of it: most of what a short frame costs here is to be looked at again.
    fn give_and_show<'a>(
        &mut self,
        forwarder: &mut Forwarder,
        exits: &mut Exits,
        batch: impl Iterator<Item = Entered<'a>> + Clone,
        now_us: u64,
        sink: &mut Sink<'_>,
    ) -> Passed {
        let (mut noted, mut passed) = (Noted::default(), Passed::default());
        let mut frames = recycle(std::mem::take(&mut self.frames));
        let ts_ns = now_ns();
        let (dues, counters) = forwarder.dues();
        for ((place, it), way) in (0..).zip(batch.clone()).zip(&self.ways) {
            exits.note(place, &it, way, dues, &mut self.forms, &mut noted);
            if passed.count(&it) {
                let due = &dues[way.kept()];
                frames.push(shown(it.bytes, it.offload, (it.from, due), ts_ns));
            }
        }
        counters.noted(&noted);
        if exits.has_some() {
            let mut entered = recycle(std::mem::take(&mut self.entered));
            entered.extend(batch);
            exits.send(&entered, counters, now_us);
            self.entered = recycle(entered);
        }
        if !frames.is_empty() {
            sink(&frames);
        }
        self.frames = recycle(frames);
        if !self.forms.is_empty() {
            self.show_forms(forwarder, ts_ns, sink);
        }
        passed
    }

    /// Shows other forms of frames that were shown.
    fn show_forms(&mut self, forwarder: &Forwarder, ts_ns: u64, sink: &mut Sink<'_>) {
        let mut frames = recycle(std::mem::take(&mut self.frames));
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
        self.frames = recycle(frames);
    }
}

/// Frames that went through.
#[derive(Default)]
pub(crate) struct Passed {
    pub(crate) frames: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
}

impl Passed {
    /// Counts what entered, if it is a frame; whether it is.
    #[inline]
    fn count(&mut self, it: &Entered<'_>) -> bool {
        let is_whole = it.fault.is_none() && it.bytes.len() >= HEADER;
        if is_whole {
            self.frames += 1;
            self.bytes += it.len() as u64;
        }
        is_whole
    }

    /// What is said of them; `count`: with those that are no frames.
    pub(crate) fn received(self, count: usize, is_unread: bool) -> Received {
        let Self { frames, bytes } = self;
        match is_unread {
            true => Received::Passed { frames, bytes },
            false => Received::Frames(count),
        }
    }
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
