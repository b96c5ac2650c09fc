//! Triggered recording: packets wait in memory, and go to the disk when something happens.
//!
//! | state | where packets go | leaves when |
//! |---|---|---|
//! | waiting | to chunks in memory, the oldest of which make room: those older than `before`, or the oldest of all when there is no more memory | a filter matches, or somebody asks: an **event** begins. What memory has of the time before, from the first packet of that time on, is given to the writers |
//! | event | to the writers, as without triggers | a packet is later than `after` after the last trigger, or none comes until then: the segments are closed. Further triggers extend the event |
//!
//! One ring has its packets in the order of their stamps. Of several, one may be seconds behind the other
//! after a stall: how far the time has come (`passed_ns`) is then known only when everything was read that
//! lay in all of them at some moment. What is in the rings that are ahead is recorded meanwhile, though it
//! is behind the end of the event.
//!
//! Filters are run here, on the packet as it will stand in the file: what triggers is exactly what
//! `vnplug extract FILTER` finds. A port of its own for each filter, as `--slice` has them, would cost
//! the recorder less, but its packets come at another time than those of the other ports, and the event
//! would begin somewhere near the packet that matched.
//!
//! What is dropped from memory is not lost: nobody asked for it. It has a counter of its own, and
//! another says how much of it went before its time, for want of memory.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vnplug::Packet;
use vnplug_frame::capfile::write::{Interface, pcapng};

use super::chunk::{Chunk, Tally};
use super::{Recorder, now_ns};
use crate::disk::{BLOCK, Buffer};
use crate::filter::{Filter, Program};
use crate::name::{Format, time};

/// What triggers, and how much around it is recorded.
#[derive(Debug, Clone, Default)]
pub struct Triggers {
    /// pcap-filter expressions; a packet that matches one of them is a trigger.
    pub filters: Vec<String>,
    /// How long before a trigger.
    pub before: Duration,
    /// How long after the last one.
    pub after: Duration,
    /// Buffers of [`super::Settings::buffers`] in which packets may wait for a trigger; two or more.
    pub buffers: u16,
}

/// Triggers a recorder from another thread.
#[derive(Debug, Default)]
pub struct Remote(Mutex<Option<String>>);

impl Remote {
    /// Now; `why` is for the file. Done within a tenth of a second.
    pub fn trigger(&self, why: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_owned());
    }

    fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Packets that wait for a trigger, or the event that is being recorded.
#[derive(Debug)]
pub(super) struct Hold {
    filters: Vec<(String, Vec<Program>)>,
    before_ns: u64,
    after_ns: u64,
    /// How far back packets are kept: with de-duplication so much longer as the packet may be earlier
    /// whose duplicate was left out.
    reach_ns: u64,
    /// Chunks that may wait, besides the one that is being filled.
    most: usize,
    chunks: VecDeque<Chunk>,
    spare: Vec<Buffer>,
    event: Option<Event>,
    /// The stamp of the packet before.
    newest_ns: u64,
    /// What is still to come was stamped later.
    passed_ns: u64,
    /// Packets come through several rings.
    rings: Option<Rings>,
    /// Since when no packet came.
    quiet: Option<Instant>,
    /// What the books know of the chunk that is being filled.
    told: (u64, u64),
    /// The latest stamp that went for want of memory.
    short_ns: u64,
    /// Until when the event before went.
    ended_ns: u64,
    remote: Arc<Remote>,
}

/// Stamps of packets that came through several rings.
#[derive(Debug, Default)]
struct Rings {
    /// The latest since all rings were read up to some moment.
    newest_ns: u64,
    /// The latest when it was that moment.
    then_ns: u64,
}

#[derive(Debug)]
struct Event {
    until_ns: u64,
    /// The end by the last trigger alone: the other may be by a clock that was set back since.
    last_ns: u64,
    note: Arc<str>,
    /// Triggers that the books do not know of.
    triggers: u64,
}

impl Event {
    fn extend(&mut self, until_ns: u64) {
        self.until_ns = self.until_ns.max(until_ns);
        self.last_ns = until_ns;
        self.triggers += 1;
    }
}

impl Hold {
    /// # Errors
    /// A filter is wrong, or makes no sense for one of the interfaces.
    pub(super) fn new(
        triggers: &Triggers,
        interfaces: &[Interface],
        dedup: Option<Duration>,
    ) -> io::Result<Self> {
        let mut filters = Vec::new();
        for expression in &triggers.filters {
            let wrong = |error| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("trigger '{expression}': {error}"),
                )
            };
            let mut filter = Filter::new(expression).map_err(wrong)?;
            let each = interfaces.iter();
            let programs = each.map(|of| filter.program(of.file_link_type()).cloned());
            let programs: Result<Vec<Program>, _> = programs.collect();
            filters.push((expression.clone(), programs.map_err(wrong)?));
        }
        Ok(Self {
            filters,
            before_ns: triggers.before.as_nanos() as u64,
            after_ns: triggers.after.as_nanos() as u64,
            reach_ns: {
                let dedup = dedup.unwrap_or_default();
                triggers.before.saturating_add(dedup).as_nanos() as u64
            },
            most: usize::from(triggers.buffers.max(2)) - 1,
            chunks: VecDeque::new(),
            spare: Vec::new(),
            event: None,
            newest_ns: 0,
            passed_ns: 0,
            rings: None,
            quiet: None,
            told: (0, 0),
            short_ns: 0,
            ended_ns: 0,
            remote: Arc::default(),
        })
    }

    /// The first filter that matches.
    #[inline]
    fn matching(&self, interface: usize, packet: &Packet<'_>) -> Option<usize> {
        self.filters.iter().position(|(_, programs)| {
            let program = programs.get(interface);
            program.is_some_and(|program| program.run(packet.bytes, packet.meta.wire_len) != 0)
        })
    }

    /// Whether an event is over. The clock may have been set back.
    fn is_over(&self, event: &Event) -> bool {
        let most = self.after_ns.saturating_add(SET_BACK_NS);
        let passed = |until_ns: &u64| {
            self.passed_ns > *until_ns || until_ns.saturating_sub(self.passed_ns) > most
        };
        self.passed_ns > 0 && [event.until_ns, event.last_ns].iter().all(passed)
    }

    /// The time by this machine's clock, or by that of the packets if it is another.
    fn now_ns(&self) -> u64 {
        let quiet = self.quiet.map_or(Duration::ZERO, |since| since.elapsed());
        let (here, there) = (now_ns(), self.newest_ns + quiet.as_nanos() as u64);
        match self.newest_ns > 0 && here.abs_diff(there) > SET_BACK_NS {
            true => there,
            false => here.max(self.newest_ns),
        }
    }
}

impl Recorder {
    /// Triggers this recorder; without [`super::Settings::trigger`] that does nothing.
    pub fn remote(&self) -> Arc<Remote> {
        let hold = self.hold.as_ref();
        hold.map_or_else(Arc::default, |hold| Arc::clone(&hold.remote))
    }

    /// Whether packets wait for a trigger.
    #[inline]
    pub(super) fn waits(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.event.is_none())
    }

    /// Packets come through several rings, and all that they held when this was said before was taken:
    /// what comes now was stamped later than what had come then. True if that is of interest.
    pub(super) fn rings_were_read(&mut self) -> bool {
        let Some(hold) = &mut self.hold else {
            return false;
        };
        let rings = hold.rings.get_or_insert_default();
        hold.passed_ns = rings.then_ns.saturating_sub(SLACK_NS);
        if rings.newest_ns > 0 {
            rings.then_ns = std::mem::take(&mut rings.newest_ns);
        }
        self.end_if_over();
        true
    }

    /// Looks at a packet that is about to be taken.
    #[inline]
    pub(super) fn watch(&mut self, interface: usize, packet: &Packet<'_>) {
        let Some(hold) = &mut self.hold else { return };
        let ts_ns = packet.meta.ts_ns;
        (hold.newest_ns, hold.quiet) = (ts_ns, None);
        match &mut hold.rings {
            Some(rings) => rings.newest_ns = rings.newest_ns.max(ts_ns),
            None => {
                hold.passed_ns = ts_ns;
                self.end_if_over();
            }
        }
        let Some(hold) = &mut self.hold else { return };
        let Some(filter) = hold.matching(interface, packet) else {
            return;
        };
        match &mut hold.event {
            Some(event) => event.extend(ts_ns.saturating_add(hold.after_ns)),
            None => {
                let why = format!("filter '{}' matched", hold.filters[filter].0);
                self.begin_event(&why, ts_ns);
            }
        }
    }

    #[inline]
    fn end_if_over(&mut self) {
        let hold = self.hold.as_ref();
        let over = hold.and_then(|hold| Some(hold.is_over(hold.event.as_ref()?)));
        if over == Some(true) {
            self.end_event();
        }
    }

    /// What is to be done now and then.
    pub(super) fn tend(&mut self) {
        let Some(hold) = &mut self.hold else { return };
        if let Some(why) = hold.remote.take() {
            let now = hold.now_ns();
            hold.quiet = None;
            match &mut hold.event {
                Some(event) => event.extend(now.saturating_add(hold.after_ns)),
                None => self.begin_event(&why, now),
            }
        }
        self.tell();
        let Some(hold) = &mut self.hold else { return };
        if let Some(event) = &mut hold.event {
            let triggers = std::mem::take(&mut event.triggers);
            if triggers > 0 {
                self.ledger.trigger(|status| status.triggers += triggers);
            }
            return;
        }
        let oldest = hold.passed_ns.saturating_sub(hold.reach_ns);
        let mut old = Vec::new();
        while let Some(chunk) = hold
            .chunks
            .pop_front_if(|chunk| chunk.tally.last_ns < oldest)
        {
            old.push(chunk);
        }
        for chunk in old {
            self.pass_over(chunk, false);
        }
    }

    /// No packet came for a moment.
    pub(super) fn idle(&mut self) {
        let Some(hold) = &mut self.hold else { return };
        let quiet = hold.quiet.get_or_insert_with(Instant::now).elapsed();
        let Some(event) = &hold.event else { return };
        let left_ns = event.until_ns.saturating_sub(hold.newest_ns);
        let left = Duration::from_nanos(left_ns.min(hold.after_ns));
        if quiet > left.saturating_add(IDLE) {
            self.end_event();
        }
    }

    /// A buffer that has not to come from the writers.
    pub(super) fn spare(&mut self) -> Option<Buffer> {
        let hold = self.hold.as_mut()?;
        if let Some(buffer) = hold.spare.pop() {
            return Some(buffer);
        }
        if hold.event.is_some() || hold.chunks.len() < hold.most {
            return None;
        }
        let oldest = hold.chunks.pop_front()?;
        let early = oldest.tally.last_ns >= hold.passed_ns.saturating_sub(hold.reach_ns);
        if early {
            if hold.short_ns <= hold.ended_ns {
                log::warn!("memory holds less than the time before a trigger: the oldest goes");
            }
            hold.short_ns = hold.short_ns.max(oldest.tally.last_ns);
        }
        self.pass_over(oldest, early);
        self.hold.as_mut()?.spare.pop()
    }

    /// A chunk is full and waits.
    pub(super) fn keep(&mut self, chunk: Chunk) {
        if let Some(hold) = &mut self.hold {
            hold.told = (0, 0);
            hold.chunks.push_back(chunk);
        }
    }

    /// What the segments of the event say about themselves.
    pub(super) fn note(&self) -> Option<Arc<str>> {
        let event = self.hold.as_ref().and_then(|hold| hold.event.as_ref());
        event.map(|event| Arc::clone(&event.note))
    }

    /// What of a chunk the books do not know.
    pub(super) fn untold(&self, tally: &Tally) -> Tally {
        let (packets, bytes) = self.hold.as_ref().map_or((0, 0), |hold| hold.told);
        Tally {
            packets: tally.packets - packets,
            bytes: tally.bytes - bytes,
            first_ns: tally.first_ns,
            last_ns: tally.last_ns,
            ..Tally::default()
        }
    }

    /// Nothing waits any more: the recorder ends.
    pub(super) fn let_go(&mut self) {
        if !self.waits() {
            return;
        }
        self.flush();
        let chunks = self
            .hold
            .as_mut()
            .map(|hold| std::mem::take(&mut hold.chunks));
        for chunk in chunks.into_iter().flatten() {
            self.pass_over(chunk, false);
        }
    }

    /// Nobody asked for a chunk.
    fn pass_over(&mut self, chunk: Chunk, early: bool) {
        self.pass_over_part(chunk.serial, &chunk.tally, &Tally::default(), early);
        if let Some(hold) = &mut self.hold {
            hold.spare.push(chunk.buffer);
        }
    }

    /// Nobody asked for these packets of a chunk, but for those that are `left`. The losses before them
    /// are told nevertheless.
    fn pass_over_part(&self, serial: u64, all: &Tally, left: &Tally, early: bool) {
        let packets = all.packets - left.packets;
        self.ledger.passed_over(serial, packets, early);
        self.tell_losses(all.lost() - left.lost(), all.first_ns, all.last_ns);
    }

    /// Tells the books of packets in a chunk that may take long to fill.
    fn tell(&mut self) {
        if !self.waits() {
            return;
        }
        let Some(filling) = &self.filling else { return };
        let untold = self.untold(&filling.tally);
        if untold.packets > 0 {
            self.ledger.taken(self.serial, &untold);
            let told = (filling.tally.packets, filling.tally.bytes);
            if let Some(hold) = &mut self.hold {
                hold.told = told;
            }
        }
    }

    /// Gives the writers what waits of the time before.
    fn begin_event(&mut self, why: &str, at_ns: u64) {
        // It goes to the others that wait.
        self.flush();
        let format = self.settings.format;
        let Some(hold) = &mut self.hold else { return };
        let from_ns = at_ns.saturating_sub(hold.reach_ns);
        hold.quiet = None;
        let mut chunks = Vec::with_capacity(hold.chunks.len());
        for mut chunk in std::mem::take(&mut hold.chunks) {
            if chunk.tally.last_ns < from_ns {
                self.pass_over(chunk, false);
                continue;
            }
            if chunk.tally.first_ns < from_ns {
                let all = chunk.tally.clone();
                trim(&mut chunk, from_ns, format);
                self.pass_over_part(chunk.serial, &all, &chunk.tally, false);
            }
            chunks.push(chunk);
        }
        let Some(hold) = &mut self.hold else { return };
        let packets: u64 = chunks.iter().map(|chunk| chunk.tally.packets).sum();
        let oldest = chunks.iter().map(|chunk| chunk.tally.first_ns).min();
        let reach = at_ns.saturating_sub(oldest.unwrap_or(at_ns));
        let mut note = format!(
            "{why} at {}; {packets} packets before it from memory, {}.{:03} s back of {}",
            time(at_ns),
            reach / NS,
            reach % NS / 1_000_000,
            seconds(hold.before_ns),
        );
        if hold.short_ns >= from_ns && hold.short_ns > 0 {
            note += "; memory held no more";
        }
        if hold.ended_ns >= from_ns && hold.ended_ns > 0 {
            note += "; what was before is in the file of the event before";
        }
        log::info!("{note}");
        let note: Arc<str> = note.into();
        let until_ns = at_ns.saturating_add(hold.after_ns);
        hold.event = Some(Event {
            until_ns,
            last_ns: until_ns,
            note: Arc::clone(&note),
            triggers: 0,
        });
        self.ledger.trigger(|status| {
            status.events += 1;
            status.triggers += 1;
            status.writing = true;
            note.as_ref().clone_into(&mut status.last_event);
        });
        for lane in &mut self.lanes {
            lane.begins = true;
        }
        for mut chunk in chunks {
            let lane = self.least_behind();
            let (len, first_ns) = (chunk.len, chunk.tally.first_ns);
            chunk.begins_segment = self.lanes[lane].is_full(&self.settings, len, first_ns);
            chunk.note = self.note();
            self.give(lane, chunk);
        }
    }

    fn end_event(&mut self) {
        self.flush();
        let event = self.hold.as_mut().and_then(|hold| {
            let event = hold.event.take()?;
            hold.ended_ns = event.until_ns.min(hold.passed_ns);
            Some(event)
        });
        let Some(event) = event else { return };
        for lane in &self.lanes {
            lane.queue.end_segment();
        }
        self.ledger.trigger(|status| {
            status.triggers += event.triggers;
            status.writing = false;
        });
    }
}

/// Keeps only packets from this time on, and what is said of losses before them.
fn trim(chunk: &mut Chunk, from_ns: u64, format: Format) {
    let mut tally = Tally::default();
    let (mut at, mut end) = (0, 0);
    while let Some(record) = Record::at(&chunk.buffer[at..chunk.len], format) {
        if record.ts_ns.is_some_and(|ts_ns| ts_ns >= from_ns) {
            if let (Some((interface, bytes, lost)), Some(ts_ns)) = (record.packet, record.ts_ns) {
                tally.add(interface, ts_ns, bytes, lost);
            }
            chunk.buffer.copy_within(at..at + record.len, end);
            end += record.len;
        }
        at += record.len;
    }
    chunk.len = match format {
        Format::Pcapng if end > 0 => pcapng::pad(&mut chunk.buffer, end, BLOCK),
        _ => end,
    };
    chunk.tally = tally;
}

/// A block of pcapng, or a packet of classic pcap, as this crate encodes them.
struct Record {
    len: usize,
    /// Of a packet, or of what is said of a loss before one.
    ts_ns: Option<u64>,
    /// Interface, captured bytes, packets lost before it.
    packet: Option<(usize, usize, u32)>,
}

impl Record {
    fn at(bytes: &[u8], format: Format) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        if format == Format::Pcap {
            let captured = word(8)? as usize;
            return Some(Self {
                len: 16 + captured,
                ts_ns: Some(u64::from(word(0)?) * NS + u64::from(word(4)?)),
                packet: Some((0, captured, 0)),
            });
        }
        let (kind, len) = (word(0)?, word(4)? as usize);
        if len < 12 {
            return None;
        }
        let ts_ns = match kind {
            ENHANCED | STATISTICS => Some(u64::from(word(12)?) << 32 | u64::from(word(16)?)),
            _ => None,
        };
        let packet = match kind {
            ENHANCED => {
                let captured = word(20)? as usize;
                let mut option = 28 + captured.next_multiple_of(4);
                let mut lost = 0;
                while option + 8 < len {
                    let head = word(option)?;
                    if head & 0xffff == DROP_COUNT {
                        lost = word(option + 4)?;
                    }
                    option += 4 + (head as usize >> 16).next_multiple_of(4);
                }
                Some((word(8)? as usize, captured, lost))
            }
            _ => None,
        };
        Some(Self { len, ts_ns, packet })
    }
}

fn seconds(ns: u64) -> String {
    match ns % NS {
        0 => format!("{} s", ns / NS),
        part => format!("{}.{:03} s", ns / NS, part / 1_000_000),
    }
}

const NS: u64 = 1_000_000_000;
const ENHANCED: u32 = 6;
const STATISTICS: u32 = 5;
/// `epb_dropcount`.
const DROP_COUNT: u32 = 4;
/// How much later a packet may be in its ring than one of the same moment in another.
const SLACK_NS: u64 = 100_000_000;
/// How long after its end an event ends without packets: some may be on their way.
const IDLE: Duration = Duration::from_secs(1);
/// A stamp that is this much earlier than expected is of a clock that was set back.
const SET_BACK_NS: u64 = 10_000_000_000;
