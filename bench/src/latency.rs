//! How late a reader is: from the host's publication until its echo is back at the host.
//!
//! The daemon's generator never sleeps in these rows (`busy=yes`, on a CPU of its own) and sends 1,000
//! frames a second; `vnplug echo` sends each back. Both ends are stamped by the host, so guests are
//! measured as hosts are. The way back is a look at a ring, so nearly all of the time is the reader's
//! wake-up. The peer's is the same in the kernel alone: a byte through a pipe to a sleeping process,
//! which answers through another one to somebody who spins. The limit of a reader that sleeps is a
//! bare futex between two threads; of one that spins, a cache line there and back.
//!
//! Loaded: another daemon runs flat out into a reader of its own, both on the echo's CPU and without
//! real-time priority.

//! With CPUs that wake at once (`wake_us = 0`) the daemon keeps idle CPUs from halting while there is a
//! port; the peer runs as ever, and the limit's futex with such CPUs.

mod kernel;

use std::fs::File;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use vnplug_e2e::daemon::{Daemon, guest_program, value};
use vnplug_e2e::{Guest, Image, Lab, Qemu, QemuConfig};

pub(crate) use kernel::pong;

use crate::limit;
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::sys;
use crate::uml::{AttachedUml, LIMIT, serve};

const SOURCE_CPU: usize = 0;
const READER_CPU: usize = 1;
const PER_SECOND: u64 = 1_000;
/// Fewer echoes than this share of what was sent are no measurement.
const ENOUGH: f64 = 0.5;

/// A process of the host.
pub(crate) fn host(plan: &Plan) -> Result<Vec<Figure>> {
    measure(plan, "host", Cpus::AsEver, |_, _| Ok(Reader::Host))
}

/// A process of the host, whose idle CPUs the daemon keeps from halting.
pub(crate) fn awake(plan: &Plan) -> Result<Vec<Figure>> {
    measure(plan, "awake", Cpus::Awake, |_, _| Ok(Reader::Host))
}

/// An application in a User-mode Linux.
pub(crate) fn uml(plan: &Plan) -> Result<Vec<Figure>> {
    measure(plan, "uml", Cpus::AsEver, |lab, daemon| {
        Ok(Reader::Uml(AttachedUml::boot(lab, daemon)?))
    })
}

/// An application in QEMU.
pub(crate) fn qemu(plan: &Plan) -> Result<Vec<Figure>> {
    measure(plan, "qemu", Cpus::AsEver, |lab, daemon| {
        let config = QemuConfig {
            image: Image::default().file(guest_program()?, "/bin/vnplug", 0o755),
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(lab, config)?;
        let output = Command::new(guest_program()?)
            .arg("--socket")
            .arg(daemon.socket())
            .args(["attach", "qemu", "--name", "bench", "--allow", "*"])
            .args(["--wait", "0s", "--qmp"])
            .arg(guest.qmp_path().ok_or("QEMU has no QMP socket")?)
            .output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        // As long as the guest runs.
        std::mem::forget(serve(&guest)?);
        Ok(Reader::Qemu(guest))
    })
}

/// What idle CPUs do while there is a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cpus {
    AsEver,
    /// They do not halt.
    Awake,
}

impl Cpus {
    /// The same for a measurement without a daemon, for as long as the file is open.
    fn hold(self) -> Result<Option<File>> {
        if self == Self::AsEver {
            return Ok(None);
        }
        let mut device = File::options().write(true).open("/dev/cpu_dma_latency")?;
        device.write_all(&0_i32.to_ne_bytes())?;
        Ok(Some(device))
    }
}

/// Where the echo runs.
enum Reader {
    Host,
    Uml(AttachedUml),
    Qemu(Guest),
}

impl Reader {
    /// Echoes for a time, waiting in this way.
    fn echo(&self, daemon: &Daemon, wait: &str, time: Duration) -> Result<()> {
        let ms = time.as_millis();
        let words = format!("echo host:lab --wait {wait} --transmit 64K --seconds {ms}ms");
        let guest = match self {
            Self::Host => {
                let output = Command::new(guest_program()?)
                    .arg("--socket")
                    .arg(daemon.socket())
                    .args(words.split(' '))
                    .output()?;
                return match output.status.success() {
                    true => Ok(()),
                    false => Err(String::from_utf8_lossy(&output.stderr).into()),
                };
            }
            Self::Uml(uml) => uml.guest(),
            Self::Qemu(guest) => guest,
        };
        let output = guest.run(&format!("vnplug {words} 2>&1"), time + LIMIT)?;
        match output.success() {
            true => Ok(()),
            false => Err(output.text().into()),
        }
    }
}

fn measure(
    plan: &Plan,
    place: &'static str,
    cpus: Cpus,
    boot: impl FnOnce(&Lab, &Daemon) -> Result<Reader> + Send,
) -> Result<Vec<Figure>> {
    // Who is woken goes before the load. It sleeps most of the time, so nothing throttles it.
    sys::real_time()?;
    let lab = Lab::new()?;
    let source = format!(
        "lab=gen,pps={PER_SECOND},busy=yes,cpus={}",
        sys::cpu(SOURCE_CPU)
    );
    let mut args = vec!["--source", &source, "--allow-send", "vm:bench=lab"];
    if cpus == Cpus::Awake {
        args.extend(["--wake-us", "0"]);
    }
    let daemon = Daemon::start(&lab, None, &args)?;
    // Processes inherit the CPU of the thread that starts them.
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            sys::pin(sys::cpu(READER_CPU))
                .and_then(|()| boot(&lab, &daemon))
                .and_then(|reader| in_turns(plan, place, cpus, &lab, &daemon, &reader))
                .map_err(|error| error.to_string())
        });
        Ok(work.join().map_err(|_| "the row panicked")??)
    })
}

fn in_turns(
    plan: &Plan,
    place: &str,
    cpus: Cpus,
    lab: &Lab,
    daemon: &Daemon,
    reader: &Reader,
) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for load in ["idle", "loaded"] {
        let (mut peer, mut futex) = (Times::default(), Times::default());
        let mut line = Samples::default();
        let mut ways = ["cpu", "balanced", "latency"].map(|wait| (wait, Times::default()));
        let _flood = (load == "loaded").then(|| Flood::start(lab)).transpose()?;
        for round in 1..=plan.rounds {
            peer.add(kernel::pipes(plan.time)?);
            let held = cpus.hold()?;
            futex.add(kernel::futexes(plan.time)?);
            drop(held);
            line.push(limit::line_ns(plan.time / 8)? * 2.0 / 1e3);
            eprint!("  {load} round {round}:");
            for (name, times) in [("pipes", &peer), ("futex", &futex)] {
                eprint!(" {name} {:.1}/{:.1},", times.p50.last(), times.p99.last());
            }
            for (wait, times) in &mut ways {
                reader.echo(daemon, wait, plan.time)?;
                times.add(echoes(daemon, plan.time)?);
                eprint!(" {wait} {:.1}/{:.1}", times.p50.last(), times.p99.last());
            }
            eprintln!(" us (p50/p99)");
        }
        for (wait, times) in ways {
            let note = format!(
                "from the host's publication until the echo is back, {PER_SECOND} frames/s of a \
                 generator that spins on CPU {SOURCE_CPU}; `vnplug echo --wait {wait}` ({place}) on \
                 CPU {READER_CPU}, {load}; longest {:.1} us (median of the rounds). The peer: a byte \
                 by a pipe to a process that sleeps, and back by another to one that spins, on the \
                 same CPUs",
                times.max.median()
            );
            for (nth, (what, ours)) in times.named().into_iter().enumerate() {
                let (_, theirs) = peer.named()[nth];
                let (_, floor) = futex.named()[nth];
                let limit = match wait {
                    "latency" => Limit::new("a cache line there and back", line.clone()),
                    _ => Limit::new("a futex between two threads", floor.clone()),
                };
                figures.push(Figure {
                    name: format!("latency-{place}-{wait}-{load}-{what}"),
                    unit: "us",
                    ours: ours.clone(),
                    peer: Some(("pipes between two processes".to_owned(), theirs.clone())),
                    limit: Some(limit),
                    note: note.clone(),
                });
            }
        }
    }
    Ok(figures)
}

/// Percentiles in microseconds, a sample per round.
#[derive(Default)]
struct Times {
    p50: Samples,
    p99: Samples,
    p999: Samples,
    max: Samples,
}

impl Times {
    fn add(&mut self, [p50, p99, p999, max]: [f64; 4]) {
        self.p50.push(p50);
        self.p99.push(p99);
        self.p999.push(p999);
        self.max.push(max);
    }

    fn named(&self) -> [(&'static str, &Samples); 3] {
        [("p50", &self.p50), ("p99", &self.p99), ("p999", &self.p999)]
    }
}

/// What the generator measured during the echo that has just ended.
fn echoes(daemon: &Daemon, time: Duration) -> Result<[f64; 4]> {
    let counters = daemon.counters();
    let source = counters
        .iter()
        .find(|it| it.kind == "source" && it.name == "lab");
    let source = source.ok_or("the source is gone")?;
    let came = value(source, "echoes") as f64;
    let sent = PER_SECOND as f64 * time.as_secs_f64();
    if came < sent * ENOUGH {
        return Err(format!("{came} of {sent} frames came back").into());
    }
    let names = ["echo_p50_ns", "echo_p99_ns", "echo_p999_ns", "echo_max_ns"];
    Ok(names.map(|name| value(source, name) as f64 / 1e3))
}

/// A second daemon that runs flat out on the reader's CPU, and a reader of its own there, both without
/// real-time priority: work that waits when the measured reader is woken. With the same priority that
/// reader would wait for their whole time slices of 100 ms.
struct Flood {
    reader: Child,
    _daemon: Daemon,
}

impl Flood {
    fn start(lab: &Lab) -> Result<Self> {
        let cpu = sys::cpu(READER_CPU);
        let source = format!("flood=gen,cpus={cpu}");
        let daemon = Daemon::start(lab, None, &["--source", &source])?;
        let pid = daemon.pid().to_string();
        let status = Command::new("chrt")
            .args(["-a", "-o", "-p", "0", &pid])
            .status()?;
        if !status.success() {
            return Err(format!("chrt (package util-linux): {status}").into());
        }
        let reader = Command::new("chrt")
            .args(["-o", "0"])
            .arg(guest_program()?)
            .arg("--socket")
            .arg(daemon.socket())
            .args(["count", "host:flood", "--json"])
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Self {
            reader,
            _daemon: daemon,
        })
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.reader.kill();
        let _ = self.reader.wait();
    }
}
