//! What operators take from others: ports, and the grants by which they are open.
//!
//! ```text
//!   grants change ── new policy ── verdict on every open port ── filters compiled ── threads told ── Done
//!                        ▲                                            │
//!                        └──────── anew, if one was missing ──────────┘
//! ```
//!
//! Nothing changes before every filter that is needed then is there. So a change has effect as a whole, at an
//! exact frame of each queue, or not at all.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use vnplug_ring::control::{
    Counted, FilterSpec, Grant, GrantAction, GrantKind, GrantRequest, Message, REVOKED, Revoke,
    Whose, code,
};

use super::Control;
use super::reloads::Reload;
use super::session::Over;
use super::vms::being_attached;
use super::waiting::{Then, Whom};
use crate::hub::grant::{Change, Given, kind_name};
use crate::hub::policy::Policy;
use crate::hub::switch::Expelled;
use crate::hub::terms::SendTerms;
use crate::hub::{NewGrant, Peer, Refusal, Revoked, Step};
use crate::reload::Difference;
use crate::vm::Vm;
use vnplug_filter::Program;

/// A change of the grants on its way.
pub(super) struct Regrant {
    what: What,
    /// Filters that were compiled for it, by text and link type.
    compiled: HashMap<(String, u32), Arc<Program>>,
    /// The one that is being compiled.
    awaited: (String, u32),
}

/// What is changed.
enum What {
    /// One grant.
    One {
        change: Change,
        /// As it was given.
        text: String,
        keep: bool,
    },
    /// What the configuration says, of sources too.
    File(Box<Reload>),
}

impl What {
    fn change(&self) -> Option<&Change> {
        match self {
            Self::One { change, .. } => Some(change),
            Self::File(_) => None,
        }
    }

    /// Whether the next daemon does it again.
    fn is_kept(&self) -> bool {
        !matches!(self, Self::One { keep: false, .. })
    }

    /// The grants that there are then.
    fn policy(&self, before: &Policy) -> Policy {
        let mut policy = before.clone();
        match self {
            Self::One { change, .. } => policy.change(change),
            Self::File(reload) => {
                let Difference { taken, given, .. } = &reload.difference;
                taken.iter().for_each(|(kind, it)| policy.take(*kind, it));
                given.iter().for_each(|(kind, it)| policy.give(*kind, it));
            }
        }
        policy
    }

    /// The grants that are new.
    fn given(&self) -> Vec<(GrantKind, &Given)> {
        match self {
            Self::One { change, .. } if change.action == GrantAction::Remove => Vec::new(),
            Self::One { change, .. } => vec![(change.kind, &change.given)],
            Self::File(reload) => {
                let given = reload.difference.given.iter();
                given.map(|(kind, given)| (*kind, given)).collect()
            }
        }
    }
}

impl Regrant {
    fn new(what: What) -> Self {
        Self {
            what,
            compiled: HashMap::new(),
            awaited: (String::new(), 0),
        }
    }

    /// What the configuration says from now on.
    pub(super) fn of_file(reload: Box<Reload>) -> Self {
        Self::new(What::File(reload))
    }

    /// The filter that it waited for is there.
    pub(super) fn add(&mut self, program: Option<Arc<Program>>) {
        let key = std::mem::take(&mut self.awaited);
        self.compiled.extend(program.map(|program| (key, program)));
    }
}

impl Control {
    /// Takes ports from their owners.
    pub(super) fn of_revoke(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        revoke: &Revoke,
    ) -> Result<(), Over> {
        let step = self
            .may_manage(viewer, "take ports from others")
            .and_then(|()| {
                let what = Revoked {
                    receiving: revoke.receiving,
                    sending: revoke.sending,
                };
                if what == Revoked::default() {
                    let what = "nothing to revoke: receiving, sending, or both";
                    return Err(Refusal::new(code::INVALID, what));
                }
                if let Whose::Channels { backend, whose } = &revoke.whose {
                    if what != Revoked::WHOLE {
                        let what = "a channel is revoked as a whole: receiving and sending";
                        return Err(Refusal::new(code::INVALID, what));
                    }
                    self.revoke_channels(backend, whose)?;
                    return Ok(Step::Done(Ok(Message::Done)));
                }
                let ports = self.hub.meant(&revoke.whose)?;
                log::info!(
                    target: "control",
                    "an operator revokes {what:?} of {:?}: {} ports",
                    revoke.whose,
                    ports.len()
                );
                let mut owed = Vec::new();
                let all = ports.into_iter().map(|port| (port, what)).collect();
                self.take_ports(whom.token, all, REVOKED, &mut owed);
                let closing = match what {
                    Revoked::WHOLE => self.hub.close_entered(&revoke.whose),
                    _ => Expelled::default(),
                };
                let step = Step::after(owed, |_, heard| Step::done_if(heard));
                Ok(closing.then(step))
            });
        self.carry_on(whom, step)
    }

    /// Which grants there are, or a change of them.
    pub(super) fn of_grants(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        request: GrantRequest,
    ) -> Result<(), Over> {
        if let Err(refusal) = self.may_manage(viewer, "look at grants or change them") {
            return self.sessions.answer(whom, Err(refusal));
        }
        let GrantRequest::Change {
            action,
            kind,
            text,
            keep,
        } = request
        else {
            let grants = Message::Counters(self.list_grants());
            return self.sessions.answer(whom, Ok((grants, Vec::new())));
        };
        let given = Given::read(kind, &text).and_then(|given| {
            if action == GrantAction::Remove {
                return Ok(given);
            }
            given.must_be_one(&text)?;
            match kind {
                GrantKind::Send => given.rest.parse::<SendTerms>().map(|_| given),
                GrantKind::Join => vnplug_switch::check_grant(&given.rest).map(|()| given),
                GrantKind::See | GrantKind::Serve | GrantKind::Use => Ok(given),
            }
        });
        match given {
            Err(what) => {
                let refusal = Refusal::new(code::INVALID, what);
                self.sessions.answer(whom, Err(refusal))
            }
            Ok(given) => {
                let change = Change {
                    action,
                    kind,
                    given,
                };
                let regrant = Regrant::new(What::One { change, text, keep });
                self.regrant(whom, viewer, regrant)
            }
        }
    }

    /// Has a change of the grants done, or the next filter compiled that it needs.
    pub(super) fn regrant(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        mut regrant: Regrant,
    ) -> Result<(), Over> {
        let policy = regrant.what.policy(&self.policy);
        let takes = regrant.what.change().and_then(takes_from);
        let attached = |owner: &Peer| {
            let mut grants = self.vms.grants(owner);
            if let Some((vm, source, filter)) = takes
                && *owner == Peer::Vm(vm.to_owned())
            {
                grants
                    .retain(|it| it.source != source || !filter.is_empty() && it.filter != filter);
            }
            grants
        };
        if let Some((vm, ..)) = takes
            && self.vms.is_attaching(vm)
        {
            // What it is attached with is known when its pool is made.
            return self.sessions.answer(whom, Err(being_attached(vm)));
        }
        if let What::One { change, keep, .. } = &regrant.what
            && let Some(wider) = self.wider(change, *keep)
        {
            return self.sessions.answer(whom, Err(is_wider(change, &wider)));
        }
        if let What::One { change, text, keep } = &regrant.what
            && change.action == GrantAction::Remove
            && !self.has_grant(change, *keep)
        {
            let what = format!("there is no such grant: {text:?}; see `vnplug grant list`");
            return self
                .sessions
                .answer(whom, Err(Refusal::new(code::NOT_FOUND, what)));
        }
        let verdicts = self.hub.verdicts(&policy, attached);
        // Also if nobody needs it now: a filter that is wrong is refused when it is given.
        let filter = |(kind, given): (GrantKind, &Given)| match kind {
            GrantKind::See => given.rest.clone(),
            GrantKind::Send => terms_of(&given.rest).filter,
            _ => String::new(),
        };
        let own = regrant.what.given().into_iter();
        let own: Vec<_> = own.map(|it| (filter(it), ETHERNET)).collect();
        let needed = verdicts.iter().flat_map(|(port, (granted, revoked))| {
            let link_type = self.hub.link_type_of(*port);
            let sight = (!revoked.receiving).then(|| granted.sight.clone());
            let sends = (!revoked.sending).then(|| terms_of(&granted.terms).filter);
            let both = sight.into_iter().chain(sends);
            both.map(move |text| (text, link_type))
        });
        let missing = own
            .into_iter()
            .chain(needed)
            .find(|key| !key.0.trim().is_empty() && !regrant.compiled.contains_key(key));
        if let Some(key) = missing {
            regrant.awaited.clone_from(&key);
            let (text, link_type) = key;
            let then = Then::Regrant(Box::new(regrant));
            let filter = FilterSpec::Expression(text);
            let what = (String::new(), String::new(), filter, link_type);
            return self.compile(whom, viewer, then, what);
        }
        if let Some((vm, source, filter)) = takes
            && let Some(vm) = self.vms.served.get_mut(vm)
            && let Err(error) = vm.take_grants(
                (source, filter),
                regrant.what.is_kept(),
                &self.vms.dirs.state,
            )
        {
            let what = format!("what VM {:?} was attached with: {error}", vm.name());
            return self
                .sessions
                .answer(whom, Err(Refusal::new(code::INTERNAL, what)));
        }
        if let What::File(reload) = &regrant.what
            && let Err(refusal) = self.still_fits(reload)
        {
            log::error!(target: "control", "the configuration is not in force: {}", refusal.text);
            return self.sessions.answer(whom, Err(refusal));
        }
        if let What::One { change, text, .. } = &regrant.what {
            log::info!(
                target: "control",
                "an operator changes the grants ({:?} {}): {}; {} open ports are concerned",
                change.action,
                kind_name(change.kind),
                text.escape_debug(),
                verdicts.len()
            );
        }
        let closing = self.adopt_policy(policy);
        if let What::File(reload) = &regrant.what {
            self.set_back_ends(&reload.config.backends);
        }
        self.judge_back_ends(whom.token);
        let (mut ended, mut owed, mut grants) = (Vec::new(), Vec::new(), Vec::new());
        for (port, (granted, revoked)) in verdicts {
            let link_type = self.hub.link_type_of(port);
            let compiled = |text: &str| regrant.compiled.get(&(text.to_owned(), link_type));
            let guard = compiled(&granted.sight).cloned();
            let terms = terms_of(&granted.terms);
            let sends = compiled(&terms.filter).cloned();
            if revoked != Revoked::default() {
                ended.push((port, revoked));
            }
            if !revoked.receiving {
                grants.push(NewGrant {
                    port,
                    granted,
                    guard,
                    terms: terms.with(sends),
                });
            }
        }
        self.take_ports(whom.token, ended, CHANGED, &mut owed);
        let end = match regrant.what {
            What::One { keep: false, .. } => Ok(Message::Done),
            What::One { change, text, .. } => {
                let file = self.reloads.config.policy(0).grants();
                let kept = self.grants.keep(&change, &text, &file);
                kept.map(|()| Message::Done).map_err(|error| {
                    let what = format!("it is changed, but not kept for a restart: {error}");
                    Refusal::new(code::INTERNAL, what)
                })
            }
            What::File(reload) => self.exchange_sources(whom.token, *reload, &mut owed),
        };
        // What the threads were told is done in any case.
        let step = closing.then(self.hub.regrant(grants, owed));
        self.carry_on(whom, Ok(Step::finally(step, end)))
    }

    /// Ends the ports of a VM that was attached again and may not have them any more as they are.
    pub(super) fn judge_again(&mut self, name: &str) {
        let vm = Peer::Vm(name.to_owned());
        let attached = |owner: &Peer| self.vms.grants(owner);
        let verdicts = self.hub.verdicts(&self.policy, attached);
        let ports = self.hub.ports();
        let own = verdicts.into_keys().filter(|port| {
            let record = ports.get(port);
            record.is_some_and(|record| record.owner == vm)
        });
        let own = own.map(|port| (port, Revoked::WHOLE)).collect();
        self.take_ports(0, own, CHANGED, &mut Vec::new());
    }

    /// Ends what is taken of ports; those of which nothing is left are closed, and their readers told why.
    fn take_ports(
        &mut self,
        asked_by: u64,
        ports: Vec<(u32, Revoked)>,
        why: &str,
        owed: &mut Vec<crate::hub::Owed<()>>,
    ) {
        let mut over = Vec::new();
        for (port, what) in ports {
            if self.hub.revoke(port, what, owed)
                && let Some(record) = self.hub.ports().get(&port)
            {
                over.push((port, record.owner.clone()));
            }
        }
        self.end_ports(asked_by, &over, why);
    }

    /// Closes ports; those who opened them are told why.
    pub(super) fn end_ports(&mut self, asked_by: u64, over: &[(u32, Peer)], why: &str) {
        let mut by_owner: HashMap<Peer, Vec<u32>> = HashMap::new();
        self.keep_places(over);
        for (port, owner) in over {
            by_owner.entry(owner.clone()).or_default().push(*port);
        }
        // Closed first: who is told before still reads, and then leaves what comes last.
        for (owner, ports) in by_owner {
            self.close_soon(&owner, ports);
        }
        self.tell_gone(asked_by, over, why);
    }

    /// What VMs map of these ports is not given to others before they say that they do not any more.
    fn keep_places(&mut self, ports: &[(u32, Peer)]) {
        for (port, owner) in ports {
            if let Some(vm) = self.vms.of_mut(owner) {
                vm.places.linger(self.hub.places_of(*port));
            }
        }
    }

    /// Tells those who opened ports that they are gone, and why. The connection that asked for it goes on in
    /// any case.
    pub(super) fn tell_gone(&mut self, asked_by: u64, ports: &[(u32, Peer)], reason: &str) {
        let all: HashSet<u32> = ports.iter().map(|(port, _)| *port).collect();
        self.keep_places(ports);
        let mut tokens = HashSet::new();
        for (token, app, port) in self.sessions.openers(&all) {
            if tokens.insert(token) {
                self.sessions
                    .forget_ports(token, |_, own| all.contains(&own));
            }
            let reason = reason.to_owned();
            let gone = Message::Gone { port, reason };
            let told = Whom { token, id: 0, app };
            let went = self.sessions.answer(told, Ok((gone, Vec::new())));
            if token != asked_by {
                self.went_on(token, went);
            }
        }
    }

    pub(super) fn may_manage(&self, viewer: &Peer, what: &str) -> Result<(), Refusal> {
        if self.policy.is_operator(viewer) {
            return Ok(());
        }
        let what = format!("only root or the daemon's own user may {what}");
        Err(Refusal::new(code::DENIED, what))
    }

    /// Uses other grants from now on.
    fn adopt_policy(&mut self, policy: Policy) -> Expelled {
        let closing = self.hub.admit_by(&self.policy, &policy);
        self.policy = policy;
        closing
    }

    /// Whether there is something to take: now, or for the next daemon, which has again what was taken until this one ends.
    fn has_grant(&self, change: &Change, is_kept: bool) -> bool {
        let attached = self.attached_with(&change.given.whom, is_kept);
        let attached = attached.into_iter().map(|grant| {
            let given = Given {
                whom: change.given.whom.clone(),
                source: grant.source,
                rest: grant.filter,
            };
            (GrantKind::See, given)
        });
        let mut all = self.policy.grants();
        if is_kept {
            all.extend(self.next_policy().grants());
        }
        let mut all = all.into_iter().chain(attached);
        all.any(|(kind, given)| change.is_about(kind, &given))
    }

    /// The other grant because of which a change takes nothing: now, or for the next daemon.
    fn wider(&self, change: &Change, is_kept: bool) -> Option<Given> {
        let attached = |is_kept| self.attached_with(&change.given.whom, is_kept);
        let now = self.policy.wider(change, &attached(false));
        let next = || {
            let next = is_kept.then(|| self.next_policy())?;
            next.wider(change, &attached(true))
        };
        now.or_else(next)
    }

    /// What a VM was attached with: what is in force of it, or what the next daemon has again, too.
    fn attached_with(&self, whom: &Peer, is_kept: bool) -> Vec<Grant> {
        let vm = self.vms.of(whom);
        let attached = match is_kept {
            true => vm.map(Vm::attached_with),
            false => vm.map(Vm::grants),
        };
        attached.unwrap_or_default()
    }

    /// The grants that the next daemon has.
    fn next_policy(&self) -> Policy {
        let mut next = self.reloads.config.policy(0);
        self.grants.replay(&mut next);
        next.has_members_of(&self.policy);
        next
    }

    fn list_grants(&self) -> Vec<Counted> {
        let tell = |kind: GrantKind, given: Given, from: &str| {
            let of = match kind {
                GrantKind::See => "filter",
                GrantKind::Send => "terms",
                _ => "settings",
            };
            Counted {
                kind: "grant".into(),
                name: given.whom.written(),
                labels: vec![
                    ("grant".into(), kind_name(kind).into()),
                    ("source".into(), given.source),
                    (of.into(), given.rest),
                    ("from".into(), from.into()),
                ],
                values: Vec::new(),
            }
        };
        let mut all: Vec<Counted> = Vec::new();
        for (kind, given) in self.policy.grants() {
            let from = self.grants.origin(kind, &given);
            all.push(tell(kind, given, from));
        }
        for vm in self.vms.served.values() {
            let whom = Peer::Vm(vm.name().to_owned());
            all.extend(vm.grants().into_iter().map(|grant| {
                let given = Given {
                    whom: whom.clone(),
                    source: grant.source,
                    rest: grant.filter,
                };
                tell(GrantKind::See, given, "attach")
            }));
        }
        all
    }
}

/// The terms of a grant, which were read when it was given.
fn terms_of(text: &str) -> SendTerms {
    text.parse().unwrap_or_default()
}

/// Why a change is refused: the same viewer has this grant, too.
fn is_wider(change: &Change, wider: &Given) -> Refusal {
    let Change { kind, given, .. } = change;
    let (flag, more) = match kind {
        GrantKind::Send => ("--send ", ",TERMS"),
        _ => ("", ":FILTER"),
    };
    let (may, whom, source) = (kind_name(*kind), given.whom.written(), &given.source);
    let what = format!(
        "nothing is changed: {whom} may {may} {source} by {:?}, too. Narrow that: vnplug grant set {flag}'{whom}={all}{more}'. Or give by \
         name what it is to have (vnplug grant add {flag}'{whom}=SOURCE{more}'), and take that: vnplug grant rm {flag}'{whom}={all}'",
        wider.written(*kind),
        all = wider.source,
    );
    Refusal::new(code::INVALID, what)
}

/// Whose grants of its attachment are taken, of which source, and with which filter (empty = any).
fn takes_from(change: &Change) -> Option<(&str, &str, &str)> {
    let Peer::Vm(vm) = &change.given.whom else {
        return None;
    };
    let given = &change.given;
    match (change.kind, change.action) {
        (GrantKind::See, GrantAction::Remove) => Some((vm, &given.source, &given.rest)),
        (GrantKind::See, GrantAction::Set) => Some((vm, &given.source, "")),
        _ => None,
    }
}

/// Why a port is gone, unless it was [revoked](REVOKED).
const CHANGED: &str = "an operator changed the grants, which do not permit the port any more";
/// DLT of the frames of which a filter is compiled to see whether it is right.
const ETHERNET: u32 = 1;
