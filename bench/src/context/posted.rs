//! What a program that sends on what it received would save by *posting* where that lies in its receive ring, in place
//! of copying it into its transmit ring.
//!
//! ```text
//!   receive ring ── copied by the program ── transmit ring ── copied by the daemon ── batch    as it is
//!   receive ring ── its place, 16 bytes ──── transmit ring                                     only in this program
//!        └─────────────────────────────────────────────────── copied by the daemon ── batch
//! ```
//!
//! A thread on one processor is the daemon's, one on another is the program. They take turns of a batch, each over what
//! the other wrote, so each has to have that from the other's cache, and its time is its own. A real one would have to
//! keep records from being released before the daemon has read them; here nobody releases any before.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use vnplug_frame::{Frame, MAX_BATCH};
use vnplug_path::source::{Flushed, Transmitter};
use vnplug_ring::layout::{DATA_OFFSET, Geometry, Meta, ring_size};
use vnplug_ring::offload::Offload;
use vnplug_ring::{Consumer, Intake, Producer, Region};

use super::copies::Kept;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

const LENGTHS: [usize; 3] = [60, 1514, 9014];
const RING: u64 = 8 << 20;
/// A place: where, and how many bytes.
const PLACE: usize = 16;
const PROGRAM_CPU: usize = 0;
const DAEMON_CPU: usize = 1;
const MISSING: &str = "a frame that was received was not sent on";
const POSTED: &str = "posted, in the bench alone";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Copied,
    Posted,
}

/// ns of processor time for a frame: the program's, the daemon's.
type Spent = [f64; 2];

pub(crate) fn posted(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for len in LENGTHS {
        // By way: together, the program, the daemon.
        let mut samples = [(); 2].map(|()| [(); 3].map(|()| Samples::default()));
        for round in 1..=plan.rounds {
            let mut told = [[0.0; 2]; 2];
            for (at, way) in [Way::Copied, Way::Posted].into_iter().enumerate() {
                let [program, daemon] = measure(way, len, plan.time / 2)?;
                told[at] = [program, daemon];
                for (samples, spent) in
                    samples[at]
                        .iter_mut()
                        .zip([program + daemon, program, daemon])
                {
                    samples.push(spent);
                }
            }
            let told = told.map(|[program, daemon]| format!("{program:.0} + {daemon:.0}"));
            let [copied, posted] = told;
            eprintln!(
                "  round {round}, {len} bytes: ns of the program and the daemon: copied {copied}, posted {posted}"
            );
        }
        let [copied, posted] = samples;
        let parts = ["", "-program", "-daemon"].into_iter();
        figures.extend(parts.zip(copied.into_iter().zip(posted)).map(|(part, (ours, peer))| Figure {
            name: format!("context-posted-{len}{part}"),
            unit: "ns/frame",
            ours,
            peer: Some((POSTED.to_owned(), peer)),
            limit: None,
            note: format!(
                "frames of {len} bytes from a receive ring by a program on another processor and a transmit ring into the \
                 batch that is flushed; nothing is sent. Processor time of the program and of the daemon's part after it"
            ),
        }));
    }
    Ok(figures)
}

/// What both ends of a ring are made with.
fn geometry(len: usize) -> Geometry {
    Geometry {
        capacity: RING,
        snaplen: len.max(PLACE) as u32,
        link_type: 1,
        epoch: 256,
        port: 1,
        queue: 0,
    }
}

fn measure(way: Way, len: usize, time: Duration) -> Result<Spent> {
    let [received, sent] = [(); 2].map(|()| Region::heap(ring_size(RING)));
    let mut source =
        Producer::create(received.clone(), geometry(len)).map_err(|it| it.to_string())?;
    let mut intake = Intake::create(sent.clone(), geometry(len)).map_err(|it| it.to_string())?;
    let mut program = Program {
        way,
        from: Consumer::attach(received.clone()).map_err(|it| it.to_string())?,
        base: received.as_ptr() as usize + DATA_OFFSET as usize,
        to: Producer::attach(sent).map_err(|it| format!("{it:?}"))?,
    };
    let (ask, asked) = channel::<()>();
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let pinned = sys::pin(sys::cpu(PROGRAM_CPU));
            let mut turn = || match &pinned {
                Ok(()) => program.turn(),
                Err(error) => Err(error.to_string()),
            };
            while asked.recv().is_ok() {
                // Nobody hears it: the measurement is over.
                if tell.send(turn()).is_err() {
                    return;
                }
            }
        });
        sys::pin(sys::cpu(DAEMON_CPU))?;
        let mut out = Kept::new(true);
        let (frame, mut list) = (vec![7; len], vec![0; len.max(PLACE)]);
        let (mut ours, mut theirs, mut frames) = (0, 0, 0);
        let begin = Instant::now();
        while begin.elapsed() < time {
            for _ in 0..MAX_BATCH {
                if !source.push(&Meta::default(), &frame)? {
                    return Err("the program does not release".into());
                }
            }
            source.publish();
            ask.send(())?;
            theirs += told.recv()??;
            let before = sys::thread_ns();
            for _ in 0..MAX_BATCH {
                take(way, &mut intake, &received, &mut list, &mut out)?;
            }
            intake.release();
            let Flushed { sent, .. } = out.flush(&mut |_: &[Frame<'_>]| {});
            ours += sys::thread_ns() - before;
            frames += sent;
        }
        drop(ask);
        Ok([theirs, ours].map(|ns| ns as f64 / frames as f64))
    })
}

/// The daemon takes a frame into its batch.
fn take(
    way: Way,
    intake: &mut Intake,
    received: &Region,
    list: &mut [u8],
    out: &mut Kept,
) -> Result<()> {
    let place = out.place(list.len()).ok_or("the batch is full")?;
    let len = match way {
        Way::Copied => intake.take(place)?.ok_or(MISSING)?,
        Way::Posted => {
            intake.take(list)?.ok_or(MISSING)?;
            let word = |at: usize| list[at..].first_chunk().map(|it| u64::from_le_bytes(*it));
            let (at, len) = (word(0).ok_or("no place")?, word(8).ok_or("no length")?);
            if len > place.len() as u64 || at > RING - len {
                return Err("a place outside the ring".into());
            }
            received.read(DATA_OFFSET + at, &mut place[..len as usize]);
            len as usize
        }
    };
    out.placed(0..len, &Offload::default());
    Ok(())
}

/// Sends on what it receives.
struct Program {
    way: Way,
    from: Consumer,
    /// Where the records begin.
    base: usize,
    to: Producer,
}

impl Program {
    /// Sends on all that there is: ns of processor time.
    fn turn(&mut self) -> std::result::Result<u64, String> {
        // What was sent in the turn before is taken.
        self.from.release();
        let before = sys::thread_ns();
        while let Some(packet) = self.from.next().map_err(|it| it.to_string())? {
            let (meta, len) = (Meta::default(), packet.bytes.len() as u64);
            let pushed = match self.way {
                Way::Copied => self.to.push(&meta, packet.bytes),
                Way::Posted => {
                    let at = (packet.bytes.as_ptr() as usize - self.base) as u64;
                    let mut place = [0; PLACE];
                    place[..8].copy_from_slice(&at.to_le_bytes());
                    place[8..].copy_from_slice(&len.to_le_bytes());
                    self.to.push(&meta, &place)
                }
            };
            if !pushed.map_err(|it| it.to_string())? {
                return Err("the transmit ring is full".into());
            }
        }
        self.to.publish();
        Ok(sys::thread_ns() - before)
    }
}
