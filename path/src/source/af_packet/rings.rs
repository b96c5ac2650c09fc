//! The rings of one queue, read in the order in which their frames came.
//!
//! The kernel hands over whole blocks. So that a lone frame is not late, a block closes after a short
//! time, however empty; so time and not bytes fills a ring on a quiet wire. Hence two rings:
//!
//! | ring    | its blocks close | holds frames                       | of the memory |
//! |---------|------------------|------------------------------------|---------------|
//! | main    | soon             | as long as we keep up              | a third       |
//! | reserve | late             | from when `main` is nearly full on | two thirds    |
//!
//! Both sockets are a group whose members the kernel prefers in order: a frame goes to `main`, or to
//! `reserve` where `main` lacks room (`PACKET_FANOUT_FLAG_ROLLOVER`), never to both. The kernel counts
//! a ring as full when the block a quarter of the ring ahead is in use. So three quarters of the
//! reserve can be used, and with many flows most of `main`.
//!
//! **Order.** While the reserve is empty, `main` is all there is; that costs a look at one word.
//! Otherwise the frame with the earlier stamp comes first, and a block that is still being filled is
//! waited for, as it may have an earlier one: after a pause a reader is late by at most the time after
//! which the reserve's blocks close. That time is a quarter of what `main` can bridge, or `main` would
//! be full again when the wait is over.

use std::cmp::Reverse;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::block::{Cursor, Walk, used};
use super::load::Load;
use vnplug_os::packet::{Ring, Socket};

/// How the blocks of a queue are shared, and when they close.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shares {
    pub(super) main: u32,
    pub(super) reserve: u32,
    pub(super) reserve_timeout_ms: u32,
}

impl Shares {
    /// Shares `blocks`; `timeout_ms` is the main ring's.
    pub(super) fn of(blocks: u32, timeout_ms: u32) -> Self {
        let main = blocks / 3;
        Self {
            main,
            reserve: blocks - main,
            reserve_timeout_ms: (timeout_ms * main / 4).clamp(1, MAX_TIMEOUT_MS),
        }
    }
}

/// Where a queue's frames come from.
#[derive(Debug)]
pub(super) struct Rings {
    main: Reading,
    reserve: Option<Reading>,
    /// The one that was read last has a block to be given back.
    last: Which,
    /// A block said that the kernel has lost frames.
    losing: bool,
    /// Virtio-net headers stand before the frames.
    has_headers: bool,
    load: Load,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Main,
    Reserve,
}

/// A ring, and where in it is read.
#[derive(Debug)]
struct Reading {
    ring: Ring,
    /// The block that the kernel hands over next, or that is being read.
    block: usize,
    /// Where in it; `None`: not opened yet.
    cursor: Option<Cursor>,
}

/// What is to be read next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    which: Which,
    cursor: Cursor,
    /// Later frames come from the other ring.
    until_ns: u64,
}

impl Rings {
    /// Rings that were made now, or that another process read. `has_headers`: virtio-net headers stand before the frames.
    pub(super) fn new(main: Ring, reserve: Option<Ring>, has_headers: bool) -> Self {
        Self {
            main: Reading::resume(main),
            reserve: reserve.map(Reading::resume),
            last: Which::Main,
            losing: false,
            has_headers,
            load: Load::default(),
        }
    }

    /// The socket that is bound, sends, and tells what becomes of the interface.
    pub(super) fn socket(&self) -> &Socket {
        self.main.ring.socket()
    }

    /// All sockets that receive; what is taken from one, the others never had.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &Socket> {
        let reserve = self.reserve.as_ref().map(|reading| reading.ring.socket());
        [Some(self.socket()), reserve].into_iter().flatten()
    }

    /// How many blocks there are.
    pub(super) fn blocks(&self) -> usize {
        let reserve = self.reserve.as_ref();
        self.main.ring.blocks() + reserve.map_or(0, |reading| reading.ring.blocks())
    }

    /// What frames can be had now.
    pub(super) fn next(&mut self) -> Option<Next> {
        let main = self.main.open(&mut self.load, &mut self.losing);
        let next = |which, cursor, until_ns| {
            Some(Next {
                which,
                cursor,
                until_ns,
            })
        };
        // NB: after `main`. A frame that came to it after one in the reserve is seen only with that.
        let Some(reserve) = self.reserve.as_mut().filter(|it| it.has_frames()) else {
            return next(Which::Main, main?, u64::MAX);
        };
        let spare = reserve.open(&mut self.load, &mut self.losing)?;
        let Some(main) = main else {
            // What is being filled there may be earlier, and is handed over soon.
            if self.main.has_frames() {
                return None;
            }
            return next(Which::Reserve, spare, u64::MAX);
        };
        let (main_ns, spare_ns) = (self.main.next_ns(main), reserve.next_ns(spare));
        match main_ns <= spare_ns {
            true => next(Which::Main, main, spare_ns),
            false => next(Which::Reserve, spare, main_ns),
        }
    }

    /// Whether a block that was opened since the last call said that frames were lost.
    pub(super) fn take_losing(&mut self) -> bool {
        std::mem::take(&mut self.losing)
    }

    /// Walks through the frames that are next.
    pub(super) fn walk(&mut self, next: Next, snaplen: u32) -> Option<Walk<'_>> {
        let has_headers = self.has_headers;
        self.last = next.which;
        let reading = self.reading(next.which)?;
        let block = reading.ring.block(reading.block)?;
        let walk = Walk::resume(block, next.cursor, snaplen, next.until_ns);
        Some(walk.with_headers(has_headers))
    }

    /// The walk stopped here.
    pub(super) fn stopped(&mut self, cursor: Cursor) {
        if let Some(reading) = self.reading(self.last) {
            reading.cursor = Some(cursor);
        }
    }

    /// Gives the block that was read last back once all its frames were handed out.
    pub(super) fn release_spent(&mut self) {
        let last = self.last;
        let Some(reading) = self.reading(last) else {
            return;
        };
        if reading.release_spent() && last == Which::Reserve {
            // The kernel looks only here whether the reserve has room again.
            let now = Timespec::default();
            let _ = poll(
                &mut [PollFd::from_borrowed_fd(reading.fd(), PollFlags::IN)],
                Some(&now),
            );
        }
    }

    /// Whether anything waits to be read, or will be handed over soon.
    pub(super) fn is_empty(&self) -> bool {
        let reserve = self.reserve.as_ref();
        self.main.ring.status(self.main.block).is_none()
            && !reserve.is_some_and(Reading::has_frames)
    }

    /// Frames that the kernel has put into the rings and that were not handed out.
    pub(super) fn waiting(&self) -> u64 {
        let reserve = self.reserve.as_ref();
        self.main.waiting() + reserve.map_or(0, Reading::waiting)
    }

    /// What to wait for until there may be something to read; `None`: there is.
    pub(super) fn arm(&mut self) -> Option<BorrowedFd<'_>> {
        if self.next().is_some() {
            return None;
        }
        // The reserve's block that is being filled, if there is one: what `main` has is later. Else
        // that of `main`, whatever the reserve has.
        let reserve = self.reserve.as_ref();
        let filling = reserve.filter(|it| it.has_frames() && it.ring.status(it.block).is_none());
        Some(filling.unwrap_or(&self.main).fd())
    }

    /// For how long the rings hold what comes at the present rate, in milliseconds.
    pub(super) fn patience_ms(&mut self, block_size: u32, timeout_ms: u32) -> u64 {
        let reserve = self.reserve.as_ref().map_or(0, |it| it.ring.blocks());
        let parts = [
            (self.main.ring.blocks(), timeout_ms),
            // The last quarter is not used.
            (
                reserve - reserve / 4,
                Shares::of(self.blocks() as u32, timeout_ms).reserve_timeout_ms,
            ),
        ];
        self.load.lasts_ms(block_size, parts)
    }

    /// Whether the kernel has filled half of the ring that is filled last, beyond what is being read.
    pub(super) fn are_half_full(&self) -> bool {
        let last = self.reserve.as_ref().unwrap_or(&self.main);
        let blocks = last.ring.blocks();
        let ahead = (last.block + blocks / 2) % blocks;
        ahead != last.block && last.ring.status(ahead).is_some()
    }

    fn reading(&mut self, which: Which) -> Option<&mut Reading> {
        match which {
            Which::Main => Some(&mut self.main),
            Which::Reserve => self.reserve.as_mut(),
        }
    }
}

impl Reading {
    /// Goes on where it was read last.
    fn resume(mut ring: Ring) -> Self {
        let blocks = 0..ring.blocks();
        // The block that is being filled, unless something waits. Looked for first: the kernel may hand it over meanwhile.
        let latest = blocks
            .clone()
            .max_by_key(|&block| (ring.filling(block), Reverse(block)));
        let ours = blocks.filter(|&block| ring.status(block).is_some());
        let oldest = ours.min_by_key(|&block| ring.filling(block));
        let block = oldest.or(latest).unwrap_or(0);
        // A ring that was full: the kernel has not opened the next block yet.
        let block = match ring.status(block).is_none() && ring.is_spent(block) {
            true => (block + 1) % ring.blocks(),
            false => block,
        };
        Self {
            cursor: ring.block(block).map(|bytes| Cursor::resume(bytes)),
            block,
            ring,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.ring.socket().as_fd()
    }

    /// Whether there are frames in the next block, be it ours or still being filled.
    fn has_frames(&self) -> bool {
        self.ring.frames(self.block) > 0
    }

    /// Where to read, if the kernel has handed over the next block.
    fn open(&mut self, load: &mut Load, losing: &mut bool) -> Option<Cursor> {
        if self.cursor.is_none() {
            let status = self.ring.status(self.block)?;
            let block = self.ring.block(self.block)?;
            let cursor = Cursor::resume(block);
            load.add(cursor.left, used(block));
            self.cursor = Some(cursor);
            *losing |= status & libc::TP_STATUS_LOSING != 0;
        }
        self.cursor
    }

    /// Also those in the block that the kernel fills now.
    fn waiting(&self) -> u64 {
        let blocks = self.ring.blocks();
        let ahead = (0..blocks).map(|ahead| (self.block + ahead) % blocks);
        let later = ahead.skip(usize::from(self.cursor.is_some()));
        let later = later.map(|block| u64::from(self.ring.frames(block)));
        let here = self.cursor.map_or(0, |cursor| u64::from(cursor.left));
        here + later.take_while(|&frames| frames > 0).sum::<u64>()
    }

    fn next_ns(&mut self, cursor: Cursor) -> u64 {
        let block = self.ring.block(self.block);
        block.map_or(0, |block| cursor.next_ns(block))
    }

    fn release_spent(&mut self) -> bool {
        let spent = self.cursor.is_some_and(|cursor| cursor.left == 0);
        if spent {
            self.cursor = None;
            self.ring.release(self.block);
            self.block = (self.block + 1) % self.ring.blocks();
        }
        spent
    }
}

/// The most that the kernel's timer is asked for.
const MAX_TIMEOUT_MS: u32 = 1000;

#[cfg(test)]
mod tests {
    use super::Shares;

    /// Else the main ring would be full again while a block of the reserve is waited for.
    #[test]
    fn the_reserve_closes_its_blocks_before_the_main_ring_lacks_room() {
        for blocks in [96, 384, 1000, 1 << 20] {
            for timeout_ms in [1, 2, 10, 1000] {
                let shares = Shares::of(blocks, timeout_ms);
                assert_eq!(shares.main + shares.reserve, blocks);
                let room_ms = u64::from(shares.main) * u64::from(timeout_ms) * 3 / 4;
                assert!(u64::from(shares.reserve_timeout_ms) * 2 < room_ms);
            }
        }
    }
}
