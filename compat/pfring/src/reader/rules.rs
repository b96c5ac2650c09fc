//! Filtering rules of all ports of a ring: added to each, kept to be added to ports opened later.

use std::time::Duration;

use vnplug::{Error, Rule, RuleAction, RuleKey, RuleKind, RuleStats, code};

use super::Reader;

/// A rule as it was added.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub(super) rule: Rule,
    /// Not purged when it is idle.
    locked: bool,
}

impl Reader {
    /// Adds a rule, or replaces the one with its key.
    pub(crate) fn add_rule(&mut self, rule: Rule, locked: bool) -> Result<(), Error> {
        self.each(|port| port.add_rule(&rule))?;
        self.rules.insert(rule.key(), Kept { rule, locked });
        Ok(())
    }

    pub(crate) fn remove_rule(&mut self, key: RuleKey) -> Result<(), Error> {
        self.each(|port| port.remove_rule(key))?;
        self.rules.remove(&key);
        Ok(())
    }

    /// A number for a wildcard rule, after all others if possible.
    pub(crate) fn free_rule_id(&self) -> Option<u16> {
        let is_used = |id: &u16| self.rules.contains_key(&RuleKey::Wildcard(*id));
        let highest = self.rules.keys().filter_map(|key| match key {
            RuleKey::Wildcard(id) => Some(*id),
            RuleKey::Exact(_) => None,
        });
        let next = highest.max().map_or(0, |highest| highest.saturating_add(1));
        (next..u16::MAX).chain(0..next).find(|id| !is_used(id))
    }

    /// What happens to packets that no rule decides.
    pub(crate) fn set_rule_default(&mut self, accept: bool) -> Result<(), Error> {
        self.each(|port| port.set_rule_default(accept))?;
        self.rule_default = accept;
        Ok(())
    }

    /// The statistics of a rule and what it does: matches of all ports, the shortest idleness.
    pub(crate) fn rule_stats(&mut self, key: RuleKey) -> Result<(RuleStats, RuleAction), Error> {
        let stats = self.stats_of(key)?;
        let action = self.rules.get(&key).map(|kept| match kept.rule {
            Rule::Exact(rule) => rule.action,
            Rule::Wildcard(rule) => rule.action,
        });
        Ok((stats, action.unwrap_or_default()))
    }

    /// Removes rules of that kind that matched nothing for the time `idle`, if they are not locked.
    pub(crate) fn purge_rules(&mut self, kind: RuleKind, idle: Duration) -> Result<(), Error> {
        let of_kind = |key: &RuleKey| match kind {
            RuleKind::Exact => matches!(key, RuleKey::Exact(_)),
            RuleKind::Wildcard => matches!(key, RuleKey::Wildcard(_)),
        };
        let simple = self.ports.len() == 1 && !self.rules.values().any(|kept| kept.locked);
        if simple {
            let removed = self.ports[0].purge_rules(kind, idle)?;
            self.purged |= removed > 0;
            return Ok(());
        }
        // Of several ports one may have had matches that another had not.
        let keys: Vec<RuleKey> = self
            .rules
            .iter()
            .filter(|(key, kept)| of_kind(key) && !kept.locked)
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            if self.stats_of(key)?.idle >= idle {
                self.remove_rule(key)?;
            }
        }
        Ok(())
    }

    /// Forgets rules that the host has purged.
    pub(super) fn forget_purged(&mut self) {
        if !std::mem::take(&mut self.purged) {
            return;
        }
        let keys: Vec<RuleKey> = self.rules.keys().copied().collect();
        for key in keys {
            let gone =
                |error| matches!(error, Error::Refused { code, .. } if code == code::NOT_FOUND);
            if self.stats_of(key).is_err_and(gone) {
                self.rules.remove(&key);
            }
        }
    }

    fn stats_of(&mut self, key: RuleKey) -> Result<RuleStats, Error> {
        let mut all: Option<RuleStats> = None;
        for port in &mut self.ports {
            let one = port.rule_stats(key)?;
            all = Some(match all {
                None => one,
                Some(all) => RuleStats {
                    matched: all.matched + one.matched,
                    idle: all.idle.min(one.idle),
                },
            });
        }
        all.ok_or(Error::Invalid("a ring without a device"))
    }
}
