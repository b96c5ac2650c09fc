//! Frames read ahead by a thread of its own, so that a slow disk delays no frame that is due.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};

use super::Order;
use super::files::File;
use crate::read::{End, Packet, ReadError, Reader};

/// Some frames of a file, and their bytes.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// In the order of the file.
    pub(super) frames: Vec<Frame>,
    bytes: Vec<u8>,
}

/// One recorded frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    /// When it was recorded, nanoseconds since 1970.
    pub(super) recorded_ns: u64,
    /// Whether it can be sent at all.
    pub(super) kind: Kind,
    /// Its time says nothing about the frame before.
    pub(super) begins: bool,
    at: usize,
    len: usize,
}

/// What a recorded frame is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It can be sent as it is.
    Whole,
    /// Only its beginning was recorded.
    Snapped,
    /// It has no Ethernet header but this link type (LINKTYPE_…).
    Foreign(u32),
    /// It is shorter than an Ethernet header.
    Short,
    /// It is longer than what any exit takes; its bytes are not kept.
    TooLong,
}

/// What becomes of frames of which only the beginning was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Snapped {
    /// They are refused.
    Refuse,
    /// What there is of them is sent.
    Cut,
    /// They get zeros up to the length they had.
    Pad,
}

/// What the reading thread hands over.
#[derive(Debug)]
pub(super) enum Item {
    /// Frames.
    Piece(Piece),
    /// This file ends within a block that begins at this byte; the next file follows.
    Torn(PathBuf, u64),
    /// This file cannot be read on; the next file follows.
    Failed(ReadError),
    /// All files were played once more.
    Round,
}

impl Piece {
    /// A frame's bytes.
    pub(super) fn bytes(&self, frame: &Frame) -> &[u8] {
        &self.bytes[frame.at..frame.at + frame.len]
    }

    fn add(&mut self, packet: &Packet<'_>, begins: bool) {
        let (bytes, kind) = match packet.bytes.len() {
            0..=LONGEST_FRAME => (packet.bytes, Kind::Whole),
            _ => (&[][..], Kind::TooLong),
        };
        let at = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.frames.push(Frame {
            recorded_ns: packet.ts_ns,
            kind,
            begins,
            at,
            len: bytes.len(),
        });
    }

    /// Says what the frame that was added last is good for.
    fn judge(&mut self, wire_len: usize, link_type: u32, snapped: Snapped) {
        let Some(frame) = self.frames.last_mut() else {
            return;
        };
        frame.kind = if link_type != ETHERNET {
            Kind::Foreign(link_type)
        } else if frame.kind == Kind::TooLong {
            Kind::TooLong
        } else if frame.len < wire_len {
            match snapped {
                Snapped::Cut => Kind::Whole,
                // A file may say what it likes; what no link carries stays as it is.
                Snapped::Pad if wire_len <= LONGEST_FRAME => {
                    self.bytes.resize(frame.at + wire_len, 0);
                    frame.len = wire_len;
                    Kind::Whole
                }
                Snapped::Pad | Snapped::Refuse => Kind::Snapped,
            }
        } else {
            Kind::Whole
        };
        if frame.kind == Kind::Whole && frame.len < HEADER {
            frame.kind = Kind::Short;
        }
    }

    fn is_full(&self) -> bool {
        self.bytes.len() >= PIECE_BYTES || self.frames.len() >= PIECE_FRAMES
    }
}

/// Reads all files as often as they are played and hands them over until nobody wants more. `used`
/// brings pieces back that were played.
pub(super) fn read(order: &Order, to: &SyncSender<Item>, used: &Receiver<Piece>) {
    let mut round = 0;
    while order.rounds.is_none_or(|rounds| round < rounds) {
        for (number, file) in order.files.iter().enumerate() {
            if read_file(order, file, number == 0, to, used).is_none() {
                return;
            }
        }
        if to.send(Item::Round).is_err() {
            return;
        }
        round += 1;
    }
}

/// `None` if nobody wants more.
fn read_file(
    order: &Order,
    file: &File,
    is_first: bool,
    to: &SyncSender<Item>,
    used: &Receiver<Piece>,
) -> Option<()> {
    let fail = |error| to.send(Item::Failed(error)).ok();
    let mut reader = match Reader::open_with(&file.path, &order.keys) {
        Ok(reader) => reader,
        Err(error) => return fail(error),
    };
    let mut begins = is_first || !file.continues;
    loop {
        let mut piece = fresh(used);
        let mut failed = None;
        let mut ended = false;
        while !piece.is_full() {
            match reader.read() {
                Ok(Some(packet)) => {
                    piece.add(&packet, std::mem::take(&mut begins));
                    piece.judge(packet.wire_len as usize, packet.link_type, order.snapped);
                }
                Ok(None) => {
                    ended = true;
                    break;
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        to.send(Item::Piece(piece)).ok()?;
        if let Some(error) = failed {
            return fail(error);
        }
        if ended {
            if let End::Torn(at) = reader.end() {
                to.send(Item::Torn(file.path.clone(), at)).ok()?;
            }
            return Some(());
        }
    }
}

/// An empty piece: one that was played, if there is one.
fn fresh(used: &Receiver<Piece>) -> Piece {
    match used.try_recv() {
        Ok(mut piece) => {
            piece.frames.clear();
            piece.bytes.clear();
            piece
        }
        Err(TryRecvError::Empty | TryRecvError::Disconnected) => Piece::default(),
    }
}

/// Pieces that may wait to be played.
pub(super) const AHEAD: usize = 16;
const PIECE_BYTES: usize = 1 << 20;
const PIECE_FRAMES: usize = 4096;
/// LINKTYPE_ETHERNET.
const ETHERNET: u32 = 1;
/// Destination, source and type: what every Ethernet frame has.
const HEADER: usize = 14;
/// Nothing that sends Ethernet takes more.
const LONGEST_FRAME: usize = 65_536 + 18;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_nobody_can_send_takes_no_room() {
        let long = vec![0; 15 << 20];
        let mut piece = Piece::default();
        for (len, link_type, kind) in [
            (LONGEST_FRAME, 1, Kind::Whole),
            (LONGEST_FRAME + 1, 1, Kind::TooLong),
            (long.len(), 101, Kind::Foreign(101)),
        ] {
            let packet = Packet {
                ts_ns: 0,
                bytes: &long[..len],
                wire_len: len as u32,
                interface: 0,
                link_type,
                flags: 0,
                lost: 0,
                comment: "",
                offset: 0,
            };
            piece.add(&packet, false);
            piece.judge(len, link_type, Snapped::Refuse);
            assert_eq!(piece.frames.last().unwrap().kind, kind);
        }
        assert_eq!(piece.bytes.len(), LONGEST_FRAME);
    }
}
