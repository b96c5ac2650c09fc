//! What judging a frame by one filter costs.
//!
//! Frames are a mix of IPv4 and IPv6, TCP, UDP and ARP, some with a VLAN tag, from 16 hosts and 8
//! ports, in random order. Our machine code, our interpreter and libpcap's judge the same frames in
//! turns; time is the thread's processor time, so that other work on the machine does not count.
//! The kernel can run a program only on one frame again and again; there ours does the same.

mod bare;
mod hosts;
mod libpcap;
mod many;
mod targets;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_filter::ebpf::{KernelJudge, Wanted};
use vnplug_filter::{DEFAULT_LIMIT_BYTES, Jit, Program, Trust};

use crate::row::{Figure, Limit, Plan, Result, Samples};
use libpcap::{Compiled, Judges};

pub(crate) use many::against_sequences as many;
pub(crate) use targets::targets;

/// Short names and expressions.
const FILTERS: [(&str, &str); 10] = [
    ("ip", "ip"),
    ("tcp-port", "tcp port 80"),
    ("host-port", "tcp port 80 and host 10.0.0.1"),
    ("ports", "port 22 or port 80 and host 10.0.1.2"),
    ("net", "net 10.0.0.0/24 and not port 22"),
    (
        "six-hosts",
        "host 10.0.0.1 or host 10.0.0.2 or host 10.0.0.3 or host 10.0.1.1 or host 10.0.1.2 or host 10.0.1.3",
    ),
    ("ip6-net", "ip6 net 2001:db8::/32 and udp"),
    ("vlan", "vlan 5 and tcp port 80"),
    ("http-get", "tcp[((tcp[12]&0xf0)>>2):4] = 0x47455420"),
    ("syn", "tcp[tcpflags] & (tcp-syn|tcp-ack) == tcp-syn"),
];

/// Frames of the mix.
const FRAMES: usize = 4096;
/// Frames that the kernel is given, one after the other, and how often each.
const KERNEL: (usize, u32) = (32, 20_000);

/// Nanoseconds per frame for each of the filters.
pub(crate) fn one(plan: &Plan) -> Result<Vec<Figure>> {
    let library = Judges::load()?;
    let frames = frames();
    let jit = Jit::start(DEFAULT_LIMIT_BYTES);
    let empty = KernelJudge::socket(&[Wanted::exactly(&Arc::new(Program::accept(u32::MAX)))])?;
    let loop_alone = in_kernel(&empty, &frames)?;
    let mut figures = Vec::new();
    for (name, expression) in FILTERS {
        let theirs = library.compile(expression)?;
        let program = native(&jit, &theirs)?;
        let kernel = KernelJudge::socket(&[Wanted::exactly(&Arc::new(program.clone()))])?;
        let mut samples: [Samples; 6] = Default::default();
        for _ in 0..plan.rounds {
            let share = plan.time / 20;
            let round = [
                over_all(share, &frames, |frame| {
                    program.run(frame, frame.len() as u32)
                }),
                over_all(share, &frames, |frame| {
                    program.interpret(frame, frame.len() as u32).unwrap_or(0)
                }),
                over_all(share, &frames, |frame| theirs.run(frame)),
                over_each(&frames, |frame| program.run(frame, frame.len() as u32)),
                in_kernel(&kernel, &frames)?,
                over_all(share, &frames, |frame| u32::from(frame[12])),
            ];
            for (all, one) in samples.iter_mut().zip(round) {
                all.push(one);
            }
        }
        let [native, interpreted, pcap, repeated, kernel, touched] = samples;
        eprintln!(
            "  {name}: native {:.1}, interpreter {:.1}, libpcap {:.1}; one frame again and again: \
             native {:.1}, kernel {:.1} ns",
            native.median(),
            interpreted.median(),
            pcap.median(),
            repeated.median(),
            kernel.median()
        );
        let about = format!(
            "\"{expression}\", {} instructions",
            theirs.instructions().len()
        );
        let mixed = format!("{about}; {FRAMES} frames in random order, processor time");
        let figure =
            |suffix: &str, ours: Samples, peer: &str, theirs: Samples, note: &str| Figure {
                name: format!("filter-one-{name}{suffix}"),
                unit: "ns per frame",
                ours,
                peer: Some((peer.to_owned(), theirs)),
                limit: Some(Limit::new(
                    "reading one byte of each frame",
                    touched.clone(),
                )),
                note: note.to_owned(),
            };
        figures.extend([
            figure("", native, PCAP, pcap.clone(), &mixed),
            figure("-interpreter", interpreted, PCAP, pcap, &mixed),
            figure(
                "-kernel",
                repeated,
                "kernel's JIT",
                kernel,
                &format!(
                    "{about}; {} frames, each {} times in a row. The peer: our translation to eBPF \
                     in a socket filter, run by BPF_PROG_TEST_RUN, whose loop takes {loop_alone:.1} ns \
                     of its time (a program that only accepts)",
                    KERNEL.0, KERNEL.1
                ),
            ),
        ]);
    }
    Ok(figures)
}

const PCAP: &str = "libpcap's bpf_filter";

/// The program, once it has machine code.
fn native(jit: &Jit, compiled: &Compiled) -> Result<Program> {
    let program = Program::from_instructions(compiled.instructions(), Trust::Operator)?;
    jit.submit("bench", &program);
    let until = Instant::now() + Duration::from_secs(10);
    while !program.is_native() {
        if Instant::now() > until {
            return Err(
                "no machine code: is this an x86-64 where executable memory is allowed?".into(),
            );
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(program)
}

/// Nanoseconds per frame, all frames in turn, for at least `time`.
fn over_all(time: Duration, frames: &[Vec<u8>], judge: impl Fn(&[u8]) -> u32) -> f64 {
    let (begin, mut rounds) = (processor_time(), 0);
    loop {
        for frame in frames {
            black_box(judge(black_box(frame)));
        }
        rounds += 1;
        let took = processor_time() - begin;
        if took >= time.as_nanos() as f64 {
            return took / (rounds * frames.len()) as f64;
        }
    }
}

/// Nanoseconds per frame, each of some frames again and again.
fn over_each(frames: &[Vec<u8>], judge: impl Fn(&[u8]) -> u32) -> f64 {
    let (count, times) = KERNEL;
    let begin = processor_time();
    for frame in &frames[..count] {
        for _ in 0..times {
            black_box(judge(black_box(frame)));
        }
    }
    (processor_time() - begin) / (count as f64 * f64::from(times))
}

/// As [`over_each`], in the kernel, by its clock.
fn in_kernel(judge: &KernelJudge, frames: &[Vec<u8>]) -> Result<f64> {
    let (count, times) = KERNEL;
    let mut sum = 0.0;
    for frame in &frames[..count] {
        sum += f64::from(judge.nanoseconds(frame, times)?);
    }
    Ok(sum / count as f64)
}

/// Nanoseconds that this thread has had a processor.
fn processor_time() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// The mix; the same in every run.
fn frames() -> Vec<Vec<u8>> {
    let mut state = 0x5eed_u64;
    let mut below = move |n: u64| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    };
    (0..FRAMES).map(|_| frame(&mut below)).collect()
}

fn frame(below: &mut impl FnMut(u64) -> u64) -> Vec<u8> {
    let mut f = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    if below(8) == 0 {
        f.extend([0x81, 0, 0, [5, 7][below(2) as usize]]);
    }
    let tcp = below(4) > 0;
    let protocol = if tcp { 6 } else { 17 };
    match below(16) {
        0 => {
            f.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
            f.resize(60, 0);
            return f;
        }
        1..=4 => {
            f.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 40, protocol, 64]);
            for _ in 0..2 {
                f.extend([
                    0x20,
                    1,
                    0x0d,
                    0xb8,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    below(16) as u8,
                ]);
            }
        }
        _ => {
            f.extend([8, 0, 0x45, 0, 0, 60, 0, 1, 0x40, 0, 64, protocol, 0, 0]);
            for _ in 0..2 {
                f.extend([10, 0, below(4) as u8, below(4) as u8]);
            }
        }
    }
    for _ in 0..2 {
        let port = [80_u16, 443, 22, 53, 5000, 8080, 33_000, 60_000][below(8) as usize];
        f.extend(port.to_be_bytes());
    }
    f.extend([0; 8]);
    f.extend([0x50, [2, 0x10, 0x18][below(3) as usize], 1, 0, 0, 0, 0, 0]);
    f.extend(if below(4) == 0 {
        b"GET / HTTP/1.1"
    } else {
        b"not a request "
    });
    f.resize(f.len() + [0, 60, 600][below(3) as usize], 7);
    f
}
