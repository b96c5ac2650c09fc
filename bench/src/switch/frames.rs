//! Frames that are sent through a switch, each a little different from the one before.

use vnplug_frame::offload::checksum::Sum;

use super::ring::{FROM, TO};

/// Frames of one kind, one after the other.
pub(super) struct Frames {
    kind: Kind,
    frame: Vec<u8>,
    /// How many were sent.
    sent: u32,
}

#[derive(Clone, Copy)]
enum Kind {
    Datagrams,
    Acks,
    Flows,
}

/// Of a segment: who sends it, its number and the one that it acknowledges, and its payload.
struct Segment {
    from: u8,
    to: u8,
    seq: u32,
    ack: u32,
    payload: usize,
}

impl Frames {
    /// Datagrams of UDP, without a checksum, in frames of `len` bytes.
    pub(super) fn datagrams(len: usize) -> Self {
        let mut frame = ethernet(FROM, TO);
        let datagram = len - frame.len() - 20;
        frame.extend(ip(17, datagram, FROM, TO));
        frame.extend([0x1b, 0x58, 0x1b, 0x59]);
        frame.extend((datagram as u16).to_be_bytes());
        frame.resize(len, 0);
        Self::of(Kind::Datagrams, frame)
    }

    /// ACKs of one connection, with timestamps: 66 bytes. Each acknowledges two segments more.
    pub(super) fn acks() -> Self {
        Self::of(Kind::Acks, Self::ack_of(ANSWERED))
    }

    /// Segments of a million connections, one of each, with `payload` bytes.
    pub(super) fn flows(payload: usize) -> Self {
        let first = Segment {
            from: FROM,
            to: TO,
            seq: 1,
            ack: 1,
            payload,
        };
        let mut frames = Self::of(Kind::Flows, first.frame());
        frames.place_flow(0);
        // Those of the first are those of all: see `place_flow`.
        sum(&mut frames.frame);
        frames
    }

    /// What says where a port is.
    pub(super) fn hello(is_sender: bool) -> Vec<u8> {
        let (from, to) = if is_sender { (FROM, TO) } else { (TO, FROM) };
        super::ring::frame(60, to, from)
    }

    /// Segments from the second port to the first that can be merged, behind `times` of their like.
    pub(super) fn to_merge(times: u32) -> Vec<Vec<u8>> {
        let segment = |nth: u32| Segment {
            from: TO,
            to: FROM,
            seq: number(times).wrapping_add(nth * MSS),
            ack: ISN,
            payload: MSS as usize,
        };
        let frame = |nth| {
            let mut frame = segment(nth).frame();
            // The identification goes on.
            frame[18..20].copy_from_slice(&(nth as u16).to_be_bytes());
            sum(&mut frame);
            frame
        };
        (0..MERGED).map(frame).collect()
    }

    /// An ACK of `times` as many segments.
    pub(super) fn ack_of(times: u32) -> Vec<u8> {
        let ack = Segment {
            from: FROM,
            to: TO,
            seq: ISN,
            ack: number(times),
            payload: 0,
        };
        ack.frame()
    }

    fn of(kind: Kind, frame: Vec<u8>) -> Self {
        Self {
            kind,
            frame,
            sent: 0,
        }
    }

    /// The one that is next.
    pub(super) fn this(&self) -> &[u8] {
        &self.frame
    }

    /// It was sent.
    pub(super) fn advance(&mut self) {
        self.sent = self.sent.wrapping_add(1);
        match self.kind {
            // Bytes of the datagram's payload: whoever sends it is to have the same work.
            Kind::Datagrams | Kind::Acks => self.acknowledge(),
            Kind::Flows => self.place_flow(self.sent),
        }
    }

    /// Two segments more, and the sum is right again (RFC 1624, 3, eqn. 3).
    fn acknowledge(&mut self) {
        let tcp = &mut self.frame[TCP..];
        let half = |tcp: &[u8], at: usize| u32::from(u16::from_be_bytes([tcp[at], tcp[at + 1]]));
        let number = u32::from_be_bytes([tcp[8], tcp[9], tcp[10], tcp[11]]);
        let mut sum = !half(tcp, 16) & 0xffff;
        sum += (!half(tcp, 8) & 0xffff) + (!half(tcp, 10) & 0xffff);
        tcp[8..12].copy_from_slice(&number.wrapping_add(2 * MSS).to_be_bytes());
        sum += half(tcp, 8) + half(tcp, 10);
        for _ in 0..2 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        tcp[16..18].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    }

    /// Addresses and ports of a flow. What one of a pair has more the other has less, so that sums stay as they are.
    fn place_flow(&mut self, nth: u32) {
        let (port, address) = (nth as u16, (nth >> 16) as u8 % 16);
        self.frame[29] = 16 + address;
        self.frame[33] = 47 - address;
        self.frame[34..36].copy_from_slice(&port.to_be_bytes());
        self.frame[36..38].copy_from_slice(&(!port).to_be_bytes());
    }
}

impl Segment {
    /// The frame, with right checksums.
    fn frame(&self) -> Vec<u8> {
        let &Self { from, to, .. } = self;
        let mut frame = ethernet(from, to);
        frame.extend(ip(6, 32 + self.payload, from, to));
        frame.extend([0x1b, 0x57 + from, 0x1b, 0x57 + to]);
        frame.extend(self.seq.to_be_bytes());
        frame.extend(self.ack.to_be_bytes());
        // 32 bytes of header, ACK, a window.
        frame.extend([0x80, 0x10, 1, 0xf5, 0, 0, 0, 0]);
        // Two NOPs and a timestamp (RFC 7323, appendix A).
        frame.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
        frame.resize(frame.len() + self.payload, 0x5a);
        sum(&mut frame);
        frame
    }
}

/// The number of the first byte behind `times` as many segments as are merged.
fn number(times: u32) -> u32 {
    ISN.wrapping_add(times * MERGED * MSS)
}

fn ethernet(from: u8, to: u8) -> Vec<u8> {
    vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0]
}

/// A header, with its sum.
fn ip(protocol: u8, payload: usize, from: u8, to: u8) -> [u8; 20] {
    let [high, low] = (20 + payload as u16).to_be_bytes();
    let mut ip = [
        0x45, 0, high, low, 0, 0, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, from, 10, 0, 0, to,
    ];
    let sum = Sum::default().bytes(&ip).finish();
    ip[10..12].copy_from_slice(&sum);
    ip
}

/// Makes both sums of a frame of TCP.
fn sum(frame: &mut [u8]) {
    frame[24..26].fill(0);
    let ip = Sum::default().bytes(&frame[14..TCP]).finish();
    frame[24..26].copy_from_slice(&ip);
    frame[TCP + 16..TCP + 18].fill(0);
    let tcp = of_tcp(frame);
    frame[TCP + 16..TCP + 18].copy_from_slice(&tcp);
}

/// The sum over addresses, protocol, length and segment.
fn of_tcp(frame: &[u8]) -> [u8; 2] {
    let len = (frame.len() - TCP) as u32;
    let pseudo = Sum::default().bytes(&frame[26..TCP]).number(6 << 16 | len);
    pseudo.bytes(&frame[TCP..]).finish()
}

/// Where TCP begins.
const TCP: usize = 34;
/// Where numbers begin, both ways.
const ISN: u32 = 1000;
/// Bytes of each segment that is acknowledged, how many are merged, and how often before there are ACKs alone.
const MSS: u32 = 1448;
pub(super) const MERGED: u32 = 20;
pub(super) const ANSWERED: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether both sums of a frame of TCP are right.
    fn is_right(frame: &[u8]) -> bool {
        let ip = Sum::default().bytes(&frame[14..TCP]).finish();
        (ip, of_tcp(frame)) == ([0; 2], [0; 2])
    }

    #[test]
    fn every_frame_has_right_sums_and_another_flow_or_number() {
        for mut frames in [Frames::acks(), Frames::flows(1448), Frames::flows(64)] {
            let mut seen = std::collections::HashSet::new();
            for nth in 0..100_000 {
                assert!(is_right(frames.this()), "{nth}");
                assert!(seen.insert(frames.this()[26..46].to_vec()), "{nth}");
                frames.advance();
            }
        }
        assert!(Frames::to_merge(1).iter().all(|it| is_right(it)));
        assert_eq!(Frames::acks().this().len(), 66);
        assert_eq!(Frames::datagrams(60).this().len(), 60);
        assert_eq!(Frames::flows(1448).this().len(), 1514);
    }

    #[test]
    fn a_million_flows_are_a_million() {
        let mut frames = Frames::flows(64);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..1 << 20 {
            let frame = frames.this();
            seen.insert((frame[29], [frame[34], frame[35]]));
            frames.advance();
        }
        assert_eq!(seen.len(), 1 << 20);
    }
}
