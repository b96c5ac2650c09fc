//! How a process lays out a port whose records lie apart from what the reader writes.
//!
//! There are two memories. **Words**: a page for each ring, in turn, then the transmit ring; its
//! reader may write all of it. **Records**: the record area of each ring, in turn; its reader may
//! only read it, so it can neither write nor free what the host writes to.
//!
//! ```text
//! words      page 0 │ page 1 │ transmit ring         records   area 0 │ area 1
//!
//! laid out   … page 0 │ area 0 │ … page 1 │ area 1 │ transmit ring
//! ```
//!
//! So each ring is in one piece, as everywhere else. Areas of [`HUGE`] bytes or more begin at a
//! multiple of it, and the gap before the page is not mapped.

use super::open::{Opened, RingPlace};
use crate::layout::{DATA_OFFSET, MIN_CAPACITY};

/// Bytes of a huge page: areas as large as this, or larger, are aligned to it.
pub const HUGE: u64 = 2 << 20;

/// What determines the layout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// How many rings.
    pub rings: u64,
    /// Bytes of the record area of each, a power of two.
    pub capacity: u64,
    /// Bytes of the transmit ring with its page; 0 = none.
    pub transmit: u64,
}

/// A part of a memory, and where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Bytes from the start of the layout.
    pub at: u64,
    /// It lies in the records' memory, not in the words'.
    pub is_records: bool,
    /// Bytes from the start of that memory.
    pub from: u64,
    /// Bytes of it.
    pub len: u64,
}

impl Shape {
    /// The shape of a port that was opened; `None` if its places are not such a layout.
    pub fn of(opened: &Opened) -> Option<Self> {
        let shape = Self {
            rings: opened.rings.len() as u64,
            capacity: opened.rings.first()?.len.checked_sub(DATA_OFFSET)?,
            transmit: opened.transmit.len,
        };
        let possible = shape.capacity.is_power_of_two()
            && shape.capacity >= MIN_CAPACITY
            && shape.capacity <= u64::MAX >> 16
            && shape.rings < 1 << 12
            && shape.transmit < 1 << 48
            && shape.transmit.is_multiple_of(DATA_OFFSET);
        let as_said = || {
            shape.map_len() == opened.map_len
                && shape.places().eq(opened.rings.iter().copied())
                && (shape.transmit == 0 || shape.transmit_place() == opened.transmit)
        };
        (possible && as_said()).then_some(shape)
    }

    /// Where the layout is to begin: at a multiple of this many bytes.
    pub fn align(&self) -> u64 {
        if self.capacity >= HUGE {
            HUGE
        } else {
            DATA_OFFSET
        }
    }

    /// Bytes of the layout.
    pub fn map_len(&self) -> u64 {
        self.rings * self.stride() + self.transmit
    }

    /// Bytes of the words' memory.
    pub fn words_len(&self) -> u64 {
        self.rings * DATA_OFFSET + self.transmit
    }

    /// Bytes of the records' memory.
    pub fn records_len(&self) -> u64 {
        self.rings * self.capacity
    }

    /// Where each ring lies.
    pub fn places(&self) -> impl Iterator<Item = RingPlace> {
        let Self {
            rings, capacity, ..
        } = *self;
        let (stride, first) = (self.stride(), self.align() - DATA_OFFSET);
        (0..rings).map(move |ring| RingPlace {
            offset: ring * stride + first,
            len: DATA_OFFSET + capacity,
        })
    }

    /// Where the transmit ring lies, if there is one.
    pub fn transmit_place(&self) -> RingPlace {
        RingPlace {
            offset: self.rings * self.stride(),
            len: self.transmit,
        }
    }

    /// What goes where.
    pub fn pieces(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (ring, place) in self.places().enumerate() {
            let ring = ring as u64;
            pieces.push(Piece {
                at: place.offset,
                is_records: false,
                from: ring * DATA_OFFSET,
                len: DATA_OFFSET,
            });
            pieces.push(Piece {
                at: place.offset + DATA_OFFSET,
                is_records: true,
                from: ring * self.capacity,
                len: self.capacity,
            });
        }
        if self.transmit > 0 {
            let place = self.transmit_place();
            pieces.push(Piece {
                at: place.offset,
                is_records: false,
                from: self.rings * DATA_OFFSET,
                len: place.len,
            });
        }
        pieces
    }

    fn stride(&self) -> u64 {
        self.capacity + self.align()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(shape: &Shape) -> Opened {
        Opened {
            port: 1,
            map_len: shape.map_len(),
            rings: shape.places().collect(),
            snaplen: 128,
            link_type: 1,
            device: "host:lab".into(),
            vector: u32::MAX,
            transmit: match shape.transmit {
                0 => RingPlace::default(),
                _ => shape.transmit_place(),
            },
            arenas: super::super::Arenas::default(),
            apart: true,
            board: false,
            memory: 0,
        }
    }

    #[test]
    fn pieces_fill_both_memories_and_never_meet() {
        for capacity in [4096, 1 << 20, HUGE, 1 << 26] {
            for (rings, transmit) in [(1, 0), (3, 0), (2, 12_288)] {
                let shape = Shape {
                    rings,
                    capacity,
                    transmit,
                };
                let (mut end, mut words, mut records) = (0, 0, 0);
                for piece in shape.pieces() {
                    assert!(piece.at >= end);
                    end = piece.at + piece.len;
                    let memory = match piece.is_records {
                        true => &mut records,
                        false => &mut words,
                    };
                    assert_eq!(piece.from, *memory);
                    *memory += piece.len;
                    if piece.is_records && capacity >= HUGE {
                        assert!(piece.at.is_multiple_of(HUGE));
                    }
                }
                assert_eq!(end, shape.map_len());
                assert_eq!((words, records), (shape.words_len(), shape.records_len()));
                assert_eq!(Shape::of(&opened(&shape)), Some(shape));
            }
        }
    }

    #[test]
    fn places_that_are_no_such_layout_are_refused() {
        let shape = Shape {
            rings: 2,
            capacity: 8192,
            transmit: 8192,
        };
        type Change = fn(&mut Opened);
        let changes: [Change; 7] = [
            |it| it.rings[1].offset += 4096,
            |it| it.rings[1].len = u64::MAX,
            |it| it.rings.iter_mut().for_each(|it| it.len = u64::MAX),
            |it| it.rings.iter_mut().for_each(|it| it.len = 100),
            |it| it.rings.clear(),
            |it| it.map_len += 1,
            |it| it.transmit.len = u64::MAX,
        ];
        for change in changes {
            let mut wrong = opened(&shape);
            change(&mut wrong);
            assert_eq!(Shape::of(&wrong), None);
        }
    }
}
