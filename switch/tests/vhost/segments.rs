//! TCP segments, and the frames of the wire that a super-frame is.

use vnplug_frame::offload::{Pieces, checksum::Sum, work};
use vnplug_ring::offload::Offload;

/// TCP segments of a stream from station 1 to station 2, with right checksums, from this one on.
pub(crate) fn segments(first: u32, count: u32, len: usize) -> Vec<Vec<u8>> {
    segments_from(7000, first, count, len)
}

/// The same of a flow that has this port as its source.
pub(crate) fn segments_from(port: u16, first: u32, count: u32, len: usize) -> Vec<Vec<u8>> {
    let segment = |nth: u32| {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
        frame.extend((40 + len as u16).to_be_bytes());
        frame.extend((nth as u16).to_be_bytes());
        frame.extend([0x40, 0, 64, 6, 0, 0, 10, 0, 3, 1, 10, 0, 3, 2]);
        frame.extend(port.to_be_bytes());
        frame.extend([0x1b, 0x59]);
        frame.extend((nth * len as u32).to_be_bytes());
        frame.extend([0, 0, 0, 1, 0x50, 0x10, 4, 0, 0, 0, 0, 0]);
        frame.extend((0..len).map(|at| (at as u32 ^ nth) as u8));
        let sum = Sum::default().bytes(&frame[14..34]).finish();
        frame[24..26].copy_from_slice(&sum);
        let sum = Sum::default()
            .bytes(&frame[26..34])
            .number(6 + 20 + len as u32)
            .bytes(&frame[34..])
            .finish();
        frame[50..52].copy_from_slice(&sum);
        frame
    };
    (first..first + count).map(segment).collect()
}

/// The frames of the wire that one with this header is.
pub(crate) fn cut(header: &[u8; 12], frame: Vec<u8>) -> Vec<Vec<u8>> {
    let offload = Offload::from_header(header.first_chunk().unwrap());
    let len = frame.len() as u32;
    let Some(work) = work(&frame, len, &offload).unwrap() else {
        return vec![frame];
    };
    let mut pieces = Pieces::default();
    let made = pieces.make(&frame, len, &work);
    let piece = |at| pieces.get(at, &frame);
    made.map(piece)
        .map(|piece| [piece.head, piece.body].concat())
        .collect()
}
