//! ACKs that are sent are some of those that a receiver of single segments could send.

use super::*;
use crate::offload::samples::{dice, folded};
use crate::segment::{Look, look};
use crate::witness::seed;

fn key() -> Key {
    Key {
        is_ipv6: false,
        tags: [0; MAX_TAGS],
        source: [1; 16],
        target: [2; 16],
        ports: [0, 80, 1, 2],
    }
}

/// A flow whose receiver has acknowledged up to 1000, with a window of 50.
fn flow() -> Flow {
    let mut flow = Flow::new(key(), 0, (0, 1000));
    flow.acknowledged(1000, 50, true, &mut Vec::new());
    assert_eq!(flow.edge, Some(1000));
    flow
}

fn sent(flow: &mut Flow, number: u32, window: u16, is_pure: bool) -> Vec<u32> {
    let mut numbers = Vec::new();
    flow.acknowledged(number, window, is_pure, &mut numbers);
    numbers
}

#[test]
fn an_ack_of_a_super_frame_becomes_one_for_every_two_segments() {
    let mut flow = flow();
    flow.given(1000, 2000, Some(100));
    assert_eq!(sent(&mut flow, 2000, 50, true), [1200, 1400, 1600, 1800]);
    // Of an odd number one is left for the next.
    flow.given(2000, 2500, Some(100));
    assert_eq!(sent(&mut flow, 2500, 50, true), [2200, 2400]);
    flow.given(2500, 3000, Some(100));
    assert_eq!(sent(&mut flow, 3000, 50, true), [2800]);
    // One ACK for several, the last segment of one of them shorter.
    flow.given(3000, 3350, Some(100));
    flow.given(3350, 3750, Some(100));
    assert_eq!(sent(&mut flow, 3750, 50, true), [3200, 3350, 3550]);
    // Segments that came singly are none of ours.
    flow.given(3750, 4000, None);
    assert_eq!(sent(&mut flow, 4000, 50, true), []);
}

#[test]
fn what_says_something_else_is_not_expanded() {
    for (number, window, is_pure) in [
        (2000, 51, true),
        (2000, 50, false),
        (1000, 50, true),
        (999, 50, true),
        (1100, 50, true),
    ] {
        let mut flow = flow();
        flow.given(1000, 2000, Some(100));
        assert_eq!(sent(&mut flow, number, window, is_pure), []);
    }
    // Not twice, whatever was said in between.
    let mut flow = flow();
    flow.given(1000, 2000, Some(100));
    assert_eq!(sent(&mut flow, 1450, 50, true), [1200, 1400]);
    assert_eq!(sent(&mut flow, 1200, 50, true), []);
    assert_eq!(sent(&mut flow, 2000, 50, true).len(), 2);
}

#[test]
fn what_came_behind_a_hole_is_not_expanded() {
    let mut flow = flow();
    flow.given(1500, 2000, Some(100));
    flow.given(1000, 1500, Some(100));
    // There is one ACK for both.
    assert_eq!(sent(&mut flow, 2000, 50, true), []);
    flow.given(2000, 2400, Some(100));
    assert_eq!(sent(&mut flow, 2400, 50, true), [2300]);
    // What it was given again has been acknowledged by duplicates.
    flow.given(2200, 2600, Some(100));
    assert_eq!(sent(&mut flow, 2600, 50, true), []);
}

#[test]
fn what_the_receiver_lost_itself_is_not_expanded() {
    let mut flow = flow();
    flow.given(1000, 3000, Some(100));
    flow.given(3000, 5000, Some(100));
    // It says that it lacks the first part, and gets it again.
    assert_eq!(sent(&mut flow, 1000, 50, true), []);
    flow.given(1000, 3000, Some(100));
    assert_eq!(sent(&mut flow, 5000, 50, true), []);
    flow.given(5000, 5400, Some(100));
    assert_eq!(sent(&mut flow, 5400, 50, true), [5300]);
}

#[test]
fn data_without_its_fin_is_not_acknowledged() {
    let frame = |len: u16, flags: u8| {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
        frame.extend((40 + len).to_be_bytes());
        frame.extend([0, 9, 0x40, 0, 64, 6, 0, 0, 10, 0, 3, 1, 10, 0, 3, 2]);
        frame.extend([0, 80, 0, 81, 0, 0, 3, 0xe8, 0, 0, 0, 1, 0x50, flags]);
        frame.extend([4, 0, 0, 0, 0, 0]);
        frame.resize(frame.len() + usize::from(len), 0);
        frame
    };
    let ack = |number: u32| {
        let mut frame = frame(0, flag::ACK);
        frame[26..34].rotate_left(4);
        frame[34..38].rotate_left(2);
        frame[42..46].copy_from_slice(&number.to_be_bytes());
        frame
    };
    for (end, copies) in [(0, 1), (flag::FIN, 0)] {
        let mut acks = Acks::default();
        // What the switch sees first of it: the segment before, then its ACK.
        let mut first = frame(100, flag::ACK);
        first[38..42].copy_from_slice(&900_u32.to_be_bytes());
        for (bytes, size) in [(first, 100), (frame(400, flag::ACK | end), 100)] {
            let Look::Tcp(segment) = look(&bytes, bytes.len()) else {
                panic!("no segment");
            };
            acks.given(&segment, Some(size));
            if segment.seq() == 900 {
                let bytes = ack(1000);
                let Look::Tcp(segment) = look(&bytes, bytes.len()) else {
                    panic!("no segment");
                };
                assert_eq!(acks.sent(&segment), [0; 0]);
            }
        }
        let bytes = ack(1400 + u32::from(end != 0));
        let Look::Tcp(segment) = look(&bytes, bytes.len()) else {
            panic!("no segment");
        };
        assert_eq!(acks.sent(&segment).len(), copies, "{end}");
    }
}

#[test]
fn numbers_wrap() {
    let start = u32::MAX - 149;
    let mut flow = Flow::new(key(), 0, (start, start));
    flow.acknowledged(start, 50, true, &mut Vec::new());
    flow.given(start, start.wrapping_add(600), Some(100));
    let all = [200, 400].map(|it| start.wrapping_add(it));
    assert_eq!(sent(&mut flow, start.wrapping_add(600), 50, true), all);
}

/// A network, a receiver of segments that does everything right, and one that does what it likes.
struct World {
    flow: Flow,
    /// Ends of segments at which a receiver of single ones has had everything before; all ends, if the
    /// receiver says what it likes: who can tell what it has?
    could: Vec<u32>,
    is_honest: bool,
    /// What it has, in order, and what it has behind holes.
    edge: u32,
    held: Vec<(u32, u32)>,
    /// Where the sender goes on.
    next: u32,
    /// What was lost, to be sent again.
    lost: Vec<(u32, u32)>,
    merged: usize,
    copies: usize,
    /// The number that left last.
    last: Option<u32>,
}

const SIZE: u32 = 100;

impl World {
    fn new(start: u32, is_honest: bool) -> Self {
        Self {
            flow: Flow::new(key(), 0, (start, start)),
            could: vec![start],
            is_honest,
            edge: start,
            held: Vec::new(),
            next: start,
            lost: Vec::new(),
            merged: 0,
            copies: 0,
            last: None,
        }
    }

    /// The receiver is given these bytes, as one frame: both receivers look at them segment by segment.
    fn give(&mut self, start: u32, end: u32, is_merged: bool) {
        self.flow
            .given(start, end, is_merged.then_some(SIZE as u16));
        let mut from = start;
        while from != end {
            let to = from.wrapping_add(SIZE.min(end.wrapping_sub(from)));
            self.merged += usize::from(is_merged);
            self.held.push((from, to));
            let before = self.edge;
            while let Some(at) = self
                .held
                .iter()
                .position(|(from, to)| !is_after(*from, self.edge) && is_after(*to, self.edge))
            {
                self.edge = self.held[at].1;
            }
            self.held.retain(|(_, to)| is_after(*to, self.edge));
            if !self.is_honest {
                self.could.push(to);
            } else if self.edge != before {
                self.could.push(self.edge);
            }
            from = to;
        }
    }

    /// It sends this ACK; the copies before it are looked at.
    fn ack(&mut self, number: u32, window: u16, is_pure: bool, numbers: &mut Vec<u32>) {
        numbers.clear();
        self.flow.acknowledged(number, window, is_pure, numbers);
        assert!(is_pure || numbers.is_empty());
        for copy in numbers.iter() {
            assert!(is_after(number, *copy), "{copy} of {number}");
            assert!(self.last.is_some_and(|last| is_after(*copy, last)));
            assert!(self.could.contains(copy), "{copy} {:?}", self.could);
            self.last = Some(*copy);
        }
        if self.last.is_none_or(|last| is_after(number, last)) {
            self.last = Some(number);
        }
        self.copies += numbers.len();
        assert!(self.copies * 2 <= self.merged);
    }
}

/// One of a million histories: loss, order that changes, frames that come again, and a receiver that is honest
/// or is not.
fn history(dice: &mut impl FnMut(usize) -> usize, numbers: &mut Vec<u32>) -> (usize, usize) {
    let is_honest = dice(3) > 0;
    let mut world = World::new(dice(1 << 32) as u32, is_honest);
    let is_smooth = dice(3) == 0;
    let mut window = 50;
    // The flow was there before.
    world.ack(world.edge, window, true, numbers);
    for _ in 0..4 + dice(12) {
        let segments = 1 + dice(12) as u32;
        let len = segments * SIZE - dice(2) as u32 * dice(SIZE as usize) as u32;
        let (start, end) = (world.next, world.next.wrapping_add(len));
        match if is_smooth { 0 } else { dice(10) } {
            0..=5 => {
                world.give(start, end, segments > 1);
                world.next = end;
            }
            6 => {
                world.lost.push((start, end));
                world.next = end;
            }
            7 => {
                if let Some((start, end)) = world.lost.pop() {
                    world.give(start, end, dice(2) == 0);
                }
            }
            // Again, all or a part.
            8 => world.give(
                start.wrapping_sub(SIZE),
                end.wrapping_sub(SIZE),
                segments > 1,
            ),
            _ => {
                let middle = start.wrapping_add(len / 2);
                world.give(middle, end, dice(2) == 0);
                world.give(start, middle, dice(2) == 0);
                world.next = end;
            }
        }
        if !is_smooth && dice(8) == 0 {
            window += 1;
        }
        if is_honest {
            if is_smooth || dice(3) > 0 {
                let is_pure = world.held.is_empty() && (is_smooth || dice(10) > 0);
                world.ack(world.edge, window, is_pure, numbers);
            }
        } else {
            for _ in 0..dice(4) {
                let number = match dice(5) {
                    // Beyond everything, split, old, anything.
                    0 => world.next.wrapping_add(dice(5000) as u32),
                    1 => world.edge.wrapping_sub(dice(300) as u32),
                    2 => world.edge,
                    3 => world.next,
                    _ => dice(1 << 32) as u32,
                };
                world.ack(number, window, true, numbers);
            }
        }
    }
    (world.copies, world.merged)
}

#[test]
fn a_million_histories_have_no_ack_that_a_plain_receiver_could_not_send() {
    let mut dice = dice(seed("histories of ACKs"));
    let mut numbers = Vec::new();
    let (mut copies, mut merged) = (0, 0);
    for _ in 0..1_000_000 {
        let (more, of) = history(&mut dice, &mut numbers);
        copies += more;
        merged += of;
    }
    println!("{copies} ACKs more for {merged} segments");
    assert!(copies > merged / 10);
}

#[test]
fn a_steady_receiver_has_one_ack_for_two_segments() {
    let mut dice = dice(seed("a steady flow"));
    for _ in 0..100 {
        let mut flow = flow();
        let (mut at, mut segments, mut acks) = (1000_u32, 0, 0);
        for _ in 0..200 {
            let count = 2 + dice(40) as u32;
            flow.given(at, at + count * 100, Some(100));
            at += count * 100;
            acks += 1 + sent(&mut flow, at, 50, true).len();
            segments += count as usize;
            assert!(
                (segments..segments + 2).contains(&(acks * 2)),
                "{acks} {segments}"
            );
        }
    }
}

/// A frame from 10.0.0.2 to 10.0.0.1 or back, its checksums right.
fn frame(is_back: bool, tags: usize, (seq, ack): (u32, u32), flags: u8, payload: usize) -> Vec<u8> {
    let mut frame = vec![2; 12];
    for tag in 0..tags {
        frame.extend([0x81, 0, if is_back { 0xe0 } else { 0 }, tag as u8 + 1]);
    }
    frame.extend([8, 0, 0x45, 0]);
    frame.extend((52 + payload as u16).to_be_bytes());
    frame.extend([0, 7, 0x40, 0, 64, 6, 0, 0]);
    let ends = [[10, 0, 0, 2], [10, 0, 0, 1]];
    let (from, to) = if is_back { (1, 0) } else { (0, 1) };
    frame.extend([ends[from], ends[to]].concat());
    let tcp = frame.len();
    let ports = [[0, 80], [1, 2]];
    frame.extend([ports[from], ports[to]].concat());
    frame.extend([seq.to_be_bytes(), ack.to_be_bytes()].concat());
    frame.extend([
        0x80, flags, 0, 50, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2,
    ]);
    frame.resize(frame.len() + payload, 9);
    let len = (frame.len() - tcp) as u32;
    let sum = !folded(&[
        &frame[tcp - 8..tcp],
        &len.to_be_bytes(),
        &[0, 6],
        &frame[tcp..],
    ]);
    frame[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
    frame
}

fn segment(frame: &[u8]) -> Segment<'_> {
    match look(frame, frame.len()) {
        Look::Tcp(segment) => segment,
        other => panic!("{other:?}"),
    }
}

#[test]
fn frames_of_both_ways_are_one_flow() {
    for tags in 0..=3 {
        let mut acks = Acks::default();
        let data = |acks: &mut Acks, seq: u32| {
            let frame = frame(false, tags, (seq, 5), flag::ACK, 1000);
            acks.given(&segment(&frame), Some(100));
        };
        let back = |acks: &mut Acks, ack: u32, flags: u8, payload: usize| {
            let frame = frame(true, tags, (5, ack), flags, payload);
            acks.sent(&segment(&frame)).len()
        };
        // The first one tells of the flow, and the next ACK where the receiver is.
        assert_eq!(back(&mut acks, 500, flag::ACK, 0), 0);
        data(&mut acks, 0);
        assert_eq!(back(&mut acks, 1000, flag::ACK, 0), 0);
        // Data, and flags that say something else.
        for (nth, (flags, payload, copies)) in [
            (flag::ACK, 0, 4),
            (flag::ACK, 10, 0),
            (flag::ACK | flag::ECE, 0, 0),
            (flag::ACK | flag::FIN, 0, 0),
            (flag::ACK | flag::URG, 0, 0),
            (0, 0, 0),
            (flag::ACK, 0, 9),
            (flag::ACK | flag::RST, 0, 0),
            (flag::ACK, 0, 0),
        ]
        .into_iter()
        .enumerate()
        {
            let seq = 1000 * (nth as u32 + 1);
            data(&mut acks, seq);
            let copies = if tags > MAX_TAGS { 0 } else { copies };
            assert_eq!(
                back(&mut acks, seq + 1000, flags, payload),
                copies,
                "{nth} {tags}"
            );
        }
    }
}

#[test]
fn any_number_of_flows_is_bounded() {
    let mut acks = Acks::default();
    for nth in 0..10_000_u32 {
        let mut data = frame(false, 0, (0, 5), flag::ACK, 1000);
        data[34..38].copy_from_slice(&nth.to_be_bytes());
        acks.given(&segment(&data), Some(100));
    }
    assert_eq!(acks.flows.len(), FLOWS);
    assert!(acks.flows.iter().all(Option::is_some));
}

#[test]
fn a_copy_has_its_number_and_a_checksum_that_is_as_right() {
    let right = |frame: &[u8]| {
        let len = (frame.len() - 34) as u32;
        folded(&[&frame[26..34], &len.to_be_bytes(), &[0, 6], &frame[34..]]) == 0xffff
    };
    let mut dice = dice(seed("copies"));
    for _ in 0..10_000 {
        let ack = |number| frame(true, 0, (5, number), flag::ACK, 0);
        let (from, to) = (dice(1 << 32) as u32, dice(1 << 32) as u32);
        let mut copy = ack(from);
        assert!(right(&copy));
        renumber(&mut copy, 34, to, false);
        assert!(right(&copy));
        assert_eq!(copy[..50], ack(to)[..50]);
        let mut left = ack(from);
        renumber(&mut left, 34, to, true);
        assert_eq!(left[50..], ack(from)[50..]);
    }
}

mod frames;
