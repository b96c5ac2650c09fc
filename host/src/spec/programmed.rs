//! A source whose frames go through an operator's program, in the daemon.

use std::ops::Range;
use std::sync::Arc;

use vnplug_frame::{Frame, recycle};
use vnplug_path::port::{Lost, Totals, changed, passed};
use vnplug_path::source::{
    Echoes, Queue, QueueCounters, Received, Seen, SourceError, Transmitter, Wake,
};
use vnplug_twin::{Instance, Meta};

use crate::hub::{SourceProgram, index_of};

/// The queues of a source, each with an instance of its own; `interface`: whose frames they are.
pub(super) fn all(
    queues: Vec<Box<dyn Queue>>,
    program: &SourceProgram,
    interface: Option<&str>,
) -> Result<Vec<Box<dyn Queue>>, SourceError> {
    let queues = queues.into_iter().zip(0_u32..).map(|(inner, number)| {
        let instance = program.program.instance();
        let instance =
            instance.map_err(|cause| SourceError::io("an instance of the program", cause))?;
        Ok(Box::new(Programmed {
            inner,
            instance,
            number,
            index: interface.map_or(0, number_of),
            interface: interface.map(str::to_owned),
            totals: Arc::clone(&program.totals),
            stopped: 0,
            bytes: Vec::new(),
            places: Vec::new(),
            batch: Vec::new(),
        }) as Box<dyn Queue>)
    });
    queues.collect()
}

/// The number of an interface; 0 while there is none of that name.
fn number_of(interface: &str) -> u32 {
    index_of(interface).unwrap_or(0)
}

/// A queue of which what a program lets pass is handed out, as the program left it. Nothing is dropped before
/// it, and nothing passed by.
struct Programmed {
    inner: Box<dyn Queue>,
    instance: Instance,
    number: u32,
    /// Whose frames they are, and its number, which is another when it was made again.
    interface: Option<String>,
    index: u32,
    totals: Arc<Totals>,
    stopped: u64,
    /// What the program made of a batch's frames, one after the other, and which frame is where.
    bytes: Vec<u8>,
    places: Vec<(usize, Range<usize>)>,
    /// Keeps its memory; empty between two batches.
    batch: Vec<Frame<'static>>,
}

impl Queue for Programmed {
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError> {
        let Self {
            inner,
            instance,
            number,
            index,
            totals,
            stopped,
            bytes,
            places,
            batch,
            ..
        } = self;
        let mut kept = 0;
        let received = inner.receive(&mut |frames| {
            bytes.clear();
            places.clear();
            let mut aborted = 0;
            for (at, frame) in frames.iter().enumerate() {
                let meta = Meta {
                    interface: *index,
                    queue: *number,
                    wire_len: frame.wire_len,
                    ..Meta::default()
                };
                match passed(instance, frame, &meta) {
                    Ok(made) => {
                        let begin = bytes.len();
                        bytes.extend_from_slice(made.bytes);
                        places.push((at, begin..bytes.len()));
                    }
                    Err(Lost::Dropped) => {}
                    Err(Lost::Aborted) => aborted += 1,
                }
            }
            kept = places.len();
            let gone = (frames.len() - kept) as u64;
            *stopped += gone;
            totals.add(frames.len() as u64, gone - aborted, aborted);
            if kept > 0 {
                let mut made = recycle(std::mem::take(batch));
                made.extend(places.iter().map(|(at, place)| {
                    let made = &bytes[place.clone()];
                    changed(&frames[*at], made)
                }));
                sink(&made);
                *batch = recycle(made);
            }
        })?;
        match received {
            // If more is there, the caller does not sleep.
            Received::Frames(_) if kept == 0 => Ok(Received::Nothing),
            Received::Frames(_) => Ok(Received::Frames(kept)),
            other => Ok(other),
        }
    }

    fn arm(&mut self) -> Wake<'_> {
        self.inner.arm()
    }

    fn woke(&mut self, seen: Seen) {
        let before = self.inner.state();
        self.inner.woke(seen);
        if let Some(name) = &self.interface
            && before != self.inner.state()
        {
            self.index = number_of(name);
        }
    }

    fn counters(&mut self) -> QueueCounters {
        QueueCounters {
            program: self.stopped,
            ..self.inner.counters()
        }
    }

    fn own_counters(&self) -> Vec<(String, u64)> {
        self.inner.own_counters()
    }

    fn state(&self) -> &'static str {
        self.inner.state()
    }

    fn is_pressed(&self) -> bool {
        self.inner.is_pressed()
    }

    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        self.inner.transmitter()
    }

    fn program(&mut self) -> Option<&mut Instance> {
        Some(&mut self.instance)
    }

    fn echoes(&mut self) -> Option<&mut dyn Echoes> {
        self.inner.echoes()
    }
}
