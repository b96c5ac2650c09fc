//! Several packets lent at once.

use std::iter::Chain;
use std::slice::IterMut;

use vnplug_ring::{Consumer, Packet};

use super::asker::Tally;
use super::phase::Phase;
use crate::error::Error;

/// Packets that were published when the batch was begun; see [`Port::batch`](super::Port::batch) and
/// [`Port::span`](super::Port::span).
#[derive(Debug)]
pub struct Batch<'a> {
    rings: Chain<IterMut<'a, Consumer>, IterMut<'a, Consumer>>,
    now: Option<vnplug_ring::Batch<'a>>,
    /// Another member writes the present ring.
    is_beside: bool,
    left: usize,
    counts: &'a Tally,
    phase: &'a mut Phase,
}

impl<'a> Batch<'a> {
    pub(super) fn new(
        from: &'a mut [Consumer],
        before: &'a mut [Consumer],
        max: usize,
        counts: &'a Tally,
        phase: &'a mut Phase,
    ) -> Self {
        let rings = from.iter_mut().chain(before.iter_mut());
        Self {
            rings,
            now: None,
            is_beside: false,
            left: max,
            counts,
            phase,
        }
    }

    /// Up to `max` packets of this ring, in one piece.
    pub(super) fn span(
        ring: Option<&'a mut Consumer>,
        max: usize,
        counts: &'a Tally,
        phase: &'a mut Phase,
    ) -> Self {
        let is_beside = ring.as_ref().is_some_and(|ring| ring.is_beside());
        let now = ring.map(|ring| ring.span(max));
        Self {
            now,
            is_beside,
            ..Self::new(&mut [], &mut [], max, counts, phase)
        }
    }
}

impl<'a> Iterator for Batch<'a> {
    type Item = Result<Packet<'a>, Error>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        while self.left > 0 {
            match self.now.as_mut().and_then(Iterator::next) {
                Some(Ok(packet)) => {
                    self.left -= 1;
                    self.counts.add(&packet.meta, packet.bytes.len());
                    return Some(Ok(packet));
                }
                // That member's ring is over, and not the port.
                Some(Err(_)) if self.is_beside => self.now = None,
                Some(Err(corrupt)) => {
                    self.left = 0;
                    *self.phase = Phase::Failed(corrupt.into());
                    return Some(Err(corrupt.into()));
                }
                None => {
                    let ring = self.rings.next()?;
                    self.is_beside = ring.is_beside();
                    self.now = Some(ring.batch(self.left));
                }
            }
        }
        None
    }
}
