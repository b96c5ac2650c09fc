//! Sending: frames into the port's transmit ring, and a kick when the host sleeps.
//!
//! The host takes frames in the order they were written and counts what becomes of each
//! ([`Port::stats`]: `sent`, `send_dropped_…`). Nothing comes back to the sender but room: a full
//! ring means that the wire, or the host's thread, is slower than the sender.

mod patience;

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use vnplug_ring::control::Segments;
use vnplug_ring::layout::{Life, Meta, Place, RECORD_HEADER, flags};
use vnplug_ring::offload::{HEADER, Offload, PREFIX, record_prefix};
use vnplug_ring::{Bell, Consumer, PeerLied, Producer};

pub use self::patience::Patience;
use self::patience::SHORTEST;
use super::phase::{Phase, Standing};
use super::posts::Postable;
use super::ways::{Handed, Ways};
use super::{Batch, Port};
use crate::error::Error;

/// The sending end of a port; see [`Port::outbox`].
#[derive(Debug)]
pub struct Outbox {
    ring: Producer,
    kick: OwnedFd,
    pushed: u64,
    posted: u64,
    /// Frames may be left to be cut or summed.
    merged: bool,
    /// Rings whose packets may be sent from where they lie.
    postable: Postable,
    /// Something was posted since the last flush.
    is_unflushed: bool,
    /// How long the last wait for room took.
    waited: Duration,
    /// A frame that is put together.
    joined: Vec<u8>,
    /// To the other members of a trust group.
    pub(super) ways: Option<Box<Ways>>,
}

impl Outbox {
    pub(super) fn new(ring: Producer, kick: OwnedFd, segments: Segments) -> Self {
        Self {
            merged: segments == Segments::Merged && ring.knows_offload(),
            postable: Postable::new(&ring),
            ring,
            kick,
            pushed: 0,
            posted: 0,
            is_unflushed: false,
            waited: Duration::ZERO,
            joined: Vec::new(),
            ways: None,
        }
    }

    /// Whether a frame of `needed` bytes fits, and `free` bytes are free.
    fn has_room(&mut self, needed: u32, free: u64) -> Result<bool, Error> {
        let fits = self.ring.has_room(needed).map_err(nonsense)?;
        Ok(fits && self.ring.geometry().capacity - self.ring.used() >= free)
    }

    /// What is received by these rings may be sent from where it lies; they have the numbers from `first` on.
    ///
    /// # Errors
    /// [`Error::Protocol`]: the daemon or agent does not know that.
    pub(super) fn post_from(&mut self, first: usize, rings: &mut [Consumer]) -> Result<(), Error> {
        if !self.ring.takes_posted() {
            return Err(Error::Protocol(TOO_OLD.into()));
        }
        self.postable.add(first, rings, &self.ring);
        Ok(())
    }

    pub(super) fn postable(&self) -> &Postable {
        &self.postable
    }

    /// Writes a frame, Ethernet header included, FCS excluded; it leaves with the next
    /// [`flush`](Self::flush). False: the ring has no room now.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the frame is longer than [`max_frame`](Self::max_frame).
    #[inline]
    pub fn push(&mut self, frame: &[u8]) -> Result<bool, Error> {
        self.push_offloaded(frame, &Offload::default())
    }

    /// As [`push`](Self::push), of a frame that is still to be cut or summed as `offload` says. The host
    /// drops one that does not fit it (`send_dropped_offload`).
    ///
    /// # Errors
    /// As [`push`](Self::push); [`Error::Invalid`] if the port was opened without
    /// [`Segments::Merged`], or the daemon is older than that.
    #[inline]
    pub fn push_offloaded(&mut self, frame: &[u8], offload: &Offload) -> Result<bool, Error> {
        let flags = match offload.is_due() {
            true if self.merged => flags::OFFLOAD,
            true => return Err(Error::Invalid(NOT_MERGED)),
            false => 0,
        };
        let before = record_prefix(flags);
        if frame.len() > self.max_frame() {
            return Err(TOO_LONG);
        }
        let len = frame.len() as u32;
        let meta = Meta {
            wire_len: len,
            flags,
            offload: *offload,
            ..Meta::default()
        };
        if let Some(ways) = &mut self.ways {
            match ways.hand(&meta, frame) {
                Handed::Over => {
                    self.pushed += 1;
                    return Ok(true);
                }
                Handed::Full => return Ok(false),
                Handed::ToTheSwitch => {}
            }
        }
        if !self.ring.has_room(before as u32 + len).map_err(nonsense)? {
            return Ok(false);
        }
        let pushed = self.ring.push(&meta, frame).map_err(nonsense)?;
        self.pushed += u64::from(pushed);
        Ok(pushed)
    }

    /// Sends on what was received: as [`push`](Self::push), of a frame that is `head`, the headers that were rewritten, and
    /// then `rest`. If the port was opened with [`PortOptions::posts`](crate::PortOptions::posts) and `rest` is a packet that
    /// it has lent, or a part of one, the host is told where it lies, and takes it from there: it is not copied here, and its
    /// room goes back to the host when it was sent, even if the port releases it before. Any other `rest` is copied.
    ///
    /// Frames that lie where they were received leave with the next [`flush`](Self::flush), or when the port takes more
    /// packets. If the port is reopened or revoked, what the host did not take is lost as any frame in the transmit ring.
    ///
    /// # Errors
    /// As [`push`](Self::push), for both together.
    #[inline]
    pub fn forward(&mut self, head: &[u8], rest: &[u8]) -> Result<bool, Error> {
        self.forward_offloaded(head, rest, &Offload::default())
    }

    /// As [`forward`](Self::forward), of a frame that is still to be cut or summed as `offload` says, as
    /// [`push_offloaded`](Self::push_offloaded): a super-frame that was received, with its `meta.offload`.
    ///
    /// # Errors
    /// As [`push_offloaded`](Self::push_offloaded), for both together.
    #[inline]
    pub fn forward_offloaded(
        &mut self,
        head: &[u8],
        rest: &[u8],
        offload: &Offload,
    ) -> Result<bool, Error> {
        // A record has room for a short head only between what is left to do and what is posted.
        let is_long = offload.is_due() && head.len() > LONGEST_HEAD;
        match self.postable.find(rest).filter(|_| !is_long) {
            Some((place, ring)) => self.post(head, (place, ring), offload),
            None => self.join(head, rest, offload),
        }
    }

    /// Writes a posted frame.
    fn post(
        &mut self,
        head: &[u8],
        (place, ring): (Place, usize),
        offload: &Offload,
    ) -> Result<bool, Error> {
        if head.len() + place.len as usize > self.max_frame() {
            return Err(TOO_LONG);
        }
        let mut prefixed = [0; PREFIX + LONGEST_HEAD];
        let (flags, own) = match offload.is_due() {
            false => (0, head),
            true if !self.merged => return Err(Error::Invalid(NOT_MERGED)),
            true => {
                prefixed[PREFIX..PREFIX + head.len()].copy_from_slice(head);
                prefixed[PREFIX - HEADER..PREFIX].copy_from_slice(&offload.to_header(head));
                (flags::OFFLOAD, &prefixed[..PREFIX + head.len()])
            }
        };
        let has_room = self.ring.has_room(own.len() as u32).map_err(nonsense)?;
        if !has_room || !self.ring.push_posted(flags, own, place).map_err(nonsense)? {
            return Ok(false);
        }
        self.postable.note(ring, self.ring.position());
        self.is_unflushed = true;
        self.pushed += 1;
        self.posted += 1;
        Ok(true)
    }

    /// Writes a frame that is put together here: in the ring, unless somebody looks at it first.
    fn join(&mut self, head: &[u8], rest: &[u8], offload: &Offload) -> Result<bool, Error> {
        if head.is_empty() {
            return self.push_offloaded(rest, offload);
        }
        let len = head.len() + rest.len();
        if len > self.max_frame() {
            return Err(TOO_LONG);
        }
        if self.ways.is_none() && !offload.is_due() {
            let meta = Meta {
                wire_len: len as u32,
                ..Meta::default()
            };
            let has_room = self.ring.has_room(len as u32).map_err(nonsense)?;
            let pushed = has_room && self.ring.push_parts(&meta, head, rest).map_err(nonsense)?;
            self.pushed += u64::from(pushed);
            return Ok(pushed);
        }
        let mut joined = std::mem::take(&mut self.joined);
        joined.clear();
        joined.extend_from_slice(head);
        joined.extend_from_slice(rest);
        let pushed = self.push_offloaded(&joined, offload);
        self.joined = joined;
        pushed
    }

    /// What was posted leaves, for the loans that it names are over.
    #[inline]
    pub(super) fn flush_posted(&mut self) {
        if self.is_unflushed {
            self.flush();
        }
    }

    /// Hands what was written to the host: once per batch. A system call only if the host sleeps.
    #[inline]
    pub fn flush(&mut self) {
        if let Some(ways) = &mut self.ways {
            ways.flush();
        }
        self.is_unflushed = false;
        self.ring.publish();
        if self.ring.bell(0) == Bell::Ring {
            self.kick();
        }
    }

    /// The longest frame in bytes, also of those that are to be cut or summed.
    pub fn max_frame(&self) -> usize {
        let before = if self.merged { PREFIX } else { 0 };
        self.ring.geometry().snaplen as usize - before
    }

    /// Frames written since the port was opened (or reopened).
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Those of them that lie where they were received.
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// Begins a wait of at most `timeout`, behind a frame that found no room.
    pub fn patience(&self, timeout: Duration) -> Patience {
        match self.is_member_full() {
            true => Patience::at_member(timeout),
            false => Patience::after(self.waited, timeout),
        }
    }

    /// Whether to push a frame of `len` bytes now. Once it has slept a wait wants a quarter of the ring, for 40 ms: who wakes
    /// for one frame at a time takes the processor from the thread that makes room.
    ///
    /// # Errors
    /// [`Error::Protocol`]: what the host says of its progress cannot be.
    pub fn has_room_for(&mut self, len: usize, patience: &mut Patience) -> Result<bool, Error> {
        let waited = patience.look();
        // The next push says it.
        if self.is_member_full() {
            return Ok(true);
        }
        let needed = u32::try_from(len).unwrap_or(u32::MAX - RECORD_HEADER as u32 - 8);
        let wanted = patience.wanted(self.ring.geometry().capacity, waited);
        let has_room = self.has_room(needed, wanted)?;
        if has_room && patience.has_slept() {
            self.waited = waited;
        }
        Ok(has_room)
    }

    /// Whether the last frame found no room at another member of the trust group.
    fn is_member_full(&self) -> bool {
        self.ways.as_ref().is_some_and(|ways| ways.is_full())
    }

    /// Bytes of the ring that the host has not taken yet.
    pub fn waiting_bytes(&self) -> u64 {
        self.ring.used()
    }

    pub(super) fn life(&self) -> Life {
        self.ring.life()
    }

    /// Wakes the host's thread (or the agent, which tells it). A full buffer has woken it already,
    /// and a closed one has nobody behind it, which the control connection tells too.
    #[cold]
    fn kick(&self) {
        // NB: a socket and not a pipe, so that a program that does not ignore SIGPIPE survives the
        // daemon's death.
        match send(&self.kick, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) | Err(Errno::AGAIN | Errno::PIPE) => {}
            Err(errno) => log::debug!("cannot kick the host: {errno}"),
        }
    }
}

const TOO_LONG: Error = Error::Invalid("a frame longer than the port can send");
const TOO_OLD: &str = "the daemon or agent is too old to send what was received from where it lies: update it, or open the \
                       port without `posts`";
/// Most bytes before what is posted of a frame that is still to be cut; behind more it is copied.
const LONGEST_HEAD: usize = 256;
const NOT_MERGED: &str =
    "a frame to be cut or summed: open the port with segments merged, of a daemon that knows it";

impl Port {
    /// Sends a frame. False: the ring is full, try again later
    /// ([`wait_for_room`](Self::wait_for_room)).
    ///
    /// # Errors
    /// [`Error::Invalid`]: the port was opened without [`PortOptions::transmit`], or the frame is too
    /// long. [`Error::Disconnected`] while reconnecting, for which what was received before has to be
    /// read. The port is over, with the reason.
    ///
    /// [`PortOptions::transmit`]: crate::PortOptions::transmit
    #[inline]
    pub fn send(&mut self, frame: &[u8]) -> Result<bool, Error> {
        let outbox = self.outbox()?;
        let pushed = outbox.push(frame)?;
        outbox.flush();
        Ok(pushed)
    }

    /// The sending end, for several frames before one flush.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[inline]
    pub fn outbox(&mut self) -> Result<&mut Outbox, Error> {
        if self.has_news_of_members() {
            self.look_after_members();
        }
        let open = matches!(self.phase, Phase::Live)
            && matches!(&self.outbox, Some(outbox) if outbox.life() == Life::Open);
        if !open {
            self.reopen_outbox()?;
        }
        self.outbox.as_mut().ok_or(Error::Disconnected)
    }

    /// As [`outbox`](Self::outbox), but leaves the rings as they are, and so every packet that is lent:
    /// a port that is away comes back only with [`next`](Self::next) or [`wait`](Self::wait).
    pub(crate) fn present_outbox(&mut self) -> Result<&mut Outbox, Error> {
        if self.options.request.transmit_bytes == 0 {
            return Err(NO_RING);
        }
        let life = self.outbox.as_ref().map(Outbox::life);
        match (&mut self.outbox, life, &self.phase) {
            (Some(outbox), Some(Life::Open), Phase::Live) => Ok(outbox),
            (_, Some(Life::Quarantined), _) => Err(Error::Quarantined),
            (_, Some(Life::Revoked), _) => Err(Error::Gone(SENDING.to_owned())),
            _ => Err(Error::Disconnected),
        }
    }

    /// As [`batch`](Self::batch), with the sending end beside it: packets can be sent back, or on,
    /// from where they lie.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn batch_and_outbox(&mut self, max: usize) -> Result<(Batch<'_>, &mut Outbox), Error> {
        self.outbox()?;
        let (batch, outbox) = self.batch_beside(max);
        Ok((batch, outbox.ok_or(Error::Disconnected)?))
    }

    /// Waits until a frame of `len` bytes finds room, or `timeout` is over (false).
    ///
    /// The host does not ring for room, so this sleeps: first for half as long as the last wait took, then longer each time,
    /// from 20 us to 10 ms. Once it has slept it waits until a quarter of the ring is free, 40 ms at most: who wakes for one
    /// frame at a time takes the processor from the thread that makes room.
    ///
    /// Meanwhile the room of all packets taken so far goes back to the host, that of posted ones as they are sent: who sends on
    /// what it receives still receives. Of a port that is [lent](Self::lend_to) to this one, [`release`](Self::release) it.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn wait_for_room(&mut self, len: usize, timeout: Duration) -> Result<bool, Error> {
        let mut patience = self.outbox()?.patience(timeout);
        self.release();
        loop {
            self.release_held();
            let outbox = self.outbox()?;
            outbox.flush();
            // Whether it has room the next push says.
            if outbox.is_member_full() {
                std::thread::sleep(SHORTEST.min(timeout));
                self.attend(Some(Duration::ZERO))?;
                return Ok(true);
            }
            if outbox.has_room_for(len, &mut patience)? {
                return Ok(true);
            }
            let Some(pause) = patience.pause() else {
                return Ok(false);
            };
            std::thread::sleep(pause);
            // A daemon that died takes nothing any more, and only its socket tells.
            self.attend(Some(Duration::ZERO))?;
        }
    }

    /// The ring is over, or was never there.
    #[cold]
    fn reopen_outbox(&mut self) -> Result<(), Error> {
        if self.options.request.transmit_bytes == 0 {
            return Err(NO_RING);
        }
        match self.idle()? {
            Standing::Ended => Err(Error::Gone("the source ended".into())),
            Standing::Packets | Standing::Quiet => match &self.outbox {
                Some(outbox) if self.link.is_some() && outbox.life() == Life::Open => Ok(()),
                Some(outbox) if outbox.life() == Life::Quarantined => Err(Error::Quarantined),
                Some(outbox) if outbox.life() == Life::Revoked => {
                    Err(Error::Gone(SENDING.to_owned()))
                }
                _ => Err(Error::Disconnected),
            },
        }
    }
}

fn nonsense(lie: PeerLied) -> Error {
    Error::Protocol(format!("the host's position in the transmit ring: {lie}"))
}

/// Why nothing is sent although the port is open.
const SENDING: &str = "an operator revoked sending";
const NO_RING: Error = Error::Invalid("the port was opened without a transmit ring");

#[cfg(test)]
mod tests;
