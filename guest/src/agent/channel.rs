//! The byte channel to the host.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, read, write};
use rustix::termios::{OptionalActions, isatty, tcgetattr, tcsetattr};
use vnplug_ring::control::wire::{Framer, MAX_PAYLOAD};
use vnplug_ring::control::{Header, Message};

use crate::connection::timespec;
use crate::error::Error;

/// The channel, its half-read messages and what is still to be written.
#[derive(Debug)]
pub(super) struct Channel {
    fd: OwnedFd,
    framer: Framer,
    out: Vec<u8>,
    /// Bytes of `out` that were written.
    written: usize,
    told_skipped: u64,
    is_tty: bool,
}

/// What reading found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// All there is was read.
    All,
    /// The other end is not connected.
    HungUp,
}

impl Channel {
    /// Takes an open channel; a tty is made an 8-bit clean byte channel.
    pub(super) fn new(fd: OwnedFd) -> Result<Self, Error> {
        let is_tty = isatty(&fd);
        if is_tty {
            let mut modes = tcgetattr(&fd).map_err(Error::system("cannot inspect the tty"))?;
            modes.make_raw();
            tcsetattr(&fd, OptionalActions::Now, &modes)
                .map_err(Error::system("cannot set up the tty"))?;
        }
        let flags = fcntl_getfl(&fd).map_err(Error::system("cannot inspect the channel"))?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)
            .map_err(Error::system("cannot set up the channel"))?;
        Ok(Self {
            fd,
            framer: Framer::resyncing(MAX_PAYLOAD),
            out: Vec::new(),
            written: 0,
            told_skipped: 0,
            is_tty,
        })
    }

    /// Reads everything there is into `messages`; what cannot be decoded is skipped.
    pub(super) fn hear(&mut self, messages: &mut Vec<(Header, Message)>) -> Heard {
        let mut bytes = [0; 16 << 10];
        let mut arrived = 0;
        let heard = loop {
            match read(&self.fd, &mut bytes) {
                Ok(0) => break Heard::HungUp,
                Ok(count) => {
                    arrived += count;
                    self.framer.push(&bytes[..count]);
                }
                Err(Errno::AGAIN) => break Heard::All,
                Err(Errno::INTR) => continue,
                Err(errno) => {
                    log::debug!("the channel: {errno}");
                    break Heard::HungUp;
                }
            }
            // A resyncing framer returns no error.
            while let Ok(Some(frame)) = self.framer.next_message() {
                match Message::from_frame(&frame) {
                    Ok(message) => messages.push((frame.0, message)),
                    Err(malformed) => log::warn!("skipped a message from the host: {malformed}"),
                }
            }
        };
        if self.is_tty && arrived > 0 {
            let bytes = arrived as u32;
            self.say(&Message::Ack { bytes }, 0, 0);
        }
        let skipped = self.framer.skipped();
        if skipped > self.told_skipped {
            log::warn!("skipped {} bytes of garbage", skipped - self.told_skipped);
            self.told_skipped = skipped;
        }
        heard
    }

    /// Queues a message and writes what can be written now.
    pub(super) fn say(&mut self, message: &Message, id: u32, app: u32) {
        self.out.extend_from_slice(&message.encode(id, app));
        self.flush();
    }

    /// Writes what can be written now. A failed write shows when reading.
    pub(super) fn flush(&mut self) {
        while self.backlog() > 0 {
            match write(&self.fd, &self.out[self.written..]) {
                Ok(count) => self.written += count,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        // What is left moves only when as much was written: no byte is moved twice on average.
        if self.written >= self.backlog() {
            self.out.drain(..self.written);
            self.written = 0;
        }
    }

    /// Bytes still to be written.
    pub(super) fn backlog(&self) -> usize {
        self.out.len() - self.written
    }

    /// Forgets half-read and unwritten messages. The rest of a message of which the host got the
    /// beginning is missing then; its framer finds the next one.
    pub(super) fn reset(&mut self) {
        self.framer.reset();
        self.out.clear();
        self.written = 0;
    }

    /// True if the other end is connected.
    pub(super) fn is_connected(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        match poll(&mut fds, Some(&timespec(Duration::ZERO))) {
            Ok(_) => !fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
            Err(_) => false,
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
