//! Filtering rules of a port: asked for here, kept to be asked for again, run on the host.

use std::collections::BTreeMap;
use std::time::Duration;

use vnplug_ring::control::{Message, Rule, RuleKey, RuleKind};

use super::Port;
use crate::client::done;
use crate::connection::{Connection, unexpected};
use crate::error::Error;

/// What a reader knows of its rules.
#[derive(Debug)]
pub(crate) struct Kept {
    rules: BTreeMap<RuleKey, Rule>,
    accept: bool,
}

/// Counters of one rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RuleStats {
    /// Packets that it was about.
    pub matched: u64,
    /// Since the last of them, or since it was added; to the millisecond.
    pub idle: Duration,
}

impl Default for Kept {
    fn default() -> Self {
        Self {
            rules: BTreeMap::new(),
            accept: true,
        }
    }
}

impl Kept {
    /// Whether a port without them would get something else.
    pub(crate) fn matter(&self) -> bool {
        !self.accept || !self.rules.is_empty()
    }

    /// Gives a port all of them.
    pub(crate) fn give(&self, connection: &mut Connection, port: u32) -> Result<(), Error> {
        if !self.accept {
            let accept = self.accept;
            done(&connection.exchange(&Message::RuleDefault { port, accept }, None)?)?;
        }
        let all: Vec<Rule> = self.rules.values().copied().collect();
        for rules in all.chunks(AT_ONCE) {
            let rules = rules.to_vec();
            done(&connection.exchange(&Message::AddRules { port, rules }, None)?)?;
        }
        Ok(())
    }

    fn add(&mut self, rule: &Rule) {
        self.rules.insert(ordered(rule.key()), *rule);
    }
}

impl Port {
    /// Adds a rule, or replaces the one with its key, whose counters then begin again. The host runs
    /// it from the next packet on: after the filter, before sampling.
    ///
    /// # Errors
    /// [`Error::Refused`] if there are too many or a value is out of range;
    /// [`Error::Disconnected`] while reconnecting.
    pub fn add_rule(&mut self, rule: &Rule) -> Result<(), Error> {
        self.add_rules(std::slice::from_ref(rule))
    }

    /// Adds many rules, by a thousand in one request. On an error those of earlier requests stay.
    ///
    /// # Errors
    /// As [`add_rule`](Self::add_rule).
    pub fn add_rules(&mut self, rules: &[Rule]) -> Result<(), Error> {
        for rules in rules.chunks(AT_ONCE) {
            let request = Message::AddRules {
                port: self.number,
                rules: rules.to_vec(),
            };
            done(&self.ask(&request)?)?;
            rules.iter().for_each(|rule| self.rules.add(rule));
        }
        Ok(())
    }

    /// Removes a rule.
    ///
    /// # Errors
    /// [`Error::Refused`] (`NOT_FOUND`) if there is none; [`Error::Disconnected`] while
    /// reconnecting.
    pub fn remove_rule(&mut self, key: RuleKey) -> Result<(), Error> {
        let port = self.number;
        done(&self.ask(&Message::RemoveRule { port, key })?)?;
        self.rules.rules.remove(&ordered(key));
        Ok(())
    }

    /// Says whether the port gets packets that no rule decides. It does from the start.
    ///
    /// # Errors
    /// [`Error::Disconnected`] while reconnecting; those of any request.
    pub fn set_rule_default(&mut self, accept: bool) -> Result<(), Error> {
        let port = self.number;
        done(&self.ask(&Message::RuleDefault { port, accept })?)?;
        self.rules.accept = accept;
        Ok(())
    }

    /// The counters of a rule, since it was added or the port reopened.
    ///
    /// # Errors
    /// As [`remove_rule`](Self::remove_rule).
    pub fn rule_stats(&mut self, key: RuleKey) -> Result<RuleStats, Error> {
        let port = self.number;
        match self.ask(&Message::RuleStats { port, key })? {
            Message::RuleCounters { matched, idle_ms } => Ok(RuleStats {
                matched,
                idle: Duration::from_millis(idle_ms),
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Removes the rules of a kind that no packet matched for `idle`, to the millisecond; says how
    /// many they were.
    ///
    /// # Errors
    /// [`Error::Disconnected`] while reconnecting; those of any request.
    pub fn purge_rules(&mut self, kind: RuleKind, idle: Duration) -> Result<usize, Error> {
        let request = Message::PurgeRules {
            port: self.number,
            kind,
            idle_ms: u64::try_from(idle.as_millis()).unwrap_or(u64::MAX),
        };
        match self.ask(&request)? {
            Message::Purged(keys) => {
                for key in &keys {
                    self.rules.rules.remove(&ordered(*key));
                }
                Ok(keys.len())
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// The same key for both directions of a flow.
fn ordered(key: RuleKey) -> RuleKey {
    match key {
        RuleKey::Exact(flow) => RuleKey::Exact(flow.ordered()),
        wildcard => wildcard,
    }
}

/// Rules in one request: a wildcard rule takes at most 116 bytes, and a request may have 64 KiB.
const AT_ONCE: usize = 512;
