//! How frames come from the far end of a port, and go there: one kind a file, the same trait.
//!
//! A link is used by the thread of the switch, and no call of it waits for the far end. An entrance ([`Door`](crate::door::Door))
//! makes links for those who join, and is told of links that can serve no longer ([`Losses`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use vnplug_os::datagrams::Rest;
use vnplug_os::event;
use vnplug_ring::offload::Offload;

use crate::batch::Batch;
use crate::exits::Due;
use crate::forward::Number;
use crate::vhost::Guest;

/// The way between a port and its far end. Its descriptor is readable when frames may be there (one
/// with several descriptors has an epoll of its own), and writable when frames that wait may go on.
pub(crate) trait Link: AsFd + Send {
    /// Takes at most `most` frames that the far end sent, as far as the batch has room.
    ///
    /// # Errors
    /// The port is to be closed, and why.
    fn receive(&mut self, batch: &mut Batch, most: usize) -> io::Result<Rest>;

    /// The frames of the batch that it was [given](Self::receive) are done with. Called in the same turn.
    fn release(&mut self) {}

    /// Gives the far end frames, in order.
    fn send(&mut self, due: Due<'_>) -> Given;

    /// Whether frames wait for the far end to read.
    fn is_waiting(&self) -> bool {
        false
    }

    /// The far end may have read: gives it what waits. How many frames are dropped after all, which were
    /// counted as enqueued.
    fn go_on(&mut self) -> u64 {
        0
    }

    /// How many frames that were counted as enqueued, and waited, are dropped since this was asked last.
    fn lost(&mut self) -> u64 {
        0
    }

    /// Whether ACKs of the far end for what was merged are expanded from now on.
    fn expand_acks(&mut self, _is: bool) {}

    /// How many ACKs were added so to what the far end sent, since this was asked last.
    fn added_acks(&mut self) -> u64 {
        0
    }

    /// The guest behind it, if [lanes](crate::lanes) may forward for it.
    fn guest(&self) -> Option<&Arc<Guest>> {
        None
    }

    /// Whether it copies the rests of frames from where they are ([`Out::tail`](crate::exits::Out)).
    fn takes_tails(&self) -> bool {
        false
    }

    /// Whether segments may be merged for it: only where what is merged cannot be too long.
    fn merges(&self) -> bool {
        false
    }

    /// Whether the far end does what is left to do with such a frame.
    fn takes(&self, _offload: &Offload) -> bool {
        false
    }
}

/// What became of frames that were given to a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Given {
    /// At the far end, or on the way there.
    pub(crate) enqueued: u64,
    /// Dropped: the far end does not read.
    pub(crate) full: u64,
    /// Dropped: the far end is gone.
    pub(crate) gone: u64,
    /// Dropped: the far end cannot carry frames of this length.
    pub(crate) long: u64,
    /// Bytes of those that were not dropped.
    pub(crate) bytes: u64,
}

/// The far end ended the connection, as it may.
pub(crate) fn hung_up() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the far end hung up")
}

/// Tells an entrance of ports that the thread that forwards has closed.
#[derive(Debug, Clone)]
pub(crate) struct Losses {
    sender: Sender<Loss>,
    waker: Arc<OwnedFd>,
    client: u64,
}

/// A port that the thread that forwards has closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loss {
    pub(crate) port: Number,
    /// Whose it was, as its entrance counts clients: another one may have the number by now.
    pub(crate) client: u64,
}

impl Losses {
    /// Wakes the entrance's thread by this eventfd, which looks into the channel then.
    pub(crate) fn new(waker: Arc<OwnedFd>) -> (Self, Receiver<Loss>) {
        let (sender, losses) = channel();
        let client = 0;
        let told = Self {
            sender,
            waker,
            client,
        };
        (told, losses)
    }

    /// Tells of a port of this client.
    pub(crate) fn of(&self, client: u64) -> Self {
        Self {
            client,
            ..self.clone()
        }
    }

    #[cold]
    pub(crate) fn tell(&self, port: Number) {
        // If its thread is gone, so is the entrance.
        let client = self.client;
        let _ = self.sender.send(Loss { port, client });
        event::ring(&self.waker);
    }
}
