//! One application's connection to the agent.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, sendmsg,
};
use vnplug_ring::control::backend::{WINDOW, cost};
use vnplug_ring::control::wire::{Framer, MAX_REQUEST};
use vnplug_ring::control::{Message, RingPlace};

use super::closer::{Closer, PeerFd};
use crate::connection::timespec;

/// An application: its socket, what is still to be sent, what it may still map.
#[derive(Debug)]
pub(super) struct App {
    socket: PeerFd,
    framer: Framer,
    out: VecDeque<Outgoing>,
    backlog: usize,
    pub(super) uid: u32,
    pub(super) greeted: bool,
    /// Requests relayed and not yet answered.
    pub(super) pending: usize,
    /// It asked for a port, so the host is told when it goes.
    pub(super) asked_for_port: bool,
    /// Nothing of it is read for now: what it says to back-ends waits for the host.
    pub(super) held: bool,
    /// Channels to back-ends that it has.
    pub(super) channels: usize,
    /// Places of its closed ports; it may map them as long as it is connected.
    pub(super) mapped: Vec<RingPlace>,
}

/// The connection is to be closed; the reason is for the log.
#[derive(Debug)]
pub(super) struct Hangup(pub(super) String);

#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
    /// And nothing that was said unasked.
    is_answer: bool,
}

impl App {
    pub(super) fn new(socket: PeerFd, uid: u32) -> Self {
        Self {
            socket,
            framer: Framer::strict(MAX_REQUEST),
            out: VecDeque::new(),
            backlog: 0,
            uid,
            greeted: false,
            pending: 0,
            asked_for_port: false,
            held: false,
            channels: 0,
            mapped: Vec::new(),
        }
    }

    /// Reads once: an application cannot keep the agent from the others.
    pub(super) fn read(&mut self) -> Result<(), Hangup> {
        let mut bytes = [0; 16 << 10];
        match receive(&self.socket, &mut bytes) {
            Ok(Some(0)) => return Err(Hangup("closed".into())),
            Ok(Some(count)) => self.framer.push(&bytes[..count]),
            Ok(None) => return Err(Hangup("it sends descriptors".into())),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(Hangup(errno.to_string())),
        }
        Ok(())
    }

    /// Who closes what it had its hands on.
    pub(super) fn closer(&self) -> &Closer {
        self.socket.closer()
    }

    /// The next request that was read, with its id; `None` as well while the application is
    /// [busy](Self::is_busy).
    pub(super) fn next_request(&mut self) -> Result<Option<(u32, Message)>, Hangup> {
        if self.is_busy() {
            return Ok(None);
        }
        let malformed = |malformed: vnplug_ring::control::Malformed| Hangup(malformed.to_string());
        let Some(frame) = self.framer.next_message().map_err(malformed)? else {
            return Ok(None);
        };
        let message = Message::from_frame(&frame).map_err(malformed)?;
        let is_passed = matches!(&message, Message::Backend(said) if said.is_passed());
        if (frame.0.id == 0) != is_passed || frame.0.app != 0 {
            return Err(Hangup("a request without a number".into()));
        }
        Ok(Some((frame.0.id, message)))
    }

    /// So many requests are under way that no more are read before one is answered, and the answer
    /// taken: who reads slowly is served slowly, and not cut off.
    pub(super) fn is_busy(&self) -> bool {
        let answers = self.out.iter().filter(|out| out.is_answer).count();
        self.pending + answers >= MAX_PENDING
    }

    /// Sends a message, with descriptors if any, or queues it.
    pub(super) fn send(
        &mut self,
        message: &Message,
        id: u32,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Hangup> {
        let bytes = message.encode(id, 0);
        self.backlog += bytes.len();
        self.out.push_back(Outgoing {
            bytes,
            sent: 0,
            fds,
            is_answer: !matches!(message, Message::Backend(_)),
        });
        self.flush()?;
        // One answer may be longer than the limit, as long as the application reads it. What its channels have
        // on their way is bounded by their windows.
        let (bytes, messages) = (WINDOW as usize, WINDOW.div_ceil(cost(0)) as usize);
        let most = MAX_BACKLOG + self.channels * 2 * bytes;
        let most_messages = MAX_QUEUED + self.channels * 2 * messages;
        if self.backlog > most && self.out.len() > 1 || self.out.len() > most_messages {
            return Err(Hangup("it does not read its answers".into()));
        }
        Ok(())
    }

    /// Sends what can be sent now.
    pub(super) fn flush(&mut self) -> Result<(), Hangup> {
        while let Some(first) = self.out.front_mut() {
            let fds: Vec<_> = first.fds.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let parts = [IoSlice::new(&first.bytes[first.sent..])];
            match sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    first.sent += count;
                    // The application has them now.
                    for fd in first.fds.drain(..) {
                        self.socket.closer().close(fd);
                    }
                    self.backlog -= count;
                    if first.sent == first.bytes.len() {
                        self.out.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Hangup(errno.to_string())),
            }
        }
        Ok(())
    }

    /// True if something is queued.
    pub(super) fn has_backlog(&self) -> bool {
        !self.out.is_empty()
    }
}

impl AsFd for App {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Reads bytes without blocking; `None`: descriptors come next (or an out-of-band byte, which may bring
/// some). To read on would drop them, which may block as long as who sent them likes. So this looks
/// first, and then takes what it saw; `MSG_CTRUNC` and `POLLPRI` tell.
pub(super) fn receive(socket: impl AsFd, bytes: &mut [u8]) -> Result<Option<usize>, Errno> {
    let mut none = RecvAncillaryBuffer::default();
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let seen = recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut none, flags)?;
    let mut urgent = [PollFd::new(&socket, PollFlags::PRI)];
    poll(&mut urgent, Some(&timespec(Duration::ZERO)))?;
    let urgent = urgent[0].revents().contains(PollFlags::PRI);
    if urgent || seen.flags.contains(ReturnFlags::CTRUNC) {
        return Ok(None);
    }
    match seen.bytes {
        0 => Ok(Some(0)),
        seen => {
            recv(&socket, &mut bytes[..seen], RecvFlags::DONTWAIT).map(|(_, count)| Some(count))
        }
    }
}

/// Requests of one application that may be under way, those included whose answers it has not
/// taken.
const MAX_PENDING: usize = 16;
/// Bytes of answers that may wait for an application.
const MAX_BACKLOG: usize = 64 << 10;
/// Messages that may wait for an application: answers, and what is said unasked.
const MAX_QUEUED: usize = 64;
