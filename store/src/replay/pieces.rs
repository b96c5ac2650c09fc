//! Frames read ahead by a thread of its own, so that a slow disk delays no frame that is due.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};

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
    /// Reading ends here, too early.
    Failed(ReadError),
    /// All files were played once more.
    Round,
}

impl Piece {
    /// A frame's bytes.
    pub(super) fn bytes(&self, frame: &Frame) -> &[u8] {
        &self.bytes[frame.at..frame.at + frame.len]
    }

    fn add(&mut self, packet: &Packet<'_>, begins: bool) -> Added {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(packet.bytes);
        self.frames.push(Frame {
            recorded_ns: packet.ts_ns,
            kind: Kind::Whole,
            begins,
            at,
            len: packet.bytes.len(),
        });
        Added {
            interface: packet.interface,
            wire_len: packet.wire_len as usize,
        }
    }

    /// Says what the frame that was added last is good for.
    fn judge(&mut self, wire_len: usize, link_type: u32, snapped: Snapped) {
        let Some(frame) = self.frames.last_mut() else {
            return;
        };
        frame.kind = if link_type != ETHERNET {
            Kind::Foreign(link_type)
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

/// What must be known of a packet when it is not lent any more.
struct Added {
    interface: usize,
    wire_len: usize,
}

/// Reads all files `rounds` times (`None`: without end) and hands them over until nobody wants more.
/// `used` brings pieces back that were played.
pub(super) fn read(
    files: &[File],
    rounds: Option<u64>,
    snapped: Snapped,
    to: &SyncSender<Item>,
    used: &Receiver<Piece>,
) {
    let mut round = 0;
    while rounds.is_none_or(|rounds| round < rounds) {
        for (number, file) in files.iter().enumerate() {
            if read_file(file, number == 0, snapped, to, used).is_none() {
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
    file: &File,
    is_first: bool,
    snapped: Snapped,
    to: &SyncSender<Item>,
    used: &Receiver<Piece>,
) -> Option<()> {
    let fail = |error| {
        // NB: if nobody listens any more, nobody needs to know.
        let _ = to.send(Item::Failed(error));
        None
    };
    let mut reader = match Reader::open(&file.path) {
        Ok(reader) => reader,
        Err(error) => return fail(error),
    };
    let mut begins = is_first || !file.continues;
    loop {
        let mut piece = fresh(used);
        let mut failed = None;
        let mut ended = false;
        while !piece.is_full() {
            let added = match reader.read() {
                Ok(Some(packet)) => piece.add(&packet, std::mem::take(&mut begins)),
                Ok(None) => {
                    ended = true;
                    break;
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            let link_type = reader.interfaces()[added.interface].link_type;
            piece.judge(added.wire_len, link_type, snapped);
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
