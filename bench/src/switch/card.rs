//! A virtio card by vhost-user whose driver is a thread of ours: it sends and receives without a guest around it.
//!
//! A split ring each way, buffers that can be merged, and no interrupts: the driver looks. It kicks if the device asks
//! for that, as drivers do.
//!
//! ```text
//! 0         its ring to receive: descriptors, +0x4000 available, +0x5000 used
//! 0x8000    its ring to send, likewise
//! 0x100000  buffers to receive in, 0x300000 to send from, 2 KiB each
//! ```

use std::collections::VecDeque;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vnplug_ring::Region;
use vnplug_ring::offload::{HEADER, Offload};

use crate::row::Result;
use crate::sys;

/// A card that is on a switch as long as this is there.
pub(super) struct Card {
    region: Region,
    receiving: Ring,
    sending: Ring,
    /// Buffers to send from that the device does not have, the one first that came back first.
    free: VecDeque<u16>,
    /// Buffers that the frame has that came last and that were not looked at yet.
    left: u16,
    _front: Front,
}

/// A ring, from the driver's end.
struct Ring {
    number: u32,
    at: u64,
    kick: OwnedFd,
    /// Where the device would call.
    call: OwnedFd,
    /// What was made available, and taken back.
    next: u16,
    taken: u16,
}

/// A front-end's connection.
struct Front(UnixStream);

impl Card {
    /// Joins a switch by its socket, with a driver that takes super-frames and leaves checksums to the switch.
    ///
    /// # Errors
    /// The system's, and if the switch refuses anything of it.
    pub(super) fn join(socket: &Path) -> Result<Self> {
        let front = Front(UnixStream::connect(socket)?);
        front.0.set_read_timeout(Some(PATIENCE))?;
        let memory = sys::memory(LEN)?;
        let region = sys::map(&memory, LEN)?;
        front.agree()?;
        let table = bytes_of(&[1, 0, LEN, USER, 0]);
        front.does(SET_MEM_TABLE, &table, &[memory.as_fd()])?;
        let mut card = Self {
            region,
            receiving: Ring::new(0, 0)?,
            sending: Ring::new(1, 0x8000)?,
            free: (0..SIZE).collect(),
            left: 0,
            _front: front,
        };
        for ring in [&card.receiving, &card.sending] {
            ring.start(&card.region, &card._front)?;
        }
        for at in 0..SIZE {
            let buffer = RECEIVE + BUFFER * u64::from(at);
            card.receiving
                .describe(&card.region, at, (buffer, BUFFER as u32, WRITE));
            card.receiving.offer(&card.region, at);
        }
        card.receiving.publish(&card.region);
        Ok(card)
    }

    /// Writes a frame for the switch, which sees it at the next [`flush`](Self::flush); false: there is no room.
    pub(super) fn push(&mut self, frame: &[u8]) -> bool {
        let Some(at) = self.free.pop_front() else {
            return false;
        };
        let buffer = SEND + BUFFER * u64::from(at);
        let header = Offload::default().to_header(frame);
        self.region.write(buffer, &header);
        self.region.write(buffer + HEADER as u64, frame);
        let len = (HEADER + frame.len()) as u32;
        self.sending.describe(&self.region, at, (buffer, len, 0));
        self.sending.offer(&self.region, at);
        true
    }

    /// As [`push`](Self::push), of a frame of up to 64 KiB less the header, and what is left to do with it. It lies in the
    /// memory of [`LONG`] buffers: no other than such frames may be on their way.
    pub(super) fn push_long(&mut self, frame: &[u8], offload: &Offload) -> bool {
        // Buffers come back in order, so that these are free.
        let on_their_way = usize::from(SIZE) - self.free.len();
        if on_their_way >= usize::from(SIZE / LONG) {
            return false;
        }
        let Some(at) = self.free.pop_front() else {
            return false;
        };
        let buffer = SEND + BUFFER * u64::from(at % (SIZE / LONG) * LONG);
        self.region.write(buffer, &offload.to_header(frame));
        self.region.write(buffer + HEADER as u64, frame);
        let len = (HEADER + frame.len()) as u32;
        self.sending.describe(&self.region, at, (buffer, len, 0));
        self.sending.offer(&self.region, at);
        true
    }

    /// Gives the switch all that was written, and takes back what it has sent.
    pub(super) fn flush(&mut self) {
        self.sending.publish(&self.region);
        while let Some((head, _)) = self.sending.back(&self.region) {
            self.free.push_back(head);
        }
    }

    /// Takes all frames that are there, and looks at the header of each; how many.
    pub(super) fn take(&mut self) -> u64 {
        let mut frames = 0;
        while let Some((head, len)) = self.receiving.back(&self.region) {
            if self.left == 0 && len > 0 {
                let mut header = [0; HEADER];
                let buffer = RECEIVE + BUFFER * u64::from(head);
                self.region.read(buffer, &mut header);
                self.left = u16::from_le_bytes([header[10], header[11]]);
                frames += 1;
            }
            self.left = self.left.saturating_sub(1);
            self.receiving.offer(&self.region, head);
        }
        self.receiving.publish(&self.region);
        frames
    }
}

impl Ring {
    fn new(number: u32, at: u64) -> Result<Self> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self {
            number,
            at,
            kick: event()?,
            call: event()?,
            next: 0,
            taken: 0,
        })
    }

    /// Tells the switch of it.
    fn start(&self, region: &Region, front: &Front) -> Result<()> {
        // The driver looks by itself: VRING_AVAIL_F_NO_INTERRUPT.
        region.store_u16(self.at + AVAILABLE, 1, Ordering::Relaxed);
        let user = |offset| USER + self.at + offset;
        let (number, of) = (self.number, u64::from(self.number));
        let addresses = [of, user(0), user(USED), user(AVAILABLE), 0];
        front.does(SET_VRING_NUM, &halves(number, SIZE.into()), &[])?;
        front.does(SET_VRING_BASE, &halves(number, 0), &[])?;
        front.does(SET_VRING_ADDR, &bytes_of(&addresses), &[])?;
        front.does(SET_VRING_CALL, &bytes_of(&[of]), &[self.call.as_fd()])?;
        front.does(SET_VRING_KICK, &bytes_of(&[of]), &[self.kick.as_fd()])?;
        front.does(SET_VRING_ENABLE, &halves(number, 1), &[])
    }

    /// Writes a descriptor: address, length, flags.
    fn describe(&self, region: &Region, at: u16, (address, len, flags): (u64, u32, u16)) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        region.write(self.at + 16 * u64::from(at), &bytes);
    }

    /// Makes a buffer available once [`publish`](Self::publish) says so.
    fn offer(&mut self, region: &Region, head: u16) {
        let entry = self.at + AVAILABLE + 4 + 2 * u64::from(self.next % SIZE);
        region.store_u16(entry, head, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
    }

    /// Shows the device what was offered, and kicks if it asked for that.
    fn publish(&self, region: &Region) {
        let index = self.at + AVAILABLE + 2;
        // Relaxed: the device does not write it.
        if region.load_u16(index, Ordering::Relaxed) == self.next {
            return;
        }
        // Release: pairs with the device's Acquire of this index.
        region.store_u16(index, self.next, Ordering::Release);
        // The device stores what it wants and then looks at the index; we the other way round.
        fence(Ordering::SeqCst);
        if region.load_u16(self.at + USED, Ordering::Relaxed) == 0 {
            vnplug_os::event::ring(&self.kick);
        }
    }

    /// The next buffer that came back, and the bytes in it.
    fn back(&mut self, region: &Region) -> Option<(u16, u32)> {
        // Acquire: pairs with the device's Release of this index.
        if region.load_u16(self.at + USED + 2, Ordering::Acquire) == self.taken {
            return None;
        }
        let element = self.at + USED + 4 + 8 * u64::from(self.taken % SIZE);
        self.taken = self.taken.wrapping_add(1);
        let word = |at| region.load_u32(at, Ordering::Relaxed);
        Some((word(element) as u16, word(element + 4)))
    }
}

impl Front {
    /// Agrees on what the driver wants.
    fn agree(&self) -> Result<()> {
        let offered = self.number(GET_FEATURES)?;
        if WANTED & !offered != 0 {
            return Err(format!("the switch offers {offered:#x}, not all of {WANTED:#x}").into());
        }
        let protocol = self.number(GET_PROTOCOL_FEATURES)?;
        self.does(SET_PROTOCOL_FEATURES, &bytes_of(&[protocol]), &[])?;
        self.does(SET_FEATURES, &bytes_of(&[WANTED]), &[])
    }

    fn number(&self, request: u32) -> Result<u64> {
        self.send(request, 0, &[], &[])?;
        self.answer()
    }

    /// Asks for something, which the switch has to do.
    fn does(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, NEEDS_REPLY, payload, fds)?;
        match self.answer()? {
            0 => Ok(()),
            _ => Err(format!("the switch refuses message {request} of vhost-user").into()),
        }
    }

    fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut bytes = halves(request, VERSION | flags);
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let parts = [IoSlice::new(&bytes)];
        sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// An answer, which is a number.
    fn answer(&self) -> Result<u64> {
        let mut bytes = [0; 20];
        (&self.0).read_exact(&mut bytes)?;
        let mut number = [0; 8];
        number.copy_from_slice(&bytes[12..]);
        Ok(u64::from_le_bytes(number))
    }
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn halves(one: u32, two: u32) -> Vec<u8> {
    [one.to_le_bytes(), two.to_le_bytes()].concat()
}

/// Buffers of each ring, and bytes of each.
const SIZE: u16 = 1024;
const BUFFER: u64 = 2048;
/// Buffers of a long frame.
const LONG: u16 = 32;
/// Where what lies; see above.
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x5000;
const RECEIVE: u64 = 0x10_0000;
const SEND: u64 = 0x30_0000;
const LEN: u64 = 0x50_0000;
/// Where the front-end says that it has this memory.
const USER: u64 = 0x7000_0000_0000;
/// The device writes into the buffer (`VRING_DESC_F_WRITE`).
const WRITE: u16 = 2;
/// `CSUM`, `GUEST_CSUM`, `GUEST_TSO4`, `MRG_RXBUF`, protocol features, `VERSION_1`.
const WANTED: u64 = 1 | 2 | 1 << 7 | 1 << 15 | 1 << 30 | 1 << 32;
/// Flags of a message (QEMU's `vhost-user.rst`), and requests.
const VERSION: u32 = 1;
const NEEDS_REPLY: u32 = 8;
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
/// Longest time for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
