//! What the confinement of an operator's program is of a frame's whole way through the daemon: from the packet socket's
//! ring, through the fanout and the program, into a port's ring.
//!
//! One thread sends a part of the frames into a veth, then has them come out of the socket at its other end: what
//! is measured is the processor time of that alone, without the kernel's work before it. The parts go in turns to a port
//! whose program is confined and to one whose is not.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vnplug_e2e::third_party::example_bpf;
use vnplug_path::fanout::Fanout;
use vnplug_path::port::doorbell::Doorbell;
use vnplug_path::port::{Port, PortProgram, Totals};
use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig, Direction};
use vnplug_path::source::{Queue, Received};
use vnplug_ring::layout::{Geometry, ring_size};
use vnplug_ring::{Consumer, Producer, Region};
use vnplug_twin::{Instance, Object, Program};

use super::{SIZES, believed};
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys;
use crate::wire::{Load, Wire};

/// Programs that let every frame pass. (`first` drops nearly all of a stream: there is no ring in its way.)
const PROGRAMS: [&str; 2] = ["count", "headers"];
/// Frames of a part: the socket's ring and the port's have room for all.
const PART: u64 = 4096;
const RING: u64 = 32 << 20;
/// The longest wait for a part to come.
const PATIENCE: Duration = Duration::from_secs(5);
const CPU: usize = 0;

/// Nanoseconds of the daemon's processor time per frame.
pub(crate) fn whole_path(plan: &Plan) -> Result<Vec<Figure>> {
    sys::pin(sys::cpu(CPU))?;
    let wire = Wire::new()?;
    let config = AfPacketConfig {
        direction: Direction::Rx,
        early: false,
        reserve: false,
        ..AfPacketConfig::new("wire0")
    };
    let open = || AfPacket::open(config).map_err(|error| error.to_string());
    let mut queue = wire.netns.enter(open)??.pop().ok_or("no queue")?;
    let mut figures = Vec::new();
    for name in PROGRAMS {
        let object = std::fs::read(example_bpf(&format!("{name}.c"), wire.lab.dir())?)?;
        let program = Program::load(name, &Object::parse(&object, None)?)?;
        let believing = Instance::new(&believed(&program)?)?;
        let mut ways = [Way::new(program.instance()?)?, Way::new(believing)?];
        for size in SIZES {
            let (mut ours, mut plain) = (Samples::default(), Samples::default());
            for round in 1..=plan.rounds {
                let (mut parts, mut spent) = (0, [0; 2]);
                let begin = Instant::now();
                while begin.elapsed() < plan.time {
                    // Each is as often the first.
                    for turn in 0..2 {
                        let at = (turn + parts) % 2;
                        wire.send(PART, size, Load::FlatOut)?;
                        spent[at] += ways[at].drain(&mut *queue)?;
                    }
                    parts += 1;
                }
                let frames = parts as u64 * PART;
                let [with, without] = spent.map(|ns| ns as f64 / frames as f64);
                eprintln!(
                    "  {name}, {size} B, round {round}: {with:.1} ns, not confined {without:.1}"
                );
                ours.push(with);
                plain.push(without);
            }
            figures.push(Figure {
                name: format!("twin-path-{name}-{size}"),
                unit: "ns",
                ours,
                peer: Some(("the same, not confined".into(), plain)),
                limit: None,
                note: format!(
                    "frames of {size} bytes from a packet socket's ring through examples/programs/{name}.c into a port's ring, by \
                     one thread: its processor time"
                ),
            });
        }
    }
    Ok(figures)
}

/// A port with a program, and who reads it.
struct Way {
    fanout: Fanout,
    consumer: Consumer,
    now_us: u64,
}

impl Way {
    fn new(instance: Instance) -> Result<Self> {
        let region = Region::heap(ring_size(RING));
        let geometry = Geometry {
            capacity: RING,
            snaplen: 2_048,
            link_type: 1,
            epoch: 256,
            port: 1,
            queue: 0,
        };
        let producer = Producer::create(region.clone(), geometry)?;
        let mut port = Port::new(1, producer, Doorbell::Silent);
        port.program = Some(PortProgram::shared(
            instance,
            1,
            Arc::new(Totals::default()),
        ));
        let mut fanout = Fanout::new(0, 0);
        fanout.attach(Box::new(port));
        Ok(Self {
            fanout,
            consumer: Consumer::attach(region)?,
            now_us: 0,
        })
    }

    /// Has a part come through, and reads it: the processor time of the first.
    fn drain(&mut self, queue: &mut dyn Queue) -> Result<u64> {
        let Self {
            fanout,
            consumer,
            now_us,
        } = self;
        let (mut spent_ns, mut came) = (0, 0);
        let deadline = Instant::now() + PATIENCE;
        while came < PART {
            *now_us += 100;
            let before = sys::thread_ns();
            let received = queue.receive(&mut |frames| fanout.deliver(frames, *now_us))?;
            let took = sys::thread_ns() - before;
            match received {
                Received::Frames(frames) => {
                    came += frames as u64;
                    spent_ns += took;
                }
                // The last block is handed over when its time is over.
                _ if Instant::now() < deadline => sleep(Duration::from_micros(200)),
                other => return Err(format!("{came} of {PART} frames came: {other:?}").into()),
            }
        }
        let mut read = 0;
        while consumer.next()?.is_some() {
            read += 1;
        }
        consumer.release();
        match read == came {
            true => Ok(spent_ns),
            false => Err(format!("of {came} frames {read} are in the ring").into()),
        }
    }
}
