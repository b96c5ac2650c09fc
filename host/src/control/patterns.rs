//! Patterns of interfaces, whose sources come and go with these.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use vnplug_os::event;
use vnplug_os::peer_log;
use vnplug_ring::control::code;

use super::Control;
use super::sources::RING_BYTES;
use crate::hub::Refusal;
use crate::pattern::{News, OpenPattern, Watching, What};
use crate::spec::OpenSource;

/// The patterns in force.
pub(super) struct Patterns {
    /// By name.
    all: BTreeMap<String, Running>,
    tell: Sender<News>,
    news: Receiver<News>,
    next: u64,
}

/// A pattern whose thread runs.
struct Running {
    number: u64,
    /// The names of its sources.
    members: BTreeSet<String>,
    _watching: Watching,
}

impl Default for Patterns {
    fn default() -> Self {
        let (tell, news) = channel();
        Self {
            all: BTreeMap::new(),
            tell,
            news,
            next: 0,
        }
    }
}

impl Patterns {
    pub(super) fn has(&self, name: &str) -> bool {
        self.all.contains_key(name)
    }

    /// The pattern that a source is there by.
    pub(super) fn of(&self, source: &str) -> Option<&str> {
        let mut all = self.all.iter();
        let found = all.find(|(_, it)| it.members.contains(source));
        found.map(|(name, _)| name.as_str())
    }
}

impl Control {
    /// Starts a pattern's thread.
    pub(super) fn welcome_pattern(&mut self, pattern: OpenPattern) -> Result<(), Refusal> {
        let name = pattern.name().to_owned();
        self.patterns.next += 1;
        let number = self.patterns.next;
        let (tell, bell) = (self.patterns.tell.clone(), self.bell.clone());
        let watching = pattern.start(number, tell, bell).map_err(|error| {
            let what = format!("cannot watch for interfaces {name:?}: {error}");
            Refusal::new(code::INTERNAL, what)
        })?;
        log::info!(target: "source", "interfaces {name:?} are received as they come");
        let running = Running {
            number,
            members: BTreeSet::new(),
            _watching: watching,
        };
        self.patterns.all.insert(name, running);
        Ok(())
    }

    /// Ends a pattern with all its sources.
    pub(super) fn part_from_pattern(&mut self, token: u64, name: &str, why: &str) {
        let Some(pattern) = self.patterns.all.remove(name) else {
            return;
        };
        log::info!(target: "source", "pattern {name:?} is removed");
        for member in &pattern.members {
            self.part_from_member(token, member, why);
        }
    }

    /// Closes a source that a pattern has no more.
    pub(super) fn part_from_member(&mut self, token: u64, name: &str, why: &str) {
        self.policy.forget_member(name);
        let found = self.hub.present().find(|(_, source)| source.name == name);
        if let Some((place, _)) = found {
            let ports = self.retire(token, place, why);
            peer_log!(
                log::Level::Info,
                "source",
                "source {name:?} is removed, with {ports} ports: {why}"
            );
        }
    }

    /// Makes room for a source that the operator names: the pattern that has one of that name gives way.
    pub(super) fn take_from_pattern(&mut self, token: u64, name: &str, why: &str) {
        let mut all = self.patterns.all.values_mut();
        if all.any(|it| it.members.remove(name)) {
            self.part_from_member(token, name, why);
        }
    }

    /// Goes on with what the patterns' threads tell.
    pub(super) fn patterns_told(&mut self) {
        for _ in 0..AT_ONCE {
            let Ok(news) = self.patterns.news.try_recv() else {
                return;
            };
            self.pattern_told(news);
        }
        // The rest when others were served.
        event::ring(&self.bell);
    }

    /// Waits until each pattern has the sources of the interfaces that are there: who comes back to one finds it.
    pub(super) fn settle_patterns(&mut self) {
        let until = Instant::now() + SETTLING;
        let mut left = self.patterns.all.len();
        while left > 0 {
            let pause = until.saturating_duration_since(Instant::now());
            let Ok(news) = self.patterns.news.recv_timeout(pause) else {
                log::warn!(
                    target: "source",
                    "not all interfaces of {left} patterns are received yet: their readers may be refused at first"
                );
                return;
            };
            left -= usize::from(matches!(news.what, What::Settled));
            self.pattern_told(news);
        }
    }

    fn pattern_told(&mut self, News { number, what }: News) {
        match what {
            What::Came(source) => self.member_came(number, source),
            What::Went(name) => {
                let mut all = self.patterns.all.values_mut();
                let running = all.find(|it| it.number == number);
                // Another source may have the name by now.
                if running.is_some_and(|it| it.members.remove(&name)) {
                    self.part_from_member(0, &name, GONE);
                }
            }
            What::Settled => {}
        }
    }

    fn member_came(&mut self, number: u64, source: Box<OpenSource>) {
        let name = source.name().to_owned();
        let is_new = self.must_be_new(&name);
        let mut all = self.patterns.all.iter_mut();
        let Some((pattern, running)) = all.find(|(_, it)| it.number == number) else {
            // It was removed meanwhile.
            self.jobs.discard(source, RING_BYTES);
            return;
        };
        if let Err(refusal) = is_new {
            let level = log::Level::Warn;
            peer_log!(level, "source", "pattern {pattern:?}: {}", refusal.text);
            self.jobs.discard(source, RING_BYTES);
            return;
        }
        let pattern = pattern.clone();
        running.members.insert(name.clone());
        self.policy.note_member(&name, &pattern);
        if let Err(refusal) = self.welcome(*source) {
            log::error!(target: "source", "pattern {pattern:?}: {}", refusal.text);
            self.take_from_pattern(0, &name, GONE);
        }
    }
}

/// How long the daemon waits for the sources of its patterns before it serves.
const SETTLING: Duration = Duration::from_secs(10);
/// The most that is done before others are served.
const AT_ONCE: usize = 16;
/// Why a port is gone.
const GONE: &str = "the interface of this source is gone, or has another name";
