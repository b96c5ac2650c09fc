//! Questions about a port from any thread, at any time.
//!
//! | part     | who writes                          | who reads        |
//! |----------|-------------------------------------|------------------|
//! | `line`   | the port, when it opens or reopens  | every [`Asker`]  |
//! | `tally`  | the port, with each packet          | every [`Asker`]  |
//!
//! The connection has a lock of its own, which nobody holds while he sleeps for packets. An exchange
//! is whole under it, from whichever thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use vnplug_ring::control::{Counted, Device, Message};
use vnplug_ring::layout::{Meta, flags};

use super::link::{Link, lock};
use super::{Counts, PortStats};
use crate::client::ANSWER_LIMIT;
use crate::connection::{Connection, unexpected};
use crate::error::Error;

/// Asks about a port, from any thread, while another one uses it. It does not keep the port open.
#[derive(Debug, Clone)]
pub struct Asker(pub(super) Arc<Answers>);

/// What a port shares with its [`Asker`]s.
#[derive(Debug, Default)]
pub(super) struct Answers {
    line: Mutex<Present>,
    pub(super) tally: Tally,
}

/// The present incarnation of a port: its connection and its number there.
#[derive(Debug, Clone, Default)]
struct Present {
    connection: Weak<Mutex<Connection>>,
    number: u32,
    device: String,
}

/// [`Counts`] that one thread writes and others read.
#[derive(Debug, Default)]
pub(super) struct Tally {
    received: AtomicU64,
    bytes: AtomicU64,
    lost: AtomicU64,
    gaps: AtomicU64,
    reopened: AtomicU64,
}

impl Asker {
    /// As [`Port::stats`](super::Port::stats). The two sides' counters are not of one moment: the
    /// reader goes on meanwhile.
    ///
    /// # Errors
    /// As [`Port::stats`](super::Port::stats).
    pub fn stats(&self) -> Result<PortStats, Error> {
        let host = self.ask(ANSWER_LIMIT)?.map(|(_, counted)| counted);
        let own = self.counts();
        Ok(PortStats { own, host })
    }

    /// The host's counters, with the [number](super::Port::number) that the port had there. `None`: no
    /// answer within `limit`, or the host cannot be reached now.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Protocol`].
    pub fn ask(&self, limit: Duration) -> Result<Option<(u32, Counted)>, Error> {
        let Present {
            connection, number, ..
        } = self.present();
        let Some(connection) = connection.upgrade() else {
            return Ok(None);
        };
        let answer = lock(&connection).ask(&Message::Stats { port: number }, limit);
        match answer {
            Ok(Message::Counters(counters)) => {
                Ok(counters.into_iter().next().map(|it| (number, it)))
            }
            Ok(other) => Err(unexpected(&other)),
            // It was reopened meanwhile.
            Err(Error::Refused { .. }) if self.present().number != number => Ok(None),
            Err(error) if error.heals() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The port's device as the host lists it now. `None`: no answer within `limit`, or the host cannot be
    /// reached now.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Protocol`].
    pub fn device(&self, limit: Duration) -> Result<Option<Device>, Error> {
        let present = self.present();
        let Some(connection) = present.connection.upgrade() else {
            return Ok(None);
        };
        let answer = lock(&connection).ask(&Message::List, limit);
        match answer {
            Ok(Message::Devices(devices)) => {
                let wanted = plain(&present.device);
                Ok(devices
                    .into_iter()
                    .find(|device| plain(&device.name) == wanted))
            }
            Ok(other) => Err(unexpected(&other)),
            Err(error) if error.heals() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The reader's counters; no request is made.
    pub fn counts(&self) -> Counts {
        self.0.tally.counts()
    }

    fn present(&self) -> Present {
        let line = self.0.line.lock();
        line.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Answers {
    /// The port is attached by `link` from now on.
    pub(super) fn attach(&self, link: &Link) {
        let present = Present {
            connection: link.connection(),
            number: link.opened.port,
            device: link.opened.device.clone(),
        };
        *self.line.lock().unwrap_or_else(PoisonError::into_inner) = present;
    }
}

// One thread writes, so a load and a store do for an addition; no other memory depends on these.
impl Tally {
    #[inline]
    pub(super) fn add(&self, meta: &Meta, len: usize) {
        raise(&self.received, 1);
        raise(&self.bytes, len as u64);
        raise(&self.lost, u64::from(meta.lost));
        raise(&self.gaps, u64::from(meta.flags & flags::GAP != 0));
    }

    /// A packet that was overwritten while it was read. The next one tells of itself as lost.
    pub(super) fn add_overwritten(&self, meta: &Meta) {
        raise(&self.lost, u64::from(meta.lost));
        raise(&self.gaps, u64::from(meta.flags & flags::GAP != 0));
    }

    pub(super) fn add_reopened(&self) {
        raise(&self.reopened, 1);
    }

    pub(super) fn counts(&self) -> Counts {
        Counts {
            received: self.received.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            lost: self.lost.load(Relaxed),
            gaps: self.gaps.load(Relaxed),
            reopened: self.reopened.load(Relaxed),
        }
    }
}

/// A device's name without the prefix that guests give it, and without a queue.
fn plain(name: &str) -> &str {
    let name = name.strip_prefix("host:").unwrap_or(name);
    name.split_once('@').map_or(name, |(device, _queue)| device)
}

#[inline]
fn raise(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed) + by, Relaxed);
}
