//! Instructions of a daemon for a frame from one card by vhost-user to another, counted by callgrind.
//!
//! The daemon runs under valgrind twice, with few frames and with many; the difference is what frames cost, with their
//! share of what the daemon does for each of its turns, and without start and end. Nobody reads on the switch.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_ring::offload::{Offload, flags, gso};

use super::card::Card;
use super::frames::Frames;
use crate::row::{Figure, Plan, Result, Samples};
use crate::stage::Valgrind;

/// A frame, and how it is called.
struct Kind {
    name: &'static str,
    what: &'static str,
    frames: fn() -> Frames,
    /// What is left to do with it: it is a super-frame.
    offload: Option<Offload>,
    /// Frames of a turn.
    burst: usize,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "60",
        what: "datagrams of 60 bytes",
        frames: || Frames::datagrams(60),
        offload: None,
        burst: 64,
    },
    Kind {
        name: "1514",
        what: "TCP segments in frames of 1514 bytes",
        frames: || Frames::flows(MSS),
        offload: None,
        burst: 64,
    },
    Kind {
        name: "64k",
        what: "super-frames of TCP of 45 segments, 65,226 bytes, which the other card takes whole",
        frames: || Frames::flows(45 * MSS),
        offload: Some(Offload {
            flags: flags::NEEDS_CSUM,
            gso_type: gso::TCPV4,
            gso_size: MSS as u16,
            csum_start: 34,
            csum_offset: 16,
        }),
        burst: 8,
    },
];

/// By the length of frames.
pub(crate) fn instructions(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for kind in &KINDS {
        let mut ours = Samples::default();
        for _ in 0..plan.rounds.min(ROUNDS) {
            let (few, many) = (counted(kind, FEW)?, counted(kind, MANY)?);
            ours.push((many as f64 - few as f64) / ((MANY - FEW) * kind.burst) as f64);
        }
        eprintln!("  {}: {:.0} instructions", kind.what, ours.median());
        figures.push(Figure {
            name: format!("stage-switch-{}", kind.name),
            unit: "instructions/frame",
            ours,
            peer: None,
            limit: None,
            note: format!(
                "callgrind, the difference of {MANY} and {FEW} times {} frames at once, from one card by vhost-user to another \
                 through a switch that nobody reads: {}; all threads of the daemon",
                kind.burst, kind.what
            ),
        });
    }
    Ok(figures)
}

/// Instructions of a daemon that forwards this number of `bursts`, from its start to its end.
fn counted(kind: &Kind, bursts: usize) -> Result<u64> {
    let lab = Lab::new()?;
    let socket = lab.dir().join("lan0.sock");
    let switch = format!("lan0,vhost={}", socket.display());
    let valgrind = Valgrind::serving(Command::new("valgrind"), lab.dir(), &["--switch", &switch])?;
    let (mut from, mut to) = (Card::join(&socket)?, Card::join(&socket)?);
    // The switch learns where both are; the first goes to nobody that is known.
    for (card, is_sender) in [(&mut from, true), (&mut to, false)] {
        card.push(&Frames::hello(is_sender));
        card.flush();
        sleep(SETTLED);
    }
    from.take();
    to.take();
    let mut frames = (kind.frames)();
    for _ in 0..bursts {
        let deadline = Instant::now() + LIMIT;
        from.flush();
        for _ in 0..kind.burst {
            let has_room = match &kind.offload {
                Some(offload) => from.push_long(frames.this(), offload),
                None => from.push(frames.this()),
            };
            if !has_room {
                return Err("a card has no room for all of these frames at once".into());
            }
            frames.advance();
        }
        from.flush();
        let mut came = 0;
        while came < kind.burst as u64 {
            came += to.take();
            if Instant::now() > deadline {
                let what = format!("{came} of {} frames came", kind.burst);
                return Err(valgrind.said(&what).into());
            }
            sleep(STEP);
        }
        // What came was sent.
        from.flush();
    }
    valgrind.instructions()
}

/// Bytes of a segment.
const MSS: usize = 1448;
/// Bursts.
const FEW: usize = 20;
const MANY: usize = 320;
/// Counts hardly differ.
const ROUNDS: usize = 2;
/// Until the switch knows a card, slow as it is under valgrind.
const SETTLED: Duration = Duration::from_millis(500);
/// Between two looks at what came: the other end is slower.
const STEP: Duration = Duration::from_micros(100);
/// Longest time for a burst.
const LIMIT: Duration = Duration::from_secs(20);
