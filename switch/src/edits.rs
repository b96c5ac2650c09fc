//! Frames in another form: a VLAN tag taken off, put on or changed. Only the begin of a frame is written again.

use std::ops::Range;

use vnplug_frame::segment::HEADERS;
use vnplug_ring::offload::{Offload, flags};

use crate::batch::Entered;
use crate::exits::Out;
use crate::rules::Edit;

/// Other beginnings of the frames of a batch, and of what super-frames became.
#[derive(Default)]
pub(crate) struct Edits {
    heads: Vec<u8>,
    all: Vec<Edited>,
}

struct Edited {
    head: Range<usize>,
    /// Where the frame goes on, if it has one part only.
    rest: usize,
    offload: Offload,
}

impl Edits {
    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.heads.clear();
        self.heads.shrink_to(KEPT);
        self.all.clear();
        self.all.shrink_to(KEPT / size_of::<Edited>());
    }

    /// Makes the beginning of a frame with these parts; its number. The frame has both addresses and what
    /// the edit takes off, or it would not be due.
    pub(crate) fn add(
        &mut self,
        edit: Edit,
        head: &[u8],
        body: &[u8],
        offload: Option<&Offload>,
    ) -> u32 {
        let begin = self.heads.len();
        let rest = put(&mut self.heads, edit, head);
        // All headers, by which a flow is told; what comes in two parts has little more in the first.
        let more = head.get(rest..).unwrap_or_default();
        let more = match body.is_empty() {
            true => &more[..more.len().min(HEADERS)],
            false => more,
        };
        self.heads.extend_from_slice(more);
        let rest = rest + more.len();
        self.all.push(Edited {
            head: begin..self.heads.len(),
            rest,
            offload: shifted(edit, offload.copied().unwrap_or_default()),
        });
        self.all.len() as u32 - 1
    }

    /// The frame with another beginning.
    #[inline]
    pub(crate) fn apply<'a>(&'a self, edit: u32, out: Out<'a>) -> Out<'a> {
        let edited = &self.all[edit as usize];
        Out {
            head: &self.heads[edited.head.clone()],
            body: match out.body.is_empty() {
                true => out.head.get(edited.rest..).unwrap_or_default(),
                false => out.body,
            },
            tail: out.tail,
            offload: out.offload.map(|_| &edited.offload),
            is_valid: out.is_valid,
            merged: out.merged,
        }
    }
}

/// Whole frames in another form, for rings.
#[derive(Default)]
pub(crate) struct Forms {
    bytes: Vec<u8>,
    all: Vec<Form>,
}

/// One of them.
pub(crate) struct Form {
    bytes: Range<usize>,
    pub(crate) offload: Option<Offload>,
    /// Places among the ports that are due.
    pub(crate) due: Range<usize>,
}

impl Forms {
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        self.all.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Makes a form of a frame, for these ports.
    #[cold]
    pub(crate) fn add(&mut self, it: &Entered<'_>, edit: Edit, due: Range<usize>) {
        let begin = self.bytes.len();
        let rest = put(&mut self.bytes, edit, it.bytes);
        self.bytes
            .extend_from_slice(it.bytes.get(rest..).unwrap_or_default());
        self.all.push(Form {
            bytes: begin..self.bytes.len(),
            offload: it.offload.map(|offload| shifted(edit, *offload)),
            due,
        });
    }

    /// All of them, with their bytes.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&[u8], &Form)> {
        let all = self.all.iter();
        all.map(|form| (&self.bytes[form.bytes.clone()], form))
    }
}

/// Appends the addresses and the tag that a frame begins with; says where it goes on.
fn put(into: &mut Vec<u8>, edit: Edit, head: &[u8]) -> usize {
    let (tci, rest) = match edit {
        Edit::Keep => (None, ADDRESSES),
        Edit::Pop => (None, ADDRESSES + TAG),
        Edit::Push(tci) => (Some(tci), ADDRESSES),
        Edit::Set(tci) => (Some(tci), ADDRESSES + TAG),
    };
    into.extend_from_slice(head.get(..ADDRESSES).unwrap_or(head));
    if let Some(tci) = tci {
        // IEEE 802.1Q-2018, 9.5.
        into.extend_from_slice(&[0x81, 0x00]);
        into.extend_from_slice(&tci.to_be_bytes());
    }
    rest
}

/// What is left to do with a frame whose headers are elsewhere now.
fn shifted(edit: Edit, mut offload: Offload) -> Offload {
    let shift = |at: u16| match edit {
        Edit::Keep | Edit::Set(_) => at,
        Edit::Pop => at.saturating_sub(TAG as u16),
        Edit::Push(_) => at.saturating_add(TAG as u16),
    };
    if offload.flags & flags::NEEDS_CSUM != 0 {
        offload.csum_start = shift(offload.csum_start);
    }
    offload
}

/// Bytes of both addresses, and of a tag.
const ADDRESSES: usize = 12;
const TAG: usize = 4;
/// Bytes that are kept from batch to batch.
const KEPT: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_comes_and_goes_and_the_checksums_place_with_it() {
        let mut tagged: Vec<u8> = (0..12).collect();
        tagged.extend([0x81, 0, 0x20, 5, 8, 0, 1, 2, 3]);
        let mut plain = tagged.clone();
        plain.drain(12..16);
        let offload = Offload {
            flags: flags::NEEDS_CSUM,
            csum_start: 34,
            csum_offset: 16,
            ..Offload::default()
        };
        let mut changed = tagged.clone();
        changed[14..16].copy_from_slice(&[0xe0, 7]);
        for (edit, from, to, shift) in [
            (Edit::Pop, &tagged, &plain, -4),
            (Edit::Push(0x2005), &plain, &tagged, 4),
            (Edit::Set(0xe007), &tagged, &changed, 0),
        ] {
            let mut edits = Edits::default();
            for cut in [from.len(), 16] {
                let (head, body) = from.split_at(cut);
                let at = edits.add(edit, head, body, Some(&offload));
                let out = Out {
                    head,
                    body,
                    tail: None,
                    offload: Some(&offload),
                    is_valid: false,
                    merged: None,
                };
                let out = edits.apply(at, out);
                assert_eq!([out.head, out.body].concat(), *to);
                let moved = out.offload.unwrap();
                assert_eq!(i32::from(moved.csum_start), 34 + shift);
            }
            let mut forms = Forms::default();
            let entered = Entered {
                from: 1,
                bytes: from,
                tail: None,
                offload: Some(&offload),
                is_valid: false,
                fault: None,
            };
            forms.add(&entered, edit, 0..1);
            assert!(forms.iter().all(|(bytes, _)| bytes == to));
        }
    }
}
