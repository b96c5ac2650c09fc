//! Rows `replay-gap` and `replay-top`: recorded frames back onto a veth, beside tcpreplay.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use vnplug_e2e::daemon::guest_program;
use vnplug_store::read::Reader;

use super::tool::Process;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;
use crate::wire::Wire;

/// Who replays.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Vnplug,
    VnplugBusy,
    Tcpreplay,
}

const WAYS: [Way; 3] = [Way::Vnplug, Way::VnplugBusy, Way::Tcpreplay];

/// By how much the distances of successive frames differ from the recorded ones, at the other end.
pub(crate) fn accuracy(plan: &Plan) -> Result<Vec<Figure>> {
    let wire = Wire::new()?;
    let file = wire.lab.dir().join("gaps.pcap");
    let mean: u64 = GAPS_NS.iter().sum::<u64>() / GAPS_NS.len() as u64;
    let count = (plan.time.as_nanos() as u64 / mean).max(100);
    let stamps = write(&file, count, &GAPS_NS, |number| 60 + number * 97 % 1455)?;
    let mut errors: [[Samples; QUANTILES.len()]; WAYS.len()] = Default::default();
    for round in 1..=plan.rounds {
        let mut told = Vec::new();
        for (way, errors) in WAYS.into_iter().zip(&mut errors) {
            let seen = seen(&wire, way, &file, count)?;
            let gap_errors = gap_errors(&stamps, &seen);
            for ((_, quantile), samples) in QUANTILES.into_iter().zip(errors) {
                let place = (gap_errors.len() - 1) as f64 * quantile;
                samples.push(gap_errors[place as usize] as f64 / 1e3);
                told.push(format!("{:.1}", samples.last()));
            }
        }
        eprintln!(
            "  round {round}: us off, p50, p99, max of vnplug, --busy, tcpreplay: {}",
            told.join(" ")
        );
    }
    let [sleeping, busy, peer] = errors;
    let mut figures = Vec::new();
    for (word, errors) in [("", sleeping), ("busy-", busy)] {
        for (((quantile, _), ours), theirs) in QUANTILES.into_iter().zip(errors).zip(&peer) {
            figures.push(Figure {
                name: format!("replay-gap-{word}{quantile}"),
                unit: "us",
                ours,
                peer: Some(("tcpreplay".to_owned(), theirs.clone())),
                limit: None,
                note: format!(
                    "{count} frames of 60 to 1514 bytes with gaps of 30 us to 5 ms onto a veth: by how \
                     much a gap was another one, as tcpdump's stamps at the other end say; `busy`: with \
                     --busy, which never sleeps, as tcpreplay never does"
                ),
            });
        }
    }
    Ok(figures)
}

/// How many short frames a second leave at top speed.
pub(crate) fn top_speed(plan: &Plan) -> Result<Vec<Figure>> {
    let wire = Wire::new()?;
    let file = wire.lab.dir().join("top.pcap");
    let count = ((TOP_PPS as f64 * plan.time.as_secs_f64()) as u64).clamp(1000, 5 * TOP_PPS);
    write(&file, count, &[1000], |_| 60)?;
    let [mut ours, mut theirs] = [(); 2].map(|()| Samples::default());
    for round in 1..=plan.rounds {
        let told = play(&wire, Way::Vnplug, &file, &["--top-speed"])?;
        let told: Value = serde_json::from_str(told.trim())?;
        let number = |name: &str| told[name].as_f64().ok_or("no number");
        ours.push(number("frames")? / number("seconds")?.max(1e-9) / 1e6);
        theirs.push(rated(&play(&wire, Way::Tcpreplay, &file, &["--topspeed"])?)? / 1e6);
        let (ours, theirs) = (ours.last(), theirs.last());
        eprintln!("  round {round}: vnplug {ours:.3}, tcpreplay {theirs:.3} Mpps");
    }
    Ok(vec![Figure {
        name: "replay-top-60".to_owned(),
        unit: "Mpps",
        ours,
        peer: Some(("tcpreplay --topspeed".to_owned(), theirs)),
        limit: None,
        note: format!("{count} frames of 60 bytes from a file onto a veth where nobody listens"),
    }])
}

/// The stamps of a replayed file's frames at the other end of the wire.
fn seen(wire: &Wire, way: Way, file: &Path, count: u64) -> Result<Vec<u64>> {
    let seen = wire.lab.dir().join("seen.pcap");
    // There is none before the first turn.
    let _ = fs::remove_file(&seen);
    let mut command = Command::new("tcpdump");
    command.args(["-n", "-Z", "root", "-i", "wire0", "-U", "-B", "65536"]);
    command
        .args(["--time-stamp-precision=nano", "-w"])
        .arg(&seen);
    let mut listener =
        Process::start(command, Some(&wire.netns), &wire.lab.dir().join("seen.log"))?;
    listener.until(|| listener.said().contains("listening on"))?;
    play(wire, way, file, &[])?;
    let deadline = Instant::now() + LIMIT;
    let mut stamps = stamps(&seen)?;
    while (stamps.len() as u64) < count && Instant::now() < deadline {
        sleep(Duration::from_millis(100));
        stamps = self::stamps(&seen)?;
    }
    listener.end(Some(Signal::INT))?;
    match stamps.len() as u64 == count {
        true => Ok(stamps),
        false => Err(format!("{} of {count} frames arrived", stamps.len()).into()),
    }
}

/// Plays a file to its end from the first CPU; what the program says.
fn play(wire: &Wire, way: Way, file: &Path, args: &[&str]) -> Result<String> {
    let mut command = match way {
        Way::Tcpreplay => {
            let mut command = Command::new("tcpreplay");
            command.args(["-i", "far0"]);
            command
        }
        Way::Vnplug | Way::VnplugBusy => {
            let mut command = Command::new(guest_program()?);
            command.args(["replay", "--to", "far0", "--json"]);
            command
        }
    };
    command.args((way == Way::VnplugBusy).then_some("--busy"));
    command.args(args).arg(file).stdin(Stdio::null());
    let output = wire.netns.enter(|| {
        sys::pin(sys::cpu(0)).map_err(|error| error.to_string())?;
        command.output().map_err(|error| error.to_string())
    })??;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true => Ok(told),
        false => Err(format!("{told}{}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

/// The rate that tcpreplay tells: `Rated: … Bps, … Mbps, … pps`.
fn rated(told: &str) -> Result<f64> {
    let line = told.lines().find(|line| line.starts_with("Rated:"));
    line.and_then(|line| {
        line.rsplit(", ")
            .next()?
            .strip_suffix(" pps")?
            .trim()
            .parse()
            .ok()
    })
    .ok_or_else(|| format!("tcpreplay said {told:?}").into())
}

/// Of each gap, how many nanoseconds it was another one; the smallest first.
fn gap_errors(wanted: &[u64], seen: &[u64]) -> Vec<u64> {
    let gap = |pair: &[u64]| pair[1].saturating_sub(pair[0]);
    let both = wanted.windows(2).zip(seen.windows(2));
    let mut errors: Vec<u64> = both
        .map(|(wanted, seen)| gap(wanted).abs_diff(gap(seen)))
        .collect();
    errors.sort_unstable();
    errors
}

fn stamps(file: &PathBuf) -> Result<Vec<u64>> {
    let (mut reader, mut stamps) = (Reader::open(file)?, Vec::new());
    while let Some(packet) = reader.read()? {
        stamps.push(packet.ts_ns);
    }
    Ok(stamps)
}

/// Writes a classic pcap file with nanoseconds; the stamps of its frames.
fn write(path: &Path, count: u64, gaps: &[u64], len: impl Fn(u64) -> u64) -> Result<Vec<u64>> {
    let mut file = BufWriter::new(fs::File::create(path)?);
    // Magic, version 2.4, no zone, snaplen, Ethernet.
    for word in [0xa1b2_3c4d_u32, 4 << 16 | 2, 0, 0, 1 << 18, 1] {
        file.write_all(&word.to_le_bytes())?;
    }
    let (mut at, mut stamps) = (1_700_000_000_u64 * NS, Vec::new());
    for number in 0..count {
        let len = len(number) as u32;
        for word in [(at / NS) as u32, (at % NS) as u32, len, len] {
            file.write_all(&word.to_le_bytes())?;
        }
        let mut frame = vec![0xff_u8; 6];
        frame.extend([2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
        frame.extend(number.to_be_bytes());
        frame.resize(len as usize, 0x5a);
        file.write_all(&frame)?;
        stamps.push(at);
        at += gaps[number as usize % gaps.len()];
    }
    file.flush()?;
    Ok(stamps)
}

const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("max", 1.0)];
const GAPS_NS: [u64; 5] = [1_000_000, 150_000, 5_000_000, 30_000, 2_000_000];
const NS: u64 = 1_000_000_000;
/// About what both reach; decides only how many frames there are.
const TOP_PPS: u64 = 1_500_000;
const LIMIT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcpreplay_s_words_are_understood() {
        let told = "Actual: 9 packets\nRated: 102720000.0 Bps, 821.76 Mbps, 1712000.50 pps\n";
        assert_eq!(rated(told).unwrap(), 1_712_000.5);
        assert!(rated("").is_err());
    }

    #[test]
    fn the_error_of_a_gap_has_no_sign() {
        assert_eq!(gap_errors(&[0, 10, 20], &[5, 14, 26]), [1, 2]);
    }
}
