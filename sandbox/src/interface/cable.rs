//! A cable between an interface and a port of a switch: what it moves, and who may stop it.
//!
//! A TAP at one end, a pair of rings at the other. What programs send on the interface is read from the
//! TAP and written into the port's ring; what is due to the port is written into the TAP from where it
//! lies in its ring. Super-frames go both ways uncut, and checksums are left to who needs them.
//!
//! A ring without room holds one frame here and the others in the interface's own queue, as a slow
//! NIC does. While the daemon is away the cable is out, and what is sent is dropped.
//!
//! Segments of a batch that follow each other are merged before the TAP has them, as a NIC's driver does
//! (the kernel does it for no TAP).

use std::fmt::{self, Display};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vnplug::{Next, Offload, Packet, Port};
use vnplug_frame::acks::Acks;
use vnplug_frame::flow::flow_hash;
use vnplug_frame::segment::{Look, look};

use super::cut::Cutter;
use super::merge::{Given, Merge};
use super::tally::{Reason, Tally};
use super::{Tap, header, queue_of};

/// Looks at each frame before it goes on.
pub trait Guard {
    /// A frame that a program sent; false: the switch does not get it. `size`: the bytes in each datagram of a super-frame of
    /// UDP; 0: it is none.
    fn leaves(&mut self, frame: &[u8], size: usize) -> bool;
    /// A frame of the switch; false: the interface does not get it.
    fn enters(&mut self, frame: &[u8]) -> bool;
}

/// Nobody looks.
#[derive(Debug, Clone, Copy)]
pub struct Unguarded;

impl Guard for Unguarded {
    #[inline]
    fn leaves(&mut self, _: &[u8], _: usize) -> bool {
        true
    }

    #[inline]
    fn enters(&mut self, _: &[u8]) -> bool {
        true
    }
}

/// Both ends, and what moved between them.
#[derive(Debug)]
pub struct Cable<G> {
    tap: Tap,
    guard: G,
    /// A frame of the TAP, its vnet header before it.
    frame: Box<[u8]>,
    /// Bytes of a frame in there that the ring had no room for.
    held: Option<usize>,
    /// The queue that is read next.
    turn: usize,
    is_away: bool,
    /// None: segments stay single.
    merge: Option<Merge>,
    /// None: ACKs leave as they are.
    acks: Option<Box<Acks>>,
    /// For a kernel that takes no such super-frame.
    cutter: Cutter,
    received: Tally,
    taken: Taken,
}

/// What became of the frames that programs sent: `all = sent + denied + dropped`, and one that is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// Read from the TAP.
    pub all: u64,
    /// Written into the ring.
    pub sent: u64,
    /// ACKs that were added to those.
    pub acks: u64,
    /// Not let out by whoever guards the cable.
    pub denied: u64,
    /// Dropped: the daemon was away.
    pub away: u64,
    /// Dropped: longer than a record of the ring.
    pub too_long: u64,
    /// Dropped: the ring had no room until the end.
    pub no_room: u64,
}

/// Why a cable moves nothing any more.
#[derive(Debug)]
pub enum CableError {
    /// The interface is gone, or does not work.
    Interface(String),
    /// The port is.
    Port(vnplug::Error),
    /// The process cannot wait.
    Wait(Errno),
}

/// What sending a frame came to.
enum Pushed {
    Sent,
    /// The ring has no room now.
    Full,
    Dropped,
}

impl<G: Guard> Cable<G> {
    /// Up to `segments` of TCP become one for the interface (0: none). With `acks` more ACKs go out for what was merged, so that
    /// its sender goes on as if it had not been.
    #[must_use]
    pub fn new(tap: Tap, guard: G, segments: u8, acks: bool) -> Self {
        Self {
            tap,
            guard,
            frame: vec![0; LONGEST].into_boxed_slice(),
            held: None,
            turn: 0,
            is_away: false,
            merge: (segments > 0).then(|| Merge::new(segments)),
            acks: acks.then(Box::default),
            cutter: Cutter::default(),
            received: Tally::default(),
            taken: Taken::default(),
        }
    }

    /// Moves a batch each way. How many frames moved.
    ///
    /// # Errors
    /// One of the ends is gone.
    pub fn turn(&mut self, port: &mut Port) -> Result<usize, CableError> {
        Ok(self.receive(port)? + self.send(port)?)
    }

    /// Lets the interface receive what is in the port's rings, a batch of it.
    fn receive(&mut self, port: &mut Port) -> Result<usize, CableError> {
        let Some(mut merge) = self.merge.take() else {
            let mut count = 0;
            for packet in port.batch(BATCH) {
                let packet = packet?;
                if self.admits(&packet) {
                    self.inject(&packet)?;
                }
                count += 1;
            }
            return Ok(count);
        };
        let mut packets = Vec::with_capacity(BATCH);
        let (mut count, mut ended) = (0, Ok(()));
        for packet in port.batch(BATCH) {
            match packet {
                Ok(packet) => {
                    count += 1;
                    if self.admits(&packet) {
                        packets.push(packet);
                    }
                }
                Err(error) => ended = Err(error.into()),
            }
        }
        let injected = self.inject_all(&mut merge, &packets);
        self.merge = Some(merge);
        injected.and(ended).map(|()| count)
    }

    /// Whether the guard lets it in.
    #[inline]
    fn admits(&mut self, packet: &Packet<'_>) -> bool {
        let enters = self.guard.enters(packet.bytes);
        if !enters {
            self.received.received += 1;
            self.received.denied += 1;
        }
        enters
    }

    /// Lets the interface receive these, of which segments are merged.
    fn inject_all(&mut self, merge: &mut Merge, packets: &[Packet<'_>]) -> Result<(), CableError> {
        if let [packet] = packets {
            return self.inject(packet);
        }
        let merged = merge.run(packets);
        self.received.merged += merged;
        self.received.received += merged;
        for given in merge.given(packets) {
            match given {
                Given::Packet(packet) => self.inject(packet)?,
                Given::Made(bytes, offload) => {
                    self.received.received += 1;
                    let merged = Some(offload.gso_size);
                    self.put(&offload.to_native_header(bytes), bytes, merged)?;
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn inject(&mut self, packet: &Packet<'_>) -> Result<(), CableError> {
        self.received.received += 1;
        self.put(&header::of(packet), packet.bytes, None)
    }

    #[inline]
    fn put(
        &mut self,
        header: &[u8; header::SIZE],
        frame: &[u8],
        merged: Option<u16>,
    ) -> Result<(), CableError> {
        if frame.len() < ETHERNET_HEADER {
            self.received.drop(Reason::TooShort);
            return Ok(());
        }
        let queue = match self.tap.queues() {
            1 => 0,
            // NB: a port of a switch is not told the hash.
            queues => queue_of(flow_hash(frame), queues),
        };
        match self.cutter.inject(&self.tap, queue, header, frame) {
            Ok(()) => {
                self.received.injected += 1;
                if let Some(acks) = &mut self.acks
                    && let Look::Tcp(segment) = look(frame, frame.len())
                {
                    acks.given(&segment, merged);
                }
            }
            Err(errno) => match Reason::of(errno) {
                Some(reason) => self.received.drop(reason),
                None => return Err(self.removed()),
            },
        }
        Ok(())
    }

    /// Sends what programs sent, a batch of it.
    fn send(&mut self, port: &mut Port) -> Result<usize, CableError> {
        let mut count = 0;
        if let Some(len) = self.held.take() {
            match self.push(port, len)? {
                Pushed::Full => {
                    self.held = Some(len);
                    return Ok(0);
                }
                Pushed::Sent | Pushed::Dropped => count += 1,
            }
        }
        // A queue that is never empty has one batch of them.
        self.turn = (self.turn + 1) % self.tap.queues();
        for _ in 0..BATCH {
            let Some(len) = self.take()? else {
                break;
            };
            self.taken.all += 1;
            let (head, frame) = self.frame[..len].split_at(header::SIZE.min(len));
            if !self.guard.leaves(frame, header::datagram_size(head)) {
                self.taken.denied += 1;
                count += 1;
                continue;
            }
            if self.acks.is_some() {
                self.expand(port, len)?;
            }
            match self.push(port, len)? {
                Pushed::Full => {
                    self.held = Some(len);
                    break;
                }
                Pushed::Sent | Pushed::Dropped => count += 1,
            }
        }
        if count > 0
            && let Ok(outbox) = port.outbox()
        {
            outbox.flush();
        }
        Ok(count)
    }

    /// Takes the next frame that a program sent, of whichever queue has one; its bytes with its header.
    fn take(&mut self) -> Result<Option<usize>, CableError> {
        for _ in 0..self.tap.queues() {
            match self.tap.take(self.turn, &mut self.frame) {
                Ok(Some(len)) => return Ok(Some(len)),
                Ok(None) => self.turn = (self.turn + 1) % self.tap.queues(),
                Err(Errno::BADFD | Errno::NODEV) => return Err(self.removed()),
                Err(errno) => return Err(self.broken(errno)),
            }
        }
        Ok(None)
    }

    /// Writes what goes before the frame that was read, of `len` bytes with its header, into the ring.
    fn expand(&mut self, port: &mut Port, len: usize) -> Result<(), CableError> {
        let (Some(acks), Some((header, frame))) =
            (&mut self.acks, self.frame[..len].split_first_chunk())
        else {
            return Ok(());
        };
        let Ok(outbox) = port.outbox() else {
            return Ok(());
        };
        let offload = Offload::from_native_header(header);
        let mut failed = Ok(());
        // NB: where there is no room, fewer ACKs are right, too.
        self.taken.acks += acks.expand(frame, &offload, |ack| {
            let pushed = outbox.push_offloaded(ack, &offload);
            pushed.unwrap_or_else(|error| {
                failed = Err(error.into());
                false
            })
        });
        failed
    }

    /// Writes the frame that was read, of `len` bytes with its header, into the ring.
    #[inline]
    fn push(&mut self, port: &mut Port, len: usize) -> Result<Pushed, CableError> {
        let Some((header, frame)) = self.frame[..len].split_first_chunk() else {
            return Err(self.broken("a frame without its header"));
        };
        let outbox = match port.outbox() {
            Ok(outbox) => outbox,
            Err(vnplug::Error::Disconnected) => {
                self.taken.away += 1;
                return Ok(Pushed::Dropped);
            }
            Err(error) => return Err(error.into()),
        };
        if frame.len() > outbox.max_frame() {
            self.taken.too_long += 1;
            return Ok(Pushed::Dropped);
        }
        if outbox.push_offloaded(frame, &Offload::from_native_header(header))? {
            self.taken.sent += 1;
            return Ok(Pushed::Sent);
        }
        outbox.flush();
        Ok(Pushed::Full)
    }

    /// Waits until one of both ends has something, or `also` has, at most so long. False: the switch is gone for
    /// good.
    ///
    /// # Errors
    /// One of the ends is gone.
    pub fn idle(
        &mut self,
        port: &mut Port,
        limit: Duration,
        also: Option<BorrowedFd<'_>>,
    ) -> Result<bool, CableError> {
        match port.next()? {
            Next::Packet(packet) => {
                if self.admits(&packet) {
                    self.inject(&packet)?;
                }
                return Ok(true);
            }
            Next::Ended => return Ok(false),
            Next::Nothing => {}
        }
        if port.is_away() != self.is_away {
            self.is_away = !self.is_away;
            self.tap.set_carrier(!self.is_away);
        }
        let limit = match self.held {
            // Nobody tells of room.
            Some(_) => limit.min(PAUSE),
            None => limit,
        };
        let sent = self.tap.descriptors().filter(|_| self.held.is_none());
        let mut fds: Vec<PollFd<'_>> = std::iter::once(port.fd())
            .chain(sent)
            .chain(also)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(CableError::Wait(errno)),
        }
    }

    /// Nothing moves any more: a frame that is held is dropped.
    pub fn end(&mut self) {
        self.taken.no_room += u64::from(self.held.take().is_some());
    }

    /// The interface.
    #[must_use]
    pub fn tap(&self) -> &Tap {
        &self.tap
    }

    /// Who guards it.
    #[must_use]
    pub fn guard(&self) -> &G {
        &self.guard
    }

    /// What became of frames of the switch.
    #[must_use]
    pub fn received(&self) -> &Tally {
        &self.received
    }

    /// What became of frames of programs.
    #[must_use]
    pub fn taken(&self) -> &Taken {
        &self.taken
    }

    /// Whether a frame waits for room in the ring.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Whether the daemon is away.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.is_away
    }

    fn removed(&self) -> CableError {
        self.broken("somebody removed the interface")
    }

    fn broken(&self, why: impl Display) -> CableError {
        CableError::Interface(format!("{}: {why}", self.tap.name()))
    }
}

impl Taken {
    /// All drops.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.away + self.too_long + self.no_room
    }
}

impl Display for CableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interface(text) => f.write_str(text),
            Self::Port(error) => error.fmt(f),
            Self::Wait(errno) => write!(f, "cannot wait: {errno}"),
        }
    }
}

impl std::error::Error for CableError {}

impl From<vnplug::Error> for CableError {
    fn from(error: vnplug::Error) -> Self {
        Self::Port(error)
    }
}

/// Frames of one end before the other has its turn.
const BATCH: usize = 64;
/// Between two looks at a ring without room.
const PAUSE: Duration = Duration::from_micros(100);
const ETHERNET_HEADER: usize = 14;
/// Bytes of the longest frame that a TAP gives: 64 KiB of IP, Ethernet header, tags, vnet header.
const LONGEST: usize = (64 << 10) + 14 + 8 + header::SIZE;
