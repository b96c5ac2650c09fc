//! Sending: a port of its own on one device, which receives nothing.
//!
//! Most programs never send, and sending needs a grant of its own. So the port is opened when the
//! ring's mode asks for it, else with the first frame.
//!
//! Programs for PF_RING repeat a send that failed, some of them without an end and deaf to signals.
//! So a failure that time may heal takes its time, and a row of failures has an end:
//!
//! | what is in the way                       | a call           | at last                 |
//! |------------------------------------------|------------------|-------------------------|
//! | no room                                  | -4 after 10 ms   | -2 after 1,024 in a row |
//! | the daemon is away                       | -1 after 10 ms   | -2 after 1,024 in a row |
//! | a refusal, or an end of the device       | -7 at once       | -2 after 16 in a row    |
//!
//! Every such program takes -2 for "not this frame" and goes on. A frame that is sent ends the row.

use std::time::{Duration, Instant};

use vnplug::{Error, Port, PortOptions, code};

use crate::device::Target;
use crate::error::{self, GENERIC, INVALID_ARGUMENT, NO_TX_SLOT, NOT_SUPPORTED};
use crate::handle::Failure;

/// See the module's comment.
#[derive(Debug)]
pub(crate) struct Sender {
    target: Option<Target>,
    label: String,
    /// Of the ring.
    handle: u64,
    port: Option<Port>,
    /// Why there is no port, and will be none before [`open`](Self::open).
    refused: Option<Failure>,
    /// This many written frames are handed over at once.
    watermark: u32,
    unflushed: u32,
    /// When the connection was looked at last.
    looked: Instant,
    row: Row,
}

impl Sender {
    /// One that sends through `target` for the ring of this handle; the operator sees `label`.
    pub(crate) fn new(target: Option<Target>, label: String, handle: u64) -> Self {
        Self {
            target,
            label,
            handle,
            port: None,
            refused: None,
            watermark: 1,
            unflushed: 0,
            looked: Instant::now(),
            row: Row::default(),
        }
    }

    /// Opens the port if there is none, also after a refusal.
    pub(crate) fn open(&mut self) -> Result<(), Failure> {
        if self.port.is_some() {
            return Ok(());
        }
        let opened = match &self.target {
            Some(target) => open(target, &self.label, self.handle),
            None => Err((NO_DEVICE, Heals::Never)),
        };
        match opened {
            Ok(port) => (self.port, self.refused) = (Some(port), None),
            Err((failure, heals)) => {
                self.refused = (heals == Heals::Never).then_some(failure);
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Sends a frame, or writes it to be sent with the next ones.
    pub(crate) fn send(&mut self, frame: &[u8], flush: bool) -> Result<(), Failure> {
        let sent = match self.refused {
            Some(refused) => Err((refused, Heals::Never)),
            None => self.write(frame),
        };
        if let Err((failure, heals)) = sent {
            if failure != TOO_LONG && heals == Heals::Never {
                (self.port, self.refused) = (None, Some(failure));
            }
            return Err(self.row.add(failure, heals));
        }
        self.row = Row::default();
        self.unflushed += 1;
        if flush || self.unflushed >= self.watermark {
            self.flush();
        }
        Ok(())
    }

    /// Hands over what was written.
    pub(crate) fn flush(&mut self) {
        self.unflushed = 0;
        // A port that is away has nothing to hand over.
        if let Some(Ok(outbox)) = self.port.as_mut().map(Port::outbox) {
            outbox.flush();
        }
    }

    /// This many written frames are handed over at once.
    pub(crate) fn set_watermark(&mut self, frames: u32) {
        self.watermark = frames.max(1);
        self.flush();
    }

    /// A frame was not even tried: what the program is told. What was refused before says why.
    pub(crate) fn refuse(&mut self, failure: Failure) -> Failure {
        self.row.add(self.refused.unwrap_or(failure), Heals::Never)
    }

    /// Writes a frame, waiting for room for as long as a call takes.
    fn write(&mut self, frame: &[u8]) -> Result<(), (Failure, Heals)> {
        if self.port.is_none() {
            let Some(target) = &self.target else {
                return Err((NO_DEVICE, Heals::Never));
            };
            self.port = Some(open(target, &self.label, self.handle)?);
        }
        let port = self.port.as_mut().ok_or((NO_DEVICE, Heals::Never))?;
        match push(port, frame, &mut self.looked) {
            Ok(true) => Ok(()),
            Ok(false) => Err((FULL, Heals::InTime)),
            Err(Error::Invalid(_)) => Err((TOO_LONG, Heals::Never)),
            Err(error) => Err(failure(&error)),
        }
    }
}

/// Whether a failure goes away without anybody's doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heals {
    InTime,
    Never,
}

/// Failures since a frame was sent.
#[derive(Debug, Default)]
struct Row {
    weight: u32,
}

impl Row {
    /// One more, and what the program is told.
    fn add(&mut self, failure: Failure, heals: Heals) -> Failure {
        let over = self.weight >= LIMIT;
        let weight = match heals {
            Heals::InTime => 1,
            Heals::Never => FINAL,
        };
        self.weight = (self.weight + weight).min(LIMIT);
        if !over {
            return failure;
        }
        std::thread::sleep(PAUSE);
        Failure::new(INVALID_ARGUMENT, failure.errno)
    }
}

fn open(target: &Target, label: &str, handle: u64) -> Result<Port, (Failure, Heals)> {
    let mut options = PortOptions::new(target.as_str())
        .enabled(false)
        .handle(handle)
        .ring_bytes(LEAST_RING)
        .transmit(RING);
    if !label.is_empty() {
        options = options.label(label);
    }
    options.open().map_err(|error| failure(&error))
}

/// Writes a frame; false: there was no room for [`PATIENCE`].
fn push(port: &mut Port, frame: &[u8], looked: &mut Instant) -> Result<bool, Error> {
    // Nobody takes the frames: perhaps the daemon died, and only the connection tells. A port that is
    // away reopens here.
    if port.is_away() || port.outbox()?.waiting_bytes() > 0 && looked.elapsed() >= LOOK {
        *looked = Instant::now();
        port.wait(Some(Duration::ZERO))?;
    }
    if port.outbox()?.push(frame)? {
        return Ok(true);
    }
    Ok(port.wait_for_room(frame.len(), PATIENCE)? && port.outbox()?.push(frame)?)
}

/// What an error means to a program that sends.
fn failure(error: &Error) -> (Failure, Heals) {
    if error.heals() {
        std::thread::sleep(PATIENCE);
        let failure = Failure::new(GENERIC, error::errno(error));
        return (failure, Heals::InTime);
    }
    let errno = match error {
        Error::Refused { code, .. } if *code != code::DENIED => libc::ENOTSUP,
        error => error::errno(error),
    };
    (Failure::new(NOT_SUPPORTED, errno), Heals::Never)
}

const NO_DEVICE: Failure = Failure::new(NOT_SUPPORTED, libc::ENODEV);
const FULL: Failure = Failure::new(NO_TX_SLOT, libc::ENOBUFS);
/// Longer than the interface, the ring, or the host takes.
pub(crate) const TOO_LONG: Failure = Failure::new(INVALID_ARGUMENT, libc::EMSGSIZE);
const LEAST_RING: u64 = 4096;
/// Some hundred frames of full length.
const RING: u64 = 512 << 10;
/// How long a call waits for room, or for the daemon.
const PATIENCE: Duration = Duration::from_millis(10);
/// How often the connection is looked at while frames wait.
const LOOK: Duration = Duration::from_millis(1);
/// A row of this weight is over.
const LIMIT: u32 = 1024;
/// What a refusal weighs.
const FINAL: u32 = LIMIT / 16;
/// What each call takes when the row is over.
const PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use super::*;

    fn told(row: &mut Row, failure: Failure, heals: Heals, calls: usize) -> Vec<c_int> {
        (0..calls).map(|_| row.add(failure, heals).code).collect()
    }

    #[test]
    fn a_row_of_refusals_has_an_end() {
        let mut row = Row::default();
        let refused = Failure::new(NOT_SUPPORTED, libc::EACCES);
        assert_eq!(
            told(&mut row, refused, Heals::Never, 16),
            [NOT_SUPPORTED; 16]
        );
        assert_eq!(
            told(&mut row, refused, Heals::Never, 3),
            [INVALID_ARGUMENT; 3]
        );
        assert_eq!(row.add(refused, Heals::Never).errno, libc::EACCES);
    }

    #[test]
    fn a_full_ring_has_longer() {
        let mut row = Row::default();
        assert_eq!(
            told(&mut row, FULL, Heals::InTime, 1024),
            [NO_TX_SLOT; 1024]
        );
        assert_eq!(
            told(&mut row, FULL, Heals::InTime, 2),
            [INVALID_ARGUMENT; 2]
        );
    }

    #[test]
    fn a_ring_without_a_device_sends_nothing() {
        let mut sender = Sender::new(None, String::new(), 0);
        assert_eq!(sender.open(), Err(NO_DEVICE));
        assert_eq!(sender.send(&[0; 60], true), Err(NO_DEVICE));
    }
}
