//! DPDK's side of the peers: two `dpdk-testpmd`, one that sends and one that receives.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use vnplug_e2e::Netns;

use crate::row::{Plan, Result};
use crate::sys;

/// The program.
const PROGRAM: &str = "dpdk-testpmd";

/// Which CPU a testpmd works on; its main thread, which only prints, has the other's.
#[derive(Clone, Copy)]
pub(crate) enum WorkerCpu {
    First,
    Second,
}

/// A testpmd that does not outlive its measurement.
pub(crate) struct Testpmd(Child);

impl Testpmd {
    /// Starts one with these devices and further arguments, which forwards at once.
    pub(crate) fn start(place: WorkerCpu, devices: &[String], extra: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(PROGRAM), place, devices, extra)
    }

    /// As [`start`](Self::start), but it does only what these lines tell it.
    pub(crate) fn told(
        place: WorkerCpu,
        devices: &[String],
        extra: &[&str],
        lines: &str,
    ) -> Result<Self> {
        let extra = [&["--interactive"], extra].concat();
        let mut told = Self::spawn(Command::new(PROGRAM), place, devices, &extra)?;
        told.tell(lines)?;
        Ok(told)
    }

    /// Starts one in a network namespace, which does only what it is told.
    pub(crate) fn within(
        netns: &Netns,
        place: WorkerCpu,
        devices: &[String],
        extra: &[&str],
    ) -> Result<Self> {
        let extra = [&["--interactive"], extra].concat();
        Self::spawn(netns.command(PROGRAM), place, devices, &extra)
    }

    /// Tells it these lines.
    pub(crate) fn tell(&mut self, lines: &str) -> Result<()> {
        // It ends with its input, which stays open here.
        let input = self.0.stdin.as_mut().ok_or("testpmd has no input")?;
        input.write_all(lines.as_bytes())?;
        Ok(())
    }

    fn spawn(
        mut command: Command,
        place: WorkerCpu,
        devices: &[String],
        extra: &[&str],
    ) -> Result<Self> {
        let (role, main, worker) = match place {
            WorkerCpu::First => ("first", sys::cpu(1), sys::cpu(0)),
            WorkerCpu::Second => ("second", sys::cpu(0), sys::cpu(1)),
        };
        let child = command
            .args(["--main-lcore=0", "--no-pci", "--no-huge", "-m", "512"])
            .args(["--lcores", &format!("0@{main},1@{worker}")])
            .arg(format!(
                "--file-prefix=vnplug-bench-{role}-{}",
                std::process::id()
            ))
            .args(devices)
            .args(["--", "--nb-cores=1", "--burst=64"])
            // Every interface of virtio-user has 1024 of them waiting for packets.
            .arg(format!(
                "--total-num-mbufs={}",
                8192.max(devices.len() * 2560)
            ))
            .args(["--stats-period=1", "--no-lsc-interrupt"])
            .args(extra)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("dpdk-testpmd (package dpdk): {error}"))?;
        Ok(Self(child))
    }

    /// Packets received per microsecond over all interfaces: the median of the per-second rates.
    pub(crate) fn received(&mut self, plan: &Plan, interfaces: usize) -> Result<f64> {
        // The first second of traffic is not whole.
        let want = plan.time.as_secs_f64().ceil() as usize + 1;
        let printed = self.rates(interfaces)?;
        let mut rates = Vec::new();
        while rates.len() < want {
            match printed.recv_timeout(PATIENCE) {
                Ok(rate) => rates.push(rate),
                Err(_) => return Err(format!("testpmd printed {} rates only", rates.len()).into()),
            }
        }
        rates.remove(0);
        rates.sort_by(f64::total_cmp);
        Ok(rates[rates.len() / 2] / 1e6)
    }

    /// The receive rates over all interfaces that it prints once a second, from the first packet on.
    fn rates(&mut self, interfaces: usize) -> Result<Receiver<f64>> {
        let pipe = self.0.stdout.take().ok_or("testpmd has no output")?;
        let (printed, rates) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(pipe).lines().map_while(|line| line.ok());
            let mut words = lines.filter_map(|line| {
                line.split("Rx-pps:")
                    .nth(1)?
                    .split_whitespace()
                    .next()?
                    .parse::<f64>()
                    .ok()
            });
            // Ends with the process, or when nobody waits any longer.
            while let Some(first) = words.next() {
                let others: f64 = words.by_ref().take(interfaces - 1).sum();
                if first + others > 0.0 && printed.send(first + others).is_err() {
                    return;
                }
            }
        });
        Ok(rates)
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A measurement, repeated at most twice.
///
/// NB: testpmd 22.11 now and then dies or never connects (a segmentation fault in the server).
pub(crate) fn patiently(measure: impl Fn() -> Result<f64>) -> Result<f64> {
    measure().or_else(|_| measure()).or_else(|_| measure())
}

/// The socket between the two, which testpmd leaves behind; it is removed at the end.
pub(crate) struct Socket(PathBuf);

impl Socket {
    pub(crate) fn new(kind: &str) -> Self {
        let name = format!("vnplug-bench-{kind}-{}.sock", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        Self(path)
    }

    /// Waits until the side that listens has made it.
    pub(crate) fn awaited(&self) -> Result<()> {
        awaited(&self.0)
    }
}

/// Waits until a program has made this, and a moment longer: it listens soon after.
pub(crate) fn awaited(path: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !path.exists() {
        if Instant::now() > deadline {
            return Err(format!("nobody makes {}", path.display()).into());
        }
        sleep(Duration::from_millis(50));
    }
    sleep(Duration::from_millis(500));
    Ok(())
}

impl fmt::Display for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Longest time between two rates, and from the start to the first: on a busy machine it takes long.
const PATIENCE: Duration = Duration::from_secs(40);
