//! `vnplug replay`: recorded frames back onto a wire, with their gaps or at a rate.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use serde_json::json;
use vnplug_store::read::ReadError;
use vnplug_store::replay::{
    Counted, Exit, Monotonic, Order, Outlet, Pace, Refused, Report, Snapped, Spread, Wire, files,
    play,
};

use crate::extract::keys;
use crate::failure::{Failure, OK, Outcome};
use crate::text::{self, escape, grouped};
use crate::{out, sys};

/// Sends the frames of capture files, with their recorded gaps or at a rate.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug replay trace.pcapng --to veth0
  vnplug replay trace.pcapng --to veth0 --speed 10 --max-gap 1s
  vnplug replay /data/recording --to port:lab --rate 100Mbps
  vnplug replay trace.pcap --to veth0 --top-speed --loop 100 --json

A directory stands for the recording in it. Sending by an interface needs CAP_NET_RAW; sending by the
daemon needs a grant (docs/vnplugd.md). Frames that cannot be sent are left out and counted. What the
accuracy is, and what is measured: docs/replay.md.")]
pub(crate) struct Replay {
    /// Capture files (pcap, pcapng) or directories with segments, played one after the other
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Where to: an interface, or port:DEVICE for a device of the daemon (host:… is one, too)
    #[arg(long, value_name = "IFACE|port:DEVICE", value_parser = target)]
    to: Target,
    /// This many times as fast as recorded
    #[arg(long, value_name = "X", value_parser = speed)]
    speed: Option<f64>,
    /// Cut recorded gaps that are longer
    #[arg(long, value_name = "TIME", value_parser = text::duration, conflicts_with_all = ["rate", "top_speed"])]
    max_gap: Option<std::time::Duration>,
    /// A steady rate instead: frames per second (5000, 5kpps) or bits (100Mbps), of frames without FCS
    #[arg(long, value_name = "RATE", value_parser = rate, conflicts_with = "speed")]
    rate: Option<Pace>,
    /// As fast as possible
    #[arg(long, conflicts_with_all = ["speed", "rate"])]
    top_speed: bool,
    /// Play the files this many times, or `forever`
    #[arg(long = "loop", value_name = "N", default_value = "1", value_parser = rounds)]
    rounds: Rounds,
    /// Stop after this many frames
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// What to do with frames that the capture truncated
    #[arg(long, value_enum, default_value_t = Cut::Refuse)]
    snapped: Cut,
    /// File with an age identity (secret key) for encrypted recordings; may be repeated
    #[arg(short, long, value_name = "FILE")]
    identity: Vec<PathBuf>,
    /// To an interface: past its queueing discipline (faster; captures on the interface miss the frames)
    #[arg(long)]
    bypass: bool,
    /// Never sleep between frames: the most exact, for a CPU of its own
    #[arg(long)]
    busy: bool,
    /// To a port: size of the transmit ring
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = text::size)]
    ring: u64,
    /// One JSON object at the end
    #[arg(long)]
    json: bool,
}

/// What `--to` names.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Target {
    Interface(String),
    Device(String),
}

/// What becomes of frames of which only the beginning was recorded.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Cut {
    /// Leave them out and count them
    Refuse,
    /// Send what there is
    Send,
    /// Pad them with zeros
    Pad,
}

/// `None`: without end.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rounds(Option<u64>);

impl Replay {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        let found = files(&self.files);
        let files = found.map_err(|(path, error)| Failure::about(path.display(), error))?;
        let order = Order {
            files,
            pace: self.pace(),
            rounds: self.rounds.0,
            limit: self.limit,
            snapped: match self.snapped {
                Cut::Refuse => Snapped::Refuse,
                Cut::Send => Snapped::Cut,
                Cut::Pad => Snapped::Pad,
            },
            keys: keys(&self.identity)?,
        };
        match &self.to {
            Target::Interface(name) => {
                let mut wire = Wire::open(name, self.bypass)?;
                let longest = format!("the MTU of {name} is {}", wire.mtu());
                let (report, ended) = self.play(&order, &mut wire);
                self.tell(&report, None, &longest)?;
                ended?;
                verdict(&report)
            }
            Target::Device(device) => {
                let opened = Outlet::open(device, socket, self.ring);
                let about = |error| Failure::about(device, Failure::from(error).line());
                let mut outlet = opened.map_err(about)?;
                let longest = "the ring takes no longer ones; see --ring";
                let (report, ended) = self.play(&order, &mut outlet);
                let counted = outlet.finish();
                self.tell(&report, counted.as_ref().ok(), longest)?;
                ended?;
                verdict(&report)?;
                all_left(&counted.map_err(about)?)
            }
        }
    }

    fn pace(&self) -> Pace {
        match (self.rate, self.top_speed) {
            (Some(pace), _) => pace,
            (None, true) => Pace::Top,
            (None, false) => Pace::Recorded {
                speed: self.speed.unwrap_or(1.0),
                longest_gap_ns: self.max_gap.map_or(u64::MAX, |gap| gap.as_nanos() as u64),
            },
        }
    }

    fn play(&self, order: &Order, exit: &mut impl Exit) -> (Report, Result<(), Failure>) {
        sys::catch_signals();
        let told = AtomicBool::new(false);
        // Relaxed: one thread asks; a signal is told only once.
        let stop = || {
            if sys::stop().is_some() {
                told.store(true, Ordering::Relaxed);
            }
            told.load(Ordering::Relaxed)
        };
        let (report, ended) = play(order, &mut Monotonic::begin(self.busy), exit, &stop);
        (report, ended.map_err(Failure::from))
    }

    fn tell(&self, report: &Report, host: Option<&Counted>, longest: &str) -> Result<(), Failure> {
        for (path, at) in &report.torn {
            out::warn(&escape(&format!(
                "{}: ends within the block at byte {at}; what is whole was sent",
                path.display()
            )));
        }
        for error in &report.failed {
            out::warn(&escape(&format!(
                "{error}; what comes before was sent, the rest of the file was not"
            )));
        }
        if self.json {
            return out::raw(&format!("{}\n", to_json(report, host)));
        }
        let seconds = report.elapsed_ns as f64 / 1e9;
        let per_second = |count: u64| (count as f64 / seconds.max(1e-9)).round() as u64;
        out::line(&format!(
            "{} frames, {} bytes sent in {seconds:.6} s: {} frames/s, {:.3} Mbit/s",
            grouped(report.frames),
            grouped(report.bytes),
            grouped(per_second(report.frames)),
            per_second(report.bytes * 8) as f64 / 1e6,
        ))?;
        if report.gap_error.count() > 0 {
            out::line(&format!("gap error {}", spread(&report.gap_error)))?;
            out::line(&format!("late {}", spread(&report.late)))?;
        }
        if report.backwards > 0 {
            out::line(&format!(
                "{} frames were recorded before their predecessor and followed at once",
                grouped(report.backwards)
            ))?;
        }
        for line in refusals(
            &report.refused,
            longest,
            "only their beginning was recorded (--snapped send or pad)",
        ) {
            out::line(&escape(&line))?;
        }
        if let Some(host) = host {
            let dropped = host.taken.saturating_sub(host.sent);
            let mut line = format!(
                "the daemon took {}, sent {} and dropped {}",
                grouped(host.taken),
                grouped(host.sent),
                grouped(dropped)
            );
            for (name, value) in &host.dropped {
                line += &format!("; {name} {}", grouped(*value));
            }
            out::line(&escape(&line))?;
            if host.earlier > 0 {
                out::line(&format!(
                    "a daemon that ended took {}; it is not known what of them was sent",
                    grouped(host.earlier)
                ))?;
            }
        }
        Ok(())
    }
}

/// Whether there was anything that could be sent, and nothing that could not be read.
fn verdict(report: &Report) -> Outcome {
    if report.frames == 0 && report.refused.total() > 0 {
        return Err(Failure::new(
            "none of the recorded frames can be sent; what was refused says why",
        ));
    }
    if !report.failed.is_empty() {
        return Err(Failure::new(
            "what cannot be read was told and not sent; all else was",
        ));
    }
    Ok(OK)
}

/// Whether all that was handed over left the daemon, as far as anybody knows.
pub(crate) fn all_left(counted: &Counted) -> Outcome {
    let dropped: u64 = counted.dropped.iter().map(|(_, count)| count).sum();
    let mut why = Vec::new();
    if dropped > 0 {
        why.push(format!("the daemon dropped {}", grouped(dropped)));
    }
    if counted.lost > 0 {
        why.push(format!(
            "up to {} were in the ring of a daemon that ended",
            grouped(counted.lost)
        ));
    }
    if counted.waiting > 0 {
        why.push(format!(
            "{} were not taken in time",
            grouped(counted.waiting)
        ));
    }
    if !counted.answered {
        why.push("the daemon does not answer what it has sent".into());
    }
    match why.is_empty() {
        true => Ok(OK),
        false => Err(Failure::about("not every frame left", why.join("; "))),
    }
}

pub(crate) fn refusals(refused: &Refused, longest: &str, snapped: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut add = |count: u64, why: String| {
        if count > 0 {
            lines.push(format!("{} refused: {why}", grouped(count)));
        }
    };
    add(refused.too_long, format!("too long ({longest})"));
    add(refused.snapped, snapped.into());
    for (link_type, count) in &refused.foreign {
        let why = format!(
            "their link type is {link_type}, and only Ethernet (1) is sent; `tcprewrite --dlt=enet` can add headers"
        );
        add(*count, why);
    }
    add(refused.short, "shorter than an Ethernet header".into());
    add(refused.by_kernel, "the kernel would not have them".into());
    lines
}

fn spread(of: &Spread) -> String {
    let us = |ns: u64| format!("{:.1} µs", ns as f64 / 1e3);
    format!(
        "p50 {}, p99 {}, max {}",
        us(of.permille_ns(500)),
        us(of.permille_ns(990)),
        us(of.max_ns())
    )
}

fn to_json(report: &Report, host: Option<&Counted>) -> serde_json::Value {
    let spread = |of: &Spread| {
        json!({
            "count": of.count(), "p50": of.permille_ns(500), "p99": of.permille_ns(990),
            "p999": of.permille_ns(999), "max": of.max_ns(),
        })
    };
    let refused = &report.refused;
    let failed = |error: &ReadError| {
        json!({
            "file": error.path.display().to_string(), "at": error.offset, "why": error.to_string(),
        })
    };
    let torn = |(path, at): &(PathBuf, u64)| json!({"file": path.display().to_string(), "at": at});
    json!({
        "summary": true,
        "seconds": report.elapsed_ns as f64 / 1e9,
        "frames": report.frames,
        "bytes": report.bytes,
        "refused": {
            "total": refused.total(), "too_long": refused.too_long, "snapped": refused.snapped,
            "link_type": refused.foreign, "short": refused.short, "by_kernel": refused.by_kernel,
        },
        "waits": report.waits,
        "backwards": report.backwards,
        "gap_error_ns": spread(&report.gap_error),
        "late_ns": spread(&report.late),
        "torn": report.torn.iter().map(torn).collect::<Vec<_>>(),
        "failed": report.failed.iter().map(failed).collect::<Vec<_>>(),
        "host": host.map(|host| json!({
            "taken": host.taken, "sent": host.sent, "earlier": host.earlier, "lost": host.lost,
            "waiting": host.waiting, "answered": host.answered,
            "dropped": host.dropped.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        })),
    })
}

pub(crate) fn target(text: &str) -> Result<Target, String> {
    match text.strip_prefix("port:") {
        Some("") => Err("port: wants the name of a device; see `vnplug list`".into()),
        Some(device) => Ok(Target::Device(device.to_owned())),
        // What the agent of a guest calls the host's devices; no interface is called so by default.
        None if text.starts_with("host:") => Ok(Target::Device(text.to_owned())),
        None if text.is_empty() => Err("the name of an interface, or port:DEVICE".into()),
        // The kernel would cut it there, and frames would leave by another interface.
        None if text.contains(':') => {
            Err("no interface has a `:` in its name; a device of the daemon is port:DEVICE".into())
        }
        None => Ok(Target::Interface(text.to_owned())),
    }
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(times) if (1e-6..=1e9).contains(&times) => Ok(times),
        _ => Err("a number between 0.000001 and 1000000000; 2 is twice as fast".into()),
    }
}

fn rounds(text: &str) -> Result<Rounds, String> {
    match text.parse() {
        _ if text == "forever" => Ok(Rounds(None)),
        Ok(rounds) if rounds > 0 => Ok(Rounds(Some(rounds))),
        _ => Err("a number from 1, or forever".into()),
    }
}

/// `5000`, `5kpps`, `1.5Mpps`: frames; `100Mbps`, `1Gbit`: bits. The factors are powers of 1000.
fn rate(text: &str) -> Result<Pace, String> {
    let wrong = || format!("`{text}` is not a rate; write for example 5000, 5kpps or 100Mbps");
    let end = text.find(|c: char| c.is_ascii_alphabetic());
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let unit = unit.to_ascii_lowercase();
    let (factor, unit) = match unit.chars().next() {
        Some('k') => (1e3, &unit[1..]),
        Some('m') => (1e6, &unit[1..]),
        Some('g') => (1e9, &unit[1..]),
        _ => (1.0, &unit[..]),
    };
    let per_second = (number * factor).round();
    if !(1.0..=1e12).contains(&per_second) {
        return Err(format!(
            "{} is out of range: from 1 to 10^12 per second",
            escape(text)
        ));
    }
    match unit {
        "" | "pps" => Ok(Pace::Frames(per_second as u64)),
        "bps" | "bit" | "bit/s" => Ok(Pace::Bits(per_second as u64)),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_frames_or_bits() {
        for (text, pace) in [
            ("5000", Pace::Frames(5000)),
            ("5kpps", Pace::Frames(5000)),
            ("1.5Mpps", Pace::Frames(1_500_000)),
            ("100Mbps", Pace::Bits(100_000_000)),
            ("2 Gbit", Pace::Bits(2_000_000_000)),
            ("9bps", Pace::Bits(9)),
        ] {
            assert_eq!(rate(text), Ok(pace), "{text}");
        }
        for text in ["", "0", "-5", "fast", "5x", "5Tbps", "nan", "inf", "1e30"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_daemon_that_sent_everything_makes_it_a_success() {
        let good = Counted {
            taken: 10,
            sent: 10,
            earlier: 5,
            answered: true,
            ..Counted::default()
        };
        assert!(all_left(&good).is_ok());
        for (bad, words) in [
            (
                Counted {
                    dropped: vec![("send_dropped_full".into(), 3)],
                    ..good.clone()
                },
                "the daemon dropped 3",
            ),
            (
                Counted {
                    lost: 4,
                    ..good.clone()
                },
                "up to 4",
            ),
            (
                Counted {
                    waiting: 7,
                    ..good.clone()
                },
                "7 were not taken",
            ),
            (
                Counted {
                    answered: false,
                    ..good.clone()
                },
                "does not answer",
            ),
        ] {
            let line = all_left(&bad).unwrap_err().line();
            assert!(line.contains(words), "{line}");
        }
    }

    #[test]
    fn only_what_is_named_a_port_goes_to_the_daemon() {
        let interface = |name: &str| Ok(Target::Interface(name.to_owned()));
        let device = |name: &str| Ok(Target::Device(name.to_owned()));
        assert_eq!(target("eth0"), interface("eth0"));
        assert_eq!(target("port"), interface("port"));
        assert_eq!(target("port:eth0"), device("eth0"));
        assert_eq!(target("host:eth0"), device("host:eth0"));
        assert!(target("").is_err() && target("port:").is_err());
        assert!(target("eth0:1").is_err() && target("ports:eth0").is_err());
    }
}
