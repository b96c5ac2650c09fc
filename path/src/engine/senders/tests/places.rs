//! Frames that are copied right to where they are sent from become what others become.

use std::ops::Range;

use vnplug_frame::lock::SourceLock;
use vnplug_ring::control::Segments;
use vnplug_ring::layout::flags::OFFLOAD;
use vnplug_ring::offload::{Offload, flags, gso};

use super::*;

/// A link that keeps what it sends, five frames between two flushes.
#[derive(Default)]
struct Kept {
    /// There is a place for a frame; those in it say where they lie.
    has_place: bool,
    takes_offload: bool,
    place: Vec<u8>,
    waiting: usize,
    sent: Vec<(Vec<u8>, Offload)>,
    placed: usize,
}

impl Transmitter for Kept {
    fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        // What was there before is another frame's.
        self.place.resize(len.max(self.place.len()), 0xee);
        (self.has_place && self.waiting < 5).then(|| &mut self.place[..len])
    }

    fn placed(&mut self, frame: Range<usize>, left: &Offload) -> Transmit {
        self.placed += 1;
        let frame = self.place[frame].to_vec();
        self.transmit_offloaded(&frame, left)
    }

    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        self.transmit_offloaded(bytes, &Offload::default())
    }

    fn takes_offload(&self) -> bool {
        self.takes_offload
    }

    fn transmit_offloaded(&mut self, bytes: &[u8], left: &Offload) -> Transmit {
        if self.waiting == 5 {
            return Transmit::Full;
        }
        self.waiting += 1;
        self.sent.push((bytes.to_vec(), *left));
        Transmit::Taken
    }

    fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        let sent = std::mem::take(&mut self.waiting) as u64;
        Flushed {
            sent,
            ..Flushed::default()
        }
    }
}

/// A segment of TCP from this station.
fn tcp(station: u8, payload: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, station, 8, 0, 0x45, 0];
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 1]);
    frame.extend([0x50, 0x18, 4, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|at| at as u8));
    frame
}

/// What a sender of all kinds of frames has sent by a link.
fn sent(mut link: Kept, terms: &Arc<Terms>) -> (Kept, SendCounters) {
    let (mut sender, mut producer, _region) = sender_of(1, 1 << 17, 4096);
    sender.segments = Segments::Merged;
    sender.set_terms(Arc::clone(terms), 0);
    let sum = Offload {
        flags: flags::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        ..Offload::default()
    };
    let cut = Offload {
        gso_type: gso::TCPV4,
        gso_size: 500,
        ..sum
    };
    let lie = Offload {
        csum_start: 2000,
        ..sum
    };
    let none = Offload::default();
    let kinds = [(60, none), (200, sum), (1900, cut), (300, lie), (700, none)];
    for number in 0..40_u8 {
        let (payload, offload) = kinds[usize::from(number) % kinds.len()];
        let frame = tcp(1 + number % 3, payload);
        let flags = if offload == none { 0 } else { OFFLOAD };
        let meta = Meta {
            flags,
            offload,
            ..Meta::default()
        };
        assert_eq!(producer.push(&meta, &frame), Ok(true));
    }
    producer.publish();
    let visit = sender.serve(&mut link, (64, u64::MAX), 0, &mut |_, _| {});
    assert_eq!(visit.unwrap().frames, 40);
    assert_eq!(
        sender.counters.accounted(),
        sender.counters.taken + sender.counters.cut
    );
    (link, sender.counters)
}

#[test]
fn a_frame_that_is_copied_to_its_place_is_judged_cut_and_sent_as_another() {
    let locked = || Terms {
        lock: SourceLock {
            stations: vec![[2, 0, 0, 0, 0, 1]],
            ..SourceLock::default()
        },
        ..Terms::default()
    };
    for (terms, takes_offload) in [
        (Arc::new(Terms::default()), false),
        (Arc::new(Terms::default()), true),
        (Arc::new(locked()), false),
        (Arc::new(locked()), true),
    ] {
        let of = |has_place| {
            let link = Kept {
                has_place,
                takes_offload,
                ..Kept::default()
            };
            sent(link, &terms)
        };
        let ((placed, counters), (copied, others)) = (of(true), of(false));
        assert_eq!(counters, others);
        assert!(placed.sent == copied.sent, "{takes_offload}");
        assert!(
            placed.placed >= 6 && copied.placed == 0,
            "{}",
            placed.placed
        );
        assert_eq!(counters.dropped_offload, 8);
        let is_open = terms.are_open();
        assert_eq!(counters.dropped_station == 0, is_open);
        let wholes = placed.sent.iter().filter(|(_, left)| left.is_super_frame());
        assert_eq!(wholes.count(), if is_open && takes_offload { 8 } else { 0 });
    }
}
