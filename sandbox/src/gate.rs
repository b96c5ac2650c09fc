//! Where every act is judged: by rules, or by who answers a question.

use crate::act::Act;

/// What was decided about an act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is done.
    Allow,
    /// It is refused.
    Deny,
}

/// Judges acts. One per sandbox; all threads of the supervisor share it.
#[derive(Debug, Default)]
pub struct Gate {}

impl Gate {
    /// Judges `act` and tells `then` what was decided: before this returns if a rule decides, else from another
    /// thread when the question is answered, or denied because nobody did in time. `then` is called
    /// exactly once and must not block.
    pub fn judge(&self, act: &Act, then: impl FnOnce(Verdict) + Send + 'static) {
        let _ = act;
        then(Verdict::Deny);
    }
}
