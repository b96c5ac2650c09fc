//! A socket that keeps the bounds of frames: a datagram or a packet each way is a frame.
//!
//! The socket is connected, so that nobody else can send to it. What the far end does not read stays
//! in its socket, then in a bounded backlog here, then it is dropped: a client that never reads costs
//! itself only (R5).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use vnplug_os::closer::PeerFd;
use vnplug_os::datagrams::{self, Rest};

use crate::backlog::Backlog;
use crate::batch::Batch;
use crate::exits::Due;
use crate::link::{Given, Link, hung_up};

/// One client's data socket.
#[derive(Debug)]
pub(crate) struct Datagrams {
    socket: PeerFd,
    /// The kernel refuses descriptors there.
    refuses: bool,
    /// It has an end, which reads as empty packets; no frame is empty.
    ends: bool,
    backlog: Backlog,
    is_gone: bool,
}

impl Datagrams {
    /// By this datagram socket, which is connected to the client's and does not block.
    pub(crate) fn new(socket: PeerFd) -> Self {
        Self::with(socket, false)
    }

    /// By this connection of packets (`SOCK_SEQPACKET`), which does not block.
    pub(crate) fn of_connection(socket: PeerFd) -> Self {
        Self::with(socket, true)
    }

    fn with(socket: PeerFd, ends: bool) -> Self {
        let refuses = vnplug_os::socket::pass_rights(&socket, false);
        Self {
            socket,
            refuses,
            ends,
            backlog: Backlog::default(),
            is_gone: false,
        }
    }
}

impl Link for Datagrams {
    fn receive(&mut self, batch: &mut Batch, most: usize) -> io::Result<Rest> {
        let first = batch.len();
        let rest = batch.receive(&self.socket, most, self.refuses);
        if self.ends
            && let Some(end) = (first..batch.len()).find(|at| batch.get(*at).bytes.is_empty())
        {
            batch.truncate(end);
            return Err(hung_up());
        }
        rest
    }

    fn send(&mut self, due: Due<'_>) -> Given {
        let mut given = Given::default();
        let mut rest = due.iter().map(|out| (out.head, out.body));
        while !self.is_waiting() && !self.is_gone {
            match datagrams::send_many(&self.socket, rest.clone()) {
                Ok(0) => break,
                Ok(sent) => {
                    given.enqueued += sent as u64;
                    let sent = rest.by_ref().take(sent);
                    given.bytes += sent
                        .map(|(head, body)| (head.len() + body.len()) as u64)
                        .sum::<u64>();
                }
                Err(error) if is_of_one(&error) => {
                    // Of the first that was not sent.
                    rest.next();
                    given.full += 1;
                }
                Err(_) => self.is_gone = true,
            }
        }
        for (head, body) in rest {
            if self.is_gone {
                given.gone += 1;
            } else if self.backlog.push(&[head, body]) {
                given.enqueued += 1;
                given.bytes += (head.len() + body.len()) as u64;
            } else {
                given.full += 1;
            }
        }
        given
    }

    fn is_waiting(&self) -> bool {
        !self.backlog.is_empty()
    }

    fn go_on(&mut self) -> u64 {
        let mut dropped = 0;
        while self.is_waiting() && !self.is_gone {
            let waiting = self.backlog.iter().map(|frame| (frame, &[][..]));
            match datagrams::send_many(&self.socket, waiting) {
                Ok(0) => break,
                Ok(count) => self.backlog.forget(count),
                Err(error) if is_of_one(&error) => {
                    self.backlog.forget(1);
                    dropped += 1;
                }
                Err(_) => self.is_gone = true,
            }
        }
        if self.is_gone {
            dropped += self.backlog.len();
            self.backlog.forget(self.backlog.len());
        }
        dropped as u64
    }
}

/// Whether an error says something of one frame only: it is too long, or memory is short now.
fn is_of_one(error: &io::Error) -> bool {
    let what = Errno::from_io_error(error);
    matches!(what, Some(Errno::MSGSIZE | Errno::NOBUFS | Errno::NOMEM))
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
