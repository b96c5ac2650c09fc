//! Frames on their way out through a packet socket.

use std::time::{SystemTime, UNIX_EPOCH};

use vnplug_ring::layout::flags;

use crate::source::{Flushed, Transmit};
use vnplug_frame::{Frame, MAX_BATCH, recycle, vlan_of};
use vnplug_os::packet::Socket;

/// What [`Transmitter::transmit`](crate::source::Transmitter::transmit) took and the next flush sends.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The frames, one after the other.
    bytes: Vec<u8>,
    lens: Vec<u16>,
    /// Those that the kernel took, as its other sockets see them. Always empty between calls; keeps
    /// its memory.
    sent: Vec<Frame<'static>>,
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

    /// Hands all frames to the kernel; then those that it took to `shown`, the first `snaplen` bytes of
    /// each.
    ///
    /// They have the time before they were sent: no answer to them is older.
    pub(super) fn flush(
        &mut self,
        socket: &Socket,
        snaplen: u32,
        shown: &mut dyn FnMut(&[Frame<'_>]),
    ) -> Flushed {
        let mut flushed = Flushed::default();
        if self.lens.is_empty() {
            return flushed;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let ts_ns = now.map_or(0, |since| since.as_nanos() as u64);
        let mut taken = recycle(std::mem::take(&mut self.sent));
        let (mut first, mut at) = (0, 0);
        while first < self.lens.len() {
            let (sent, stopped) = socket.send(&self.bytes[at..], &self.lens[first..]);
            flushed.sent += sent as u64;
            for &len in &self.lens[first..first + sent] {
                let frame = &self.bytes[at..at + usize::from(len)];
                taken.push(as_sent(frame, ts_ns, snaplen));
                at += usize::from(len);
            }
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
        if !taken.is_empty() {
            shown(&taken);
        }
        self.sent = recycle(taken);
        self.bytes.clear();
        self.lens.clear();
        flushed
    }
}

/// A frame as a packet socket shows it when it leaves.
fn as_sent(frame: &[u8], ts_ns: u64, snaplen: u32) -> Frame<'_> {
    let (tag, vlan_tci) = vlan_of(frame);
    Frame {
        bytes: &frame[..frame.len().min(snaplen as usize)],
        wire_len: frame.len() as u32,
        ts_ns,
        flags: flags::OUTBOUND | tag,
        vlan_tci,
    }
}

/// Frames that are taken between two flushes.
const MOST: usize = MAX_BATCH;
/// An Ethernet header.
const SHORTEST: usize = 14;
/// The longest frame of any interface that can be captured.
const LONGEST: usize = 65_535;
