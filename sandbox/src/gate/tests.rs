//! What a gate says of an act after it was allowed.

use std::time::Duration;

use super::*;
use crate::ask::tests::connect;
use crate::rules::Place;
use crate::rules::Rule;

fn act() -> Act {
    connect(7, "203.0.113.2:443")
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// A gate that asks, and was answered with this rule.
fn answered(rule: impl FnOnce(&mut Rule)) -> Gate {
    let mut answer = Rule::new(Say::Allow);
    rule(&mut answer);
    Gate::new(Policy {
        default: Say::Ask,
        answers: vec![Arc::new(answer)],
        ..Policy::default()
    })
}

#[test]
fn a_name_that_died_while_its_question_was_open_is_the_one_that_was_allowed() {
    let (act, before) = (act(), [name("a.org")]);
    let gate = answered(|rule| rule.to = vec![Place::Name(name("a.org"))]);
    assert_eq!(gate.names_allowing(&act, &before), Some(before.to_vec()));
    // The control: who asks for the living names alone finds none, and compares nothing.
    assert_eq!(gate.names_allowing(&act, &[]), None);
    // Another name has come to the address since.
    gate.learned().note(
        &name("b.org"),
        "203.0.113.2".parse().unwrap(),
        Duration::ZERO,
        &By::default(),
    );
    assert_eq!(gate.names_allowing(&act, &before), Some(before.to_vec()));
    let by_address = answered(|rule| rule.ports = vec![443..=443]);
    assert_eq!(by_address.names_allowing(&act, &before), None);
}

#[test]
fn a_name_is_looked_up_by_the_rule_that_lasts() {
    let resolve = |text: &str| Act {
        doing: Doing::Resolve,
        target: Target::Name(text.to_owned()),
        ..act()
    };
    let to = |text| move |rule: &mut Rule| rule.to = vec![Place::Name(name(text))];
    let gate = answered(to("a.org"));
    let by = |text| gate.looked_up_by(&resolve(text));
    assert_eq!((by("a.org"), by("b.org")), (by("a.org"), By::default()));
    assert_ne!(by("a.org"), By::default());
    assert_ne!(
        answered(to("a.org")).looked_up_by(&resolve("a.org")),
        by("a.org")
    );
    let once = answered(|rule| rule.process = Some((7, 7)));
    assert_eq!(once.looked_up_by(&resolve("a.org")), By::default());
}

#[test]
fn what_is_allowed_once_does_not_last() {
    let act = act();
    let until = |seconds| Some(SystemTime::now() + Duration::from_secs(seconds));
    let once = answered(|rule| (rule.process, rule.until) = (Some((7, 7)), until(10)));
    assert!(!once.lasts(&act, &[]));
    let until = answered(|rule| rule.until = until(600));
    assert!(!until.lasts(&act, &[]));
    let over = answered(|rule| rule.until = Some(SystemTime::UNIX_EPOCH));
    assert!(!over.lasts(&act, &[]));
    let session = answered(|_| ());
    assert!(session.lasts(&act, &[]));
    let default = Gate::new(Policy {
        default: Say::Allow,
        ..Policy::default()
    });
    assert!(default.lasts(&act, &[]));
    // By a name that has died since.
    let named = answered(|rule| rule.to = vec![Place::Name(name("a.org"))]);
    assert!(named.lasts(&act, &[name("a.org")]) && !named.lasts(&act, &[]));
}
