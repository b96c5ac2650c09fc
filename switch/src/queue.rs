//! The switch as a source: a turn takes frames of the ports that have some, and forwards them.

mod change;
mod lend;
mod open;
mod source;

use std::collections::VecDeque;

use rustix::event::epoll::EventFlags;
use vnplug_frame::Frame;
use vnplug_os::datagrams::Rest;
use vnplug_os::peer_log;
use vnplug_path::source::{QueueCounters, Received};

use crate::batch::Batch;
use crate::clock::Clock;
use crate::control::Inlet;
use crate::direct::Directs;
use crate::entrances::Served;
use crate::exits::Exits;
use crate::forward::{Forwarder, Loop, Number};
use crate::lanes::Lanes;
use crate::settings::Settings;
use crate::turn::{Passed, Sink, Spare};
use crate::twin::Twin;
use crate::uplink::{self, Uplinks};

/// A switch, forwarding.
pub struct Switch {
    name: String,
    forwarder: Forwarder,
    exits: Exits,
    directs: Directs,
    inlet: Inlet,
    /// NB: dropped before the entrances, whose threads end what makes a call of a guest take long.
    lanes: Lanes,
    entrances: Served,
    uplinks: Uplinks,
    /// One of their queues may have something.
    uplinks_have: bool,
    /// The entrances are open.
    is_open: bool,
    /// Ports that may have frames.
    ready: VecDeque<Number>,
    /// What the operator says of it.
    settings: Settings,
    /// Ports to be closed when their last frames are forwarded, and why.
    lost: Vec<(Number, std::io::Error)>,
    /// What came through links.
    came: Batch,
    /// What came through rings.
    sent: Batch,
    /// Ports of which frames came this turn.
    taken: Vec<Number>,
    /// Nobody reads what passes.
    is_unread: bool,
    spare: Spare,
    clock: Clock,
    /// Frames that lanes forwarded, as far as they are counted.
    lane_forwarded: u64,
    twin: Option<Twin>,
    /// Somebody reads it who is no port of it.
    is_watched: bool,
    counters: QueueCounters,
}

impl Switch {
    /// Lets clients join. By now the daemon has given up its privileges.
    #[cold]
    fn begin(&mut self) {
        self.is_open = true;
        self.entrances.0.begin();
        self.lanes.begin(&self.name);
    }

    fn now_us(&self) -> u64 {
        self.clock.now_us()
    }

    /// Keeps the kernel instance up to date.
    #[inline]
    fn tell_twin(&mut self) {
        let now_s = self.clock.now_s();
        if let Some(twin) = &mut self.twin {
            twin.step_aside(self.is_watched || self.forwarder.is_hub);
            twin.tick(now_s);
        }
    }

    /// Does what other threads ask.
    #[inline]
    fn obey(&mut self) {
        if self.inlet.has_news() {
            while let Some(change) = self.inlet.take() {
                self.change(change);
            }
        }
        if let Some(ports) = self.forwarder.take_flips() {
            ports.into_iter().for_each(|port| self.limit(port));
        }
        // The clock is looked at only where something is to be told.
        if self.directs.next_us(&self.forwarder).is_some() {
            let now_us = self.now_us();
            self.directs.tell(&self.forwarder, &self.settings, now_us);
        }
    }

    /// Something that is watched has news: a port has frames or reads again, or an uplink has.
    fn hear(&mut self, number: u64, flags: EventFlags) {
        match number {
            WAKER => return,
            UPLINKS => {
                self.uplinks_have = true;
                return;
            }
            _ => {}
        }
        let number = number as Number;
        if flags.contains(EventFlags::OUT) {
            self.exits.go_on(number, &mut self.forwarder.counters);
        }
        // The other end is gone, if it is not for reading: its next read says so.
        let has_frames = flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR);
        if let Some(port) = self.exits.port(number)
            && has_frames
            && !port.is_ready
        {
            port.is_ready = true;
            self.ready.push_back(number);
        }
    }

    /// Takes frames of the ports that have some, each a part of the batch.
    fn take(&mut self) {
        let batch = &mut self.came;
        batch.clear();
        batch.leaves = self.is_unread;
        for _ in 0..self.ready.len() {
            if batch.room() == 0 {
                break;
            }
            let Some(number) = self.ready.pop_front() else {
                break;
            };
            let Some(port) = self.exits.port(number) else {
                continue;
            };
            let Some(link) = &mut port.link else {
                continue;
            };
            let (frames, bytes) = (batch.len(), batch.bytes());
            batch.sends(number);
            let rest = link.receive(batch, EACH);
            port.count_lost(&mut self.forwarder.counters);
            port.counters.in_frames += (batch.len() - frames) as u64;
            port.counters.in_bytes += (batch.bytes() - bytes) as u64;
            if batch.left() > 0 {
                self.taken.push(number);
            }
            match rest {
                Ok(Rest::More) => self.ready.push_back(number),
                Ok(Rest::Nothing) => port.is_ready = false,
                Ok(Rest::Rights) => {
                    let why = std::io::Error::other("it sent descriptors");
                    self.lost.push((number, why));
                }
                Err(error) => self.lost.push((number, error)),
            }
        }
    }

    /// Says which loops were found.
    #[cold]
    fn tell_loops(&mut self) {
        while let Some(found) = self.forwarder.next_loop() {
            let Loop {
                port,
                station,
                is_shut,
            } = found;
            let station = station.map(|byte| format!("{byte:02x}")).join(":");
            let what = match is_shut {
                true => "it is shut for a minute",
                false => "to shut such ports, say loops=shut",
            };
            peer_log!(
                log::Level::Warn,
                "switch",
                "{}: a loop, or two of one address: port {port} sends as {station}, which is at another \
                 port; {what}",
                self.name
            );
        }
    }

    /// Closes ports that cannot be served any more. NB: not before their frames are forwarded, from which
    /// the switch learns where stations are: nobody is to be found at a port that is gone.
    fn close_lost(&mut self) {
        while let Some((number, why)) = self.lost.pop() {
            let level = match why.kind() {
                std::io::ErrorKind::UnexpectedEof => log::Level::Info,
                _ => log::Level::Warn,
            };
            peer_log!(
                level,
                "switch",
                "{}: port {number} is closed: {why}",
                self.name
            );
            if let Some(losses) = self.remove(number) {
                losses.tell(number);
            }
        }
    }
}

impl Switch {
    /// Forwards what came through links.
    fn receive_links(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Received {
        if self.exits.is_late() {
            let now_us = self.now_us();
            self.exits.arrive(now_us, &mut self.forwarder.counters);
        }
        if self.ready.is_empty() {
            return Received::Nothing;
        }
        self.take();
        let count = self.came.len();
        if count == 0 {
            self.close_lost();
            return Received::Nothing;
        }
        let now_us = self.now_us();
        let (forwarder, exits) = (&mut self.forwarder, &mut self.exits);
        let spare = &mut self.spare;
        let passed = match self.is_unread && self.came.left() == 0 {
            true => spare.pass(forwarder, exits, self.came.iter(), now_us),
            false => {
                spare.decide(forwarder, self.came.iter(), now_us);
                if self.came.left() > 0 {
                    spare.fetch(forwarder, exits, &mut self.came);
                }
                let sink = (!self.is_unread).then_some(sink);
                spare.give(forwarder, exits, self.came.iter(), now_us, sink)
            }
        };
        // Now their senders may have them back.
        self.exits.release(&mut self.taken);
        self.came.clear();
        self.counters.seen += passed.frames;
        self.tell_loops();
        self.close_lost();
        passed.received(count, self.is_unread)
    }

    /// Forwards what came to the next queue of an uplink; `None` when all had their turn.
    fn receive_uplink(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Option<Received> {
        let now_us = self.now_us();
        let longest = self.came.longest();
        let (forwarder, exits, spare) = (&mut self.forwarder, &mut self.exits, &mut self.spare);
        let (is_unread, mut all) = (self.is_unread, Passed::default());
        let received = self.uplinks.receive(&mut |number, frames| {
            if let Some(port) = exits.port(number) {
                port.counters.in_frames += frames.len() as u64;
                port.counters.in_bytes +=
                    frames.iter().map(|it| it.bytes.len() as u64).sum::<u64>();
            }
            let entered = frames.iter().map(|it| uplink::entered(number, it, longest));
            spare.decide(forwarder, entered.clone(), now_us);
            let mut sink = |frames: &[Frame<'_>]| sink(frames);
            let sink: Option<&mut Sink<'_>> = match is_unread {
                true => None,
                false => Some(&mut sink),
            };
            let passed = spare.give(forwarder, exits, entered, now_us, sink);
            all.frames += passed.frames;
            all.bytes += passed.bytes;
        })?;
        self.counters.seen += all.frames;
        Some(match received {
            Received::Frames(count) => all.received(count, is_unread),
            other => other,
        })
    }
}

/// The event of who asks for changes, and that of the uplinks; no port has these numbers.
const WAKER: u64 = 1 << 32;
const UPLINKS: u64 = WAKER + 1;
/// Frames that are taken in one turn, of all ports and of one.
pub(crate) const BATCH: usize = 128;
pub(crate) const EACH: usize = 64;
/// Bytes of frames from which on a turn takes no more: they pass while they and what is written of them fit the
/// processor's own cache, and their senders have their buffers back soon.
pub(crate) const ENOUGH: usize = 256 << 10;
/// Bytes of a frame that rings send, on average of a full turn: 1 MiB in all.
const SENT_EACH: usize = 4096;
/// Bytes of an Ethernet header.
pub(crate) const HEADER: usize = 14;
