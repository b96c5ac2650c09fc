//! What an operator's program costs for each frame: the daemon's instance, the same without confinement, and the
//! kernel's.
//!
//! The programs are those of `examples/programs`, compiled by clang. The daemon's instance is given each frame, which
//! it copies into its area; the kernel's runs again and again on one (BPF_PROG_TEST_RUN), without the driver
//! that would call it, so that it shows the least that it can cost.
#![expect(
    unsafe_code,
    reason = "runs an accepted program without confinement, to see its price"
)]

mod path;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnplug_e2e::Lab;
use vnplug_e2e::third_party::example_bpf;
use vnplug_frame::witness::{Protocol, Shape, make};
use vnplug_twin::{Code, Instance, Meta, Object, Program, SharedMap};

use crate::row::{Figure, Plan, Result, Samples};

pub(crate) use path::whole_path;

const PROGRAMS: [&str; 3] = ["count", "first", "headers"];
const SIZES: [usize; 2] = [60, 1514];
/// Frames of 256 flows, in turn.
const FRAMES: usize = 256;
/// Runs of one call of the kernel's.
const REPEAT: u32 = 200_000;

/// Nanoseconds per frame.
pub(crate) fn programs(plan: &Plan) -> Result<Vec<Figure>> {
    let lab = Lab::new()?;
    let mut figures = Vec::new();
    for name in PROGRAMS {
        let object = std::fs::read(example_bpf(&format!("{name}.c"), lab.dir())?)?;
        let object = Object::parse(&object, None)?;
        let program = Program::load(name, &object)?;
        let mut confined = program.instance()?;
        let mut believing = Instance::new(&believed(&program)?)?;
        for size in SIZES {
            let frames = frames(size)?;
            let (mut ours, mut plain) = (Samples::default(), Samples::default());
            let (mut kernel, mut price) = (Samples::default(), Samples::default());
            for _ in 0..plan.rounds {
                let time = plan.time / 8;
                let ours_ns = run(&mut confined, &frames, time);
                let plain_ns = run(&mut believing, &frames, time);
                let (_, kernel_ns) = program.kernel().test_repeatedly(&frames[0], REPEAT)?;
                ours.push(ours_ns);
                plain.push(plain_ns);
                kernel.push(f64::from(kernel_ns));
                price.push(ours_ns / plain_ns);
            }
            eprintln!(
                "  {name}, {size} B: {:.1} ns, not confined {:.1}, kernel {:.0}",
                ours.median(),
                plain.median(),
                kernel.median()
            );
            figures.push(Figure {
                name: format!("twin-{name}-{size}"),
                unit: "ns",
                ours,
                peer: Some(("the kernel's instance, BPF_PROG_TEST_RUN".into(), kernel)),
                limit: None,
                note: format!("examples/programs/{name}.c on frames of {size} bytes, which the daemon's instance copies"),
            });
            figures.push(Figure {
                name: format!("twin-{name}-{size}-confined"),
                unit: "times not confined",
                ours: price,
                peer: None,
                limit: None,
                note:
                    "the daemon's instance with every address cut to its area, by the same without"
                        .into(),
            });
        }
    }
    Ok(figures)
}

/// The same program, whose addresses are believed.
fn believed(program: &Program) -> Result<Arc<Code>> {
    let maps = program.maps().iter();
    let maps = maps.map(|(spec, array)| SharedMap::new(array, spec.constant));
    let maps = maps.collect::<std::io::Result<Vec<_>>>()?;
    // SAFETY: the kernel has accepted the program, with these maps.
    Ok(unsafe { Code::believing(program.insns(), program.code().context(), maps) }?)
}

fn frames(size: usize) -> Result<Vec<Vec<u8>>> {
    let made = (0..FRAMES as u32).map(|flow| {
        let shape = Shape {
            len_bytes: size,
            flow,
            protocol: Protocol::Udp4,
            vlan_tci: None,
        };
        make(shape, 1, u64::from(flow))
    });
    Ok(made.collect::<std::result::Result<_, _>>()?)
}

fn run(instance: &mut Instance, frames: &[Vec<u8>], time: Duration) -> f64 {
    let meta = Meta::default();
    let (start, mut count) = (Instant::now(), 0_u64);
    while start.elapsed() < time {
        for frame in frames {
            black_box(instance.run(frame, &meta).verdict);
        }
        count += frames.len() as u64;
    }
    start.elapsed().as_secs_f64() * 1e9 / count as f64
}
