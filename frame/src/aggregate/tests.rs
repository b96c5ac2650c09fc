//! What is merged is cut back into the same frames; what must not merge does not.

use super::*;
use crate::offload::{Pieces, samples, work};
use crate::witness::seed;
use vnplug_ring::offload::{flags, gso};

mod cost;
mod hostile;
mod kernel;
mod model;
mod table;

/// Merges what can be of these frames, each with what is left to do with it.
fn merged(limit: usize, frames: &[(Vec<u8>, Option<Offload>)]) -> (Aggregator, usize) {
    let mut aggregator = Aggregator::default();
    let gone = aggregator.run(&all(limit), frames.len(), |at| single(&frames[at], at));
    (aggregator, gone)
}

/// A frame, in one part or in two.
fn single(frame: &(Vec<u8>, Option<Offload>), at: usize) -> Single<'_> {
    let (bytes, offload) = frame;
    // As it came, and as what changes tags cuts it: behind a begin that has more than all headers.
    let cut = [bytes.len(), 12, 16, HEADERS + 12][at % 4].min(bytes.len());
    let (head, body) = bytes.split_at(cut);
    Single {
        head,
        body,
        missing: 0,
        offload: offload.as_ref(),
        is_valid: false,
    }
}

fn all(segments: usize) -> Limits {
    Limits {
        segments,
        ipv4: true,
        ipv6: true,
    }
}

/// The frames of the wire that a frame is.
fn wire(pieces: &mut Pieces, frame: &[u8], offload: Option<&Offload>, out: &mut impl FnMut(&[u8])) {
    let len = frame.len() as u32;
    let work = offload.and_then(|offload| work(frame, len, offload).unwrap());
    let Some(work) = work else {
        return out(frame);
    };
    pieces.clear();
    for at in pieces.make(frame, len, &work) {
        let piece = pieces.get(at, frame);
        assert!(piece.is_summed);
        out(&[piece.head, piece.body].concat());
    }
}

/// Lengths of what leaves, as segments: 1 for a frame as it is.
fn shape(aggregator: &Aggregator) -> Vec<usize> {
    let shape = aggregator.outcomes().map(|outcome| match outcome {
        Outcome::Frame(_) => 1,
        Outcome::Made(made, _) => aggregator.groups[made.0 as usize].count,
    });
    shape.collect()
}

/// A case of a table: what it is called, and what it does to a segment.
type Change = (&'static str, fn(&mut Recipe));

/// A segment, whose fields can be said.
#[derive(Debug, Clone, Copy)]
struct Recipe {
    tags: usize,
    tci: u16,
    is_ipv6: bool,
    source: u8,
    ports: u32,
    tos: u8,
    ttl: u8,
    id: u16,
    fragment: u16,
    seq: u32,
    ack: u32,
    reserved: u8,
    flags: u8,
    window: u16,
    urgent: u16,
    /// 0: none; else a timestamp with this value.
    stamp: u32,
    /// More options, such as SACK blocks.
    options: &'static [u8],
    len: usize,
    /// Where the bytes of the stream begin.
    fill: u8,
}

const PLAIN: Recipe = Recipe {
    tags: 0,
    tci: 5,
    is_ipv6: false,
    source: 1,
    ports: 0x3039_0050,
    tos: 0,
    ttl: 64,
    id: 100,
    fragment: 0x4000,
    seq: 1000,
    ack: 7000,
    reserved: 0,
    flags: flag::ACK,
    window: 500,
    urgent: 0,
    stamp: 1,
    options: &[],
    len: 100,
    fill: 0,
};

/// Where the IP header of a recipe begins.
fn network(recipe: &Recipe) -> usize {
    14 + 4 * recipe.tags
}

fn transport(recipe: &Recipe) -> usize {
    network(recipe) + if recipe.is_ipv6 { 40 } else { 20 }
}

fn frame(recipe: &Recipe) -> Vec<u8> {
    let Recipe { stamp, options, .. } = *recipe;
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    for tag in 0..recipe.tags {
        frame.extend([0x81, 0]);
        frame.extend((recipe.tci + tag as u16).to_be_bytes());
    }
    let stamps = if stamp > 0 { 12 } else { 0 };
    let header = 20 + stamps + options.len();
    let carries = (header + recipe.len) as u16;
    if recipe.is_ipv6 {
        frame.extend([0x86, 0xdd, 0x60 | recipe.tos >> 4, recipe.tos << 4, 0, 9]);
        frame.extend(carries.to_be_bytes());
        frame.extend([6, recipe.ttl]);
        frame.extend([
            0xfd,
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
            0,
            0,
            0,
            recipe.source,
        ]);
        frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 99]);
    } else {
        frame.extend([8, 0, 0x45, recipe.tos]);
        frame.extend((20 + carries).to_be_bytes());
        frame.extend(recipe.id.to_be_bytes());
        frame.extend(recipe.fragment.to_be_bytes());
        frame.extend([recipe.ttl, 6, 0, 0, 10, 0, 0, recipe.source, 10, 0, 0, 99]);
    }
    frame.extend(recipe.ports.to_be_bytes());
    frame.extend(recipe.seq.to_be_bytes());
    frame.extend(recipe.ack.to_be_bytes());
    frame.extend([((header / 4) as u8) << 4 | recipe.reserved, recipe.flags]);
    frame.extend(recipe.window.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(recipe.urgent.to_be_bytes());
    if stamp > 0 {
        frame.extend([1, 1, 8, 10]);
        frame.extend(stamp.to_be_bytes());
        frame.extend([0, 0, 0, 9]);
    }
    frame.extend(options);
    frame.extend((0..recipe.len).map(|at| recipe.fill.wrapping_add(at as u8)));
    sum(&mut frame, recipe);
    frame
}

/// Writes right checksums, by the cutter.
fn sum(frame: &mut [u8], recipe: &Recipe) {
    let (ip, transport) = (network(recipe), transport(recipe));
    if !recipe.is_ipv6 {
        frame[ip + 10..ip + 12].fill(0);
        let sum = !samples::folded(&[&frame[ip..transport]]);
        frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
    }
    leave(frame, recipe);
    let (begin, rest) = (transport, &frame[transport..]);
    let sum = !samples::folded(&[rest]);
    frame[begin + 16..begin + 18].copy_from_slice(&sum.to_be_bytes());
}

/// Leaves the TCP checksum to be made; what says so.
fn leave(frame: &mut [u8], recipe: &Recipe) -> Offload {
    let (ip, transport) = (network(recipe), transport(recipe));
    let addresses = if recipe.is_ipv6 {
        ip + 8..ip + 40
    } else {
        ip + 12..ip + 20
    };
    let length = ((frame.len() - transport) as u32).to_be_bytes();
    let sum = samples::folded(&[&frame[addresses], &length, &[0, 6]]);
    frame[transport + 16..transport + 18].copy_from_slice(&sum.to_be_bytes());
    Offload {
        flags: flags::NEEDS_CSUM,
        csum_start: transport as u16,
        csum_offset: 16,
        ..Offload::default()
    }
}
