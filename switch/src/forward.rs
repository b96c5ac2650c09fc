//! Which ports a frame is due to.
//!
//! Every frame that enters is exactly one of unicast, flooded, consumed or dropped
//! ([`Counters::accounted`]). Of the frame only the two addresses, the EtherType and VLAN tags are read. A
//! switch without settings is transparent: tagged frames, and the groups that IEEE 802.1D reserves for
//! bridges, pass like any other. The switch sends no frame of its own; ACKs that are expanded (`vhost/acks.rs`), and the
//! announcement of a guest that was migrated, enter by that guest's port as if it had sent them.
//!
//! While no port has rules (`rules.rs`) a frame takes the short way, which knows nothing of them.

mod ruled;

use std::ops::Range;

use vnplug_path::bucket::Bucket;

use crate::counts::{Counters, Reason, Refused};
use crate::police::Police;
use crate::rules::{Edit, Rule};
use crate::settings::{Address, Loops, PortSettings, Settings};
use crate::table::{Key, Learned, Limits, Table};
use crate::twin::{Judge, Verdict};
use ruled::Lists;

/// A port's number. 1 is the first.
pub type Number = u16;

/// Where frames come from that the host's own programs send onto the switch: no port of it.
pub const HOST: Number = 0;

/// The most ports that a switch may have.
pub const MAX_PORTS: usize = 16_384;

/// Why a frame that enters is dropped before anybody reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is longer than the switch takes.
    Long,
    /// What is said to be left to do with it does not fit it.
    Lie,
    /// The descriptors of a guest's ring that should have it make no sense.
    Chain,
}

/// Where a frame goes: places among the batch's [`dues`](Forwarder::dues).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Way {
    begin: u32,
    /// From here on are ports that have it with a tag.
    split: u32,
    end: u32,
    /// What is done with its tag, for the ports before and after that.
    edits: [Edit; 2],
}

impl Way {
    /// The ports that have it.
    #[inline]
    pub(crate) fn all(&self) -> Range<usize> {
        self.begin as usize..self.end as usize
    }

    /// The ports that have it as it entered.
    #[inline]
    pub(crate) fn kept(&self) -> Range<usize> {
        match self.edits {
            [Edit::Keep, _] => self.begin as usize..self.split as usize,
            [_, Edit::Keep] => self.split as usize..self.end as usize,
            _ => 0..0,
        }
    }

    /// Its forms: what is done with it, for which ports.
    #[inline]
    pub(crate) fn forms(&self) -> [(Edit, Range<usize>); 2] {
        let [plain, tagged] = self.edits;
        let [begin, split, end] = [self.begin, self.split, self.end].map(|at| at as usize);
        [(plain, begin..split), (tagged, split..end)]
    }

    /// The only place where it goes, if there is one only, and it goes there as it entered.
    #[inline]
    pub(crate) fn only(&self) -> Option<usize> {
        let is_kept = self.split == self.end && matches!(self.edits[0], Edit::Keep);
        (is_kept && self.count() == 1).then_some(self.begin as usize)
    }

    #[inline]
    fn count(&self) -> u32 {
        self.end - self.begin
    }
}

/// A loop, or what looks like one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loop {
    /// Where a station is heard that is at another port.
    pub(crate) port: Number,
    pub(crate) station: Address,
    /// The port is shut for it.
    pub(crate) is_shut: bool,
}

/// Decides for each frame.
#[derive(Debug)]
pub struct Forwarder {
    /// Where the stations are.
    pub table: Table,
    /// A hub: every frame is for all.
    pub is_hub: bool,
    /// What became of the frames.
    pub counters: Counters,
    /// What becomes of loops.
    pub loops: Loops,
    /// The ports that there are, in order.
    ports: Vec<Number>,
    /// The ports that the frames of this batch are due to, one frame's after another's.
    dues: Vec<Number>,
    /// The last source that was learned, and when.
    last: Option<(Key, Number, u32)>,
    /// The time of the batch.
    now_us: u64,
    now_s: u32,
    /// By port.
    states: Vec<State>,
    /// Ports that have rules, and whether there are any, or stations that never move.
    ruled: usize,
    has_rules: bool,
    /// Stations that never move, and their ports.
    statics: Vec<(Key, Number)>,
    lists: Lists,
    /// Ports that are shut for a loop.
    shut: Vec<Number>,
    /// Ports that were shut or opened since they were last [taken](Self::take_flips).
    flips: Vec<Number>,
    /// Loops that were found.
    found: Vec<Loop>,
    /// The daemon's instance of the twin, if the switch has one.
    pub(crate) judge: Option<Judge>,
    /// Ports that are policed here.
    policed: usize,
}

/// What is known of a port.
#[derive(Debug, Default)]
struct State {
    /// `None`: it is transparent, and everything passes.
    rule: Option<Box<Rule>>,
    /// What was dropped of what it sent.
    refused: Refused,
    /// How many of its frames had a station's address that is at another port, in this second.
    strays: (u32, u32),
    /// It has joined.
    is_there: bool,
    /// What it may send, unless the twin knows.
    police: Option<Bucket>,
    /// It is gone, and was shut for a loop until this second.
    shut_s: Option<u32>,
}

impl Forwarder {
    /// Without ports.
    pub fn new(limits: Limits) -> Self {
        Self {
            table: Table::new(limits),
            is_hub: false,
            counters: Counters::default(),
            loops: Loops::default(),
            ports: Vec::new(),
            dues: Vec::new(),
            last: None,
            now_us: 0,
            now_s: 0,
            states: Vec::new(),
            ruled: 0,
            has_rules: false,
            statics: Vec::new(),
            lists: Lists::default(),
            shut: Vec::new(),
            flips: Vec::new(),
            found: Vec::new(),
            judge: None,
            policed: 0,
        }
    }

    /// A port is there.
    pub fn add(&mut self, port: Number) {
        if let Err(at) = self.ports.binary_search(&port) {
            self.ports.insert(at, port);
        }
        let state = self.state(port);
        (state.refused, state.is_there) = (Refused::default(), true);
        let shut_s = state.shut_s.take();
        self.lists.clear();
        self.pin(port);
        if let Some(until) = shut_s.filter(|until| *until > self.now_s) {
            self.shut_until(port, until);
        }
    }

    /// Whoever has this number next is not who had it before, and not shut for what that one did.
    pub(crate) fn pardon(&mut self, port: Number) {
        self.state(port).shut_s = None;
    }

    /// A port is gone, and its stations are forgotten. What was [set](Self::set) of it is, too. One that is shut
    /// for a loop is shut when it comes again, until its time is over.
    pub fn remove(&mut self, port: Number) {
        if let Ok(at) = self.ports.binary_search(&port) {
            self.ports.remove(at);
        }
        let shut_s = self.rule(port).shut_s;
        self.set_police(port, Police::default());
        self.put(port, None);
        let state = self.state(port);
        (state.is_there, state.shut_s) = (false, shut_s.or(state.shut_s));
        self.table.set_most(port, None);
        self.table.forget(port);
        self.table.set_uplink(port, false);
        self.last = None;
        self.lists.clear();
    }

    /// From now on these settings are a port's. Its stations are forgotten if it is in other VLANs than before,
    /// or nothing is to be learned at it.
    pub fn set(&mut self, port: Number, settings: &PortSettings, storm: u32) {
        let mut rule = Rule::new(settings, storm, self.now_us);
        let old = self.rule(port);
        rule.follow(old);
        self.set_police(port, Police(settings.police));
        let old = self.rule(port);
        let is_elsewhere = !old.is_like(&rule) || rule.is_deaf || rule.is_shut();
        let is_idle = rule.is_idle();
        self.put(port, (!is_idle).then_some(Box::new(rule)));
        self.table.set_most(port, settings.stations);
        if is_elsewhere {
            self.table.forget(port);
        }
        self.last = None;
        self.lists.clear();
        if self.ports.binary_search(&port).is_ok() {
            self.pin(port);
        }
    }

    /// These stations never move from now on.
    pub fn set_statics(&mut self, settings: &Settings) {
        for (key, port) in std::mem::take(&mut self.statics) {
            self.table.unpin(key, port);
        }
        let statics = settings.statics.iter();
        let statics = statics.map(|((address, vlan), port)| (Key::new(*address, *vlan), *port));
        self.statics = statics.collect();
        self.count(0, 0);
        self.last = None;
        // Also whom a port is locked to, and was static before.
        for at in 0..self.ports.len() {
            self.pin(self.ports[at]);
        }
    }

    /// The ports that there are, in order.
    pub fn ports(&self) -> &[Number] {
        &self.ports
    }

    /// What was dropped of what a port sent.
    pub fn refused(&self, port: Number) -> Refused {
        let state = self.states.get(usize::from(port));
        state.map(|state| state.refused).unwrap_or_default()
    }

    /// A loop that was found, and nobody was told of.
    pub(crate) fn next_loop(&mut self) -> Option<Loop> {
        self.found.pop()
    }

    /// Forgets what the frames of the batch before were due to. The time is the batch's.
    pub fn begin(&mut self, now_us: u64) {
        (self.now_us, self.now_s) = (now_us, (now_us / 1_000_000) as u32);
        self.dues.clear();
        self.table.sweep(self.now_s, STEP);
        if !self.shut.is_empty() {
            self.reopen();
        }
    }

    /// The ports that the frames of the batch are due to so far, and the counters.
    #[inline]
    pub(crate) fn dues(&mut self) -> (&[Number], &mut Counters) {
        (&self.dues, &mut self.counters)
    }

    /// The ports that a frame is due to.
    #[inline]
    pub fn due(&self, to: Range<usize>) -> &[Number] {
        &self.dues[to]
    }

    /// Decides where a frame goes that came from a port; [`due`](Self::due) has the ports. `frame` has its begin at
    /// least, and it has `len` bytes in all.
    #[inline]
    pub(crate) fn decide(
        &mut self,
        from: Number,
        (frame, len): (&[u8], usize),
        fault: Option<Fault>,
    ) -> Way {
        self.counters.entered += 1;
        let reason = match fault {
            None => None,
            Some(Fault::Long) => Some(Reason::Long),
            Some(Fault::Lie) => Some(Reason::Offload),
            Some(Fault::Chain) => Some(Reason::Chain),
        };
        if let Some(reason) = reason {
            return self.refuse(from, reason);
        }
        // IEEE 802.3-2018, 3.2: destination, source, EtherType.
        let Some((&[d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5], _)) = header(frame) else {
            return self.refuse(from, Reason::Short);
        };
        if s0 & GROUP != 0 {
            return self.refuse(from, Reason::Source);
        }
        let to = [d0, d1, d2, d3, d4, d5];
        let source = [s0, s1, s2, s3, s4, s5];
        if from != HOST
            && let Some(judge) = &mut self.judge
        {
            match judge.ask(from, (frame, len)) {
                Verdict::Policed => return self.refuse(from, Reason::Police),
                Verdict::Forward(to) if !self.is_hub => return self.forward(to),
                _ => {}
            }
        }
        if self.policed > 0 && !self.may_send(from, len) {
            return self.refuse(from, Reason::Police);
        }
        if self.has_rules {
            return self.decide_by_rules(from, frame, to, source);
        }
        if from != HOST {
            self.learn(Key::new(source, 0), from);
        }
        let known = match d0 & GROUP != 0 || self.is_hub {
            true => None,
            false => self.table.find(Key::new(to, 0), self.now_s),
        };
        let begin = self.dues.len();
        match known {
            Some(to) if to == from => self.counters.consumed += 1,
            Some(to) => {
                self.dues.push(to);
                self.counters.unicast += 1;
            }
            None => {
                self.dues
                    .extend(self.ports.iter().filter(|port| **port != from));
                match self.dues.len() > begin {
                    true => self.counters.flooded += 1,
                    false => self.counters.consumed += 1,
                }
            }
        }
        let (begin, end) = (begin as u32, self.dues.len() as u32);
        self.counters.due += u64::from(end - begin);
        Way {
            begin,
            split: end,
            end,
            edits: [Edit::Keep; 2],
        }
    }

    /// A frame goes to one port, as it is.
    #[inline]
    fn forward(&mut self, to: Number) -> Way {
        let begin = self.dues.len() as u32;
        self.dues.push(to);
        self.counters.unicast += 1;
        self.counters.due += 1;
        Way {
            begin,
            split: begin + 1,
            end: begin + 1,
            edits: [Edit::Keep; 2],
        }
    }

    /// A port may send so much from now on.
    fn set_police(&mut self, port: Number, police: Police) {
        // With an instance of the twin both instances have one bucket, but for the host's programs.
        let is = police.0 > 0 && (self.judge.is_none() || port == HOST);
        let now_us = self.now_us;
        let bucket = is.then(|| Bucket::new(police.bytes_per_s(), police.burst(), now_us));
        let old = std::mem::replace(&mut self.state(port).police, bucket);
        self.policed = self.policed + usize::from(is) - usize::from(old.is_some());
    }

    #[inline(never)]
    fn may_send(&mut self, from: Number, bytes: usize) -> bool {
        let now_us = self.now_us;
        let Some(bucket) = &mut self.state(from).police else {
            return true;
        };
        let may = bucket.room(now_us) > 0;
        if may {
            bucket.spend(bytes as u64);
        }
        may
    }

    /// A frame of a port goes to nobody.
    #[cold]
    fn refuse(&mut self, from: Number, reason: Reason) -> Way {
        self.counters.refused.add(reason);
        self.state(from).refused.add(reason);
        Way::default()
    }

    /// A station was heard at a port. Not there, if it is another's for good.
    #[inline]
    fn learn(&mut self, source: Key, from: Number) -> bool {
        if self.last == Some((source, from, self.now_s)) {
            return true;
        }
        match self.table.learn(source, from, self.now_s) {
            Learned::Known | Learned::New => self.last = Some((source, from, self.now_s)),
            Learned::Moved { stray } => {
                self.counters.moves += 1;
                self.last = None;
                self.strayed(stray, source);
            }
            Learned::Held { stray } => {
                self.counters.moves_held += 1;
                self.strayed(stray, source);
            }
            Learned::Full => self.counters.unlearned += 1,
            Learned::Pinned => return false,
        }
        true
    }

    /// A station was heard at a port that does not seem to be its own. Nothing is sent to find loops: in one,
    /// what a station sends comes back by another port, over and over.
    #[cold]
    fn strayed(&mut self, port: Number, station: Key) {
        if self.loops == Loops::No {
            return;
        }
        let now_s = self.now_s;
        let (second, count) = &mut self.state(port).strays;
        if *second != now_s {
            (*second, *count) = (now_s, 0);
        }
        *count += 1;
        if *count != STRAYS {
            return;
        }
        self.counters.loops += 1;
        let is_shut = self.loops == Loops::Shut && self.shut(port);
        if self.found.len() < MAX_FOUND {
            self.found.push(Loop {
                port,
                station: station.address(),
                is_shut,
            });
        }
    }

    /// `more` ports have rules now, and `fewer` have none any more.
    fn count(&mut self, more: usize, fewer: usize) {
        self.ruled = self.ruled + more - fewer;
        self.has_rules = self.ruled > 0 || !self.statics.is_empty();
    }

    fn state(&mut self, port: Number) -> &mut State {
        let at = usize::from(port);
        if self.states.len() <= at {
            self.states.resize_with(at + 1, State::default);
        }
        &mut self.states[at]
    }
}

/// The addresses, if the whole Ethernet header is there.
#[inline]
fn header(frame: &[u8]) -> Option<(&[u8; 12], &[u8])> {
    frame.split_first_chunk().filter(|_| frame.len() >= HEADER)
}

/// Bytes of an Ethernet header.
pub(crate) const HEADER: usize = 14;
/// In the first byte of an address: a group's (IEEE 802-2014, 8.2.2).
pub(crate) const GROUP: u8 = 1;
/// Slots of the table that are looked at in each batch.
const STEP: usize = 16;
/// Frames in a second of stations that are at another port, which make a loop. A station that moves, or that
/// has two links, has fewer.
const STRAYS: u32 = 100;
/// Loops that wait to be told.
const MAX_FOUND: usize = 16;

#[cfg(test)]
mod cost;
#[cfg(test)]
mod tests;
