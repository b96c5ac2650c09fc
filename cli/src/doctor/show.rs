//! What was found, for people and for programs.

use serde_json::{Value, json};

use super::Role;
use super::check::{Checked, State};
use crate::text::{columns, counted, escape};

/// One line a check, the cure below it, and the verdict.
pub(super) fn text(results: &[Checked]) -> String {
    let rows: Vec<Vec<String>> = results
        .iter()
        .map(|it| {
            let mark = word(it.finding.state).to_owned();
            // Labels of readers and names of machines are strangers' words.
            vec![mark, escape(&it.name), escape(&it.finding.text)]
        })
        .collect();
    let lines = columns(&rows);
    let mut text = String::new();
    for (line, it) in lines.lines().zip(results) {
        text += line;
        text.push('\n');
        if let Some(cure) = &it.finding.cure {
            text += &format!("         -> {}\n", escape(cure));
        }
    }
    text + &format!("\n{}\n", escape(&verdict(results)))
}

/// An object: role, verdict, checks.
pub(super) fn json(role: Role, results: &[Checked]) -> String {
    let checks = results.iter().map(|it| {
        json!({
            "name": it.name, "state": word(it.finding.state), "text": it.finding.text,
            "cure": it.finding.cure, "can_fix": it.finding.fix.is_some(),
        })
    });
    let role = match role {
        Role::Host => "host",
        Role::Guest => "guest",
    };
    let whole = json!({
        "role": role,
        "works": !results.iter().any(|it| it.finding.state == State::Fail),
        "verdict": verdict(results),
        "checks": checks.collect::<Value>(),
    });
    format!("{whole}\n")
}

/// One sentence: the first failure is what keeps packets from the application.
pub(super) fn verdict(results: &[Checked]) -> String {
    let count = |state| {
        results
            .iter()
            .filter(|it| it.finding.state == state)
            .count() as u64
    };
    if let Some(first) = results.iter().find(|it| it.finding.state == State::Fail) {
        let more = match count(State::Fail) - 1 {
            0 => String::new(),
            more => format!(" ({more} more)"),
        };
        return format!(
            "it does not work: {}: {}{more}",
            first.name, first.finding.text
        );
    }
    let skipped = match count(State::Skipped) {
        0 => String::new(),
        skipped => format!("; {} skipped", counted(skipped, "check")),
    };
    // Nothing is broken, and yet an application may see nothing.
    let stop = results
        .iter()
        .find(|it| it.name == "traffic" && it.finding.state == State::Warn);
    let stop = stop.map_or(String::new(), |it| {
        format!("; traffic: {}", it.finding.text)
    });
    match count(State::Warn) {
        0 => format!("nothing is wrong{skipped}"),
        warnings => format!(
            "nothing is broken, {}{skipped}{stop}",
            counted(warnings, "warning")
        ),
    }
}

fn word(state: State) -> &'static str {
    match state {
        State::Ok => "ok",
        State::Warn => "warn",
        State::Fail => "FAIL",
        State::Skipped => "skipped",
    }
}
