//! `vnplug count`: how many packets a port delivers, and the proof that none is missing.

use std::path::Path;
use std::time::Instant;

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Packet, Port};
use vnplug_ring::witness::{Checker, View};

use super::{PortArgs, Sink};
use crate::failure::{Failure, OK, Outcome, WITNESS};
use crate::text::grouped;
use crate::{out, stats, sys};

/// Counts packets, once a second and at the end.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug count host:eth1
  vnplug count host:eth1 -f 'udp port 53' -t 10s --json
  vnplug count host:gen0 -c 1000000 --witness
  vnplug count host:eth1 --cluster ids --balance flow

lost: packets this reader was too slow for (its ring was full). --witness judges the generator's
numbered frames: missing, duplicated, reordered, corrupt; the exit code is then 3. With a filter,
sampling or a cluster it cannot know what is missing and judges the rest.")]
pub(crate) struct Count {
    #[command(flatten)]
    port: PortArgs,
    /// One JSON object per line; the last one is the summary
    #[arg(long)]
    json: bool,
    /// Check the generator's frames
    #[arg(long, conflicts_with = "snaplen")]
    witness: bool,
}

struct CountSink {
    json: bool,
    start: Instant,
    now: Tally,
    before: (Instant, Tally),
    lines: u64,
    checker: Option<Checker>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    packets: u64,
    wire_bytes: u64,
    lost: u64,
}

impl Count {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let mut port = self.port.open(socket)?;
        let view = match self.port.gets_everything() {
            true => View::Whole,
            false => View::Part,
        };
        let start = Instant::now();
        let mut sink = CountSink {
            json: self.json,
            start,
            now: Tally::default(),
            before: (start, Tally::default()),
            lines: 0,
            checker: self.witness.then(|| Checker::new(view)),
        };
        sys::catch_signals();
        let driven = self.port.drive(&mut port, &mut sink);
        // The summary comes whatever ended it, also without the daemon.
        let verdict = sink.summary(&mut port)?;
        driven?;
        Ok(verdict.map_or(OK, std::process::ExitCode::from))
    }
}

impl Sink for CountSink {
    #[inline]
    fn packet(&mut self, packet: &Packet<'_>) -> Result<(), Failure> {
        self.now.packets += 1;
        self.now.wire_bytes += u64::from(packet.meta.wire_len);
        if let Some(checker) = &mut self.checker {
            checker.feed(packet.bytes);
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn tick(&mut self, port: &Port) -> Result<(), Failure> {
        self.now.lost = port.counts().lost;
        let now = Instant::now();
        let (then, before) = self.before;
        let seconds = (now - then).as_secs_f64();
        let total = (now - self.start).as_secs_f64();
        let per_second = |now: u64, before: u64| ((now - before) as f64 / seconds).round() as u64;
        let packets = per_second(self.now.packets, before.packets);
        let bits = per_second(self.now.wire_bytes * 8, before.wire_bytes * 8);
        let lost = self.now.lost - before.lost;
        self.before = (now, self.now);
        if self.json {
            let line = json!({
                "seconds": millis(total),
                "packets": self.now.packets, "bytes": self.now.wire_bytes, "lost": self.now.lost,
                "packets_per_second": packets, "bits_per_second": bits, "lost_now": lost,
                "away": port.is_away(),
            });
            return out::raw(&format!("{line}\n"));
        }
        let head = match self.lines % LINES_PER_HEAD {
            0 => format!(
                "{:>8} {:>14} {:>12} {:>12} {:>16} {:>14}\n",
                "seconds", "packets/s", "Mbit/s", "lost", "packets", "lost in all"
            ),
            _ => String::new(),
        };
        self.lines += 1;
        let away = if port.is_away() {
            "  waiting for the daemon"
        } else {
            ""
        };
        out::raw(&format!(
            "{head}{total:>8.1} {:>14} {:>12.3} {:>12} {:>16} {:>14}{away}\n",
            grouped(packets),
            bits as f64 / 1e6,
            grouped(lost),
            grouped(self.now.packets),
            grouped(self.now.lost),
        ))
    }
}

impl CountSink {
    /// Prints the last words; the exit code if the witness found something.
    fn summary(&mut self, port: &mut Port) -> Result<Option<u8>, Failure> {
        let seconds = self.start.elapsed().as_secs_f64();
        let counts = port.counts();
        // Its own counters are enough if the daemon is gone.
        let host = port.stats().ok().and_then(|stats| stats.host);
        let lost = counts.lost;
        let Tally {
            packets,
            wire_bytes,
            ..
        } = self.now;
        let rate = (packets as f64 / seconds).round() as u64;
        let bits = (wire_bytes as f64 * 8.0 / seconds).round() as u64;
        let witness = self.checker.as_ref().map(Verdict::of);
        if self.json {
            let line = json!({
                "summary": true, "seconds": millis(seconds),
                "packets": packets, "bytes": wire_bytes, "captured_bytes": counts.bytes,
                "lost": lost, "gaps": counts.gaps, "reopened": counts.reopened,
                "packets_per_second": rate, "bits_per_second": bits,
                "host": host.as_ref().map(stats::to_json),
                "witness": witness.as_ref().map(Verdict::to_json),
            });
            out::raw(&format!("{line}\n"))?;
        } else {
            let mut text = format!(
                "{} packets, {} bytes in {seconds:.3} s: {} packets/s, {:.3} Mbit/s; {} lost",
                grouped(packets),
                grouped(wire_bytes),
                grouped(rate),
                bits as f64 / 1e6,
                grouped(lost),
            );
            if counts.gaps > 0 {
                text += &format!(
                    "; {} gaps where the daemon restarted, more may be missing",
                    counts.gaps
                );
            }
            out::line(&text)?;
            if let Some(witness) = &witness {
                out::line(&witness.to_text())?;
            }
        }
        Ok(witness
            .is_some_and(|witness| !witness.is_perfect())
            .then_some(WITNESS))
    }
}

/// What the witness frames prove, over all runs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Verdict {
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
    fn of(checker: &Checker) -> Self {
        let mut verdict = Self {
            corrupt: checker.corrupt(),
            foreign: checker.foreign(),
            ..Self::default()
        };
        for run in checker.runs() {
            let Some(report) = checker.report(run) else {
                continue;
            };
            verdict.runs += 1;
            verdict.received += report.received;
            verdict.missing += report.missing.count;
            verdict.duplicates += report.duplicates;
            verdict.reordered += report.reordered;
            verdict.unjudged += report.unjudged;
            for gap in &report.missing.first {
                verdict
                    .where_missing
                    .push(format!("{}..{}", gap.start, gap.end));
            }
        }
        verdict
    }

    fn is_perfect(&self) -> bool {
        self.received > 0
            && self.missing == 0
            && self.duplicates == 0
            && self.reordered == 0
            && self.corrupt == 0
            && self.unjudged == 0
    }

    fn to_json(&self) -> Value {
        json!({
            "perfect": self.is_perfect(), "runs": self.runs, "received": self.received,
            "missing": self.missing, "duplicates": self.duplicates, "reordered": self.reordered,
            "corrupt": self.corrupt, "unjudged": self.unjudged, "foreign": self.foreign,
            "first_missing": self.where_missing,
        })
    }

    fn to_text(&self) -> String {
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

fn millis(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

const LINES_PER_HEAD: u64 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_no_proof() {
        let verdict = Verdict::of(&Checker::new(View::Whole));
        assert!(!verdict.is_perfect());
        assert!(verdict.to_text().contains("no generator's frame"));
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
