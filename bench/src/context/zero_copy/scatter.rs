//! Sends the frames of a transmit ring from where their sender wrote them. It is here to be measured: the product does
//! not do this, and without checks it must not be done.
#![expect(unsafe_code, reason = "gives the kernel places in a ring")]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering;

use vnplug_frame::MAX_BATCH;
use vnplug_frame::lock::SourceLock;
use vnplug_os::interface;
use vnplug_os::packet::Socket;
use vnplug_ring::Region;
use vnplug_ring::layout::{
    DATA_OFFSET, Geometry, HEAD, PAD, READ, RECORD_HEADER, TAIL, record_size,
};

use super::{HEADERS, TURN};
use crate::row::Result;

/// What is done with a frame before it is sent.
pub(super) enum Check {
    /// Its length is checked, and its headers are copied and judged.
    Headers(SourceLock),
    /// Nothing.
    Nothing,
}

/// A ring, and the socket into which it is emptied.
pub(super) struct Scatter {
    socket: Socket,
    region: Region,
    geometry: Geometry,
    check: Check,
    tail: u64,
    taken: u64,
    /// Headers of the batch.
    heads: Box<[[u8; HEADERS]; MAX_BATCH]>,
    /// Places of the batch: headers, and the rest.
    parts: Vec<[libc::iovec; 2]>,
    messages: Vec<libc::mmsghdr>,
    /// Frames that the kernel took.
    pub(super) sent: u64,
}

impl Scatter {
    pub(super) fn new(
        name: &str,
        region: Region,
        geometry: Geometry,
        check: Check,
    ) -> Result<Self> {
        let socket = Socket::open()?;
        socket.bind(interface::link(&socket, name)?.index)?;
        Ok(Self {
            socket,
            region,
            geometry,
            check,
            tail: 0,
            taken: 0,
            heads: Box::new([[0; HEADERS]; MAX_BATCH]),
            parts: Vec::with_capacity(MAX_BATCH),
            messages: Vec::with_capacity(MAX_BATCH),
            sent: 0,
        })
    }

    /// Sends a batch of what waits: how many frames.
    pub(super) fn turn(&mut self) -> Result<usize> {
        // Acquire: pairs with the Release in Producer::publish; the records are visible.
        let head = self.region.load_u64(HEAD, Ordering::Acquire);
        self.parts.clear();
        let mut bytes = 0;
        while self.tail != head && self.parts.len() < MAX_BATCH && bytes < TURN {
            let mut at = self.tail & (self.geometry.capacity - 1);
            let mut len = self.length(at);
            if len == PAD {
                self.tail += self.geometry.capacity - at;
                at = 0;
                len = self.length(0);
            }
            let place = DATA_OFFSET + at + RECORD_HEADER;
            let parts = match &self.check {
                Check::Nothing => [self.place(place, len as usize), NOWHERE],
                Check::Headers(lock) => {
                    let size = record_size(len);
                    if len > self.geometry.snaplen
                        || size > head - self.tail
                        || size > self.geometry.capacity - at
                    {
                        return Err("the ring lies".into());
                    }
                    let copied = HEADERS.min(len as usize);
                    let own = &mut self.heads[self.parts.len()][..copied];
                    self.region.read(place, own);
                    lock.judge(own).map_err(|why| format!("{why:?}"))?;
                    let own = libc::iovec {
                        iov_base: own.as_mut_ptr().cast(),
                        iov_len: copied,
                    };
                    [
                        own,
                        self.place(place + copied as u64, len as usize - copied),
                    ]
                }
            };
            self.parts.push(parts);
            bytes += u64::from(len);
            self.tail += record_size(len);
        }
        self.flush();
        self.taken += self.parts.len() as u64;
        // Release: pairs with the Acquire in Producer::refresh_tail; the kernel has copied all.
        self.region.store_u64(TAIL, self.tail, Ordering::Release);
        self.region.store_u64(READ, self.taken, Ordering::Release);
        Ok(self.parts.len())
    }

    fn length(&self, at: u64) -> u32 {
        self.region.load_u32(DATA_OFFSET + at, Ordering::Relaxed)
    }

    fn place(&self, at: u64, len: usize) -> libc::iovec {
        libc::iovec {
            iov_base: self.region.as_ptr().wrapping_add(at as usize).cast(),
            iov_len: len,
        }
    }

    fn flush(&mut self) {
        self.messages.clear();
        for parts in &mut self.parts {
            // SAFETY: a `mmsghdr` of zeros is one.
            let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
            message.msg_hdr.msg_iov = parts.as_mut_ptr();
            message.msg_hdr.msg_iovlen = if parts[1].iov_len == 0 { 1 } else { 2 };
            self.messages.push(message);
        }
        let mut done = 0;
        while done < self.messages.len() {
            let left = &mut self.messages[done..];
            // SAFETY: each part lies in `heads` or in the ring, whose only sender is this program; the kernel reads it,
            // and finds an address that is none to be one. Both vectors outlive the call.
            let result = unsafe {
                libc::sendmmsg(
                    self.socket.as_fd().as_raw_fd(),
                    left.as_mut_ptr(),
                    left.len() as u32,
                    libc::MSG_DONTWAIT,
                )
            };
            match usize::try_from(result) {
                Ok(more @ 1..) => {
                    done += more;
                    self.sent += more as u64;
                }
                // No room, or a wrong length: as the product, which drops the rest of the batch.
                _ => break,
            }
        }
    }
}

const NOWHERE: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};
