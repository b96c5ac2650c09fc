//! Who may see which source: the operator's policy.
//!
//! Root and the daemon's own user see everything and may attach VMs. Everyone else sees what a
//! grant names, through its obligatory filter; without a grant, nothing. The filters of several
//! grants for one source are alternatives; a grant without a filter grants all of it.
//!
//! Sending through a source is a power of its own, which no grant of sight includes: who has it puts
//! any frame onto the wire, under any address. Only the daemon's own configuration gives it.
//!
//! Taking part in a switch is another one: a port has what is due to it, and sends as the settings of the
//! grant let it.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use vnplug_ring::control::{Grant, GrantKind};

use super::BackendGrant;
use super::grant::Given;

mod changes;

/// Who asks, has ports, and has limits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// A process of this user on the host.
    User(u32),
    /// This VM, or an application inside it.
    Vm(String),
}

impl Peer {
    /// `vm:*`, which looks like all machines and is none.
    pub(crate) fn is_nobody(&self) -> bool {
        matches!(self, Self::Vm(name) if name == "*")
    }

    /// As grants are written.
    pub(crate) fn written(&self) -> String {
        match self {
            Self::User(uid) => format!("uid:{uid}"),
            Self::Vm(name) => format!("vm:{name}"),
        }
    }
}

/// The grants.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    operators: Vec<u32>,
    /// Users that see all counters, which is no right to a packet or to a change.
    pub(crate) observers: Vec<u32>,
    users: BTreeMap<u32, Vec<Grant>>,
    vms: BTreeMap<String, Vec<Grant>>,
    senders: Vec<Sending>,
    joiners: Vec<Join>,
    /// Who may be back-ends, and who may use them.
    of_back_ends: Vec<(GrantKind, Given)>,
    /// Sources that are there by a pattern, and which. A grant for the pattern is one for them, and for no others whose names are
    /// alike.
    members: BTreeMap<String, String>,
}

/// Permission to send through a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sending {
    /// Who may.
    pub whom: Peer,
    /// Through which source; `*` = every one.
    pub source: String,
    /// On which terms: `key=value` with commas between them.
    pub terms: String,
}

/// Permission to take part in a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// Who may.
    pub whom: Peer,
    /// In which switch.
    pub switch: String,
    /// Settings of its port, which it cannot change: `key=value` with commas between them.
    pub settings: String,
}

/// What a viewer may see of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sight {
    /// Nothing; for the viewer the source does not exist.
    Nothing,
    /// What passes this filter; empty = everything.
    Through(String),
}

impl Policy {
    /// A policy under which only root and `own_uid` see anything.
    pub fn new(own_uid: u32) -> Self {
        Self {
            operators: vec![0, own_uid],
            ..Self::default()
        }
    }

    /// Grants a user something.
    pub fn grant_user(&mut self, uid: u32, grant: Grant) {
        self.users.entry(uid).or_default().push(grant);
    }

    /// Grants a VM something.
    pub fn grant_vm(&mut self, name: &str, grant: Grant) {
        self.vms.entry(name.to_owned()).or_default().push(grant);
    }

    /// Lets somebody send through a source.
    pub fn grant_sending(&mut self, sending: Sending) {
        self.senders.push(sending);
    }

    /// Whether the viewer may send through a source, and on which terms.
    pub fn may_send(&self, viewer: &Peer, source: &str) -> Option<&str> {
        if self.is_operator(viewer) {
            return Some("");
        }
        let own = self.senders.iter().filter(|it| it.whom == *viewer);
        // What is said of the source comes before what is said of its pattern, and that before what is said of all.
        let found = |name: &str| own.clone().find(|it| it.source == name);
        let of_pattern = || self.members.get(source).and_then(|it| found(it));
        let sending = found(source).or_else(of_pattern).or_else(|| found("*"));
        sending.map(|it| it.terms.as_str())
    }

    /// Lets somebody take part in a switch.
    pub fn grant_joining(&mut self, join: Join) {
        self.joiners.push(join);
    }

    /// The grants to take part in a switch. If there are any, nobody takes part without one, but for
    /// operators.
    pub fn joiners(&self, switch: &str) -> impl Iterator<Item = &Join> {
        let joiners = self.joiners.iter();
        joiners.filter(move |join| join.switch == switch)
    }

    /// The grant by which the viewer takes part in a switch, if it is no operator.
    pub fn may_join(&self, viewer: &Peer, switch: &str) -> Option<&Join> {
        let mut joiners = self.joiners(switch);
        let own = joiners.find(|join| join.whom == *viewer);
        own.filter(|_| !self.is_operator(viewer))
    }

    /// Whether the viewer's process may be this back-end.
    pub(crate) fn may_serve(&self, viewer: &Peer, back_end: &BackendGrant) -> bool {
        self.is_operator(viewer) || self.has_of(GrantKind::Serve, viewer, back_end)
    }

    /// Whether the viewer may connect to this back-end.
    pub(crate) fn may_use(&self, viewer: &Peer, back_end: &BackendGrant) -> bool {
        self.is_operator(viewer)
            || back_end.is_open_to_all_like(viewer)
            || self.has_of(GrantKind::Use, viewer, back_end)
    }

    fn has_of(&self, kind: GrantKind, viewer: &Peer, back_end: &BackendGrant) -> bool {
        let mut all = self.of_back_ends.iter();
        all.any(|(of, it)| *of == kind && it.whom == *viewer && it.source == back_end.name)
    }

    /// A source is there by a pattern from now on.
    pub(crate) fn note_member(&mut self, source: &str, pattern: &str) {
        self.members.insert(source.to_owned(), pattern.to_owned());
    }

    /// The same sources are there by patterns as under another policy.
    pub(crate) fn has_members_of(&mut self, other: &Self) {
        self.members.clone_from(&other.members);
    }

    /// A source is there by no pattern any more.
    pub(crate) fn forget_member(&mut self, source: &str) {
        self.members.remove(source);
    }

    /// Whether the viewer may attach VMs and see all ports.
    pub fn is_operator(&self, viewer: &Peer) -> bool {
        matches!(viewer, Peer::User(uid) if self.operators.contains(uid))
    }

    /// Whether the viewer may see all counters.
    pub fn may_observe(&self, viewer: &Peer) -> bool {
        let is_observer = matches!(viewer, Peer::User(uid) if self.observers.contains(uid));
        is_observer || self.is_operator(viewer)
    }

    /// Users that are operators.
    pub fn operators(&self) -> &[u32] {
        &self.operators
    }

    /// What the viewer may see of a source; `extra` are grants given with the VM's attachment.
    pub fn sight(&self, viewer: &Peer, source: &str, extra: &[Grant]) -> Sight {
        self.sight_of(viewer, (source, None), extra)
    }

    /// What the viewer may see of a source, or of one port of a switch, which a grant may name: `lan0/port3`.
    pub fn sight_of(
        &self,
        viewer: &Peer,
        (source, port): (&str, Option<NonZeroU16>),
        extra: &[Grant],
    ) -> Sight {
        if self.is_operator(viewer) {
            return Sight::Through(String::new());
        }
        let own = match viewer {
            Peer::User(uid) => self.users.get(uid),
            Peer::Vm(name) => self.vms.get(name),
        };
        let grants: Vec<&Grant> = own
            .into_iter()
            .flatten()
            .chain(extra)
            .filter(|grant| {
                let pattern = self.members.get(source);
                covers(&grant.source, source, port) || pattern == Some(&grant.source)
            })
            .collect();
        if grants.is_empty() {
            return Sight::Nothing;
        }
        if grants.iter().any(|grant| grant.filter.trim().is_empty()) {
            return Sight::Through(String::new());
        }
        let filters: Vec<String> = grants
            .iter()
            .map(|grant| format!("({})", grant.filter))
            .collect();
        Sight::Through(filters.join(" or "))
    }
}

/// A user's grant to join, as the entrances of a switch have it.
pub(crate) fn user_grant(join: &Join) -> Option<vnplug_switch::Grant> {
    match join.whom {
        Peer::User(uid) => Some(vnplug_switch::Grant {
            uid,
            settings: join.settings.clone(),
        }),
        Peer::Vm(_) => None,
    }
}

/// Whether a grant for this name is one for a source, or for one port of it.
fn covers(granted: &str, source: &str, port: Option<NonZeroU16>) -> bool {
    granted == "*"
        || granted == source
        || port.is_some() && port_of(granted) == Some((source, port))
}

/// The switch and the port of a name like `lan0/port3` or `lan0/3`.
fn port_of(name: &str) -> Option<(&str, Option<NonZeroU16>)> {
    let (switch, port) = name.rsplit_once('/')?;
    Some((switch, port_number(port)))
}

/// A port of a switch as people write it: `port3` or `3`.
pub fn port_number(text: &str) -> Option<NonZeroU16> {
    text.strip_prefix("port").unwrap_or(text).parse().ok()
}

#[cfg(test)]
mod tests;
