//! Packets looked at where they lie.

use super::Port;
use super::phase::Standing;
use crate::error::Error;
use vnplug_ring::Look;
use vnplug_ring::layout::Meta;

/// What [`Port::next_view`] found.
#[derive(Debug)]
pub enum NextView<'a> {
    /// A packet, to be looked at until the next call.
    Packet(View<'a>),
    /// Nothing yet; see [`Next::Nothing`](super::Next::Nothing).
    Nothing,
    /// See [`Next::Ended`](super::Next::Ended).
    Ended,
}

/// A packet where it lies. In a group it may be overwritten while it is looked at: nothing that was
/// read may be believed before [`finish`](Self::finish) says that it was whole.
#[derive(Debug)]
pub struct View<'a> {
    port: &'a mut Port,
    look: Look,
}

impl Port {
    /// The next packet where it lies. In a group nothing is copied, unlike by [`next`](Self::next); a
    /// port of its own has the same packets as ever, all of them whole.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn next_view(&mut self) -> Result<NextView<'_>, Error> {
        self.settle_view();
        let found = match self.seek_view()? {
            None => match self.idle()? {
                Standing::Packets => self.seek_view()?,
                Standing::Quiet => None,
                Standing::Ended => return Ok(NextView::Ended),
            },
            found => found,
        };
        Ok(match found {
            Some(look) => NextView::Packet(View { port: self, look }),
            None => NextView::Nothing,
        })
    }

    /// Judges the packet that was looked at, if one is: true if it was whole.
    pub(crate) fn settle_view(&mut self) -> bool {
        let Some(look) = self.looked.take() else {
            return false;
        };
        let whole = self
            .rings
            .get_mut(self.current)
            .is_some_and(|ring| ring.is_whole(&look));
        if whole {
            self.shared.tally.add(&look.meta, look.len as usize);
        } else {
            // The packet itself is told as lost by the next one.
            self.shared.tally.add_overwritten(&look.meta);
        }
        whole
    }

    fn seek_view(&mut self) -> Result<Option<Look>, Error> {
        if matches!(self.phase, super::Phase::Failed(_)) {
            return Ok(None);
        }
        let first = if self.turn == 0 {
            // What was looked at is judged, and its room goes back.
            self.release();
            self.turn = super::TURN;
            1
        } else {
            0
        };
        let count = self.rings.len();
        for step in first..first + count {
            let index = (self.current + step) % count;
            match self.rings[index].look() {
                Ok(Some(look)) => {
                    self.turn = self.turn.saturating_sub(1);
                    (self.current, self.looked) = (index, Some(look));
                    return Ok(Some(look));
                }
                Ok(None) => {}
                Err(_) if self.rings[index].is_beside() => {}
                Err(corrupt) => {
                    self.phase = super::Phase::Failed(corrupt.into());
                    return Err(corrupt.into());
                }
            }
        }
        Ok(None)
    }
}

impl View<'_> {
    /// What the packet's header says; this is true.
    pub fn meta(&self) -> &Meta {
        &self.look.meta
    }

    /// Captured bytes.
    pub fn len(&self) -> u32 {
        self.look.len
    }

    /// True for a packet of no bytes.
    pub fn is_empty(&self) -> bool {
        self.look.len == 0
    }

    /// Copies bytes from `from` on, as many as there are; their number is returned.
    pub fn read(&self, from: u32, into: &mut [u8]) -> usize {
        let ring = self.port.rings.get(self.port.current);
        ring.map_or(0, |ring| ring.read_at(&self.look, from, into))
    }

    /// The address of the first byte, for code that may read memory that changes. Valid as long as
    /// the view.
    pub fn as_ptr(&self) -> *const u8 {
        let ring = self.port.rings.get(self.port.current);
        ring.map_or(std::ptr::null(), |ring| ring.pointer(&self.look))
    }

    /// Whether everything that was read was the packet. If not, it counts as lost. A view that is
    /// dropped instead is judged, for the counters, when the next one is asked for.
    #[must_use = "what was read may be another packet"]
    pub fn finish(self) -> bool {
        self.port.settle_view()
    }
}
