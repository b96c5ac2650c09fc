//! What the ports of a bundle have in common, and which of them are to be looked at.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::{Errno, read};
use vnplug_ring::Region;
use vnplug_ring::news::{Board, News, PLACES};

use super::super::link::{Line, lock};
use super::super::watch::{self, CONTROL, Seen};
use crate::connection::{Connection, timespec};
use crate::error::Error;

/// What the ports of a bundle have in common.
#[derive(Debug)]
pub(in crate::port) struct Common {
    epoll: OwnedFd,
    state: Mutex<BundleState>,
    /// The whole bundle goes.
    over: AtomicBool,
}

#[derive(Debug, Default)]
struct BundleState {
    line: Option<Arc<Mutex<Connection>>>,
    /// One; several behind an agent. By the numbers by which they are known.
    wakes: BTreeMap<u64, Wake>,
    next_wake: u64,
    /// Where the daemon says who rang.
    board: Option<Board<Region>>,
    /// The seats whose ports are to be looked at.
    awake: News,
    /// Seats that there were at a time, and those of them that are free.
    seats: u32,
    free: Vec<u32>,
    /// When a connection was tried in vain, and why.
    failed: Option<(Instant, Error)>,
}

#[derive(Debug)]
struct Wake {
    fd: OwnedFd,
    /// Whose it is, if it is one port's.
    seat: Option<u32>,
}

/// A port's place in its bundle, as long as it lives.
#[derive(Debug)]
pub(in crate::port) struct Seat {
    pub(in crate::port) common: Arc<Common>,
    pub(in crate::port) number: u32,
}

impl Seat {
    pub(super) fn take(common: &Arc<Common>) -> Self {
        let mut state = common.state();
        let number = state.free.pop().unwrap_or_else(|| {
            state.seats += 1;
            state.seats - 1
        });
        drop(state);
        let common = Arc::clone(common);
        Self { common, number }
    }

    /// As a request to open a port says it: 0 if there is none for it on a board.
    pub(in crate::port) fn place(&self) -> u32 {
        match (self.number as usize) < PLACES {
            true => self.number + 1,
            false => 0,
        }
    }

    /// The next wait is to look at its port.
    pub(in crate::port) fn stir(&self) {
        self.common.stir(self.number as usize);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.common.state();
        state.awake.clear(self.number as usize);
        state.free.push(self.number);
    }
}

impl BundleState {
    fn wake_all(&mut self) {
        (0..self.seats as usize).for_each(|seat| self.awake.set(seat));
    }

    /// Empties a doorbell, and wakes whoever rang.
    fn hush(&mut self, epoll: &OwnedFd, number: u64) {
        let Some(wake) = self.wakes.get(&number) else {
            return;
        };
        // As much as a socket holds, or the next looks find the rest.
        let mut bytes = [0; 4096];
        for _ in 0..16 {
            match read(&wake.fd, &mut bytes) {
                // NB: a pipe whose other end is closed is readable for ever. With the last port that rings
                // it the daemon closes the connection too, which tells the reason.
                Ok(0) => {
                    let _ = epoll::delete(epoll, &wake.fd);
                    self.wakes.remove(&number);
                    return self.wake_all();
                }
                Ok(count) if count == bytes.len() => {}
                _ => break,
            }
        }
        match (wake.seat, &self.board) {
            (Some(seat), _) => self.awake.set(seat as usize),
            (None, Some(board)) => {
                board.hear(|seat| self.awake.set(seat));
                // Those that the board has no place for.
                (PLACES..self.seats as usize).for_each(|seat| self.awake.set(seat));
            }
            (None, None) => self.wake_all(),
        }
    }
}

impl Common {
    /// Of no ports.
    pub(super) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(Error::system("cannot make an epoll instance"))?;
        Ok(Self {
            epoll,
            state: Mutex::default(),
            over: AtomicBool::new(false),
        })
    }

    /// The whole bundle goes, or not.
    pub(super) fn end(&self, is_over: bool) {
        // Relaxed: read by this thread, when its ports go, or by those that got the ports kept elsewhere from it.
        self.over.store(is_over, Ordering::Relaxed);
    }

    /// The connection, a new one if need be.
    pub(in crate::port) fn line(
        self: &Arc<Self>,
        path: &Path,
        limit: Duration,
    ) -> Result<Line, Error> {
        let mut state = self.state();
        if let Some(line) = &state.line
            && lock(line).is_alive()
        {
            return Ok(Line::Common(Arc::clone(line), Arc::clone(self)));
        }
        self.retire(&mut state);
        if let Some((at, why)) = &state.failed
            && at.elapsed() < PAUSE
        {
            return Err(why.clone());
        }
        match Connection::open(path, limit) {
            Ok(connection) => {
                watch::add(&self.epoll, connection.as_fd(), CONTROL)?;
                let line = Arc::new(Mutex::new(connection));
                state.line = Some(Arc::clone(&line));
                Ok(Line::Common(line, Arc::clone(self)))
            }
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Takes a doorbell into use, of one port or of all; the number is for [`remove_wake`](Self::remove_wake).
    pub(in crate::port) fn add_wake(&self, fd: OwnedFd, seat: Option<u32>) -> Result<u64, Error> {
        let mut state = self.state();
        state.next_wake = state.next_wake.max(CONTROL) + 1;
        let number = state.next_wake;
        watch::add(&self.epoll, fd.as_fd(), number)?;
        state.wakes.insert(number, Wake { fd, seat });
        Ok(number)
    }

    /// Learns from a board, in this memory, who rings the doorbell of all.
    pub(in crate::port) fn set_board(&self, memory: Region) {
        self.state().board = Some(Board::new(memory));
    }

    /// Closes the doorbell of a port that is gone.
    pub(in crate::port) fn remove_wake(&self, number: u64) {
        // It may have gone with an earlier connection.
        if let Some(wake) = self.state().wakes.remove(&number) {
            let _ = epoll::delete(&self.epoll, &wake.fd);
        }
    }

    /// Waits for the doorbells and the connection, and empties them.
    pub(in crate::port) fn look(&self, timeout: Option<Duration>) -> Result<Seen, Error> {
        let mut seen = Seen::default();
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 64];
        let found = match epoll::wait(&self.epoll, &mut events, timeout.map(timespec).as_ref()) {
            Ok(found) => found,
            Err(Errno::INTR) => {
                seen.interrupted = true;
                0
            }
            Err(errno) => return Err(Error::system("cannot wait for a port")(errno)),
        };
        if found == 0 {
            return Ok(seen);
        }
        let mut state = self.state();
        for event in &events[..found] {
            match event.data.u64() {
                CONTROL => seen.control = true,
                number => {
                    seen.wake = true;
                    state.hush(&self.epoll, number);
                }
            }
        }
        if seen.control
            && let Some(line) = &state.line
            && lock(line).gather().is_err()
        {
            self.retire(&mut state);
        }
        Ok(seen)
    }

    /// The next wait is to look at this one.
    pub(super) fn stir(&self, seat: usize) {
        self.state().awake.set(seat);
    }

    /// The next wait is to look at all of them.
    pub(super) fn stir_all(&self) {
        self.state().wake_all();
    }

    /// It is looked at.
    pub(super) fn rest(&self, seat: usize) {
        self.state().awake.clear(seat);
    }

    /// The first seat from this one on whose port is to be looked at.
    pub(super) fn awake_from(&self, seat: usize) -> Option<usize> {
        self.state().awake.next_from(seat)
    }

    /// Lets go of a connection that is over; ports that still have it will leave it.
    fn retire(&self, state: &mut BundleState) {
        if let Some(line) = state.line.take() {
            let _ = epoll::delete(&self.epoll, lock(&line).as_fd());
        }
        for wake in std::mem::take(&mut state.wakes).into_values() {
            let _ = epoll::delete(&self.epoll, &wake.fd);
        }
        state.board = None;
        state.wake_all();
    }

    pub(super) fn has_news(&self) -> bool {
        let state = self.state();
        let line = state.line.as_ref();
        line.is_none_or(|line| lock(line).has_unasked())
    }

    /// What is left is about ports that were closed.
    pub(super) fn forget_news(&self) {
        if let Some(line) = &self.state().line {
            lock(line).forget_unasked();
        }
    }

    /// Whether the whole bundle goes.
    pub(in crate::port) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// What it guards is whole after every statement.
    fn state(&self) -> MutexGuard<'_, BundleState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Common {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// How soon after a failure another port may try to connect.
const PAUSE: Duration = Duration::from_millis(10);
#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::pipe::{PipeFlags, pipe_with};

    #[test]
    fn one_look_hears_all_ports_that_rang() {
        let common = Common::new().unwrap();
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        common.add_wake(read, None).unwrap();
        for _ in 0..10_000 {
            rustix::io::write(&write, &[1]).unwrap();
        }
        let look = || common.look(Some(Duration::ZERO)).unwrap();
        assert!(look().wake);
        assert!(
            look().nothing(),
            "the next look goes through all ports again"
        );
    }

    #[test]
    fn a_vector_goes_with_its_port() {
        let common = Common::new().unwrap();
        let (read, _write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        common.add_wake(read, None).unwrap();
        for _ in 0..3 {
            // The host keeps the other end of a vector: it never ends.
            let vector = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            let number = common.add_wake(vector, Some(7)).unwrap();
            assert_eq!(common.state().wakes.len(), 2);
            common.remove_wake(number);
            assert_eq!(common.state().wakes.len(), 1);
        }
        assert!(common.look(Some(Duration::ZERO)).unwrap().nothing());
    }
}
