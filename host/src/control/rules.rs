//! Requests about the rules of a port.

use std::time::Duration;

use vnplug_ring::control::{Message, code};

use super::Control;
use super::waiting::Whom;
use crate::hub::{Peer, Refusal, Step};
use vnplug_path::rules::{Key, Prepared};

impl Control {
    /// How many rules a request has each queue's thread touch, in which its packets wait.
    pub(super) fn touched_rules(&self, request: &Message) -> usize {
        match request {
            Message::AddRules { rules, .. } => rules.len(),
            Message::PurgeRules { port, kind, .. } => self
                .hub
                .ports()
                .get(port)
                .map_or(0, |record| record.rules.room(*kind)),
            _ => 1,
        }
    }

    /// Serves a request about the rules of a port of this application.
    pub(super) fn rules(
        &mut self,
        whom: Whom,
        viewer: &Peer,
        request: Message,
    ) -> Result<Step, Refusal> {
        let invalid = |what: String| Refusal::new(code::INVALID, what);
        let step = match request {
            Message::AddRules { port, rules } => {
                self.sessions.owned(whom, port)?;
                let rules = Prepared::new(&rules).map_err(invalid)?;
                let owner = (!self.policy.is_operator(viewer)).then_some(viewer);
                self.hub.add_rules(port, &rules, owner)?
            }
            Message::RemoveRule { port, key } => {
                self.sessions.owned(whom, port)?;
                self.hub.remove_rule(port, Key::new(&key).map_err(invalid)?)
            }
            Message::RuleDefault { port, accept } => {
                self.sessions.owned(whom, port)?;
                self.hub.rule_default(port, accept)
            }
            Message::PurgeRules {
                port,
                kind,
                idle_ms,
            } => {
                self.sessions.owned(whom, port)?;
                let idle = Duration::from_millis(idle_ms);
                self.hub.purge_rules(port, kind, idle)
            }
            Message::RuleStats { port, key } => {
                self.sessions.owned(whom, port)?;
                let key = Key::new(&key).map_err(invalid)?;
                self.hub.rule_hits(port, key)
            }
            other => {
                let what = format!("message {} is not about rules", other.kind());
                return Err(Refusal::new(code::PROTOCOL, what));
            }
        };
        Ok(step)
    }
}
