use super::*;

pub(super) fn grant(source: &str, filter: &str) -> Grant {
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
    let sends = |policy: &Policy, viewer: &Peer, source| policy.may_send(viewer, source).is_some();
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
