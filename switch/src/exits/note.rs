//! Which ports a frame of the batch leaves by, and as what.

use std::ops::Range;

use super::Exits;
use super::due::{Form, Item, pieces_of};
use crate::batch::Entered;
use crate::edits::Forms;
use crate::forward::{Number, Way};
use crate::rules::Edit;

/// What was noted of the frames of a batch.
#[derive(Default)]
pub(crate) struct Noted {
    /// Ports with rings that they are due to.
    pub(crate) rings: u64,
    /// Packets that they became for the other ports, beyond one for each.
    pub(crate) cut: u64,
}

impl Exits {
    /// Forgets what the batch before became.
    pub(crate) fn begin(&mut self) {
        self.pieces.clear();
        self.edits.clear();
    }

    /// A frame of the batch goes this way. Forms of it that are for rings, and are not as it entered, are made.
    #[inline]
    pub(crate) fn note(
        &mut self,
        place: u32,
        it: &Entered<'_>,
        way: &Way,
        dues: &[Number],
        forms: &mut Forms,
        noted: &mut Noted,
    ) {
        if let Some(only) = way.only()
            && let Some(Some(port)) = self.ports.get_mut(usize::from(dues[only]))
        {
            if port.link.is_none() {
                port.count_shown(it, noted);
                return;
            }
            if it.offload.is_none() {
                if port.todo.is_empty() {
                    self.touched.push(dues[only]);
                }
                port.todo.push(Item::whole(place));
                return;
            }
        }
        self.note_any(place, it, way, dues, forms, noted);
    }

    /// As [`note`](Self::note), wherever it goes.
    fn note_any(
        &mut self,
        place: u32,
        it: &Entered<'_>,
        way: &Way,
        dues: &[Number],
        forms: &mut Forms,
        noted: &mut Noted,
    ) {
        // What it becomes for ports that want the packets of the wire.
        let mut made = None;
        for (edit, due) in way.forms() {
            if due.is_empty() {
                continue;
            }
            let rings = noted.rings;
            self.note_form(place, it, &dues[due.clone()], edit, &mut made, noted);
            let is_shown = noted.rings > rings || self.is_read(&dues[due.clone()]);
            if is_shown && edit != Edit::Keep {
                forms.add(it, edit, due);
            }
        }
    }

    /// Whether something was noted for a port.
    pub(crate) fn has_some(&self) -> bool {
        !self.touched.is_empty()
    }

    #[inline]
    fn note_form(
        &mut self,
        place: u32,
        it: &Entered<'_>,
        due: &[Number],
        edit: Edit,
        made: &mut Option<Range<usize>>,
        noted: &mut Noted,
    ) {
        // The frame's other beginning, and those of what it became.
        let (mut whole, mut parts) = (None, None);
        for &number in due {
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            let Some(link) = &port.link else {
                port.count_shown(it, noted);
                continue;
            };
            if port.todo.is_empty() {
                self.touched.push(number);
            }
            let Some(offload) = it
                .offload
                .filter(|offload| !port.kept.leaves(&**link, offload, it.len()))
            else {
                if edit != Edit::Keep && whole.is_none() {
                    whole = Some(self.edits.add(edit, it.bytes, &[], it.offload));
                }
                port.todo.push(Item {
                    edit: whole,
                    ..Item::whole(place)
                });
                continue;
            };
            let pieces = &mut self.pieces;
            let made = made.get_or_insert_with(|| pieces_of(pieces, it.bytes, offload));
            noted.cut += made.len() as u64 - 1;
            if edit != Edit::Keep && parts.is_none() {
                for piece in made.clone() {
                    let piece = self.pieces.get(piece, it.bytes);
                    let part = self.edits.add(edit, piece.head, piece.body, None);
                    parts.get_or_insert(part);
                }
            }
            let items = (0..).zip(made.clone()).map(|(at, piece)| Item {
                place,
                form: Form::Piece(piece as u32),
                edit: parts.map(|first| first + at),
            });
            port.todo.extend(items);
        }
    }

    /// Whether one of these ports is read by itself.
    #[inline]
    fn is_read(&self, due: &[Number]) -> bool {
        self.read.iter().any(|number| due.contains(number))
    }
}
