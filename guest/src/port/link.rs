//! One attachment of a port: its connection, its wake-up descriptor, its rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read};
use vnplug_ring::control::{ArenaHome, Message, Opened, RingPlace};
use vnplug_ring::news::BOARD_LEN;
use vnplug_ring::{ArenaReader, Consumer, Outlet, Producer, Region};

use super::bundle::{Common, Seat};
use super::{Kept, Outbox};
use crate::client::{commit_limit, done};
use crate::connection::{Connection, PortFds, unexpected};
use crate::error::Error;
use crate::map::{map, map_apart, map_read_only};
use crate::options::PortOptions;

/// A port's way to the daemon or agent.
#[derive(Debug)]
pub(crate) enum Line {
    /// Its own: a connection with its socket, and a doorbell.
    Own(Arc<Mutex<Connection>>, Arc<OwnedFd>, Option<OwnedFd>),
    /// That of its bundle.
    Common(Arc<Mutex<Connection>>, Arc<Common>),
}

/// The control side of an attached port; the rings live beside it in the port.
#[derive(Debug)]
pub(crate) struct Link {
    line: Line,
    /// The doorbell that only this port of the bundle has: a vector's, which never ends by itself.
    vector: Option<u64>,
    pub(crate) opened: Opened,
    /// What transmits, until the port takes it into use.
    pub(crate) outbox: Option<Outbox>,
    /// Of the transmit ring. Until the port is closed the host may read what it names, though it is unmapped here.
    outlet: Option<Arc<Outlet>>,
}

impl Link {
    /// Connects, opens the port, maps its memory and attaches its rings.
    pub(crate) fn open(
        options: &PortOptions,
        rules: &Kept,
        reopened: bool,
        limit: Duration,
        seat: Option<&Seat>,
    ) -> Result<(Self, Vec<Consumer>), Error> {
        let mut line = match seat {
            None => {
                let connection = Connection::open(&options.path(), limit)?;
                let socket = connection.socket();
                Line::Own(Arc::new(Mutex::new(connection)), socket, None)
            }
            Some(seat) => seat.common.line(&options.path(), limit)?,
        };
        let mut request = options.request.clone();
        request.reopened = reopened;
        request.shares_wake = seat.is_some();
        request.place = seat.map_or(0, Seat::place);
        request.maps_apart = true;
        // Nothing comes before the rules are there that say what may.
        request.tuning.enabled &= !rules.matter();
        // The rings are committed before the answer comes.
        let asked = [
            request.ring_bytes,
            request.transmit_bytes,
            request.arena_bytes,
        ];
        let memory = asked.into_iter().fold(0_u64, u64::saturating_add);
        let limit = limit + commit_limit(memory);
        let open = Message::Open(request);
        let opened = line.with(|connection| connection.exchange_within(limit, &open, None))?;
        let opened = match opened {
            Message::Opened(opened) => opened,
            other => return Err(unexpected(&other)),
        };
        let PortFds {
            memory,
            records,
            wake,
            board,
            kick,
            arenas,
        } = line.with(|connection| connection.take_fds(&opened, seat.is_some()))?;
        // From here on what fails closes the port, too.
        let mut link = Self {
            line,
            vector: None,
            opened,
            outbox: None,
            outlet: None,
        };
        link.take_wake(wake, board, seat)?;
        let opened = &link.opened;
        let region = match &records {
            Some(records) => map_apart(memory.as_fd(), records.as_fd(), opened)?,
            None => map(memory.as_fd(), opened.map_len)?,
        };
        let commons = match &arenas {
            Some(arenas) => Some(map_read_only(arenas.as_fd(), opened.arenas.map_len)?),
            None if opened.arenas.home == ArenaHome::WithTheRings => Some(region.clone()),
            None if !options.request.group.is_empty() => {
                let what = "the daemon or agent is too old for groups: update it";
                return Err(Error::Protocol(what.into()));
            }
            None => None,
        };
        let rings = (0..opened.rings.len()).map(|at| attach(&region, commons.as_ref(), opened, at));
        let mut rings = rings.collect::<Result<Vec<_>, _>>()?;
        if rings.is_empty() {
            return Err(Error::Protocol("a port without a ring".into()));
        }
        link.outbox = match kick {
            Some(kick) => {
                let place = opened.transmit;
                let part = region.part(place.offset, place.len).ok_or_else(|| {
                    Error::Protocol(format!("a ring at {} lies outside", place.offset))
                })?;
                let ring = Producer::attach(part).map_err(Error::Ring)?;
                let mut outbox = Outbox::new(ring, kick, options.request.segments);
                if options.request.posts {
                    outbox.post_from(0, &mut rings)?;
                }
                Some(outbox)
            }
            None if options.request.transmit_bytes > 0 => {
                let what = "the daemon or agent is too old to send: update it";
                return Err(Error::Protocol(what.into()));
            }
            None => None,
        };
        link.outlet = link.outbox.as_ref().map(|it| it.postable().outlet());
        if rules.matter() {
            let (port, tuning) = (opened.port, options.request.tuning);
            link.line.with(|connection| rules.give(connection, port))?;
            done(&link.exchange(&Message::Tune { port, tuning })?)?;
        }
        Ok((link, rings))
    }

    fn take_wake(
        &mut self,
        wake: Option<OwnedFd>,
        board: Option<OwnedFd>,
        seat: Option<&Seat>,
    ) -> Result<(), Error> {
        if let Some(wake) = &wake {
            // The flag belongs to the read end, which was given away; the writer has its own (R8).
            let flags =
                fcntl_getfl(wake).map_err(Error::system("cannot inspect the wake-up pipe"))?;
            fcntl_setfl(wake, flags | OFlags::NONBLOCK)
                .map_err(Error::system("cannot set up the wake-up pipe"))?;
        }
        match (&mut self.line, wake) {
            (Line::Own(.., own), wake) => *own = wake,
            (Line::Common(_, common), Some(wake)) => {
                if let Some(board) = board {
                    common.set_board(map(board.as_fd(), BOARD_LEN)?);
                }
                // A daemon gives one for all ports of the connection, and an agent one for each.
                let own = seat.filter(|_| !self.opened.apart);
                let number = common.add_wake(wake, own.map(|seat| seat.number))?;
                self.vector = (self.opened.vector != u32::MAX).then_some(number);
            }
            (Line::Common(..), None) => {}
        }
        Ok(())
    }

    /// Asks the other side.
    pub(crate) fn exchange(&mut self, request: &Message) -> Result<Message, Error> {
        self.line.exchange(request)
    }

    /// Asks the other side, with a descriptor, for an answer with descriptors.
    pub(super) fn exchange_fds(
        &mut self,
        request: &Message,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(Message, Vec<OwnedFd>), Error> {
        self.line.with(|connection| {
            let answer = connection.exchange(request, fd)?;
            Ok((answer, connection.take_all_fds()))
        })
    }

    /// As [`exchange_fds`](Self::exchange_fds); the connection outlives an answer that comes late.
    pub(super) fn ask_fds(
        &mut self,
        request: &Message,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<(Message, Vec<OwnedFd>), Error> {
        self.line.with(|connection| {
            let answer = connection.ask_with(request, fd, limit)?;
            Ok((answer, connection.take_all_fds()))
        })
    }

    /// For those that ask about the port from other threads.
    pub(super) fn connection(&self) -> Weak<Mutex<Connection>> {
        Arc::downgrade(self.line.connection())
    }

    /// Why the host closed the port, if it said so. `Err`: it will say nothing more.
    pub(crate) fn unasked(&self) -> Result<Option<String>, Error> {
        let port = self.opened.port;
        match &self.line {
            Line::Own(connection, ..) => loop {
                match lock(connection).unasked()? {
                    Some(Message::Gone { port: gone, reason }) if gone == port => {
                        return Ok(Some(reason));
                    }
                    // Wake belongs to VM channels; a Gone may be of a port that was closed already.
                    Some(_) => {}
                    None => return Ok(None),
                }
            },
            Line::Common(connection, _) => lock(connection).gone(port),
        }
    }

    /// Reads what the host has said by now, which [`unasked`](Self::unasked) tells, also where all ports of a bundle have one line.
    pub(crate) fn gather(&self) {
        let (Line::Own(connection, ..) | Line::Common(connection, _)) = &self.line;
        // That it is over is remembered.
        let _ = lock(connection).gather();
    }

    /// The doorbell and the socket, if they are the port's own.
    pub(crate) fn own_fds(&self) -> Option<(BorrowedFd<'_>, BorrowedFd<'_>)> {
        match &self.line {
            Line::Own(_, socket, wake) => Some((wake.as_ref()?.as_fd(), socket.as_fd())),
            Line::Common(..) => None,
        }
    }

    /// Empties the wake-up pipe, if it is the port's own. `Err`: its other end is closed.
    pub(crate) fn hush(&self) -> Result<(), Error> {
        let Line::Own(.., Some(wake)) = &self.line else {
            return Ok(());
        };
        let mut bytes = [0; 64];
        match read(wake, &mut bytes) {
            Ok(0) => Err(Error::Disconnected),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::system("cannot read the wake-up pipe")(errno)),
        }
    }
}

impl Line {
    fn with<T>(&mut self, then: impl FnOnce(&mut Connection) -> T) -> T {
        then(&mut lock(self.connection()))
    }

    fn connection(&self) -> &Arc<Mutex<Connection>> {
        match self {
            Self::Own(connection, ..) | Self::Common(connection, _) => connection,
        }
    }

    fn exchange(&mut self, request: &Message) -> Result<Message, Error> {
        self.with(|connection| connection.exchange(request, None))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Line::Common(connection, common) = &self.line
            && !common.is_over()
        {
            let port = self.opened.port;
            // A port that is closed already is refused, and a connection that is over closed it.
            let _ = lock(connection).exchange(&Message::Close { port }, None);
            if let Some(number) = self.vector {
                common.remove_wake(number);
            }
        }
    }
}

/// A connection is whole between two exchanges, or it knows that it is over.
pub(super) fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
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
