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

use vnplug_ring::control::{Grant, GrantAction, GrantKind};

use super::BackendGrant;
use super::grant::{Change, Given};

/// Who asks, has ports, and has limits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// A process of this user on the host.
    User(u32),
    /// This VM, or an application inside it.
    Vm(String),
}

impl Peer {
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

    /// A source is there by no pattern any more.
    pub(crate) fn forget_member(&mut self, source: &str) {
        self.members.remove(source);
    }

    /// Changes a grant.
    pub fn change(&mut self, change: &Change) {
        let Change {
            action,
            kind,
            given,
        } = change;
        let is_gone = |source: &str, rest: &str| {
            source == given.source
                && match action {
                    // The same is not granted twice.
                    GrantAction::Add => *kind != GrantKind::See || rest == given.rest,
                    GrantAction::Set => true,
                    GrantAction::Remove => given.rest.is_empty() || rest == given.rest,
                }
        };
        let comes = *action != GrantAction::Remove;
        match kind {
            GrantKind::See => {
                let grants = match &given.whom {
                    Peer::User(uid) => self.users.entry(*uid).or_default(),
                    Peer::Vm(name) => self.vms.entry(name.clone()).or_default(),
                };
                grants.retain(|grant| !is_gone(&grant.source, &grant.filter));
                grants.extend(comes.then(|| given.clone().sight().1));
            }
            GrantKind::Send => {
                self.senders
                    .retain(|it| it.whom != given.whom || !is_gone(&it.source, &it.terms));
                self.senders.extend(comes.then(|| given.clone().sending()));
            }
            GrantKind::Join => {
                self.joiners
                    .retain(|it| it.whom != given.whom || !is_gone(&it.switch, &it.settings));
                self.joiners.extend(comes.then(|| given.clone().join()));
            }
            GrantKind::Serve | GrantKind::Use => {
                self.take(*kind, given);
                let new = comes.then(|| (*kind, given.clone()));
                self.of_back_ends.extend(new);
            }
        }
    }

    /// The other grant because of which a change takes nothing: one without filter or terms, of all sources, of a pattern,
    /// or of the whole switch. `attached` is what a VM was attached with.
    pub(crate) fn wider(&self, change: &Change, attached: &[Grant]) -> Option<Given> {
        let Change {
            action,
            kind,
            given,
        } = change;
        let narrows = match (kind, action) {
            // To send, what is said of a source comes before what is said of all.
            (GrantKind::See, GrantAction::Set) => !given.rest.is_empty(),
            (GrantKind::See | GrantKind::Send, GrantAction::Remove) => given.rest.is_empty(),
            _ => false,
        };
        let (source, port) = match port_of(&given.source) {
            Some((switch, Some(port))) => (switch, Some(port)),
            _ => (given.source.as_str(), None),
        };
        let pattern = self.members.get(source);
        let is_wider = |it: &Given| {
            let is_same = it.source == given.source
                || port.is_some() && port_of(&it.source) == Some((source, port));
            let is_of = covers(&it.source, source, port) || pattern == Some(&it.source);
            it.whom == given.whom && it.rest.is_empty() && is_of && !is_same
        };
        let attached = attached.iter().map(|grant| Given {
            whom: given.whom.clone(),
            source: grant.source.clone(),
            rest: grant.filter.clone(),
        });
        let attached = attached.map(|it| (GrantKind::See, it));
        let mut all = self.grants().into_iter().chain(attached);
        let found = all.find(|(of, it)| of == kind && is_wider(it));
        found.map(|(_, it)| it).filter(|_| narrows)
    }

    /// Gives a grant, beside those that there are.
    pub(crate) fn give(&mut self, kind: GrantKind, given: &Given) {
        // The same is not granted twice.
        self.take(kind, given);
        let given = given.clone();
        match kind {
            GrantKind::See => match given.sight() {
                (Peer::User(uid), grant) => self.grant_user(uid, grant),
                (Peer::Vm(name), grant) => self.grant_vm(&name, grant),
            },
            GrantKind::Send => self.grant_sending(given.sending()),
            GrantKind::Join => self.grant_joining(given.join()),
            GrantKind::Serve | GrantKind::Use => self.of_back_ends.push((kind, given)),
        }
    }

    /// Takes this grant, and no other one.
    pub(crate) fn take(&mut self, kind: GrantKind, given: &Given) {
        match kind {
            GrantKind::See => {
                let grants = match &given.whom {
                    Peer::User(uid) => self.users.entry(*uid).or_default(),
                    Peer::Vm(name) => self.vms.entry(name.clone()).or_default(),
                };
                let (_, gone) = given.clone().sight();
                grants.retain(|grant| *grant != gone);
            }
            GrantKind::Send => {
                let gone = given.clone().sending();
                self.senders.retain(|it| *it != gone);
            }
            GrantKind::Join => {
                let gone = given.clone().join();
                self.joiners.retain(|it| *it != gone);
            }
            GrantKind::Serve | GrantKind::Use => {
                let is_gone = |of: GrantKind, it: &Given| (of, it) == (kind, given);
                self.of_back_ends.retain(|(of, it)| !is_gone(*of, it));
            }
        }
    }

    /// All grants, by kind and viewer.
    pub fn grants(&self) -> Vec<(GrantKind, Given)> {
        let see = |whom: Peer, grant: &Grant| {
            let given = Given {
                whom,
                source: grant.source.clone(),
                rest: grant.filter.clone(),
            };
            (GrantKind::See, given)
        };
        let mut all = Vec::new();
        for (uid, grants) in &self.users {
            all.extend(grants.iter().map(|grant| see(Peer::User(*uid), grant)));
        }
        for (name, grants) in &self.vms {
            all.extend(
                grants
                    .iter()
                    .map(|grant| see(Peer::Vm(name.clone()), grant)),
            );
        }
        let senders = self.senders.iter().map(|it| {
            let given = Given {
                whom: it.whom.clone(),
                source: it.source.clone(),
                rest: it.terms.clone(),
            };
            (GrantKind::Send, given)
        });
        all.extend(senders);
        let joiners = self.joiners.iter().map(|it| {
            let given = Given {
                whom: it.whom.clone(),
                source: it.switch.clone(),
                rest: it.settings.clone(),
            };
            (GrantKind::Join, given)
        });
        all.extend(joiners);
        all.extend(self.of_back_ends.iter().cloned());
        all
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
mod tests {
    use super::*;

    fn grant(source: &str, filter: &str) -> Grant {
        Grant {
            source: source.into(),
            filter: filter.into(),
        }
    }

    #[test]
    fn operators_see_everything_and_others_what_is_granted() {
        let mut policy = Policy::new(77);
        policy.grant_user(1000, grant("eth1", "port 53"));
        let everything = Sight::Through(String::new());
        assert_eq!(policy.sight(&Peer::User(0), "eth1", &[]), everything);
        assert_eq!(policy.sight(&Peer::User(77), "eth2", &[]), everything);
        let narrow = Sight::Through("(port 53)".into());
        assert_eq!(policy.sight(&Peer::User(1000), "eth1", &[]), narrow);
        assert_eq!(policy.sight(&Peer::User(1000), "eth2", &[]), Sight::Nothing);
        assert_eq!(policy.sight(&Peer::User(1001), "eth1", &[]), Sight::Nothing);
        assert!(policy.is_operator(&Peer::User(0)) && !policy.is_operator(&Peer::User(1000)));
    }

    #[test]
    fn a_grant_of_a_switch_opens_its_ports_and_one_of_a_port_nothing_else() {
        let mut policy = Policy::new(77);
        let (all, some) = (Peer::User(1000), Peer::User(1001));
        policy.grant_user(1000, grant("lan0", "icmp"));
        policy.grant_user(1001, grant("lan0/port3", ""));
        policy.grant_user(1001, grant("lan0/4", "arp"));
        let port = NonZeroU16::new;
        let sight = |viewer, port| policy.sight_of(viewer, ("lan0", port), &[]);
        let through = |filter: &str| Sight::Through(filter.into());
        assert_eq!(sight(&all, None), through("(icmp)"));
        assert_eq!(sight(&all, port(9)), through("(icmp)"));
        assert_eq!(sight(&some, port(3)), through(""));
        assert_eq!(sight(&some, port(4)), through("(arp)"));
        for other in [None, port(5), port(33)] {
            assert_eq!(sight(&some, other), Sight::Nothing);
        }
        assert_eq!(
            policy.sight_of(&some, ("lan1", port(3)), &[]),
            Sight::Nothing
        );
    }

    #[test]
    fn a_grant_to_join_is_one_for_this_switch_and_operators_need_none() {
        let mut policy = Policy::new(77);
        let vm = Peer::Vm("probe".into());
        policy.grant_joining(Join {
            whom: vm.clone(),
            switch: "lan0".into(),
            settings: "vlan=10".into(),
        });
        assert_eq!(policy.may_join(&vm, "lan0").unwrap().settings, "vlan=10");
        assert_eq!(policy.may_join(&vm, "lan1"), None);
        assert_eq!(policy.may_join(&Peer::User(0), "lan0"), None);
        assert_eq!(policy.joiners("lan0").count(), 1);
        assert!(policy.may_send(&vm, "lan0").is_none());
        assert_eq!(policy.sight(&vm, "lan0", &[]), Sight::Nothing);
    }

    #[test]
    fn sight_is_no_permission_to_send() {
        let mut policy = Policy::new(77);
        let (user, vm) = (Peer::User(1000), Peer::Vm("probe".into()));
        policy.grant_user(1000, grant("*", ""));
        policy.grant_vm("probe", grant("*", ""));
        let sends =
            |policy: &Policy, viewer: &Peer, source| policy.may_send(viewer, source).is_some();
        let sending = |whom: &Peer, source: &str| Sending {
            whom: whom.clone(),
            source: source.into(),
            terms: String::new(),
        };
        assert!(sends(&policy, &Peer::User(0), "eth1"));
        assert!(!sends(&policy, &user, "eth1") && !sends(&policy, &vm, "eth1"));
        policy.grant_sending(sending(&user, "eth1"));
        policy.grant_sending(sending(&vm, "*"));
        assert!(sends(&policy, &user, "eth1") && !sends(&policy, &user, "eth2"));
        assert!(sends(&policy, &vm, "eth2"));
        assert!(!sends(&policy, &Peer::Vm("other".into()), "eth2"));
    }

    #[test]
    fn what_is_said_of_a_source_comes_before_what_is_said_of_all() {
        let mut policy = Policy::new(77);
        let vm = Peer::Vm("probe".into());
        for (source, terms) in [("*", "rate=1Mbit"), ("eth1", "rate=2Mbit")] {
            policy.grant_sending(Sending {
                whom: vm.clone(),
                source: source.into(),
                terms: terms.into(),
            });
        }
        assert_eq!(policy.may_send(&vm, "eth1"), Some("rate=2Mbit"));
        assert_eq!(policy.may_send(&vm, "eth2"), Some("rate=1Mbit"));
    }

    #[test]
    fn a_grant_of_a_pattern_is_for_the_sources_that_are_there_by_it_and_no_others() {
        let mut policy = Policy::new(77);
        let user = Peer::User(1000);
        policy.grant_user(1000, grant("vnet*", "ip"));
        for (source, terms) in [("vnet*", "rate=1M"), ("vnet2", "rate=2M")] {
            policy.grant_sending(Sending {
                whom: user.clone(),
                source: source.into(),
                terms: terms.into(),
            });
        }
        for source in ["vnet1", "vnet2"] {
            policy.note_member(source, "vnet*");
        }
        policy.note_member("vnet4", "vnet4*");
        let sight = |policy: &Policy, source| policy.sight(&user, source, &[]);
        let through = Sight::Through("(ip)".into());
        assert_eq!(sight(&policy, "vnet1"), through);
        // One whose name is like it, and one of another pattern.
        assert_eq!(sight(&policy, "vnet3"), Sight::Nothing);
        assert_eq!(sight(&policy, "vnet4"), Sight::Nothing);
        assert_eq!(policy.may_send(&user, "vnet1"), Some("rate=1M"));
        assert_eq!(policy.may_send(&user, "vnet2"), Some("rate=2M"));
        assert_eq!(policy.may_send(&user, "vnet3"), None);
        policy.forget_member("vnet1");
        assert_eq!(sight(&policy, "vnet1"), Sight::Nothing);
        let extra = [grant("vnet*", "")];
        assert_eq!(
            policy.sight(&Peer::Vm("a".into()), "vnet2", &extra),
            Sight::Through(String::new())
        );
    }

    #[test]
    fn grants_change_and_what_is_taken_is_taken_from_that_viewer_alone() {
        let mut policy = Policy::new(77);
        let change = |policy: &mut Policy, action, kind, text: &str| {
            let given = Given::read(kind, text).unwrap();
            policy.change(&Change {
                action,
                kind,
                given,
            });
        };
        use GrantAction::{Add, Remove, Set};
        let see = GrantKind::See;
        change(&mut policy, Add, see, "uid:1=eth1:ip");
        change(&mut policy, Add, see, "uid:1=eth1:arp");
        change(&mut policy, Add, see, "uid:2=eth1:ip");
        let sight = |policy: &Policy, uid| policy.sight(&Peer::User(uid), "eth1", &[]);
        let through = |filter: &str| Sight::Through(filter.into());
        assert_eq!(sight(&policy, 1), through("(ip) or (arp)"));
        change(&mut policy, Remove, see, "uid:1=eth1:ip");
        assert_eq!(sight(&policy, 1), through("(arp)"));
        change(&mut policy, Set, see, "uid:1=eth1:icmp");
        assert_eq!(sight(&policy, 1), through("(icmp)"));
        change(&mut policy, Remove, see, "uid:1=eth1");
        assert_eq!(sight(&policy, 1), Sight::Nothing);
        assert_eq!(sight(&policy, 2), through("(ip)"));
        change(&mut policy, Add, GrantKind::Send, "vm:a=eth1");
        change(&mut policy, Add, GrantKind::Join, "vm:a=lan0,vlan=7");
        change(&mut policy, Set, GrantKind::Join, "vm:a=lan0,vlan=8");
        assert_eq!(policy.grants().len(), 3);
        let vm = Peer::Vm("a".into());
        assert_eq!(policy.may_join(&vm, "lan0").unwrap().settings, "vlan=8");
        change(&mut policy, Remove, GrantKind::Send, "vm:a=eth1");
        assert!(policy.may_send(&vm, "eth1").is_none());
    }

    #[test]
    fn a_wider_grant_of_the_same_one_is_found_when_a_narrower_is_set_or_taken() {
        use GrantAction::{Add, Remove, Set};
        use GrantKind::{Join, See, Send};
        let mut policy = Policy::new(77);
        policy.note_member("vnet1", "vnet*");
        for (whom, of) in [
            (1, "*"),
            (2, "vnet*"),
            (3, "lan0"),
            (4, "eth1"),
            (5, "lan0/3"),
        ] {
            policy.grant_user(whom, grant(of, ""));
        }
        policy.grant_user(6, grant("*", "icmp"));
        for (whom, terms) in [(1, ""), (6, "rate=1M")] {
            policy.grant_sending(Sending {
                whom: Peer::User(whom),
                source: "*".into(),
                terms: terms.into(),
            });
        }
        let wider = |action, kind, text: &str, attached: &[Grant]| {
            let given = Given::read(kind, text).unwrap();
            let change = Change {
                action,
                kind,
                given,
            };
            policy.wider(&change, attached).map(|it| it.written(kind))
        };
        let is = |text: &str| Some(text.to_owned());
        for (action, rest) in [(Set, ":udp"), (Remove, "")] {
            let wider = |text: &str, attached: &[Grant]| {
                wider(action, See, &format!("{text}{rest}"), attached)
            };
            assert_eq!(wider("uid:1=eth1", &[]), is("uid:1=*"));
            assert_eq!(wider("uid:2=vnet1", &[]), is("uid:2=vnet*"));
            assert_eq!(wider("uid:3=lan0/port3", &[]), is("uid:3=lan0"));
            // Nor is another spelling of the same port wider, nor what shows only a part: that is left, and no more.
            for own in [
                "uid:1=*",
                "uid:2=vnet2",
                "uid:3=lan0",
                "uid:4=eth1",
                "uid:4=*",
                "uid:5=lan0/port3",
                "uid:6=eth1",
            ] {
                assert_eq!(wider(own, &[]), None, "{own}");
            }
            let attached = [grant("eth1", ""), grant("*", "")];
            assert_eq!(wider("vm:a=eth1", &attached), is("vm:a=*"));
            assert_eq!(wider("vm:a=eth1", &attached[..1]), None);
        }
        // Nothing is taken by who gives all, or one more, nor by who takes one of several.
        assert_eq!(wider(Set, See, "uid:1=eth1", &[]), None);
        assert_eq!(wider(Add, See, "uid:1=eth1:udp", &[]), None);
        assert_eq!(wider(Remove, See, "uid:1=eth1:udp", &[]), None);
        assert_eq!(wider(Set, Join, "uid:1=lan0", &[]), None);
        assert_eq!(wider(Remove, Send, "uid:1=eth1", &[]), is("uid:1=*"));
        assert_eq!(wider(Remove, Send, "uid:6=eth1", &[]), None);
        assert_eq!(wider(Set, Send, "uid:1=eth1,rate=1M", &[]), None);
    }

    #[test]
    fn grants_of_one_source_are_alternatives_and_one_without_filter_opens_it() {
        let mut policy = Policy::new(0);
        let vm = Peer::Vm("probe".into());
        assert!(!policy.is_operator(&vm));
        policy.grant_vm("probe", grant("eth1", "port 53"));
        let extra = [grant("eth1", "icmp")];
        let both = Sight::Through("(port 53) or (icmp)".into());
        assert_eq!(policy.sight(&vm, "eth1", &extra), both);
        policy.grant_vm("probe", grant("*", ""));
        assert_eq!(
            policy.sight(&vm, "eth1", &extra),
            Sight::Through(String::new())
        );
    }
}
