//! Patterns of interfaces, whose sources come and go with these.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use vnplug_os::event;
use vnplug_os::peer_log;
use vnplug_ring::control::code;

use super::Control;
use super::sources::RING_BYTES;
use crate::hub::Refusal;
use crate::pattern::{News, OpenPattern, Order, Watching, What};
use crate::spec::OpenSource;

/// The patterns in force.
pub(super) struct Patterns {
    /// By name.
    all: BTreeMap<String, Running>,
    /// By which of them a source is there, by its number.
    owners: BTreeMap<String, u64>,
    tell: Sender<News>,
    news: Receiver<News>,
    next: u64,
}

/// A pattern whose thread runs.
struct Running {
    number: u64,
    /// The names of its sources, and which openings they were.
    members: BTreeMap<String, u64>,
    watching: Watching,
}

impl Default for Patterns {
    fn default() -> Self {
        let (tell, news) = channel();
        Self {
            all: BTreeMap::new(),
            owners: BTreeMap::new(),
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
        let found = all.find(|(_, it)| it.members.contains_key(source));
        found.map(|(name, _)| name.as_str())
    }

    /// Notes that a source has this name, by a pattern or, as [`NAMED`], by none: no other pattern has one of that name now.
    fn note(&mut self, name: &str, owner: u64) {
        if owner != NAMED {
            self.owners.insert(name.to_owned(), owner);
        }
        self.tell_others(owner, || Order::Taken(name.to_owned()));
    }

    /// Notes that a source is gone: a pattern that matches may have its interface again.
    pub(super) fn free(&mut self, name: &str) {
        let owner = self.owners.remove(name).unwrap_or(NAMED);
        self.tell_others(owner, || Order::Free(name.to_owned()));
    }

    fn tell_others(&self, but: u64, order: impl Fn() -> Order) {
        let others = self.all.values().filter(|it| it.number != but);
        others.for_each(|it| it.watching.tell(order()));
    }

    fn tell(&self, number: u64, order: Order) {
        if let Some(running) = self.all.values().find(|it| it.number == number) {
            running.watching.tell(order);
        }
    }
}

impl Control {
    /// Starts a pattern's thread.
    pub(super) fn welcome_pattern(&mut self, pattern: OpenPattern) -> Result<(), Refusal> {
        let name = pattern.name().to_owned();
        self.patterns.next += 1;
        let number = self.patterns.next;
        let (tell, bell) = (self.patterns.tell.clone(), self.bell.clone());
        let present = self.hub.present();
        let taken = present.map(|(_, source)| source.name.clone()).collect();
        let watching = pattern.start(number, taken, tell, bell);
        let watching = watching.map_err(|error| {
            let what = format!("cannot watch for interfaces {name:?}: {error}");
            Refusal::new(code::INTERNAL, what)
        })?;
        log::info!(target: "source", "interfaces {name:?} are received as they come");
        let running = Running {
            number,
            members: BTreeMap::new(),
            watching,
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
        for member in pattern.members.keys() {
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
        let found = all.find_map(|it| Some((it.number, it.members.remove(name)?)));
        if found.is_some() {
            self.part_from_member(token, name, why);
        }
        // Before it lets go: it is not to have the interface again now.
        self.patterns.note(name, NAMED);
        if let Some((number, opening)) = found {
            self.patterns.tell(number, Order::LetGo(opening));
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
            What::Came(source, opening) => self.member_came(number, source, opening),
            What::Went(name) => {
                let mut all = self.patterns.all.values_mut();
                let running = all.find(|it| it.number == number);
                // Another source may have the name by now.
                if running.is_some_and(|it| it.members.remove(&name).is_some()) {
                    self.part_from_member(0, &name, GONE);
                }
            }
            What::Settled => {}
        }
    }

    fn member_came(&mut self, number: u64, source: Box<OpenSource>, opening: u64) {
        let name = source.name().to_owned();
        let is_new = self.must_be_new(&name);
        let mut all = self.patterns.all.iter_mut();
        let Some((pattern, running)) = all.find(|(_, it)| it.number == number) else {
            // It was removed meanwhile.
            self.jobs.discard(source, RING_BYTES);
            return;
        };
        if let Err(refusal) = is_new {
            // Another source came first, of which the pattern's thread was told meanwhile. That is no fault.
            let level = log::Level::Debug;
            peer_log!(level, "source", "pattern {pattern:?}: {}", refusal.text);
            running.watching.tell(Order::LetGo(opening));
            self.jobs.discard(source, RING_BYTES);
            return;
        }
        let pattern = pattern.clone();
        running.members.insert(name.clone(), opening);
        self.patterns.note(&name, number);
        self.policy.note_member(&name, &pattern);
        if let Err(refusal) = self.welcome(*source) {
            let level = log::Level::Error;
            peer_log!(level, "source", "pattern {pattern:?}: {}", refusal.text);
            if let Some(running) = self.patterns.all.get_mut(&pattern) {
                running.members.remove(&name);
            }
            self.part_from_member(0, &name, GONE);
            self.patterns.free(&name);
            self.patterns.tell(number, Order::Failed(opening));
        }
    }
}

/// The number of no pattern.
const NAMED: u64 = 0;
/// How long the daemon waits for the sources of its patterns before it serves.
const SETTLING: Duration = Duration::from_secs(10);
/// The most that is done before others are served.
const AT_ONCE: usize = 16;
/// Why a port is gone.
const GONE: &str = "the interface of this source is gone, or has another name";
