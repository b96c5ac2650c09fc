//! What happened: every decision as a line of JSON, a line for people for each new denial, and what is learnt of it.
//!
//! A thread of its own writes; acts never wait for it. If it cannot follow, decisions are counted instead of
//! written, and the file says how many.

use std::collections::HashSet;
use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use vnplug_ring::text::escape;

use crate::act::{Act, Doing, Who};
use crate::ask::show;
use crate::gate::Waited;
use crate::learn::Learner;
use crate::name::Name;
use crate::rules::{Place, Reason, Rule, edit};

/// A decision.
#[derive(Clone, Debug)]
pub struct Entry {
    /// When.
    pub time: SystemTime,
    /// About what.
    pub act: Act,
    /// By which names its address was known.
    pub names: Vec<Name>,
    /// What was decided.
    pub allowed: bool,
    /// Why.
    pub reason: Reason,
    /// Who was waited for.
    pub waited: Option<Waited>,
}

/// Shows a line to people.
pub type Notes = Box<dyn FnMut(&str) + Send>;

/// Where decisions are written.
#[derive(Default)]
pub struct Sinks {
    /// Every decision, as lines of JSON.
    pub lines: Option<Box<dyn Write + Send>>,
    /// Each new kind of denial, as a line for people.
    pub notes: Option<Notes>,
    /// What becomes a profile.
    pub learner: Option<Learner>,
    /// The profile in use, which notes name.
    pub profile: Option<String>,
}

/// Writes decisions down.
pub struct Chronicle {
    /// Somebody reads what was allowed, too.
    all: bool,
    sender: SyncSender<Message>,
    lost: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Message {
    Entry(Box<Entry>),
    End,
}

impl Chronicle {
    /// Starts its thread.
    ///
    /// # Errors
    /// The system's, if there can be no more threads.
    pub fn start(sinks: Sinks) -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(BACKLOG);
        let all = sinks.lines.is_some() || sinks.learner.is_some();
        let lost = Arc::new(AtomicU64::new(0));
        let its_lost = lost.clone();
        let run = move || {
            Writer {
                sinks,
                told: HashSet::new(),
            }
            .run(&receiver, &its_lost)
        };
        let thread = thread::Builder::new()
            .name("vnplug-chronicle".to_owned())
            .spawn(run)?;
        Ok(Self {
            all,
            sender,
            lost,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Whether a decision to allow something, or to refuse it, is written anywhere: to hand one over wakes a thread.
    pub fn wants(&self, allowed: bool) -> bool {
        self.all || !allowed
    }

    /// Writes a decision down, or counts it if there is no room.
    pub fn write(&self, entry: Entry) {
        if self
            .sender
            .try_send(Message::Entry(Box::new(entry)))
            .is_err()
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until everything so far is written; later decisions are not.
    pub fn end(&self) {
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread
            && self.sender.send(Message::End).is_ok()
        {
            // It has told already what it died of.
            let _ = thread.join();
        }
    }
}

impl Drop for Chronicle {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Chronicle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chronicle").finish_non_exhaustive()
    }
}

impl fmt::Debug for Sinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sinks").finish_non_exhaustive()
    }
}

struct Writer {
    sinks: Sinks,
    told: HashSet<String>,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>, lost: &AtomicU64) {
        loop {
            match messages.recv_timeout(IDLE) {
                Ok(Message::Entry(entry)) => self.write(&entry),
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => self.rest(),
            }
            match lost.swap(0, Ordering::Relaxed) {
                0 => {}
                count => self.line(&json!({"time": time(SystemTime::now()), "not_written": count})),
            }
        }
        self.rest();
    }

    fn write(&mut self, entry: &Entry) {
        if let Some(learner) = &mut self.sinks.learner {
            learner.learn(entry);
        }
        if !entry.allowed {
            self.note(entry);
        }
        if self.sinks.lines.is_some() {
            self.line(&entry_json(entry));
        }
    }

    /// What can wait until there is nothing else to do.
    fn rest(&mut self) {
        if let Some(lines) = &mut self.sinks.lines
            && let Err(error) = lines.flush()
        {
            self.broken(&error);
        }
        if let Some(learner) = &mut self.sinks.learner
            && let Err(error) = learner.save()
        {
            log::warn!("what was learnt cannot be written: {error}");
        }
    }

    fn line(&mut self, value: &Value) {
        if let Some(lines) = &mut self.sinks.lines
            && let Err(error) = writeln!(lines, "{value}")
        {
            self.broken(&error);
        }
    }

    fn broken(&mut self, error: &std::io::Error) {
        log::warn!("decisions are written down no more: {error}");
        self.sinks.lines = None;
    }

    /// One line for people, the first time such a thing is refused.
    fn note(&mut self, entry: &Entry) {
        let Some(notes) = &mut self.sinks.notes else {
            return;
        };
        let act = &entry.act;
        let program = act.who.program.to_string_lossy();
        let kind = format!("{program} {}", show::doing(act, &entry.names));
        if self.told.len() >= NOTES {
            return;
        }
        if self.told.insert(kind) {
            let what = show::doing(act, &entry.names);
            let how = remedy(entry, self.sinks.profile.as_deref());
            notes(&format!(
                "refused: {} wanted to {what}: {}; {how}",
                show::process(&act.who),
                why(&entry.reason)
            ));
            if self.told.len() == NOTES {
                notes("more is refused, and no longer told here: see the log");
            }
        }
    }
}

/// Why something was decided, for people.
pub fn why(reason: &Reason) -> String {
    escape(&match reason {
        Reason::Rule(rule) => format!("{} says so", rule.origin),
        Reason::Default => "no rule is about it".to_owned(),
        Reason::Floor(floor) => format!("the address is of the floor ({floor})"),
        Reason::Project(rule) => format!("the project's {} says so", rule.origin),
        Reason::ProjectDefault => {
            "the project's file says so of what it has no rule about".to_owned()
        }
        Reason::Answer(rule) if rule.process.is_some() => "it was answered a moment ago".to_owned(),
        Reason::Answer(_) => "an earlier answer says so".to_owned(),
        Reason::Answered => "that was the answer".to_owned(),
        Reason::TimedOut => "nobody answered in time".to_owned(),
        Reason::Nobody => "there is nobody to ask".to_owned(),
        Reason::Named(reason) => {
            let why = why(reason);
            format!("it named this server by TLS where another one was allowed: {why}")
        }
        Reason::Own(why) => (*why).to_owned(),
    })
}

/// What allows it, for people.
fn remedy(entry: &Entry, profile: Option<&str>) -> String {
    match entry.decided() {
        Reason::Own(_) => "no rule allows it".to_owned(),
        Reason::Rule(rule) => escape(&format!("change {} to allow it", rule.origin)),
        Reason::Project(_) | Reason::ProjectDefault => {
            "only the project's file can allow it".to_owned()
        }
        _ if !entry.has_rule() => "its program is not known, and no rule can name it".to_owned(),
        _ => format!("to allow it: {}", show::command(&entry.allowing(), profile)),
    }
}

impl Entry {
    /// What the rules said.
    fn decided(&self) -> &Reason {
        match &self.reason {
            Reason::Named(reason) => reason,
            reason => reason,
        }
    }

    /// Whether a rule can say what it is about, the program too. A server's name nobody's connection may say without one.
    fn has_rule(&self) -> bool {
        let who = &self.act.who;
        let is_known = !who.program.as_os_str().is_empty() || who.hash.is_some();
        is_known || matches!(self.reason, Reason::Named(_))
    }

    /// The rule that allows it, or would.
    pub fn allowing(&self) -> Rule {
        let mut rule = show::allowing(&self.act, &self.names);
        let is_floor = matches!(self.decided(), Reason::Floor(_));
        if let (Reason::Named(_), Some(name)) = (&self.reason, self.names.first()) {
            rule.to = vec![Place::Name(name.clone())];
            rule.local = is_floor;
            if *self.act.who == Who::default() {
                (rule.program, rule.sha256) = (None, None);
            }
        }
        // A name was answered with addresses of the floor.
        rule.local |= is_floor && self.act.doing == Doing::Resolve;
        rule
    }
}

/// A decision as JSON.
pub fn entry_json(entry: &Entry) -> Value {
    let (reason, rule) = match entry.decided() {
        Reason::Rule(rule) => ("rule", Some(rule)),
        Reason::Default => ("default", None),
        Reason::Floor(_) => ("floor", None),
        Reason::Project(rule) => ("project", Some(rule)),
        Reason::ProjectDefault => ("project-default", None),
        Reason::Answer(rule) => ("answer", Some(rule)),
        Reason::Answered => ("answered", None),
        Reason::TimedOut => ("timed-out", None),
        Reason::Nobody => ("nobody", None),
        // It is said of another one, and never of itself.
        Reason::Own(_) | Reason::Named(_) => ("sandbox", None),
    };
    let reason = match entry.reason {
        Reason::Named(_) => "server-name",
        _ => reason,
    };
    let mut object = show::act_json(&entry.act, &entry.names);
    object["time"] = json!(time(entry.time));
    object["verdict"] = json!(if entry.allowed { "allow" } else { "deny" });
    object["reason"] = json!(reason);
    object["why"] = json!(why(&entry.reason));
    object["rule"] = json!(rule.map(|rule| rule.origin.to_string()));
    if let Some(waited) = entry.waited {
        object["by"] = json!(waited.by);
        object["waited_ms"] = json!(u64::try_from(waited.time.as_millis()).unwrap_or(u64::MAX));
    }
    if !entry.allowed && !matches!(entry.decided(), Reason::Own(_)) && entry.has_rule() {
        object["allow_with"] = json!(edit::write(&entry.allowing()));
    }
    object
}

/// RFC 3339 with microseconds.
fn time(time: SystemTime) -> String {
    let micros = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .subsec_micros();
    let whole = edit::written_time(time);
    format!("{}.{micros:06}Z", whole.trim_end_matches('Z'))
}

/// Decisions that wait to be written.
const BACKLOG: usize = 8192;
/// Different denials that people are told of.
const NOTES: usize = 200;
/// If nothing happened for this time, there is time for what can wait.
const IDLE: Duration = Duration::from_millis(200);
