//! Rows `record-disk` and `record-index`: from the generator in memory to the disk.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;

use super::fio::{self, Limit, Pages};
use super::place::{DiskDir, clear};
use super::tool::{Process, Usage, recorder};
use super::{GB, files};
use crate::attached::cpu_time;
use crate::handoff::Sizes;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

/// Recorded as fast as the disk takes it, beside fio on the same disk.
pub(crate) fn against_fio(plan: &Plan) -> Result<Vec<Figure>> {
    sys::ordinary()?;
    let place = DiskDir::with_room(plan, most_bytes(plan))?;
    let lab = Lab::new()?;
    let mut ways = [Way::new("", 1), Way::new("-two", 2)];
    let mut appends = Samples::default();
    let [mut plain, mut huge] = [(); 2].map(|()| Limit::default());
    // Some seconds of writing for fio.
    let written = most_bytes(plan) / 6;
    for round in 1..=plan.rounds {
        let measure = |pages, limit: &mut Limit| limit.measure(place.dir(), written, pages);
        measure(Pages::Small, &mut plain)?;
        measure(Pages::Huge, &mut huge)?;
        let allowed = plain.best().median() * 1e6;
        // Neither always finds the disk as the other left it.
        ways.rotate_left(1);
        for way in &mut ways {
            eprint!("  round {round}{}: ", way.suffix);
            way.measure(allowed, |offer, how| {
                generate(plan, &lab, &place, offer, how)
            })?;
        }
        appends.push(fio::appending(place.dir(), written, Pages::Huge)?);
        // A disk is faster or slower after what was written before: fio is on both sides.
        measure(Pages::Huge, &mut huge)?;
        measure(Pages::Small, &mut plain)?;
        eprintln!(
            "  fio until now {:.0} MB/s, with huge pages {:.0}, appending {:.0}",
            plain.best().median(),
            huge.best().median(),
            appends.median(),
        );
    }
    ways.sort_by_key(|way| way.directories);
    let (limit, huge) = (plain.best(), huge.best());
    let mut figures = Vec::new();
    for way in ways {
        figures.extend(way.figures(plan, limit, huge));
    }
    figures.push(figure(
        plan,
        "-append",
        "MB/s",
        appends,
        Some((FIO_HUGE, huge)),
        "fio itself with huge pages, as the recorder must write: each write makes the file longer, 16 MiB \
         under way, so that nobody finds zeros in it; beside fio with huge pages",
    ));
    Ok(figures)
}

/// A way to record all that the disk takes.
#[derive(Default)]
struct Way {
    suffix: &'static str,
    directories: usize,
    best: Samples,
    lost: Samples,
    top: Samples,
    core: Samples,
    whole: Samples,
}

impl Way {
    fn new(suffix: &'static str, directories: usize) -> Self {
        Self {
            suffix,
            directories,
            ..Self::default()
        }
    }

    /// Once; the disk takes about `allowed` bytes per second.
    fn measure(
        &mut self,
        allowed: f64,
        generate: impl Fn(Offer, How<'static>) -> Result<Run>,
    ) -> Result<()> {
        let how = How {
            size: FULL,
            index: true,
            directories: self.directories,
            memory_mib: DISK_MIB,
        };
        let generated = |share: f64| generate(Offer::Bytes(allowed * share), how);
        let at_goal = generated(GOAL)?;
        let mut found = Run::default();
        for share in SHARES {
            let run = match share == GOAL {
                true => at_goal,
                false => generated(share)?,
            };
            if run.lost() == 0 {
                found = run;
                break;
            }
        }
        let flooded = generate(Offer::Flood, how)?;
        eprintln!(
            "nothing lost up to {:.0} MB/s, {:.1} Gb/s per core; {:.2} % lost at {:.0}; {:.0} MB/s of a flood",
            found.file_mbytes(),
            found.gbits_per_core(),
            at_goal.lost_percent(),
            allowed * GOAL / 1e6,
            flooded.file_mbytes(),
        );
        self.best.push(found.file_mbytes());
        self.lost.push(at_goal.lost_percent());
        self.top.push(flooded.file_mbytes());
        self.core.push(found.gbits_per_core());
        self.whole.push(found.gbits_per_cores());
        Ok(())
    }

    fn figures(self, plan: &Plan, limit: &Samples, huge: &Samples) -> Vec<Figure> {
        let to = match self.directories {
            1 => "",
            _ => "; to two directories of the disk, so that two files grow at a time; fio has one",
        };
        let figure = |what: &str, unit, ours, peer, text: &str| {
            let suffix = format!("{}{what}", self.suffix);
            figure(plan, &suffix, unit, ours, peer, &format!("{text}{to}"))
        };
        let rate = |what: &str, ours, text: &str| {
            let rate = figure(what, "MB/s", ours, Some((FIO, limit)), text);
            match self.directories {
                1 => rate.limited(FIO_HUGE, huge),
                // It is the limit of one file.
                _ => rate,
            }
        };
        vec![
            rate(
                "",
                self.best,
                "bytes of the files without a packet lost: the highest of the rates 100, 97.5, 95, 92.5, 90 … 10 % \
                 of fio's median until then",
            ),
            figure(
                "-loss",
                "% lost",
                self.lost,
                None,
                "lost when the generator offers 90 % of fio's median until then",
            ),
            rate(
                "-top",
                self.top,
                "bytes of the files while the generator offers what it can, and most of it is lost",
            ),
            figure(
                "-core",
                "Gb/s per core",
                self.core,
                None,
                "bits of frames per second of processor time of vnplug record, at the highest rate without loss",
            ),
            figure(
                "-core-whole",
                "Gb/s per core",
                self.whole,
                None,
                "the same with the daemon's time, the generator's in it",
            ),
        ]
    }
}

fn figure(
    plan: &Plan,
    suffix: &str,
    unit: &'static str,
    ours: Samples,
    peer: Option<(&str, &Samples)>,
    what: &str,
) -> Figure {
    Figure {
        name: format!("record-disk{suffix}"),
        unit,
        ours,
        peer: peer.map(|(name, samples)| (name.to_owned(), samples.clone())),
        limit: None,
        note: format!(
            "{what}; frames of {FULL} bytes of {FLOWS} flows from the generator in memory for {:.1} s, \
             ring and buffers {DISK_MIB} MiB each, index included; from the first packet until the \
             recorder has ended with everything synced: what waits in memory at the end is not lost, and its \
             time counts. fio: one file, O_DIRECT and io_uring, 4 x 4 MiB or \
             16 x 1 MiB under way, whichever is faster in the median, synced, before it and behind it",
            time(plan).as_secs_f64()
        ),
    }
}

/// The write rate of a flood with the index and without.
pub(crate) fn with_and_without_index(plan: &Plan) -> Result<Vec<Figure>> {
    sys::ordinary()?;
    let place = DiskDir::with_room(plan, most_bytes(plan))?;
    let lab = Lab::new()?;
    let mut figures = Vec::new();
    for sizes in [Sizes::One(FULL_BYTES), Sizes::Imix, Sizes::One(64)] {
        let name = sizes.to_string();
        let [mut with, mut without] = [(); 2].map(|()| Samples::default());
        for round in 1..=plan.rounds {
            let mut turns = [(true, &mut with), (false, &mut without)];
            // Neither always finds the disk as the other left it.
            turns.rotate_left(round % 2);
            for (index, samples) in turns {
                let how = How {
                    size: &name,
                    index,
                    directories: 1,
                    memory_mib: INDEX_MIB,
                };
                let run = generate(plan, &lab, &place, Offer::Flood, how)?;
                samples.push(run.file_mbytes());
            }
            let (with, without) = (with.last(), without.last());
            eprintln!("  round {round}, {name} B: {with:.0} MB/s, without index {without:.0} MB/s");
        }
        figures.push(Figure {
            name: format!("record-index-{name}"),
            unit: "MB/s",
            ours: with,
            peer: Some(("vnplug record --no-index".to_owned(), without)),
            limit: None,
            note: format!(
                "bytes of the files per second, frames of {name} bytes of {FLOWS} flows, while the \
                 generator in memory offers what it can and takes a CPU for it; ring and buffers {INDEX_MIB} MiB each"
            ),
        });
    }
    Ok(figures)
}

/// What is generated, and how it is recorded.
#[derive(Clone, Copy)]
struct How<'a> {
    size: &'a str,
    index: bool,
    /// All of one disk.
    directories: usize,
    /// Of the ring, and as much of what waits for the disk.
    memory_mib: u32,
}

/// What the generator offers.
#[derive(Clone, Copy)]
enum Offer {
    /// This many bytes of files per second, for the plan's time.
    Bytes(f64),
    /// All it can, until the recorder has had enough.
    Flood,
}

/// One recording of generated frames.
#[derive(Clone, Copy, Default)]
struct Run {
    /// Frames the generator made; 0 of a flood.
    offered: u64,
    recorded: u64,
    frame_bytes: u64,
    file_bytes: u64,
    elapsed: Duration,
    recorder_cpu: Duration,
    daemon_cpu: Duration,
}

impl Run {
    fn lost(&self) -> u64 {
        self.offered.saturating_sub(self.recorded)
    }

    fn lost_percent(&self) -> f64 {
        self.lost() as f64 * 100.0 / self.offered.max(1) as f64
    }

    fn file_mbytes(&self) -> f64 {
        self.file_bytes as f64 / 1e6 / self.elapsed.as_secs_f64().max(1e-9)
    }

    fn gbits(&self) -> f64 {
        self.frame_bytes as f64 * 8.0 / GB
    }

    fn gbits_per_core(&self) -> f64 {
        self.gbits() / self.recorder_cpu.as_secs_f64().max(1e-9)
    }

    fn gbits_per_cores(&self) -> f64 {
        let both = self.recorder_cpu + self.daemon_cpu;
        self.gbits() / both.as_secs_f64().max(1e-9)
    }
}

fn generate(plan: &Plan, lab: &Lab, place: &DiskDir, offer: Offer, how: How<'_>) -> Result<Run> {
    let How {
        size,
        index,
        directories,
        memory_mib,
    } = how;
    let dir = place.fresh("generated")?;
    let parts: Vec<PathBuf> = (0..directories).map(|n| dir.join(n.to_string())).collect();
    for part in &parts {
        fs::create_dir(part)?;
    }
    let time = time(plan);
    let mut source = format!("lab=gen,size={size},flows={FLOWS}");
    let mut offered = 0;
    if let Offer::Bytes(rate) = offer {
        let pps = (rate / ON_DISK).max(1.0) as u64;
        offered = ((pps as f64 * time.as_secs_f64()) as u64).max(1);
        source += &format!(",pps={pps},count={offered}");
    }
    let daemon = Daemon::start(lab, None, &["--source", &source])?;
    let before = cpu_time(daemon.pid())?;
    let mut command = recorder(&daemon, "host:lab", &parts[0])?;
    for part in &parts[1..] {
        command.arg("--to").arg(part);
    }
    let memory = format!("{memory_mib}M");
    command.args(["--ring", &memory, "--buffer", &memory]);
    if matches!(offer, Offer::Flood) {
        command.args(["-t", &format!("{}ms", time.as_millis())]);
    }
    command.args((!index).then_some("--no-index"));
    let mut process = Process::start(command, None, &lab.dir().join("tool.log"))?;
    let usage = Usage::now(&process)?;
    process.end(None)?;
    let ended_ns = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let recorder_cpu = usage.whole()?;
    let daemon_cpu = cpu_time(daemon.pid())?.saturating_sub(before);
    drop(daemon);
    let found = of(&parts)?;
    clear(&dir)?;
    Ok(Run {
        offered,
        recorded: found.packets,
        frame_bytes: found.bytes,
        file_bytes: found.file_bytes,
        elapsed: Duration::from_nanos(ended_ns.saturating_sub(found.first_ns)),
        recorder_cpu,
        daemon_cpu,
    })
}

/// What is in the files; that there is nothing is an error.
fn of(parts: &[PathBuf]) -> Result<files::Found> {
    let mut all = files::Found::default();
    for part in parts {
        let found = files::count(part, None)?;
        all.first_ns = match all.packets {
            0 => found.first_ns,
            _ => all.first_ns.min(found.first_ns),
        };
        all.packets += found.packets;
        all.bytes += found.bytes;
        all.file_bytes += found.file_bytes;
    }
    match all.packets {
        0 => Err("nothing was recorded".into()),
        _ => Ok(all),
    }
}

/// Of one recording: so long that its beginning and its end weigh little.
fn time(plan: &Plan) -> Duration {
    (plan.time * 4).min(LONGEST)
}

/// More than a disk of today takes in that time.
fn most_bytes(plan: &Plan) -> u64 {
    (time(plan).as_secs_f64() * MOST_PER_SECOND) as u64 + (1 << 30)
}

/// Shares of the disk's rate that are tried.
const SHARES: [f64; 14] = [
    1.0, 0.975, 0.95, 0.925, GOAL, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1,
];
const GOAL: f64 = 0.9;
const FULL_BYTES: usize = 1400;
const FULL: &str = "1400";
/// Bytes of such a frame in a file: the block of pcapng has 32 beside it.
const ON_DISK: f64 = 1432.0;
const FLOWS: u32 = 10_000;
/// Outlasts the pauses of a disk that is at its limit.
const DISK_MIB: u32 = 512;
const INDEX_MIB: u32 = 64;
const FIO: &str = "fio, O_DIRECT";
const FIO_HUGE: &str = "fio with huge pages";
const LONGEST: Duration = Duration::from_secs(4);
const MOST_PER_SECOND: f64 = 5e9;
