//! Frames of which little is true among those that merge: each leaves as it came, and merging makes nothing of them that is
//! not cut into the same bytes again.

use super::model::{Seen, even, flow, key};
use super::*;
use crate::offload::hostile::hostile;

/// What left, by flow and in order, and after how many frames of no flow that can be told.
#[derive(Default)]
struct Wire {
    seen: Seen,
    unknown: usize,
    pieces: Pieces,
}

impl Wire {
    /// The frames of the wire that a frame is, or itself if what its sender says does not fit it.
    fn takes(&mut self, frame: &[u8], offload: Option<&Offload>) {
        // NB: by the frame as it came. A sum may be left to be written wherever its sender likes, also over what says what
        // kind of frame it is.
        self.unknown += usize::from(matches!(look(frame, frame.len()), Look::Unknown));
        let frames = self.seen.entry(key(frame)).or_default();
        let fits = offload.is_none_or(|it| work(frame, frame.len() as u32, it).is_ok());
        let offload = offload.filter(|_| fits);
        wire(&mut self.pieces, frame, offload, &mut |frame| {
            let mut frame = frame.to_vec();
            even(&mut frame);
            frames.push((self.unknown, frame));
        });
    }
}

#[test]
fn hostile_frames_leave_as_they_came_and_spoil_no_others() {
    let count = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000_000,
        None => 50_000,
    };
    let mut dice = samples::dice(seed("hostile frames among others"));
    let mut aggregator = Aggregator::default();
    let (mut total, mut strange, mut merged, mut refused) = (0, 0, 0, 0);
    let mut flows = Vec::new();
    while total < count {
        if flows.is_empty() || dice(16) == 0 {
            flows = (0..4).map(|nth| flow(&mut dice, nth)).collect();
        }
        let mut batch = Vec::new();
        for _ in 0..1 + dice(24) {
            if dice(3) == 0 {
                let it = hostile(&mut dice);
                refused +=
                    usize::from(work(&it.frame, it.frame.len() as u32, &it.offload).is_err());
                strange += 1;
                batch.push((it.frame, Some(it.offload)));
                continue;
            }
            let nth = dice(flows.len());
            for _ in 0..1 + dice(12) {
                let next = flows[nth].next(&mut dice);
                batch.extend(next.map(|(bytes, left)| match dice(16) {
                    // One of a flow that says what is not so.
                    0 => (bytes, Some(hostile(&mut dice).offload)),
                    _ => (bytes, left),
                }));
            }
        }
        let limit = 2 + dice(MAX_SEGMENTS - 1);
        let gone = aggregator.run(&all(limit), batch.len(), |at| single(&batch[at], at));
        let mut sides = [Wire::default(), Wire::default()];
        let [before, after] = &mut sides;
        for (bytes, left) in &batch {
            before.takes(bytes, left.as_ref());
        }
        let mut left = 0;
        for outcome in aggregator.outcomes() {
            left += 1;
            match outcome {
                Outcome::Frame(at) => {
                    let (bytes, offload) = &batch[at as usize];
                    after.takes(bytes, offload.as_ref());
                }
                Outcome::Made(at, _) => {
                    let (bytes, offload) = aggregator.get(at);
                    after.takes(bytes, Some(offload));
                }
            }
        }
        assert_eq!(left + gone, batch.len());
        let [before, after] = sides.map(|it| it.seen);
        assert!(before == after, "{before:?}\n{after:?}");
        total += batch.len();
        merged += gone;
    }
    println!(
        "{total} frames, {strange} of them hostile, of which {refused} are refused; {merged} merged"
    );
    assert!(strange > total / 50 && refused > strange / 20 && merged > total / 4);
}
