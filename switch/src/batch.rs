//! Frames that entered together, in memory of our own, and what else is known of each.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use vnplug_frame::offload;
use vnplug_os::datagrams::{Inbox, Rest};
use vnplug_ring::offload::Offload;

use crate::forward::{Fault, Number};
use crate::vhost::tail::{BEGIN, LEAST, Place, Tail, Tails};

/// A frame that enters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entered<'a> {
    pub(crate) from: Number,
    /// All of it, or its first [`BEGIN`].
    pub(crate) bytes: &'a [u8],
    /// The rest, which is still where it came from.
    pub(crate) tail: Option<Tail<'a>>,
    /// What is left to be done with it; it fits the frame.
    pub(crate) offload: Option<&'a Offload>,
    /// A card or the kernel found its checksum right. NB: of uplinks alone; nobody who joins is believed that.
    pub(crate) is_valid: bool,
    /// It is not for anybody.
    pub(crate) fault: Option<Fault>,
}

impl Entered<'_> {
    /// Bytes of the whole frame.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() + self.tail.map_or(0, |tail| tail.len())
    }
}

/// The frames of one turn.
#[derive(Debug)]
pub(crate) struct Batch {
    inbox: Inbox,
    notes: Vec<Note>,
    /// Rests that are still where frames came from. There is room for each.
    tails: Tails,
    /// Rests may stay there.
    pub(crate) leaves: bool,
    /// Bytes of the longest frame that is not cut.
    longest: usize,
    /// Whose frames come now.
    from: Number,
    /// Packets that super-frames may become: what cuts them has work for each, at each port.
    packets: usize,
    /// Bytes of all frames, and from how many on no more are taken.
    bytes: usize,
    enough: usize,
}

/// What is known of a frame beside its bytes.
#[derive(Debug, Clone, Copy)]
struct Note {
    from: Number,
    offload: Offload,
    fault: Option<Fault>,
    tail: Option<Place>,
}

impl Batch {
    /// For at most `count` frames, and as many bytes as these have if each is `longest`.
    pub(crate) fn new(count: usize, longest: usize) -> Self {
        Self {
            inbox: Inbox::new(count, longest),
            notes: Vec::with_capacity(count),
            tails: Tails::default(),
            leaves: false,
            longest,
            from: 0,
            packets: 0,
            bytes: 0,
            enough: usize::MAX,
        }
    }

    /// No more frames are taken when there are `enough` bytes.
    pub(crate) fn until(self, enough: usize) -> Self {
        Self { enough, ..self }
    }

    pub(crate) fn clear(&mut self) {
        self.inbox.clear();
        self.notes.clear();
        self.tails.clear();
        self.packets = 0;
        self.bytes = 0;
    }

    pub(crate) fn len(&self) -> usize {
        self.notes.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    /// What comes next is this port's.
    pub(crate) fn sends(&mut self, from: Number) {
        self.from = from;
    }

    /// Bytes of the longest frame that is not cut, Ethernet header included, FCS excluded.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// How many more frames of the longest kind there is room for.
    pub(crate) fn room(&self) -> usize {
        match self.has_enough() {
            true => 0,
            false => self.inbox.room(),
        }
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is room for one more frame of `len` bytes.
    #[inline]
    pub(crate) fn has_room(&self, len: usize) -> bool {
        !self.has_enough() && self.inbox.has_room(len)
    }

    /// It is work enough for a turn.
    #[inline]
    fn has_enough(&self) -> bool {
        self.packets >= MAX_PACKETS || self.bytes >= self.enough
    }

    /// Takes at most `most` datagrams from a socket, each a frame; see [`Inbox::receive`].
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn receive(
        &mut self,
        from: impl AsFd,
        most: usize,
        refuses: bool,
    ) -> io::Result<Rest> {
        let rest = self.inbox.receive(from, most, refuses);
        for at in self.notes.len()..self.inbox.len() {
            self.bytes += self.inbox.get(at).0.len();
            self.notes.push(Note {
                from: self.from,
                offload: Offload::default(),
                fault: self.inbox.get(at).1.then_some(Fault::Long),
                tail: None,
            });
        }
        rest
    }

    /// Forgets the frames from this one on.
    pub(crate) fn truncate(&mut self, len: usize) {
        for at in len..self.len() {
            self.bytes -= self.inbox.get(at).0.len();
        }
        self.inbox.truncate(len);
        self.notes.truncate(len);
    }

    /// Appends a frame of `len` bytes, all of which `fill` writes, with what its sender says is left to
    /// do with it; says whether it is there. It is not if there is [no room](Self::has_room), or if
    /// `fill` says that there is none. One that is too long, or that its offload does not fit, is there to
    /// be counted only.
    #[inline]
    pub(crate) fn push(
        &mut self,
        len: usize,
        offload: Offload,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        self.push_all_or_begin(len, offload, None, fill)
    }

    /// Whether the rest of a frame of `len` bytes stays where it is.
    #[inline]
    pub(crate) fn would_leave(&self, len: usize) -> bool {
        self.leaves && len >= LEAST
    }

    /// As [`push`](Self::push), of a frame of which all but [`BEGIN`] stays where it is if it is long; false
    /// also if the rest is not there. `fill` writes as much of it as it is given.
    #[inline]
    pub(crate) fn push_leaving(
        &mut self,
        len: usize,
        offload: Offload,
        rest: impl FnOnce(&mut Tails) -> Option<Place>,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        let mut tail = None;
        if self.would_leave(len) {
            tail = rest(&mut self.tails);
            if tail.is_none() {
                return false;
            }
        }
        self.push_all_or_begin(len, offload, tail, fill)
    }

    #[inline]
    fn push_all_or_begin(
        &mut self,
        len: usize,
        offload: Offload,
        tail: Option<Place>,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        let most = match offload.is_super_frame() {
            true => MAX_SUPER,
            false => self.longest,
        };
        if len > most {
            return self.push_fault(Fault::Long);
        }
        let copied = match tail {
            None => len,
            Some(_) => BEGIN,
        };
        if !self.has_room(len) || !self.inbox.push(len, |place| fill(&mut place[..copied])) {
            return false;
        }
        self.note(len, offload, tail);
        true
    }

    /// Where the next frame of `len` bytes goes, if there is room.
    #[inline]
    pub(crate) fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        match self.has_enough() {
            true => None,
            false => self.inbox.place(len),
        }
    }

    /// A frame that lies there in that [place](Self::place).
    #[inline]
    pub(crate) fn at_place(&mut self, frame: &Range<usize>) -> &[u8] {
        let place = self.inbox.place(frame.end);
        place.map_or(&[], |place| &place[frame.clone()])
    }

    /// Appends it, of a length that a frame [may](Self::longest) have, with what its sender says is left to do with it.
    #[inline]
    pub(crate) fn placed(&mut self, frame: Range<usize>, offload: Offload) {
        let len = frame.len();
        self.inbox.placed(frame);
        self.note(len, offload, None);
    }

    /// Notes what is known of a frame that was appended.
    #[inline]
    fn note(&mut self, len: usize, offload: Offload, tail: Option<Place>) {
        self.bytes += len;
        self.notes.push(Note {
            from: self.from,
            offload,
            fault: None,
            tail,
        });
        if offload.is_due() {
            self.check(self.notes.len() - 1, len, &offload);
        }
    }

    /// Whether what is left to do with a frame fits it, and makes no packets that are longer than frames may be.
    fn check(&mut self, at: usize, len: usize, offload: &Offload) {
        let mut work = offload::work(self.get(at).bytes, len as u32, offload);
        if work.is_err() && self.notes[at].tail.is_some() {
            // Perhaps its headers are longer.
            self.fetch(at);
            work = offload::work(self.get(at).bytes, len as u32, offload);
        }
        match work {
            Ok(Some(work)) if work.longest() > self.longest => {
                self.notes[at].fault = Some(Fault::Long);
            }
            Ok(work) => self.packets += work.map_or(0, |work| work.packets()),
            Err(_) => self.notes[at].fault = Some(Fault::Lie),
        }
    }

    /// How many frames there are, or were, whose rest is still where they came from.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.tails.len()
    }

    /// Copies the rest of a frame, if it is still where it came from.
    pub(crate) fn fetch(&mut self, at: usize) {
        if let Some(tail) = self.notes[at].tail.take() {
            let bytes = &mut self.inbox.get_mut(at)[BEGIN..];
            self.tails.get(&tail).read(bytes);
        }
    }

    /// Appends a frame that is to be counted only; says whether there was room.
    #[cold]
    pub(crate) fn push_fault(&mut self, fault: Fault) -> bool {
        let fits = self.inbox.push(0, |_| true);
        if fits {
            self.notes.push(Note {
                from: self.from,
                offload: Offload::default(),
                fault: Some(fault),
                tail: None,
            });
        }
        fits
    }

    /// One of them.
    #[inline]
    pub(crate) fn get(&self, at: usize) -> Entered<'_> {
        let Note {
            from,
            ref offload,
            fault,
            ref tail,
        } = self.notes[at];
        let all = self.inbox.get(at).0;
        let tail = tail.as_ref().map(|tail| self.tails.get(tail));
        Entered {
            from,
            // NB: what is behind it was another frame's.
            bytes: if tail.is_some() { &all[..BEGIN] } else { all },
            tail,
            offload: offload.is_due().then_some(offload),
            is_valid: false,
            fault,
        }
    }

    /// All of them, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Entered<'_>> + Clone {
        (0..self.len()).map(|at| self.get(at))
    }
}

/// Packets that the super-frames of one turn become, or those of one more: a full turn of 64 KiB frames has
/// less, at the usual sizes.
const MAX_PACKETS: usize = 1024;
/// Bytes of the longest super-frame: 64 KiB, Ethernet header and tags.
pub(crate) const MAX_SUPER: usize = 66 << 10;

#[cfg(test)]
mod tests {
    use vnplug_ring::offload::{flags, gso};

    use super::*;

    /// A super-frame whose packets have a byte of payload each.
    fn crumbs() -> (Vec<u8>, Offload) {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([
            0x45, 0, 3, 0xe8, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        frame.extend([0; 12]);
        frame.extend([0x50, 0x18, 4, 0, 0, 0, 0, 0]);
        frame.resize(14 + 1000, 7);
        let offload = Offload {
            flags: flags::NEEDS_CSUM,
            gso_type: gso::TCPV4,
            gso_size: 1,
            csum_start: 34,
            csum_offset: 16,
        };
        (frame, offload)
    }

    #[test]
    fn a_turn_is_bounded_by_the_packets_that_its_frames_become() {
        let (frame, offload) = crumbs();
        let mut batch = Batch::new(64, 1514);
        let mut taken = 0;
        while batch.push(frame.len(), offload, |place| {
            place.copy_from_slice(&frame);
            true
        }) {
            taken += 1;
        }
        // 960 packets each: the one that goes beyond is the last.
        assert_eq!((taken, batch.room()), (2, 0));
        assert!(!batch.has_room(60) && batch.iter().all(|it| it.fault.is_none()));
        batch.clear();
        assert!(batch.has_room(60) && batch.room() == 64);
    }

    #[test]
    fn packets_that_a_super_frame_becomes_are_no_longer_than_frames_may_be() {
        let (mut frame, offload) = crumbs();
        frame.resize(14 + 2000, 7);
        frame[16..18].copy_from_slice(&2000_u16.to_be_bytes());
        let mut batch = Batch::new(64, 1514);
        // All in one packet, two that are just not too long, and one byte more.
        for gso_size in [9000, 1960, 1460, 1461] {
            let offload = Offload {
                gso_size,
                ..offload
            };
            assert!(batch.push(frame.len(), offload, |place| {
                place.copy_from_slice(&frame);
                true
            }));
        }
        let faults: Vec<_> = batch.iter().map(|it| it.fault).collect();
        let long = Some(Fault::Long);
        assert_eq!(faults, [long, long, None, long]);
        assert_eq!(batch.packets, 2);
    }

    #[test]
    fn a_turn_has_enough_when_it_has_so_many_bytes() {
        let mut batch = Batch::new(64, 1514).until(4000);
        let mut taken = 0;
        while batch.push(1000, Offload::default(), |_| true) {
            taken += 1;
        }
        assert_eq!((taken, batch.room()), (4, 0));
        batch.clear();
        assert!(batch.has_room(1000) && batch.room() == 64);
    }

    #[test]
    fn what_is_too_long_or_lied_about_is_there_to_be_counted_only() {
        let mut batch = Batch::new(4, 1514);
        batch.sends(3);
        let lie = Offload {
            flags: flags::NEEDS_CSUM,
            csum_start: 60,
            ..Offload::default()
        };
        let bulk = Offload {
            gso_type: gso::TCPV4,
            gso_size: 1448,
            ..lie
        };
        assert!(batch.push(60, Offload::default(), |place| {
            place.fill(1);
            true
        }));
        assert!(batch.push(60, lie, |_| true));
        assert!(batch.push(1515, Offload::default(), |_| unreachable!()));
        assert!(batch.push(MAX_SUPER + 1, bulk, |_| unreachable!()));
        assert!(!batch.push(60, Offload::default(), |_| true));
        assert!(!batch.push_fault(Fault::Long));
        let faults: Vec<_> = batch.iter().map(|it| it.fault).collect();
        let long = Some(Fault::Long);
        assert_eq!(faults, [None, Some(Fault::Lie), long, long]);
        assert!(batch.iter().all(|it| it.from == 3));
        assert_eq!(batch.get(0).bytes, [1; 60]);
        batch.clear();
        assert!(batch.is_empty() && batch.room() == 4);
    }
}
