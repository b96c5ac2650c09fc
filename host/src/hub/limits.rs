//! What those may have who are no operators.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use vnplug_ring::control::{Open, code};

use super::load::{MAX_FIELDS_EACH, MAX_KEYS_EACH};
use super::{Hub, Named, Peer, PortRecord, Programs, Refusal};
use vnplug_os::mappings;

/// Limits that the operator sets.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Ports in all.
    pub ports: usize,
    /// Ports of one user that is no operator, or of one VM.
    pub ports_each: usize,
    /// Bytes of rings of one user that is no operator.
    pub user_bytes: u64,
    /// Bytes of a ring's record area when a reader does not say.
    pub ring_bytes: u64,
    /// The most a reader may ask for.
    pub max_ring_bytes: u64,
}

/// Instructions that a frame of one source may cost at most for the filters and rules of one owner,
/// who is no operator, added up over its queues (`Load`). Everybody's frames wait
/// while a queue's thread runs one reader's filters.
pub const MAX_FILTER_WORK: usize = 16_384;

impl Hub {
    /// Whether somebody who is no operator may open one more port; all readers share the daemon's
    /// ports and the host's memory. `awaited`: ports that they wait for, and their bytes.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn within_limits(
        &self,
        request: &Open,
        owner: &Peer,
        programs: &Programs,
        awaited: (usize, u64),
    ) -> Result<(), Refusal> {
        self.find(&request.device)?;
        let own = || self.ports_of(owner).map(|(_, port)| port);
        let most = self.limits.ports_each;
        if own().count() + awaited.0 >= most {
            let what = format!("{most} ports of yours are open, the limit (max_ports_each)");
            return Err(Refusal::new(code::LIMIT, what));
        }
        if matches!(owner, Peer::Vm(_)) {
            return Ok(());
        }
        let (wanted, mappings) = self.counted(request, owner, programs)?;
        let has: u64 = own().map(|port| port.mappings).sum();
        let most = mappings::most_each();
        if has + mappings > most {
            let what = format!(
                "your rings have {has} of {most} mappings and this port needs {mappings}, two or three \
                 for each queue: open fewer ports or single queues (NAME@Q), or have \
                 vm.max_map_count raised"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        let has = self.bytes_of(owner) + awaited.1;
        let most = self.limits.user_bytes;
        if has + wanted > most {
            let what = format!(
                "your rings have {has} bytes and this port needs {wanted}; the limit is {most} \
                 (max_user_bytes)"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }

    /// Whether so much may wait in a user's channels to back-ends beside its rings.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn bears_windows(&self, owner: &Peer, windows: u64) -> Result<(), Refusal> {
        let (has, most) = (self.bytes_of(owner), self.limits.user_bytes);
        // A guest has few channels, and no limit of bytes.
        if matches!(owner, Peer::Vm(_)) || has + windows <= most {
            return Ok(());
        }
        let what = format!(
            "your rings have {has} bytes, and {windows} may wait in your channels to back-ends with this one; \
             the limit is {most} (max_user_bytes)"
        );
        Err(Refusal::new(code::LIMIT, what))
    }

    /// Bytes of an owner's rings and arenas, also of those that are being freed.
    fn bytes_of(&self, owner: &Peer) -> u64 {
        let own = self.ports_of(owner).map(|(_, port)| port);
        let rings: u64 = own.map(PortRecord::bytes).sum();
        rings + self.arena_bytes(owner) + self.owed(owner)
    }

    /// Whether the filters of somebody who is no operator, with this one, are still bearable for the
    /// other readers of the source. `port` is the one whose filter it replaces.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn bears(
        &mut self,
        device: &str,
        port: Option<u32>,
        owner: &Peer,
        programs: &Programs,
    ) -> Result<(), Refusal> {
        let (source, queues) = match port.and_then(|port| self.ports.get(&port)) {
            Some(record) => (record.source, record.queues.len()),
            None => {
                let Named { source, queue, .. } = self.find(device)?;
                (
                    source,
                    queue.map_or(self.sources[source].workers.len(), |_| 1),
                )
            }
        };
        let record = port.and_then(|port| self.ports.get(&port));
        let old = record.and_then(|record| record.program.clone());
        let rules = self.rules_work(source, owner);
        let each = self.sources[source].workers.len();
        let owned = self.owned.entry(owner.clone()).or_default();
        let load = owned.loads.entry(source).or_default();
        // As it would be; then as it is.
        let before = load.work(each);
        if let Some(old) = &old {
            load.remove(old, queues);
        }
        let others = load.work(each);
        if let Some(new) = &programs.filter {
            load.add(new, queues);
        }
        let (work, keys, fields) = (load.work(each), load.keys, load.fields());
        if let Some(new) = &programs.filter {
            load.remove(new, queues);
        }
        if let Some(old) = &old {
            load.add(old, queues);
        }
        debug_assert_eq!(load.work(each), before);
        if owned.ports.is_empty() {
            self.owned.remove(owner);
        }
        if keys > MAX_KEYS_EACH || fields > MAX_FIELDS_EACH {
            let what = format!(
                "your filters on this source name {keys} values, counted once per queue, in \
                 {fields} places of a frame; the limits are {MAX_KEYS_EACH} and {MAX_FIELDS_EACH}: \
                 use filters that are more alike, or fewer"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        if work + rules > MAX_FILTER_WORK {
            let what = format!(
                "your filters and rules on this source may cost a frame {} instructions and this \
                 filter {} more; the limit is {MAX_FILTER_WORK}: use shorter filters or fewer ports",
                others + rules,
                work - others.min(work)
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }

    /// Bytes of an owner's closed ports that are not freed yet.
    fn owed(&self, owner: &Peer) -> u64 {
        let owed = self.owed.get(owner);
        owed.map_or(0, |owed| owed.load(Ordering::Relaxed))
    }

    /// The ports of an owner.
    pub(super) fn ports_of(&self, owner: &Peer) -> impl Iterator<Item = (u32, &PortRecord)> {
        let ids = self.owned.get(owner).into_iter();
        let ids = ids.flat_map(|owned| &owned.ports);
        ids.filter_map(|id| Some((*id, self.ports.get(id)?)))
    }

    /// The number by which queues' threads know an owner: small, and nobody else's while it has ports.
    pub(super) fn number_of(&self, owner: &Peer) -> u32 {
        if let Some((_, port)) = self.ports_of(owner).next() {
            return port.number;
        }
        let firsts = self.owned.values().filter_map(|it| it.ports.first());
        let ports = firsts.filter_map(|id| self.ports.get(id));
        let taken: BTreeSet<u32> = ports.map(|port| port.number).collect();
        (0..)
            .find(|number| !taken.contains(number))
            .unwrap_or_default()
    }

    /// What the rules of an owner may cost a frame of a source, over all queues.
    fn rules_work(&self, source: usize, owner: &Peer) -> usize {
        let own = self.ports_of(owner).map(|(_, port)| port);
        own.filter(|port| port.source == source)
            .map(|port| port.rules.work() * port.queues.len())
            .sum()
    }

    /// What the filters of an owner may cost a frame of a source, over all queues.
    pub(super) fn filters_work(&self, source: usize, owner: &Peer) -> usize {
        let load = self
            .owned
            .get(owner)
            .and_then(|owned| owned.loads.get(&source));
        load.map_or(0, |load| load.work(self.sources[source].workers.len()))
    }

    /// Notes that a port is there, or is gone.
    pub(super) fn own(&mut self, id: u32, record: &PortRecord, comes: bool) {
        let owned = self.owned.entry(record.owner.clone()).or_default();
        if comes {
            owned.ports.insert(id);
        } else {
            owned.ports.remove(&id);
        }
        if let Some(program) = &record.program {
            let load = owned.loads.entry(record.source).or_default();
            if comes {
                load.add(program, record.queues.len());
            } else {
                load.remove(program, record.queues.len());
            }
        }
        if owned.ports.is_empty() {
            self.owned.remove(&record.owner);
        }
    }
}
