//! Many ports, each with a filter of its own: what deciding costs per packet.
//!
//! Everything happens in this process, on one CPU, with the daemon's own code: an [`Index`] of the
//! filters of all ports, translated to machine code as in the daemon, judges batches of 256 frames.
//! The wire has 10,000 hosts, taken at random, each with a port number of its own; filter n asks for
//! host n, its net or its port. So with 10,000 filters every frame is somebody's, with one filter
//! hardly any. The peers judge the same frames by the same filters one after the other, as programs
//! that each open the wire for themselves have to: libpcap's interpreter (`bpf_filter`), and the
//! kernel's JIT (`BPF_PROG_TEST_RUN`). Time is the thread's processor time, but in the kernel, which
//! has its own clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_filter::ebpf::{KernelJudge, Wanted};
use vnplug_filter::{FrameSet, Index, Jit, Program, Trust};
use vnplug_frame::{Frame, MAX_BATCH};
use vnplug_path::fanout::Fanout;
use vnplug_path::port::Port;
use vnplug_path::port::doorbell::Doorbell;
use vnplug_ring::layout::{Geometry, ring_size};
use vnplug_ring::{Consumer, Producer, Region};

use super::bare::Bare;
use super::hosts::{FIRST_PORT, HOSTS, NOT_EACH, RING, packets, per_packet};
use super::libpcap::{Compiled, Judges};
use super::{PCAP, processor_time};
use crate::row::{Figure, Limit, Plan, Result, Samples};
use crate::sys;

/// Programs whose run in the kernel is timed, of those that are to be run one after the other.
const SAMPLE: usize = 16;
/// Bytes of machine code.
const NATIVE: u64 = 1 << 30;
/// The longest wait for all programs to be translated.
const PATIENCE: Duration = Duration::from_secs(120);
const CPU: usize = 0;

/// What kind of filters there are.
#[derive(Clone, Copy)]
enum Shape {
    Host,
    Net,
    Port,
    Mixed,
    /// Found among the ends of ranges, not by one value.
    Range,
    /// Hosts, but every 20th filter is one that cannot be looked up and is run on every frame, nearly
    /// all of which it accepts.
    Not,
}

impl Shape {
    const ALL: [(&str, Self); 6] = [
        ("host", Self::Host),
        ("net", Self::Net),
        ("port", Self::Port),
        ("mixed", Self::Mixed),
        ("range", Self::Range),
        ("not", Self::Not),
    ];

    fn filter(self, n: usize) -> String {
        let (high, low) = (n >> 8, n & 255);
        match self {
            Self::Host => format!("host 10.{high}.{low}.1"),
            Self::Net => format!("net 10.{high}.{low}.0/24"),
            Self::Port => format!("udp port {}", FIRST_PORT + n),
            Self::Range => format!("portrange {}-{}", FIRST_PORT + n, FIRST_PORT + n + 1),
            Self::Not if n.is_multiple_of(NOT_EACH) => format!("not {}", Self::Host.filter(n)),
            Self::Not => Self::Host.filter(n),
            Self::Mixed => match n % 6 {
                0 | 1 => Self::Host.filter(n),
                2 => Self::Net.filter(n),
                3 => Self::Port.filter(n),
                4 => format!("vlan {} and host 10.{high}.{low}.1", n % 4_000),
                _ => format!("ip6 host 2001:db8:{n:x}::1"),
            },
        }
    }
}

/// Cost per packet with `count` filters of each shape.
pub(crate) fn against_sequences(plan: &Plan, count: usize) -> Result<Vec<Figure>> {
    sys::pin(sys::cpu(CPU))?;
    let packets = packets();
    let frames: Vec<Frame<'_>> = packets.iter().map(|bytes| frame(bytes)).collect();
    let time = plan.time / 8;
    let mut figures = Vec::new();
    for (name, shape) in Shape::ALL {
        let theirs_all = compiled(shape, count)?;
        let programs = programs(&theirs_all)?;
        let mut index = Index::default();
        for program in &programs {
            index.add(program);
        }
        let [mut ours, mut theirs, mut kernels, mut limit] = [(); 4].map(|()| Samples::default());
        for round in 1..=plan.rounds {
            ours.push(judge(&mut index, &frames, time));
            theirs.push(interpret(&theirs_all, &packets, time));
            kernels.push(in_kernel(&programs, &packets)?);
            let bare = Bare::new(count);
            limit.push(match shape {
                Shape::Not => bare.look_and_compare(&packets, time),
                _ => bare.look(&packets, time),
            });
            eprintln!(
                "  {name} round {round}: ours {:.1}, libpcap {:.1}, kernel {:.1} ns",
                ours.median(),
                theirs.median(),
                kernels.median()
            );
        }
        let size = index.size();
        let note = format!(
            "{count} filters like {:?}: {} looked up in {} fields, {} run on every frame; {HOSTS} \
             hosts at random on the wire; in one process, no rings. The peer runs all filters on \
             every frame",
            shape.filter(count - 1),
            size.keyed,
            size.fields,
            size.scanned
        );
        let bare = match shape {
            Shape::Not => "one look into a plain table, one comparison for each run filter",
            _ => "one look into a plain table",
        };
        let figure = |suffix: &str, peer: &str, samples, more: &str| Figure {
            name: format!("filters-{count}-{name}{suffix}"),
            unit: "ns per packet",
            ours: ours.clone(),
            peer: Some((peer.to_owned(), samples)),
            limit: Some(Limit::new(bare, limit.clone())),
            note: format!("{note}{more}"),
        };
        figures.push(figure("", PCAP, theirs, "."));
        let more = format!(
            ": {count} times the mean of up to {SAMPLE} of them by BPF_PROG_TEST_RUN, less its \
             own cost."
        );
        figures.push(figure("-kernel", "the kernel's JIT", kernels, &more));
    }
    figures.push(delivery(plan, count, &frames, time)?);
    Ok(figures)
}

/// What the whole fanout costs per packet, with rings: lookup, accounts, copy, publish.
fn delivery(plan: &Plan, count: usize, frames: &[Frame<'_>], time: Duration) -> Result<Figure> {
    let programs = programs(&compiled(Shape::Host, count)?)?;
    let mut fanout = Fanout::new(0, 0);
    let mut consumers = Vec::new();
    for (id, program) in (1..).zip(&programs) {
        let region = Region::heap(ring_size(RING));
        let geometry = Geometry {
            capacity: RING,
            snaplen: 2_048,
            link_type: 1,
            epoch: 256,
            port: id,
            queue: 0,
        };
        let producer = Producer::create(region.clone(), geometry)?;
        consumers.push(Consumer::attach(region)?);
        let mut port = Port::new(id, producer, Doorbell::Silent);
        port.judge.set_filter(Some(Arc::clone(program)));
        fanout.attach(Box::new(port));
    }
    let (mut ours, mut limit) = (Samples::default(), Samples::default());
    let mut bare = Bare::with_rings(count);
    let packets: Vec<&[u8]> = frames.iter().map(|frame| frame.bytes).collect();
    for round in 1..=plan.rounds {
        let (mut spent, mut taken, mut now_us) = (0.0, 0, 0);
        while spent < time.as_nanos() as f64 {
            // Rings have room for all frames once.
            for batch in frames.chunks(MAX_BATCH) {
                let begin = processor_time();
                fanout.deliver(batch, now_us);
                spent += processor_time() - begin;
                taken += batch.len();
                now_us += 10;
            }
            for consumer in &mut consumers {
                while consumer.next()?.is_some() {}
                consumer.release();
            }
        }
        ours.push(spent / taken as f64);
        limit.push(bare.deliver(&packets, time));
        let (ours, bare) = (ours.last(), limit.last());
        eprintln!("  deliver round {round}: {ours:.1} ns, bare {bare:.1} ns");
    }
    let delivered: u64 = fanout.accounts().map(|(_, it)| it.delivered).sum();
    let read = fanout.counters().read;
    Ok(Figure {
        name: format!("filters-{count}-deliver"),
        unit: "ns per packet",
        ours,
        peer: None,
        limit: Some(Limit::new(
            "one look into a plain table, and the copy",
            limit,
        )),
        note: format!(
            "{count} ports with filters like {:?} and rings of {RING} B of their own: everything \
             between the source and the readers, who read in between and are not timed; {:.1} % of \
             the packets were somebody's",
            Shape::Host.filter(0),
            delivered as f64 / read as f64 * 100.0
        ),
    })
}

/// The filters as libpcap compiles them.
fn compiled(shape: Shape, count: usize) -> Result<Vec<Compiled>> {
    let library = Judges::load()?;
    (0..count)
        .map(|n| library.compile(&shape.filter(n)))
        .collect()
}

/// The filters as the daemon runs them.
fn programs(compiled: &[Compiled]) -> Result<Vec<Arc<Program>>> {
    let jit = Jit::start(NATIVE);
    let mut programs = Vec::with_capacity(compiled.len());
    for one in compiled {
        let program = Program::from_instructions(one.instructions(), Trust::Operator)?;
        let program = Arc::new(program);
        program.analysis();
        jit.submit("bench", &program);
        programs.push(program);
    }
    let deadline = Instant::now() + PATIENCE;
    while programs.iter().any(|program| !program.is_native()) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(programs)
}

/// Nanoseconds per packet of ours.
fn judge(index: &mut Index, frames: &[Frame<'_>], time: Duration) -> f64 {
    per_packet(time, || {
        for batch in frames.chunks(MAX_BATCH) {
            std::hint::black_box(index.judge(batch, &FrameSet::default()));
            index.forget();
        }
        frames.len()
    })
}

/// Nanoseconds per packet of libpcap's interpreter.
fn interpret(programs: &[Compiled], packets: &[Vec<u8>], time: Duration) -> f64 {
    const SOME: usize = 64;
    let mut rest = packets.iter().cycle();
    per_packet(time, || {
        for packet in rest.by_ref().take(SOME) {
            for program in programs {
                std::hint::black_box(program.run(packet));
            }
        }
        SOME
    })
}

/// A program in the kernel.
fn kernel(program: &Arc<Program>) -> Result<KernelJudge> {
    Ok(KernelJudge::socket(&[Wanted::exactly(program)])?)
}

/// Nanoseconds per packet in the kernel, from some of the programs and frames.
fn in_kernel(programs: &[Arc<Program>], packets: &[Vec<u8>]) -> Result<f64> {
    const REPEAT: u32 = 100_000;
    let step = programs.len().div_ceil(SAMPLE);
    let empty = kernel(&Arc::new(Program::accept(u32::MAX)))?;
    let (mut nanos, mut runs) = (0.0, 0.0);
    for (program, packet) in programs.iter().step_by(step).zip(packets.iter().step_by(7)) {
        let judge = kernel(program)?;
        let cost = f64::from(judge.nanoseconds(packet, REPEAT)?);
        nanos += (cost - f64::from(empty.nanoseconds(packet, REPEAT)?)).max(0.0);
        runs += 1.0;
    }
    Ok(nanos / runs * programs.len() as f64)
}

fn frame(bytes: &[u8]) -> Frame<'_> {
    Frame {
        bytes,
        wire_len: bytes.len() as u32,
        ts_ns: 0,
        flags: 0,
        vlan_tci: 0,
        ..Frame::default()
    }
}
