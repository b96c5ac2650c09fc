//! Triggered recording: packets wait in memory, and go to the disk when something happens.
//!
//! | state | where packets go | leaves when |
//! |---|---|---|
//! | waiting | to chunks in memory, the oldest of which make room: those older than `before`, or the oldest of all when there is no more memory | a filter matches, or somebody asks: an **event** begins. What memory has of the time before, from the first packet of that time on, is given to the writers |
//! | event | to the writers, as without triggers | a packet is later than `after` behind the last trigger, or none comes until then: the segments are closed. Further triggers extend the event |
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
use std::time::Duration;

use vnplug::Packet;

use super::chunk::{Chunk, Tally};
use super::{Recorder, now_ns};
use crate::disk::{BLOCK, Buffer};
use crate::encode::{Interface, pcapng};
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
    /// Chunks that may wait, besides the one that is being filled.
    most: usize,
    chunks: VecDeque<Chunk>,
    spare: Vec<Buffer>,
    event: Option<Event>,
    /// The stamp of the packet before.
    newest_ns: u64,
    /// Packets of several ports come a little out of order.
    slack_ns: u64,
    /// What the books know of the chunk that is being filled.
    told: (u64, u64),
    /// The latest stamp that went for want of memory.
    short_ns: u64,
    /// Until when the event before went.
    ended_ns: u64,
    remote: Arc<Remote>,
}

#[derive(Debug)]
struct Event {
    until_ns: u64,
    note: Arc<str>,
    /// Triggers that the books do not know of.
    triggers: u64,
}

impl Hold {
    /// # Errors
    /// A filter is wrong, or makes no sense for one of the interfaces.
    pub(super) fn new(triggers: &Triggers, interfaces: &[Interface]) -> io::Result<Self> {
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
            most: usize::from(triggers.buffers.max(2)) - 1,
            chunks: VecDeque::new(),
            spare: Vec::new(),
            event: None,
            newest_ns: 0,
            slack_ns: 0,
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
            program.is_some_and(|program| program.accepts(packet.bytes, packet.meta.wire_len))
        })
    }

    /// Whether the event is over when a packet of this stamp comes. The clock may have been set back.
    fn is_over(&self, event: &Event, ts_ns: u64) -> bool {
        ts_ns > event.until_ns.saturating_add(self.slack_ns)
            || event.until_ns.saturating_sub(ts_ns) > self.after_ns.saturating_add(SET_BACK_NS)
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

    /// Packets come from so many ports.
    pub(super) fn ports(&mut self, count: usize) {
        if let Some(hold) = &mut self.hold {
            hold.slack_ns = if count > 1 { SLACK_NS } else { 0 };
        }
    }

    /// Looks at a packet that is about to be taken.
    #[inline]
    pub(super) fn watch(&mut self, interface: usize, packet: &Packet<'_>) {
        let Some(hold) = &mut self.hold else { return };
        let ts_ns = packet.meta.ts_ns;
        hold.newest_ns = ts_ns;
        let matching = hold.matching(interface, packet);
        match (&mut hold.event, matching) {
            (Some(event), Some(_)) => {
                event.until_ns = event.until_ns.max(ts_ns.saturating_add(hold.after_ns));
                event.triggers += 1;
            }
            (Some(_), None) => {
                let event = hold.event.as_ref();
                if event.is_some_and(|event| hold.is_over(event, ts_ns)) {
                    self.end_event();
                }
            }
            (None, Some(filter)) => {
                let why = format!("filter '{}' matched", hold.filters[filter].0);
                self.begin_event(&why, ts_ns);
            }
            (None, None) => {}
        }
    }

    /// What is to be done now and then.
    pub(super) fn tend(&mut self) {
        let Some(hold) = &mut self.hold else { return };
        if let Some(why) = hold.remote.take() {
            let now = now_ns().max(hold.newest_ns);
            match &mut hold.event {
                Some(event) => {
                    event.until_ns = event.until_ns.max(now.saturating_add(hold.after_ns));
                    event.triggers += 1;
                }
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
        let oldest = hold.newest_ns.saturating_sub(hold.before_ns);
        while let Some(chunk) = hold
            .chunks
            .pop_front_if(|chunk| chunk.tally.last_ns < oldest)
        {
            self.ledger
                .passed_over(chunk.serial, chunk.tally.packets, false);
            hold.spare.push(chunk.buffer);
        }
    }

    /// No packet came for a moment.
    pub(super) fn idle(&mut self) {
        let event = self.hold.as_ref().and_then(|hold| hold.event.as_ref());
        if event.is_some_and(|event| now_ns() > event.until_ns.saturating_add(IDLE_NS)) {
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
        let early = oldest.tally.last_ns >= hold.newest_ns.saturating_sub(hold.before_ns);
        if early {
            if hold.short_ns <= hold.ended_ns {
                log::warn!("memory holds less than the time before a trigger: the oldest goes");
            }
            hold.short_ns = hold.short_ns.max(oldest.tally.last_ns);
        }
        self.ledger
            .passed_over(oldest.serial, oldest.tally.packets, early);
        Some(oldest.buffer)
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
        for chunk in self.hold.iter_mut().flat_map(|hold| hold.chunks.drain(..)) {
            self.ledger
                .passed_over(chunk.serial, chunk.tally.packets, false);
        }
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
        let from_ns = at_ns.saturating_sub(hold.before_ns);
        let mut chunks = Vec::with_capacity(hold.chunks.len());
        for mut chunk in hold.chunks.drain(..) {
            let all = chunk.tally.packets;
            if chunk.tally.first_ns < from_ns {
                trim(&mut chunk, from_ns, format);
                self.ledger
                    .passed_over(chunk.serial, all - chunk.tally.packets, false);
            }
            match chunk.tally.packets {
                0 => hold.spare.push(chunk.buffer),
                _ => chunks.push(chunk),
            }
        }
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
        hold.event = Some(Event {
            until_ns: at_ns.saturating_add(hold.after_ns),
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
            hold.ended_ns = event.until_ns;
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
/// With several ports an event goes on so much longer, for those that are behind.
const SLACK_NS: u64 = 100_000_000;
/// Without packets an event ends so long after its end: some may be on their way.
const IDLE_NS: u64 = 1_000_000_000;
/// A stamp that is so much earlier than expected is of a clock that was set back.
const SET_BACK_NS: u64 = 10_000_000_000;
