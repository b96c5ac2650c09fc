//! The packets that the super-frames of a batch become, made once for all ports that want them.

use std::ops::Range;

use vnplug_frame::Frame;
use vnplug_frame::offload::{Piece, Pieces, work};

/// Packets of the frames of one batch that were left to a NIC.
#[derive(Debug, Default)]
pub struct Cuts {
    pieces: Pieces,
    /// Which packets the frame at each place became, if a port asked.
    made: Vec<Option<Range<usize>>>,
}

impl Cuts {
    /// A new batch begins.
    #[inline]
    pub(crate) fn begin(&mut self) {
        if !self.made.is_empty() {
            self.made.clear();
            self.pieces.clear();
        }
    }

    /// Which packets the frame at `place` becomes. One whose offload does not fit it stays as it is:
    /// a capture shows what came.
    pub(crate) fn of(&mut self, place: usize, frame: &Frame<'_>) -> Range<usize> {
        if self.made.len() <= place {
            self.made.resize(place + 1, None);
        }
        if let Some(made) = &self.made[place] {
            return made.clone();
        }
        let made = match work(frame.bytes, frame.wire_len, &frame.offload) {
            Ok(Some(work)) => self.pieces.make(frame.bytes, frame.wire_len, &work),
            Ok(None) | Err(_) => self.pieces.keep(frame.bytes, frame.wire_len),
        };
        self.made[place] = Some(made.clone());
        made
    }

    /// One of these packets, which `frame` became.
    #[inline]
    pub(crate) fn get<'a>(&'a self, at: usize, frame: &Frame<'a>) -> Piece<'a> {
        self.pieces.get(at, frame.bytes)
    }
}
