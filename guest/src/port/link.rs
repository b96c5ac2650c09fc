//! One attachment of a port: its connection, its wake-up descriptor, its rings.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read};
use vnplug_ring::control::{ArenaHome, Message, Opened, RingPlace};
use vnplug_ring::{ArenaReader, Consumer, Producer, Region};

use super::{Kept, Outbox};
use crate::client::done;
use crate::connection::{Connection, PortFds, unexpected};
use crate::error::Error;
use crate::map::{map, map_read_only};
use crate::options::PortOptions;

/// The control side of an attached port; the rings live beside it in the port.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    pub(crate) wake: OwnedFd,
    pub(crate) opened: Opened,
    /// What transmits, until the port takes it into use.
    pub(crate) outbox: Option<Outbox>,
}

impl Link {
    /// Connects, opens the port, maps its memory and attaches its rings.
    pub(crate) fn open(
        options: &PortOptions,
        rules: &Kept,
        reopened: bool,
        limit: Duration,
    ) -> Result<(Self, Vec<Consumer>), Error> {
        let mut connection = Connection::open(&options.path(), limit)?;
        let mut request = options.request.clone();
        request.reopened = reopened;
        // Nothing comes before the rules are there that say what may.
        request.tuning.enabled &= !rules.matter();
        let opened = match connection.exchange(&Message::Open(request), None)? {
            Message::Opened(opened) => opened,
            other => return Err(unexpected(&other)),
        };
        let sends = opened.transmit.len > 0;
        let apart = opened.arenas.home == ArenaHome::Apart;
        let PortFds {
            memory,
            wake,
            kick,
            arenas,
        } = connection.take_fds(sends, apart)?;
        // The flag belongs to the read end, which was given away; the writer has its own (R8).
        let flags = fcntl_getfl(&wake).map_err(Error::system("cannot inspect the wake-up pipe"))?;
        fcntl_setfl(&wake, flags | OFlags::NONBLOCK)
            .map_err(Error::system("cannot set up the wake-up pipe"))?;
        let region = map(memory.as_fd(), opened.map_len)?;
        let commons = match &arenas {
            Some(arenas) => Some(map_read_only(arenas.as_fd(), opened.arenas.map_len)?),
            None if opened.arenas.home == ArenaHome::WithTheRings => Some(region.clone()),
            None if !options.request.group.is_empty() => {
                let what = "the daemon or agent is too old for groups: update it";
                return Err(Error::Protocol(what.into()));
            }
            None => None,
        };
        let rings =
            (0..opened.rings.len()).map(|at| attach(&region, commons.as_ref(), &opened, at));
        let rings = rings.collect::<Result<Vec<_>, _>>()?;
        if rings.is_empty() {
            return Err(Error::Protocol("a port without a ring".into()));
        }
        let outbox = match kick {
            Some(kick) => {
                let place = opened.transmit;
                let part = region.part(place.offset, place.len).ok_or_else(|| {
                    Error::Protocol(format!("a ring at {} lies outside", place.offset))
                })?;
                Some(Outbox::new(
                    Producer::attach(part).map_err(Error::Ring)?,
                    kick,
                ))
            }
            None if options.request.transmit_bytes > 0 => {
                let what = "the daemon or agent is too old to send: update it";
                return Err(Error::Protocol(what.into()));
            }
            None => None,
        };
        if rules.matter() {
            let (port, tuning) = (opened.port, options.request.tuning);
            rules.give(&mut connection, port)?;
            done(&connection.exchange(&Message::Tune { port, tuning }, None)?)?;
        }
        Ok((
            Self {
                connection,
                wake,
                opened,
                outbox,
            },
            rings,
        ))
    }

    /// Empties the wake-up pipe. `Err`: its other end is closed.
    pub(crate) fn hush(&self) -> Result<(), Error> {
        let mut bytes = [0; 64];
        match read(&self.wake, &mut bytes) {
            Ok(0) => Err(Error::Disconnected),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::system("cannot read the wake-up pipe")(errno)),
        }
    }
}

/// The ring of a queue, with the arena of its group if there is one.
fn attach(
    region: &Region,
    commons: Option<&Region>,
    opened: &Opened,
    at: usize,
) -> Result<Consumer, Error> {
    let part = |region: &Region, place: Option<&RingPlace>| {
        place
            .and_then(|place| region.part(place.offset, place.len))
            .ok_or_else(|| Error::Protocol(format!("ring or arena {at} lies outside")))
    };
    let ring = part(region, opened.rings.get(at))?;
    match commons {
        None => Consumer::attach(ring).map_err(Error::Ring),
        Some(commons) => {
            let arena = part(commons, opened.arenas.places.get(at))?;
            let arena = ArenaReader::attach(arena).map_err(Error::Ring)?;
            Consumer::attach_group(ring, arena).map_err(Error::Ring)
        }
    }
}
