//! What no rule decides, people are asked about: a question opens, is answered or not, and everybody hears that waits for it.

use std::fmt;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::{Gate, Inner, Verdict};
use crate::act::{Act, Doing};
use crate::ask::desk::{Open, Then, Waiter};
use crate::ask::{self, Answer, Event, Life, Question};
use crate::name::Name;
use crate::rules::edit::{self, Where};
use crate::rules::{BadFile, Decision, Origin, Policy, Reason, Rule, Say};

/// How a decision came about that somebody had to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// Who decided: `terminal`, `socket`, `time`, `rule`.
    pub by: &'static str,
    /// How long that took.
    pub time: Duration,
}

/// Why an answer was not taken.
#[derive(Debug)]
pub enum NotAnswered {
    /// No question with this number is open.
    Late(u64),
    /// The question has no such offer.
    NoOffer(usize),
    /// It holds in this session, but could not be written down.
    NotKept(BadFile),
}

impl std::error::Error for NotAnswered {}

impl fmt::Display for NotAnswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late(id) => write!(f, "question {id} is not open any more"),
            Self::NoOffer(offer) => write!(f, "the question has no offer {offer}"),
            Self::NotKept(error) => write!(f, "the answer holds for this session only: {error}"),
        }
    }
}

impl Gate {
    /// Questions and their ends, for somebody who asks people; first those that are open. Who does not read for
    /// long is told nothing more.
    pub fn subscribe(&self) -> Receiver<Event> {
        self.inner.desk.lock().subscribe()
    }

    /// Answers a question; `by` says who does.
    ///
    /// # Errors
    /// The question is not open any more, or has no such offer; or the answer holds, and the file of answers
    /// cannot be written.
    pub fn answer(&self, id: u64, answer: Answer, by: &'static str) -> Result<(), NotAnswered> {
        self.inner.answer(id, answer, by)
    }

    /// True if a question would be asked of somebody.
    pub fn has_fronts(&self) -> bool {
        self.inner.desk.lock().has_fronts()
    }

    /// How many questions are open.
    pub fn open_questions(&self) -> usize {
        self.inner.desk.lock().open.len()
    }

    pub(super) fn ask(&self, act: &Act, names: Vec<Name>, then: Then) {
        let inner = &self.inner;
        let (offers, lasts) = ask::offers(act, &names);
        let mut questions = inner.desk.lock();
        // Between the first look and this one somebody may have answered: one question per rule.
        let decision = inner.decide(act, &names);
        let verdict = if decision.say == Say::Allow {
            Verdict::Allow
        } else {
            Verdict::Deny
        };
        if decision.say != Say::Ask {
            drop(questions);
            return inner.settle(act, &names, decision, verdict, None, then);
        }
        let nobody = Decision {
            say: Say::Deny,
            reason: Reason::Nobody,
        };
        if !questions.has_fronts() {
            drop(questions);
            return inner.settle(act, &names, nobody, Verdict::Deny, None, then);
        }
        let before = inner.counts(act);
        let deadline = Instant::now() + inner.policy().timeout;
        let make = |id| Question {
            id,
            act: act.clone(),
            names: names.clone(),
            offers,
            lasts,
            before,
            deadline,
        };
        let waiter = Waiter {
            act: act.clone(),
            names: names.clone(),
            since: Instant::now(),
            then,
        };
        let waits = questions.wait(Box::new(waiter), make);
        let is_watched = std::mem::replace(&mut questions.watched, true);
        drop(questions);
        if !is_watched {
            watch(Arc::downgrade(inner));
        }
        if let Err(waiter) = waits {
            inner.settle(act, &names, nobody, Verdict::Deny, None, waiter.then);
        }
        inner.desk.wake();
    }
}

impl Inner {
    fn answer(&self, id: u64, answer: Answer, by: &'static str) -> Result<(), NotAnswered> {
        let mut questions = self.desk.lock();
        let found = questions.open.iter().find(|open| open.question.id == id);
        let question = found.ok_or(NotAnswered::Late(id))?.question.clone();
        let offer = question
            .offers
            .get(answer.offer)
            .ok_or(NotAnswered::NoOffer(answer.offer))?;
        let life = if question.lasts {
            answer.life
        } else {
            Life::Once
        };
        let rule = Arc::new(made(offer, answer.allow, life, &question));
        self.remember(&rule);
        // Those that were asked, and those that the new rule answers, too.
        let asked = questions.take(|open| open.question.id == id);
        let others = questions
            .take(|open| self.decide(&open.question.act, &open.question.names).say != Say::Ask);
        questions.tell(&Event::Settled {
            id,
            allow: answer.allow,
            by,
        });
        for open in &others {
            let allow = self.decide(&open.question.act, &open.question.names).say == Say::Allow;
            questions.tell(&Event::Settled {
                id: open.question.id,
                allow,
                by: "rule",
            });
        }
        drop(questions);
        // Before the program goes on: it may end at once, and the sandbox with it.
        let kept = match (life, &self.answers) {
            (Life::Always | Life::Until(_), Some(path)) => {
                edit::add(path, &rule, Where::First).map_err(NotAnswered::NotKept)
            }
            _ => Ok(()),
        };
        let verdict = if answer.allow {
            Verdict::Allow
        } else {
            Verdict::Deny
        };
        self.tell_all(asked, |_| (Reason::Answered, verdict), by);
        let anew = |waiter: &Waiter| {
            let decision = self.decide(&waiter.act, &waiter.names);
            let verdict = if decision.say == Say::Allow {
                Verdict::Allow
            } else {
                Verdict::Deny
            };
            (decision.reason, verdict)
        };
        self.tell_all(others, anew, "rule");
        kept
    }

    /// From now on the rule is looked at where rules say *ask*. Answers whose time is over are forgotten.
    fn remember(&self, rule: &Arc<Rule>) {
        let mut policy = self.policy.write().unwrap_or_else(PoisonError::into_inner);
        let now = SystemTime::now();
        let mut next = Policy::clone(&policy);
        next.answers
            .retain(|rule| rule.until.is_none_or(|until| until > now));
        next.answers.insert(0, rule.clone());
        *policy = Arc::new(next);
    }

    fn tell_all(
        &self,
        open: Vec<Open>,
        of: impl Fn(&Waiter) -> (Reason, Verdict),
        by: &'static str,
    ) {
        for waiter in open.into_iter().flat_map(|open| open.waiting) {
            let (reason, verdict) = of(&waiter);
            let waited = Waited {
                by,
                time: waiter.since.elapsed(),
            };
            let say = if verdict == Verdict::Allow {
                Say::Allow
            } else {
                Say::Deny
            };
            let decision = Decision { say, reason };
            self.settle(
                &waiter.act,
                &waiter.names,
                decision,
                verdict,
                Some(waited),
                waiter.then,
            );
        }
    }

    /// Refuses questions whose time is over. For a while their processes are not asked about the same again.
    fn expire(&self, overdue: Vec<Open>) {
        for open in &overdue {
            if let Some(offer) = open.question.offers.first() {
                self.remember(&Arc::new(made(offer, false, Life::Once, &open.question)));
            }
            let settled = Event::Settled {
                id: open.question.id,
                allow: false,
                by: "time",
            };
            self.desk.lock().tell(&settled);
        }
        self.tell_all(overdue, |_| (Reason::TimedOut, Verdict::Deny), "time");
    }
}

/// The rule that an answer makes.
fn made(offer: &Rule, allow: bool, life: Life, question: &Question) -> Rule {
    let mut rule = offer.clone();
    rule.say = if allow { Say::Allow } else { Say::Deny };
    rule.origin = Origin::Answer;
    match life {
        Life::Once => {
            let is_name = question.act.doing == Doing::Resolve;
            let hold = if is_name { ask::ONCE_NAME } else { ask::ONCE };
            rule.process = Some((question.act.who.pid, question.act.who.started));
            rule.until = Some(SystemTime::now() + hold);
        }
        Life::Until(until) => rule.until = Some(until),
        Life::Session | Life::Always => {}
    }
    rule
}

/// A thread that refuses questions whose time is over, while there are any.
fn watch(inner: Weak<Inner>) {
    let run = move || {
        while let Some(inner) = inner.upgrade() {
            let overdue = inner.desk.overdue(LOOK);
            inner.expire(overdue);
            if inner.desk.is_done() {
                return;
            }
        }
    };
    // Without it questions stay open until somebody answers, and nothing is done that nobody allowed.
    if let Err(error) = thread::Builder::new()
        .name("vnplug-ask".to_owned())
        .spawn(run)
    {
        log::warn!("questions have no end: {error}");
    }
}

/// A gate that is dropped is noticed after this time.
const LOOK: Duration = Duration::from_secs(1);
