//! A port of the daemon as the exit, by its transmit ring.
//!
//! A daemon that ends takes the ring with it, and the port comes back with another: what the ring held
//! is lost and not sent once more, since nobody knows how much of it was sent. [`Outlet`] therefore keeps
//! count of the frames that are in the ring.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use vnplug::{Error, Port, PortOptions};
use vnplug_ring::control::FilterSpec;
use vnplug_ring::layout::record_size;

use super::exit::{Exit, ExitError, Obstacle};

/// Sends through a device of the daemon (or, in a guest, of the agent).
#[derive(Debug)]
pub struct Outlet {
    port: Port,
    longest: usize,
    /// Frames written to the ring of now.
    pushed: u64,
    waiting: Waiting,
    /// See [`Counted::lost`].
    lost: u64,
    /// See [`Counted::earlier`].
    earlier: u64,
}

/// What became of the frames that were handed over: all of them are in `taken`, `earlier`, `lost` or
/// `waiting`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counted {
    /// Frames taken from the transmit ring.
    pub taken: u64,
    /// Handed on to the kernel or the driver.
    pub sent: u64,
    /// Dropped, by the counters' names (`send_dropped_…`); none that is 0.
    pub dropped: Vec<(String, u64)>,
    /// Taken, or nearly all of them, by daemons that ended meanwhile; what of them was sent is not known.
    pub earlier: u64,
    /// The most that can have been in the rings of daemons that ended, and were not taken.
    pub lost: u64,
    /// Still in the ring when the daemon was given up.
    pub waiting: u64,
    /// The daemon said how many it has taken and sent.
    pub answered: bool,
}

impl Outlet {
    /// Opens a port that only sends, with a transmit ring of this size.
    ///
    /// # Errors
    /// As [`Port::open`]; [`Error::Invalid`] if the device carries no Ethernet.
    pub fn open(device: &str, socket: &Path, ring_bytes: u64) -> Result<Self, Error> {
        let port = PortOptions::new(device)
            .socket(socket)
            .label("replay")
            .ring_bytes(4096)
            .enabled(false)
            // Else the source would have to hand over everything (early drop).
            .filter_spec(FilterSpec::Program(NOTHING.to_vec()))
            .transmit(ring_bytes);
        let mut outlet = Self {
            port: port.open()?,
            longest: 0,
            pushed: 0,
            waiting: Waiting::default(),
            lost: 0,
            earlier: 0,
        };
        outlet.look()?;
        Ok(outlet)
    }

    /// Waits until the daemon has taken everything, and asks what became of it.
    ///
    /// # Errors
    /// The port is over.
    pub fn finish(&mut self) -> Result<Counted, Error> {
        let limit = Instant::now() + DRAIN;
        loop {
            match self.look() {
                Ok(()) if self.waiting.lens.is_empty() => break,
                // Perhaps it comes back, and can say nothing of what was in its ring.
                Ok(()) | Err(Error::Disconnected) => {}
                Err(error) => return Err(error),
            }
            if Instant::now() >= limit {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let stats = self.port.stats()?;
        let mut counted = Counted {
            earlier: self.earlier,
            lost: self.lost,
            waiting: self.waiting.lens.len() as u64,
            answered: stats.host.is_some(),
            ..Counted::default()
        };
        for (name, value) in stats.host.into_iter().flat_map(|host| host.values) {
            match name.as_str() {
                "send_taken" => counted.taken = value,
                "sent" => counted.sent = value,
                _ if name.starts_with("send_dropped_") && value > 0 => {
                    counted.dropped.push((name, value));
                }
                _ => {}
            }
        }
        Ok(counted)
    }

    /// Looks how much of the ring was taken, and whether it is another one than before.
    fn look(&mut self) -> Result<(), Error> {
        let outbox = self.port.outbox()?;
        self.longest = outbox.max_frame();
        // Only this pushes: a ring that counts less is a new one.
        if outbox.pushed() < self.pushed {
            let lost = self.waiting.lens.len() as u64;
            self.lost += lost;
            self.earlier += self.pushed - lost;
            self.waiting = Waiting::default();
            self.pushed = outbox.pushed();
        }
        self.waiting.leave(outbox.waiting_bytes());
        if self.port.link_type() != ETHERNET {
            return Err(Error::Invalid("the device carries no Ethernet"));
        }
        Ok(())
    }

    fn push(&mut self, frames: &[&[u8]]) -> Result<usize, Error> {
        self.look()?;
        let outbox = self.port.outbox()?;
        let mut pushed = 0;
        for frame in frames {
            // The first is told of by itself.
            if frame.len() > outbox.max_frame() {
                break;
            }
            match outbox.push(frame) {
                Ok(true) => {}
                Ok(false) => break,
                // What was written counts; the next attempt meets the error again.
                Err(_) if pushed > 0 => break,
                Err(error) => return Err(error),
            }
            self.waiting.enter(frame.len());
            pushed += 1;
        }
        outbox.flush();
        self.pushed += pushed as u64;
        Ok(pushed)
    }
}

/// The frames in a ring, as far as one knows who looks at it from time to time.
#[derive(Debug, Default)]
struct Waiting {
    /// Captured lengths in bytes, the oldest first.
    lens: VecDeque<u32>,
    /// Bytes of their records.
    bytes: u64,
}

impl Waiting {
    fn enter(&mut self, len: usize) {
        let len = len as u32;
        self.lens.push_back(len);
        self.bytes += record_size(len);
    }

    /// This many bytes of the ring are not taken yet. Those that fill it up at its end are among them: a
    /// frame may stay here that was taken, and none leaves that was not.
    fn leave(&mut self, left_bytes: u64) {
        while let Some(&len) = self.lens.front() {
            let behind = self.bytes - record_size(len);
            if behind < left_bytes {
                break;
            }
            self.bytes = behind;
            self.lens.pop_front();
        }
    }
}

impl Exit for Outlet {
    fn fits(&self, frame: &[u8]) -> bool {
        frame.len() <= self.longest
    }

    fn send(&mut self, frames: &[&[u8]]) -> Result<usize, Obstacle> {
        let gone = |error| Err(Obstacle::Gone(ExitError::Port(error)));
        match self.push(frames) {
            Ok(0) => {}
            Ok(pushed) => return Ok(pushed),
            // The daemon restarts, and the port comes back by itself.
            Err(Error::Disconnected) => {
                return match self.port.wait(Some(LOOK)) {
                    Ok(_) => Ok(0),
                    Err(error) => gone(error),
                };
            }
            Err(error) => return gone(error),
        }
        let first = frames.first().map_or(0, |frame| frame.len());
        if first > self.longest {
            return Err(Obstacle::TooLong);
        }
        match self.port.wait_for_room(first, LOOK) {
            Ok(_) | Err(Error::Disconnected) => Ok(0),
            Err(error) => gone(error),
        }
    }
}

/// A classic BPF program that accepts nothing: `ret #0`.
const NOTHING: [u8; 8] = 0x0006_u64.to_le_bytes();
const ETHERNET: u32 = 1;
/// How long an attempt waits for room.
const LOOK: Duration = Duration::from_millis(50);
/// How long the daemon may take for what is in the ring at the end.
const DRAIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_in_the_ring_are_counted_by_what_is_left_of_their_bytes() {
        let mut waiting = Waiting::default();
        let lens = [60, 1514, 61, 0];
        for len in lens {
            waiting.enter(len);
        }
        let mut left = waiting.bytes;
        for (gone, len) in lens.into_iter().enumerate() {
            waiting.leave(left);
            assert_eq!(waiting.lens.len(), lens.len() - gone);
            // Not yet the whole of it.
            left -= record_size(len as u32);
            waiting.leave(left + 1);
            assert_eq!(waiting.lens.len(), lens.len() - gone);
        }
        waiting.leave(0);
        assert_eq!((waiting.lens.len(), waiting.bytes), (0, 0));
    }
}
