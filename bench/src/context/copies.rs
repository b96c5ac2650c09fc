//! What it costs to take a frame out of a transmit ring: by one copy, by two, and what would be left if the payload were
//! not copied at all.
//!
//! No wire: the way out keeps what it took until the flush, as a packet socket's does, and sends nothing. Its peer is
//! the same with one more copy, which is how it was; the limit takes frames that consist of the headers alone.

use std::ops::Range;
use std::time::{Duration, Instant};

use vnplug_frame::{Frame, MAX_BATCH};
use vnplug_path::engine::sender::Sender;
use vnplug_path::source::{Flushed, Transmit, Transmitter};
use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::offload::Offload;
use vnplug_ring::{Intake, Producer, Region};

use crate::row::{Figure, Limit, Plan, Result, Samples};

/// Lengths of frames; the longest is a super-frame's.
const LENGTHS: [usize; 4] = [60, 1514, 9014, 65_000];
/// How much of a frame would have to be the daemon's own: what is judged, and may not be written over.
const HEADERS: usize = 128;
const RING: u64 = 4 << 20;

pub(crate) fn copies(plan: &Plan) -> Result<Vec<Figure>> {
    let mut samples = vec![[(); 3].map(|()| Samples::default()); LENGTHS.len()];
    for round in 1..=plan.rounds {
        for (len, samples) in LENGTHS.into_iter().zip(&mut samples) {
            samples[0].push(cost(plan.time / 4, len, true)?);
            samples[1].push(cost(plan.time / 4, len, false)?);
            samples[2].push(cost(plan.time / 4, len.min(HEADERS), true)?);
        }
        let line = samples.iter().zip(LENGTHS).map(|(it, len)| {
            let [one, two, none] = [0, 1, 2].map(|at| it[at].last());
            format!("{len}: {one:.0} (two copies {two:.0}, headers alone {none:.0})")
        });
        eprintln!(
            "  round {round}: ns, of {}",
            line.collect::<Vec<_>>().join(", of ")
        );
    }
    let figures = LENGTHS.into_iter().zip(samples).map(|(len, [one, two, none])| Figure {
        name: format!("context-copies-{len}"),
        unit: "ns/frame",
        ours: one,
        peer: Some(("copied twice".to_owned(), two)),
        limit: Some(Limit::new("its headers alone", none)),
        note: format!(
            "frames of {len} bytes out of a transmit ring of 4 MiB that is full, into the batch that is flushed; nothing is \
             sent. The limit takes frames of at most {HEADERS} bytes"
        ),
    });
    Ok(figures.collect())
}

/// The way out of frames that are kept until the flush.
struct Kept {
    bytes: Vec<u8>,
    used: usize,
    count: usize,
    has_place: bool,
}

impl Kept {
    /// Empty; with or without a place into which a frame is taken at once.
    fn new(has_place: bool) -> Self {
        Self {
            bytes: Vec::new(),
            used: 0,
            count: 0,
            has_place,
        }
    }

    fn room(&mut self, len: usize) -> Option<&mut [u8]> {
        let end = self.used + len;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        (self.count < MAX_BATCH).then(|| &mut self.bytes[self.used..end])
    }
}

impl Transmitter for Kept {
    fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        match self.has_place {
            true => self.room(len),
            false => None,
        }
    }

    fn placed(&mut self, frame: Range<usize>, _: &Offload) -> Transmit {
        self.used += frame.end;
        self.count += 1;
        Transmit::Taken
    }

    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        match self.room(bytes.len()) {
            Some(room) => room.copy_from_slice(bytes),
            None => return Transmit::Full,
        }
        self.placed(0..bytes.len(), &Offload::default())
    }

    fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        std::hint::black_box(&self.bytes[..self.used]);
        let sent = self.count as u64;
        (self.used, self.count) = (0, 0);
        Flushed {
            sent,
            ..Flushed::default()
        }
    }
}

fn cost(time: Duration, len: usize, has_place: bool) -> Result<f64> {
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
    let mut producer = Producer::attach(region).map_err(|error| format!("{error:?}"))?;
    let mut sender = Sender::new(1, intake, None, None);
    let mut out = Kept::new(has_place);
    let (frame, begin) = (vec![7; len], Instant::now());
    let (mut spent, mut taken) = (Duration::ZERO, 0);
    while begin.elapsed() < time {
        while producer
            .push(&Meta::default(), &frame)
            .map_err(|lie| lie.to_string())?
        {}
        producer.publish();
        let at = Instant::now();
        loop {
            // As the engine's turns: bounded in frames and in bytes.
            let visit = sender.serve(&mut out, (MAX_BATCH, 256 << 10), 0, &mut |_, _| {})?;
            taken += visit.frames;
            if visit.is_dry {
                break;
            }
        }
        spent += at.elapsed();
    }
    Ok(spent.as_secs_f64() * 1e9 / taken.max(1) as f64)
}
