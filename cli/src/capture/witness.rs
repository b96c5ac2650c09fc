//! What `count --witness` proves: each queue's frames in order, all queues together complete.
//!
//! Frames of different queues have no order among them, and a reader that comes or goes meets each
//! queue at another sequence. So disorder and duplicates are judged per queue, and what is missing
//! from the union of all queues, between the last of their first and the first of their last
//! sequences. If the source ended nothing is left in a ring, and the union is judged to its end.

use std::ops::Range;

use serde_json::{Value, json};
use vnplug::Packet;
use vnplug_frame::witness::{Checker, SeqSet, View};

use super::Stop;
use crate::text::grouped;

/// Judges the frames of one port.
#[derive(Debug, Default)]
pub(crate) struct Witness {
    /// Source and queue, and their frames.
    queues: Vec<((u16, u16), Checker)>,
    last: usize,
}

impl Witness {
    /// Takes the next packet.
    #[inline]
    pub(crate) fn feed(&mut self, packet: &Packet<'_>) {
        let key = (packet.meta.source, packet.meta.queue);
        self.checker(key).feed(packet.bytes);
    }

    fn checker(&mut self, key: (u16, u16)) -> &mut Checker {
        // Neighbours are mostly of the same queue.
        if self
            .queues
            .get(self.last)
            .is_none_or(|(known, _)| *known != key)
        {
            self.last = match self.queues.iter().position(|(known, _)| *known == key) {
                Some(at) => at,
                None => {
                    self.queues.push((key, Checker::new(View::Part)));
                    self.queues.len() - 1
                }
            };
        }
        &mut self.queues[self.last].1
    }

    /// What is proven. `whole`: this reader was to get every frame; `rings`: of this many queues.
    pub(crate) fn verdict(&self, whole: bool, stop: Stop, rings: usize) -> Verdict {
        let checkers = || self.queues.iter().map(|(_, checker)| checker);
        let mut verdict = Verdict {
            corrupt: checkers().map(Checker::corrupt).sum(),
            foreign: checkers().map(Checker::foreign).sum(),
            ..Verdict::default()
        };
        let mut runs: Vec<u32> = Vec::new();
        for run in checkers().flat_map(Checker::runs) {
            if !runs.contains(&run) {
                runs.push(run);
            }
        }
        // Packets of a queue that was not heard of yet may wait in its ring.
        let judged = whole && (stop != Stop::Packets || self.queues.len() >= rings);
        for run in runs {
            verdict.add(checkers(), run, judged, stop == Stop::Ended);
        }
        verdict
    }
}

/// What the witness frames prove, over all runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    runs: u64,
    received: u64,
    missing: u64,
    duplicates: u64,
    reordered: u64,
    corrupt: u64,
    unjudged: u64,
    foreign: u64,
    /// The first missing sequences, as text.
    where_missing: Vec<String>,
}

impl Verdict {
    fn add<'a>(
        &mut self,
        queues: impl Iterator<Item = &'a Checker>,
        run: u32,
        judged: bool,
        ended: bool,
    ) {
        let mut union: Option<SeqSet> = None;
        let mut range: Option<Range<u64>> = None;
        let mut merged = 0;
        for checker in queues {
            let (Some(report), Some(set)) = (checker.report(run), checker.set(run)) else {
                continue;
            };
            self.received += report.received;
            self.duplicates += report.duplicates;
            self.reordered += report.reordered;
            self.unjudged += report.unjudged;
            merged += 1;
            let end = report.last.saturating_add(1);
            range = Some(match range {
                None => report.first..end,
                Some(range) if ended => range.start.max(report.first)..range.end.max(end),
                Some(range) => range.start.max(report.first)..range.end.min(end),
            });
            match &mut union {
                None => union = Some(set.clone()),
                Some(union) => self.duplicates += union.merge(set),
            }
        }
        self.runs += 1;
        let (Some(union), Some(range), true) = (union, range, judged) else {
            return;
        };
        // Below the floor nobody remembers which came; of one queue, how many is known.
        let below = union.floor().min(range.end).saturating_sub(range.start);
        match merged {
            1 => self.missing += below.saturating_sub(union.len() - union.known()),
            _ => self.unjudged += below,
        }
        let gaps = union.gaps(range);
        self.missing += gaps.count;
        let first = gaps.first.iter();
        self.where_missing
            .extend(first.map(|gap| format!("{}..{}", gap.start, gap.end)));
    }

    /// Whether everything came that was to come, once, in order.
    pub(crate) fn is_perfect(&self) -> bool {
        self.received > 0
            && self.missing == 0
            && self.duplicates == 0
            && self.reordered == 0
            && self.corrupt == 0
            && self.unjudged == 0
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "perfect": self.is_perfect(), "runs": self.runs, "received": self.received,
            "missing": self.missing, "duplicates": self.duplicates, "reordered": self.reordered,
            "corrupt": self.corrupt, "unjudged": self.unjudged, "foreign": self.foreign,
            "first_missing": self.where_missing,
        })
    }

    pub(crate) fn to_text(&self) -> String {
        if self.received == 0 && self.corrupt == 0 {
            return "witness: no generator's frame was received".to_owned();
        }
        let verdict = if self.is_perfect() {
            "perfect"
        } else {
            "NOT perfect"
        };
        let mut text = format!(
            "witness: {verdict}: {} received, {} missing, {} duplicates, {} reordered, {} corrupt",
            grouped(self.received),
            grouped(self.missing),
            grouped(self.duplicates),
            grouped(self.reordered),
            grouped(self.corrupt),
        );
        for (count, what) in [(self.unjudged, "unjudged"), (self.foreign, "of others")] {
            if count > 0 {
                text += &format!(", {} {what}", grouped(count));
            }
        }
        if !self.where_missing.is_empty() {
            text += &format!("; missing first: {}", self.where_missing.join(" "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use vnplug_frame::witness::{Protocol, Shape, make};

    use super::*;

    #[test]
    fn silence_is_no_proof() {
        let verdict = Witness::default().verdict(true, Stop::Time, 1);
        assert!(!verdict.is_perfect());
        assert!(verdict.to_text().contains("no generator's frame"));
    }

    /// The verdict over these sequences of two queues.
    fn of(queues: [&[u64]; 2], stop: Stop) -> Verdict {
        let shape = Shape {
            len_bytes: 60,
            flow: 0,
            protocol: Protocol::Udp4,
            vlan_tci: None,
        };
        let mut witness = Witness::default();
        for (queue, seqs) in (0..).zip(queues) {
            for &seq in seqs {
                let frame = make(shape, 1, seq).unwrap();
                witness.checker((0, queue)).feed(&frame);
            }
        }
        witness.verdict(true, stop, 2)
    }

    #[test]
    fn queues_have_no_order_among_them_and_are_complete_together() {
        let verdict = of([&[0, 2, 4, 6, 8], &[1, 3, 5]], Stop::Ended);
        assert_eq!((verdict.reordered, verdict.missing), (0, 1), "{verdict:?}");
        let verdict = of([&[0, 2, 4, 6, 8], &[1, 3, 5]], Stop::Time);
        assert!(verdict.is_perfect(), "the slower queue's tail: {verdict:?}");
        let verdict = of([&[4, 6, 8], &[1, 3, 5, 7, 9]], Stop::Time);
        assert!(verdict.is_perfect(), "attached one by one: {verdict:?}");
        let verdict = of([&[0, 2, 6, 8], &[1, 3, 5, 7]], Stop::Time);
        assert_eq!(verdict.where_missing, ["4..5"]);
        let verdict = of([&[0, 4, 2], &[1, 3, 3, 4]], Stop::Time);
        assert_eq!((verdict.reordered, verdict.duplicates), (1, 2));
        let verdict = of([&[0, 2, 4, 6], &[]], Stop::Packets);
        assert_eq!(verdict.missing, 0, "the other queue was not read yet");
    }

    #[test]
    fn every_defect_spoils_the_verdict_and_is_named() {
        let good = || Verdict {
            runs: 1,
            received: 10,
            ..Verdict::default()
        };
        assert!(good().is_perfect());
        for (bad, words) in [
            (
                Verdict {
                    missing: 2,
                    where_missing: vec!["3..5".into()],
                    ..good()
                },
                "missing first: 3..5",
            ),
            (
                Verdict {
                    duplicates: 1,
                    ..good()
                },
                "1 duplicates",
            ),
            (
                Verdict {
                    reordered: 1,
                    ..good()
                },
                "1 reordered",
            ),
            (
                Verdict {
                    corrupt: 1,
                    ..good()
                },
                "1 corrupt",
            ),
            (
                Verdict {
                    unjudged: 1,
                    ..good()
                },
                "1 unjudged",
            ),
        ] {
            assert!(!bad.is_perfect(), "{words}");
            assert!(bad.to_text().contains(words), "{}", bad.to_text());
        }
    }
}
