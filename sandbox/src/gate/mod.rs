//! Where every act is judged: by rules, or by who answers a question.

mod asked;

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, Metadata};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

use rustix::fs::{Mode, OFlags};

pub use self::asked::{NotAnswered, Waited};

use crate::act::{Act, Doing, Target, Transport, Who};
use crate::ask::desk::{Desk, Then};
use crate::chronicle::{Chronicle, Entry};
use crate::floor::Floor;
use crate::learned::{By, Learned};
use crate::name::Name;
use crate::rules::{Decision, Policy, Reason, Say};
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
        if !allowed.is_empty() {
            return Some(allowed);
        }
        // An answer that held for the one act: for the names that were in the question, if there were some.
        let denied =
            |name: &Name| policy.decide(act, std::slice::from_ref(name), now).say == Say::Deny;
        let asked = before.iter().filter(|name| !denied(name)).cloned();
        (!before.is_empty()).then(|| asked.collect())
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

    /// Judges that a client of TLS names this server on a connection that was allowed by another name: this one's, or one that
    /// only a rule without a program has allowed, or somebody's. Nobody is asked, as the client has spoken already.
    pub(crate) fn judge_name(
        &self,
        who: Option<&Arc<Who>>,
        transport: Transport,
        to: SocketAddr,
        name: &Name,
    ) -> bool {
        let (policy, now) = (self.inner.policy(), SystemTime::now());
        let names = std::slice::from_ref(name);
        let act = Act {
            who: who.cloned().unwrap_or_default(),
            doing: Doing::Connect,
            transport,
            target: Target::Internet(to),
        };
        let decision = policy.decide(&act, names, now);
        let may = match who {
            Some(_) => decision.say == Say::Allow,
            None => policy.allows_anybody(transport, to, names, now),
        };
        if !may {
            let reason = Reason::Named(Box::new(decision.reason));
            self.inner.count(&act, Verdict::Deny);
            self.inner.write(&act, names, reason, Verdict::Deny, None);
        }
        may
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

    /// By which rule a name is looked up, if it is one that lasts. A once-answered question makes none: processes ask as often as they
    /// like.
    pub fn looked_up_by(&self, act: &Act) -> By {
        match self.test(act).reason {
            Reason::Rule(rule) | Reason::Project(rule) | Reason::Answer(rule)
                if rule.process.is_none() =>
            {
                By::rule(rule)
            }
            _ => By::default(),
        }
    }

    /// The rules as they are now, answers included.
    pub fn policy(&self) -> Arc<Policy> {
        self.inner.policy()
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

    fn counts(&self, act: &Act) -> (u64, u64) {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts
            .get(&(act.who.pid, act.who.started))
            .copied()
            .unwrap_or_default()
    }

    fn count(&self, act: &Act, verdict: Verdict) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        // Of as many processes most are gone; the numbers are for people, and nothing rests on them.
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

/// The most processes whose acts are counted at once.
const PROCESSES: usize = 4096;

#[cfg(test)]
mod tests;
