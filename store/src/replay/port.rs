//! A port of the daemon as the exit, by its transmit ring.

use std::path::Path;
use std::time::{Duration, Instant};

use vnplug::{Error, Port, PortOptions};
use vnplug_ring::control::FilterSpec;

use super::exit::{Exit, ExitError, Obstacle};

/// Sends through a device of the daemon (or, in a guest, of the agent).
#[derive(Debug)]
pub struct Outlet {
    port: Port,
    longest: usize,
}

/// What the daemon counted of the frames it got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counted {
    /// Frames taken from the transmit ring.
    pub taken: u64,
    /// Handed on to the kernel or the driver.
    pub sent: u64,
    /// Dropped, by the counters' names (`send_dropped_…`); none that is 0.
    pub dropped: Vec<(String, u64)>,
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
        let mut port = port.open()?;
        if port.link_type() != ETHERNET {
            return Err(Error::Invalid("the device carries no Ethernet"));
        }
        let longest = port.outbox()?.max_frame();
        Ok(Self { port, longest })
    }

    /// Waits until the daemon has taken everything, and asks what became of it.
    ///
    /// # Errors
    /// The port is over, or the daemon does not answer.
    pub fn finish(&mut self) -> Result<Counted, Error> {
        let limit = Instant::now() + DRAIN;
        while self.port.outbox()?.waiting_bytes() > 0 && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stats = self.port.stats()?;
        let mut counted = Counted::default();
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

    fn push(&mut self, frames: &[&[u8]]) -> Result<usize, Error> {
        let outbox = self.port.outbox()?;
        let mut pushed = 0;
        for frame in frames {
            // The first is told of by itself.
            if frame.len() > outbox.max_frame() || !outbox.push(frame)? {
                break;
            }
            pushed += 1;
        }
        outbox.flush();
        Ok(pushed)
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
