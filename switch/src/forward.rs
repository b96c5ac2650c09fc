//! Which ports a frame is due to.
//!
//! Every frame that enters is exactly one of unicast, flooded, consumed or dropped
//! ([`Counters::accounted`]). Of the frame only the two addresses and the EtherType are read. A
//! switch without VLANs is transparent: tagged frames, and the groups that IEEE 802.1D reserves for
//! bridges, pass like any other, and the switch sends no frame of its own.

use std::ops::Range;

use crate::table::{Key, Learned, Limits, Table};

/// A port's number. 1 is the first.
pub type Number = u16;

/// Where frames come from that the host's own programs send onto the switch: no port of it.
pub const HOST: Number = 0;

/// The most ports that a switch may have.
pub const MAX_PORTS: usize = 4096;

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

/// What became of the frames that entered, and of the copies that were due.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames that entered.
    pub entered: u64,
    /// For one port, where the station is known to be.
    pub unicast: u64,
    /// For all other ports: a group's address, or a station that is not known.
    pub flooded: u64,
    /// For nobody: the station is where the frame came from, or there is no other port.
    pub consumed: u64,
    /// Dropped: shorter than an Ethernet header.
    pub dropped_short: u64,
    /// Dropped: longer than the switch takes.
    pub dropped_long: u64,
    /// Dropped: what is said to be left to do with it (a virtio-net header) does not fit it.
    pub dropped_offload: u64,
    /// Dropped: the descriptors of a guest's ring that should have it make no sense.
    pub dropped_chain: u64,
    /// Dropped: a group's address as the source.
    pub dropped_source: u64,
    /// Copies that were due to ports.
    pub due: u64,
    /// Of these, what super-frames became beyond one packet for each port.
    pub cut: u64,
    /// Of these, copies that were due to ports with rings, which count what became of them.
    pub rings: u64,
    /// Of these, copies that went into the port's way out.
    pub enqueued: u64,
    /// Of these, copies that were dropped because the port's way out was full.
    pub dropped_full: u64,
    /// Of these, copies that were dropped because nobody was at the port's other end.
    pub dropped_gone: u64,
    /// Of these, copies that were dropped because they are longer than the far end can carry.
    pub dropped_too_long: u64,
    /// Addresses that were not learned because the port, or the table, has as many as it may.
    pub unlearned: u64,
    /// Times a station moved from one port to another.
    pub moves: u64,
    /// Times one was heard at another port too soon to move.
    pub moves_held: u64,
}

impl Counters {
    /// Frames whose fate is counted: `entered`, or we have a bug.
    pub fn accounted(&self) -> u64 {
        self.unicast
            + self.flooded
            + self.consumed
            + self.dropped_short
            + self.dropped_long
            + self.dropped_offload
            + self.dropped_chain
            + self.dropped_source
    }

    /// Copies whose fate is counted: `due`, or we have a bug.
    pub fn accounted_copies(&self) -> u64 {
        self.rings + self.enqueued + self.dropped_full + self.dropped_gone + self.dropped_too_long
    }

    /// The counters with their public names.
    pub fn named(&self) -> Vec<(String, u64)> {
        let Self {
            entered,
            unicast,
            flooded,
            consumed,
            dropped_short,
            dropped_long,
            dropped_offload,
            dropped_chain,
            dropped_source,
            due,
            cut,
            rings,
            enqueued,
            dropped_full,
            dropped_gone,
            dropped_too_long,
            unlearned,
            moves,
            moves_held,
        } = *self;
        [
            ("entered", entered),
            ("unicast", unicast),
            ("flooded", flooded),
            ("consumed", consumed),
            ("in_dropped_short", dropped_short),
            ("in_dropped_long", dropped_long),
            ("in_dropped_offload", dropped_offload),
            ("in_dropped_chain", dropped_chain),
            ("in_dropped_source", dropped_source),
            ("due", due),
            ("out_cut", cut),
            ("out_rings", rings),
            ("out_enqueued", enqueued),
            ("out_dropped_full", dropped_full),
            ("out_dropped_gone", dropped_gone),
            ("out_dropped_long", dropped_too_long),
            ("unlearned", unlearned),
            ("moves", moves),
            ("moves_held", moves_held),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }
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
    /// The ports that there are, in order.
    ports: Vec<Number>,
    /// The ports that the frames of this batch are due to, one frame's after another's.
    dues: Vec<Number>,
    /// The last source that was learned, and when.
    last: Option<(Key, Number, u32)>,
}

impl Forwarder {
    /// Without ports.
    pub fn new(limits: Limits) -> Self {
        Self {
            table: Table::new(limits),
            is_hub: false,
            counters: Counters::default(),
            ports: Vec::new(),
            dues: Vec::new(),
            last: None,
        }
    }

    /// A port is there.
    pub fn add(&mut self, port: Number) {
        if let Err(at) = self.ports.binary_search(&port) {
            self.ports.insert(at, port);
        }
    }

    /// A port is gone, and its stations are forgotten.
    pub fn remove(&mut self, port: Number) {
        if let Ok(at) = self.ports.binary_search(&port) {
            self.ports.remove(at);
        }
        self.table.forget(port);
        self.last = None;
    }

    /// The ports that there are, in order.
    pub fn ports(&self) -> &[Number] {
        &self.ports
    }

    /// Forgets what the frames of the batch before were due to.
    pub fn begin(&mut self, now_s: u32) {
        self.dues.clear();
        self.table.sweep(now_s, STEP);
    }

    /// The ports that a frame is due to.
    #[inline]
    pub fn due(&self, to: Range<usize>) -> &[Number] {
        &self.dues[to]
    }

    /// Decides where a frame goes that came from a port; [`due`](Self::due) has the ports.
    #[inline]
    pub fn decide(
        &mut self,
        from: Number,
        frame: &[u8],
        fault: Option<Fault>,
        now_s: u32,
    ) -> Range<usize> {
        let begin = self.dues.len();
        let counters = &mut self.counters;
        counters.entered += 1;
        match fault {
            None => {}
            Some(Fault::Long) => {
                counters.dropped_long += 1;
                return begin..begin;
            }
            Some(Fault::Lie) => {
                counters.dropped_offload += 1;
                return begin..begin;
            }
            Some(Fault::Chain) => {
                counters.dropped_chain += 1;
                return begin..begin;
            }
        }
        // IEEE 802.3-2018, 3.2: destination, source, EtherType.
        let Some((&[d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5], _)) = header(frame) else {
            counters.dropped_short += 1;
            return begin..begin;
        };
        if s0 & GROUP != 0 {
            counters.dropped_source += 1;
            return begin..begin;
        }
        if from != HOST {
            self.learn(Key::new([s0, s1, s2, s3, s4, s5], 0), from, now_s);
        }
        let known = match d0 & GROUP != 0 || self.is_hub {
            true => None,
            false => {
                let key = Key::new([d0, d1, d2, d3, d4, d5], 0);
                self.table.find(key, now_s)
            }
        };
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
        let to = begin..self.dues.len();
        self.counters.due += to.len() as u64;
        to
    }

    #[inline]
    fn learn(&mut self, source: Key, from: Number, now_s: u32) {
        if self.last == Some((source, from, now_s)) {
            return;
        }
        match self.table.learn(source, from, now_s) {
            Learned::Known | Learned::New => self.last = Some((source, from, now_s)),
            Learned::Moved => self.counters.moves += 1,
            Learned::Held => self.counters.moves_held += 1,
            Learned::Full => self.counters.unlearned += 1,
        }
    }
}

/// The addresses, if the whole Ethernet header is there.
#[inline]
fn header(frame: &[u8]) -> Option<(&[u8; 12], &[u8])> {
    frame.split_first_chunk().filter(|_| frame.len() >= HEADER)
}

/// Bytes of an Ethernet header.
const HEADER: usize = 14;
/// In the first byte of an address: a group's (IEEE 802-2014, 8.2.2).
const GROUP: u8 = 1;
/// Slots of the table that are looked at in each batch.
const STEP: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(to: u8, from: u8) -> [u8; 60] {
        let mut frame = [0; 60];
        frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from]);
        frame
    }

    fn switch(ports: &[Number]) -> Forwarder {
        let mut switch = Forwarder::new(Limits::default());
        ports.iter().for_each(|port| switch.add(*port));
        switch.begin(0);
        switch
    }

    fn due(switch: &mut Forwarder, from: Number, frame: &[u8]) -> Vec<Number> {
        let to = switch.decide(from, frame, None, 1);
        switch.due(to).to_vec()
    }

    #[test]
    fn strangers_are_flooded_and_who_was_heard_is_found() {
        let mut it = switch(&[1, 2, 3]);
        assert_eq!(due(&mut it, 1, &frame(9, 8)), [2, 3]);
        assert_eq!(due(&mut it, 2, &frame(8, 9)), [1]);
        assert_eq!(due(&mut it, 1, &frame(9, 8)), [2]);
        // A station behind the port that the frame came from.
        assert_eq!(due(&mut it, 1, &frame(8, 7)), []);
        it.remove(2);
        assert_eq!(due(&mut it, 1, &frame(9, 8)), [3]);
        let counters = it.counters;
        assert_eq!(
            (counters.unicast, counters.flooded, counters.consumed),
            (2, 2, 1)
        );
        assert_eq!((counters.entered, counters.accounted()), (5, 5));
        assert_eq!(counters.due, 5);
    }

    #[test]
    fn groups_and_what_bridges_keep_for_themselves_pass_and_a_hub_floods_all() {
        let mut it = switch(&[1, 2, 3]);
        for group in [
            [0xff; 6],
            [1, 0x80, 0xc2, 0, 0, 0],
            [0x33, 0x33, 0, 0, 0, 1],
        ] {
            let mut frame = frame(0, 8);
            frame[..6].copy_from_slice(&group);
            assert_eq!(due(&mut it, 3, &frame), [1, 2]);
        }
        assert_eq!(due(&mut it, 1, &frame(9, 7)), [2, 3]);
        it.is_hub = true;
        assert_eq!(due(&mut it, 1, &frame(8, 7)), [2, 3]);
    }

    #[test]
    fn the_hosts_own_frames_go_where_they_belong_and_teach_nothing() {
        let mut it = switch(&[1, 2]);
        assert_eq!(due(&mut it, 2, &frame(9, 8)), [1]);
        assert_eq!(due(&mut it, HOST, &frame(8, 7)), [2]);
        assert_eq!(due(&mut it, HOST, &frame(5, 8)), [1, 2]);
        assert_eq!(due(&mut it, 1, &frame(8, 6)), [2]);
        assert_eq!(it.table.len(), 2);
    }

    #[test]
    fn what_is_no_frame_is_dropped_and_teaches_nothing() {
        let mut it = switch(&[1, 2]);
        for len in 0..14 {
            assert_eq!(due(&mut it, 1, &frame(9, 8)[..len]), []);
        }
        let mut group = frame(9, 8);
        group[6] |= 1;
        assert_eq!(due(&mut it, 1, &group), []);
        assert!(
            it.decide(1, &frame(9, 8), Some(Fault::Long), 1).is_empty()
                && it.decide(1, &[], Some(Fault::Lie), 1).is_empty()
        );
        let counters = it.counters;
        assert_eq!(
            (
                counters.dropped_short,
                counters.dropped_source,
                counters.dropped_long,
                counters.dropped_offload
            ),
            (14, 1, 1, 1)
        );
        assert_eq!(counters.accounted(), counters.entered);
        assert!(it.table.is_empty());
        assert_eq!(due(&mut it, 1, &frame(9, 8)[..14]), [2]);
    }

    #[test]
    fn who_is_alone_speaks_to_nobody() {
        let mut it = switch(&[1]);
        assert_eq!(due(&mut it, 1, &frame(9, 8)), []);
        assert_eq!((it.counters.consumed, it.counters.due), (1, 0));
    }
}
