//! Frames on their way out through a packet socket.

use crate::source::{Flushed, Transmit};
use crate::sys::packet::Socket;

/// What [`Queue::transmit`](crate::source::Queue::transmit) took and the next flush sends.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The frames, one behind the other.
    bytes: Vec<u8>,
    lens: Vec<u16>,
}

impl Outbox {
    /// Copies a frame.
    pub(super) fn take(&mut self, frame: &[u8]) -> Transmit {
        if !(SHORTEST..=LONGEST).contains(&frame.len()) {
            return Transmit::BadLength;
        }
        if self.lens.len() == MOST {
            return Transmit::Full;
        }
        self.bytes.extend_from_slice(frame);
        self.lens.push(frame.len() as u16);
        Transmit::Taken
    }

    /// Hands all frames to the kernel.
    pub(super) fn flush(&mut self, socket: &Socket) -> Flushed {
        let mut flushed = Flushed::default();
        let (mut first, mut at) = (0, 0);
        while first < self.lens.len() {
            let (sent, stopped) = socket.send(&self.bytes[at..], &self.lens[first..]);
            flushed.sent += sent as u64;
            at += bytes(&self.lens[first..first + sent]);
            first += sent;
            let left = (self.lens.len() - first) as u64;
            match stopped.and_then(|error| error.raw_os_error()) {
                // Longer than the interface's MTU: that frame alone.
                Some(libc::EMSGSIZE) => {
                    flushed.bad_length += 1;
                    at += usize::from(self.lens[first]);
                    first += 1;
                }
                Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => {
                    flushed.link_down += left;
                    break;
                }
                // EAGAIN, ENOBUFS, or what nobody expects: the kernel takes no more now.
                Some(_) => {
                    flushed.full += left;
                    break;
                }
                None => {}
            }
        }
        self.bytes.clear();
        self.lens.clear();
        flushed
    }
}

fn bytes(lens: &[u16]) -> usize {
    lens.iter().map(|&len| usize::from(len)).sum()
}

/// Frames that are taken between two flushes.
const MOST: usize = 256;
/// An Ethernet header.
const SHORTEST: usize = 14;
/// The longest frame of any interface that can be captured.
const LONGEST: usize = 65_535;
