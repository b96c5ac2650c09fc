//! The grants of a configuration.

use super::Config;
use crate::hub::BackendGrant;
use crate::hub::policy::Policy;
use crate::hub::terms::SendTerms;

impl Config {
    /// Who may see what, for a daemon that runs as this user.
    pub(crate) fn policy(&self, us: u32) -> Policy {
        let mut policy = Policy::new(us);
        policy.observers.clone_from(&self.observers);
        for (uid, grant) in &self.users {
            policy.grant_user(*uid, grant.clone());
        }
        for (vm, grant) in &self.vms {
            policy.grant_vm(vm, grant.clone());
        }
        for sending in &self.senders {
            policy.grant_sending(sending.clone());
        }
        for join in &self.joiners {
            policy.grant_joining(join.clone());
        }
        for (kind, given) in self.backends.iter().flat_map(BackendGrant::given) {
            policy.give(kind, &given);
        }
        policy
    }

    /// Refuses grants to send or to join whose terms are wrong.
    pub(crate) fn check_terms(&self) -> Result<(), String> {
        for sending in &self.senders {
            sending.terms.parse::<SendTerms>().map_err(|error| {
                format!("a grant to send through {:?}: {error}", sending.source)
            })?;
        }
        for join in &self.joiners {
            vnplug_switch::check_grant(&join.settings)
                .map_err(|error| format!("a grant to join {:?}: {error}", join.switch))?;
        }
        Ok(())
    }
}
