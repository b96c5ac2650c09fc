//! A guest of whose frames and headers little is true: each frame is given to whom it is for, cut and summed as its header
//! says, or it is dropped and counted; nothing else comes of it, and the switch goes on.

use vnplug_frame::offload::{Pieces, work};
use vnplug_frame::witness::seed;

use super::*;

#[path = "../../../frame/src/offload/hostile.rs"]
mod hostile;
#[path = "../../../frame/src/offload/samples.rs"]
mod samples;

/// The frames of the wire that a frame is; none, if what its sender says does not fit it.
fn wire(frame: &[u8], offload: &Offload) -> Vec<Vec<u8>> {
    let len = frame.len() as u32;
    let mut pieces = Pieces::default();
    let range = match work(frame, len, offload) {
        Ok(None) => pieces.keep(frame, len),
        Ok(Some(work)) => pieces.make(frame, len, &work),
        Err(_) => return Vec::new(),
    };
    let whole = |at| {
        let piece = pieces.get(at, frame);
        [piece.head, piece.body].concat()
    };
    range.map(whole).collect()
}

#[test]
fn each_frame_of_a_guest_that_lies_is_given_or_counted() {
    let mut dice = samples::dice(seed("a guest that lies"));
    for served in [Served::here(), Served::alone()] {
        let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
        // All is for it alone.
        other.send(&frame(1, 2, 0));
        assert_eq!(sender.next().1, frame(1, 2, 0));
        let ends = &frame(2, 1, 0)[..12];
        let (mut cut, mut lies, mut dropped, mut left) = (0, 0, 0, 0);
        for number in 1..=FRAMES {
            let mut it = hostile::hostile(&mut dice);
            if number % 4 == 0 {
                // As a capture has it.
                it.offload = Offload::default();
            }
            let len = it.frame.len().min(ends.len());
            it.frame[..len].copy_from_slice(&ends[..len]);
            let due = wire(&it.frame, &it.offload);
            if due.len() > MOST {
                continue;
            }
            sender.send_offloaded(&it.frame, &it.offload);
            // What comes behind it says that it was forwarded, or was not.
            let mark = frame(2, 1, number);
            sender.send(&mark);
            let mut came = Vec::new();
            loop {
                let (header, bytes) = other.next();
                if bytes == mark {
                    break;
                }
                assert_eq!(header[..2], [0, 0], "nothing is left to do");
                came.push(bytes);
            }
            lies += usize::from(due.is_empty());
            if came.is_empty() {
                dropped += 1;
                continue;
            }
            assert!(came == due, "{it:02x?}\n{came:02x?}\n{due:02x?}");
            cut += usize::from(due.len() > 1);
            left += usize::from(came[0] == it.frame);
        }
        println!(
            "{cut} were cut, {left} left as they were, {dropped} dropped, of them {lies} for what they said"
        );
        let faults = ["offload", "chain", "short", "long"];
        let faults = faults.map(|it| served.count(&format!("in_dropped_{it}")));
        assert_eq!(faults.iter().sum::<u64>(), dropped, "{faults:?}");
        assert!(faults[0] >= lies as u64 / 2, "{faults:?} {lies}");
        let least = FRAMES as usize / 50;
        assert!(cut > least && left > 5 * least && lies > 5 * least);
        served.check_alive();
    }
}

/// Frames by each kind of switch.
const FRAMES: u32 = 2_000;
/// Packets of one frame that the other guest has buffers for.
const MOST: usize = 40;
