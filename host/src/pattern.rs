//! A source for every interface whose name matches a pattern.
//!
//! ```text
//!   netlink ── which interfaces there are ── matches? ──┬── new: opened ──► control thread
//!                                                       └── gone, or of another name: told ──► control thread
//!
//!   control thread ── names that others have, and have no more; sources that it did not keep ──► looked again
//! ```
//!
//! A thread for each pattern hears of interfaces, in the pattern's network namespace, and has the members opened, a few at a time. It
//! never has more of them than the pattern allows, whoever makes interfaces.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::at_once::{self, AT_ONCE, Together};
use crate::spec::{Means, OpenSource, SourceSpec, Star};
use vnplug_os::event;
use vnplug_os::links::Links;
use vnplug_os::namespace::Id;
use vnplug_os::peer_log;
use vnplug_path::source::SourceError;
use vnplug_path::source::af_packet::Namespace;

/// What a specification becomes when it is opened.
pub(crate) enum Opened {
    /// A source.
    One(Box<OpenSource>),
    /// A pattern, whose sources come and go.
    Many(Box<OpenPattern>),
}

impl Opened {
    /// Opens what a specification says.
    ///
    /// # Errors
    /// What is wrong, with the name.
    pub(crate) fn open(spec: &SourceSpec, means: &Means) -> Result<Self, String> {
        let opened = match spec.is_pattern() {
            false => spec.open(means).map(Box::new).map(Self::One),
            true => OpenPattern::open(spec, means).map(Box::new).map(Self::Many),
        };
        opened.map_err(|error| spec.blame(&error, means))
    }

    /// Opens what each specification says, in their order; neighbours that are packet sockets at once, as each waits for the kernel.
    pub(crate) fn each(
        specs: &[SourceSpec],
        open: impl Fn(&SourceSpec) -> Result<Self, String> + Sync,
    ) -> Vec<Result<Self, String>> {
        Self::each_while(specs, open, || true)
    }

    /// The same, all of them or none.
    ///
    /// # Errors
    /// What is wrong with the first, in their order, that cannot be opened. No others are begun when that is known.
    pub(crate) fn all(
        specs: &[SourceSpec],
        open: impl Fn(&SourceSpec) -> Result<Self, String> + Sync,
    ) -> Result<Together<Self>, String> {
        let failed = AtomicBool::new(false);
        let note = |spec: &SourceSpec| {
            let opened = open(spec);
            failed.fetch_or(opened.is_err(), Ordering::Relaxed);
            opened
        };
        let each = Self::each_while(specs, note, || !failed.load(Ordering::Relaxed));
        let (mut all, mut wrong) = (Together::default(), None);
        for opened in each {
            match opened {
                Ok(opened) => all.push_back(opened),
                Err(error) => wrong = wrong.or(Some(error)),
            }
        }
        wrong.map_or(Ok(all), Err)
    }

    fn each_while(
        specs: &[SourceSpec],
        open: impl Fn(&SourceSpec) -> Result<Self, String> + Sync,
        goes_on: impl Fn() -> bool + Sync,
    ) -> Vec<Result<Self, String>> {
        let runs = specs.chunk_by(|one, next| one.is_packet_socket() && next.is_packet_socket());
        let opened = runs.flat_map(|run| {
            let opened = at_once::each(run.iter().take_while(|_| goes_on()), &open);
            let bug = |spec: &SourceSpec| {
                let what = "opening it failed, which is a bug in vnplugd: the log says where";
                Err(format!("source {:?}: {what}", spec.name()))
            };
            let opened = opened.into_iter().zip(run);
            opened.map(move |(opened, spec)| opened.unwrap_or_else(|| bug(spec)))
        });
        opened.collect()
    }

    pub(crate) fn name(&self) -> &str {
        self.spec().name()
    }

    /// As it was written.
    pub(crate) fn spec(&self) -> &SourceSpec {
        match self {
            Self::One(source) => source.spec(),
            Self::Many(pattern) => &pattern.spec,
        }
    }
}

/// A pattern whose interfaces are known and whose thread has not begun.
pub(crate) struct OpenPattern {
    spec: SourceSpec,
    /// What their names are like.
    interfaces: Star,
    most: usize,
    means: Means,
    namespace: Option<Arc<Namespace>>,
    links: Option<(Links, Option<Id>)>,
}

/// What a pattern's thread tells.
pub(crate) struct News {
    /// Which pattern's: names may come again.
    pub(crate) number: u64,
    pub(crate) what: What,
}

/// What became of an interface.
pub(crate) enum What {
    /// It is there, and received; the number of this opening.
    Came(Box<OpenSource>, u64),
    /// The source of this name has none any more.
    Went(String),
    /// The sources of all interfaces that were there at first have been told of.
    Settled,
}

/// What a pattern's thread is told.
pub(crate) enum Order {
    /// A source that is none of its own has this name.
    Taken(String),
    /// No such source has it any more.
    Free(String),
    /// The source of this opening is not there any more, or never was. What it was of may be received again.
    LetGo(u64),
    /// The same, but not at once: it could not be started.
    Failed(u64),
}

/// A pattern's thread, which ends when this is dropped.
pub(crate) struct Watching {
    stop: Arc<OwnedFd>,
    orders: Sender<Order>,
    ordered: Arc<OwnedFd>,
}

impl Watching {
    pub(crate) fn tell(&self, order: Order) {
        // A thread that ended wants no more.
        let _ = self.orders.send(order);
        event::ring(&self.ordered);
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        event::ring(&self.stop);
    }
}

impl OpenPattern {
    fn open(spec: &SourceSpec, means: &Means) -> Result<Self, SourceError> {
        let (interfaces, most) = spec.members()?;
        spec.check(means)?;
        let namespace = spec.namespace(means)?.map(Arc::new);
        let mut pattern = Self {
            spec: spec.clone(),
            interfaces,
            most,
            means: means.clone(),
            namespace,
            links: None,
        };
        // A namespace that does not exist may come.
        if pattern
            .namespace
            .as_ref()
            .is_none_or(|it| it.id().is_some())
        {
            pattern.links = Some(pattern.watch()?);
        }
        Ok(pattern)
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        self.spec.name()
    }

    /// Whether the kernel may drop frames before its sources.
    pub(crate) fn may_drop_early(&self) -> bool {
        self.spec.may_drop_early()
    }

    /// Starts its thread, which has this number in what it tells and rings the bell then. Others have the names that are taken.
    pub(crate) fn start(
        self,
        number: u64,
        taken: BTreeSet<String>,
        tell: Sender<News>,
        bell: Arc<OwnedFd>,
    ) -> io::Result<Watching> {
        let (mut watcher, watching) = self.watcher(number, taken, tell, bell)?;
        let thread = thread::Builder::new().name("vnplug-links".into());
        thread.spawn(move || watcher.run())?;
        Ok(watching)
    }

    fn watcher(
        self,
        number: u64,
        taken: BTreeSet<String>,
        tell: Sender<News>,
        bell: Arc<OwnedFd>,
    ) -> io::Result<(Watcher, Watching)> {
        let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new);
        let (stop, ordered) = (new()?, new()?);
        let (sender, orders) = channel();
        let watcher = Watcher {
            pattern: self,
            number,
            tell,
            bell,
            stop: Arc::clone(&stop),
            orders,
            ordered: Arc::clone(&ordered),
            taken,
            openings: 0,
            lost: None,
            members: BTreeMap::new(),
            failed: BTreeMap::new(),
            is_settled: false,
            check_at: Instant::now(),
            told_full: None,
            told: String::new(),
        };
        let watching = Watching {
            stop,
            orders: sender,
            ordered,
        };
        Ok((watcher, watching))
    }

    /// Opens the source of an interface that matches.
    fn open_member(&self, interface: &str) -> Result<OpenSource, SourceError> {
        let part = self.interfaces.part(interface).unwrap_or_default();
        let spec = self.spec.member(part, interface)?;
        spec.open(&self.means)
    }

    /// Listens where its interfaces are.
    fn watch(&self) -> Result<(Links, Option<Id>), SourceError> {
        let failed = |cause| SourceError::io("cannot hear of interfaces", cause);
        let Some(namespace) = &self.namespace else {
            return Ok((Links::watch().map_err(failed)?, None));
        };
        let (links, id) = namespace.within(Links::watch)?;
        Ok((links.map_err(failed)?, Some(id)))
    }
}

/// A pattern's thread.
struct Watcher {
    pattern: OpenPattern,
    number: u64,
    tell: Sender<News>,
    bell: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
    orders: Receiver<Order>,
    /// Rung when there are orders.
    ordered: Arc<OwnedFd>,
    /// Names that sources have which are not its own.
    taken: BTreeSet<String>,
    /// How many sources it opened.
    openings: u64,
    /// It hears nothing, as listening failed: in which namespace it did, and when it is tried again. Its sources stay.
    lost: Option<(Option<Id>, Instant)>,
    /// Its sources by the interface's number.
    members: BTreeMap<i32, Member>,
    /// Interfaces that cannot be received, how often they were tried, and when they are again.
    failed: BTreeMap<i32, (u32, Instant)>,
    /// The interfaces that were there at first are its sources.
    is_settled: bool,
    /// When it is looked whether the namespace is the same.
    check_at: Instant,
    /// When it was told that there are more interfaces than it may have sources.
    told_full: Option<Instant>,
    /// Why it hears of no interfaces, as the log has it.
    told: String,
}

/// A source of a pattern.
struct Member {
    interface: String,
    source: String,
    /// Which opening it was.
    opening: u64,
}

impl Watcher {
    fn run(&mut self) {
        while self.sleep() {
            self.find_namespace();
            self.listen_again();
            if self.settle() && !self.is_settled {
                self.is_settled = true;
                self.say(What::Settled);
            }
        }
    }

    /// Until something may have changed; false if it is to end.
    fn sleep(&self) -> bool {
        let until = |at: Instant| at.saturating_duration_since(Instant::now()).max(MIN_PAUSE);
        !self.stops_within(self.wakes_at().map(until), true)
    }

    /// When something is due that nobody tells of.
    fn wakes_at(&self) -> Option<Instant> {
        let check = match self.pattern.namespace {
            Some(_) => Some(self.check_at),
            None => self.lost.map(|(_, at)| at),
        };
        // As long as there is no room, or nothing is heard, none of them is tried.
        let tries = self.members.len() < self.pattern.most && self.lost.is_none();
        let again = self.failed.values().map(|(_, at)| *at);
        again.filter(|_| tries).chain(check).min()
    }

    /// Whether it is to end, in this time at most; with `news` it returns when there are some.
    fn stops_within(&self, pause: Option<Duration>, news: bool) -> bool {
        let pause = pause.map(|pause| Timespec {
            tv_sec: pause.as_secs() as i64,
            tv_nsec: i64::from(pause.subsec_nanos()),
        });
        let mut fds = vec![PollFd::new(&*self.stop, PollFlags::IN)];
        if news {
            fds.push(PollFd::new(&*self.ordered, PollFlags::IN));
        }
        if let Some((links, _)) = self.pattern.links.as_ref().filter(|_| news) {
            fds.push(PollFd::new(links, PollFlags::IN));
        }
        // An error (a signal) is an early return.
        let _ = poll(&mut fds, pause.as_ref());
        !fds[0].revents().is_empty()
    }

    /// Looks whether the namespace is the one in which it listens, and if not, for the one that is there now.
    fn find_namespace(&mut self) {
        let now = Instant::now();
        let Some(namespace) = &self.pattern.namespace else {
            return;
        };
        if now < self.check_at {
            return;
        }
        self.check_at = now + CHECK;
        let id = namespace.id();
        let hears = self.pattern.links.as_ref().map(|(_, id)| *id);
        let had = hears.or(self.lost.map(|(id, _)| id));
        if hears == Some(id) {
            return;
        }
        if had.is_some_and(|had| had != id) {
            log::warn!(
                target: "source",
                "pattern {:?}: network namespace {:?} is gone",
                self.pattern.name(),
                namespace.name()
            );
            // So that it can end.
            (self.pattern.links, self.lost) = (None, None);
            if !namespace.may_return() {
                self.pattern.namespace = None;
                return;
            }
        }
        if id.is_some() {
            self.listen();
        }
    }

    /// Listens again after it failed; in a network namespace of its own that is seen to when this is looked for.
    fn listen_again(&mut self) {
        let is_due = self.lost.is_some_and(|(_, at)| Instant::now() >= at);
        if is_due && self.pattern.namespace.is_none() {
            self.listen();
        }
    }

    fn listen(&mut self) {
        match self.pattern.watch() {
            Ok(links) => (self.pattern.links, self.lost) = (Some(links), None),
            Err(error) => {
                if let Some((_, at)) = &mut self.lost {
                    *at = Instant::now() + AGAIN;
                }
                self.say_deaf(error.to_string());
            }
        }
    }

    /// Says why it hears of no interfaces, once.
    fn say_deaf(&mut self, error: String) {
        if error != self.told {
            log::warn!(target: "source", "pattern {:?}: {error}; it is tried again", self.pattern.name());
            self.told = error;
        }
    }

    /// Does as it was told.
    fn obey(&mut self) {
        event::clear(&self.ordered);
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Taken(name) => drop(self.taken.insert(name)),
                Order::Free(name) => drop(self.taken.remove(&name)),
                Order::LetGo(opening) => drop(self.let_go(opening)),
                Order::Failed(opening) => {
                    if let Some(index) = self.let_go(opening) {
                        self.failed.insert(index, (1, Instant::now() + AGAIN));
                    }
                }
            }
        }
    }

    /// Forgets the source of this opening, unless it is gone; the number of its interface.
    fn let_go(&mut self, opening: u64) -> Option<i32> {
        let found = self.members.iter().find(|(_, it)| it.opening == opening);
        let index = found.map(|(index, _)| *index)?;
        self.members.remove(&index);
        Some(index)
    }

    /// Opens and tells until the sources are as the interfaces are; false if these are not known yet, it is to end, or other things
    /// are due.
    fn settle(&mut self) -> bool {
        loop {
            // Each opening takes a while, in which more may change.
            self.obey();
            if !self.hear() {
                return false;
            }
            let wanted = self.wanted();
            self.part(&wanted);
            let now = Instant::now();
            let is_due = |index: &i32| self.failed.get(index).is_none_or(|(_, at)| now >= *at);
            let missing: Vec<_> = wanted
                .into_iter()
                .filter(|(index, _)| !self.members.contains_key(index) && is_due(index))
                .collect();
            if missing.is_empty() {
                return true;
            }
            let room = self.pattern.most.saturating_sub(self.members.len());
            if room == 0 {
                self.say_full(missing.len());
                return true;
            }
            let next: Vec<_> = missing.into_iter().take(room.min(AT_ONCE)).collect();
            // Whoever starts the daemon waits for the first ones.
            let pace = match self.is_settled {
                true => PACE * next.len() as u32,
                false => Duration::ZERO,
            };
            self.receive(next);
            let pause = pace.saturating_sub(now.elapsed());
            if self.stops_within(Some(pause), false) || self.must_check() {
                return false;
            }
        }
    }

    /// Whether it is to be looked whether the namespace is the same.
    fn must_check(&self) -> bool {
        self.pattern.namespace.is_some() && Instant::now() >= self.check_at
    }

    /// Takes the kernel's news; whether the interfaces are known as they are.
    fn hear(&mut self) -> bool {
        let Some((links, _)) = &mut self.pattern.links else {
            return self.lost.is_none();
        };
        let read = links.read();
        self.heard(read)
    }

    fn heard(&mut self, read: io::Result<bool>) -> bool {
        match read {
            Ok(true) => {
                self.told.clear();
                true
            }
            Ok(false) => false,
            Err(error) => {
                let id = self.pattern.links.take().and_then(|(_, id)| id);
                self.lost = Some((id, Instant::now() + AGAIN));
                self.say_deaf(format!("it hears of no interfaces: {error}"));
                false
            }
        }
    }

    /// The interfaces that match, by number, but those whose names other sources have.
    fn wanted(&self) -> BTreeMap<i32, String> {
        let all = self.pattern.links.iter().flat_map(|(links, _)| links.all());
        let is_free = |part| !self.taken.contains(&self.pattern.spec.member_name(part));
        let matches = all.filter(|(_, it)| {
            let part = self.pattern.interfaces.part(&it.name);
            it.hardware == libc::ARPHRD_ETHER && part.is_some_and(is_free)
        });
        matches
            .map(|(index, it)| (*index, it.name.clone()))
            .collect()
    }

    /// Tells of members whose interfaces are gone or have other names.
    fn part(&mut self, wanted: &BTreeMap<i32, String>) {
        self.failed.retain(|index, _| wanted.contains_key(index));
        let is_gone =
            |index: &i32, interface: &str| wanted.get(index).is_none_or(|now| now != interface);
        let mut gone = self
            .members
            .iter()
            .filter(|(index, it)| is_gone(index, &it.interface));
        if gone.next().is_none() {
            return;
        }
        // Their last frames come when their blocks' time is over.
        let timeout = self.pattern.spec.block_timeout_ms();
        let drain = 2 * Duration::from_millis(timeout.into()) + DRAIN_MARGIN;
        self.stops_within(Some(drain), false);
        let gone = self
            .members
            .extract_if(.., |index, it| is_gone(index, &it.interface));
        let gone: Vec<_> = gone.map(|(_, it)| it.source).collect();
        for source in gone {
            self.say(What::Went(source));
        }
    }

    /// Opens the sources of these interfaces.
    fn receive(&mut self, interfaces: Vec<(i32, String)>) {
        let pattern = &self.pattern;
        let opened = at_once::each(interfaces.iter(), |(_, interface)| {
            pattern.open_member(interface)
        });
        for ((index, interface), opened) in interfaces.into_iter().zip(opened) {
            let opened = opened.unwrap_or_else(|| {
                let what = format!("the daemon failed to open {interface:?}, which is a bug");
                Err(SourceError::new(what))
            });
            self.received(index, interface, opened);
        }
    }

    /// Notes what became of an interface that was to be received.
    fn received(&mut self, index: i32, interface: String, opened: Result<OpenSource, SourceError>) {
        match opened {
            Ok(opened) => {
                self.failed.remove(&index);
                self.openings += 1;
                let opening = self.openings;
                let source = opened.name().to_owned();
                let member = Member {
                    interface,
                    source,
                    opening,
                };
                self.members.insert(index, member);
                self.say(What::Came(Box::new(opened), opening));
            }
            Err(error) => {
                let again = Instant::now() + AGAIN;
                let (times, at) = self.failed.entry(index).or_insert((0, again));
                (*times, *at) = (*times + 1, again);
                // At first it may be gone again, which the kernel will tell.
                if *times == 2 {
                    peer_log!(
                        log::Level::Warn,
                        "source",
                        "pattern {:?}: {error}",
                        self.pattern.name()
                    );
                }
            }
        }
    }

    fn say_full(&mut self, left: usize) {
        if self.told_full.is_some_and(|at| at.elapsed() < TOLD) {
            return;
        }
        self.told_full = Some(Instant::now());
        log::warn!(
            target: "source",
            "pattern {:?} has {} sources, which is all that it may have: {left} more interfaces are not received; \
             members=N allows more",
            self.pattern.name(),
            self.members.len()
        );
    }

    fn say(&self, what: What) {
        let number = self.number;
        // The loop is there as long as the process.
        let _ = self.tell.send(News { number, what });
        event::ring(&self.bell);
    }
}

/// How often it is looked whether a namespace is the same.
const CHECK: Duration = Duration::from_millis(500);
/// Until an interface that could not be received is tried again, and listening that failed.
const AGAIN: Duration = Duration::from_secs(2);
/// How often it is told that there are more than it may have.
const TOLD: Duration = Duration::from_secs(60);
/// Added to twice the block timeout: older kernels keep it in ticks of up to 10 ms.
const DRAIN_MARGIN: Duration = Duration::from_millis(30);
/// For each opening, after the first ones: a hundred interfaces in a second at most.
///
/// NB: for each the kernel loads one program or two, and frees those of sources that went in its own workers. Where somebody loads
/// them as fast as it goes, and the workers are starved, it does not come to freeing, and may come to a stop.
const PACE: Duration = Duration::from_millis(10);
const MIN_PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use vnplug_testing::Deadline;

    use super::*;

    #[test]
    fn of_those_that_cannot_be_opened_the_first_is_told_though_a_later_one_failed_sooner() {
        let specs = ["slow", "fast"].map(|it| it.parse::<SourceSpec>().unwrap());
        let (failed, deadline) = (AtomicBool::new(false), Deadline::new("the other fails"));
        let opened = Opened::all(&specs, |spec| {
            match spec.name() {
                "fast" => failed.store(true, Ordering::Relaxed),
                _ => {
                    while !failed.load(Ordering::Relaxed) {
                        deadline.check();
                        thread::sleep(MIN_PAUSE);
                    }
                    // The other may still have to tell of it.
                    thread::sleep(20 * MIN_PAUSE);
                }
            }
            Err(spec.name().to_owned())
        });
        assert_eq!(opened.err().as_deref(), Some("slow"));
    }

    #[test]
    fn a_pattern_that_hears_nothing_keeps_its_sources_and_listens_again() {
        let spec: SourceSpec = "nosuchinterface*".parse().unwrap();
        let (interfaces, most) = spec.members().unwrap();
        let pattern = OpenPattern {
            spec,
            interfaces,
            most,
            means: Means::default(),
            namespace: None,
            links: Some((Links::watch().unwrap(), None)),
        };
        let (tell, news) = channel();
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (mut watcher, _watching) = pattern.watcher(1, BTreeSet::new(), tell, bell).unwrap();
        let member = Member {
            interface: "nosuchinterface0".into(),
            source: "nosuchinterface0".into(),
            opening: 1,
        };
        watcher.members.insert(i32::MAX, member);
        // Another interface that could not be received, and would be tried now.
        watcher.failed.insert(i32::MAX - 1, (1, Instant::now()));
        // What asking for the list says where memory is short.
        let before = Instant::now();
        assert!(!watcher.heard(Err(io::Error::from_raw_os_error(libc::ENOBUFS))));
        watcher.listen_again();
        assert!(!watcher.settle());
        assert!(watcher.pattern.links.is_none() && watcher.members.len() == 1);
        // It sleeps until it listens again.
        let wakes_at = watcher.wakes_at().unwrap();
        assert!(wakes_at >= before + AGAIN, "{wakes_at:?}");
        watcher.lost = Some((None, Instant::now()));
        watcher.listen_again();
        assert!(watcher.pattern.links.is_some() && watcher.lost.is_none());
        assert!(news.try_recv().is_err());
        // What is gone by then is told when it is known.
        let deadline = Deadline::new("the interfaces are known");
        while !watcher.settle() {
            deadline.check();
            thread::sleep(MIN_PAUSE);
        }
        assert!(matches!(news.try_recv().unwrap().what, What::Went(_)));
    }
}
