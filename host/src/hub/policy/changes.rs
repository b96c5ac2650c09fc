//! Grants that come and go, one by one, and the list of all.

use vnplug_ring::control::{Grant, GrantAction, GrantKind};

use super::super::grant::{Change, Given};
use super::{Peer, Policy, covers, port_of};

impl Policy {
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
}

#[cfg(test)]
mod tests {
    use super::super::tests::grant;
    use super::super::{Sending, Sight};
    use super::*;

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
}
