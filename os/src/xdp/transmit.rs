//! The way out: frames are copied into transmit chunks, and the kernel is told.

use rustix::net::SendFlags;

use super::{Binding, CONTINUED, Socket};

/// Frames of a flush that did not leave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unsent {
    /// The device dropped them: it has no carrier, or its queue is full.
    pub refused: u32,
    /// Taken back: the interface is down, or the socket bound to none.
    pub retracted: u32,
}

impl Socket {
    /// The most bytes of a frame to be sent.
    pub fn longest_sent(&self) -> usize {
        self.umem.shape().chunk as usize * self.pieces
    }

    /// Copies a frame into as many transmit chunks as it takes and puts them into the TX ring, not yet
    /// visible; false if fewer are free.
    pub fn transmit(&mut self, frame: &[u8]) -> bool {
        let shape = self.umem.shape();
        let pieces = frame.chunks(shape.chunk as usize);
        if pieces.len() > self.pieces {
            return false;
        }
        if self.free.len() < pieces.len() {
            self.reap();
        }
        let Some(left) = self.free.len().checked_sub(pieces.len()) else {
            return false;
        };
        let mut rest = frame.len();
        for (at, piece) in self.free.drain(left..).zip(pieces) {
            // The chunk is ours until the descriptor is published, and inside the region.
            self.umem.region().write(shape.chunks_at() + at, piece);
            rest -= piece.len();
            let options = if rest > 0 { CONTINUED } else { 0 };
            // There are as many places as chunks.
            let word = piece.len() as u64 | u64::from(options) << 32;
            self.tx.push_pair(at, word);
        }
        true
    }

    /// Publishes what [`transmit`](Self::transmit) took and has the kernel send it.
    ///
    /// In copy mode the kernel takes a bounded number of descriptors per call, so it is called until
    /// it has them all, or says that it cannot now: then the rest goes with the next flush.
    ///
    /// NB: a published index is moved back only where the kernel cannot have looked at it. It keeps a
    /// copy (`cached_prod`); if a ring ends before its copy it takes every old entry for new,
    /// and sends them for ever.
    pub fn flush(&mut self, copy_mode: bool) -> Unsent {
        let before = self.tx.published();
        self.tx.publish();
        let mut unsent = Unsent::default();
        let mut was_looked_at = false;
        // It takes 32 with each call; a device that is busy is asked a few times.
        let mut calls = self.umem.shape().transmit / 16 + 4;
        while calls > 0 && self.tx.used() > 0 && self.tx.needs_wakeup() {
            match rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT) {
                // EAGAIN: it took its share of descriptors for one call, or the device is busy.
                Ok(_) | Err(rustix::io::Errno::AGAIN) => calls -= 1,
                // net/xdp/xsk.c, __xsk_generic_xmit: it has done with one frame, which the device dropped.
                Err(rustix::io::Errno::BUSY) if copy_mode => unsent.refused += 1,
                // net/xdp/xsk.c, xsk_check_common: refused before anything was looked at.
                Err(rustix::io::Errno::NETDOWN | rustix::io::Errno::NXIO)
                    if copy_mode && !was_looked_at =>
                {
                    unsent.retracted = self.retract(before);
                    break;
                }
                Err(_) => break,
            }
            was_looked_at = true;
        }
        self.reap();
        unsent
    }

    /// Takes back what was published since the index was `before`; how many frames.
    fn retract(&mut self, before: u32) -> u32 {
        let mut frames = 0;
        for _ in 0..self.tx.published().wrapping_sub(before) {
            self.tx.unpop(1);
            let (at, word) = self.tx.peek_pair();
            self.free.push(at);
            frames += u32::from((word >> 32) as u32 & CONTINUED == 0);
        }
        self.tx.publish();
        frames
    }

    /// Takes back the chunks of frames that were sent.
    fn reap(&mut self) {
        let mask = !(u64::from(self.umem.shape().chunk) - 1);
        for _ in 0..self.completion.filled() {
            self.free.push(self.completion.pop_word() & mask);
        }
        self.completion.release();
    }
}

impl Binding {
    /// Chunks that a frame to be sent may take.
    ///
    /// A driver with zero-copy may take fewer than the kernel's copy does, from 1 on (the attribute
    /// `xdp-zc-max-segs` of `NETDEV_CMD_DEV_GET`). It is not asked, so it gets one.
    pub(super) fn pieces(self) -> usize {
        match self {
            Self {
                frags: true,
                zero_copy: false,
            } => MOST_PIECES,
            _ => 1,
        }
    }
}

/// Chunks of the longest frame that is sent: in five of 2,048 bytes every frame of an MTU of 9,216 fits.
const MOST_PIECES: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_sent_in_pieces_where_the_kernel_copies_them_alone() {
        let pieces = |zero_copy, frags| Binding { zero_copy, frags }.pieces();
        assert_eq!(pieces(false, true), MOST_PIECES);
        assert_eq!(pieces(false, false), 1);
        assert_eq!(pieces(true, true), 1);
        assert_eq!(pieces(true, false), 1);
    }
}
