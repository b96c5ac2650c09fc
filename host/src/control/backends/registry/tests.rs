use std::collections::BTreeMap;

use vnplug_ring::control::backend::{Connect, Connected, Register};
use vnplug_ring::control::code;

use super::*;
use crate::hub::Refusal;
use crate::hub::policy::Policy;

fn registry(channels: &str) -> Registry {
    let words = [
        ("id", "85"),
        ("name", "kv"),
        ("uid", "0"),
        ("open", "*"),
        ("channels", channels),
    ];
    let words = words.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let grant = BackendGrant::of_words(BTreeMap::from(words)).unwrap();
    Registry::new(vec![grant])
}

/// What the registry's grants permit, and root.
fn policy(registry: &Registry) -> Policy {
    let mut policy = Policy::new(0);
    for (kind, given) in registry.grants.iter().flat_map(BackendGrant::given) {
        policy.give(kind, &given);
    }
    policy
}

fn register(registry: &mut Registry, token: u64) -> Result<(), Refusal> {
    let request = Register {
        id: 85,
        name: "kv".into(),
        version: 1,
        events_in: 1,
        events_out: 1,
    };
    let policy = policy(registry);
    registry.register(token, &Peer::User(0), &policy, &request)
}

fn connect(registry: &mut Registry, token: u64) -> Result<Connected, Refusal> {
    connect_as(registry, token, 1)
}

fn connect_as(registry: &mut Registry, token: u64, uid: u32) -> Result<Connected, Refusal> {
    let request = Connect {
        id: 85,
        name: String::new(),
        version: 1,
        label: String::new(),
    };
    let program = End { token, app: 0 };
    let policy = policy(registry);
    registry.connect(program, &Peer::User(uid), &policy, &request)
}

#[test]
fn channels_whose_programs_do_not_read_count_after_their_back_end_is_gone() {
    let mut registry = registry("2");
    register(&mut registry, 20).unwrap();
    let first = connect(&mut registry, 30).unwrap();
    connect_as(&mut registry, 31, 2).unwrap();
    assert_eq!(registry.gone(20, None, "gone").len(), 2);
    register(&mut registry, 21).unwrap();
    let refused = connect_as(&mut registry, 32, 3).unwrap_err();
    assert_eq!(refused.code, code::LIMIT);
    // One of them reads to the end.
    let (_, last, _) = registry.next(30).unwrap();
    assert!(matches!(last, Backend::Hangup { channel, .. } if channel == first.channel));
    connect_as(&mut registry, 32, 3).unwrap();
    let refused = connect_as(&mut registry, 33, 4).unwrap_err();
    assert_eq!(refused.code, code::LIMIT);
}

#[test]
fn no_owner_of_programs_takes_all_of_a_back_ends_channels() {
    let mut registry = registry("9");
    register(&mut registry, 20).unwrap();
    let mut tokens = 30..;
    let mut most = |registry: &mut Registry, uid| {
        let mut own = 0;
        loop {
            match connect_as(registry, tokens.next().unwrap(), uid) {
                Ok(_) => own += 1,
                Err(refusal) => break (own, refusal),
            }
        }
    };
    let (own, refusal) = most(&mut registry, 1);
    assert_eq!((own, refusal.code), (4, code::LIMIT));
    assert!(refusal.text.contains("half"), "{}", refusal.text);
    // Who comes later has half of what is left, as long as there is one.
    let others: Vec<_> = (2..6).map(|uid| most(&mut registry, uid).0).collect();
    assert_eq!(others, [2, 1, 1, 1]);
    assert_eq!(most(&mut registry, 6).0, 0);
    // What one gives back is another's.
    let first = *registry.of[&30].first().unwrap();
    registry.gone(30, None, "gone");
    while registry.next(20).is_some() {}
    assert!(!registry.channels.contains_key(&first));
    assert_eq!(most(&mut registry, 6).0, 1);
}

#[test]
fn what_is_said_in_a_channel_that_is_over_is_not_counted() {
    let mut registry = registry("9");
    register(&mut registry, 20).unwrap();
    let channel = connect(&mut registry, 30).unwrap().channel;
    let program = End { token: 30, app: 0 };
    let say = || Backend::Say {
        channel,
        bytes: vec![7; 100],
    };
    registry.pass(program, channel, say());
    registry.revoke("kv", |_| true).unwrap();
    registry.pass(program, channel, say());
    let Tally {
        messages, bytes, ..
    } = registry.tallies[&85];
    assert_eq!((messages, bytes), ([1, 0], [100, 0]));
}

#[test]
fn who_is_meant_is_told_that_an_operator_revoked_the_channel_and_nobody_else() {
    let mut registry = registry("9");
    register(&mut registry, 20).unwrap();
    let [first, second] = [30, 31].map(|token| connect(&mut registry, token).unwrap().channel);
    let other = Peer::Vm("other".into());
    assert_eq!(
        registry.revoke("kv", |owner| *owner == other).unwrap(),
        [0; 0]
    );
    let said = |channel| Backend::Say {
        channel,
        bytes: vec![7],
    };
    let program = |token| End { token, app: 0 };
    while registry.next(20).is_some() {}
    registry.pass(program(30), first, said(first));
    let ended = registry.revoke("kv", |owner| *owner == Peer::User(1));
    assert_eq!(ended.unwrap(), [first, second]);
    // What waited is not said any more, nor what comes.
    assert!(!registry.pass(program(30), first, said(first)));
    for (token, channel) in [(20, first), (20, second), (30, first), (31, second)] {
        let reason = REVOKED_CHANNEL.to_owned();
        let hung_up = Backend::Hangup { channel, reason };
        assert_eq!(registry.next(token).map(|(_, what, _)| what), Some(hung_up));
    }
    assert!(registry.next(20).is_none() && registry.channels.is_empty());
    assert!(registry.revoke("dns", |_| true).is_err());
}

#[test]
fn no_end_says_that_an_operator_revoked_a_channel() {
    let mut registry = registry("9");
    register(&mut registry, 20).unwrap();
    let channel = connect(&mut registry, 30).unwrap().channel;
    let reason = REVOKED_CHANNEL.to_owned();
    let back = End { token: 20, app: 0 };
    assert!(registry.pass(back, channel, Backend::Hangup { channel, reason }));
    let (_, told, _) = registry.next(30).unwrap();
    assert!(matches!(told, Backend::Hangup { reason, .. } if reason == ENDED));
}

#[test]
fn a_lie_ends_the_channel_and_is_told_as_such() {
    let mut registry = registry("9");
    register(&mut registry, 20).unwrap();
    let channel = connect(&mut registry, 30).unwrap().channel;
    let program = End { token: 30, app: 0 };
    let said = |cost| Backend::Took { channel, cost };
    assert!(!registry.pass(program, channel, said(0)));
    assert!(registry.pass(program, channel, said(1)));
    assert!(
        !registry.pass(End { token: 31, app: 0 }, channel, said(1)),
        "of a stranger"
    );
    while registry.next(20).is_some() || registry.next(30).is_some() {}
    assert_eq!(registry.channels_of(85), 0);
}
