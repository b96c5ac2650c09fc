//! Frames on their way out through a packet socket.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use vnplug_ring::layout::flags;
use vnplug_ring::offload::{Offload, SHORT_HEADER};

use crate::source::{Flushed, Transmit};
use vnplug_frame::{Frame, MAX_BATCH, recycle, vlan_of};
use vnplug_os::packet::Socket;

/// What [`Transmitter::transmit`](crate::source::Transmitter::transmit) took and the next flush sends.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The frames, one after the other, each after its header if the socket wants headers. Longer than what is used:
    /// a place is not cleared before each frame.
    bytes: Vec<u8>,
    used: usize,
    lens: Vec<u32>,
    /// Bytes of a header.
    header: usize,
    /// What is left to do with each.
    offloads: Vec<Offload>,
    /// Those that the kernel took, as its other sockets see them. Always empty between calls; keeps
    /// its memory.
    sent: Vec<Frame<'static>>,
}

impl Outbox {
    /// Of a socket that wants a virtio-net header before each frame, or does not.
    pub(super) fn new(has_headers: bool) -> Self {
        Self {
            header: if has_headers { SHORT_HEADER } else { 0 },
            ..Self::default()
        }
    }

    /// Whether frames may be left to the kernel to be cut or summed.
    pub(super) fn has_headers(&self) -> bool {
        self.header > 0
    }

    /// Copies a frame, with what is left to do.
    pub(super) fn take(&mut self, frame: &[u8], offload: &Offload) -> Transmit {
        match self.place(frame.len()) {
            Some(place) => place.copy_from_slice(frame),
            None => return Transmit::Full,
        }
        self.placed(0..frame.len(), offload)
    }

    /// Room for `len` bytes with a frame among them, if there is any before a flush.
    #[inline]
    pub(super) fn place(&mut self, len: usize) -> Option<&mut [u8]> {
        if self.lens.len() == MOST {
            return None;
        }
        let at = self.used + self.header;
        if self.bytes.len() < at + len {
            self.bytes.resize(at + len, 0);
        }
        Some(&mut self.bytes[at..at + len])
    }

    /// A frame in that room.
    pub(super) fn at(&self, frame: &Range<usize>) -> &[u8] {
        &self.bytes[self.used + self.header..][frame.clone()]
    }

    /// Takes a frame that lies in that room, with what is left to do.
    #[inline]
    pub(super) fn placed(&mut self, frame: Range<usize>, offload: &Offload) -> Transmit {
        let len = frame.len();
        if !(SHORTEST..=LONGEST).contains(&len) {
            return Transmit::BadLength;
        }
        let (header, place) = self.bytes[self.used..].split_at_mut(self.header);
        if frame.start > 0 {
            place.copy_within(frame, 0);
        }
        if !header.is_empty() {
            header.copy_from_slice(&offload.to_native_header(&place[..len]));
        }
        self.used += self.header + len;
        self.lens.push((self.header + len) as u32);
        self.offloads.push(*offload);
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
            let (sent, stopped) = socket.send(&self.bytes[at..self.used], &self.lens[first..]);
            flushed.sent += sent as u64;
            for nth in first..first + sent {
                let end = at + self.lens[nth] as usize;
                let frame = &self.bytes[at + self.header..end];
                taken.push(as_sent(frame, &self.offloads[nth], ts_ns, snaplen));
                at = end;
            }
            first += sent;
            let left = (self.lens.len() - first) as u64;
            match stopped.and_then(|error| error.raw_os_error()) {
                // Longer than the interface's MTU, or left to be cut in a way that this kernel does not
                // know: that frame alone.
                Some(libc::EMSGSIZE | libc::EINVAL) => {
                    flushed.bad_length += 1;
                    at += self.lens[first] as usize;
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
        self.used = 0;
        self.lens.clear();
        self.offloads.clear();
        flushed
    }
}

/// A frame as a packet socket shows it when it leaves.
fn as_sent<'a>(frame: &'a [u8], offload: &Offload, ts_ns: u64, snaplen: u32) -> Frame<'a> {
    let (tag, vlan_tci) = vlan_of(frame);
    let left = match offload.is_due() {
        true => flags::OFFLOAD | flags::CSUM_NOT_READY,
        false => 0,
    };
    Frame {
        bytes: &frame[..frame.len().min(snaplen as usize)],
        wire_len: frame.len() as u32,
        ts_ns,
        flags: flags::OUTBOUND | tag | left,
        vlan_tci,
        offload: *offload,
        due: &[],
        is_form: false,
        from: 0,
    }
}

/// Frames that are taken between two flushes.
const MOST: usize = MAX_BATCH;
/// An Ethernet header.
const SHORTEST: usize = 14;
/// The longest frame of any interface that can be captured.
const LONGEST: usize = 65_535;
