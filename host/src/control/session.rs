//! One connection: bytes in, messages out, nothing that blocks.
//!
//! Every descriptor here is a stream socket (a client's, QEMU's chardev, or one end of a pair that
//! a User-mode Linux inherits), so each call can say `MSG_DONTWAIT` by itself and does not depend
//! on flags that another process shares (R8). What a peer does not read is queued up to
//! [`MAX_QUEUED`] bytes, then the connection is closed (R5); long before that its requests wait.
//!
//! Only an operator's connection takes a descriptor, one with `Adopt`, and that of who takes part in a
//! switch, one with `Direct`. From all others none is ever received: reading stops before it, the connection
//! is over. This thread drops none: another closes what came, and the socket with what is in it (R7;
//! `closer`).

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vnplug_ring::control::wire::{Framer, HEADER, Header, MAX_PAYLOAD, MAX_REQUEST, Malformed};
use vnplug_ring::control::{Backend, Message, Role, TTY_WINDOW};
use vnplug_ring::direct::SLOTS;

use super::limit;
use crate::hub::Peer;
use vnplug_os::closer::{Closer, PeerFd};
use vnplug_os::socket;
use vnplug_os::socket::Heard;
use vnplug_path::port::doorbell::SharedBell;

/// Descriptors of one owner that wait to be closed, while it may send others.
const MAX_OPEN_GIFTS: usize = 64;
/// No answer has more descriptors than a Members.
const MAX_FDS: usize = 2 * SLOTS;
/// No request is served while more bytes of answers wait for the peer to read them.
const CLOGGED: usize = 64 << 10;
/// Nor while more descriptors of answers wait: each is one of the daemon's, however short its message.
const CLOGGED_FDS: usize = 16;
/// What other peers say waits elsewhere while more than this waits here.
const ROOM: usize = 16 << 10;
/// The most that is held of what a peer asks that acknowledges late.
const MAX_HELD: usize = (256 << 10) - CLOGGED;
/// The most bytes that may wait, with what is said unasked, and one long answer.
pub(crate) const MAX_QUEUED: usize = CLOGGED + 2 * MAX_PAYLOAD;

/// Whether a descriptor may come with a message, and from whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gifts {
    No,
    OfOperator,
    /// Of who takes part in a switch.
    OfMember,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Session {
    fd: PeerFd,
    /// No descriptor can have been sent.
    refuses: bool,
    /// Whether a descriptor may come with a message.
    gifts: Gifts,
    /// Who is at the other end.
    pub(crate) viewer: Peer,
    /// Messages come and go for several applications.
    pub(crate) channel: bool,
    /// Hello was said.
    pub(crate) greeted: bool,
    /// (application, port).
    pub(crate) ports: Vec<(u32, u32)>,
    /// A request of this connection waits for a filter to be compiled; nothing more is read.
    pub(crate) busy: bool,
    /// Whole messages may be left over from its last turn; nothing more is read before they are
    /// served.
    pub(crate) unfinished: bool,
    /// Of its owner.
    pub(crate) bucket: limit::SharedBucket,
    pub(crate) since: Instant,
    /// A descriptor that came with the last bytes.
    pub(crate) gift: Option<PeerFd>,
    /// What wakes the ports of this connection that share it.
    pub(crate) bell: Option<SharedBell>,
    /// VMs attached over this connection, with the owner they had then.
    pub(crate) attached: Vec<(String, u64)>,
    pub(crate) framer: Framer,
    queued: VecDeque<Outgoing>,
    queued_bytes: usize,
    queued_fds: usize,
    /// Descriptors sent and not read.
    unread_fds: usize,
    /// The next descriptors are not sent before others are read.
    pub(crate) awaits_readers: bool,
    /// Bytes sent and not acknowledged, where the peer acknowledges.
    unacknowledged: Option<usize>,
    /// Requests of such a peer that came while too much waited for it.
    held: VecDeque<(Header, Vec<u8>)>,
    held_bytes: usize,
}

#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

/// Why a connection is over.
#[derive(Debug)]
pub(crate) enum Over {
    /// The peer closed it.
    Closed,
    /// The peer misbehaved.
    Misbehaved(&'static str),
    /// The system says so.
    Failed(io::Error),
}

impl Session {
    /// A connection to `viewer`; `channel` for a VM's control channel.
    pub(crate) fn new(
        fd: PeerFd,
        viewer: Peer,
        channel: bool,
        bucket: limit::SharedBucket,
        now: Instant,
    ) -> Self {
        // Nobody can send any, where the kernel can see to that (Linux 6.16).
        let refuses = socket::refuses_rights(&fd);
        socket::pass_rights(&fd, false);
        let framer = if channel {
            Framer::resyncing(MAX_REQUEST)
        } else {
            Framer::strict(MAX_REQUEST)
        };
        Self {
            fd,
            refuses,
            gifts: Gifts::No,
            viewer,
            channel,
            greeted: false,
            ports: Vec::new(),
            busy: false,
            unfinished: false,
            bucket,
            since: now,
            gift: None,
            bell: None,
            attached: Vec::new(),
            framer,
            queued: VecDeque::new(),
            queued_bytes: 0,
            queued_fds: 0,
            unread_fds: 0,
            awaits_readers: false,
            unacknowledged: None,
            held: VecDeque::new(),
            held_bytes: 0,
        }
    }

    /// From now on a descriptor may come with a message.
    pub(crate) fn take_gifts(&mut self, from: Gifts) {
        if self.gifts == Gifts::No {
            self.gifts = from;
        }
        self.refuses = false;
        socket::pass_rights(&self.fd, true);
    }

    /// From now on only [`TTY_WINDOW`] bytes may be on their way.
    pub(crate) fn expect_acknowledgements(&mut self) {
        self.unacknowledged = Some(0);
    }

    /// The peer read this many bytes.
    pub(crate) fn acknowledged(&mut self, bytes: usize) {
        if let Some(pending) = &mut self.unacknowledged {
            *pending = pending.saturating_sub(bytes);
        }
    }

    /// The socket.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Reads what is there, once, as much as the room takes.
    pub(crate) fn read(&mut self, room: &mut [u8]) -> Result<(), Over> {
        let heard = match self.refuses {
            true => socket::receive_bytes(&self.fd, room),
            false => socket::receive(&self.fd, room),
        };
        match heard {
            Ok(Heard::Bytes(0)) => Err(Over::Closed),
            Ok(Heard::Bytes(count)) => {
                self.framer.push(&room[..count]);
                Ok(())
            }
            Ok(Heard::Nothing) => Ok(()),
            // Who has many to be closed, which may take as long as it likes, sends none.
            Ok(Heard::Rights)
                if self.gifts == Gifts::OfMember && self.fd.closer().open() > MAX_OPEN_GIFTS =>
            {
                Err(Over::Misbehaved(
                    "descriptors that it sent before are not closed yet",
                ))
            }
            Ok(Heard::Rights) if self.gifts != Gifts::No => self.read_gift(room),
            Ok(Heard::Rights) => Err(Over::Misbehaved("a descriptor that no message takes")),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(Over::Closed),
            Err(error) => Err(Over::Failed(error)),
        }
    }

    /// Reads bytes with a descriptor.
    fn read_gift(&mut self, bytes: &mut [u8]) -> Result<(), Over> {
        // NB: as many as the kernel lets anybody send (SCM_MAX_FD): those without room it would drop here.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(
            &self.fd,
            &mut [IoSliceMut::new(bytes)],
            &mut ancillary,
            flags,
        );
        let message = match received {
            Ok(message) => message,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(Over::Failed(error.into())),
        };
        // Its sender may have been given it by somebody else: it is closed aside, too. What else is an
        // operator's does not wait for that; others have one thread for all that is theirs.
        let closer = match self.gifts {
            Gifts::OfOperator => Closer::default(),
            _ => self.fd.closer().clone(),
        };
        let mut fds: Vec<PeerFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .map(|fd| PeerFd::gift(fd, closer.clone()))
            .collect();
        if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > 1 {
            return Err(Over::Misbehaved("more descriptors than any message takes"));
        }
        if let Some(fd) = fds.pop() {
            if self.gift.is_some() {
                return Err(Over::Misbehaved("a descriptor that no message takes"));
            }
            self.gift = Some(fd);
        }
        if message.bytes == 0 {
            return Err(Over::Closed);
        }
        self.framer.push(&bytes[..message.bytes]);
        Ok(())
    }

    /// Queues a message and sends what the peer takes now.
    pub(crate) fn say(
        &mut self,
        message: &Message,
        id: u32,
        app: u32,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Over> {
        let bytes = message.encode(id, app);
        self.queued_bytes += bytes.len();
        self.queued_fds += fds.len();
        self.queued.push_back(Outgoing {
            bytes,
            sent: 0,
            fds,
        });
        self.flush()?;
        if self.queued_bytes > MAX_QUEUED {
            return Err(Over::Misbehaved("it does not read its answers"));
        }
        Ok(())
    }

    /// Sends what the peer takes now.
    pub(crate) fn flush(&mut self) -> Result<(), Over> {
        self.awaits_readers = false;
        while let Some(next) = self.queued.front_mut() {
            let room = self
                .unacknowledged
                .map_or(usize::MAX, |pending| TTY_WINDOW.saturating_sub(pending));
            if room == 0 {
                return Ok(());
            }
            let fds = next.fds.len();
            if fds > 0 {
                settle(&self.fd, &mut self.unread_fds, &self.bucket);
                if !self.bucket.borrow().may_send(fds) {
                    self.awaits_readers = true;
                    return Ok(());
                }
            }
            let end = next.bytes.len().min(next.sent.saturating_add(room));
            let slice = [IoSlice::new(&next.bytes[next.sent..end])];
            let borrowed: Vec<BorrowedFd<'_>> = next.fds.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !borrowed.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.fd, &slice, &mut ancillary, flags) {
                Ok(sent) => {
                    // Descriptors travel with the first byte. The peer has them now.
                    self.queued_fds -= fds;
                    self.unread_fds += fds;
                    self.bucket.borrow_mut().sent(fds);
                    for fd in next.fds.drain(..) {
                        self.fd.closer().let_go(fd);
                    }
                    next.sent += sent;
                    self.queued_bytes -= sent;
                    if let Some(pending) = &mut self.unacknowledged {
                        *pending += sent;
                    }
                    if next.sent == next.bytes.len() {
                        self.queued.pop_front();
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                // More are unread, of all that the daemon's user sent to anybody, than the kernel lets it have.
                Err(rustix::io::Errno::TOOMANYREFS) => {
                    self.awaits_readers = true;
                    return Ok(());
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                    return Err(Over::Closed);
                }
                Err(error) => return Err(Over::Failed(error.into())),
            }
        }
        Ok(())
    }

    /// Bytes wait for the peer to read.
    pub(crate) fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Whether descriptors that were sent are not read yet, as far as the system says.
    pub(crate) fn has_unread_fds(&mut self) -> bool {
        settle(&self.fd, &mut self.unread_fds, &self.bucket);
        self.unread_fds > 0
    }

    /// It is over. What it still holds is what its peer has not read.
    pub(crate) fn end(&mut self) {
        self.queued.clear();
        let both = rustix::net::Shutdown::Both;
        if let Err(error) = rustix::net::shutdown(&self.fd, both) {
            log::debug!(target: "control", "a connection that is over: {error}");
        }
    }

    /// Bytes wait for the socket, and not for an acknowledgement.
    pub(crate) fn wants_to_send(&self) -> bool {
        self.has_queued()
            && !self.awaits_readers
            && self
                .unacknowledged
                .is_none_or(|pending| pending < TTY_WINDOW)
    }

    /// So much waits that nothing more is read for now. A channel with acknowledgements is read on, for
    /// they come that way: see [`next_message`](Self::next_message).
    pub(crate) fn is_clogged(&self) -> bool {
        self.unacknowledged.is_none() && self.has_too_much()
    }

    /// Whether it takes more of what other peers say to it: answers of ours are not to wait for that.
    pub(crate) fn has_room(&self) -> bool {
        self.queued_bytes < ROOM && self.queued_fds == 0
    }

    fn has_too_much(&self) -> bool {
        self.queued_bytes > CLOGGED || self.queued_fds > CLOGGED_FDS
    }

    /// The next message to be served. While too much waits for a peer that acknowledges, only what
    /// lets it go on is served: acknowledgements, and the Hello of an agent that began again. The rest
    /// is held, up to [`MAX_HELD`] bytes.
    ///
    /// # Errors
    /// [`Over`]: the peer misbehaves.
    pub(crate) fn next_message(&mut self) -> Result<Option<(Header, Vec<u8>)>, Unserved> {
        if !self.has_too_much()
            && let Some(message) = self.held.pop_front()
        {
            self.held_bytes -= held_bytes(&message);
            return Ok(Some(message));
        }
        while let Some(message) = self.framer.next_message().map_err(Unserved::Malformed)? {
            if !self.has_too_much() || goes_first(&message.0) {
                return Ok(Some(message));
            }
            self.held_bytes += held_bytes(&message);
            self.held.push_back(message);
            if self.held_bytes > MAX_HELD {
                let what = "it asks on and acknowledges nothing";
                return Err(Unserved::Over(Over::Misbehaved(what)));
            }
        }
        Ok(None)
    }

    /// An agent that acknowledges began again: what was asked before, and what is not sent of the
    /// answers, is nobody's.
    pub(crate) fn begin_anew(&mut self) {
        if self.unacknowledged.is_none() {
            return;
        }
        self.held.clear();
        self.held_bytes = 0;
        // Of a message that is sent in part the rest follows: the next one begins after it.
        let begun = self.queued.pop_front().filter(|first| first.sent > 0);
        self.queued.clear();
        self.queued_bytes = begun.as_ref().map_or(0, |it| it.bytes.len() - it.sent);
        // They went with its first byte.
        self.queued_fds = 0;
        self.queued.extend(begun);
        self.unacknowledged = Some(0);
    }
}

/// Why there is no next message.
#[derive(Debug)]
pub(crate) enum Unserved {
    /// It is none.
    Malformed(Malformed),
    /// The connection is to end.
    Over(Over),
}

/// Counts what was sent as read, if all of it is.
fn settle(fd: &PeerFd, unread: &mut usize, bucket: &limit::SharedBucket) {
    if *unread > 0 && socket::is_read(fd) {
        bucket.borrow_mut().were_read(std::mem::take(unread));
    }
}

/// What one held message counts: with what keeping it costs.
fn held_bytes(message: &(Header, Vec<u8>)) -> usize {
    HEADER + size_of::<(Header, Vec<u8>)>() + message.1.len()
}

fn goes_first(header: &Header) -> bool {
    let hello = Message::Hello {
        min_version: 0,
        max_version: 0,
        role: Role::Agent,
        name: String::new(),
        live: Vec::new(),
        vectors: 0,
        locked_down: false,
    };
    // What is passed on to somebody else has no answer here.
    Backend::is_passed_kind(header.kind)
        || [Message::Ack { bytes: 0 }, hello]
            .map(|it| it.kind())
            .contains(&header.kind)
}

impl std::fmt::Display for Over {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed => f.write_str("closed by the peer"),
            Self::Misbehaved(what) => f.write_str(what),
            Self::Failed(error) => write!(f, "{error}"),
        }
    }
}
