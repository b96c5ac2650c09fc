//! What a batch has for one port, frame by frame.

use std::ops::Range;

use vnplug_frame::aggregate::{Aggregator, Made};
use vnplug_frame::offload::{self, Pieces};
use vnplug_ring::offload::Offload;

use crate::batch::Entered;
use crate::edits::Edits;
use crate::forward::Number;
use crate::vhost::tail::Tail;

/// A frame of the batch, or what became of it.
#[derive(Clone, Copy)]
pub(super) struct Item {
    pub(super) place: u32,
    pub(super) form: Form,
    /// Its other beginning.
    pub(super) edit: Option<u32>,
}

#[derive(Clone, Copy)]
pub(super) enum Form {
    /// The frame.
    Whole,
    /// A packet that it became.
    Piece(u32),
    /// A super-frame of several.
    Made(Made),
}

impl Item {
    /// The frame at this place of the batch, as it is.
    #[inline]
    pub(super) fn whole(place: u32) -> Self {
        Self {
            place,
            form: Form::Whole,
            edit: None,
        }
    }
}

/// What a batch has for one port, in order.
#[derive(Clone, Copy)]
pub(crate) struct Due<'a> {
    pub(super) todo: &'a [Item],
    pub(super) entered: &'a [Entered<'a>],
    pub(super) pieces: &'a Pieces,
    pub(super) edits: &'a Edits,
    /// Has the super-frames that were made; `None` before.
    pub(super) aggregator: Option<&'a Aggregator>,
}

/// A frame that leaves: its bytes in two parts, or three.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Out<'a> {
    pub(crate) head: &'a [u8],
    pub(crate) body: &'a [u8],
    /// The rest, for a link that [takes](crate::link::Link::takes_tails) such.
    pub(crate) tail: Option<Tail<'a>>,
    /// What is left to do with it, if the link [takes](crate::link::Link::takes) that.
    pub(crate) offload: Option<&'a Offload>,
    /// Its checksum was found right ([`Entered::is_valid`]), and it is as it entered but for its tags.
    pub(crate) is_valid: bool,
    /// The bytes of payload of each segment that it was merged of.
    pub(crate) merged: Option<u16>,
}

/// Frames that go to one port each, as they are.
#[derive(Default)]
pub(crate) struct Wholes {
    /// What each port is to be given; the ports from `used` on are nobody's, and keep their memory.
    ports: Vec<(Number, Vec<Item>)>,
    used: usize,
    pieces: Pieces,
    edits: Edits,
}

impl Wholes {
    /// The frame at this place of the batch goes to this port.
    #[inline]
    pub(crate) fn add(&mut self, to: Number, place: u32) {
        let item = Item::whole(place);
        let used = &mut self.ports[..self.used];
        if let Some((_, todo)) = used.iter_mut().rev().find(|(number, _)| *number == to) {
            return todo.push(item);
        }
        if self.used == self.ports.len() {
            self.ports.push((to, Vec::new()));
        }
        let (number, todo) = &mut self.ports[self.used];
        *number = to;
        todo.push(item);
        self.used += 1;
    }

    /// Gives each port what there is for it of these frames, in order.
    pub(crate) fn give(&mut self, entered: &[Entered<'_>], mut to: impl FnMut(Number, Due<'_>)) {
        for (number, todo) in &mut self.ports[..self.used] {
            to(
                *number,
                Due {
                    todo,
                    entered,
                    pieces: &self.pieces,
                    edits: &self.edits,
                    aggregator: None,
                },
            );
            todo.clear();
        }
        self.used = 0;
    }

    /// Forgets what nobody was given.
    pub(crate) fn clear(&mut self) {
        self.ports.clear();
        self.used = 0;
    }
}

impl Out<'_> {
    /// Bytes of the whole frame.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.body.len() + self.tail.map_or(0, |tail| tail.len())
    }
}

impl<'a> Due<'a> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Out<'a>> + Clone + use<'a> {
        let due = *self;
        due.todo.iter().map(move |item| due.out(item))
    }

    /// What an item is.
    #[inline]
    pub(super) fn out(&self, item: &Item) -> Out<'a> {
        match (item.form, item.edit) {
            (Form::Whole, None) => whole(&self.entered[item.place as usize]),
            _ => self.form(item),
        }
    }

    /// The same, if it is not the frame as it entered.
    fn form(&self, item: &Item) -> Out<'a> {
        let it = &self.entered[item.place as usize];
        let out = match (item.form, self.aggregator) {
            (Form::Made(made), Some(aggregator)) => {
                let (bytes, offload) = aggregator.get(made);
                return Out {
                    head: bytes,
                    body: &[],
                    tail: None,
                    offload: Some(offload),
                    is_valid: false,
                    merged: Some(offload.gso_size),
                };
            }
            (Form::Whole | Form::Made(_), _) => whole(it),
            (Form::Piece(piece), _) => {
                let piece = self.pieces.get(piece as usize, it.bytes);
                Out {
                    head: piece.head,
                    body: piece.body,
                    tail: None,
                    offload: None,
                    is_valid: false,
                    merged: None,
                }
            }
        };
        match item.edit {
            None => out,
            Some(edit) => self.edits.apply(edit, out),
        }
    }
}

/// A frame that leaves as it entered.
#[inline]
fn whole<'a>(it: &Entered<'a>) -> Out<'a> {
    Out {
        head: it.bytes,
        body: &[],
        tail: it.tail,
        offload: it.offload,
        is_valid: it.is_valid,
        merged: None,
    }
}

/// What a frame becomes that was left to a NIC. A lie, which is not expected here, leaves it as it is.
pub(super) fn pieces_of(pieces: &mut Pieces, frame: &[u8], offload: &Offload) -> Range<usize> {
    let len = frame.len() as u32;
    match offload::work(frame, len, offload) {
        Ok(Some(work)) => pieces.make(frame, len, &work),
        _ => pieces.keep(frame, len),
    }
}
