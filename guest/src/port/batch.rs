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
        let now = ring.map(|ring| ring.span(max));
        Self {
            now,
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
                Some(Err(corrupt)) => {
                    self.left = 0;
                    *self.phase = Phase::Failed(corrupt.into());
                    return Some(Err(corrupt.into()));
                }
                None => self.now = Some(self.rings.next()?.batch(self.left)),
            }
        }
        None
    }
}
