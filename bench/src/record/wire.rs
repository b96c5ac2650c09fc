//! Rows `record-SIZE`: a veth recorded by each program in turn, at several rates.

use std::time::{Duration, Instant};

use vnplug_e2e::traffic::{Sent, Stream};

use super::place::{DiskDir, clear};
use super::tool::{SHARE_MIB, Tool};
use super::{GB, files};
use crate::handoff::Sizes;
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::wire::{Load, Wire};
use crate::{limit, sys};

/// Who records; the first is ours.
const TOOLS: [Tool; 4] = [Tool::Vnplug, Tool::Tcpdump, Tool::Dumpcap, Tool::Netsniff];

/// The rates, slow ones first, as figures name them.
const LOADS: [(&str, Load); 4] = [
    ("100k", Load::Steady(100_000)),
    ("400k", Load::Steady(400_000)),
    ("800k", Load::Steady(800_000)),
    (FLAT, Load::FlatOut),
];
const FLAT: &str = "flat";

/// Loss, cost and rate of each program, with frames of one kind.
pub(crate) fn on_a_wire(plan: &Plan, sizes: Sizes) -> Result<Vec<Figure>> {
    sys::ordinary()?;
    sys::beside_sender(|| rates(plan, sizes))
}

fn rates(plan: &Plan, sizes: Sizes) -> Result<Vec<Figure>> {
    let wire = Wire::new()?;
    wire.add(UNHEARD)?;
    let most = MOST_BYTES.min(frames(plan, sizes, Load::FlatOut) * (sizes.mean() as u64 + HEAD));
    let place = DiskDir::with_room(plan, 2 * most + MARGIN)?;
    let mut series: [[Series; TOOLS.len()]; LOADS.len()] = Default::default();
    let mut alone = Samples::default();
    let mut run = 0;
    for round in 1..=plan.rounds {
        for ((word, load), series) in LOADS.into_iter().zip(&mut series) {
            let mut told = Vec::new();
            for (tool, series) in TOOLS.into_iter().zip(series) {
                run += 1;
                let turn = turn(plan, &wire, &place, tool, sizes, load, run)
                    .map_err(|error| format!("{}: {error}", tool.name()))?;
                told.push(format!("{} {:.2} %", tool.name(), turn.lost_percent()));
                series.push(&turn);
            }
            eprintln!("  round {round}, {word}: lost: {}", told.join("; "));
        }
        let far = format!("far{UNHEARD}");
        let count = frames(plan, sizes, Load::FlatOut);
        let sent = send(&wire, &far, sizes, Load::FlatOut, count, run)?;
        alone.push(sent.pps() * sizes.mean() as f64 / 1e6);
    }
    Ok(figures(plan, sizes, &series, &alone))
}

/// What one program did with one load.
struct Turn {
    sent: u64,
    captured: u64,
    /// Of the captured frames.
    bytes: u64,
    cpu: Duration,
    /// From the first frame sent to the last byte on the disk.
    elapsed: Duration,
    pps: f64,
}

impl Turn {
    fn lost_percent(&self) -> f64 {
        let lost = self.sent.saturating_sub(self.captured);
        lost as f64 / self.sent.max(1) as f64 * 100.0
    }
}

/// The turns of one program with one load.
#[derive(Default)]
struct Series {
    lost: Samples,
    cost: Samples,
    rate: Samples,
    pps: Samples,
}

impl Series {
    fn push(&mut self, turn: &Turn) {
        let bytes = turn.bytes.max(1) as f64;
        self.lost.push(turn.lost_percent());
        self.cost.push(turn.cpu.as_secs_f64() * GB / bytes);
        self.rate
            .push(bytes / 1e6 / turn.elapsed.as_secs_f64().max(1e-9));
        self.pps.push(turn.pps);
    }
}

fn turn(
    plan: &Plan,
    wire: &Wire,
    place: &DiskDir,
    tool: Tool,
    sizes: Sizes,
    load: Load,
    run: u32,
) -> Result<Turn> {
    let dir = place.fresh("captured")?;
    let recording = tool.start(wire, &dir)?;
    let begin = Instant::now();
    let sent = send(wire, "far0", sizes, load, frames(plan, sizes, load), run)?;
    let ended = recording.end()?;
    let found = files::count(&dir, Some(run))?;
    clear(&dir)?;
    Ok(Turn {
        sent: sent.frames,
        captured: found.packets,
        bytes: found.bytes,
        cpu: ended.cpu,
        elapsed: ended.at.saturating_duration_since(begin),
        pps: sent.pps(),
    })
}

fn send(wire: &Wire, far: &str, sizes: Sizes, load: Load, count: u64, run: u32) -> Result<Sent> {
    let stream = Stream {
        pps: load.pps(),
        run,
        flows: FLOWS,
        mix: (0..12).map(|frame| sizes.of(frame)).collect(),
        ..Stream::new(far, count)
    };
    Ok(wire.netns.enter(|| {
        sys::pin(sys::cpu(0)).map_err(|error| error.to_string())?;
        stream.send().map_err(|error| error.to_string())
    })??)
}

/// Frames of one turn.
fn frames(plan: &Plan, sizes: Sizes, load: Load) -> u64 {
    let pps = load.pps().map_or(FLAT_OUT_PPS, std::num::NonZeroU64::get);
    let frames = (pps as f64 * plan.time.as_secs_f64()) as u64;
    frames.clamp(1, MOST_BYTES / (sizes.mean() as u64 + HEAD))
}

fn figures(
    plan: &Plan,
    sizes: Sizes,
    series: &[[Series; TOOLS.len()]; LOADS.len()],
    alone: &Samples,
) -> Vec<Figure> {
    let mut figures = Vec::new();
    for ((word, load), series) in LOADS.into_iter().zip(series) {
        let [ours, peers @ ..] = series;
        let (mpps, gbits) = {
            let pps = ours.pps.median();
            (pps / 1e6, pps * sizes.mean() as f64 * 8.0 / GB)
        };
        let how = match load {
            Load::FlatOut => "as fast as the sender can",
            _ => "steadily",
        };
        let note = format!(
            "frames of {sizes} bytes on a veth for {:.1} s, {how}: {mpps:.2} Mpps, {gbits:.2} Gb/s \
             with vNPlug. Lost: not in the files, of what was sent. CPU: vnplugd and vnplug \
             record, or the other program, with the flush of what is in the page cache (without the \
             kernel's own threads), per GB of frames in the files. MB/s: until all is on the disk. {} \
             MiB of buffers each",
            plan.time.as_secs_f64(),
            3 * SHARE_MIB,
        );
        for (peer, tool) in peers.iter().zip(&TOOLS[1..]) {
            let figure = |what: &str, unit, ours: &Samples, theirs: &Samples| Figure {
                name: match tool {
                    Tool::Tcpdump => format!("record-{sizes}-{word}-{what}"),
                    other => format!("record-{sizes}-{word}-{what}-{}", short(*other)),
                },
                unit,
                ours: ours.clone(),
                peer: Some((tool.name().to_owned(), theirs.clone())),
                limit: None,
                note: note.clone(),
            };
            figures.push(figure("loss", "% lost", &ours.lost, &peer.lost));
            figures.push(figure("cpu", "CPU s/GB", &ours.cost, &peer.cost));
            if word == FLAT {
                let rate = figure("rate", "MB/s", &ours.rate, &peer.rate);
                figures.push(Figure {
                    limit: Some(Limit::new(limit::SENDER, alone.clone())),
                    ..rate
                });
            }
        }
    }
    figures
}

fn short(tool: Tool) -> &'static str {
    match tool {
        Tool::Netsniff => "netsniff",
        other => other.name(),
    }
}

/// About what the sender reaches; decides only how many frames a turn has.
const FLAT_OUT_PPS: u64 = 1_200_000;
/// No divisor in common with the 12 places of the mix: each flow has frames of every length.
const FLOWS: u32 = 1001;
/// The wire that nobody listens to.
const UNHEARD: usize = 9;
/// Most bytes of one capture.
const MOST_BYTES: u64 = 3_000_000_000;
/// Bytes that files have for each frame beside it, and its padding.
const HEAD: u64 = 36;
/// Room that is left to others.
const MARGIN: u64 = 1_000_000_000;
