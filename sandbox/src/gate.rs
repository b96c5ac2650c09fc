//! Where every act is judged: by rules, or by who answers a question.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use crate::act::{Act, Transport};
use crate::rules::{Policy, Say};

/// What was decided about an act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is done.
    Allow,
    /// It is refused.
    Deny,
}

/// Judges acts. One per sandbox; all threads of the supervisor share it, and clones are the same gate.
#[derive(Clone)]
pub struct Gate {
    judge: Arc<Judge>,
}

enum Judge {
    Policy(Policy),
    /// For tests.
    Closure(Box<dyn Fn(&Act) -> Verdict + Send + Sync>),
}

impl Gate {
    /// A gate with these rules.
    pub fn new(policy: Policy) -> Self {
        Self {
            judge: Arc::new(Judge::Policy(policy)),
        }
    }

    /// A gate that asks `judge` alone: for tests of what stands before and behind a gate.
    pub fn of(judge: impl Fn(&Act) -> Verdict + Send + Sync + 'static) -> Self {
        Self {
            judge: Arc::new(Judge::Closure(Box::new(judge))),
        }
    }

    /// Judges `act` and tells `then` what was decided: before this returns if a rule decides, else from another
    /// thread when the question is answered, or denied because nobody did in time. `then` is called
    /// exactly once and must not block.
    pub fn judge(&self, act: &Act, then: impl FnOnce(Verdict) + Send + 'static) {
        let verdict = match &*self.judge {
            Judge::Closure(judge) => judge(act),
            Judge::Policy(policy) => match policy.decide(act, &[], SystemTime::now()).say {
                Say::Allow => Verdict::Allow,
                Say::Ask | Say::Deny => Verdict::Deny,
            },
        };
        then(verdict);
    }

    /// True if a packet by `transport` to `to` may pass whichever program it is of: by rules that do not ask
    /// for the program. Nobody is asked.
    pub fn allows_packet(&self, transport: Transport, to: SocketAddr) -> bool {
        match &*self.judge {
            Judge::Closure(_) => false,
            Judge::Policy(policy) => policy.allows_anybody(transport, to, &[], SystemTime::now()),
        }
    }
}

impl Default for Gate {
    /// A gate that refuses everything.
    fn default() -> Self {
        Self::new(Policy::default())
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}
