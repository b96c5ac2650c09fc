//! What cutting costs: our module beside the kernel's own segmentation, in processor time per GB.
//!
//! Neither moves payload: a packet is new headers and a part of the super-frame. Both cut the same TCP super-frame
//! into 45 segments of 1,448 bytes and make all checksums.
//!
//! - **Ours.** The frame is copied into a buffer, as a port's is, and cut there; the time of the copy alone is
//!   taken away.
//! - **The kernel's.** A packet socket gives the frame to a TAP that drops all (a filter of it says so). The TAP
//!   offers nothing, so that the kernel cuts first; or it offers TSO, and the frame is dropped whole. The second time
//!   is taken away from the first.
//!
//! The TAP counts what it drops, which shows that the one time all was cut, and nothing the other time.

mod sink;

use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use vnplug_e2e::Netns;
use vnplug_frame::offload::{Pieces, work};
use vnplug_ring::offload::{Offload, flags, gso};

use self::sink::{Sink, sender};
use crate::row::{Figure, Plan, Result, Samples};
use crate::sys::thread_ns;

/// CPU s per GB of both.
pub(crate) fn cutter(plan: &Plan) -> Result<Vec<Figure>> {
    let netns = Netns::new()?;
    let sink = netns.enter(|| Sink::new(TAP))??;
    netns.ip(&["link", "set", TAP, "up"])?;
    let mut sender = netns.enter(|| sender(TAP))??;
    let (frame, offload) = super_frame();
    let with_header = [&offload.to_native_header(&frame)[..], &frame].concat();
    let (mut ours, mut kernel) = (Samples::default(), Samples::default());
    for round in 1..=plan.rounds {
        ours.push(our_cost(plan, &frame, &offload)?);
        kernel.push(kernel_cost(
            plan,
            (&netns, &sink),
            &mut sender,
            &with_header,
        )?);
        let (ours, kernel) = (ours.last(), kernel.last());
        eprintln!("  round {round}: ours {ours:.4}, kernel {kernel:.4} CPU s per GB");
    }
    Ok(vec![Figure {
        name: "cutter".to_owned(),
        unit: "CPU s per GB",
        ours,
        peer: Some(("the kernel's GSO".to_owned(), kernel)),
        limit: None,
        note: format!(
            "a TCP super-frame of {SEGMENTS} segments of {SIZE} bytes is cut and summed, without moving payload. Ours: \
             copied into a buffer and cut, less the copy alone. The kernel's: from a packet socket to a TAP that drops \
             all and offers nothing, less the same to one that offers TSO; its counter shows that all was cut, and nothing"
        ),
    }])
}

/// What cutting costs ours, beyond a copy.
fn our_cost(plan: &Plan, frame: &[u8], offload: &Offload) -> Result<f64> {
    let (mut buffer, mut pieces) = (vec![0; frame.len()], Pieces::default());
    let mut copies = || {
        buffer.copy_from_slice(black_box(frame));
        black_box(&buffer);
        Ok(())
    };
    let copy = cost(plan, frame, &mut copies)?;
    let mut cuts = || {
        buffer.copy_from_slice(black_box(frame));
        let len = buffer.len() as u32;
        let work = work(&buffer, len, black_box(offload)).map_err(|lie| lie.to_string())?;
        pieces.clear();
        let range = pieces.make(&buffer, len, &work.ok_or("nothing to do")?);
        match black_box(&pieces).get(range.end - 1, &buffer).is_summed && range.len() == SEGMENTS {
            true => Ok(()),
            false => Err("it was not cut".into()),
        }
    };
    Ok(cost(plan, frame, &mut cuts)? - copy)
}

/// What it costs the kernel, beyond the way to the TAP.
fn kernel_cost(
    plan: &Plan,
    (netns, sink): (&Netns, &Sink),
    sender: &mut File,
    with_header: &[u8],
) -> Result<f64> {
    let mut costs = [0.0; 2];
    for (cost_s, packets, is_whole) in [(0, SEGMENTS, false), (1, 1, true)] {
        sink.offers(is_whole)?;
        let (before, mut sent) = (dropped(netns)?, 0);
        costs[cost_s] = cost(plan, with_header, &mut || {
            sent += 1;
            Ok(sender.write_all(with_header)?)
        })?;
        let gone = dropped(netns)? - before;
        // The host's own few packets are dropped there, too.
        let due = sent * packets as u64;
        if !(due..due + due / 100 + 50).contains(&gone) {
            return Err(format!("{sent} super-frames became {gone} packets, not {due}").into());
        }
    }
    Ok(costs[0] - costs[1])
}

/// Seconds of this thread's processor time per GB of frames, each of which is done something with.
fn cost(plan: &Plan, frame: &[u8], each: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    // What is measured is warm.
    (0..BATCH).try_for_each(|_| each())?;
    let (begin, before, mut count) = (Instant::now(), thread_ns(), 0);
    while begin.elapsed() < plan.time / 2 {
        (0..BATCH).try_for_each(|_| each())?;
        count += BATCH;
    }
    Ok((thread_ns() - before) as f64 / (count * frame.len()) as f64)
}

fn dropped(netns: &Netns) -> Result<u64> {
    let file = format!("/sys/class/net/{TAP}/statistics/tx_dropped");
    Ok(netns.exec(&["cat", &file])?.trim().parse()?)
}

/// Ethernet, IPv4, TCP with a timestamp, and as much as IP can say in whole segments.
fn super_frame() -> (Vec<u8>, Offload) {
    let payload = SEGMENTS * SIZE;
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    frame.extend((52 + payload as u16).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
    frame.extend([0x1b, 0x58, 0x1b, 0x59, 0, 0, 0, 1, 0, 0, 0, 1, 0x80, 0x18]);
    frame.extend([4, 0, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1]);
    frame.extend((0..payload).map(|at| ((at * 7919) >> 3) as u8));
    let offload = Offload {
        flags: flags::NEEDS_CSUM,
        gso_type: gso::TCPV4,
        gso_size: SIZE as u16,
        csum_start: 34,
        csum_offset: 16,
    };
    (frame, offload)
}

/// Of each super-frame.
const SEGMENTS: usize = 45;
/// Bytes of payload in a segment.
const SIZE: usize = 1448;
/// Super-frames between two looks at the clock.
const BATCH: usize = 64;
const TAP: &str = "sink0";
