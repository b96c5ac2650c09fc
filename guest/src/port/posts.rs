//! Which packets lie where the host can send them from.

use std::sync::Arc;

use vnplug_ring::control::Message;
use vnplug_ring::layout::Place;
use vnplug_ring::{Consumer, Outlet, Posts, Producer};

use super::Port;
use super::link::Link;
use super::phase::Phase;
use crate::client::done;
use crate::error::Error;

/// The rings whose packets may be posted, as the sending end knows them, by their numbers.
#[derive(Debug)]
pub(super) struct Postable {
    outlet: Arc<Outlet>,
    rings: Vec<Area>,
}

/// The record area of one of them.
#[derive(Debug)]
struct Area {
    /// Its first address.
    base: usize,
    len: usize,
    posts: Arc<Posts>,
}

impl Postable {
    pub(super) fn new(to: &Producer) -> Self {
        Self {
            outlet: Outlet::new(to),
            rings: Vec::new(),
        }
    }

    /// The transmit ring, for who is to keep it until the host reads it no more.
    pub(super) fn outlet(&self) -> Arc<Outlet> {
        Arc::clone(&self.outlet)
    }

    /// Packets of these rings may be posted in `to`, in which they have the numbers from `first` on.
    pub(super) fn add(&mut self, first: usize, rings: &mut [Consumer], to: &Producer) {
        for (number, ring) in (first..).zip(rings) {
            let posts = Posts::new(to, &self.outlet);
            let (base, len) = ring.area();
            ring.hold_for(Arc::clone(&posts));
            let area = Area { base, len, posts };
            match self.rings.get_mut(number) {
                Some(before) => *before = area,
                None => self.rings.push(area),
            }
        }
    }

    /// Where these bytes lie, and the number of the ring.
    #[inline]
    pub(super) fn find(&self, bytes: &[u8]) -> Option<(Place, usize)> {
        let from = bytes.as_ptr().addr();
        self.rings.iter().enumerate().find_map(|(ring, area)| {
            let at = from.checked_sub(area.base)?;
            let last = area.len.checked_sub(bytes.len())?;
            let place = Place {
                ring: ring as u16,
                at: at as u64,
                len: bytes.len() as u32,
            };
            // Where a ring was that is read no more, anything may lie now.
            let is_there = at <= last && !bytes.is_empty() && !area.posts.is_over();
            is_there.then_some((place, ring))
        })
    }

    /// A place of this ring was named up to this position.
    #[inline]
    pub(super) fn note(&self, ring: usize, position: u64) {
        if let Some(area) = self.rings.get(ring) {
            area.posts.note(position);
        }
    }

    /// Whether packets of these rings may be posted.
    fn has(&self, rings: &[Consumer]) -> bool {
        rings.iter().all(|ring| {
            let (base, _) = ring.area();
            let mut areas = self.rings.iter();
            areas.any(|area| area.base == base && !area.posts.is_over())
        })
    }

    /// The first of `count` numbers in a row that no ring has that is still read, nor any record that waits.
    fn free(&self, count: usize) -> usize {
        let is_free = |number: &usize| {
            let areas = self.rings.iter().skip(*number).take(count);
            areas.map(|area| &area.posts).all(|posts| posts.is_free())
        };
        (0..=self.rings.len())
            .find(is_free)
            .unwrap_or(self.rings.len())
    }
}

impl Drop for Postable {
    fn drop(&mut self) {
        // Others are not to touch the ring: its device may be unplugged when the port is closed.
        self.outlet.unmap();
    }
}

impl Port {
    /// What this port receives may be sent on by `to` from where it lies, too: [`Outbox::forward`](super::Outbox::forward) of
    /// that port takes packets that this one has lent. Both are ports of one [`Bundle`](super::Bundle), opened with
    /// [`PortOptions::posts`](crate::PortOptions::posts).
    ///
    /// It lasts until one of them is reopened or closed; then packets of this one are copied, until this is called again, which
    /// costs nothing as long as it lasts. Room goes back to the host when `to` has sent what was posted, so
    /// [`flush`](super::Outbox::flush) it before this port waits. What waits there when this port is closed is
    /// dropped (`send_dropped_place`).
    ///
    /// # Errors
    /// [`Error::Invalid`]: they are not of one bundle, or not opened so. [`Error::Disconnected`] while one of them is away, also
    /// if that is only seen now: the daemon is gone. [`Error::Refused`], or [`Error::Protocol`] by who is too old.
    pub fn lend_to(&mut self, to: &mut Self) -> Result<(), Error> {
        let is_common = match (self.watch.seat(), to.watch.seat()) {
            (Some(own), Some(other)) => Arc::ptr_eq(&own.common, &other.common),
            _ => false,
        };
        if !is_common || !self.options.request.posts || !to.options.request.posts {
            return Err(Error::Invalid(
                "to be lent, both ports are to be of one bundle and opened with `posts`",
            ));
        }
        // A daemon that was killed closes no ring: only its socket tells.
        self.link.iter().for_each(Link::gather);
        self.hear();
        to.hear();
        if !matches!(self.phase, Phase::Live) {
            return Err(Error::Disconnected);
        }
        let outbox = to.present_outbox()?;
        if outbox.postable().has(&self.rings) {
            return Ok(());
        }
        let first = outbox.postable().free(self.rings.len());
        let request = Message::Lend {
            port: self.number,
            to: to.number,
            first: u16::try_from(first).unwrap_or(u16::MAX),
        };
        done(&self.ask(&request)?)?;
        // The answer may have brought news of either.
        to.hear();
        to.present_outbox()?.post_from(first, &mut self.rings)
    }
}

#[cfg(test)]
mod tests;
