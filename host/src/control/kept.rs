//! The grants that operators changed at run time and that the next daemon is to have.
//!
//! They lie beside the records of VMs, in order, and are done again over what the configuration says. A daemon that cannot read
//! them, an older one perhaps, does not start: whose grant was taken would have it again.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vnplug_ring::control::{GrantAction, GrantKind};

use crate::hub::grant::{Change, Given, kind_name};
use crate::hub::policy::Policy;
use crate::vm::record;

/// What was changed and is kept.
#[derive(Debug, Default)]
pub(crate) struct KeptGrants {
    path: PathBuf,
    kept: Kept,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    #[serde(default)]
    change: Vec<Line>,
}

/// A change as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    action: String,
    kind: String,
    grant: String,
}

impl KeptGrants {
    /// What earlier daemons with this state directory kept; it is done to the policy again.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn restore(state: &Path, policy: &mut Policy) -> Result<Self, String> {
        let path = state.join("vms").join("grants");
        let kept = match record::read_kept(&path) {
            Ok(text) => toml::from_str::<Kept>(&text).map_err(|error| error.to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Kept::default()),
            Err(error) => Err(error.to_string()),
        };
        let kept = kept.and_then(|kept| {
            let unknown = kept.change.iter().find_map(|line| line.change().err());
            unknown.map_or(Ok(kept), Err)
        });
        let kept = kept.map_err(|error| {
            format!(
                "{}: {error}: it has what was changed of the grants, perhaps by a newer vnplugd; start that one, or remove the file and \
                 look through the grants",
                path.display()
            )
        })?;
        let restored = Self { path, kept };
        restored.replay(policy);
        Ok(restored)
    }

    /// Does to the grants of a configuration what was changed and is kept.
    pub(super) fn replay(&self, policy: &mut Policy) {
        for line in &self.kept.change {
            match line.change() {
                Ok(change) => policy.change(&change),
                Err(error) => log::error!(target: "control", "{}: {error}", self.path.display()),
            }
        }
    }

    /// Where a grant comes from: what was changed and is kept, or else the configuration or what was changed for
    /// once.
    pub(super) fn origin(&self, kind: GrantKind, given: &Given) -> &'static str {
        let mut lines = self
            .kept
            .change
            .iter()
            .filter_map(|line| line.change().ok());
        match lines.any(|it| it.kind == kind && it.given == *given) {
            true => "run time",
            false => "file",
        }
    }

    /// Keeps a change for the next daemon; `text` is its grant as it was given, and `file` are the grants of the
    /// configuration.
    ///
    /// # Errors
    /// It cannot be written down, or would be longer than what is read again.
    pub(crate) fn keep(
        &mut self,
        change: &Change,
        text: &str,
        file: &[(GrantKind, Given)],
    ) -> io::Result<()> {
        let mut new = self.kept.clone();
        new.add(change, text, file);
        let text = toml::to_string(&new).map_err(io::Error::other)?;
        record::write_kept(&self.path, &text)?;
        self.kept = new;
        Ok(())
    }
}

impl Kept {
    /// What is changed takes the place of what it undoes. What is taken, and the configuration does not give, leaves nothing:
    /// else the names of all that ever was would be kept.
    fn add(&mut self, change: &Change, text: &str, file: &[(GrantKind, Given)]) {
        let given = &change.given;
        let is_in_file = |change: &Change| file.iter().any(|(kind, it)| change.is_about(*kind, it));
        let mut new = Vec::with_capacity(self.change.len() + 1);
        for line in self.change.drain(..) {
            let Ok(before) = line.change() else {
                new.push(line);
                continue;
            };
            let is_like = before.kind == change.kind
                && before.given.whom == given.whom
                && before.given.source == given.source;
            let is_same = before.given.rest == given.rest;
            let is_undone = match change.action {
                GrantAction::Remove => is_like && (given.rest.is_empty() || is_same),
                _ if change.replaces() => is_like,
                _ => is_like && is_same && before.action == GrantAction::Add,
            };
            if !is_undone {
                new.push(line);
            } else if change.action == GrantAction::Remove && before.replaces() {
                // It stood for all of the configuration's, which do not come back.
                let all = Change {
                    action: GrantAction::Remove,
                    kind: before.kind,
                    given: Given {
                        rest: String::new(),
                        ..before.given
                    },
                };
                let text = all.given.written(all.kind);
                new.extend(is_in_file(&all).then(|| Line::new(&all, &text)));
            }
        }
        self.change = new;
        let is_there = |line: &Line| line.change().as_ref() == Ok(change);
        let is_needed = change.action != GrantAction::Remove || is_in_file(change);
        if is_needed && !self.change.iter().any(is_there) {
            self.change.push(Line::new(change, text));
        }
    }
}

impl Line {
    fn new(change: &Change, text: &str) -> Self {
        Self {
            action: action_name(change.action).to_owned(),
            kind: kind_name(change.kind).to_owned(),
            grant: text.to_owned(),
        }
    }

    fn change(&self) -> Result<Change, String> {
        let action = match self.action.as_str() {
            "add" => GrantAction::Add,
            "set" => GrantAction::Set,
            "rm" => GrantAction::Remove,
            other => return Err(format!("nothing is done by {other:?}")),
        };
        let kind = match self.kind.as_str() {
            "see" => GrantKind::See,
            "send" => GrantKind::Send,
            "join" => GrantKind::Join,
            "serve" => GrantKind::Serve,
            "use" => GrantKind::Use,
            other => return Err(format!("{other:?} is no kind of grant")),
        };
        Ok(Change {
            action,
            kind,
            given: Given::read(kind, &self.grant)?,
        })
    }
}

fn action_name(action: GrantAction) -> &'static str {
    match action {
        GrantAction::Add => "add",
        GrantAction::Set => "set",
        GrantAction::Remove => "rm",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(action: GrantAction, kind: GrantKind, text: &str) -> Change {
        Change {
            action,
            kind,
            given: Given::read(kind, text).unwrap(),
        }
    }

    fn in_file(text: &str) -> (GrantKind, Given) {
        (GrantKind::See, Given::read(GrantKind::See, text).unwrap())
    }

    /// What the next daemon grants.
    fn after(file: &[(GrantKind, Given)], kept: &Kept) -> Vec<(GrantKind, Given)> {
        let mut policy = Policy::new(0);
        file.iter()
            .for_each(|(kind, given)| policy.give(*kind, given));
        for line in &kept.change {
            policy.change(&line.change().unwrap());
        }
        policy.grants()
    }

    #[test]
    fn a_thousand_names_that_came_and_went_leave_nothing() {
        let mut kept = Kept::default();
        let file = [in_file("uid:1=a")];
        for number in 0..1000 {
            let text = format!("vm:guest{number}=a");
            for action in [GrantAction::Add, GrantAction::Remove] {
                kept.add(&change(action, GrantKind::See, &text), &text, &file);
            }
        }
        assert_eq!(kept, Kept::default());
        // The control: what the file gives must be taken from it each time.
        for _ in 0..3 {
            let taken = change(GrantAction::Remove, GrantKind::See, "uid:1=a");
            kept.add(&taken, "uid:1=a", &file);
        }
        assert_eq!(kept.change.len(), 1);
        assert_eq!(after(&file, &kept), []);
    }

    #[test]
    fn the_next_daemon_grants_what_this_one_does() {
        use GrantAction::{Add, Remove, Set};
        let mut dice = vnplug_testing::Dice(vnplug_frame::witness::seed("kept"));
        for _ in 0..2_000 {
            let (kind, texts) = dice.one_of(&[
                (
                    GrantKind::See,
                    ["uid:1=a", "uid:1=a:ip", "uid:1=a:arp", "uid:1=b:ip"],
                ),
                (
                    GrantKind::Send,
                    [
                        "uid:1=a",
                        "uid:1=a,rate=1kpps",
                        "uid:1=a,rate=2kpps",
                        "uid:1=b",
                    ],
                ),
            ]);
            let given = |text: &str| (kind, Given::read(kind, text).unwrap());
            let file: Vec<_> = (0..dice.below(4))
                .map(|_| given(dice.one_of(&texts)))
                .collect();
            let mut kept = Kept::default();
            let mut now = Policy::new(0);
            file.iter().for_each(|(kind, given)| now.give(*kind, given));
            let mut said = Vec::new();
            for _ in 0..dice.below(8) {
                let (action, text) = (dice.one_of(&[Add, Set, Remove]), dice.one_of(&texts));
                let change = change(action, kind, text);
                // Nothing is taken that is not there.
                if action == Remove
                    && !now
                        .grants()
                        .iter()
                        .any(|(kind, it)| change.is_about(*kind, it))
                {
                    continue;
                }
                said.push((action, text));
                now.change(&change);
                kept.add(&change, text, &file);
                let sorted = |mut all: Vec<(GrantKind, Given)>| {
                    all.sort_by_key(|it| format!("{it:?}"));
                    all.dedup();
                    all
                };
                let (next, now) = (sorted(after(&file, &kept)), sorted(now.grants()));
                assert_eq!(next, now, "file {file:?}, said {said:?}, kept {kept:?}");
            }
        }
    }

    #[test]
    fn what_is_kept_is_no_longer_than_what_it_says() {
        use GrantAction::{Add, Remove, Set};
        let mut kept = Kept::default();
        let file = ["uid:1=a:ip", "uid:2=a"].map(in_file);
        for (action, kind, text) in [
            (Add, GrantKind::See, "uid:1=a:ip"),
            (Add, GrantKind::See, "uid:1=a:ip"),
            (Add, GrantKind::See, "uid:1=a:arp"),
            (Add, GrantKind::See, "uid:2=a"),
            (Remove, GrantKind::See, "uid:1=a:ip"),
            (Add, GrantKind::Send, "uid:1=a"),
            (Set, GrantKind::Send, "uid:1=a"),
            (Remove, GrantKind::See, "uid:2=a"),
        ] {
            kept.add(&change(action, kind, text), text, &file);
        }
        let lines = kept.change.iter();
        let lines: Vec<_> = lines
            .map(|it| (&*it.action, &*it.kind, &*it.grant))
            .collect();
        assert_eq!(
            lines,
            [
                ("add", "see", "uid:1=a:arp"),
                ("rm", "see", "uid:1=a:ip"),
                ("set", "send", "uid:1=a"),
                ("rm", "see", "uid:2=a"),
            ]
        );
        let text = toml::to_string(&kept).unwrap();
        assert_eq!(toml::from_str::<Kept>(&text).unwrap(), kept);
    }
}
