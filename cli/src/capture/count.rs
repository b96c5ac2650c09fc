//! `vnplug count`: how many packets a port delivers, and the proof that none is missing.

use std::path::Path;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use vnplug::{Packet, Port};

use super::parallel;
use super::witness::{Verdict, Witness};
use super::{BeforeDaemon, PortArgs, Sink, Stop};
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

lost: packets this reader was too slow for (its ring was full). What the kernel lost before the
daemon could read it is counted separately. --witness judges the generator's
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
    /// Read with this many threads, each by a ring of its own; a flow stays with one of them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256), conflicts_with_all = ["witness", "cluster", "packets"])]
    threads: u16,
}

struct CountSink {
    json: bool,
    start: Instant,
    now: Tally,
    before: (Instant, Tally),
    lines: u64,
    before_daemon: BeforeDaemon,
    witness: Option<Witness>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    packets: u64,
    wire_bytes: u64,
    lost: u64,
}

impl Count {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        if self.threads > 1 {
            return parallel::count(&self.port, usize::from(self.threads), self.json, socket);
        }
        let mut port = self.port.open(socket)?;
        let start = Instant::now();
        let mut sink = CountSink {
            json: self.json,
            start,
            now: Tally::default(),
            before: (start, Tally::default()),
            lines: 0,
            before_daemon: BeforeDaemon::default(),
            witness: self.witness.then(Witness::default),
        };
        sys::catch_signals();
        let driven = self.port.drive(&mut port, &mut sink);
        // The summary comes whatever ended it, also without the daemon.
        let stop = driven.as_ref().map_or(Stop::Time, |stop| *stop);
        let whole = self.port.gets_everything();
        let verdict = sink.summary(&mut port, whole, stop)?;
        driven?;
        Ok(verdict.map_or(OK, std::process::ExitCode::from))
    }
}

impl Sink for CountSink {
    #[inline]
    fn packet(&mut self, packet: &Packet<'_>) -> Result<(), Failure> {
        self.now.packets += 1;
        self.now.wire_bytes += u64::from(packet.meta.wire_len);
        self.before_daemon.see(packet);
        if let Some(witness) = &mut self.witness {
            witness.feed(packet);
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn tick(&mut self, port: &mut Port) -> Result<(), Failure> {
        if self.before_daemon.marks > 0 {
            self.before_daemon.ask(port);
        }
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
                "lost_before_daemon": self.before_daemon.lost(),
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
            "{head}{total:>8.1} {:>14} {:>12.3} {:>12} {:>16} {:>14}{}{away}\n",
            grouped(packets),
            bits as f64 / 1e6,
            grouped(lost),
            grouped(self.now.packets),
            grouped(self.now.lost),
            self.before_daemon.words(),
        ))
    }
}

impl CountSink {
    /// Prints the last words; the exit code if the witness found something.
    fn summary(&mut self, port: &mut Port, whole: bool, stop: Stop) -> Result<Option<u8>, Failure> {
        let seconds = self.start.elapsed().as_secs_f64();
        let counts = port.counts();
        // Its own counters are enough if the daemon is gone.
        let host = port.stats().ok().and_then(|stats| stats.host);
        if let Some(host) = &host {
            self.before_daemon.hear(port.number(), host);
        }
        let lost = counts.lost;
        let Tally {
            packets,
            wire_bytes,
            ..
        } = self.now;
        let rate = (packets as f64 / seconds).round() as u64;
        let bits = (wire_bytes as f64 * 8.0 / seconds).round() as u64;
        let rings = port.ring_count();
        let witness = self
            .witness
            .as_ref()
            .map(|witness| witness.verdict(whole, stop, rings));
        if self.json {
            let line = json!({
                "summary": true, "seconds": millis(seconds),
                "packets": packets, "bytes": wire_bytes, "captured_bytes": counts.bytes,
                "lost": lost, "lost_before_daemon": self.before_daemon.lost(),
                "source_loss_marks": self.before_daemon.marks, "gaps": counts.gaps, "reopened": counts.reopened,
                "packets_per_second": rate, "bits_per_second": bits,
                "host": host.as_ref().map(stats::to_json),
                "witness": witness.as_ref().map(Verdict::to_json),
            });
            out::raw(&format!("{line}\n"))?;
        } else {
            let mut text = format!(
                "{} packets, {} bytes in {seconds:.3} s: {} packets/s, {:.3} Mbit/s; {} lost{}",
                grouped(packets),
                grouped(wire_bytes),
                grouped(rate),
                bits as f64 / 1e6,
                grouped(lost),
                self.before_daemon.words(),
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

fn millis(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

const LINES_PER_HEAD: u64 = 20;
