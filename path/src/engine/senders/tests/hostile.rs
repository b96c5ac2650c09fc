//! A sender that lies about its records and writes over them while they are taken.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use vnplug_frame::MAX_BATCH;
use vnplug_frame::lock::SourceLock;
use vnplug_ring::layout::{DATA_OFFSET, HEAD, PAD, RECORD_HEADER, record_size};
use vnplug_ring::offload::Offload;

pub(super) const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(super) const FOREIGN: [u8; 6] = [2, 0, 0, 0, 0, 2];
const LEN: usize = 128;
const CAPACITY: u64 = 1 << 15;
pub(super) const SNAPLEN: u32 = 512;
/// What lies before and behind the ring, in memory that is not the sender's.
pub(super) const CANARY: [u8; 8] = *b"\xcaNARY\xca\xca\xca";

/// A link that sends from where it is copied to, and looks at what it sends.
#[derive(Default)]
pub(super) struct Places {
    bytes: Vec<u8>,
    used: usize,
    lens: Vec<usize>,
    pub(super) seen: Seen,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) sent: u64,
    /// Not sent: another station's by then.
    pub(super) refused: u64,
    /// With another station's address.
    pub(super) of_others: u64,
    /// With bytes that are not the sender's.
    pub(super) foreign: u64,
}

impl Seen {
    pub(super) fn look(&mut self, frame: &[u8]) {
        self.sent += 1;
        self.of_others += u64::from(frame.get(6..12).is_some_and(|it| it != OWN));
        self.foreign += u64::from(frame.windows(8).any(|it| it == CANARY));
    }
}

impl Transmitter for Places {
    fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        let end = self.used + len;
        self.bytes.resize(self.bytes.len().max(end), 0);
        (self.lens.len() < MAX_BATCH).then(|| &mut self.bytes[self.used..end])
    }

    fn placed(&mut self, frame: Range<usize>, _: &Offload) -> Transmit {
        assert_eq!(frame.start, 0, "nothing is left to do with these");
        // As every link; nothing is judged of these.
        if frame.len() < 14 {
            return Transmit::BadLength;
        }
        self.used += frame.len();
        self.lens.push(frame.len());
        Transmit::Taken
    }

    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        match self.place(bytes.len()) {
            Some(place) => place.copy_from_slice(bytes),
            None => return Transmit::Full,
        }
        self.placed(0..bytes.len(), &Offload::default())
    }

    fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        let (mut at, sent) = (0, self.lens.len() as u64);
        for len in self.lens.drain(..) {
            self.seen.look(&self.bytes[at..at + len]);
            at += len;
        }
        self.used = 0;
        Flushed {
            sent,
            ..Flushed::default()
        }
    }
}

/// Memory that is full of canaries.
pub(super) fn canaries(bytes: u64) -> Region {
    let all = Region::heap(bytes);
    for at in (0..all.len() / 8 * 8).step_by(8) {
        all.write(at, &CANARY);
    }
    all
}

/// The terms of who may send as its own station alone.
pub(super) fn locked() -> Arc<Terms> {
    let lock = SourceLock {
        stations: vec![OWN],
        ..SourceLock::default()
    };
    Arc::new(Terms {
        lock,
        ..Terms::default()
    })
}

/// Of its transmit ring.
pub(super) fn geometry(capacity: u64) -> Geometry {
    Geometry {
        capacity,
        snaplen: SNAPLEN,
        link_type: 1,
        epoch: 256,
        port: 1,
        queue: 0,
    }
}

/// Does something while another thread writes again and again, whatever becomes of it.
pub(super) fn while_written<T>(mut writes: impl FnMut() + Send, does: impl FnOnce() -> T) -> T {
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (over, runs) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (is_over, runs) = (&over, &runs);
        scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                writes();
                runs.store(true, Ordering::Relaxed);
            }
        });
        let _over = Over(&over);
        while !runs.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        does()
    })
}

pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn throw(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// How the records are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// As the product does.
    Checked,
    /// Lengths are believed: a control.
    Believed,
    /// Judged where they lie, then copied: a control.
    JudgedInPlace,
}

/// Takes `records` of a hostile sender; what was seen on the wire, and how often it was caught in a lie.
fn attack(records: u64, taken: Taken) -> (Seen, u64) {
    let all = canaries(3 * ring_size(CAPACITY));
    let len = ring_size(CAPACITY);
    let ring = all.part(len, len).unwrap();
    ring.clear(0, len);
    let terms = locked();
    let size = record_size(LEN as u32);
    let slots = CAPACITY / size;
    let (mut link, mut lies) = (Places::default(), 0);
    // It writes another station's address over its own, or its own, wherever a record may lie.
    let (writer, mut writes) = (ring.clone(), Dice(7));
    let writes = move || {
        let at = DATA_OFFSET + writes.throw(slots) * size + RECORD_HEADER + 6;
        writer.write(at, [&OWN, &FOREIGN][writes.throw(2) as usize]);
    };
    while_written(writes, || {
        let mut frame = [7; LEN];
        frame[6..12].copy_from_slice(&OWN);
        let (mut done, mut dice) = (0, Dice(11));
        'again: while done < records {
            let intake = Intake::create(ring.clone(), geometry(CAPACITY)).unwrap();
            let mut producer = Producer::attach(ring.clone()).unwrap();
            let mut sender = Sender::new(1, intake, None, None);
            sender.set_terms(Arc::clone(&terms), 0);
            while done < records {
                let first = ring.load_u64(HEAD, Ordering::Relaxed);
                let count = 1 + dice.throw(64);
                for _ in 0..count {
                    if producer.push(&Meta::default(), &frame) != Ok(true) {
                        break;
                    }
                }
                producer.publish();
                done += count;
                // One of them has a length that is a lie, or the ring's head is one.
                let slot = (first % CAPACITY / size + dice.throw(count)) % slots;
                let at = DATA_OFFSET + slot * size;
                let lens = [
                    0,
                    LEN as u32 + 1,
                    SNAPLEN,
                    SNAPLEN + 1,
                    CAPACITY as u32,
                    u32::MAX - 1,
                    PAD,
                    dice.throw(1 << 16) as u32,
                ];
                match dice.throw(16) {
                    it @ 0..8 => ring.store_u32(at, lens[it as usize], Ordering::Relaxed),
                    8 => ring.store_u64(HEAD, dice.throw(u64::MAX), Ordering::Release),
                    _ => {}
                }
                let went = match taken {
                    Taken::Checked => sender
                        .serve(&mut link, (MAX_BATCH, u64::MAX / 2), 0, &mut |_, _| {})
                        .map(drop),
                    Taken::Believed => {
                        let len = u64::from(ring.load_u32(at, Ordering::Relaxed)).min(2 * CAPACITY);
                        let mut copy = vec![0; len as usize];
                        let from = ring_size(CAPACITY) + at + RECORD_HEADER;
                        all.read(from.min(all.len() - len), &mut copy);
                        link.seen.look(&copy);
                        sender
                            .serve(&mut link, (MAX_BATCH, u64::MAX / 2), 0, &mut |_, _| {})
                            .map(drop)
                    }
                    Taken::JudgedInPlace => {
                        let places = (0..count).map(|it| {
                            let slot = (first % CAPACITY / size + it) % slots;
                            DATA_OFFSET + slot * size + RECORD_HEADER
                        });
                        // The batch is judged, and then sent.
                        let judged = places.filter(|place| {
                            let mut header = [0; 14];
                            ring.read(*place, &mut header);
                            terms.judge(&header).is_ok()
                        });
                        for place in judged.collect::<Vec<_>>() {
                            let mut copy = [0; LEN];
                            ring.read(place, &mut copy);
                            link.seen.look(&copy);
                        }
                        sender
                            .serve(&mut link, (MAX_BATCH, u64::MAX / 2), 0, &mut |_, _| {})
                            .map(drop)
                    }
                };
                if went.is_err() {
                    lies += 1;
                    link.seen.refused += sender.counters.dropped_station;
                    continue 'again;
                }
            }
            link.seen.refused += sender.counters.dropped_station;
        }
    });
    (link.seen, lies)
}

#[test]
fn lies_and_headers_that_are_written_over_bring_nothing_foreign_on_the_wire() {
    const RECORDS: u64 = 10_000_000;
    let (seen, lies) = attack(RECORDS, Taken::Checked);
    eprintln!("{RECORDS} records: {seen:?}, {lies} times caught");
    assert_eq!((seen.of_others, seen.foreign), (0, 0));
    let least = [seen.sent / 20, seen.refused, lies].into_iter().min();
    assert!(least >= Some(RECORDS / 100_000), "{seen:?} {lies}");
    // The controls.
    assert!(attack(100_000, Taken::Believed).0.foreign > 0);
    let judged = (0..50).any(|_| attack(100_000, Taken::JudgedInPlace).0.of_others > 0);
    assert!(
        judged,
        "no header was ever written over between judging and sending"
    );
}
