//! A front-end with a guest's driver, in a few lines: says what it is told to, also nonsense.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vnplug_os::memory::mapped;
use vnplug_ring::Region;
use vnplug_ring::offload::Offload;

pub(crate) const GET_FEATURES: u32 = 1;
pub(crate) const SET_FEATURES: u32 = 2;
pub(crate) const SET_MEM_TABLE: u32 = 5;
pub(crate) const SET_LOG_BASE: u32 = 6;
pub(crate) const SET_VRING_NUM: u32 = 8;
pub(crate) const SET_VRING_ADDR: u32 = 9;
pub(crate) const SET_VRING_BASE: u32 = 10;
pub(crate) const GET_VRING_BASE: u32 = 11;
pub(crate) const SET_VRING_KICK: u32 = 12;
pub(crate) const SET_VRING_CALL: u32 = 13;
pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
pub(crate) const GET_QUEUE_NUM: u32 = 17;
pub(crate) const SET_VRING_ENABLE: u32 = 18;
pub(crate) const SEND_RARP: u32 = 19;
pub(crate) const GET_CONFIG: u32 = 24;
pub(crate) const GET_INFLIGHT_FD: u32 = 31;
pub(crate) const SET_INFLIGHT_FD: u32 = 32;
pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
pub(crate) const ADD_MEM_REG: u32 = 37;
pub(crate) const REM_MEM_REG: u32 = 38;

pub(crate) const CSUM: u64 = 1;
pub(crate) const GUEST_CSUM: u64 = 2;
pub(crate) const GUEST_OFFLOADS: u64 = 1 << 2;
pub(crate) const GUEST_TSO4: u64 = 1 << 7;
/// Both of UDP.
pub(crate) const GUEST_USO: u64 = 3 << 54;
pub(crate) const MRG_RXBUF: u64 = 1 << 15;
pub(crate) const CTRL_VQ: u64 = 1 << 17;
pub(crate) const LOG_ALL: u64 = 1 << 26;
pub(crate) const INDIRECT: u64 = 1 << 28;
pub(crate) const EVENT_IDX: u64 = 1 << 29;
pub(crate) const PROTOCOL: u64 = 1 << 30;
pub(crate) const VERSION_1: u64 = 1 << 32;
/// What a guest of today wants, without offloads for it to receive.
pub(crate) const PLAIN: u64 = VERSION_1 | PROTOCOL | MRG_RXBUF | CSUM | INDIRECT;

/// Among the protocol's features.
pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;

/// Bytes of a guest's memory.
pub(crate) const LEN: u64 = 4 << 20;
/// Where the front-end has it: nowhere near the guest's addresses.
pub(crate) const USER: u64 = 0x7000_0000_0000;
/// Entries of its rings.
pub(crate) const SIZE: u16 = 64;
const BUFFER: u64 = 2048;

/// A front-end's connection.
pub(crate) struct Front {
    pub(crate) socket: UnixStream,
}

/// One with a guest whose driver runs.
pub(crate) struct Guest {
    pub(crate) front: Front,
    pub(crate) memory: OwnedFd,
    /// The name of its memory, which no other has.
    pub(crate) name: String,
    pub(crate) region: Region,
    pub(crate) receiving: Ring,
    pub(crate) sending: Ring,
    /// It kicks only if the device asks for that, as a driver does: who is not asked is not heard.
    pub(crate) is_polite: bool,
}

/// A driver's ring; the device's end has it by messages.
pub(crate) struct Ring {
    pub(crate) number: u32,
    /// Where it lies.
    pub(crate) at: u64,
    /// Where its buffers are, of one to receive in.
    pub(crate) buffers: u64,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    /// What the driver made available, and took back.
    pub(crate) next: u16,
    pub(crate) taken: u16,
}

pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn halves(one: u32, two: u32) -> Vec<u8> {
    [one.to_le_bytes(), two.to_le_bytes()].concat()
}

pub(crate) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

impl Front {
    pub(crate) fn connect(path: &Path) -> Self {
        Self::on(UnixStream::connect(path).unwrap())
    }

    pub(crate) fn on(socket: UnixStream) -> Self {
        let patience = Some(Duration::from_secs(20));
        socket.set_read_timeout(patience).unwrap();
        Self { socket }
    }

    /// Sends a message with these flags beside the version.
    pub(crate) fn send(
        &self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> bool {
        let mut bytes = Vec::new();
        for word in [request, 1 | flags, payload.len() as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(payload);
        self.raw(&bytes, fds)
    }

    pub(crate) fn raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let parts = [IoSlice::new(bytes)];
        sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    /// The next answer: request, flags, payload. None: it was closed.
    pub(crate) fn answer(&mut self) -> Option<(u32, u32, Vec<u8>)> {
        let mut header = [0; 12];
        self.socket.read_exact(&mut header).ok()?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let mut payload = vec![0; word(8) as usize];
        self.socket.read_exact(&mut payload).ok()?;
        Some((word(0), word(4), payload))
    }

    /// Asks what has an answer of its own.
    pub(crate) fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        assert!(self.send(request, 0, payload, &[]));
        let (what, flags, answer) = self.answer().expect("it answers");
        assert_eq!((what, flags), (request, 5));
        answer
    }

    pub(crate) fn number(&mut self, request: u32) -> u64 {
        u64::from_le_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Asks for something and whether it is done.
    pub(crate) fn does(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        assert!(self.send(request, 8, payload, fds));
        let (what, flags, answer) = self.answer().expect("it answers");
        assert_eq!((what, flags), (request, 5));
        u64::from_le_bytes(answer.try_into().unwrap()) == 0
    }

    pub(crate) fn is_closed(&mut self) -> bool {
        self.answer().is_none()
    }

    /// Agrees on features.
    pub(crate) fn agree(&mut self, features: u64) {
        let offered = self.number(GET_FEATURES);
        assert_eq!(features & !offered, 0);
        let protocol = self.number(GET_PROTOCOL_FEATURES);
        assert_eq!(protocol & (1 << 14), 0, "no notifications in band");
        assert!(self.does(SET_PROTOCOL_FEATURES, &bytes_of(&[protocol]), &[]));
        assert!(self.does(SET_FEATURES, &bytes_of(&[features]), &[]));
    }

    pub(crate) fn table(&mut self, fd: &OwnedFd, len: u64) -> bool {
        let words = bytes_of(&[1, 0, len, USER, 0]);
        self.does(SET_MEM_TABLE, &words, &[fd.as_fd()])
    }

    /// Starts a ring; false if anything of it was refused.
    pub(crate) fn start(&mut self, ring: &Ring) -> bool {
        let number = u64::from(ring.number);
        self.does(SET_VRING_NUM, &halves(ring.number, SIZE.into()), &[])
            && self.does(SET_VRING_BASE, &halves(ring.number, 0), &[])
            && self.does(SET_VRING_ADDR, &ring.addresses(), &[])
            && self.does(SET_VRING_CALL, &bytes_of(&[number]), &[ring.call.as_fd()])
            && self.does(SET_VRING_KICK, &bytes_of(&[number]), &[ring.kick.as_fd()])
            && self.does(SET_VRING_ENABLE, &halves(ring.number, 1), &[])
    }

    /// Stops a ring; its index.
    pub(crate) fn stop(&mut self, number: u32) -> u32 {
        let answer = self.ask(GET_VRING_BASE, &halves(number, 0));
        assert_eq!(answer[..4], number.to_le_bytes());
        u32::from_le_bytes(answer[4..].try_into().unwrap())
    }
}

impl Ring {
    pub(crate) fn new(number: u32, at: u64) -> Self {
        Self {
            number,
            at,
            buffers: 0x10_0000,
            kick: event(),
            call: event(),
            next: 0,
            taken: 0,
        }
    }

    /// The payload of SET_VRING_ADDR.
    pub(crate) fn addresses(&self) -> Vec<u8> {
        let user = |offset| USER + self.at + offset;
        let words = [self.number.into(), user(0), user(0x2000), user(0x1000), 0];
        bytes_of(&words)
    }

    pub(crate) fn desc(&self, region: &Region, at: u16, it: (u64, u32, u16, u16)) {
        let (address, len, flags, next) = it;
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend([flags, next].iter().flat_map(|half| half.to_le_bytes()));
        region.write(self.at + 16 * u64::from(at), &bytes);
    }

    /// Makes a chain available, without a kick.
    pub(crate) fn offer(&mut self, region: &Region, head: u16) {
        self.prepare(region, head);
        self.publish(region);
    }

    /// As [`offer`](Self::offer), and nobody sees it before [`publish`](Self::publish).
    fn prepare(&mut self, region: &Region, head: u16) {
        let entry = self.at + 0x1004 + 2 * u64::from(self.next % SIZE);
        region.store_u16(entry, head, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
    }

    /// The device sees all that was prepared at once.
    fn publish(&self, region: &Region) {
        region.store_u16(self.at + 0x1002, self.next, Ordering::Release);
    }

    pub(crate) fn kick(&self) {
        vnplug_os::event::ring(&self.kick);
    }

    /// Kicks, if that is `always` done or the device asked for it.
    pub(crate) fn kick_if(&self, always: bool, region: &Region) {
        // The device stores what it wants and then looks at the index; we the other way round.
        std::sync::atomic::fence(Ordering::SeqCst);
        if always || self.wants_kicks(region) {
            self.kick();
        }
    }

    /// Whether the device asked for kicks, as far as flags say so.
    pub(crate) fn wants_kicks(&self, region: &Region) -> bool {
        region.load_u16(self.at + 0x2000, Ordering::SeqCst) == 0
    }

    /// The next chain that was given back: head and bytes written.
    pub(crate) fn back(&mut self, region: &Region) -> Option<(u32, u32)> {
        let used = region.load_u16(self.at + 0x2002, Ordering::Acquire);
        if used == self.taken {
            return None;
        }
        let element = self.at + 0x2004 + 8 * u64::from(self.taken % SIZE);
        self.taken = self.taken.wrapping_add(1);
        let word = |at| region.load_u32(at, Ordering::Relaxed);
        Some((word(element), word(element + 4)))
    }
}

impl Guest {
    /// One whose driver agreed on these features, with empty buffers for all that comes.
    pub(crate) fn boot(path: &Path, features: u64) -> Self {
        let mut guest = Self::with(Front::connect(path), features);
        guest.start();
        guest
    }

    /// Starts the driver.
    pub(crate) fn start(&mut self) {
        assert!(self.front.table(&self.memory, LEN));
        assert!(self.front.start(&self.receiving) && self.front.start(&self.sending));
        for at in 0..SIZE {
            self.post(at);
        }
    }

    /// One of which the device knows nothing but the features.
    pub(crate) fn with(mut front: Front, features: u64) -> Self {
        front.agree(features);
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("guest{}.", NEXT.fetch_add(1, Ordering::Relaxed));
        let memory = memfd_create(&name, MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, LEN).unwrap();
        Self {
            front,
            region: mapped(&memory, LEN).unwrap(),
            memory,
            name,
            receiving: Ring::new(0, 0x1_0000),
            sending: Ring::new(1, 0x2_0000),
            is_polite: false,
        }
    }

    /// Makes a buffer available to receive in.
    pub(crate) fn post(&mut self, at: u16) {
        let ring = &mut self.receiving;
        let buffer = ring.buffers + BUFFER * u64::from(at);
        ring.desc(&self.region, at, (buffer, BUFFER as u32, 2, 0));
        ring.offer(&self.region, at);
    }

    /// Makes a frame available, with what is left to do with it, and kicks.
    pub(crate) fn send_offloaded(&mut self, frame: &[u8], offload: &Offload) {
        self.send_together(1, frame, offload);
    }

    /// Makes a frame available `count` times, all at once: a device that looks at any time sees all or none.
    pub(crate) fn send_together(&mut self, count: usize, frame: &[u8], offload: &Offload) {
        (0..count).for_each(|_| self.prepare_offloaded(frame, offload));
        self.sending.publish(&self.region);
        self.sending.kick_if(!self.is_polite, &self.region);
    }

    /// Makes these frames available, all at once.
    pub(crate) fn send_all(&mut self, frames: &[Vec<u8>]) {
        for frame in frames {
            self.prepare_offloaded(frame, &Offload::default());
        }
        self.sending.publish(&self.region);
        self.sending.kick_if(!self.is_polite, &self.region);
    }

    fn prepare_offloaded(&mut self, frame: &[u8], offload: &Offload) {
        let at = self.sending.next % SIZE;
        let buffer = 0x20_0000 + 0x8000 * u64::from(at);
        self.region.write(buffer, &offload.to_header(frame));
        self.region.write(buffer + 12, frame);
        let len = 12 + frame.len() as u32;
        self.sending.desc(&self.region, at, (buffer, len, 0, 0));
        self.sending.prepare(&self.region, at);
    }

    /// Makes buffers available again that have something, so far from where they were first, without
    /// looking at what they have; how many.
    pub(crate) fn take_back(&mut self, offset: u64) -> usize {
        let mut count = 0;
        while let Some((head, _)) = self.receiving.back(&self.region) {
            let buffer = self.receiving.buffers + offset + BUFFER * u64::from(head);
            let it = (buffer, BUFFER as u32, 2, 0);
            self.receiving.desc(&self.region, head as u16, it);
            self.receiving.offer(&self.region, head as u16);
            count += 1;
        }
        count
    }

    pub(crate) fn send(&mut self, frame: &[u8]) {
        self.send_offloaded(frame, &Offload::default());
    }

    /// Sends a frame in a table of parts of `each` bytes, or of 50 parts; the first one is shorter.
    pub(crate) fn send_in_parts(&mut self, frame: &[u8], each: u32) {
        let at = self.sending.next % SIZE;
        let buffer = 0x20_0000 + 0x8000 * u64::from(at);
        self.region
            .write(buffer, &Offload::default().to_header(frame));
        self.region.write(buffer + 12, frame);
        let (table, all) = (buffer + 0x4000, 12 + frame.len() as u32);
        let each = each.max(all / 50);
        let (mut begin, mut count, mut bytes) = (0, 0_u16, Vec::new());
        while begin < all {
            let len = if begin == 0 { 1 + each / 3 } else { each };
            let len = len.min(all - begin);
            let is_last = begin + len == all;
            bytes.extend((buffer + u64::from(begin)).to_le_bytes());
            bytes.extend(len.to_le_bytes());
            let halves = [u16::from(!is_last), count + 1];
            bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
            (begin, count) = (begin + len, count + 1);
        }
        self.region.write(table, &bytes);
        let it = (table, bytes.len() as u32, 4, 0);
        self.sending.desc(&self.region, at, it);
        self.sending.offer(&self.region, at);
        self.sending.kick();
    }

    /// Whether all that was sent came back.
    pub(crate) fn has_sent(&mut self) -> bool {
        while self.sending.back(&self.region).is_some() {}
        self.sending.taken == self.sending.next
    }

    /// The next frame that came, with its header; its buffers are made available again.
    pub(crate) fn received(&mut self) -> Option<([u8; 12], Vec<u8>)> {
        let (mut bytes, mut left) = (Vec::new(), 1);
        while left > 0 {
            let (head, len) = match bytes.is_empty() {
                true => self.receiving.back(&self.region)?,
                // The others were told of together with it.
                false => self.receiving.back(&self.region).unwrap(),
            };
            let first = bytes.is_empty();
            if first && len == 0 {
                // A buffer that was of no use.
                self.post(head as u16);
                continue;
            }
            let mut part = vec![0; len as usize];
            let buffer = self.receiving.buffers + BUFFER * u64::from(head);
            self.region.read(buffer, &mut part);
            bytes.extend(part);
            if first {
                left = u16::from_le_bytes([bytes[10], bytes[11]]);
            }
            left -= 1;
            self.post(head as u16);
        }
        self.receiving.kick_if(!self.is_polite, &self.region);
        let frame = bytes.split_off(12);
        Some((bytes.try_into().unwrap(), frame))
    }

    /// The same, in a while.
    pub(crate) fn next(&mut self) -> ([u8; 12], Vec<u8>) {
        let mut found = None;
        vnplug_testing::eventually("a frame comes", || {
            found = self.received();
            found.is_some()
        });
        found.unwrap()
    }

    /// Writes everything that is there away.
    pub(crate) fn drain(&mut self) -> usize {
        std::iter::from_fn(|| self.received()).count()
    }
}

/// Writes all, or as much as is taken.
pub(crate) fn pour(mut socket: &UnixStream, bytes: &[u8]) -> bool {
    socket.write_all(bytes).is_ok()
}
