//! Interfaces on the command line: what is said of them, and how their counters are told.

pub(crate) mod words;

use serde_json::{Map, Value, json};
use vnplug_sandbox::interface::tally::Tally;

use crate::text::grouped;

/// ` (3 link_down, 1 no_room)`, or nothing.
pub(crate) fn reasons(tally: &Tally) -> String {
    let words: Vec<String> = tally
        .by_reason()
        .filter(|&(_, count)| count > 0)
        .map(|(name, count)| format!("{} {name}", grouped(count)))
        .collect();
    match words.is_empty() {
        true => String::new(),
        false => format!(" ({})", words.join(", ")),
    }
}

/// The drops by reason, zeros included.
pub(crate) fn dropped_json(tally: &Tally) -> Value {
    let map: Map<String, Value> = tally
        .by_reason()
        .map(|(name, count)| (name.to_owned(), json!(count)))
        .collect();
    Value::Object(map)
}

#[cfg(test)]
mod tests {
    use vnplug_sandbox::interface::tally::Reason;

    use super::*;

    #[test]
    fn reasons_are_told_that_there_are() {
        let mut tally = Tally::default();
        assert_eq!(reasons(&tally), "");
        for reason in [
            Reason::TooLong,
            Reason::LinkDown,
            Reason::NoRoom,
            Reason::NoRoom,
        ] {
            tally.drop(reason);
        }
        assert_eq!(reasons(&tally), " (1 link_down, 2 no_room, 1 too_long)");
        assert_eq!(dropped_json(&tally)["no_room"], 2);
        assert_eq!(dropped_json(&tally)["refused"], 0);
    }
}
