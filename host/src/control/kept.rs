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
        let kept = match record::read(&path) {
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

    /// Keeps a change for the next daemon; `text` is its grant as it was given.
    pub(crate) fn keep(&mut self, change: &Change, text: &str) -> io::Result<()> {
        let mut new = self.kept.clone();
        new.add(change, text);
        let text = toml::to_string(&new).map_err(io::Error::other)?;
        record::write(&self.path, &text)?;
        self.kept = new;
        Ok(())
    }
}

impl Kept {
    /// What is changed takes the place of what it undoes.
    fn add(&mut self, change: &Change, text: &str) {
        let given = &change.given;
        let is_undone = |line: &Line| {
            let Ok(before) = line.change() else {
                return false;
            };
            let is_like = before.kind == change.kind
                && before.given.whom == given.whom
                && before.given.source == given.source;
            let is_same = before.given.rest == given.rest;
            match change.action {
                GrantAction::Add => is_like && is_same && before.action == GrantAction::Add,
                GrantAction::Set => is_like,
                GrantAction::Remove => is_like && (given.rest.is_empty() || is_same),
            }
        };
        self.change.retain(|line| !is_undone(line));
        self.change.push(Line {
            action: action_name(change.action).to_owned(),
            kind: kind_name(change.kind).to_owned(),
            grant: text.to_owned(),
        });
    }
}

impl Line {
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

    #[test]
    fn what_is_kept_is_no_longer_than_what_it_says() {
        use GrantAction::{Add, Remove, Set};
        let mut kept = Kept::default();
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
            kept.add(&change(action, kind, text), text);
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
