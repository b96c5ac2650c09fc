//! What a guest leaves to a card that it does not have, segments that a port merges, and ACKs for them.

use std::collections::HashMap;

use vnplug_frame::acks::{Acks, MAX_COPIES};
use vnplug_frame::aggregate::{Aggregator, Limits, MAX_SEGMENTS, Outcome, Single};
use vnplug_frame::offload::checksum::Sum;
use vnplug_frame::offload::{MAX_HEADERS, MAX_PIECES, Pieces, Work, work};
use vnplug_frame::segment::{Look, flag, look};
use vnplug_ring::offload::Offload;

use crate::Dice;

/// Checks it with these bytes: which of both, and what happens.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    match dice.byte() % 2 {
        0 => cut(dice),
        _ => merge(dice),
    }
}

/// A frame with a virtio-net header of which nothing is believed.
fn cut(mut dice: Dice<'_>) {
    let offload = Offload {
        flags: dice.byte(),
        gso_type: dice.byte(),
        gso_size: dice.u16(),
        csum_start: dice.u16(),
        csum_offset: dice.u16(),
    };
    // Some of it may not be there, and some be zeros.
    let (zeros, missing) = (usize::from(dice.u16()), u32::from(dice.byte()));
    let mut frame = dice.0.to_vec();
    frame.resize((frame.len() + zeros).min(LONGEST), 0);
    let wire_len = frame.len() as u32 + missing;
    let work = match work(&frame, wire_len, &offload) {
        Ok(Some(work)) => work,
        Ok(None) => return,
        Err(lie) => return assert!(!lie.to_string().is_empty()),
    };
    let mut pieces = Pieces::default();
    let range = pieces.make(&frame, wire_len, &work);
    assert_eq!(range.len(), work.packets());
    assert!(range.len() <= MAX_PIECES);
    let mut there = 0;
    let mut on_wire = 0;
    for at in range {
        let piece = pieces.get(at, &frame);
        let len = piece.head.len() + piece.body.len();
        assert!(len <= piece.wire_len as usize);
        assert!(!piece.is_summed || len == piece.wire_len as usize);
        match work {
            Work::Sum(_) => {
                let whole = [piece.head, piece.body].concat();
                let differ = whole.iter().zip(&frame).filter(|(one, two)| one != two);
                assert!(whole.len() == frame.len() && differ.count() <= 4);
            }
            Work::Cut(_) => {
                assert!(piece.head.len() <= MAX_HEADERS);
                assert!(piece.wire_len as usize <= work.longest());
                let from = piece.head.len() + there;
                assert_eq!(piece.body, &frame[from..from + piece.body.len()]);
            }
        }
        there += piece.body.len();
        on_wire += piece.wire_len as usize - piece.head.len();
    }
    // All of the payload, and each byte of it once.
    let head = pieces.get(0, &frame).head.len();
    assert_eq!(
        (there, on_wire),
        (frame.len() - head, wire_len as usize - head)
    );
}

/// One direction of a connection.
#[derive(Clone, Copy)]
struct Flow {
    number: u8,
    is_ipv6: bool,
    is_tagged: bool,
    seq: u32,
    ack: u32,
    id: u16,
}

impl Flow {
    /// A segment with right checksums. From the other end, if `is_back`.
    fn segment(&self, is_back: bool, flags: u8, len: usize, fill: u8) -> Vec<u8> {
        let mut frame = vec![2; 12];
        if self.is_tagged {
            frame.extend([0x81, 0, 0, 7]);
        }
        let ends = [(self.number, [0, 80]), (99, [1, self.number])];
        let [from, to] = if is_back { [ends[1], ends[0]] } else { ends };
        let carries = 32 + len as u16;
        let network = frame.len() + 2;
        let addresses = if self.is_ipv6 {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(carries.to_be_bytes());
            frame.extend([6, 64]);
            for (host, _) in [from, to] {
                frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]);
            }
            8..40
        } else {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((20 + carries).to_be_bytes());
            frame.extend(self.id.to_be_bytes());
            frame.extend([0x40, 0, 64, 6, 0, 0, 10, 0, 0, from.0, 10, 0, 0, to.0]);
            let sum = Sum::default().bytes(&frame[network..]).finish();
            frame[network + 10..network + 12].copy_from_slice(&sum);
            12..20
        };
        let transport = frame.len();
        frame.extend([from.1, to.1].concat());
        let (seq, ack) = if is_back {
            (self.ack, self.seq)
        } else {
            (self.seq, self.ack)
        };
        frame.extend([seq.to_be_bytes(), ack.to_be_bytes()].concat());
        frame.extend([
            0x80, flags, 1, 0, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2,
        ]);
        frame.extend((0..len).map(|at| fill.wrapping_add(at as u8)));
        let addresses = network + addresses.start..network + addresses.end;
        let sum = Sum::default()
            .bytes(&frame[addresses])
            .number(u32::from(carries) + 6);
        let sum = sum.bytes(&frame[transport..]).finish();
        frame[transport + 16..transport + 18].copy_from_slice(&sum);
        frame
    }
}

/// Frames in batches: what is merged is cut into the same again, and ACKs are those of segments that were merged.
fn merge(mut dice: Dice<'_>) {
    let mut flows = [0, 1, 2, 3].map(|number| Flow {
        number,
        is_ipv6: number & 1 != 0,
        is_tagged: number & 2 != 0,
        seq: u32::MAX - 5_000,
        ack: 7,
        id: u16::MAX - 10,
    });
    let (mut aggregator, mut acks) = (Aggregator::default(), Acks::default());
    let (mut segments, mut copies) = (0, 0);
    while !dice.is_empty() {
        let limit = 2 + usize::from(dice.byte()) % (MAX_SEGMENTS - 1);
        let count = 1 + usize::from(dice.byte() % 64);
        let mut batch = Vec::with_capacity(count);
        for _ in 0..count {
            let what = dice.byte();
            let flow = &mut flows[usize::from(what & 3)];
            let len = [100, 100, 100, 64, 7, 1, 0, 200][usize::from(what >> 2 & 7)];
            let flags = match what >> 5 {
                7 => dice.byte(),
                6 => flag::ACK | flag::PSH,
                _ => flag::ACK,
            };
            let mut frame = flow.segment(false, flags, len, what);
            match what >> 5 {
                // Something of it is wrong.
                5 => {
                    let at = usize::from(dice.u16()) % frame.len();
                    frame[at] = dice.byte();
                }
                // Lost, or late.
                4 => flow.seq = flow.seq.wrapping_sub(u32::from(dice.byte())),
                _ => {}
            }
            flow.seq = flow.seq.wrapping_add(len as u32);
            flow.id = flow.id.wrapping_add(1);
            batch.push(frame);
        }
        segments += merged(&mut aggregator, &mut acks, limit, &batch);
        for _ in 0..dice.byte() % 4 {
            let mut flow = flows[usize::from(dice.byte() & 3)];
            flow.seq = flow.seq.wrapping_sub(u32::from(dice.u16() % 1_000));
            let frame = flow.segment(true, flag::ACK, usize::from(dice.byte() % 8 / 7), 0);
            copies += expanded(&mut acks, &frame);
        }
        assert!(copies * 2 <= segments, "{copies} for {segments}");
    }
}

/// What leaves of a batch is, cut again, what came. How many segments were merged.
fn merged(aggregator: &mut Aggregator, acks: &mut Acks, limit: usize, batch: &[Vec<u8>]) -> usize {
    let limits = Limits {
        segments: limit,
        ipv4: true,
        ipv6: true,
    };
    let gone = aggregator.run(&limits, batch.len(), |at| Single {
        head: &batch[at],
        body: &[],
        missing: 0,
        offload: None,
        is_valid: false,
    });
    let mut seen = Seen::default();
    let mut due = Seen::default();
    for frame in batch {
        due.see(frame);
    }
    let (mut left, mut made) = (0, 0);
    let mut pieces = Pieces::default();
    for outcome in aggregator.outcomes() {
        left += 1;
        let (frame, size) = match outcome {
            Outcome::Frame(at) => {
                seen.see(&batch[at as usize]);
                (&batch[at as usize][..], None)
            }
            Outcome::Made(at, _) => {
                made += 1;
                let (frame, offload) = aggregator.get(at);
                assert!(frame.len() <= LONGEST);
                let len = frame.len() as u32;
                let Ok(Some(work)) = work(frame, len, offload) else {
                    panic!("{offload:?} is none that is cut");
                };
                assert!(work.packets() <= limit);
                pieces.clear();
                for at in pieces.make(frame, len, &work) {
                    let piece = pieces.get(at, frame);
                    seen.see(&[piece.head, piece.body].concat());
                }
                (frame, Some(offload.gso_size))
            }
        };
        if let Look::Tcp(segment) = look(frame, frame.len()) {
            acks.given(&segment, size);
        }
    }
    assert_eq!(left + gone, batch.len());
    assert_eq!(seen.flows, due.flows);
    gone + made
}

/// Frames of each flow in order, each behind how many of which the flow cannot be told.
#[derive(Default)]
struct Seen {
    flows: HashMap<Vec<u8>, Vec<(usize, Vec<u8>)>>,
    unknown: usize,
}

impl Seen {
    fn see(&mut self, frame: &[u8]) {
        let flow = match look(frame, frame.len()) {
            Look::Tcp(it) => [it.addresses(), &it.ports()].concat(),
            Look::Unknown => {
                self.unknown += 1;
                Vec::new()
            }
            Look::Other => Vec::new(),
        };
        let of_flow = self.flows.entry(flow).or_default();
        of_flow.push((self.unknown, frame.to_vec()));
    }
}

/// The ACKs that go before one are it with other numbers and right sums. How many there are.
fn expanded(acks: &mut Acks, frame: &[u8]) -> usize {
    let mut last = None;
    let added = acks.expand(frame, &Offload::default(), |copy| {
        let (Look::Tcp(own), Look::Tcp(it)) = (look(frame, frame.len()), look(copy, copy.len()))
        else {
            panic!("no ACK: {copy:?}");
        };
        let ack = it.transport + 8;
        let mut same = copy.to_vec();
        same[ack..ack + 4].copy_from_slice(&frame[ack..ack + 4]);
        same[ack + 8..ack + 10].copy_from_slice(&frame[ack + 8..ack + 10]);
        assert_eq!(same, frame);
        let before = |one: u32, other: u32| (other.wrapping_sub(one) as i32) > 0;
        assert!(before(it.ack(), own.ack()));
        assert!(last.is_none_or(|last| before(last, it.ack())));
        last = Some(it.ack());
        let sum = Sum::default().bytes(it.addresses());
        let sum = sum.number(it.tcp().len() as u32 + 6).bytes(it.tcp());
        assert_eq!(sum.finish(), [0, 0]);
        true
    });
    assert!(added <= MAX_COPIES as u64);
    added as usize
}

const LONGEST: usize = 65_535;
