//! Taking from open ports what their owners may no longer have.
//!
//! A queue's thread obeys between two batches, so what is taken ends at an exact frame: nothing that comes
//! later is judged by the old grant, and nothing that waits in a transmit ring is sent. What was published
//! before stays readable: its reader has the memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use vnplug_ring::control::{Whose, code};

use super::policy::{Policy, Sight};
use super::{Hub, Owed, Peer, PortRecord, Refusal, Step};
use vnplug_filter::Program;
use vnplug_filter::ebpf::Wanted;
use vnplug_path::engine::Command;
use vnplug_path::engine::terms::Terms;

/// By which grants a port is open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Granted {
    /// The operator's filter, as text; empty = none. Of a member of a switch nothing.
    pub sight: String,
    /// What the grant says by which it takes part in a switch.
    pub join: Option<String>,
    /// The terms on which it sends.
    pub terms: String,
}

/// What an operator took from a port's owner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Revoked {
    /// Nothing is received by it any more.
    pub receiving: bool,
    /// Nothing is sent for it any more.
    pub sending: bool,
}

impl Revoked {
    /// All that there is.
    pub(crate) const WHOLE: Self = Self {
        receiving: true,
        sending: true,
    };

    /// As the port's label says it.
    pub(super) fn text(self) -> Option<&'static str> {
        match (self.receiving, self.sending) {
            (false, false) => None,
            (true, false) => Some("an operator revoked receiving"),
            (false, true) => Some("an operator revoked sending"),
            (true, true) => Some("an operator revoked the port"),
        }
    }
}

/// What becomes of an open port by other grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing.
    Keep,
    /// It goes on by these.
    Change(Granted, Revoked),
}

/// What a port is to be judged by from now on.
pub(crate) struct NewGrant {
    pub(crate) port: u32,
    pub(crate) granted: Granted,
    /// The operator's filter, compiled.
    pub(crate) guard: Option<Arc<Program>>,
    /// The terms on which it sends.
    pub(crate) terms: Arc<Terms>,
}

impl Hub {
    /// The ports that an operator means.
    ///
    /// # Errors
    /// There is nothing of that name.
    pub(crate) fn meant(&self, whose: &Whose) -> Result<Vec<u32>, Refusal> {
        let named = match whose {
            Whose::Port(port) if !self.ports.contains_key(port) => {
                let what = format!("there is no port {port}; `vnplug stats` shows the ports");
                return Err(Refusal::new(code::NOT_FOUND, what));
            }
            Whose::Source(name) => Some(self.find(name)?),
            _ => None,
        };
        let is_meant = |id: u32, it: &PortRecord| match whose {
            Whose::Port(port) => id == *port,
            Whose::User(uid) => it.owner == Peer::User(*uid),
            Whose::Vm(name) => matches!(&it.owner, Peer::Vm(own) if own == name),
            Whose::Group(name) => it.group.as_ref().is_some_and(|key| key.name == *name),
            Whose::Channels { .. } => false,
            Whose::Source(_) => named.is_some_and(|named| {
                let port = it.member.or(it.only);
                it.source == named.source
                    && named.port.is_none_or(|only| port == Some(only))
                    && named.queue.is_none_or(|queue| it.queues == [queue])
            }),
        };
        let ports = self.ports.iter();
        let ports = ports.filter(|(id, record)| is_meant(**id, record));
        Ok(ports.map(|(id, _)| *id).collect())
    }

    /// Tells the threads to end what is taken of a port. True: nothing of it is left.
    pub(crate) fn revoke(&mut self, id: u32, what: Revoked, owed: &mut Vec<Owed<()>>) -> bool {
        // Others of its trust group write to it, and it to them, past the threads.
        self.leave_direct(id);
        let Some(record) = self.ports.get_mut(&id) else {
            return false;
        };
        let sends = record.transmit > 0;
        let receiving = what.receiving && !record.revoked.receiving;
        let sending = what.sending && sends && !record.revoked.sending;
        record.revoked.receiving |= receiving;
        record.revoked.sending |= sending;
        let is_over = record.revoked.receiving && (record.revoked.sending || !sends);
        let nothing = receiving.then(|| Arc::new(Program::accept(0)));
        for (at, &queue) in record.queues.iter().enumerate() {
            let line = self.sources[record.source].workers[queue].line();
            // The thread of its first queue serves its transmit ring.
            let sending = sending && at == 0;
            if receiving || sending {
                let nothing = nothing.clone();
                owed.push(Owed::ask(line, |reply| {
                    Command::Revoke(id, nothing, sending, reply)
                }));
            }
        }
        if let Some(nothing) = nothing {
            let source = record.source;
            let (guard, filter) = (Some(nothing), record.program.clone());
            record.guard.clone_from(&guard);
            let wanted = self.will_want(source, guard.as_ref(), filter.as_ref());
            if let Some(record) = self.ports.get_mut(&id) {
                let before = std::mem::replace(&mut record.wanted, wanted);
                self.wants_no_more(source, &before);
            }
        }
        is_over
    }

    /// What becomes of each open port whose owner is no operator by these grants; `attached` are those
    /// given with each VM's attachment. Only those of which something becomes.
    pub(crate) fn verdicts(
        &self,
        policy: &Policy,
        attached: impl Fn(&Peer) -> Vec<vnplug_ring::control::Grant>,
    ) -> BTreeMap<u32, (Granted, Revoked)> {
        let verdict = |(id, record): (&u32, &PortRecord)| {
            let verdict = self.verdict(record, policy, &attached(&record.owner));
            match verdict {
                Verdict::Keep => None,
                Verdict::Change(granted, revoked) => Some((*id, (granted, revoked))),
            }
        };
        self.ports.iter().filter_map(verdict).collect()
    }

    fn verdict(
        &self,
        record: &PortRecord,
        policy: &Policy,
        attached: &[vnplug_ring::control::Grant],
    ) -> Verdict {
        let granted = &record.granted;
        if policy.is_operator(&record.owner) {
            return Verdict::Keep;
        }
        let name = &self.sources[record.source].name;
        let whole = || Verdict::Change(granted.clone(), Revoked::WHOLE);
        if record.member.is_some() {
            match policy.may_join(&record.owner, name) {
                // It may come again, on the new terms.
                join if join.map(|it| &it.settings) != granted.join.as_ref() => return whole(),
                Some(_) => return Verdict::Keep,
                None if policy.joiners(name).next().is_some() => return whole(),
                None => {}
            }
        }
        let sight = policy.sight_of(&record.owner, (name, record.only), attached);
        let Sight::Through(sight) = sight else {
            return whole();
        };
        let mut new = granted.clone();
        let mut revoked = Revoked::default();
        if sight.trim() != granted.sight.trim() {
            // What one member of a group may see all may.
            if record.group.is_some() {
                return whole();
            }
            new.sight = sight;
        }
        if record.transmit > 0 {
            match policy.may_send(&record.owner, name) {
                None => revoked.sending = true,
                Some(terms) => terms.clone_into(&mut new.terms),
            }
        }
        let is_same = new == *granted && (!revoked.sending || record.revoked.sending);
        match is_same {
            true => Verdict::Keep,
            false => Verdict::Change(new, revoked),
        }
    }

    /// Has ports judged by other grants. Done means: no frame is judged by the old ones any more.
    pub(crate) fn regrant(&mut self, grants: Vec<NewGrant>, ended: Vec<Owed<()>>) -> Step {
        let (mut owed, mut before) = (Vec::new(), Vec::new());
        let mut sent = Vec::new();
        for new in grants {
            let Some(record) = self.ports.get_mut(&new.port) else {
                continue;
            };
            let is_like = record.granted.sight == new.granted.sight;
            let has_terms = record.granted.terms == new.granted.terms;
            record.granted = new.granted;
            if record.transmit > 0 && !has_terms {
                let line = self.sources[record.source].workers[record.queues[0]].line();
                sent.push(Owed::ask(line, |reply| {
                    Command::Terms(new.port, new.terms, reply)
                }));
            }
            if is_like || record.revoked.receiving {
                continue;
            }
            record.guard.clone_from(&new.guard);
            let (source, filter) = (record.source, record.program.clone());
            let wanted = self.will_want(source, new.guard.as_ref(), filter.as_ref());
            if let Some(record) = self.ports.get_mut(&new.port) {
                let old: Wanted = std::mem::replace(&mut record.wanted, wanted);
                before.push((source, old));
            }
            for line in self.lines_of(new.port) {
                let guard = new.guard.clone();
                owed.push(Owed::ask(line, |reply| {
                    Command::Guard(new.port, guard, reply)
                }));
            }
        }
        Step::after(owed, move |hub, heard| {
            for (source, wanted) in before {
                hub.wants_no_more(source, &wanted);
            }
            Step::after(ended, |_, told| {
                Step::after(sent, |_, sent| {
                    let all = [Step::done_if(heard), Step::done_if(told)];
                    let refused = all.into_iter().find(|it| !it.is_done());
                    refused.unwrap_or_else(|| Step::done_if(sent))
                })
            })
        })
    }
}
