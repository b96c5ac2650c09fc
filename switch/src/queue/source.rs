//! The switch as the path's queue: its turns, when to wake it, and what rings send.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use vnplug_frame::{Frame, offload};
use vnplug_path::source::{
    Flushed, Queue, QueueCounters, Received, Seen, SourceError, Transmit, Transmitter, Wake,
};
use vnplug_ring::offload::Offload;

use super::{HEADER, Switch};
use crate::batch::MAX_SUPER;
use crate::twin::Twin;

impl Queue for Switch {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        if !self.is_open {
            self.begin();
        }
        self.obey();
        if self.twin.is_some() {
            self.tell_twin();
        }
        if !self.lanes.is_empty() {
            self.serve_lanes();
        }
        // One call has the frames of one: those of links are one, those of each uplink's queue are another.
        if !self.uplinks.is_empty() {
            let sink = &mut |frames: &[Frame<'_>]| sink(frames);
            while let Some(received) = self.receive_uplink(sink) {
                if let Received::Frames(_) | Received::Passed { .. } = received {
                    self.tell_loops();
                    return Ok(received);
                }
            }
        }
        Ok(self.receive_links(sink))
    }

    fn may_pass(&mut self, is_unread: bool) {
        self.is_unread = is_unread;
    }

    fn is_watched(&mut self, is_watched: bool) {
        self.is_watched = is_watched;
    }

    fn arm(&mut self) -> Wake<'_> {
        if !self.ready.is_empty() {
            return Wake::NOW;
        }
        let due = [
            self.exits.next_us(),
            self.directs.next_us(&self.forwarder),
            self.lanes.next_us(),
        ];
        let arrives = due.into_iter().flatten().min();
        let arrives =
            arrives.map(|at_us| Duration::from_micros(at_us.saturating_sub(self.now_us())));
        let uplinks = match self.uplinks.is_empty() {
            true => None,
            false => self.uplinks.arm(),
        };
        let looks = (self.twin.is_some() && !self.uplinks.is_empty()).then_some(LOOK);
        let within = [arrives, uplinks, looks];
        Wake {
            fds: [None, None],
            within: within.into_iter().flatten().min(),
        }
    }

    fn woke(&mut self, _: Seen) {
        let have = std::mem::take(&mut self.uplinks_have);
        if have || !self.uplinks.is_empty() {
            self.uplinks.woke(have);
        }
    }

    fn epoll(&self) -> Option<Arc<OwnedFd>> {
        Some(Arc::clone(self.exits.epoll()))
    }

    fn found(&mut self, number: u64, flags: EventFlags) {
        self.hear(number, flags);
    }

    fn counters(&mut self) -> QueueCounters {
        self.uplinks.count();
        self.counters
    }

    fn own_counters(&self) -> Vec<(String, u64)> {
        let mut named = self.all_counters().named();
        named.extend(self.uplinks.named());
        named.extend(self.twin.iter().flat_map(Twin::named));
        if !self.lanes.is_empty() {
            let carried = self.lane_forwarded + self.lanes.total().frames;
            named.push(("lanes".into(), self.lanes.len() as u64));
            named.push(("lane_forwarded".into(), carried));
        }
        // Relaxed: a number.
        let called_again = self.inlet.called_again.load(Ordering::Relaxed);
        named.push(("called_again".into(), called_again));
        named.push(("stations".into(), self.forwarder.table.len() as u64));
        named.push(("switch_ports".into(), self.forwarder.ports().len() as u64));
        named
    }

    fn state(&self) -> &'static str {
        "up"
    }

    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        Some(self)
    }
}

impl Transmitter for Switch {
    fn sends(&mut self, member: u16) {
        self.sent.sends(member);
    }

    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        self.transmit_offloaded(bytes, &Offload::default())
    }

    fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        self.sent.place(len)
    }

    fn placed(&mut self, frame: Range<usize>, left: &Offload) -> Transmit {
        let longest = self.came.longest();
        let has_length = match left.is_super_frame() {
            true => has_length(self.sent.at_place(&frame), left, longest),
            false => (HEADER..=longest).contains(&frame.len()),
        };
        if !has_length {
            return Transmit::BadLength;
        }
        self.sent.placed(frame, *left);
        Transmit::Taken
    }

    fn takes_offload(&self) -> bool {
        true
    }

    fn transmit_offloaded(&mut self, bytes: &[u8], left: &Offload) -> Transmit {
        if !has_length(bytes, left, self.came.longest()) {
            return Transmit::BadLength;
        }
        let fill = |place: &mut [u8]| {
            place.copy_from_slice(bytes);
            true
        };
        match self.sent.push(bytes.len(), *left, fill) {
            true => Transmit::Taken,
            false => Transmit::Full,
        }
    }

    fn flush(&mut self, shown: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        if self.sent.is_empty() {
            return Flushed::default();
        }
        let count = self.sent.len() as u64;
        // The port that they come from may be there since just now.
        self.obey();
        let now_us = self.now_us();
        if let Some(port) = self.exits.port(self.sent.get(0).from) {
            port.counters.in_frames += count;
            port.counters.in_bytes += self.sent.bytes() as u64;
        }
        let (forwarder, exits) = (&mut self.forwarder, &mut self.exits);
        self.spare.decide(forwarder, self.sent.iter(), now_us);
        let sent = self.sent.iter();
        self.spare.give(forwarder, exits, sent, now_us, Some(shown));
        self.tell_loops();
        self.counters.seen += count;
        self.counters.shown += count;
        self.sent.clear();
        Flushed {
            sent: count,
            ..Flushed::default()
        }
    }
}

/// Whether a frame, or each packet that it becomes, is as long as frames are: the longest of those that are not cut has so
/// many bytes.
#[inline]
fn has_length(frame: &[u8], left: &Offload, longest: usize) -> bool {
    let is_long = match left.is_super_frame() {
        true => {
            let work = offload::work(frame, frame.len() as u32, left);
            let packets = work.ok().flatten().map_or(0, |work| work.longest());
            frame.len() > MAX_SUPER || packets > longest
        }
        false => frame.len() > longest,
    };
    frame.len() >= HEADER && !is_long
}

/// How often the interfaces of a twin are looked at.
const LOOK: Duration = Duration::from_secs(1);
