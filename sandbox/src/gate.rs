//! Where every act is judged: by rules, or by who answers a question.

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, Metadata};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{Mode, OFlags};

use crate::act::{Act, Doing, Target, Transport};
use crate::ask::desk::{Desk, Open, Then, Waiter};
use crate::ask::{self, Answer, Event, Life, Question};
use crate::chronicle::{Chronicle, Entry};
use crate::floor::Floor;
use crate::learned::Learned;
use crate::name::Name;
use crate::rules::edit::{self, Where};
use crate::rules::{BadFile, Decision, Origin, Policy, Reason, Rule, Say};
use crate::sys::lock;

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
    inner: Arc<Inner>,
}

/// What a gate is made of, beside its rules.
#[derive(Debug, Default)]
pub struct Setup {
    /// The rules.
    pub policy: Policy,
    /// The file that answers go to which hold always.
    pub answers: Option<PathBuf>,
    /// Paths of Unix sockets, or of directories of such, that nobody inside may reach: those by which
    /// questions are answered.
    pub private: Vec<PathBuf>,
    /// Where every decision is written down.
    pub chronicle: Option<Chronicle>,
    /// Questions wait for somebody to answer also while nobody is there: a front-end can come later.
    pub waits_for_fronts: bool,
}

/// Judges instead of rules.
type Closure = Box<dyn Fn(&Act) -> Verdict + Send + Sync>;

struct Inner {
    /// For tests.
    closure: Option<Closure>,
    policy: RwLock<Arc<Policy>>,
    answers: Option<PathBuf>,
    private: Vec<PathBuf>,
    /// The same when the gate was made, whatever lies at the paths by now, and sockets that were named since.
    pinned: Mutex<Vec<(File, PathBuf)>>,
    learned: Learned,
    desk: Desk,
    /// How many acts of a process (pid, start) were allowed, and refused.
    counts: Mutex<HashMap<(u32, u64), (u64, u64)>>,
    chronicle: Option<Chronicle>,
}

impl Gate {
    /// A gate with these rules. Nobody is asked until somebody [subscribes](Gate::subscribe).
    pub fn new(policy: Policy) -> Self {
        Self::with(Setup {
            policy,
            ..Setup::default()
        })
    }

    /// A gate made of `setup`.
    pub fn with(setup: Setup) -> Self {
        Self::make(setup, None)
    }

    /// A gate that asks `judge` alone: for tests of what stands before and behind a gate.
    pub fn of(judge: impl Fn(&Act) -> Verdict + Send + Sync + 'static) -> Self {
        Self::make(Setup::default(), Some(Box::new(judge)))
    }

    fn make(setup: Setup, closure: Option<Closure>) -> Self {
        let desk = Desk::default();
        desk.lock().waits_for_fronts = setup.waits_for_fronts;
        let inner = Inner {
            closure,
            policy: RwLock::new(Arc::new(setup.policy)),
            answers: setup.answers,
            pinned: Mutex::new(setup.private.iter().filter_map(pinned).collect()),
            private: setup.private,
            learned: Learned::default(),
            desk,
            counts: Mutex::default(),
            chronicle: setup.chronicle,
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    /// Judges `act` and tells `then` what was decided: before this returns if a rule decides, else from another
    /// thread when the question is answered, or denied because nobody did in time. `then` is called
    /// exactly once and must not block.
    pub fn judge(&self, act: &Act, then: impl FnOnce(Verdict) + Send + 'static) {
        let then = Then::new(then);
        if let Some(judge) = &self.inner.closure {
            return then.tell(judge(act));
        }
        let names = self.names_of(act);
        let decision = self.inner.decide(act, &names);
        match decision.say {
            Say::Allow => self
                .inner
                .settle(act, &names, decision, Verdict::Allow, None, then),
            Say::Deny => self
                .inner
                .settle(act, &names, decision, Verdict::Deny, None, then),
            Say::Ask => self.ask(act, names, then),
        }
    }

    /// What the rules say of an act, and which; nobody is asked, nothing is written down.
    pub fn test(&self, act: &Act) -> Decision {
        self.inner.decide(act, &self.names_of(act))
    }

    /// Whether an act is allowed without a question; nothing is written down.
    pub(crate) fn allows(&self, act: &Act) -> bool {
        match &self.inner.closure {
            Some(judge) => judge(act) == Verdict::Allow,
            None => self.test(act).say == Say::Allow,
        }
    }

    /// Writes down that something was refused which no rule was asked about.
    pub(crate) fn refused(&self, act: &Act, why: &'static str) {
        self.inner
            .write(act, &[], Reason::Own(why), Verdict::Deny, None);
    }

    /// True if a packet by `transport` to `to` may pass whichever program it is of: by rules that do not ask
    /// for the program. Nobody is asked.
    pub fn allows_packet(&self, transport: Transport, to: SocketAddr) -> bool {
        let names = self.inner.learned.names(to.ip());
        self.inner
            .policy()
            .allows_anybody(transport, to, &names, SystemTime::now())
    }

    /// By which names of its address an act was allowed; `None` if it was by the address, whatever names that has.
    /// `before`: the names when it was proposed, some of which may be dead by now.
    pub(crate) fn names_allowing(&self, act: &Act, before: &[Name]) -> Option<Vec<Name>> {
        let (policy, now) = (self.inner.policy(), SystemTime::now());
        let may = |names: &[Name]| policy.decide(act, names, now).say == Say::Allow;
        let all = self.names_since(act, before);
        if all.is_empty() || may(&[]) {
            return None;
        }
        let allowed: Vec<Name> = all
            .iter()
            .filter(|name| may(std::slice::from_ref(name)))
            .cloned()
            .collect();
        // An answer that held for the one act.
        Some(if allowed.is_empty() { all } else { allowed })
    }

    /// Whether what allowed an act has no end. If it has one, or is over already, so have the packets that it lets pass.
    pub(crate) fn lasts(&self, act: &Act, before: &[Name]) -> bool {
        if self.inner.closure.is_some() {
            return true;
        }
        let names = self.names_since(act, before);
        let decision = self.inner.policy().decide(act, &names, SystemTime::now());
        let is_bounded = match &decision.reason {
            Reason::Rule(rule) | Reason::Project(rule) | Reason::Answer(rule) => {
                rule.until.is_some()
            }
            _ => false,
        };
        decision.say == Say::Allow && !is_bounded
    }

    /// True if a rule that does not ask for the program allows this name there.
    pub(crate) fn allows_name(&self, to: SocketAddr, name: &Name) -> bool {
        let names = std::slice::from_ref(name);
        self.inner
            .policy()
            .allows_anybody(Transport::Tcp, to, names, SystemTime::now())
    }

    /// Nobody inside may reach the socket at `path`, or wherever its file is moved to.
    pub(crate) fn keep_private(&self, path: &Path) {
        lock(&self.inner.pinned).extend(pinned(&path.to_owned()));
    }

    /// The private path of a file, by its device and number, whatever path leads to it.
    pub(crate) fn private_file(&self, number: (u64, u64)) -> Option<PathBuf> {
        let is_it = |file: &Metadata| (file.dev(), file.ino()) == number;
        lock(&self.inner.pinned).iter().find_map(|(file, path)| {
            if file.metadata().is_ok_and(|file| is_it(&file)) {
                return Some(path.clone());
            }
            let names = std::fs::read_dir(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
            let names = names.filter_map(Result::ok);
            let found = names.filter(|name| name.metadata().is_ok_and(|file| is_it(&file)));
            found.map(|name| path.join(name.file_name())).next()
        })
    }

    /// Which names the addresses have that the program was given.
    pub fn learned(&self) -> &Learned {
        &self.inner.learned
    }

    /// The rules as they are now, answers included.
    pub fn policy(&self) -> Arc<Policy> {
        self.inner.policy()
    }

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

    /// Writes down that an answer to a name had addresses of the floor, which were left away.
    pub(crate) fn left_away(&self, act: &Act, floor: Floor) {
        self.inner
            .write(act, &[], Reason::Floor(floor), Verdict::Deny, None);
    }

    /// Waits until everything so far is written down; what is decided later is not.
    pub fn end(&self) {
        if let Some(chronicle) = &self.inner.chronicle {
            chronicle.end();
        }
    }

    /// True if a question would be asked of somebody.
    pub fn has_fronts(&self) -> bool {
        self.inner.desk.lock().has_fronts()
    }

    /// How many questions are open.
    pub fn open_questions(&self) -> usize {
        self.inner.desk.lock().open.len()
    }

    /// The names of the address that an act is about, now.
    pub(crate) fn names_of(&self, act: &Act) -> Vec<Name> {
        match &act.target {
            Target::Internet(to) => self.inner.learned.names(to.ip()),
            _ => Vec::new(),
        }
    }

    /// Those, and those that it had before.
    fn names_since(&self, act: &Act, before: &[Name]) -> Vec<Name> {
        let mut names = self.names_of(act);
        let dead: Vec<_> = before
            .iter()
            .filter(|name| !names.contains(name))
            .cloned()
            .collect();
        names.extend(dead);
        names
    }

    fn ask(&self, act: &Act, names: Vec<Name>, then: Then) {
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
    fn policy(&self) -> Arc<Policy> {
        self.policy
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn decide(&self, act: &Act, names: &[Name]) -> Decision {
        if let (Target::Path(path), Doing::Connect) = (&act.target, act.doing)
            && (self.private.iter())
                .chain(lock(&self.pinned).iter().map(|(_, path)| path))
                .any(|private| path.starts_with(private))
        {
            let why = "it is the socket of those who answer questions";
            return Decision {
                say: Say::Deny,
                reason: Reason::Own(why),
            };
        }
        self.policy().decide(act, names, SystemTime::now())
    }

    /// Counts and writes down what was decided, and tells who waits for it.
    fn settle(
        &self,
        act: &Act,
        names: &[Name],
        decision: Decision,
        verdict: Verdict,
        waited: Option<Waited>,
        then: Then,
    ) {
        self.count(act, verdict);
        self.write(act, names, decision.reason, verdict, waited);
        then.tell(verdict);
    }

    fn write(
        &self,
        act: &Act,
        names: &[Name],
        reason: Reason,
        verdict: Verdict,
        waited: Option<Waited>,
    ) {
        let allowed = verdict == Verdict::Allow;
        if let Some(chronicle) = &self.chronicle
            && chronicle.wants(allowed)
        {
            chronicle.write(Entry {
                time: SystemTime::now(),
                act: act.clone(),
                names: names.to_vec(),
                allowed,
                reason,
                waited,
            });
        }
    }

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

    fn counts(&self, act: &Act) -> (u64, u64) {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts
            .get(&(act.who.pid, act.who.started))
            .copied()
            .unwrap_or_default()
    }

    fn count(&self, act: &Act, verdict: Verdict) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        // Of so many processes most are gone; the numbers are for people, and nothing rests on them.
        if counts.len() >= PROCESSES {
            counts.clear();
        }
        let (allowed, denied) = counts.entry((act.who.pid, act.who.started)).or_default();
        *(if verdict == Verdict::Allow {
            allowed
        } else {
            denied
        }) += 1;
    }
}

fn pinned(path: &PathBuf) -> Option<(File, PathBuf)> {
    let (flags, mode) = (OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let file = rustix::fs::open(path, flags, mode).ok()?;
    Some((File::from(file), path.clone()))
}

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

/// A gate that is dropped is noticed after this time.
const LOOK: Duration = Duration::from_secs(1);
/// Of so many processes the acts are counted at once.
const PROCESSES: usize = 4096;

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
