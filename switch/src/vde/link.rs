//! The data socket of one VDE client: a datagram each way is a frame.
//!
//! The socket is connected to the client's, so that nobody else can send to it. What the client
//! does not read stays in its socket, then in a bounded backlog here, then it is dropped: a client
//! that never reads costs itself only (R5).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use vnplug_os::closer::PeerFd;
use vnplug_os::datagrams::{self, Rest};

use crate::batch::Batch;
use crate::exits::Due;
use crate::link::{Given, Link};

/// One client's data socket.
#[derive(Debug)]
pub(crate) struct Datagrams {
    socket: PeerFd,
    /// The kernel refuses descriptors there.
    refuses: bool,
    /// Frames that the socket did not take yet.
    backlog: VecDeque<Box<[u8]>>,
    backlog_bytes: usize,
    is_gone: bool,
}

impl Datagrams {
    /// By this socket, which is connected to the client's and does not block.
    pub(crate) fn new(socket: PeerFd) -> Self {
        let refuses = vnplug_os::socket::pass_rights(&socket, false);
        Self {
            socket,
            refuses,
            backlog: VecDeque::new(),
            backlog_bytes: 0,
            is_gone: false,
        }
    }

    fn forget(&mut self, frames: usize) {
        let bytes: usize = self.backlog.drain(..frames).map(|frame| frame.len()).sum();
        self.backlog_bytes -= bytes;
    }
}

impl Link for Datagrams {
    fn receive(&mut self, batch: &mut Batch, most: usize) -> io::Result<Rest> {
        batch.receive(&self.socket, most, self.refuses)
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
            let len = head.len() + body.len();
            if self.is_gone {
                given.gone += 1;
            } else if self.backlog.len() >= MAX_FRAMES || self.backlog_bytes + len > MAX_BYTES {
                given.full += 1;
            } else {
                self.backlog
                    .push_back([head, body].concat().into_boxed_slice());
                self.backlog_bytes += len;
                given.enqueued += 1;
                given.bytes += len as u64;
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
            let waiting = self.backlog.iter().map(|frame| (&frame[..], &[][..]));
            match datagrams::send_many(&self.socket, waiting) {
                Ok(0) => break,
                Ok(count) => self.forget(count),
                Err(error) if is_of_one(&error) => {
                    self.forget(1);
                    dropped += 1;
                }
                Err(_) => self.is_gone = true,
            }
        }
        if self.is_gone {
            dropped += self.backlog.len();
            self.forget(self.backlog.len());
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

/// What waits for a client at most: frames, and their bytes.
const MAX_FRAMES: usize = 512;
const MAX_BYTES: usize = 1 << 20;
