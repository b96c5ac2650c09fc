//! A program that sends on what it receives, with another Ethernet header: by a copy in its transmit ring, and by the
//! place in its receive ring, through a switch from ring to ring.
//!
//! ```text
//!   first port ── switch ── receive ring ── copied by the program ── transmit ring ── switch ── last port
//!                                └───────── its place, and a header ──── transmit ring
//! ```
//!
//! One thread of ours holds all three ports and does everything but the switch, whose thread has a CPU of its own. So a frame
//! crosses the switch twice, and is copied by it four times in either way; what differs is the program's copy, and where the
//! switch's third copy reads.

use std::time::{Duration, Instant};

use vnplug::Port;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, counted, value};

use crate::attached::cpu_time;
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;

const LENGTHS: [usize; 3] = [60, 1514, 9014];
/// Bytes of each ring.
const RING: u64 = 1 << 20;
/// Frames between two looks at the clock.
const BURST: usize = 64;
const SWITCH_CPU: usize = 0;
const PROGRAM_CPU: usize = 1;
/// What the program writes before what it leaves as it was.
const HEADER: usize = 14;
const FIRST: u8 = 1;
const MIDDLE: u8 = 2;
const LAST: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Posted,
    Copied,
}

/// What was measured of a way: frames per microsecond that arrived, and ns of processor time for each that was sent on, of the
/// program while it sends on and of the daemon in all.
type Measured = [f64; 3];

const PARTS: [(&str, &str); 3] = [
    ("", "Mpps"),
    ("-program", "ns/frame"),
    ("-daemon", "ns/frame"),
];

pub(crate) fn posted(plan: &Plan) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for len in LENGTHS {
        let mut samples = [(); 2].map(|()| [(); 3].map(|()| Samples::default()));
        for round in 1..=plan.rounds {
            // In turns: what changes with the machine changes for both.
            let mut ways = [Way::Posted, Way::Copied];
            if round % 2 == 0 {
                ways.reverse();
            }
            for way in ways {
                let measured = measure(way, len, plan.time)?;
                for (samples, figure) in samples[way as usize].iter_mut().zip(measured) {
                    samples.push(figure);
                }
                let [rate, program, daemon] = measured;
                eprintln!(
                    "  round {round}, {len} bytes, {way:?}: {rate:.3} Mpps, ns of the program {program:.0}, of the daemon \
                     {daemon:.0}"
                );
            }
        }
        let [posted, copied] = samples;
        let both = posted.into_iter().zip(copied);
        figures.extend(PARTS.into_iter().zip(both).map(|((part, unit), (ours, peer))| Figure {
            name: format!("context-posted-{len}{part}"),
            unit,
            ours,
            peer: Some(("copied by the program".to_owned(), peer)),
            limit: None,
            note: format!(
                "frames of {len} bytes through a switch on CPU {SWITCH_CPU} to a program that sends them on through it, with another \
                 Ethernet header, from where they lie; it also sends and takes them, on CPU {PROGRAM_CPU}. Rings of {RING} B. \
                 Processor time of the program is that of sending on alone, and the daemon's is all"
            ),
        }));
    }
    Ok(figures)
}

fn measure(way: Way, len: usize, time: Duration) -> Result<Measured> {
    let lab = Lab::new()?;
    let cpu = sys::cpu(SWITCH_CPU);
    let daemon = Daemon::start(&lab, None, &["--switch", &format!("lan0,cpus={cpu}")])?;
    let open = |way| {
        let options = daemon.port("lan0").join().transmit(RING).ring_bytes(RING);
        match way {
            Way::Posted => options.posts().open(),
            Way::Copied => options.open(),
        }
    };
    let mut ports = [open(Way::Copied)?, open(way)?, open(Way::Copied)?];
    for (port, station) in ports.iter_mut().zip([FIRST, MIDDLE, LAST]) {
        port.send(&frame(60, station, station))?;
    }
    std::thread::sleep(Duration::from_millis(50));
    sys::pin(sys::cpu(PROGRAM_CPU))?;
    let mut program = Program {
        frame: frame(len, MIDDLE, FIRST),
        header: frame(HEADER, LAST, MIDDLE),
        ports,
        forwarded: 0,
        spent_ns: 0,
        came: 0,
    };
    program.run(time / 8)?;
    let before = (program.forwarded, program.spent_ns, program.came);
    let daemons = cpu_time(daemon.pid())?;
    let begin = Instant::now();
    program.run(time)?;
    let seconds = begin.elapsed().as_secs_f64();
    let daemons = cpu_time(daemon.pid())?.saturating_sub(daemons);
    let forwarded = (program.forwarded - before.0).max(1) as f64;
    let [_, middle, _] = &program.ports;
    let number = middle.number().to_string();
    let all = daemon.counters();
    let port = all.iter().find(|it| it.kind == "port" && it.name == number);
    let refused = port.map_or(0, |port| value(port, "send_dropped_place"));
    let switch = counted(&all, "source");
    if refused > 0 || program.came * 10 < program.forwarded * 9 {
        let dropped = value(switch, "dropped_full");
        return Err(format!(
            "{} frames of {} arrived, {refused} places were refused, {dropped} found no room",
            program.came, program.forwarded
        )
        .into());
    }
    Ok([
        (program.came - before.2) as f64 / seconds / 1e6,
        (program.spent_ns - before.1) as f64 / forwarded,
        daemons.as_nanos() as f64 / forwarded,
    ])
}

/// The three ports, and what they did.
struct Program {
    frame: Vec<u8>,
    header: Vec<u8>,
    ports: [Port; 3],
    forwarded: u64,
    spent_ns: u64,
    came: u64,
}

impl Program {
    fn run(&mut self, time: Duration) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            for _ in 0..16 {
                self.send()?;
                let before = sys::thread_ns();
                self.forward()?;
                self.spent_ns += sys::thread_ns() - before;
                self.take()?;
            }
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let [first, ..] = &mut self.ports;
        let outbox = first.outbox()?;
        for _ in 0..BURST {
            if !outbox.push(&self.frame)? {
                break;
            }
        }
        outbox.flush();
        Ok(())
    }

    fn forward(&mut self) -> Result<()> {
        let [_, middle, _] = &mut self.ports;
        let (batch, outbox) = middle.batch_and_outbox(usize::MAX)?;
        for packet in batch {
            let packet = packet?;
            let rest = packet.bytes.get(HEADER..).ok_or("a short frame")?;
            self.forwarded += u64::from(outbox.forward(&self.header, rest)?);
        }
        outbox.flush();
        Ok(())
    }

    fn take(&mut self) -> Result<()> {
        let [.., last] = &mut self.ports;
        for packet in last.batch(usize::MAX) {
            std::hint::black_box(packet?.bytes.first());
            self.came += 1;
        }
        last.release();
        Ok(())
    }
}

fn frame(len: usize, to: u8, from: u8) -> Vec<u8> {
    let mut frame = vec![0x5a; len];
    frame[..HEADER].copy_from_slice(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5]);
    frame
}
