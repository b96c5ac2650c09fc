//! What recorders count as lost and no packet tells (`epb_dropcount`): after the last packet, in what
//! the disk did not take, before the daemon, and in classic pcap all of it.
//!
//! `NAME.state` has every loss, those that packets tell among them. A told one ends where its packet is,
//! so what the chunks tell is taken off the losses that reach into their time; what is left is told by
//! nothing else. That is the largest amount that can be taken off, for chunks are taken by their ends, and
//! each takes the loss that ends first.

use std::path::Path;

use vnplug_store::index::Chunk;
use vnplug_store::record::Loss;

use crate::segment::Segment;
use crate::state::RecordingState;

/// Packets that are missing between two times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
    pub(crate) packets: u64,
}

/// What a recording's state counts and its segments do not tell.
///
/// Where older segments are gone (recycled, or moved away), so are the losses before the first packet.
pub(crate) fn untold(state: &RecordingState, segments: &[&Segment]) -> Vec<Missing> {
    let status = &state.status;
    let counted = || status.losses.iter().filter(|loss| counts(loss));
    let totals = totals(state);
    if totals == [0; 3] {
        return Vec::new();
    }
    let wholes = || segments.iter().filter_map(|segment| segment.whole());
    let low = wholes().map(|whole| whole.low_ns).min();
    let high = wholes().map(|whole| whole.high_ns).max();
    let names = segments.iter().filter_map(|segment| segment.name());
    let begins = names.map(|name| name.sequence).min() == Some(0);
    let kept = status.lanes.iter().all(|lane| lane.recycled == 0);
    let is_here = |run: u64| begins || kept && run == status.run.number;

    let mut list: Vec<(&Loss, Missing)> = counted().map(|loss| (loss, missing(loss))).collect();
    list.sort_by_key(|(_, missing)| missing.to_ns);
    let lossy = segments.iter().filter(|segment| {
        let whole = segment.whole();
        whole.is_some_and(|whole| whole.lost > 0)
    });
    let chunks = lossy.flat_map(|segment| segment.chunks().copied());
    let chunks = chunks.filter(|chunk| chunk.lost > 0).collect();
    let mut ring: Vec<&mut Missing> = list
        .iter_mut()
        .filter(|(loss, _)| loss.kind == RING)
        .map(|(_, missing)| missing)
        .collect();
    let older_told = take_off(chunks, &mut ring);

    // What is no longer in the list came before it.
    let older = KINDS.into_iter().zip(totals).map(|(kind, total)| {
        let listed = counted().filter(|loss| loss.kind == kind);
        let older = total.saturating_sub(sum(listed.map(|loss| loss.packets)));
        older.saturating_sub(if kind == RING { older_told } else { 0 })
    });
    let until = counted().map(|loss| missing(loss).from_ns).min().or(high);
    let older = until.filter(|_| is_here(1)).map(|to_ns| Missing {
        from_ns: low.unwrap_or(to_ns).min(to_ns),
        to_ns,
        packets: sum(older),
    });
    let low = low.unwrap_or(0);
    let kept = list.into_iter().filter_map(|(loss, missing)| {
        let from_ns = match is_here(loss.run) {
            true => missing.from_ns,
            false => missing.from_ns.max(low),
        };
        (from_ns <= missing.to_ns).then_some(Missing { from_ns, ..missing })
    });
    let all = kept.chain(older);
    all.filter(|missing| missing.packets > 0).collect()
}

/// Takes off the losses, which are sorted by their ends, what chunks tell; what none of them had.
fn take_off(mut chunks: Vec<Chunk>, losses: &mut [&mut Missing]) -> u64 {
    chunks.sort_by_key(|chunk| chunk.high_ns);
    let mut rest = 0;
    for chunk in chunks {
        let mut told = chunk.lost;
        let from_ns = chunk.low_ns.saturating_sub(LATE_NS);
        let first = losses.partition_point(|loss| loss.to_ns < from_ns);
        for loss in losses[first..].iter_mut() {
            if told == 0 {
                break;
            }
            if loss.from_ns <= chunk.high_ns {
                let off = told.min(loss.packets);
                loss.packets -= off;
                told -= off;
            }
        }
        rest = told.saturating_add(rest);
    }
    rest
}

/// Whether a segment is of a recording: one in a directory without a state is of those of its name.
pub(crate) fn is_of(segment: &Segment, state: &RecordingState, states: &[RecordingState]) -> bool {
    let Some(name) = segment.name() else {
        return false;
    };
    let directory = segment.path().parent().unwrap_or(Path::new(""));
    let of_name = |state: &&RecordingState| state.status.recording == name.recording;
    of_name(&state)
        && (state.is_in(directory)
            || !states
                .iter()
                .filter(of_name)
                .any(|other| other.is_in(directory)))
}

/// Losses of the kind `unknown` are none: their packets may be there.
fn counts(loss: &Loss) -> bool {
    KINDS.contains(&loss.kind.as_str()) && loss.to_ns > 0
}

/// All that was ever lost, of each kind.
fn totals(state: &RecordingState) -> [u64; 3] {
    let (now, before) = (&state.status, &state.status.earlier);
    [
        now.lost_ring.saturating_add(before.lost_ring),
        now.lost_disk.saturating_add(before.lost_disk),
        now.lost_source.saturating_add(before.lost_source),
    ]
}

/// A file may say any number.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

fn missing(loss: &Loss) -> Missing {
    // A time that cannot be read is 0.
    let from_ns = match loss.from_ns {
        0 => loss.to_ns,
        from_ns => from_ns.min(loss.to_ns),
    };
    Missing {
        from_ns,
        to_ns: loss.to_ns,
        packets: loss.packets,
    }
}

const RING: &str = "ring";
/// In the order of [`totals`].
const KINDS: [&str; 3] = [RING, "disk", "source"];
/// The loss before a duplicate, which is left out, is told by the next packet.
const LATE_NS: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_packets_tell_is_taken_off_once() {
        let chunk = |low_ns, high_ns, lost| Chunk {
            low_ns,
            high_ns,
            lost,
            ..Chunk::default()
        };
        let s = LATE_NS;
        let mut losses = [
            (10 * s, 11 * s, 5),
            (20 * s, 21 * s, 7),
            (21 * s, 60 * s, 9),
        ]
        .map(|(from_ns, to_ns, packets)| Missing {
            from_ns,
            to_ns,
            packets,
        });
        let [a, b, c] = &mut losses;
        // The wide chunk stands first in the files and tells the second loss.
        let chunks = vec![
            chunk(5 * s, 30 * s, 7),
            chunk(9 * s, 12 * s, 5),
            chunk(0, s, 3),
        ];
        assert_eq!(take_off(chunks, &mut [a, b, c]), 3);
        assert_eq!(losses.map(|loss| loss.packets), [0, 0, 9]);
    }
}
