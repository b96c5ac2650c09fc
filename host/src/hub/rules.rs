//! The ports' filtering rules, as the control thread knows them: how many there are, and what they
//! may cost. The rules themselves are the queues' threads' (`vnplug_path::rules`).

use std::collections::BTreeSet;
use std::time::Duration;

use vnplug_ring::control::{Counted, MAX_EXACT_RULES, MAX_WILDCARD_RULES, Message, RuleKind, code};

use super::asking::Heard;
use super::{Hub, MAX_FILTER_WORK, Owed, Peer, PortRecord, Refusal, Step};
use vnplug_path::engine::Command;
use vnplug_path::rules::{Change, Changed, Key, Prepared, Room};

/// How many rules a port has, and what for.
#[derive(Debug, Clone, Copy)]
pub struct RuleBook {
    /// Exact rules.
    pub exact: usize,
    /// Wildcard rules.
    pub wildcard: usize,
    /// What no rule decides is accepted.
    pub accept: bool,
    /// Exact and wildcard rules for which each queue has memory.
    pub(super) room: (usize, usize),
}

/// Exact rules of one owner, who is no operator, in all, times queues: each takes 136 bytes, up to
/// four times that while many are removed.
pub const MAX_EXACT_EACH: usize = 262_144;
/// What any rules cost per frame, in instructions of a filter: the frame is parsed and looked up.
const RULES_WORK: usize = 32;
/// What each wildcard rule costs per frame, in instructions of a filter.
const WILDCARD_WORK: usize = 3;

impl Default for RuleBook {
    fn default() -> Self {
        Self {
            exact: 0,
            wildcard: 0,
            accept: true,
            room: (0, 0),
        }
    }
}

impl RuleBook {
    /// What they cost per frame at most, in instructions of a filter.
    pub(super) fn work(&self) -> usize {
        match (self.exact, self.wildcard) {
            (0, 0) => 0,
            (_, wildcard) => RULES_WORK + wildcard * WILDCARD_WORK,
        }
    }

    /// Rules of a kind for which each queue has memory.
    pub(crate) fn room(&self, kind: RuleKind) -> usize {
        match kind {
            RuleKind::Exact => self.room.0,
            RuleKind::Wildcard => self.room.1,
        }
    }

    /// Adds what there is to tell to a port's counters.
    pub(super) fn tell(&self, counted: &mut Counted) {
        let accept = if self.accept { "accept" } else { "drop" };
        counted.labels.push(("rule_default".into(), accept.into()));
        counted.values.extend([
            ("exact_rules".into(), self.exact as u64),
            ("wildcard_rules".into(), self.wildcard as u64),
        ]);
    }

    fn forget(&mut self, removed: (usize, usize)) {
        self.exact = self.exact.saturating_sub(removed.0);
        self.wildcard = self.wildcard.saturating_sub(removed.1);
    }
}

impl Hub {
    /// Adds rules to a port, or none of them. The limits of what an owner may have are checked for
    /// `owner`, if it is no operator. A rule that replaces another counts as one more here.
    ///
    /// # Errors
    /// [`Refusal`] that names the limit.
    pub(crate) fn add_rules(
        &mut self,
        id: u32,
        rules: &Prepared,
        owner: Option<&Peer>,
    ) -> Result<Step, Refusal> {
        let Some(record) = self.ports.get(&id) else {
            return Err(gone(id));
        };
        let (exact, wildcard) = rules.len();
        let wanted = RuleBook {
            exact: record.rules.exact + exact,
            wildcard: record.rules.wildcard + wildcard,
            ..record.rules
        };
        for (has, most, kind) in [
            (wanted.exact, MAX_EXACT_RULES, "exact"),
            (wanted.wildcard, MAX_WILDCARD_RULES, "wildcard"),
        ] {
            if has > most {
                let what = format!("a port has at most {most} {kind} rules; remove some");
                return Err(Refusal::new(code::LIMIT, what));
            }
        }
        if let Some(owner) = owner {
            self.bears_rules(id, record, owner, &wanted)?;
        }
        let mut room = record.rules.room;
        let before = room;
        let owed = self.change(id, || {
            room = before;
            let larger = Room::beyond(&mut room, (wanted.exact, wanted.wildcard));
            Change::Add(rules.clone(), larger)
        });
        // Until the threads have answered, all are counted: what an owner adds elsewhere meanwhile
        // is checked against them.
        if let Some(record) = self.ports.get_mut(&id) {
            record.rules.room = room;
            record.rules.exact += exact;
            record.rules.wildcard += wildcard;
        }
        Ok(Step::after(owed, move |hub, heard| {
            let refused: usize = heard.iter().flatten().map(|changed| changed.refused).sum();
            // All queues have the same rules. Of one that does not answer all may be there.
            let added = heard.iter().flatten().next().map(|changed| changed.added);
            if let (Some(record), Some(added)) = (hub.ports.get_mut(&id), added) {
                record.rules.forget((
                    exact.saturating_sub(added.0),
                    wildcard.saturating_sub(added.1),
                ));
            }
            hub.fit_room(id, move || {
                if refused > 0 {
                    let what = format!("no room was made for {refused} rules; please report this");
                    return Step::Done(Err(Refusal::new(code::INTERNAL, what)));
                }
                Step::done_if(heard)
            })
        }))
    }

    /// Removes a rule; refused if there is none.
    pub(crate) fn remove_rule(&mut self, id: u32, key: Key) -> Step {
        self.remove_all(id, vec![key], move |removed| match removed {
            (0, 0) => Err(no_rule(key)),
            _ => Ok(Message::Done),
        })
    }

    /// Removes the rules of a kind that are idle in every queue of a port, and names them.
    pub(crate) fn purge_rules(&mut self, id: u32, kind: RuleKind, idle: Duration) -> Step {
        let Some(record) = self.ports.get(&id) else {
            return Step::Done(Ok(Message::Purged(Vec::new())));
        };
        let most = match kind {
            RuleKind::Exact => record.rules.exact,
            RuleKind::Wildcard => record.rules.wildcard,
        };
        let idle_us = u64::try_from(idle.as_micros()).unwrap_or(u64::MAX);
        let owed = self.change(id, || Change::Idle(kind, idle_us, Vec::with_capacity(most)));
        Step::after(owed, move |hub, heard| {
            let sets: Result<Vec<Changed>, _> = heard.into_iter().collect();
            let sets = match sets {
                Ok(sets) => sets.into_iter().map(|changed| changed.idle),
                // What is idle there is not known: none is removed.
                Err(missing) => {
                    return Step::Done(Err(Refusal::new(code::UNAVAILABLE, missing.complaint)));
                }
            };
            let keys = sets.reduce(|all, more| {
                let more: BTreeSet<Key> = more.into_iter().collect();
                all.into_iter().filter(|key| more.contains(key)).collect()
            });
            let keys = keys.unwrap_or_default();
            let named = keys.iter().copied().map(Key::named).collect();
            hub.remove_all(id, keys, |_| Ok(Message::Purged(named)))
        })
    }

    /// Says what becomes of frames that no rule decides.
    pub(crate) fn rule_default(&mut self, id: u32, accept: bool) -> Step {
        if let Some(record) = self.ports.get_mut(&id) {
            record.rules.accept = accept;
        }
        let owed = self.change(id, || Change::Default(accept));
        Step::after(owed, |_, heard| Step::done_if(heard))
    }

    /// How often a rule matched, and how long ago; refused if there is none.
    pub(crate) fn rule_hits(&self, id: u32, key: Key) -> Step {
        let owed = self.change(id, || Change::Ask(key));
        Step::after(owed, move |_, heard| {
            let answers: Result<Vec<Changed>, _> = heard.into_iter().collect();
            let hits = match answers {
                Ok(answers) => answers.into_iter().filter_map(|changed| changed.hits),
                Err(missing) => {
                    return Step::Done(Err(Refusal::new(code::UNAVAILABLE, missing.complaint)));
                }
            };
            let hits = hits.reduce(|all, more| (all.0 + more.0, all.1.min(more.1)));
            let told = hits.map(|(matched, idle_us)| Message::RuleCounters {
                matched,
                idle_ms: idle_us / 1000,
            });
            Step::Done(told.ok_or_else(|| no_rule(key)))
        })
    }

    /// Removes rules, and answers by how many exact and wildcard rules these were.
    fn remove_all(
        &mut self,
        id: u32,
        keys: Vec<Key>,
        answer: impl FnOnce((usize, usize)) -> Result<Message, Refusal> + 'static,
    ) -> Step {
        let owed = self.change(id, || Change::RemoveAll(keys.clone()));
        Step::after(owed, move |hub, heard| {
            // Of a queue that does not answer they may be there still.
            let answers: Result<Vec<Changed>, _> = heard.into_iter().collect();
            let answers = match answers {
                Ok(answers) => answers,
                Err(missing) => return Step::Done(Err(missing.refusal())),
            };
            let removed = answers.first().map_or((0, 0), |changed| changed.removed);
            if let Some(record) = hub.ports.get_mut(&id) {
                record.rules.forget(removed);
            }
            hub.fit_room(id, move || Step::Done(answer(removed)))
        })
    }

    /// Gives back memory of rules that are not there any more, or were named twice: an owner's
    /// memory is bounded by the number of rules.
    fn fit_room(&mut self, id: u32, then: impl FnOnce() -> Step + 'static) -> Step {
        let Some(record) = self.ports.get(&id) else {
            return then();
        };
        let (before, needed) = (
            record.rules.room,
            (record.rules.exact, record.rules.wildcard),
        );
        let mut fit = before;
        let Some(first) = Room::within(&mut fit, needed) else {
            return then();
        };
        let mut first = Some(first);
        let owed = self.change(id, || {
            let room = first
                .take()
                .or_else(|| Room::within(&mut { before }, needed));
            Change::Add(Prepared::default(), room.unwrap_or_default())
        });
        if let Some(record) = self.ports.get_mut(&id) {
            record.rules.room = fit;
        }
        // The answers bring the memory that is to be freed here.
        Step::after(owed, |_, _: Vec<Heard<Changed>>| then())
    }

    /// Has every queue of a port change its rules.
    fn change(&self, id: u32, mut change: impl FnMut() -> Change) -> Vec<Owed<Changed>> {
        let ask = |line| Owed::ask(line, |reply| Command::Rules(id, change(), reply));
        self.lines_of(id).into_iter().map(ask).collect()
    }

    /// Whether somebody's rules are still bearable for the others: for the readers of the source,
    /// whose frames wait while rules are tried, and for the daemon's memory.
    fn bears_rules(
        &self,
        id: u32,
        record: &PortRecord,
        owner: &Peer,
        wanted: &RuleBook,
    ) -> Result<(), Refusal> {
        let others = || {
            let own = self.ports_of(owner).filter(move |(other, _)| *other != id);
            own.map(|(_, port)| port)
        };
        let queues = record.queues.len();
        let exact: usize = others().map(|it| it.rules.exact * it.queues.len()).sum();
        if exact + wanted.exact * queues > MAX_EXACT_EACH {
            let what = format!(
                "your other ports have {exact} exact rules, counted once per queue, and this one \
                 wants {}; the limit is {MAX_EXACT_EACH}: remove some or open one queue",
                wanted.exact * queues
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        let same = others().filter(|port| port.source == record.source);
        let work: usize = same.map(|port| port.rules.work() * port.queues.len()).sum();
        let work = work + self.filters_work(record.source, owner);
        let wanted = wanted.work() * queues;
        if work + wanted > MAX_FILTER_WORK {
            let what = format!(
                "your filters and other rules on this source may cost a frame {work} instructions \
                 and these rules {wanted} ({WILDCARD_WORK} for each wildcard rule, times queues); the limit is \
                 {MAX_FILTER_WORK}: use fewer wildcard rules or exact ones"
            );
            return Err(Refusal::new(code::LIMIT, what));
        }
        Ok(())
    }
}

fn no_rule(key: Key) -> Refusal {
    Refusal::new(code::NOT_FOUND, format!("no such rule: {:?}", key.named()))
}

fn gone(id: u32) -> Refusal {
    Refusal::new(code::NOT_FOUND, format!("port {id} is closed"))
}
