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

use vnplug_ring::control::Grant;

/// Who asks, has ports, and has limits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// A process of this user on the host.
    User(u32),
    /// This VM, or an application inside it.
    Vm(String),
}

/// The grants.
#[derive(Debug, Default)]
pub struct Policy {
    operators: Vec<u32>,
    users: BTreeMap<u32, Vec<Grant>>,
    vms: BTreeMap<String, Vec<Grant>>,
    /// Who may send through which source; `*` = every source.
    senders: Vec<(Peer, String)>,
    joiners: Vec<Join>,
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

    /// Lets somebody send through a source (`*`: every source).
    pub fn grant_sending(&mut self, viewer: Peer, source: &str) {
        self.senders.push((viewer, source.to_owned()));
    }

    /// Whether the viewer may send through a source.
    pub fn may_send(&self, viewer: &Peer, source: &str) -> bool {
        let granted = |(to, what): &(Peer, String)| to == viewer && (what == "*" || what == source);
        self.is_operator(viewer) || self.senders.iter().any(granted)
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

    /// Whether the viewer may attach VMs and see all ports.
    pub fn is_operator(&self, viewer: &Peer) -> bool {
        matches!(viewer, Peer::User(uid) if self.operators.contains(uid))
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
            .filter(|grant| covers(&grant.source, source, port))
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
        assert!(!policy.may_send(&vm, "lan0"));
        assert_eq!(policy.sight(&vm, "lan0", &[]), Sight::Nothing);
    }

    #[test]
    fn sight_is_no_permission_to_send() {
        let mut policy = Policy::new(77);
        let (user, vm) = (Peer::User(1000), Peer::Vm("probe".into()));
        policy.grant_user(1000, grant("*", ""));
        policy.grant_vm("probe", grant("*", ""));
        assert!(policy.may_send(&Peer::User(0), "eth1"));
        assert!(!policy.may_send(&user, "eth1") && !policy.may_send(&vm, "eth1"));
        policy.grant_sending(user.clone(), "eth1");
        policy.grant_sending(vm.clone(), "*");
        assert!(policy.may_send(&user, "eth1") && !policy.may_send(&user, "eth2"));
        assert!(policy.may_send(&vm, "eth2"));
        assert!(!policy.may_send(&Peer::Vm("other".into()), "eth2"));
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
