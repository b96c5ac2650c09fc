//! Sends witness frames ([`vnplug_frame::witness`]) on an interface, at a rate or flat out.
//!
//! Frames go through a packet socket, 64 per system call, past the queueing discipline. Frame n is
//! due n / rate seconds after the first; a late sender catches up, so the average holds. A frame the
//! kernel refuses for want of room is sent again, never skipped: what is counted was sent.

use std::io;
use std::num::NonZeroU64;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use vnplug_frame::witness::{Parsed, Protocol, Shape, Stamp, parse};

use crate::daemon::program;
use crate::error::{LabError, Result};
use crate::netns::Netns;
use crate::sys::PacketSocket;

/// A run of frames to send.
///
/// ```no_run
/// # fn main() -> vnplug_e2e::Result<()> {
/// use vnplug_e2e::traffic::Stream;
/// let netns = vnplug_e2e::Netns::new()?;
/// netns.veth("wire0", "wire1")?;
/// let sent = netns.enter(|| Stream { len_bytes: 1514, ..Stream::new("wire0", 1000) }.send())??;
/// assert_eq!(sent.frames, 1000);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Stream {
    /// The interface, in the calling thread's network namespace.
    pub interface: String,
    /// How many frames.
    pub count: u64,
    /// Frame length in bytes, Ethernet header included, FCS excluded; 60 at least.
    pub len_bytes: usize,
    /// Frames per second; `None` is flat out.
    pub pps: Option<NonZeroU64>,
    /// The run all frames belong to.
    pub run: u32,
    /// Flows, taken in turn; 1 to 65536.
    pub flows: u32,
    /// Lengths that frames have in turn, in the place of `len_bytes`; none: all have that one.
    pub mix: Vec<usize>,
    /// Sequence of the first frame.
    pub first: u64,
}

/// What was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Frames the kernel took.
    pub frames: u64,
    /// From the first to the last of them.
    pub elapsed: Duration,
    /// How often the kernel had no room and a frame had to be sent again.
    pub retries: u64,
}

impl Sent {
    /// Frames per second.
    #[must_use]
    pub fn pps(&self) -> f64 {
        self.frames as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// A stream that a process of its own sends (`wiregen`); dropped, it ends.
#[derive(Debug)]
pub struct Sending(Child);

impl Drop for Sending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Stream {
    /// Sends it in a namespace, while the caller does something else.
    ///
    /// # Errors
    /// [`LabError::Missing`] if `wiregen` was not built, [`LabError::Io`] if it does not start.
    pub fn start(&self, netns: &Netns) -> Result<Sending> {
        let pps = self.pps.map_or(0, NonZeroU64::get);
        let flags = [
            ("--count", self.count),
            ("--size", self.len_bytes as u64),
            ("--pps", pps),
            ("--run", self.run.into()),
            ("--flows", self.flows.into()),
        ];
        let mut command = netns.command(program("wiregen")?);
        command.args(["--interface", &self.interface]);
        command.args(
            flags
                .iter()
                .flat_map(|(flag, value)| [(*flag).to_owned(), value.to_string()]),
        );
        let child = command.stdout(Stdio::null()).spawn();
        Ok(Sending(child.map_err(LabError::io("start wiregen"))?))
    }

    /// `count` frames of 60 bytes, UDP over IPv4, one flow, run 1, flat out, from
    /// sequence 0 on.
    #[must_use]
    pub fn new(interface: impl Into<String>, count: u64) -> Self {
        Self {
            interface: interface.into(),
            count,
            len_bytes: 60,
            pps: None,
            run: 1,
            flows: 1,
            mix: Vec::new(),
            first: 0,
        }
    }

    /// Sends all frames.
    ///
    /// # Errors
    /// [`LabError::Io`] if the interface is missing or goes down, or packet sockets are not
    /// allowed; [`LabError::Protocol`] if the length or the number of flows is out of range.
    pub fn send(&self) -> Result<Sent> {
        let what = format!("send on {}", self.interface);
        let socket = PacketSocket::open(&self.interface).map_err(LabError::io(what.clone()))?;
        let (mut frames, stamps) = self.prepare()?;
        let start = Instant::now();
        let (mut sent, mut retries) = (0, 0);
        while sent < self.count {
            // Slots repeat: sequence n uses slot n modulo their number. A batch ends where they do.
            let number = self.first + sent;
            let first = (number % frames.len() as u64) as usize;
            let room = (frames.len() - first).min(BATCH) as u64;
            let batch = room.min(self.count - sent).min(self.await_due(start, sent));
            let slots = first..first + batch as usize;
            for (seq, slot) in (number..).zip(slots.clone()) {
                stamps[slot].put(&mut frames[slot], seq);
            }
            let mut pending = &mut frames[slots];
            while !pending.is_empty() {
                match socket.send(pending) {
                    Ok(taken) => {
                        pending = &mut pending[taken..];
                        sent += taken as u64;
                    }
                    Err(error) if no_room(&error) => {
                        retries += 1;
                        thread::yield_now();
                    }
                    Err(error) => return Err(LabError::io(what)(error)),
                }
            }
        }
        Ok(Sent {
            frames: sent,
            elapsed: start.elapsed(),
            retries,
        })
    }

    /// Waits until frame `sent` is due; returns how many are by then.
    fn await_due(&self, start: Instant, sent: u64) -> u64 {
        let Some(pps) = self.pps else { return u64::MAX };
        loop {
            let elapsed = start.elapsed();
            let due = (elapsed.as_nanos() * u128::from(pps.get()) / 1_000_000_000) as u64 + 1;
            if due > sent {
                return due - sent;
            }
            let at = Duration::from_nanos(
                (u128::from(sent) * 1_000_000_000 / u128::from(pps.get())) as u64,
            );
            thread::sleep(
                at.saturating_sub(elapsed)
                    .clamp(Duration::from_micros(50), Duration::from_millis(10)),
            );
        }
    }

    /// One frame per slot: a whole number of rounds over the flows and the lengths, at least a batch.
    fn prepare(&self) -> Result<(Vec<Vec<u8>>, Vec<Stamp>)> {
        if !(1..=MAX_FLOWS).contains(&self.flows) {
            return Err(LabError::Protocol(format!(
                "{} flows; 1 to {MAX_FLOWS} work",
                self.flows
            )));
        }
        let lens = match &self.mix[..] {
            [] => std::slice::from_ref(&self.len_bytes),
            mix => mix,
        };
        let slots = BATCH.next_multiple_of(self.flows as usize * lens.len());
        (0..slots)
            .map(|slot| {
                let flow = slot as u32 % self.flows;
                let len_bytes = lens[slot % lens.len()];
                let shape = Shape {
                    len_bytes,
                    flow,
                    protocol: Protocol::Udp4,
                    vlan_tci: None,
                };
                let mut frame = vec![0; len_bytes];
                let stamp = shape
                    .write(self.run, &mut frame)
                    .map_err(|error| LabError::Protocol(error.to_string()))?;
                Ok((frame, stamp))
            })
            .collect::<Result<Vec<_>>>()
            .map(|slots| slots.into_iter().unzip())
    }
}

/// The number of a frame among those that were sent.
///
/// # Panics
/// If it is not whole.
#[must_use]
pub fn sequence(frame: &[u8]) -> u64 {
    match parse(frame) {
        Parsed::Witness(witness) => witness.seq,
        other => panic!("not a whole frame that was sent: {other:?}"),
    }
}

fn no_room(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOBUFS | libc::EAGAIN | libc::EINTR)
    )
}

const BATCH: usize = 64;
const MAX_FLOWS: u32 = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_take_turns_over_whole_rounds() {
        let stream = Stream {
            flows: 3,
            ..Stream::new("none", 0)
        };
        let (frames, stamps) = stream.prepare().unwrap();
        assert_eq!((frames.len(), stamps.len()), (66, 66));
        assert_eq!(frames[0], frames[3]);
        assert_ne!(frames[0], frames[1]);
    }

    #[test]
    fn lengths_take_turns_too() {
        let stream = Stream {
            flows: 5,
            mix: vec![60, 590],
            ..Stream::new("none", 0)
        };
        let (frames, _) = stream.prepare().unwrap();
        assert_eq!(frames.len() % 10, 0);
        let lens: Vec<usize> = frames.iter().take(4).map(Vec::len).collect();
        assert_eq!(lens, [60, 590, 60, 590]);
    }

    #[test]
    fn what_cannot_be_sent_is_refused_before_the_first_frame() {
        assert!(
            Stream {
                len_bytes: 59,
                ..Stream::new("none", 1)
            }
            .prepare()
            .is_err()
        );
        assert!(
            Stream {
                flows: 0,
                ..Stream::new("none", 1)
            }
            .prepare()
            .is_err()
        );
    }

    #[test]
    fn frames_are_due_at_their_time() {
        let stream = Stream {
            pps: NonZeroU64::new(1000),
            ..Stream::new("none", 1)
        };
        let start = Instant::now();
        assert!(stream.await_due(start, 0) >= 1);
        stream.await_due(start, 3);
        assert!(start.elapsed() >= Duration::from_millis(3));
    }
}
