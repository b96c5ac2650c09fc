//! Instructions per packet by stage of the path, counted by callgrind.
//!
//! The daemon, or a reader, runs under valgrind twice, with few and with many packets; the difference
//! is what packets cost, without start and end. Instructions are those of one packet on the way
//! through one port; counts repeat to a few per cent whatever else the machine does. They are not
//! time: a missed cache line is not in them, nor is what the kernel does.
//!
//! The path is counted twice: to a port that wants everything, and to one with a filter that all
//! frames pass. The source is af_packet both times, on a veth that is sent into by parts: the next one
//! when the last one was read, so that nothing is lost however slow valgrind is.

mod callgrind;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vnplug::{Client, PortOptions};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_ring::control::FilterSpec;

use crate::row::{Figure, Plan, Result, Samples};
use crate::wire::{Load, Wire};
use callgrind::Profile;

/// Instructions by stage.
type Stages = BTreeMap<&'static str, f64>;

/// What the daemon's port asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// Everything.
    Plain,
    /// What passes [`FILTER`].
    Filtered,
}

/// The path to one reader, for two frame lengths.
pub(crate) fn by_stage(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for len in [60, 1514] {
        for variant in [Variant::Plain, Variant::Filtered] {
            let mut samples: BTreeMap<&str, Samples> = BTreeMap::new();
            for _ in 0..plan.rounds.min(ROUNDS) {
                let mut stages = per_packet(|packets| daemon(variant, len, packets))?;
                if variant == Variant::Plain {
                    stages.extend(per_packet(|packets| reader(len, packets))?);
                }
                for (stage, instructions) in stages {
                    samples.entry(stage).or_default().push(instructions);
                }
            }
            for (stage, ours) in samples {
                figures.push(variant.figure(len, stage, ours));
            }
        }
    }
    Ok(figures)
}

impl Variant {
    fn figure(self, len: usize, stage: &str, ours: Samples) -> Figure {
        let (name, port) = match self {
            Self::Plain => (format!("stage-{len}-{stage}"), "without filter".to_owned()),
            Self::Filtered => (
                format!("stage-{len}-filtered-{stage}"),
                format!("with the filter {FILTER}, which all of them pass (readers: other rows)"),
            ),
        };
        eprintln!("  {name}: {:.1}", ours.median());
        Figure {
            name,
            unit: "instructions/packet",
            ours,
            peer: None,
            limit: None,
            note: format!(
                "callgrind, the difference of {MANY} and {FEW} packets of {len} bytes that an \
                 af_packet source has from a veth, one port {port}; code of the standard library \
                 counts where it is called. publish is once a batch, and its stores to shared memory \
                 are in ring; a stage below 0.05 is not told"
            ),
        }
    }
}

/// What a packet more costs.
fn per_packet(run: impl Fn(u64) -> Result<Stages>) -> Result<Stages> {
    let (few, many) = (run(FEW)?, run(MANY)?);
    let each = |(stage, cost): (&'static str, f64)| {
        let more = cost - few.get(stage).copied().unwrap_or(0.0);
        (stage, more / (MANY - FEW) as f64)
    };
    // What is left of start and end is not a packet's.
    Ok(many
        .into_iter()
        .map(each)
        .filter(|(_, cost)| *cost >= 0.05)
        .collect())
}

/// The daemon under valgrind, and a reader that takes everything.
fn daemon(variant: Variant, len: usize, packets: u64) -> Result<Stages> {
    let wire = Wire::new()?;
    let dir = wire.lab.dir();
    let filter = match variant {
        Variant::Plain => FilterSpec::All,
        Variant::Filtered => FilterSpec::Program(PROGRAM.into_iter().flat_map(bytes).collect()),
    };
    let command = wire.netns.command("valgrind");
    let valgrind = Valgrind::serving(command, dir, &["--source", "wire0"])?;
    let deadline = Instant::now() + LIMIT;
    let mut port = PortOptions::new("wire0")
        .socket(dir.join("s"))
        .ring_bytes(16 << 20)
        .filter_spec(filter)
        .open()?;
    let (mut sent, mut taken) = (0, 0);
    while taken < packets && Instant::now() < deadline {
        if taken == sent {
            sent += wire.send(PART, len, Load::FlatOut)?.frames;
        }
        for packet in port.batch(usize::MAX) {
            packet?;
            taken += 1;
        }
        port.release();
        sleep(Duration::from_millis(1));
    }
    drop(port);
    if taken != packets {
        return Err(valgrind
            .said(&format!("{taken} of {packets} packets"))
            .into());
    }
    Ok(stages(&valgrind.finish()?))
}

/// One instruction of classic BPF, as the control protocol has it.
fn bytes((code, jump_true, jump_false, k): (u16, u8, u8, u32)) -> [u8; 8] {
    let ([low, high], [a, b, c, d]) = (code.to_le_bytes(), k.to_le_bytes());
    [low, high, jump_true, jump_false, a, b, c, d]
}

/// A reader under valgrind, of a daemon that is not.
fn reader(len: usize, packets: u64) -> Result<Stages> {
    let lab = Lab::new()?;
    let source = format!("lab=gen,size={len},count={packets},pps=50000,start=attach");
    let daemon = Daemon::start(&lab, None, &["--source", &source])?;
    let mut command = Command::new("valgrind");
    command
        .args(valgrind(lab.dir()))
        .arg(std::env::current_exe()?)
        .args(["child", "stage-reader"])
        .arg(daemon.socket())
        .arg(packets.to_string());
    let mut valgrind = Valgrind::start(command, lab.dir())?;
    let deadline = Instant::now() + LIMIT;
    while valgrind.child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            return Err(valgrind.said("the reader does not end").into());
        }
        sleep(Duration::from_millis(50));
    }
    let all = stages(&valgrind.finish()?);
    // The ring's code in this process is the reader's.
    let application = all.get("application").copied().unwrap_or(0.0);
    let read = all.values().sum::<f64>() - application;
    Ok(Stages::from([("read", read), ("application", application)]))
}

/// The reader's process: takes this many packets in batches and looks at their headers.
pub(crate) fn child(words: &[String]) -> Result<()> {
    let [socket, packets] = words else {
        return Err("SOCKET PACKETS".into());
    };
    let packets: u64 = packets.parse()?;
    let mut port = PortOptions::new("lab")
        .socket(socket)
        .ring_bytes(16 << 20)
        .open()?;
    let (mut taken, mut bytes) = (0, 0);
    while taken < packets {
        let before = taken;
        for packet in port.batch(64) {
            bytes += u64::from(packet?.meta.wire_len);
            taken += 1;
        }
        port.release();
        if taken == before {
            // A batch and more comes meanwhile, so that an empty look is rare.
            sleep(Duration::from_millis(5));
        }
    }
    println!("{bytes}");
    Ok(())
}

/// Sums up by stage. Code that is not ours counts where the function's own code counts.
fn stages(profile: &Profile) -> Stages {
    let mut stages = Stages::new();
    for (function, files) in &profile.functions {
        let mut own: BTreeMap<&'static str, u64> = BTreeMap::new();
        let mut foreign = 0;
        for (file, cost) in files {
            match stage_of(file) {
                Some(stage) => *own.entry(stage).or_default() += cost,
                None => foreign += cost,
            }
        }
        if own.is_empty() {
            let is = |names: &[&str]| names.iter().any(|name| function.contains(name));
            let stage = match function.starts_with("0x") {
                // Machine code without a name is a filter's.
                true => "filter",
                false if is(&["memcpy", "memmove"]) => "copy",
                false => "other",
            };
            own.insert(stage, foreign);
            foreign = 0;
        }
        let sum: u64 = own.values().sum();
        for (stage, cost) in own {
            let share = foreign as f64 * cost as f64 / sum.max(1) as f64;
            *stages.entry(stage).or_default() += cost as f64 + share;
        }
    }
    stages
}

/// The stage that a source file of ours belongs to.
fn stage_of(file: &str) -> Option<&'static str> {
    const STAGES: [(&str, &str); 16] = [
        ("/path/src/engine/", "source"),
        ("/path/src/source/", "source"),
        ("/frame/src/witness", "source"),
        ("/crc32c-", "source"),
        ("/frame/src/flow", "flow-hash"),
        ("/frame/src/headers", "flow-hash"),
        ("/path/src/fanout/", "fanout"),
        ("/filter/src/", "filter"),
        ("/bpf/src/", "filter"),
        ("/path/src/rules/", "filter"),
        ("/path/src/", "port"),
        ("/ring/src/producer/publish", "publish"),
        ("/ring/src/consumer", "read"),
        ("/ring/src/", "ring"),
        ("/guest/src/", "read"),
        ("/bench/src/", "application"),
    ];
    STAGES
        .iter()
        .find(|(path, _)| file.contains(path))
        .map(|(_, stage)| *stage)
}

fn valgrind(dir: &Path) -> [String; 3] {
    let out = dir.join(OUT);
    [
        "--tool=callgrind".to_owned(),
        format!("--callgrind-out-file={}", out.display()),
        "--quiet".to_owned(),
    ]
}

/// A program under valgrind.
pub(crate) struct Valgrind {
    child: Child,
    dir: PathBuf,
}

impl Valgrind {
    fn start(mut command: Command, dir: &Path) -> Result<Self> {
        let log = File::create(dir.join(LOG))?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let spawned = command.spawn();
        Ok(Self {
            child: spawned.map_err(|error| format!("valgrind (package valgrind): {error}"))?,
            dir: dir.to_owned(),
        })
    }

    /// A daemon that serves, of these arguments beside that of its socket, `s` in `dir`; `command` begins valgrind.
    pub(crate) fn serving(mut command: Command, dir: &Path, args: &[&str]) -> Result<Self> {
        command
            .args(valgrind(dir))
            .arg(program("vnplugd")?)
            .arg("--socket")
            .arg(dir.join("s"))
            .arg("--pool-dir")
            .arg(dir)
            .args(args);
        let valgrind = Self::start(command, dir)?;
        let deadline = Instant::now() + LIMIT;
        while Client::connect_to(&dir.join("s")).is_err() {
            if Instant::now() > deadline {
                return Err(valgrind.said("the daemon does not serve").into());
            }
            sleep(Duration::from_millis(50));
        }
        Ok(valgrind)
    }

    /// Ends it in order; all instructions that it took.
    pub(crate) fn instructions(self) -> Result<u64> {
        Ok(self.finish()?.all())
    }

    /// Ends it in order, and reads what it counted.
    fn finish(mut self) -> Result<Profile> {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            // An error means that it has ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        self.child.wait()?;
        let text = fs::read_to_string(self.dir.join(OUT));
        Ok(Profile::parse(&text.map_err(|_| self.said("no counts"))?))
    }

    /// A complaint, with the end of what it printed.
    pub(crate) fn said(&self, what: &str) -> String {
        let log = fs::read_to_string(self.dir.join(LOG)).unwrap_or_default();
        let last: Vec<&str> = log.lines().rev().take(3).collect();
        format!("{what}: {last:?}")
    }
}

impl Drop for Valgrind {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const FEW: u64 = 20_000;
const MANY: u64 = 120_000;
/// This many at a time, of both; the kernel's buffer and the port's ring hold them.
const PART: u64 = 4_000;
/// What all frames pass, whose port is that of the service "discard".
const FILTER: &str = "ip and udp dst port 9";
/// The same as libpcap compiles it: the daemon's compiler, a confined process of its own, does not
/// start under valgrind.
const PROGRAM: [(u16, u8, u8, u32); 11] = [
    (0x28, 0, 0, 0xc),
    (0x15, 0, 8, 0x800),
    (0x30, 0, 0, 0x17),
    (0x15, 0, 6, 0x11),
    (0x28, 0, 0, 0x14),
    (0x45, 4, 0, 0x1fff),
    (0xb1, 0, 0, 0xe),
    (0x48, 0, 0, 0x10),
    (0x15, 0, 1, 0x9),
    (0x06, 0, 0, 0x40000),
    (0x06, 0, 0, 0x0),
];
/// Counts hardly differ.
const ROUNDS: usize = 2;
const LIMIT: Duration = Duration::from_secs(120);
const OUT: &str = "callgrind.out";
const LOG: &str = "valgrind.log";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_code_counts_where_it_is_called() {
        let files = |list: &[(&str, u64)]| {
            list.iter()
                .map(|(file, cost)| ((*file).to_owned(), *cost))
                .collect()
        };
        let mut profile = Profile::default();
        let serve = files(&[
            ("/x/path/src/port/mod.rs", 30),
            ("/x/ring/src/producer.rs", 10),
            ("/rustc/iter.rs", 4),
        ]);
        profile.functions.insert("serve".into(), serve);
        profile
            .functions
            .insert("__memcpy_avx".into(), files(&[("memmove.S", 7)]));
        profile
            .functions
            .insert("0x00000000059c1000".into(), files(&[("???", 9)]));
        let publish = files(&[("/x/ring/src/producer/publish.rs", 5)]);
        profile.functions.insert("publish".into(), publish);
        let stages = stages(&profile);
        assert_eq!((stages["filter"], stages["publish"]), (9.0, 5.0));
        assert_eq!(
            (stages["port"], stages["ring"], stages["copy"]),
            (33.0, 11.0, 7.0)
        );
    }
}
