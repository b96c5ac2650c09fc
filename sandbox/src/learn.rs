//! What a program did becomes a profile that allows just that.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::chronicle::Entry;
use crate::rules::rule::Rule;
use crate::rules::{BadFile, edit};

/// Learns from decisions, and writes the profile.
#[derive(Debug)]
pub struct Learner {
    path: PathBuf,
    /// What was allowed; the key is the rule without its ports and protocols.
    allowed: BTreeMap<String, Rule>,
    /// What was refused, as it stands in the file: behind `#`.
    refused: BTreeMap<String, Rule>,
    is_new: bool,
}

impl Learner {
    /// What is learnt goes to this file, over what is there.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            allowed: BTreeMap::new(),
            refused: BTreeMap::new(),
            is_new: true,
        }
    }

    /// Learns from a decision.
    pub fn learn(&mut self, entry: &Entry) {
        let mut rule = entry.allowing();
        rule.note = None;
        // Looking up a name and connecting to it are one rule, with the ports of what was connected.
        let (ports, protocols) = (
            std::mem::take(&mut rule.ports),
            std::mem::take(&mut rule.protocols),
        );
        let rules = if entry.allowed {
            &mut self.allowed
        } else {
            &mut self.refused
        };
        if rules.len() >= RULES {
            return;
        }
        let key = edit::write(&rule);
        let known = rules.entry(key).or_insert_with(|| {
            self.is_new = true;
            rule
        });
        for port in ports {
            self.is_new |= put(&mut known.ports, port);
        }
        for protocol in protocols {
            if !known.protocols.contains(&protocol) {
                known.protocols.push(protocol);
                self.is_new = true;
            }
        }
    }

    /// The profile.
    pub fn text(&self) -> String {
        let mut text = "# Learnt from what a program did. Read it before you use it: what is here is allowed.\n\
                        default = \"ask\"\n"
            .to_owned();
        for rule in self.allowed.values() {
            text += &format!("\n{}", edit::write(rule));
        }
        if !self.refused.is_empty() {
            text += "\n# Refused while this was learnt; take the # away to allow it.\n";
            for rule in self.refused.values() {
                text += "#\n";
                for line in edit::write(rule).lines() {
                    text += &format!("# {line}\n");
                }
            }
        }
        text
    }

    /// Writes the profile, if there is something new.
    ///
    /// # Errors
    /// [`BadFile::Io`].
    pub fn save(&mut self) -> Result<(), BadFile> {
        if self.is_new {
            edit::replace(&self.path, &self.text())?;
            self.is_new = false;
        }
        Ok(())
    }
}

/// Adds a port; true if it is new.
fn put(ports: &mut Vec<RangeInclusive<u16>>, port: RangeInclusive<u16>) -> bool {
    let is_new = !ports.contains(&port);
    if is_new {
        ports.push(port);
        ports.sort_by_key(|range| *range.start());
    }
    is_new
}

/// The most rules that are learnt: nobody would read more.
const RULES: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_kept_once_and_in_order() {
        let mut ports = Vec::new();
        assert!(
            put(&mut ports, 443..=443) && put(&mut ports, 22..=22) && !put(&mut ports, 443..=443)
        );
        assert_eq!(ports, [22..=22, 443..=443]);
    }
}
