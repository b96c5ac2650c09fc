//! Where processors are, by `perf`: samples of the clock on all of them, with the kernel's chains of calls.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};

use crate::row::Result;

/// Processes that have a part in a stream.
pub(super) struct Pids {
    pub(super) guest: Vec<u32>,
    pub(super) switches: [u32; 2],
    pub(super) far: u32,
}

/// Where a processor was at one time.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Sample {
    pub(super) pid: u32,
    /// By the monotonic clock, in seconds.
    pub(super) time_s: f64,
    /// The innermost first; of user programs there is only one.
    pub(super) frames: Vec<Frame>,
}

/// A place in a function.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Frame {
    pub(super) address: u64,
    pub(super) symbol: String,
    /// The file, or `[kernel.kallsyms]`.
    pub(super) object: String,
}

impl Frame {
    /// Whether it is in the host's kernel: that has the upper half of all addresses.
    pub(super) fn is_kernel(&self) -> bool {
        self.address >> 63 == 1
    }
}

/// A recording that runs.
pub(super) struct Recording {
    perf: Child,
    file: PathBuf,
}

/// Samples a second on each CPU. Not a divisor of the kernel's ticks, so that timers are not always seen.
pub(super) const HERTZ: u32 = 3989;

/// From the beginning of a recording, which has a file, until all processors are sampled.
pub(super) const WARM_UP: Duration = Duration::from_millis(700);

impl Recording {
    /// Begins to record all processors.
    ///
    /// # Errors
    /// Where there is no perf, or it may not.
    pub(super) fn begin(dir: &Path) -> Result<Self> {
        let file = dir.join("perf.data");
        // What an earlier recording left would look as if this one had begun.
        if file.exists() {
            std::fs::remove_file(&file)?;
        }
        let mut perf = Command::new("perf");
        perf.args(["record", "-q", "-a", "-e", "cpu-clock", "-F"])
            .arg(HERTZ.to_string())
            .args(["-k", "CLOCK_MONOTONIC", "-m", "4M"])
            .args(["--call-graph", "fp", "--kernel-callchains", "-o"])
            .arg(&file);
        perf.stdin(Stdio::null()).stdout(Stdio::null());
        let perf = perf.stderr(Stdio::null()).spawn();
        let mut recording = Self {
            perf: perf.map_err(|error| format!("{MISSING}: {error}"))?,
            file,
        };
        let begin = Instant::now();
        while !recording.has_begun() {
            if recording.perf.try_wait()?.is_some() || begin.elapsed() > PATIENCE {
                return Err("perf records no cpu-clock of all processors here".into());
            }
            sleep(STEP);
        }
        Ok(recording)
    }

    fn has_begun(&self) -> bool {
        std::fs::metadata(&self.file).is_ok_and(|file| file.len() > 0)
    }

    /// Ends it, and reads it.
    ///
    /// # Errors
    /// What perf says instead.
    pub(super) fn end(mut self) -> Result<Vec<Sample>> {
        kill_process(Pid::from_child(&self.perf), Signal::INT)?;
        self.perf.wait()?;
        // Chains have the kernel's functions alone; where a program was, perf tells without them.
        let mut samples = parse(&self.script(&[])?);
        let places = parse(&self.script(&["-G"])?);
        if samples.is_empty() || samples.len() != places.len() {
            return Err("perf script tells no samples, or not the same twice".into());
        }
        for (sample, place) in samples.iter_mut().zip(places) {
            if sample.frames.is_empty() {
                sample.frames = place.frames;
            }
        }
        Ok(samples)
    }

    fn script(&self, more: &[&str]) -> Result<String> {
        let mut script = Command::new("perf");
        script.args(["script", "--no-inline", "-F", "pid,time,ip,sym,dso", "-i"]);
        let script = script.arg(&self.file).args(more).stdin(Stdio::null());
        let told = script.output()?;
        match told.status.success() {
            true => Ok(String::from_utf8_lossy(&told.stdout).into_owned()),
            false => Err(format!("perf script: {}", String::from_utf8_lossy(&told.stderr)).into()),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.perf.kill();
        let _ = self.perf.wait();
    }
}

/// All processors of the machine, which perf samples, whichever the bench may use.
pub(super) fn all_cpus() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let lines = text
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with("cpu"));
    Ok(lines.count() as f64)
}

/// Whether `perf` can be started.
///
/// # Errors
/// What to install.
pub(super) fn is_there() -> Result<()> {
    let mut perf = Command::new("perf");
    let version = perf.arg("--version").stdout(Stdio::null()).status();
    version.map_err(|error| format!("{MISSING}: {error}"))?;
    Ok(())
}

/// The monotonic clock, in seconds, as samples have it.
pub(super) fn now_s() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// Reads what `perf script` prints: a line `PID TIME:` for each sample, then its frames, one a line.
fn parse(text: &str) -> Vec<Sample> {
    let mut samples: Vec<Sample> = Vec::new();
    for line in text.lines() {
        match head(line) {
            Some((pid, time_s, rest)) => samples.push(Sample {
                pid,
                time_s,
                frames: frame(rest).into_iter().collect(),
            }),
            None => {
                if let (Some(sample), Some(frame)) = (samples.last_mut(), frame(line)) {
                    sample.frames.push(frame);
                }
            }
        }
    }
    samples
}

/// `  1234  5678.123456: `, maybe with a frame behind.
fn head(line: &str) -> Option<(u32, f64, &str)> {
    let (pid, rest) = line.trim_start().split_once(' ')?;
    let (time, rest) = rest.trim_start().split_once(':')?;
    Some((pid.parse().ok()?, time.parse().ok()?, rest))
}

/// `ffffffff81d35f77 read_zero ([kernel.kallsyms])`.
fn frame(line: &str) -> Option<Frame> {
    let (address, rest) = line.trim().split_once(' ')?;
    // Names of Rust have blanks and parentheses.
    let (symbol, object) = rest.rsplit_once(" (")?;
    Some(Frame {
        address: u64::from_str_radix(address, 16).ok()?,
        symbol: symbol.to_owned(),
        object: object.trim_end_matches(')').to_owned(),
    })
}

const MISSING: &str = "perf (Debian: apt-get install linux-perf; Ubuntu: linux-tools-generic)";
const PATIENCE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_a_head_and_its_frames() {
        let text = "26311 47998.033789: \n\tffffffff81d35f77 read_zero ([kernel.kallsyms])\n\
                    \tffffffff816bac2b vfs_read ([kernel.kallsyms])\n\n\
                    \x20   7 47998.034000: \n\t    5581aa <a::B as c::D>::e (1) (/usr/sbin/vnplugd)\n\n\
                    \x20   0 47998.034100:      60031000 [unknown] (/usr/bin/linux.uml)\n";
        let samples = parse(text);
        assert_eq!(samples.len(), 3);
        assert_eq!((samples[0].pid, samples[0].frames.len()), (26311, 2));
        assert_eq!(samples[0].frames[1].symbol, "vfs_read");
        assert!(samples[0].frames[0].is_kernel());
        let frame = &samples[1].frames[0];
        assert_eq!(frame.symbol, "<a::B as c::D>::e (1)");
        assert_eq!(frame.object, "/usr/sbin/vnplugd");
        assert!(!frame.is_kernel());
        assert_eq!(samples[2].frames[0].address, 0x6003_1000);
    }
}
