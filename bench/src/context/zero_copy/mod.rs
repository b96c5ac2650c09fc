//! What it costs that frames are checked and copied on the way out: against sending them from where their sender wrote
//! them, with and without a check (table 5.3 of Menon's dissertation in kind).
//!
//! ```text
//!   transmit ring ── copied, judged ─────────────── packet socket ── veth    as it is
//!   transmit ring ── headers copied, judged ─────── packet socket ── veth    the rest is read by the kernel
//!   transmit ring ── (only in this program) ─────── packet socket ── veth    nothing is checked
//! ```
//!
//! A thread on one processor fills the ring, another on the next serves it, as an application and the daemon's thread
//! do. The first way is the product's own code; the others stand in [`scatter`].

mod scatter;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use vnplug_e2e::Netns;
use vnplug_frame::MAX_BATCH;
use vnplug_frame::lock::SourceLock;
use vnplug_path::engine::sender::Sender;
use vnplug_path::engine::terms::Terms;
use vnplug_path::source::Queue;
use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig};
use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::{Intake, Producer, Region};

use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;
use scatter::{Check, Scatter};

/// Lengths of frames: an ordinary one and a jumbo, where there is the most to copy.
const LENGTHS: [usize; 2] = [1514, 9014];
/// What Menon's contexts sent together, in Mb/s: at this rate processor time is compared.
const RATE: f64 = 1867.0;
const RING: u64 = 4 << 20;
const FILLER_CPU: usize = 0;
const SERVER_CPU: usize = 1;
const WIRE: &str = "wire0";
/// Whose frames they are, and where they say they come from.
const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ADDRESS: &str = "10.0.0.5";

/// What the thread that fills the ring says.
type Filled = std::result::Result<(), String>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Copied,
    Headers,
    Unchecked,
}

const WAYS: [Way; 3] = [Way::Copied, Way::Headers, Way::Unchecked];

/// What a way did.
#[derive(Clone, Copy, Default)]
struct Spent {
    /// Megabits a second, flat out, of the time that the thread served the ring.
    mbits: f64,
    /// Per cent of a processor at [`RATE`].
    cpu: f64,
}

pub(crate) fn zero_copy(plan: &Plan) -> Result<Vec<Figure>> {
    let netns = Netns::new()?;
    netns.veth(WIRE, "wire1")?;
    for name in [WIRE, "wire1"] {
        netns.ip(&["link", "set", name, "mtu", "9000"])?;
    }
    let mut figures = Vec::new();
    for len in LENGTHS {
        let [mut rates, mut costs] = [(); 2].map(|()| WAYS.map(|_| Samples::default()));
        let mut validation = Samples::default();
        for round in 1..=plan.rounds {
            let mut told = [Spent::default(); WAYS.len()];
            for (at, way) in WAYS.into_iter().enumerate() {
                let measure = |rate| {
                    let measured = measure(way, len, plan.time / 2, rate);
                    measured.map_err(|error| error.to_string())
                };
                let mbits = netns.enter(|| measure(None))??.mbits;
                let cpu = netns.enter(|| measure(Some(RATE)))??.cpu;
                told[at] = Spent { mbits, cpu };
                rates[at].push(mbits);
                costs[at].push(cpu);
            }
            validation.push(told[0].cpu - told[2].cpu);
            let told = told.map(|it| format!("{:.0} Mb/s, {:.1} % at {RATE}", it.mbits, it.cpu));
            let [copied, headers, unchecked] = told;
            eprintln!(
                "  round {round}, {len} bytes: copied {copied}; headers alone {headers}; unchecked {unchecked}"
            );
        }
        figures.extend(figures_of(len, rates, costs, validation));
    }
    Ok(figures)
}

fn figures_of(
    len: usize,
    rates: [Samples; 3],
    costs: [Samples; 3],
    validation: Samples,
) -> Vec<Figure> {
    let note = format!(
        "frames of {len} bytes out of a transmit ring of 4 MiB that a thread on another processor fills, through a packet socket into a \
         veth that nobody reads; the sender is locked to a station and an address. Ours is checked and copied; the peer \
         is in the bench alone: sent from where the sender wrote it, nothing checked. -headers: checked, and of the \
         frame its first {HEADERS} bytes copied"
    );
    let figure =
        |name: &str, unit, ours: &Samples, peer: Option<(&str, &Samples)>, note: String| Figure {
            name: format!("context-zero-copy-{len}{name}"),
            unit,
            ours: ours.clone(),
            peer: peer.map(|(peer, samples)| (peer.to_owned(), samples.clone())),
            limit: None,
            note,
        };
    let cpu = format!("{note}; processor time of the thread that serves, at {RATE} Mb/s");
    vec![
        figure(
            "",
            "Mb/s",
            &rates[0],
            Some((UNCHECKED, &rates[2])),
            note.clone(),
        ),
        figure(
            "-headers",
            "Mb/s",
            &rates[1],
            Some((UNCHECKED, &rates[2])),
            note,
        ),
        figure(
            "-cpu",
            CPU,
            &costs[0],
            Some((UNCHECKED, &costs[2])),
            cpu.clone(),
        ),
        figure(
            "-headers-cpu",
            CPU,
            &costs[1],
            Some((UNCHECKED, &costs[2])),
            cpu.clone(),
        ),
        figure(
            "-validation",
            CPU,
            &validation,
            None,
            format!("{cpu}; ours less the peer's of the same round"),
        ),
    ]
}

/// Serves a ring that is filled again and again, flat out or at this many Mb/s.
fn measure(way: Way, len: usize, time: Duration, mbits: Option<f64>) -> Result<Spent> {
    let geometry = Geometry {
        capacity: RING,
        snaplen: len as u32,
        link_type: 1,
        epoch: 256,
        port: 1,
        queue: 0,
    };
    let region = Region::heap(ring_size(RING));
    let intake = Intake::create(region.clone(), geometry).map_err(|error| error.to_string())?;
    let producer = Producer::attach(region.clone()).map_err(|error| format!("{error:?}"))?;
    let lock = SourceLock {
        stations: vec![OWN],
        networks: ADDRESS.parse()?,
        ..SourceLock::default()
    };
    let mut out = match way {
        Way::Copied => Out::ours(intake, lock)?,
        Way::Headers => Out::bare(region, geometry, Check::Headers(lock))?,
        Way::Unchecked => Out::bare(region, geometry, Check::Nothing)?,
    };
    let (ask, asked) = channel::<()>();
    let (tell, full) = channel::<Filled>();
    std::thread::scope(|scope| {
        scope.spawn(move || match sys::pin(sys::cpu(FILLER_CPU)) {
            Ok(()) => fill(producer, &frame(len), &asked, &tell),
            Err(error) => drop(tell.send(Err(error.to_string()))),
        });
        sys::pin(sys::cpu(SERVER_CPU))?;
        let spent = serve(&mut out, len, time, mbits, || {
            ask.send(())?;
            Ok(full.recv()??)
        });
        drop(ask);
        spent
    })
}

fn fill(
    mut producer: Producer,
    frame: &[u8],
    asked: &std::sync::mpsc::Receiver<()>,
    tell: &std::sync::mpsc::Sender<Filled>,
) {
    while asked.recv().is_ok() {
        let filled = loop {
            match producer.push(&Meta::default(), frame) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(lie) => break Err(lie.to_string()),
            }
        };
        producer.publish();
        // Nobody hears it: the measurement is over.
        if tell.send(filled).is_err() {
            return;
        }
    }
}

fn serve(
    out: &mut Out,
    len: usize,
    time: Duration,
    mbits: Option<f64>,
    mut refill: impl FnMut() -> Result<()>,
) -> Result<Spent> {
    let bits = |frames: usize| (frames * len * 8) as f64;
    let (mut served, mut cpu_ns, mut frames) = (Duration::ZERO, 0, 0);
    let begin = Instant::now();
    let mut due = begin;
    while begin.elapsed() < time {
        refill()?;
        loop {
            let (at, before) = (Instant::now(), sys::thread_ns());
            let taken = out.turn()?;
            served += at.elapsed();
            cpu_ns += sys::thread_ns() - before;
            frames += taken;
            if taken == 0 {
                break;
            }
            if let Some(mbits) = mbits {
                due += Duration::from_secs_f64(bits(taken) / (mbits * 1e6));
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
    }
    let sent = out.sent();
    if sent < frames as u64 / 100 * 99 {
        return Err(format!("of {frames} frames the kernel took {sent}").into());
    }
    let seconds = bits(frames) / (RATE * 1e6);
    Ok(Spent {
        mbits: bits(frames) / served.as_secs_f64() / 1e6,
        cpu: cpu_ns as f64 / 1e7 / seconds,
    })
}

/// The way out.
enum Out {
    Ours(Box<Sender>, Box<dyn Queue>),
    Bare(Box<Scatter>),
}

impl Out {
    fn ours(intake: Intake, lock: SourceLock) -> Result<Self> {
        let config = AfPacketConfig {
            blocks: 2,
            reserve: false,
            offload: false,
            early: false,
            ..AfPacketConfig::new(WIRE)
        };
        let queue = AfPacket::open(config)?.pop().ok_or("no queue")?;
        let mut sender = Sender::new(1, intake, None, None);
        let terms = Terms {
            lock,
            ..Terms::default()
        };
        drop(sender.set_terms(Arc::new(terms), 0));
        Ok(Self::Ours(Box::new(sender), queue))
    }

    fn bare(region: Region, geometry: Geometry, check: Check) -> Result<Self> {
        let scatter = Scatter::new(WIRE, region, geometry, check)?;
        Ok(Self::Bare(Box::new(scatter)))
    }

    /// Sends a batch of what waits: how many frames.
    fn turn(&mut self) -> Result<usize> {
        match self {
            Self::Ours(sender, queue) => {
                let out = queue.transmitter().ok_or("it does not send")?;
                let visit = sender.serve(out, (MAX_BATCH, TURN), 0, &mut |_, _| {})?;
                Ok(visit.frames)
            }
            Self::Bare(scatter) => scatter.turn(),
        }
    }

    /// Frames that the kernel took.
    fn sent(&self) -> u64 {
        match self {
            Self::Ours(sender, _) => sender.counters.sent,
            Self::Bare(scatter) => scatter.sent,
        }
    }
}

/// A datagram of the sender's own.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = vec![7; len];
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
    frame[6..12].copy_from_slice(&OWN);
    frame[12..14].copy_from_slice(&[8, 0]);
    let datagram = (len - 14) as u16;
    frame[14..34].copy_from_slice(&[
        0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 5, 10, 0, 0, 1,
    ]);
    frame[16..18].copy_from_slice(&datagram.to_be_bytes());
    frame
}

/// Bytes of a turn, as the engine's are bounded.
const TURN: u64 = 256 << 10;
/// How much of a frame would have to be the daemon's own: what is judged, and may not be written over.
const HEADERS: usize = 128;
const UNCHECKED: &str = "from where it lies, nothing checked";
const CPU: &str = "% CPU";
