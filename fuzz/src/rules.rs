//! Files of rules, which a project hands over too: any text is rules or an error, and a rule is read again as it is written.

use std::time::SystemTime;

use vnplug_sandbox::rules::edit::write;
use vnplug_sandbox::rules::file::parse;
use vnplug_sandbox::rules::{Origin, Rule};

/// Checks it with this text, valid UTF-8 or made so.
pub fn check(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let Ok(sheet) = parse(&text, |_, _| Origin::Given) else {
        return;
    };
    for rule in sheet.rules {
        let written = write(&rule);
        let again = parse(&written, |_, _| Origin::Given);
        let again = again.unwrap_or_else(|error| panic!("{error}: {written}"));
        assert_eq!(again.rules.len(), 1, "{written}");
        assert_eq!(*again.rules[0], whole(&rule), "{written}");
    }
}

/// A rule as it is written: times have whole seconds.
fn whole(rule: &Rule) -> Rule {
    let mut rule = rule.clone();
    rule.until = rule.until.map(|until| {
        let since = until.duration_since(SystemTime::UNIX_EPOCH);
        SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(since.map_or(0, |it| it.as_secs()))
    });
    rule
}
