//! In which order rules of several files decide.
//!
//! 1. The user's rules are read from top to bottom: those for every profile, the profile's own, those that
//!    the profile has from us. The first that is about an act decides. If none is, the default does.
//! 2. An address on the [floor](crate::floor) is refused, unless the rule that decides names it.
//! 3. A project's file has its say, too; the stricter of both holds. So it can tighten and never widen, whatever
//!    is written in it.
//! 4. If that says *ask*, earlier answers are looked at, the newest first. If none is about the act,
//!    somebody is asked.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::act::{Act, Doing, Target, Transport};
use crate::floor::Floor;
use crate::name::Name;
use crate::rules::file::Sheet;
use crate::rules::rule::{Rule, Say};

/// All rules of a sandbox.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The user's rules, from top to bottom.
    pub rules: Vec<Arc<Rule>>,
    /// What is said of acts that none of them is about.
    pub default: Say,
    /// The file of the project; its default is to have no objection.
    pub project: Option<Sheet>,
    /// Earlier answers, the newest first. They hold where the rules say *ask*, and never on the floor.
    pub answers: Vec<Arc<Rule>>,
    /// How long a question waits for its answer; then the act is refused.
    pub timeout: Duration,
    /// The loopback is the sandbox's own, in a network namespace: what no rule refuses there is allowed.
    pub own_loopback: bool,
}

/// What rules say of an act, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What they say.
    pub say: Say,
    /// Which of them.
    pub reason: Reason,
}

/// What a decision rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A rule of the user's.
    Rule(Arc<Rule>),
    /// No rule is about the act.
    Default,
    /// The address is on the floor, and no rule names it.
    Floor(Floor),
    /// A rule of the project's file.
    Project(Arc<Rule>),
    /// The project's file has no rule about the act, and a default.
    ProjectDefault,
    /// An earlier answer.
    Answer(Arc<Rule>),
    /// Somebody answered just now.
    Answered,
    /// Nobody answered in time.
    TimedOut,
    /// There was nobody to ask, or more questions than somebody could answer.
    Nobody,
    /// A client of TLS names this server where another one was allowed, and this is said of that.
    Named(Box<Reason>),
    /// The sandbox itself allows or refuses it, whatever the rules say.
    Own(&'static str),
}

impl Default for Policy {
    /// No rules; all is refused.
    fn default() -> Self {
        Self {
            rules: Vec::new(),
            default: Say::Deny,
            project: None,
            answers: Vec::new(),
            timeout: TIMEOUT,
            own_loopback: false,
        }
    }
}

impl Policy {
    /// What the rules say of `act`; `names` are those by which its address is known now.
    pub fn decide(&self, act: &Act, names: &[Name], now: SystemTime) -> Decision {
        let rules = self.rules_on(act, names, now);
        if rules.say != Say::Ask {
            return rules;
        }
        // An answer never opens the floor: a question about it is answered each time.
        if floor(act).is_some() {
            return rules;
        }
        match self
            .answers
            .iter()
            .find(|rule| rule.matches(act, names, now))
        {
            Some(rule) => Decision {
                say: rule.say,
                reason: Reason::Answer(rule.clone()),
            },
            None => rules,
        }
    }

    /// The first three steps.
    fn rules_on(&self, act: &Act, names: &[Name], now: SystemTime) -> Decision {
        let first = |rules: &[Arc<Rule>]| {
            rules
                .iter()
                .find(|rule| rule.matches(act, names, now))
                .cloned()
        };
        let own = match (first(&self.rules), floor(act)) {
            (Some(rule), _) => Decision {
                say: rule.say,
                reason: Reason::Rule(rule),
            },
            (None, _) if self.own_loopback && is_loopback(act) => Decision {
                say: Say::Allow,
                reason: Reason::Own("the loopback is the sandbox's own"),
            },
            (None, Some(floor)) => Decision {
                say: Say::Deny,
                reason: Reason::Floor(floor),
            },
            (None, None) => Decision {
                say: unless_accepted(act, self.default),
                reason: Reason::Default,
            },
        };
        let Some(project) = &self.project else {
            return own;
        };
        let theirs = match first(&project.rules) {
            Some(rule) => Decision {
                say: rule.say,
                reason: Reason::Project(rule),
            },
            None => Decision {
                say: unless_accepted(act, project.default.unwrap_or(Say::Allow)),
                reason: Reason::ProjectDefault,
            },
        };
        if theirs.say > own.say { theirs } else { own }
    }

    /// True if some rule opens this address on the floor, by naming it, or for `name`. Such an address may be in an
    /// answer; whether it is reached is judged when it is.
    pub fn opens(&self, address: IpAddr, name: &Name) -> bool {
        let mut rules = self.rules.iter().filter(|rule| rule.say != Say::Deny);
        rules.any(|rule| rule.opens(address.to_canonical(), name))
    }

    /// True if anybody may send by `transport` to `to`: a packet does not say which program it is of, so a rule that
    /// asks who it is counts only where it refuses.
    pub fn allows_anybody(
        &self,
        transport: Transport,
        to: SocketAddr,
        names: &[Name],
        now: SystemTime,
    ) -> bool {
        let act = Act {
            who: Arc::default(),
            doing: Doing::Connect,
            transport,
            target: Target::Internet(to),
        };
        let may = |rules: &[Arc<Rule>], otherwise: Say| {
            let about = rules.iter().filter(|rule| rule.is_about(&act, names, now));
            // A rule for some program that allows it says nothing of the others.
            let mut certain = about.filter(|rule| !rule.asks_who() || rule.say != Say::Allow);
            certain.next().map_or(otherwise, |rule| rule.say) == Say::Allow
        };
        let otherwise = if Floor::of(to.ip()).is_some() {
            Say::Deny
        } else {
            self.default
        };
        let project = self.project.as_ref();
        may(&self.rules, otherwise)
            && project.is_none_or(|sheet| may(&sheet.rules, sheet.default.unwrap_or(Say::Allow)))
    }
}

/// The floor that the act reaches for.
fn floor(act: &Act) -> Option<Floor> {
    match (&act.target, act.doing) {
        (Target::Internet(to), Doing::Connect) => Floor::of(to.ip()),
        _ => None,
    }
}

/// True if both ends of it are in the same network namespace.
fn is_loopback(act: &Act) -> bool {
    // An address that has one of the loopback inside leaves by the wire.
    matches!(&act.target, Target::Internet(to) if to.ip().to_canonical().is_loopback()
        || act.doing == Doing::Connect && to.ip().to_canonical().is_unspecified())
}

/// Whoever may be found at an address may be found by everybody: taking a connection is judged by rules alone,
/// binding was judged before.
fn unless_accepted(act: &Act, default: Say) -> Say {
    if act.doing == Doing::Accept {
        Say::Allow
    } else {
        default
    }
}

/// How long a question waits, if nothing else is said.
pub const TIMEOUT: Duration = Duration::from_secs(30);
