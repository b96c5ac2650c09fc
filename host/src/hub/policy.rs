//! Who may see which source: the operator's policy.
//!
//! Root and the daemon's own user see everything and may attach VMs. Everyone else sees what a
//! grant names, through its obligatory filter; without a grant, nothing. The filters of several
//! grants for one source are alternatives; a grant without a filter grants all of it.
//!
//! Sending through a source is a power of its own, which no grant of sight includes: who has it puts
//! any frame onto the wire, under any address. Only the daemon's own configuration gives it.

use std::collections::BTreeMap;

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
            .filter(|grant| grant.source == "*" || grant.source == source)
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
