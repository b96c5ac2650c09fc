//! Sources that come and go at run time.
//!
//! A source's place among all is its number, by which ports and queues know it. One that is removed keeps its place, without a
//! name, until the last of its ports is closed; then its threads end, and another one may have the place.

use std::collections::BTreeSet;

use vnplug_path::engine::Worker;
use vnplug_ring::control::code;

use super::{Early, Hub, Refusal, Source};

impl Source {
    /// It was removed: nobody finds it any more.
    pub(crate) fn is_retired(&self) -> bool {
        self.name.is_empty()
    }
}

impl Hub {
    /// The sources that there are, with their places.
    pub(crate) fn present(&self) -> impl Iterator<Item = (usize, &Source)> {
        let sources = self.sources.iter().enumerate();
        sources.filter(|(_, source)| !source.is_retired())
    }

    /// The place that the next source will have.
    ///
    /// # Errors
    /// [`Refusal`] if there are as many as have numbers.
    pub(crate) fn next_place(&self) -> Result<u16, Refusal> {
        let is_free = |place: &usize| {
            self.sources
                .get(*place)
                .is_none_or(|it| self.is_over(*place, it))
        };
        let place = (0..=self.sources.len()).find(is_free);
        place
            .and_then(|place| u16::try_from(place).ok())
            .ok_or_else(|| Refusal::new(code::LIMIT, "there are 65,536 sources; remove some"))
    }

    /// Nothing is left of a source that was removed.
    fn is_over(&self, place: usize, source: &Source) -> bool {
        source.is_retired() && source.workers.is_empty() && self.has_let_go(place, source)
    }

    fn has_let_go(&self, place: usize, source: &Source) -> bool {
        source.closing == 0
            && self.ports.values().all(|port| port.source != place)
            && !self.has_host_group_of(place)
    }

    /// Adds a source that was started with this place.
    pub(crate) fn add_at(&mut self, place: u16, source: Source) {
        let place = usize::from(place);
        self.last.retain(|(it, _), _| *it != place);
        self.twins.forget_place(place);
        match self.sources.get_mut(place) {
            Some(it) => *it = source,
            None => self.sources.push(source),
        }
        self.settle_early(place);
    }

    /// Whether a source can be removed while the daemon runs.
    ///
    /// # Errors
    /// [`Refusal`]: its packet memory is mapped by others.
    pub(crate) fn may_retire(&self, place: usize) -> Result<(), Refusal> {
        let source = &self.sources[place];
        let lends = source.lent.as_ref().is_some_and(|lent| !lent.is_empty());
        if lends || self.has_host_group_of(place) {
            let what = format!(
                "groups read the packet memory of {:?}, which stays as long as the daemon does: take it out of the configuration and \
                 start the daemon again",
                source.name
            );
            return Err(Refusal::new(code::INVALID, what));
        }
        Ok(())
    }

    /// Nobody finds this source from now on; its ports are to be closed.
    pub(crate) fn retire(&mut self, place: usize) -> Vec<u32> {
        let source = &mut self.sources[place];
        self.twins.forget_source(&source.name);
        source.name.clear();
        source.board = None;
        let ports = self.ports.iter();
        let own = ports.filter(|(_, port)| port.source == place);
        own.map(|(id, _)| *id).collect()
    }

    /// The threads of removed sources whose ports are closed, to be ended.
    pub(crate) fn take_idle(&mut self) -> Vec<Worker> {
        let waits = |it: &Source| it.is_retired() && !it.workers.is_empty();
        if !self.sources.iter().any(waits) {
            return Vec::new();
        }
        let left: BTreeSet<usize> = self.ports.values().map(|port| port.source).collect();
        let sources = self.sources.iter_mut().enumerate();
        let idle = sources.filter(|(place, source)| {
            source.is_retired() && source.closing == 0 && !left.contains(place)
        });
        idle.flat_map(|(_, source)| {
            // Descriptors that nobody needs any more.
            (source.interface, source.lent) = (None, None);
            source.early = Early::new(Err(None), &[]);
            std::mem::take(&mut source.workers)
        })
        .collect()
    }
}
