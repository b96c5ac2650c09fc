//! Any traffic, merged and cut again, is the same traffic: each frame byte for byte, each flow in its order.

use std::collections::HashMap;

use super::*;

/// A flow that sends.
pub(super) struct Flow {
    recipe: Recipe,
    mss: usize,
    /// Segments that come late.
    late: Vec<Recipe>,
}

pub(super) fn flow(dice: &mut impl FnMut(usize) -> usize, source: u8) -> Flow {
    Flow {
        recipe: Recipe {
            tags: [0, 0, 1, 2][dice(4)],
            is_ipv6: dice(2) == 1,
            source,
            ports: dice(1 << 30) as u32,
            seq: u32::MAX - dice(20_000) as u32,
            id: dice(1 << 16) as u16,
            fragment: [0x4000, 0][dice(2)],
            stamp: dice(2) as u32,
            ..PLAIN
        },
        mss: [8, 33, 100, 100, 536][dice(5)],
        late: Vec::new(),
    }
}

impl Flow {
    /// The next segment of it, or something that happens to flows.
    pub(super) fn next(
        &mut self,
        dice: &mut impl FnMut(usize) -> usize,
    ) -> Option<(Vec<u8>, Option<Offload>)> {
        if dice(30) == 0
            && let Some(late) = self.late.pop()
        {
            return Some((frame(&late), None));
        }
        let mut it = self.recipe;
        it.len = self.mss;
        let mut odd = None;
        match dice(120) {
            0 => it.len = 1 + dice(self.mss),
            1 => it.flags |= flag::PSH,
            2 => it.flags |= flag::FIN,
            3 => it.flags |= flag::RST,
            4 => it.flags |= flag::URG,
            5 => it.flags |= flag::CWR,
            6 => it.flags |= flag::ECE,
            7 => it.tos = 3,
            8 => it.options = &[1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2],
            9 => it.len = 0,
            10 => it.window = 0,
            // A keep-alive.
            11 => (it.seq, it.len) = (it.seq.wrapping_sub(1), dice(2)),
            12 => it.ack = it.ack.wrapping_add(100),
            13 => it.id = it.id.wrapping_add(dice(3) as u16),
            14 => it.ttl -= 1,
            15 => it.fragment = 0x2000,
            16 => it.reserved = dice(16) as u8,
            17 => it.len += 5,
            18..=23 => odd = Some(dice(1 << 20)),
            _ => {}
        }
        let end = it.seq.wrapping_add(it.len as u32);
        (self.recipe.seq, self.recipe.id) = (end, it.id.wrapping_add(1));
        // What is said of both ends goes on.
        (self.recipe.ack, self.recipe.stamp) = (it.ack, it.stamp);
        self.recipe.fill = it.fill.wrapping_add(it.len as u8);
        match dice(60) {
            0 => return None,
            1 => {
                self.late.push(it);
                return None;
            }
            2 => self.recipe.stamp += u32::from(it.stamp > 0),
            _ => {}
        }
        let mut bytes = frame(&it);
        if let Some(odd) = odd {
            match odd % 4 {
                0 => bytes.push(0),
                1 => bytes.truncate(odd / 4 % bytes.len()),
                _ => {
                    let at = odd / 4 % bytes.len();
                    bytes[at] ^= 1 << (odd % 8);
                }
            }
            return Some((bytes, None));
        }
        let left = (dice(8) == 0).then(|| leave(&mut bytes, &it));
        Some((bytes, left))
    }
}

/// What tells flows apart, as a reader sees them: addresses and ports of whatever can be TCP.
pub(super) fn key(frame: &[u8]) -> Vec<u8> {
    match look(frame, frame.len()) {
        Look::Tcp(it) => [it.addresses(), &it.ports()].concat(),
        _ => Vec::new(),
    }
}

/// By flow, its frames in order, each after how many frames of no flow that can be told.
pub(super) type Seen = HashMap<Vec<u8>, Vec<(usize, Vec<u8>)>>;

fn see(seen: &mut Seen, unknown: &mut usize, frame: &[u8]) {
    *unknown += usize::from(matches!(look(frame, frame.len()), Look::Unknown));
    let frames = seen.entry(key(frame)).or_default();
    frames.push((*unknown, frame.to_vec()));
}

/// A checksum that was left to do may come out as 0 or as ones, which are the same number (RFC 1071).
pub(super) fn even(frame: &mut [u8]) {
    let Look::Tcp(it) = look(frame, frame.len()) else {
        return;
    };
    let at = it.transport + 16;
    if frame[at..at + 2] == [0xff, 0xff] {
        frame[at..at + 2].fill(0);
    }
}

#[test]
fn what_is_merged_is_cut_into_the_same_frames() {
    let mut dice = samples::dice(seed("aggregation"));
    let mut aggregator = Aggregator::default();
    let mut pieces = Pieces::default();
    let (mut total, mut merged, mut made) = (0, 0, 0);
    let mut flows: Vec<Flow> = (0..8).map(|nth| flow(&mut dice, nth)).collect();
    // As many segments in each run, as many super-frames in the long one.
    let least = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000_000,
        None => 0,
    };
    while total < 1_000_000 || made < least {
        if dice(20) == 0 {
            let nth = dice(flows.len());
            flows[nth] = flow(&mut dice, nth as u8);
        }
        let mut batch = Vec::new();
        let count = 1 + dice(128);
        while batch.len() < count {
            let nth = dice(flows.len());
            for _ in 0..1 + dice(24) {
                batch.extend(flows[nth].next(&mut dice));
            }
        }
        let limit = 1 + dice(MAX_SEGMENTS);
        let gone = aggregator.run(&all(limit), batch.len(), |at| single(&batch[at], at));
        let (mut before, mut after) = (Seen::new(), Seen::new());
        let mut unknown = 0;
        for (bytes, left) in &batch {
            wire(&mut pieces, bytes, left.as_ref(), &mut |frame| {
                let mut frame = frame.to_vec();
                if left.is_some() {
                    even(&mut frame);
                }
                see(&mut before, &mut unknown, &frame);
            });
        }
        let (mut unknown, mut left) = (0, 0);
        for outcome in aggregator.outcomes() {
            left += 1;
            let (bytes, offload) = match outcome {
                Outcome::Frame(at) => {
                    let (bytes, offload) = &batch[at as usize];
                    (bytes.as_slice(), offload.as_ref())
                }
                Outcome::Made(at, _) => {
                    made += 1;
                    let (bytes, offload) = aggregator.get(at);
                    assert!(bytes.len() <= LONGEST);
                    (bytes, Some(offload))
                }
            };
            wire(&mut pieces, bytes, offload, &mut |frame| {
                let mut frame = frame.to_vec();
                if offload.is_some() {
                    even(&mut frame);
                }
                see(&mut after, &mut unknown, &frame);
            });
        }
        assert_eq!(left + gone, batch.len());
        // A sum that is right as ones was never merged, so it is there as it came.
        assert!(before == after, "{before:?}\n{after:?}");
        total += batch.len();
        merged += gone;
    }
    // Most of it does merge.
    println!("{total} segments, {merged} less in {made} super-frames");
    assert!(merged > total / 3 && made > total / 50);
}

#[test]
fn no_bytes_make_it_panic() {
    let mut dice = samples::dice(seed("merging anything"));
    let mut aggregator = Aggregator::default();
    for _ in 0..5_000 {
        let batch: Vec<_> = (0..16)
            .map(|nth| {
                let recipe = Recipe {
                    is_ipv6: dice(2) == 0,
                    tags: dice(4),
                    seq: nth * 100,
                    id: nth as u16,
                    ..PLAIN
                };
                let mut bytes = frame(&recipe);
                let offload = (dice(3) == 0).then(|| Offload {
                    flags: dice(4) as u8,
                    gso_type: dice(3) as u8,
                    gso_size: dice(300) as u16,
                    csum_start: dice(200) as u16,
                    csum_offset: dice(20) as u16,
                });
                for _ in 0..dice(4) {
                    let at = dice(bytes.len());
                    bytes[at] = dice(256) as u8;
                }
                if dice(4) == 0 {
                    bytes.truncate(dice(bytes.len() + 1));
                }
                (bytes, offload)
            })
            .collect();
        let gone = aggregator.run(&all(20), batch.len(), |at| single(&batch[at], at));
        assert_eq!(aggregator.outcomes().count() + gone, batch.len());
    }
}
