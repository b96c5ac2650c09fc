//! What a gate says of an act after it was allowed.

use super::*;
use crate::ask::tests::connect;
use crate::rules::Place;

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
    );
    assert_eq!(gate.names_allowing(&act, &before), Some(before.to_vec()));
    let by_address = answered(|rule| rule.ports = vec![443..=443]);
    assert_eq!(by_address.names_allowing(&act, &before), None);
}
