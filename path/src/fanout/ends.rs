//! Single ports of a switch that somebody reads: each is a wire of its own, with a fanout of its own.
//!
//! What the port sent is received on that wire, and what is due to it is sent there
//! ([`flags::OUTBOUND`]), so that a reader's direction, filter, cluster and group mean what they mean on
//! any wire. Frames stay where they are; only their descriptions are copied, for ports that are read.

use std::collections::HashMap;
use std::num::NonZeroU16;

use vnplug_frame::{Frame, recycle};
use vnplug_ring::layout::{Life, flags};

use super::budget::Budget;
use super::{Fanout, FanoutCounters};
use crate::batch::Handle;
use crate::port::{Port, PortCounters};

/// The ports of a switch that are read.
#[derive(Debug, Default)]
pub(super) struct Ends {
    ends: Vec<End>,
    /// By reader's port, of which port of the switch it is.
    homes: HashMap<u32, NonZeroU16>,
    /// Always empty between calls; keeps its memory.
    spare: Vec<Frame<'static>>,
}

#[derive(Debug)]
struct End {
    number: NonZeroU16,
    fanout: Fanout,
}

impl Ends {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whether this port reads one of them.
    pub(super) fn has(&self, id: u32) -> bool {
        self.homes.contains_key(&id)
    }

    /// The fanout that has this port.
    pub(super) fn of(&mut self, id: u32) -> Option<&mut Fanout> {
        let number = *self.homes.get(&id)?;
        let mut ends = self.ends.iter_mut();
        ends.find_map(|end| (end.number == number).then_some(&mut end.fanout))
    }

    /// Gives the readers of each port what it sent and what is due to it.
    pub(super) fn deliver(
        &mut self,
        frames: &[Frame<'_>],
        now_us: u64,
        sender: Option<&Handle>,
        budget: &mut Budget,
    ) {
        for end in &mut self.ends {
            let mut own = recycle(std::mem::take(&mut self.spare));
            own.extend(frames.iter().filter_map(|it| seen(it, end.number.get())));
            if !own.is_empty() {
                end.fanout.deliver_batch(&own, now_us, sender, budget);
            }
            self.spare = recycle(own);
        }
    }

    /// Adds a reader of a port of the switch.
    pub(super) fn attach(&mut self, number: NonZeroU16, port: Box<Port>, at: (u16, u16)) {
        self.homes.insert(port.id, number);
        let found = self.ends.iter().position(|end| end.number == number);
        let place = found.unwrap_or_else(|| {
            let fanout = Fanout::new(at.0, at.1);
            self.ends.push(End { number, fanout });
            self.ends.len() - 1
        });
        self.ends[place].fanout.seat(port);
    }

    /// Removes one; what went through a wire that nobody reads any more is added to `counters`.
    pub(super) fn detach(&mut self, id: u32, counters: &mut FanoutCounters) -> Option<Box<Port>> {
        let port = self.of(id)?.unseat(id);
        let number = self.homes.remove(&id)?;
        if self.homes.values().all(|other| *other != number)
            && let Some(at) = self.ends.iter().position(|end| end.number == number)
        {
            let gone = self.ends.swap_remove(at);
            add(counters, &gone.fanout.counters());
        }
        port
    }

    /// The next time at which a reader is due.
    pub(super) fn due_us(&self) -> Option<u64> {
        let ends = self.ends.iter();
        ends.filter_map(|end| end.fanout.due_us()).min()
    }

    pub(super) fn tick(&mut self, now_us: u64) {
        self.ends.iter_mut().for_each(|it| it.fanout.tick(now_us));
    }

    pub(super) fn finish(&mut self, life: Life) {
        self.ends.iter_mut().for_each(|it| it.fanout.finish(life));
    }

    /// All readers, with the fates of all frames that they were offered.
    pub(super) fn accounts(&self) -> impl Iterator<Item = (&Port, PortCounters)> {
        self.ends.iter().flat_map(|end| end.fanout.own_accounts())
    }

    /// Adds what their readers had to judge.
    pub(super) fn add_to(&self, counters: &mut FanoutCounters) {
        for end in &self.ends {
            add(counters, &end.fanout.counters());
        }
    }
}

/// The frames were read once, from the switch.
fn add(counters: &mut FanoutCounters, of_end: &FanoutCounters) {
    counters.duties += of_end.duties;
    counters.departed.add(&of_end.departed);
}

/// A frame as it passes this port, if it does.
#[inline]
fn seen<'a>(frame: &Frame<'a>, number: u16) -> Option<Frame<'a>> {
    let way = match frame.from == number {
        true => 0,
        false if frame.due.contains(&number) => flags::OUTBOUND,
        false => return None,
    };
    Some(Frame {
        flags: frame.flags | way,
        due: &[],
        from: 0,
        is_form: false,
        ..*frame
    })
}
